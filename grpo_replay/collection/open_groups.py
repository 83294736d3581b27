"""Groups that a collector works on: their members, and what is known of each."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_replay.collection.messages import (
    LOGPROBS,
    TOKEN_IDS,
    Drop,
    Group,
    Place,
    Row,
    Span,
    pack,
)
from grpo_replay.sampling.server.dispatcher import Job
from grpo_replay.types import Completion, Prompt, Verdict


@dataclass(frozen=True, slots=True)
class Sampled:
    """A finished completion, not graded yet."""

    completion: Completion
    spans: tuple[Span, ...]
    text: str


@dataclass(slots=True, eq=False, kw_only=True)
class Member(Job):
    """One completion of a group."""

    group: "OpenGroup"
    index: int
    sampled: Sampled | None = None
    verdict: Verdict | None = None


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group of which not all members are graded."""

    place: Place
    prompt: Prompt
    started: float
    members: list[Member] = field(default_factory=list)
    closed: bool = False

    @property
    def is_sampled(self) -> bool:
        return all(member.sampled for member in self.members)

    @property
    def is_graded(self) -> bool:
        return all(member.verdict for member in self.members)

    @property
    def grading(self) -> int:
        """Members that have finished and have no verdict yet."""
        return sum(m.sampled is not None and m.verdict is None for m in self.members)

    def finished(self) -> tuple[int, int]:
        """Rollouts and tokens of the members that have finished."""
        lengths = [len(m.sampled.completion.token_ids) for m in self.members if m.sampled]
        return len(lengths), sum(lengths)

    def oldest_version(self) -> int | None:
        """The oldest version that has sampled for the group, as far as is known."""
        versions = [m.sampled.spans[0][0] if m.sampled else m.version for m in self.members]
        return min((version for version in versions if version is not None), default=None)

    def drop(self, reason: Any) -> Drop:
        return Drop(*self.place, reason, *self.finished())

    def complete(self, finished: float) -> Group:
        """The message of a graded group."""
        return Group(
            epoch=self.place[0],
            prompt_index=self.place[1],
            attempt=sum(member.tries for member in self.members),
            prompt_id=self.prompt.prompt_id,
            prompt_token_ids=pack(self.prompt.token_ids, TOKEN_IDS),
            rows=tuple(_row(member) for member in self.members),
            started=self.started,
            finished=finished,
        )


def _row(member: Member) -> Row:
    sampled, verdict = member.sampled, member.verdict
    assert sampled is not None and verdict is not None, "the group is not graded"
    completion = sampled.completion
    return Row(
        token_ids=pack(completion.token_ids, TOKEN_IDS),
        logprobs=pack(completion.sampler_logprobs, LOGPROBS),
        spans=sampled.spans,
        text=sampled.text,
        reward=None if verdict.reward is None else float(np.float32(verdict.reward)),
        verdict=verdict.status,
        scores=verdict.scores,
        finish_reason=completion.finish_reason,
    )
