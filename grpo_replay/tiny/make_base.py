"""Make the base model of the tiny task.

    python -m grpo_replay.tiny.make_base --output DIR

Trains a model from scratch, with a fixed seed, on the worked answers of an imperfect pupil
(`pupil.py`) to all problems that are not held out. Takes a few minutes on one thread. The output
folder loads with `AutoModelForCausalLM.from_pretrained`; its `recipe.json` records all constants
and the SHA-256 of the weights. The same machine gives the same bits. Another type of processor may
round differently, and the weights then differ in their last digits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from grpo_replay.tiny.problems import BENCHMARKS, PROMPT_TEMPLATE, operand_pool, problem_row
from grpo_replay.tiny.pupil import Habits, Pupil
from grpo_replay.tiny.tokenizer import EOS, PAD, VOCABULARY, build_tokenizer


@dataclass(frozen=True)
class Architecture:
    """Shape of the Qwen3 model."""

    hidden_size: int = 64
    intermediate_size: int = 192
    num_hidden_layers: int = 3
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 128
    rope_theta: float = 10_000.0
    initializer_range: float = 0.05


@dataclass(frozen=True)
class WarmUp:
    """All constants of the supervised warm-up."""

    seed: int = 1
    steps: int = 1600
    batch_size: int = 128
    learning_rate: float = 3e-3
    learning_rate_rise_steps: int = 100  # linear rise, then half a cosine down to zero
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    gradient_clip: float = 1.0
    habits: Habits = field(default_factory=Habits)
    architecture: Architecture = field(default_factory=Architecture)


def build_model(architecture: Architecture) -> Qwen3ForCausalLM:
    """An untrained fp32 model with tied embeddings. Weights come from torch's random state."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        **asdict(architecture),
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=VOCABULARY.index(EOS), pad_token_id=VOCABULARY.index(PAD), do_sample=True
    )
    return model


class Lessons:
    """Batches of worked answers to problems that are not held out, as token ids."""

    def __init__(self, warm_up: WarmUp) -> None:
        self.rng = np.random.default_rng(warm_up.seed)
        self.pupil = Pupil(warm_up.habits, self.rng)
        self.tokenizer = build_tokenizer(warm_up.architecture.max_position_embeddings)

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels, both int64 (size, longest). Labels are -100 outside the answers."""
        names = self.rng.integers(len(BENCHMARKS), size=size)
        rows = [self._worked_problem(BENCHMARKS[i]) for i in names]
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.full((size, longest), VOCABULARY.index(PAD))
        labels = torch.full((size, longest), -100)
        for i, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : end] = torch.tensor(answer)
        return ids, labels

    def _worked_problem(self, name: str) -> tuple[list[int], list[int]]:
        pool = operand_pool(name)
        operands = pool[self.rng.integers(len(pool))]
        prompt = PROMPT_TEMPLATE.format(problem=problem_row(name, operands)["problem"])
        texts = [prompt, self.pupil.answer(name, operands) + EOS]
        return tuple(self.tokenizer(texts)["input_ids"])


def learning_rate_factor(step: int, warm_up: WarmUp) -> float:
    """Factor in [0, 1] of the learning rate at a step that counts from 0."""
    rise = warm_up.learning_rate_rise_steps
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (warm_up.steps - rise)))


def make_base(warm_up: WarmUp, report_every: int = 250) -> Qwen3ForCausalLM:
    """The model after the warm-up, in evaluation mode."""
    torch.manual_seed(warm_up.seed)
    model = build_model(warm_up.architecture).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), warm_up.learning_rate, warm_up.betas, weight_decay=warm_up.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, warm_up)
    )
    lessons = Lessons(warm_up)
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


def model_card(model: Qwen3ForCausalLM) -> str:
    """The README of the model folder."""
    parameters = sum(p.numel() for p in model.parameters())
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# The tiny base of grpo-replay

A Qwen3-architecture model of {parameters:,} parameters that answers arithmetic problems the way an
imperfect pupil does. It is the starting point of `grpo-replay train tiny` and has no other use.
Most of its mistakes are systematic (forgotten carries, left to right instead of products first,
misremembered products), so that reinforcement learning can correct them.

- Prompt: `{PROMPT_TEMPLATE}`, for example `47+38=`. No chat template.
- Completion: brief work, then `\\boxed{{...}}`, then `{EOS}`; for example `15,8\\boxed{{85}}{EOS}`.
- Vocabulary: {len(VOCABULARY)} tokens, one for a character, one for `\\boxed{{`.
- Data: problems generated by `grpo_replay.tiny.problems`, none of the held-out ones.
- Made by `python -m grpo_replay.tiny.make_base --output DIR` with the constants in `recipe.json`.
"""


def save_base(model: Qwen3ForCausalLM, warm_up: WarmUp, folder: Path) -> None:
    """Write the model, its tokenizer, its card and `recipe.json` into a folder."""
    model.save_pretrained(folder)
    build_tokenizer(warm_up.architecture.max_position_embeddings).save_pretrained(folder)
    (folder / "README.md").write_text(model_card(model))
    record = {"warm_up": asdict(warm_up), "model_safetensors_sha256": weights_sha256(folder)}
    (folder / "recipe.json").write_text(json.dumps(record, indent=2) + "\n")


def weights_sha256(folder: Path) -> str:
    """SHA-256 of a model folder's weights, hexadecimal."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    output = parser.parse_args().output
    torch.set_num_threads(1)
    warm_up = WarmUp()
    save_base(make_base(warm_up), warm_up, output)
    print(f"wrote {output}: model.safetensors {weights_sha256(output)}")


if __name__ == "__main__":
    main()
