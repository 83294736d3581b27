"""No sampler: for a run that is replayed from its journal."""

from collections.abc import Iterator, Sequence

from grpo_replay.engine.models import load_tokenizer, section_at
from grpo_replay.engine.stop_tokens import find_stop_tokens
from grpo_replay.errors import SamplerError
from grpo_replay.recipe import Recipe
from grpo_replay.types import Completion, GenerationRequest, NamedTensors


class NoSampler:
    """Implements `sampling.sampler_protocol.Sampler` without sampling. Weights are not taken
    over: no rank gathers them."""

    def __init__(self, stop_token_ids: Sequence[int]) -> None:
        self.policy_version = 0
        self.stop_token_ids = tuple(stop_token_ids)

    @classmethod
    def open(cls, recipe: Recipe, model_path: str) -> "NoSampler":
        section = section_at(recipe.model, model_path)
        return cls(find_stop_tokens(recipe, section, load_tokenizer(section)))

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Raises SamplerError."""
        raise SamplerError(
            "a run that replays a journal (sampling.collection.replay_journal) samples nothing: "
            "its journal has no further step; lower run.steps"
        )

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.policy_version = version

    def sleep(self, keep_weights: bool = True) -> None:
        pass

    def close(self) -> None:
        pass
