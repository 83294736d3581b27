"""Who samples what, and the graded completions of all ranks on rank 0."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_replay.distributed.comm import Comm
from grpo_replay.types import Completion, GenerationRequest, RequestKey, Verdict


class Graded(NamedTuple):
    """A completion with its text and its verdict."""

    completion: Completion
    text: str
    verdict: Verdict


def share_of_rank(
    requests: Sequence[GenerationRequest], rank: int, ranks: int
) -> Sequence[GenerationRequest]:
    """The requests that one rank samples: a run of consecutive ones, so that requests of one prompt
    stay together. Numbers of requests differ by at most one between ranks."""
    count = len(requests)
    return requests[count * rank // ranks : count * (rank + 1) // ranks]


def gather_graded(comm: Comm, mine: Mapping[RequestKey, Graded]) -> dict[RequestKey, Graded]:
    """All ranks' completions by key, on rank 0; empty on other ranks. Collective."""
    if comm.world_size == 1:
        return dict(mine)
    import msgspec  # which one rank does without

    gathered = comm.gather(msgspec.msgpack.encode(list(mine.values()), enc_hook=_packed))
    if gathered is None:
        return {}
    decoder = msgspec.msgpack.Decoder(list[Graded], dec_hook=_unpacked)
    graded = [each for payload in gathered for each in decoder.decode(payload)]
    return {each.completion.key: each for each in graded}


def _packed(array: Any) -> tuple[str, bytes]:
    return array.dtype.str, array.tobytes()


def _unpacked(_: type, packed: Any) -> np.ndarray:
    kind, values = packed
    return np.frombuffer(values, kind)
