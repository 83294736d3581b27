"""Make the base model of a tiny task.

    python -m grpo_replay.tiny.make_base --output DIR [--task tiny-long]

Trains a model from scratch, with a fixed seed, on the worked answers of an imperfect pupil
(`pupil.py`, `long_pupil.py`) to problems that are not held out. Takes minutes on one thread. The
output folder loads with `AutoModelForCausalLM.from_pretrained`; its `recipe.json` records all
constants and the SHA-256 of the weights. The same machine gives the same bits. Another type of
processor may round differently, and the weights then differ in their last digits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from grpo_replay.tiny.makers import MAKERS, Maker, WarmUp
from grpo_replay.tiny.problems import PROMPT_TEMPLATE
from grpo_replay.tiny.tokenizer import EOS, PAD


def build_model(maker: Maker) -> Qwen3ForCausalLM:
    """An untrained fp32 model with tied embeddings. Weights come from torch's random state."""
    pad, eos = maker.vocabulary.index(PAD), maker.vocabulary.index(EOS)
    config = Qwen3Config(
        vocab_size=len(maker.vocabulary),
        **asdict(maker.warm_up.architecture),
        tie_word_embeddings=True,
        pad_token_id=pad,
        eos_token_id=eos,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad, do_sample=True)
    return model


class Lessons:
    """Batches of worked answers to problems that are not held out, as token ids."""

    def __init__(self, maker: Maker) -> None:
        self.tokenizer = maker.tokenizer()
        self.pupil = maker.pupil(maker.warm_up.habits, np.random.default_rng(maker.warm_up.seed))

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels, both int64 (size, longest). Labels are -100 outside the answers."""
        rows = [
            self.tokenizer([prompt, answer + EOS])["input_ids"]
            for prompt, answer in self.pupil.lessons(size)
        ]
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.full((size, longest), self.tokenizer.pad_token_id)
        labels = torch.full((size, longest), -100)
        for i, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : end] = torch.tensor(answer)
        return ids, labels


def learning_rate_factor(step: int, warm_up: WarmUp) -> float:
    """Factor in [0, 1] of the learning rate at a step that counts from 0."""
    rise = warm_up.learning_rate_rise_steps
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (warm_up.steps - rise)))


def make_base(maker: Maker, report_every: int = 250) -> Qwen3ForCausalLM:
    """The model after the warm-up, in evaluation mode."""
    warm_up = maker.warm_up
    torch.manual_seed(warm_up.seed)
    model = build_model(maker).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), warm_up.learning_rate, warm_up.betas, weight_decay=warm_up.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, warm_up)
    )
    lessons = Lessons(maker)
    started = time.process_time()
    for step in range(1, warm_up.steps + 1):
        ids, labels = lessons.batch(warm_up.batch_size)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), warm_up.gradient_clip)
        optimizer.step()
        schedule.step()
        if step % report_every == 0:
            seconds = time.process_time() - started
            print(f"step {step:5d}  loss {loss.item():.4f}  {seconds:.0f} s of CPU", flush=True)
    return model.eval()


def model_card(model: Qwen3ForCausalLM, maker: Maker) -> str:
    """The README of the model folder."""
    parameters = sum(p.numel() for p in model.parameters())
    command = "python -m grpo_replay.tiny.make_base --output DIR"
    if maker.recipe != "tiny":
        command += f" --task {maker.recipe}"
    prompt, completion = maker.example
    what = _wrapped(
        f"A Qwen3-architecture model of {parameters:,} parameters that answers arithmetic problems "
        "the way an imperfect pupil does. It is the starting point of "
        f"`grpo-replay train {maker.recipe}` and has no other use. Most of its mistakes are "
        f"systematic ({maker.mistakes}), so that reinforcement learning can correct them."
    )
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# The {maker.recipe} base of grpo-replay

{what}

- Prompt: `{PROMPT_TEMPLATE}`, for example `{prompt}`. No chat template.
- Completion: brief work, then `\\boxed{{...}}`, then `{EOS}`; for example `{completion}{EOS}`.
- Vocabulary: {len(maker.vocabulary)} tokens, one for a character, one for `\\boxed{{`.
- Data: problems generated by `{maker.problems}`, none of the held-out ones.
{_wrapped(f"- Made by `{command}` with the constants in `recipe.json`.")}
"""


def _wrapped(text: str) -> str:
    """Lines of at most 100 characters; all but the first of a list item are indented."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_on_hyphens=False)


def save_base(model: Qwen3ForCausalLM, maker: Maker, folder: Path) -> None:
    """Write the model, its tokenizer, its card and `recipe.json` into a folder."""
    model.save_pretrained(folder)
    maker.tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text(model_card(model, maker))
    warm_up = asdict(maker.warm_up)
    record = {"warm_up": warm_up, "model_safetensors_sha256": weights_sha256(folder)}
    (folder / "recipe.json").write_text(json.dumps(record, indent=2) + "\n")


def weights_sha256(folder: Path) -> str:
    """SHA-256 of a model folder's weights, hexadecimal."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--task", choices=MAKERS, default="tiny", help="whose base (tiny)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    maker = MAKERS[options.task]
    save_base(make_base(maker), maker, options.output)
    print(f"wrote {options.output}: model.safetensors {weights_sha256(options.output)}")


if __name__ == "__main__":
    main()
