"""A run that cannot learn says so: when, why, and with which exit code."""

from dataclasses import replace

import numpy as np
import pytest
from buffer_makers import make_rollout
from small_runs.trained import Listener, small_recipe

from grpo_replay.errors import RewardError
from grpo_replay.recipe import Recipe, resolve_recipe
from grpo_replay.training.reward_watch import (
    CorrectWatch,
    LearningWatch,
    SlowWatch,
    notices_of_ids,
    refuse_failed_verdicts,
)
from grpo_replay.training.run import run_training
from grpo_replay.types import Rollout

G = 4
PLAIN = make_rollout(
    0, reward=-1.0, group_reward_mean=-1.0, group_reward_std=0.0, group_correct=0, kept=False
)


def recipe_of(steps: int = 200, **reward) -> Recipe:
    layers = {"sampling": {"group_size": G}, "run": {"steps": steps}, "reward": reward}
    return resolve_recipe([layers, {"replay": {"preset": "grpo"}}])


def watch_of(recipe: Recipe) -> LearningWatch:
    return LearningWatch(recipe.reward, recipe.sampling, recipe.run.steps)


def group(**changes) -> list[Rollout]:
    return [replace(PLAIN, **changes)] * G


def test_the_first_notice_comes_after_five_steps_and_each_further_one_waits_twice_as_long():
    watch = watch_of(recipe_of())
    told = [step for step in range(1, 45) if watch.observe(step, group())]
    assert told == [5, 10, 20, 40]


def test_a_step_with_signal_starts_the_count_again():
    watch = watch_of(recipe_of())
    signal = group(kept=True, group_reward_std=1.0)
    told = [s for s in range(1, 20) if watch.observe(s, signal if s == 4 else group())]
    assert told == [9, 14]


def test_a_function_that_fails_on_wrong_completions_is_not_taken_for_easy_problems():
    watch = watch_of(recipe_of())
    right = group(group_correct=G - 1, verdict="correct")[1:]
    seen = [*right, replace(PLAIN, group_correct=G - 1, verdict="none")]
    (notice,) = [each for step in range(1, 6) for each in watch.observe(step, seen)]
    assert "75% correct" in notice and "The reward function fails on" in notice
    assert "too easy" not in notice


def test_a_short_run_that_never_trained_says_so_at_its_end():
    watch = watch_of(recipe_of(steps=3))
    assert [step for step in (1, 2, 3) if watch.observe(step, group())] == [3]


@pytest.mark.parametrize(
    ("changes", "share", "advice"),
    [
        ({}, "0% correct", "too hard"),
        ({"kept": True}, "0% correct", "too hard"),  # as with replay.drop_zero_variance false
        ({"group_correct": G, "verdict": "correct"}, "100% correct", "too easy"),
        ({"finish_reason": "length"}, "100% cut off", "sampling.max_completion_length, 8192"),
        ({"verdict": "unparsable"}, "100% without an answer", "prompts.user_template"),
        ({"verdict": "timeout"}, "100% failures", "The reward function fails"),
    ],
)
def test_the_notice_says_why(changes, share, advice):
    watch = watch_of(recipe_of())
    (notice,) = [each for step in range(1, 6) for each in watch.observe(step, group(**changes))]
    assert share in notice and advice in notice


def test_the_notice_names_masks_where_there_are_any():
    sampling = {"group_size": G, "backend": "own.py:Sampler"}
    recipe = resolve_recipe([{"sampling": sampling, "reward": {"mask_truncated": True}}])
    watch = watch_of(recipe)
    (notice,) = [each for step in range(1, 6) for each in watch.observe(step, group())]
    assert "equal or its completions cut off or masked by the sampler" in notice


def test_own_functions_that_call_everything_right_are_named_beside_easy_problems():
    watch = watch_of(recipe_of(function="mine:score"))
    right = group(group_correct=G, verdict="scored")
    (notice,) = [each for step in range(1, 6) for each in watch.observe(step, right)]
    assert "too easy: choose harder ones, or mine:score gives all the same" in notice


