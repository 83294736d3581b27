"""The sampler protocol."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from grpo_replay.types import Completion, GenerationRequest, NamedTensors


class Sampler(Protocol):
    """Generates completions with its own copy of the weights.

    `policy_version` is the version of the last complete `load_weights`; versions only increase.
    `stop_token_ids` are the tokens that end a completion, ascending.
    """

    policy_version: int
    stop_token_ids: tuple[int, ...]

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Completions as they finish, in any order, exactly one for each request."""
        ...

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace all weights. Collective: every rank must exhaust `named_tensors`, which gathers
        full tensors one bucket at a time. Tied tensors appear under every name."""
        ...

    def sleep(self, keep_weights: bool = True) -> None:
        """Free device memory until the next `load_weights` or `generate`; may free nothing.

        With `keep_weights` false a `load_weights` must come next: `generate` raises SamplerError
        before it. Weights that are kept may take host memory."""
        ...

    def close(self) -> None:
        """Stop threads and child processes. May be called twice."""
        ...
