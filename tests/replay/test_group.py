"""Rollouts of a group from plain lists, by hand."""

import numpy as np
import pytest

from grpo_replay.replay.group import rollouts_of_group
from grpo_replay.replay.insertion import entries_of
from grpo_replay.replay.priorities import entry_column
from grpo_replay.types import Rollout


def rollouts(**changes) -> list[Rollout]:
    given = {
        "first_rollout_id": 40, "group_id": 7, "prompt_id": "p", "birth_step": 3,
        "prompt_token_ids": [5, 6], "completion_token_ids": [[1], [2, 3], [4, 4, 4]],
        "behavior_logprobs": [[-0.1], [-0.2, -0.3], [-0.4, -0.5, -0.6]],
        "rewards": [1.0, -1.0, -1.0],
    }  # fmt: skip
    return rollouts_of_group(**given | changes)


def test_a_group_by_hand():
    """Mean -1/3, deviation √(8/9): advantages √2 and -√(1/2)."""
    found = rollouts()
    assert [r.rollout_id for r in found] == [40, 41, 42]
    assert [r.completion_index for r in found] == [0, 1, 2]
    assert [r.advantage for r in found] == pytest.approx([2**0.5, -(0.5**0.5), -(0.5**0.5)], 1e-5)
    assert [r.reward for r in found] == [1.0, -1.0, -1.0]
    assert [r.verdict for r in found] == ["correct", "incorrect", "incorrect"]
    for rollout, tokens, logprobs in zip(
        found, [[1], [2, 3], [4, 4, 4]], [[-0.1], [-0.2, -0.3], [-0.4, -0.5, -0.6]], strict=True
    ):
        assert (rollout.group_id, rollout.prompt_id, rollout.kept) == (7, "p", True)
        assert (rollout.birth_step, rollout.policy_version, rollout.policy_version_end) == (3, 2, 2)
        assert rollout.group_reward_mean == pytest.approx(-1 / 3)
        assert rollout.group_reward_std == pytest.approx((8 / 9) ** 0.5)
        assert rollout.group_correct == 1
        assert rollout.prompt_token_ids.tolist() == [5, 6]
        assert rollout.completion_token_ids.tolist() == tokens
        assert rollout.behavior_logprobs.tolist() == np.float32(logprobs).tolist()
        assert rollout.sampler_logprobs.tolist() == np.float32(logprobs).tolist()


def test_what_counts_as_correct_is_said():
    found = rollouts(rewards=[0.5, 0.25, 0.0], correct=0.25)
    assert [r.verdict for r in found] == ["correct", "correct", "incorrect"]
    assert {r.group_correct for r in found} == {2}


def test_completions_that_were_cut_off_are_columns_of_a_priority():
    found = rollouts(truncated=np.array([False, True, False]))
    assert [r.finish_reason for r in found] == ["stop", "length", "stop"]
    assert entry_column(entries_of(found), "truncated", "it").tolist() == [False, True, False]


def test_equal_rewards_are_no_rollouts():
    assert rollouts(rewards=[1.0, 1.0, 1.0]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_token_ids": [[1], [2]]}, "completions"),
        ({"truncated": [True]}, "1 truncated for 3 completions"),
        ({"completion_token_ids": [[1], [2, 3], [4]]}, "completion 2 has 1 tokens and 3 log-probs"),
        (
            {"completion_token_ids": [[1], [], [4]], "behavior_logprobs": [[-1], [], [0]]},
            "completion 1 has 0 tokens",
        ),
        ({"advantages": [1.0]}, "1 advantages for 3 rewards"),
        ({"advantages": [1.0, None, 2.0]}, "every reward"),
        ({"sampler_logprobs": [[-1.0]] * 3}, "lengths"),
    ],
)
def test_lists_that_do_not_fit_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        rollouts(**changes)


def test_sampler_log_probs_and_given_advantages_are_taken_as_they_are():
    found = rollouts(
        sampler_logprobs=[[-1.0], [-2.0, -3.0], [-4.0, -5.0, -6.0]], advantages=[0.1, None, -3.0],
        rewards=[1.0, None, 1.0],
    )  # fmt: skip
    assert [r.sampler_logprobs.tolist() for r in found] == [[-1.0], [-4.0, -5.0, -6.0]]
    assert [r.behavior_logprobs.tolist() for r in found] == [
        np.float32(each).tolist() for each in ([-0.1], [-0.4, -0.5, -0.6])
    ]
    assert [r.advantage for r in found] == [float(np.float32(0.1)), -3.0]
    assert {r.group_reward_std for r in found} == {0.0}
    assert rollouts(advantages=[0.0] * 3) == []
    assert [r.advantage for r in rollouts(advantages=[0.0] * 3, keep_zero_variance=True)] == [0] * 3


def test_a_group_without_a_signal_is_kept_if_asked():
    kept = rollouts(rewards=[1.0, 1.0, None], keep_zero_variance=True)
    assert [(r.advantage, r.group_correct) for r in kept] == [(0.0, 2), (0.0, 2)]
    assert rollouts(rewards=[1.0, None, None], keep_zero_variance=True) == []


def test_the_deviation_is_that_of_the_trainer():
    """Deviations 4/3 and -2/3: sample σ √(4/3), population σ √(8/9)."""
    sample = [r.advantage for r in rollouts(std="sample")]
    assert sample == pytest.approx([4 / 3 / (4 / 3) ** 0.5, *[-2 / 3 / (4 / 3) ** 0.5] * 2], 1e-5)
    plain = [r.advantage for r in rollouts(divide_by_std=False)]
    assert plain == pytest.approx([4 / 3, -2 / 3, -2 / 3])