@pytest.mark.parametrize("spent, is_named", [(3.0, True), (0.9, False)])
def test_a_function_that_takes_most_of_the_time_is_named_once(spent, is_named):
    """Of steps of five seconds; and 0.9 s of 1 s is too little to mind."""
    watch = SlowWatch(recipe_of(function="mine:score", workers=2).reward)
    seconds = {"reward": spent, "training": 0.5, "step": 5.0 if is_named else 1.0}
    said = [(step, each) for step in range(1, 12) for each in watch.observe(step, seconds)]
    assert len(said) == is_named
    if is_named:
        ((step, notice),) = said
        assert step == 5 and "60% of the steps' time, 3.0 s each, went into mine:score" in notice
        assert "reward.workers, 2 now" in notice


def test_what_the_watches_see_in_a_step_reaches_the_screen(tmp_path, processes, monkeypatch):
    for watch in (LearningWatch, CorrectWatch, SlowWatch):
        seen = [f"seen by {watch.__name__}"]
        monkeypatch.setattr(watch, "observe", lambda _, step, rows, seen=seen: seen)
    listener = Listener()
    recipe = small_recipe(run={"steps": 1}, replay={"preset": "grpo"})
    run_training(recipe, tmp_path / "run", False, listener)
    seen = {f"seen by {name}Watch" for name in ("Learning", "Correct", "Slow")}
    assert seen <= set(listener.notices)


def test_a_step_stops_if_most_verdicts_are_failures():
    half = [*group(verdict="crash"), *group()]
    refuse_failed_verdicts(half, 3, recipe_of().reward, "ValueError: no")
    most = [*group(verdict="crash"), replace(PLAIN, verdict="timeout"), *group()]
    with pytest.raises(RewardError) as caught:
        refuse_failed_verdicts(most, 3, recipe_of(function="mine:score").reward, "ValueError: no")
    assert caught.value.exit_code == 4
    for part in ("step 3", "mine:score", "5 of 9", "1 timeout", "4 crash", "ValueError: no"):
        assert part in str(caught.value)
    refuse_failed_verdicts(group(verdict="crash"), 3, recipe_of(max_failed_share=1.0).reward, None)
    refuse_failed_verdicts([], 3, recipe_of().reward, None)  # other ranks


def scores_of(*rewards: float, **changes) -> list[Rollout]:
    return [replace(PLAIN, reward=reward, **changes) for reward in rewards]


def test_scores_that_differ_below_what_counts_as_correct_are_named_once():
    watch = CorrectWatch(recipe_of(function="own.py:part").reward)
    told = {step: watch.observe(step, scores_of(0.0, 0.777)) for step in range(1, 20)}
    ((step, (notice,)),) = [each for each in told.items() if each[1]]
    assert step == 5 and "reward.correct 1.0" in notice
    assert "own.py:part" in notice and "0.777" in notice
    of_several = CorrectWatch(recipe_of(function="own.py:part").reward)
    steps = [of_several.observe(s, scores_of(2.0, 3.0, reward_scores=(0.5,))) for s in range(1, 8)]
    assert steps == [[]] * 7, "the first function's scores are equal"


def test_a_correct_completion_or_a_builtin_verifier_needs_no_such_notice():
    watch = CorrectWatch(recipe_of(function="own.py:part").reward)
    assert watch.observe(1, scores_of(0.0, 1.0, group_correct=1)) == []
    assert not any(watch.observe(step, scores_of(0.0, 0.5)) for step in range(2, 20))
    builtin = CorrectWatch(recipe_of().reward)
    assert not any(builtin.observe(step, scores_of(-1.0, 0.5)) for step in range(1, 20))


def test_ids_that_the_tokenizer_does_not_have_are_counted():
    padded = [replace(PLAIN, completion_token_ids=np.array(ids)) for ids in ([5, 24], [23], [25])]
    (notice,) = notices_of_ids(2, padded, 24)
    assert notice.startswith("step 2: 2 of 3 completions have token ids from 24 on")
    assert notices_of_ids(2, padded, 26) == []
