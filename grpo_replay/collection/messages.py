"""Messages between the collector and rank 0, and records of the journal. MessagePack, no pickle.

    collector → rank 0    Delivery(body, report): a Group, a Drop, a Failure, or only a report
    rank 0 → collector    Hello, Credit, Version, Cancel, Stop
    journal               Group, Drop, Step, Restart

Arrays travel as bytes: token ids int32, log-probs float32, both little-endian.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from grpo_replay.recipe import Recipe
from grpo_replay.types import Span

TOKEN_IDS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")

PromptPosition = tuple[int, int]
"""(epoch, prompt_index): the position of a prompt in the run's order. Identifies a group."""


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """Settings of a collector process. `run` prefixes the weight labels of this attempt."""

    recipe: Recipe
    run: str
    urls: Sequence[str]
    stop_token_ids: Sequence[int]
    log: Path


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One completion of a group, scored. `reward` is None if it is missing."""

    token_ids: bytes
    logprobs: bytes
    spans: tuple[Span, ...]
    text: str
    reward: float | None
    verdict: str
    scores: tuple[float, ...]
    finish_reason: str

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // TOKEN_IDS.itemsize


class Group(msgspec.Struct, frozen=True, tag="group"):
    """All G completions of one prompt."""

    epoch: int
    prompt_index: int
    prompt_id: str
    prompt_token_ids: bytes
    rows: tuple[Row, ...]

    @property
    def position(self) -> PromptPosition:
        return self.epoch, self.prompt_index

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """A group that will not arrive: cancelled because it would be too old, or lost because a member
    failed too often. `rollouts` and `tokens` count its members that had finished."""

    epoch: int
    prompt_index: int
    reason: Literal["cancelled", "lost"]
    rollouts: int
    tokens: int

    @property
    def position(self) -> PromptPosition:
        return self.epoch, self.prompt_index


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Marks the end of a step's arrivals: `step` saw all records before this one, and no others.

    `arrivals` counts the groups and drops before it. The other fields are the collector's report:
    rollouts and tokens generated in the run so far, and how many of them it still held.
    """

    step: int
    arrivals: int
    generated_rollouts: int
    generated_tokens: int
    held_rollouts: int
    held_tokens: int


class Restart(msgspec.Struct, frozen=True, tag="restart"):
    """Counts rollouts that a collector had not delivered when it ended, as of its last report. They
    are lost; the prompts of their groups are sampled again."""

    rollouts: int
    tokens: int


Record = Group | Drop | Step | Restart
"""A record of a journal."""


class Report(msgspec.Struct, frozen=True):
    """The state of a collector when it sent a message. Counts are since it started.

    `held_*` count finished completions that were not delivered yet, `running` requests, `grading`
    completions without a verdict. `idle_seconds` is the time without a running request, summed over
    the servers in use, `server_seconds` the time that they were in use. `sent` is
    `time.monotonic()`, `first_error` the scorer's first error.
    """

    generated_rollouts: int = 0
    generated_tokens: int = 0
    held_rollouts: int = 0
    held_tokens: int = 0
    started_groups: int = 0
    running: int = 0
    grading: int = 0
    idle_seconds: float = 0.0
    server_seconds: float = 0.0
    sent: float = 0.0
    first_error: str | None = None


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Reports the error that ended the collector. `kind` is the name of its class."""

    kind: str
    message: str


class Delivery(msgspec.Struct, frozen=True):
    """A message to rank 0, sent once. One without a body is sent every second."""

    body: Group | Drop | Failure | None
    report: Report


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Tells a collector where to begin: with the outstanding prompts, then with those from `cursor`
    on, a number of prompts since the start of the run."""

    outstanding: list[PromptPosition]
    cursor: int


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """Limits the groups started after `Hello`; with `finished_only` running ones do not count."""

    groups: int
    finished_only: bool = False


class Version(msgspec.Struct, frozen=True, tag="version"):
    """The policy version that a server confirmed; None if its update failed: do not use it."""

    url: str
    version: int | None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancels running groups that have a token of a version older than this one."""

    older_than: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Ends the collector."""


Command = Hello | Credit | Version | Cancel | Stop
"""A message of rank 0."""

encode = msgspec.msgpack.encode
decode_record = msgspec.msgpack.Decoder(Record).decode  # a record of the journal
decode_delivery = msgspec.msgpack.Decoder(Delivery).decode  # a message of the collector
decode_command = msgspec.msgpack.Decoder(Command).decode  # a message of rank 0
"""The decoders raise msgspec.DecodeError, also for a message with other fields."""


def pack(values: np.ndarray, dtype: np.dtype) -> bytes:
    """Returns an array as little-endian bytes."""
    return values.astype(dtype, copy=False).tobytes()


def unpack(payload: bytes, dtype: np.dtype) -> np.ndarray:
    """Returns the array of `pack`, read-only."""
    return np.frombuffer(payload, dtype)
