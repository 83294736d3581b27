"""The oldest version that has sampled for a group, by hand."""

import numpy as np

from grpo_replay.collection.collector import Member, OpenGroup
from grpo_replay.types import Completion, GenerationRequest, Prompt, RequestKey, Span


def open_group() -> OpenGroup:
    prompt = Prompt("p4", "", np.array([5, 6], np.int32), "2", {})
    group = OpenGroup((1, 4), prompt)
    for index in range(3):
        request = GenerationRequest(RequestKey(1, 4, index), prompt.token_ids, 7, 9)
        group.members.append(Member(request, group=group, index=index))
    return group


def sample(member: Member, tokens: int, *spans: Span) -> None:
    ids = np.arange(tokens, dtype=np.int32)
    completion = Completion(
        member.request.key, ids, -0.5 * ids.astype(np.float32), "stop", spans[0][0], spans[-1][0]
    )
    member.completion, member.spans = completion, spans


def test_the_oldest_version_is_that_of_any_token_sampled_or_to_come():
    group = open_group()
    assert group.oldest_version() is None
    group.members[1].version = 6
    assert group.oldest_version() == 6
    sample(group.members[0], 3, (4, 0, 2), (5, 2, 3))
    assert group.oldest_version() == 4
    group.members[2].version = 3
    assert group.oldest_version() == 3
    sample(group.members[2], 1, (7, 0, 1))  # it began at a newer version after all
    assert group.oldest_version() == 4
