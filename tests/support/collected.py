"""Groups as a collector would send them, made by hand; prompts and a scorer for collectors."""

from collections.abc import Sequence

import numpy as np

from grpo_replay.collection.messages import LOGPROBS, TOKEN_IDS, Group, Row, pack
from grpo_replay.rewards.scorer import GradingRequest
from grpo_replay.types import Prompt, Span, Verdict

PROMPTS = 6


def row(
    reward: float | None = 1.0,
    tokens: int = 3,
    spans: Sequence[Span] = ((0, 0, 3),),
) -> Row:
    return Row(
        token_ids=pack(np.arange(7, 7 + tokens, dtype=np.int32), TOKEN_IDS),
        logprobs=pack(np.full(tokens, -0.5, dtype=np.float32), LOGPROBS),
        spans=tuple(spans),
        text="text",
        reward=reward,
        verdict="crash" if reward is None else "correct" if reward > 0 else "incorrect",
        scores=() if reward is None else (reward,),
        finish_reason="stop",
    )


def group(
    place: tuple[int, int] = (0, 0),
    version: int = 0,
    rewards: Sequence[float | None] = (1.0, -1.0),
    tokens: int = 3,
) -> Group:
    """A group whose rows were each sampled by one version."""
    return Group(
        epoch=place[0],
        prompt_index=place[1],
        prompt_id=f"p{place[1]}",
        prompt_token_ids=pack(np.array([5, 6], dtype=np.int32), TOKEN_IDS),
        rows=tuple(row(reward, tokens, [(version, 0, tokens)]) for reward in rewards),
    )


class NumberedPrompts:
    """An endless order of six prompts; prompt i is the token i + 2."""

    def __len__(self) -> int:
        return PROMPTS

    def take(self, cursor: int, count: int) -> tuple[Prompt, ...]:
        indices = [position % PROMPTS for position in range(cursor, cursor + count)]
        return tuple(
            Prompt(f"p{i}", "", np.array([i + 2], dtype=np.int32), str(i), {}) for i in indices
        )


class InstantScorer:
    """Grades at once: completion 0 of a group is right. `stalled`: never answers."""

    first_error = None

    def __init__(self) -> None:
        self.stalled = False
        self.waiting: list = []
        self.groups: dict[str, int] = {}
        self.asked: list[GradingRequest] = []
        self.incomplete: list[str] = []

    def submit(self, key, request: GradingRequest) -> None:
        self.waiting.append(key)
        self.asked.append(request)
        self.groups[request.group] = request.group_size

    def put_incomplete(self, group: str) -> None:
        self.incomplete.append(group)

    def take_graded(self):
        if self.stalled:
            return {}
        keys, self.waiting = self.waiting, []
        rewards = {key: 1.0 if key[1] == 0 else -1.0 for key in keys}
        return {key: Verdict(reward, "scored", (reward,)) for key, reward in rewards.items()}
