"""Rollouts from completions and verdicts: length penalties, masks and correct counts by hand."""

import numpy as np
import pytest

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import Recipe, resolve_recipe
from grpo_replay.replay.rollouts import assemble_rollouts, group_requests, with_behavior_logprobs
from grpo_replay.types import (
    Completion,
    Graded,
    Prompt,
    RequestKey,
    Rollout,
    Verdict,
    completion_seed,
)

LONGEST = 20


def recipe_of(**reward) -> Recipe:
    return resolve_recipe(
        [
            {
                "sampling": {"group_size": 4, "max_completion_length": LONGEST},
                "batch": {"max_tokens_per_microbatch": 2000},
                "reward": reward,
            }
        ]
    )


def rollouts_of(recipe: Recipe, verdicts: list[Verdict], lengths: list[int]) -> list[Rollout]:
    prompt = Prompt("p", "1+1", np.array([5], np.int32), "2", {})
    keys = [RequestKey(1, 0, index) for index in range(4)]
    completions = {
        key: Completion(
            key, np.full(length, 7, np.int32), np.zeros(length, np.float32),
            "length" if length == LONGEST else "stop", 0, 0,
        )
        for key, length in zip(keys, lengths, strict=True)
    }  # fmt: skip
    graded = {
        key: Graded(completions[key], "", verdict)
        for key, verdict in zip(keys, verdicts, strict=True)
    }
    return assemble_rollouts(
        {0: prompt}, graded, recipe, step=1, first_rollout_id=0, first_group_id=0
    )


RIGHT, WRONG = Verdict(1.0, "correct", (1.0,)), Verdict(-1.0, "incorrect", (-1.0,))


def test_a_reward_that_did_not_come_has_no_length_penalty_either():
    verdicts = [RIGHT, Verdict(None, "crash", ()), WRONG, WRONG]
    lengths = [12, 20, 14, 16]
    found = rollouts_of(recipe_of(overlong_buffer_tokens=8), verdicts, lengths)
    assert [rollout.reward for rollout in found] == [1.0, None, -1.25, -1.5]
    assert [rollout.kept for rollout in found] == [True, False, True, True]


def test_one_function_alone_is_stored_as_the_reward():
    rollouts = rollouts_of(recipe_of(), [RIGHT, WRONG, WRONG, WRONG], [3, 4, 5, 6])
    assert [rollout.reward for rollout in rollouts] == [1, -1, -1, -1]
    assert [rollout.reward_scores for rollout in rollouts] == [()] * 4
    assert {rollout.group_correct for rollout in rollouts} == {1}


def test_the_length_penalty_is_added_and_does_not_change_what_is_correct():
    """L_max 20, L_cache 8: lengths 12, 14, 16, 20 cost 0, 0.25, 0.5, 1."""
    recipe = recipe_of(overlong_buffer_tokens=8)
    rollouts = rollouts_of(recipe, [RIGHT, RIGHT, RIGHT, WRONG], [12, 14, 16, 20])
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.75, 0.5, -2.0]
    assert [r.reward_scores for r in rollouts] == [(1, 0), (1, -0.25), (1, -0.5), (-1, -1)]
    assert {rollout.group_correct for rollout in rollouts} == {3}
    mean = (1.0 + 0.75 + 0.5 - 2.0) / 4
    assert rollouts[0].group_reward_mean == mean == 0.0625
    sigma = np.sqrt(((np.array([1, 0.75, 0.5, -2]) - mean) ** 2).mean())
    assert rollouts[3].advantage == pytest.approx((-2 - mean) / sigma, rel=1e-5)


def test_equal_answers_of_different_lengths_are_a_signal_with_the_penalty():
    recipe = recipe_of(overlong_buffer_tokens=8)
    assert all(r.kept for r in rollouts_of(recipe, [WRONG] * 4, [12, 14, 16, 20]))
    assert not any(r.kept for r in rollouts_of(recipe_of(), [WRONG] * 4, [12, 14, 16, 20]))


