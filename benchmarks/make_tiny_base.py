"""Make the base model of a tiny task.

    python benchmarks/make_tiny_base.py --output DIR [--task tiny-long]

Trains a model from scratch, with a fixed seed, on the worked answers of an imperfect pupil
(`tiny_pupil.py`) to problems that are not held out. Takes minutes on one thread. The
output folder loads with `AutoModelForCausalLM.from_pretrained`; its `recipe.json` records all
constants and the SHA-256 of the weights. The same machine gives the same bits. Another type of
processor may round differently, and the weights then differ in their last digits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from tiny_pupil import Habits, LongHabits, LongPupil, Pupil
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_replay.tiny.problems import PROMPT_TEMPLATE

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
BOX = "\\boxed{"
VOCABULARY: tuple[str, ...] = (PAD, EOS, UNKNOWN, BOX, "}", *"0123456789", *"+-*=,;() ")
"""Token of each id. Other characters become `<unk>`."""

CHAT_TEMPLATE = (
    "{{ messages[-1]['content'] }}"
    + "{% if add_generation_prompt %}"
    + PROMPT_TEMPLATE.removeprefix("{problem}")
    + "{% endif %}"
)
"""The last message as a prompt, so that data in chat messages can be tried on the model."""

LONG_VOCABULARY: tuple[str, ...] = (*VOCABULARY, *ascii_lowercase)
"""The same for the long task, which needs letters too."""


def build_tokenizer(
    model_max_length: int, vocabulary: tuple[str, ...] = VOCABULARY
) -> PreTrainedTokenizerFast:
    """A tokenizer that adds no special tokens and decodes exactly the text it encoded."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    every_piece = Regex(r"\\boxed\{|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(every_piece, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=model_max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


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
    habits: Habits | LongHabits = field(default_factory=Habits)
    architecture: Architecture = field(default_factory=Architecture)


@dataclass(frozen=True)
class Maker:
    """One base model. `pupil` takes the habits and a random generator."""

    recipe: str
    warm_up: WarmUp
    vocabulary: tuple[str, ...]
    pupil: Callable[[Any, np.random.Generator], Pupil | LongPupil]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer(self.warm_up.architecture.max_position_embeddings, self.vocabulary)


_TINY = Maker(
    recipe="tiny",
    warm_up=WarmUp(),
    vocabulary=VOCABULARY,
    pupil=Pupil,
)
_LONG = Maker(
    recipe="tiny-long",
    warm_up=WarmUp(
        steps=2400,
        batch_size=16,
        learning_rate=4e-3,
        habits=LongHabits(),
        architecture=Architecture(
            hidden_size=48, intermediate_size=144, max_position_embeddings=512
        ),
    ),
    vocabulary=LONG_VOCABULARY,
    pupil=LongPupil,
)

MAKERS: Mapping[str, Maker] = {maker.recipe: maker for maker in (_TINY, _LONG)}
"""By the name of the recipe that starts from the model."""


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


REPORT_STEPS = 250
"""Steps between two reports of the loss."""


def make_base(maker: Maker) -> Qwen3ForCausalLM:
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
        if step % REPORT_STEPS == 0:
            seconds = time.process_time() - started
            print(f"step {step:5d}  loss {loss.item():.4f}  {seconds:.0f} s of CPU", flush=True)
    return model.eval()


def save_base(model: Qwen3ForCausalLM, maker: Maker, folder: Path) -> None:
    """Write the model, its tokenizer and `recipe.json` into a folder."""
    model.save_pretrained(folder)
    maker.tokenizer().save_pretrained(folder)
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
