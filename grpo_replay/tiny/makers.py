"""What makes each base model: the constants of its warm-up, its tokens, its pupil, its card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from grpo_replay.tiny.long_pupil import LongHabits, LongPupil
from grpo_replay.tiny.pupil import Habits, Pupil
from grpo_replay.tiny.tokenizer import LONG_VOCABULARY, VOCABULARY, build_tokenizer


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
    problems: str  # module with the problems
    mistakes: str  # for the model card
    example: tuple[str, str]  # prompt and completion, for the model card

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer(self.warm_up.architecture.max_position_embeddings, self.vocabulary)


_TINY = Maker(
    recipe="tiny",
    warm_up=WarmUp(),
    vocabulary=VOCABULARY,
    pupil=Pupil,
    problems="grpo_replay.tiny.problems",
    mistakes="forgotten carries, left to right instead of products first, misremembered products",
    example=("47+38=", r"15,8\boxed{85}"),
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
    problems="grpo_replay.tiny.long_problems",
    mistakes="forgotten carries, most often of units that make exactly ten",
    example=("37+28-19b=", r"a37+28=15,6,65;b65-19=6,4,46;\boxed{46}"),
)

MAKERS: Mapping[str, Maker] = {maker.recipe: maker for maker in (_TINY, _LONG)}
"""By the name of the recipe that starts from the model."""