def test_masked_rollouts_count_in_their_group_but_are_not_kept():
    lengths, verdicts = [5, 6, LONGEST, LONGEST], [RIGHT, WRONG, WRONG, RIGHT]
    masked = rollouts_of(recipe_of(mask_truncated=True), verdicts, lengths)
    plain = rollouts_of(recipe_of(), verdicts, lengths)
    assert [rollout.kept for rollout in masked] == [True, True, False, False]
    assert [rollout.advantage for rollout in masked[2:]] == [None, None]
    assert [rollout.advantage for rollout in masked[:2]] == pytest.approx([1, -1], abs=1e-5)
    assert all(rollout.kept for rollout in plain)
    assert {rollout.group_correct for rollout in masked} == {2}


@pytest.mark.parametrize(
    ("reward", "replay", "match"),
    [
        ({"overlong_buffer_tokens": 21}, {}, r"21 .*sampling.max_completion_length 20"),
        ({"mask_truncated": True}, {"preset": "uniform"}, r"mask_truncated .*replay.unit"),
        ({"function": ["a:score", "b.py:score"]}, {}, "'score'"),
    ],
)
def test_contradictions_are_refused(reward, replay, match):
    layers = {"sampling": {"max_completion_length": LONGEST}, "reward": reward, "replay": replay}
    with pytest.raises(RecipeError, match=match):
        resolve_recipe([layers])


def test_every_completion_of_a_prompt_is_requested_with_its_own_seed():
    prompts = {2: Prompt("a", "", np.array([5], np.int32), "2", {}),
               4: Prompt("b", "", np.array([6], np.int32), "3", {})}  # fmt: skip
    recipe = recipe_of()
    requests = group_requests(prompts, 9, recipe.sampling, recipe.run.seed)
    keys = [request.key for request in requests]
    assert keys == [RequestKey(9, prompt, index) for prompt in (2, 4) for index in range(4)]
    assert [request.seed for request in requests] == [
        completion_seed(recipe.run.seed, key) for key in keys
    ]
    assert [request.prompt_token_ids.tolist() for request in requests] == [[5]] * 4 + [[6]] * 4
    assert {(request.max_tokens, request.temperature) for request in requests} == {(LONGEST, 1.0)}


def test_survivors_alone_get_behaviour_log_probs_each_its_own():
    masked = recipe_of(mask_truncated=True)
    rollouts = rollouts_of(masked, [RIGHT, WRONG, WRONG, RIGHT], [3, LONGEST, 5, 6])
    logprobs = {i: np.full(i + 1, -i, np.float32) for i in range(4)}
    found = with_behavior_logprobs(rollouts, logprobs)
    assert [rollout.rollout_id for rollout in found] == [0, 2, 3]
    assert all(rollout.behavior_logprobs is logprobs[rollout.rollout_id] for rollout in found)
    assert all(rollout.behavior_logprobs is None for rollout in rollouts)


def test_the_rollouts_of_a_step_are_numbered_by_prompt_and_by_completion():
    prompts = {index: Prompt(f"p{index}", "", np.array([5], np.int32), "2", {}) for index in (2, 1)}
    keys = [RequestKey(7, prompt, index) for prompt in (2, 1) for index in range(4)]
    masked = {RequestKey(7, 2, 3): [False, False], RequestKey(7, 2, 1): [False, True]}
    completions = {
        key: Completion(
            key, np.full(2, 7, np.int32), np.zeros(2, np.float32), "stop", 6, 6,
            completion_mask=np.array(masked[key]) if key in masked else None,
        )
        for key in keys
    }  # fmt: skip
    graded = {
        key: Graded(completions[key], "", RIGHT if key.completion_index else WRONG) for key in keys
    }
    found = assemble_rollouts(
        prompts, graded, recipe_of(), step=7, first_rollout_id=100, first_group_id=50
    )
    assert [(r.group_id, r.prompt_id) for r in found] == [(51, "p1")] * 4 + [(52, "p2")] * 4
    assert [r.rollout_id for r in found] == list(range(104, 112))
    assert [r.completion_index for r in found] == [0, 1, 2, 3] * 2
    # A mask that leaves no token to train leaves nothing to keep.
    assert [r.kept for r in found] == [True] * 7 + [False]
