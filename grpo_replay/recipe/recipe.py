"""The complete recipe: all sections in data order, and the values derived from several of them; and
the replay section of a trainer that has no recipe. Both are checked for contradictions.

The sections themselves: `input_sections`, `sampling_sections`, `grpo_sections`, `run_sections`.
"""

import re
from typing import TYPE_CHECKING, Any, final

from pydantic import Field, field_validator, model_validator

from grpo_replay.recipe.base import Section
from grpo_replay.recipe.contradictions import find_contradictions, replay_contradictions
from grpo_replay.recipe.grpo_sections import (
    AdvantageSection,
    BatchSection,
    LossSection,
    ReplaySection,
    RewardSection,
)
from grpo_replay.recipe.input_sections import ModelSection, PromptsSection
from grpo_replay.recipe.run_sections import (
    CheckpointSection,
    EngineSection,
    EvalSection,
    OptimizerSection,
    RunSection,
    TrackingSection,
)
from grpo_replay.recipe.sampling_sections import SamplingSection

CHUNK_LOGITS_BYTES = 160 * 2**20
"""fp32 logits of a chunk of the output head, if the recipe has no number of tokens."""
CHUNK_TOKENS = (64, 1024)
"""Its fewest tokens, of which it has a multiple, and its most."""

PACKING_ATTENTION = ("flash_attention_2", "flash_attention_3", "flex_attention")
"""Their cost follows from the lengths of the rows of a pack. Others mask all pairs of tokens."""


class RecipeSections(Section):
    """Sections that are each valid alone. `Recipe` also checks them against each other."""

    name: str = "unnamed"
    """Name of the recipe. The stem of its file unless set."""
    model: ModelSection = Field(default_factory=ModelSection)
    prompts: PromptsSection = Field(default_factory=PromptsSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    advantage: AdvantageSection = Field(default_factory=AdvantageSection)
    replay: ReplaySection = Field(default_factory=ReplaySection)
    batch: BatchSection = Field(default_factory=BatchSection)
    loss: LossSection = Field(default_factory=LossSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    run: RunSection = Field(default_factory=RunSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if name in ("", ".", "..") or len(name) > 100 or re.search(r"[/\\\x00-\x1f\x7f]", name):
            raise ValueError(
                "it becomes part of a run directory's name: 1 to 100 characters without slashes "
                "and control characters"
            )
        return name

    @model_validator(mode="after")
    def _heads_are_alike(self) -> "RecipeSections":
        self.model._fp32_head = self.sampling.vllm.head_dtype == "float32"
        return self

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts generated per training step: prompts times G."""
        return self.sampling.rollouts_per_step

    @property
    def longest_sequence(self) -> int:
        """Maximum prompt length plus maximum completion length, in training or evaluation."""
        evaluated = self.eval.max_completion_length or 0
        completion = max(self.sampling.max_completion_length, evaluated)
        return self.prompts.max_prompt_length + completion

    @property
    def replays(self) -> bool:
        """True if this recipe draws from the buffer."""
        return self.replay.replays

    @property
    def draws_per_step(self) -> int:
        """Draws of a training step. A `buffer_only` step makes one for each optimizer update, which
        is then the unit of ages; other steps make one at most, and ages are in steps."""
        if not (self.replays and self.replay.stores_first):
            return 1
        return max(1, self.batch.updates_of(self.replay.ratio * self.rollouts_per_step))

    def zero_stage(self, ranks: int) -> int:
        """The ZeRO stage on a number of ranks: `engine.zero_stage`, or what `auto` stands for."""
        engine = self.engine
        if engine.zero_stage != "auto":
            return engine.zero_stage
        if ranks > 1 or engine.offload_parameters:
            return 3
        return 2 if engine.offload_optimizer or self.model.dtype == "bfloat16" else 0

    def logprob_chunk_tokens(self, vocabulary: int) -> int:
        """Completion tokens in a chunk of the output head of a model with this many words:
        `engine.logprob_chunk_tokens`, or its default by memory."""
        if self.engine.logprob_chunk_tokens is not None:
            return self.engine.logprob_chunk_tokens
        fewest, most = CHUNK_TOKENS
        tokens = CHUNK_LOGITS_BYTES // (4 * vocabulary)
        return min(max(tokens // fewest * fewest, fewest), most)

    def packs(self, on_cuda: bool) -> bool:
        """Whether rows are packed: `batch.packing`, or its default for the attention. The engine
        also needs a model that keeps them apart."""
        if self.batch.packing is not None:
            return self.batch.packing
        return on_cuda and self.model.attn_implementation in PACKING_ATTENTION

    @property
    def logprob_gap_limit(self) -> float:
        """`sampling.logprob_gap_limit` in nats, or its default for this recipe's precisions."""
        if self.sampling.logprob_gap_limit is not None:
            return self.sampling.logprob_gap_limit
        exact = self.model.dtype == "float32" and self.sampling.vllm.dtype != "bfloat16"
        return 0.01 if exact else 0.1

    @property
    def sampled_dtype(self) -> str:
        """Precision that the backend samples in."""
        if self.sampling.backend != "hf" and self.sampling.vllm.dtype != "auto":
            return self.sampling.vllm.dtype
        return self.model.dtype


class Recipe(RecipeSections):
    """All settings of a run, valid together."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "Recipe":
        if problems := find_contradictions(self):
            raise ValueError("; ".join(problems))
        return self


@final
class ReplayConfig(ReplaySection):
    """The settings of a replay buffer: the keys of `replay` in docs/recipe.md.

    `ReplayConfig.preset(name, **changes)` has the values of a preset, and `changes`. A bad value,
    an unknown key or a contradiction raises pydantic's ValidationError, which is a ValueError.
    """

    if TYPE_CHECKING:

        @classmethod  # type: ignore[misc]
        def preset(cls, name: str, **changes: Any) -> "ReplayConfig": ...  # type: ignore[override]

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "ReplayConfig":
        if problems := list(replay_contradictions(self)):
            raise ValueError("; ".join(problems))
        return self


def _preset(cls: type[ReplayConfig], name: str, **changes: Any) -> ReplayConfig:
    """The settings of the preset `name`: grpo, uniform, group_std, ours or fifo."""
    return cls.model_validate({**changes, "preset": name})


# Set here, because the field of an instance has the same name.
ReplayConfig.preset = classmethod(_preset)  # type: ignore[method-assign, assignment]
