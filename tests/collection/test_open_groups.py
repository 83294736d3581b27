"""What is known of a group while its members are sampled and graded, by hand."""

import numpy as np

from grpo_replay.collection.collector import Member, OpenGroup
from grpo_replay.collection.messages import Drop
from grpo_replay.types import Completion, GenerationRequest, Prompt, RequestKey, Span, Verdict

RIGHT = Verdict(1.0, "correct", (1.0,))


def open_group(size: int = 3) -> OpenGroup:
    prompt = Prompt("p4", "", np.array([5, 6], np.int32), "2", {})
    group = OpenGroup((1, 4), prompt)
    for index in range(size):
        request = GenerationRequest(RequestKey(1, 4, index), prompt.token_ids, 7, 9)
        group.members.append(Member(request, tries=index, group=group, index=index))
    return group


def sample(member: Member, tokens: int, *spans: Span) -> None:
    ids = np.arange(tokens, dtype=np.int32)
    completion = Completion(
        member.request.key, ids, -0.5 * ids.astype(np.float32), "stop", spans[0][0], spans[-1][0]
    )
    member.completion, member.spans = completion, spans
    member.text = f"text {member.index}"


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


def test_what_has_finished_is_counted_until_it_is_graded():
    group = open_group()
    assert (group.finished(), group.grading) == ((0, 0), 0)
    sample(group.members[0], 3, (4, 0, 3))
    sample(group.members[2], 5, (4, 0, 5))
    group.members[0].verdict = RIGHT
    assert (group.finished(), group.grading) == ((2, 8), 1)
    assert not group.is_sampled and not group.is_graded
    assert group.drop("lost") == Drop(1, 4, "lost", 2, 8)
    sample(group.members[1], 1, (4, 0, 1))
    assert group.is_sampled and not group.is_graded
    group.members[1].verdict = group.members[2].verdict = RIGHT
    assert group.is_graded and group.grading == 0
