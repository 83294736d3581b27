"""The sampler protocol, and how one is opened from a recipe."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from grpo_replay.types import Completion, GenerationRequest

if TYPE_CHECKING:
    import torch

    from grpo_replay.distributed import Comm
    from grpo_replay.recipe import Recipe

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]


class Sampler(Protocol):
    """Generates completions with its own copy of the weights.

    `policy_version` is the version of the last complete `load_weights`; versions never go back.
    """

    policy_version: int

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Completions as they finish, in any order, exactly one for each request."""
        ...

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace all weights. Collective: every rank must exhaust `named_tensors`, whose full
        tensors are gathered one bucket at a time. Tied tensors appear under every name."""
        ...

    def sleep(self) -> None:
        """Free device memory until the next `load_weights` or `generate`; may do nothing."""
        ...

    def close(self) -> None:
        """Stop threads and child processes. May be called twice."""
        ...


def open_sampler(
    recipe: "Recipe", model_path: str, comm: "Comm", log_folder: Path | None = None
) -> Sampler:
    """The sampler that `recipe.sampling.backend` names, holding the weights in `model_path`
    (a local folder or hub id) as policy version 0. Servers that it launches log to `log_folder`
    (a temporary folder if None). Collective."""
    backend = recipe.sampling.backend
    if backend == "hf":
        from grpo_replay.backends.hf_sampler import HfSampler

        return HfSampler.open(recipe, model_path)
    if backend == "vllm":
        from grpo_replay.backends.vllm_local import VllmLocalSampler

        return VllmLocalSampler.open(recipe, model_path, comm)
    from grpo_replay.backends.vllm_server import VllmServerSampler

    return VllmServerSampler.open(recipe, model_path, comm, log_folder)
