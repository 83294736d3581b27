"""Groups as a collector would send them, made by hand."""

from collections.abc import Sequence

import numpy as np

from grpo_replay.collection.messages import LOGPROBS, TOKEN_IDS, Group, Row, Span, pack


def row(
    reward: float = 1.0, tokens: int = 3, spans: Sequence[Span] = ((0, 0, 3),), first_id: int = 7
) -> Row:
    ids = np.arange(first_id, first_id + tokens, dtype=np.int32)
    return Row(
        token_ids=pack(ids, TOKEN_IDS),
        logprobs=pack(np.full(tokens, -0.5, dtype=np.float32), LOGPROBS),
        spans=tuple(spans),
        text="text",
        reward=reward,
        verdict="correct" if reward > 0 else "incorrect",
        finish_reason="stop",
    )


def group(
    place: tuple[int, int] = (0, 0),
    version: int = 0,
    rewards: Sequence[float] = (1.0, -1.0),
    tokens: int = 3,
    prompt_ids: Sequence[int] = (5, 6),
) -> Group:
    """A group whose rows were each sampled by one version."""
    return Group(
        epoch=place[0],
        prompt_index=place[1],
        attempt=0,
        prompt_id=f"p{place[1]}",
        prompt_token_ids=pack(np.array(prompt_ids, dtype=np.int32), TOKEN_IDS),
        rows=tuple(row(reward, tokens, [(version, 0, tokens)]) for reward in rewards),
        started=1.0,
        finished=2.0,
    )
