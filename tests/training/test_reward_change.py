"""A resume with another reward than that of the stored rollouts is refused, or empties them."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs.trained import interrupted, small_recipe, train_small_run

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import RecipeError
from grpo_replay.recipe import RewardSection
from grpo_replay.recipe.open_lists import VERIFIERS
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training import reward_watch
from grpo_replay.training.opening import Place, RunOpener
from grpo_replay.training.reward_watch import changes_of_reward, notices_of_change, reward_facts

REWARD = """
def score(completion, answer):
    return 1.0 if f"{{{answer}}}" in completion else -1.0
"""
OTHER = REWARD.replace("-1.0", "0.0")


def test_an_edited_source_file_is_refused_before_anything_changes_unless_the_buffer_is_emptied(
    tmp_path, processes
):
    source, run = tmp_path / "score.py", tmp_path / "run"
    source.write_text(REWARD)
    sections = {
        "reward": {"function": f"{source}:score", "workers": 1}, "replay": {"warmup_steps": 1},
        "run": {"steps": 3}, "checkpoint": {"every_steps": 1},
    }  # fmt: skip
    interrupted(run, 3, **sections)
    source.write_text(OTHER)
    before = {path: path.read_bytes() for path in run.rglob("*.parquet")}
    with pytest.raises(RecipeError, match=r"score\.py:score.*restore_buffer=false") as error:
        train_small_run(run, resume=True, **sections)
    assert error.value.exit_code == 2
    assert before and {path: path.read_bytes() for path in before} == before
    sections["checkpoint"]["restore_buffer"] = False
    emptied = train_small_run(run, resume=True, **sections)
    assert emptied.metrics[2]["replay/rollouts"] == 0
    assert {row["reward"] for row in emptied.rollouts(3)} == {0.0, 1.0}
    assert {row["reward"] for row in emptied.rollouts(2)} == {-1.0, 1.0}


@pytest.mark.parametrize(("correct", "refused"), [(1.0, 0), (0.5, 1)])
def test_a_plan_that_leaves_the_prompts_to_the_hub_refuses_another_reward_too(
    ours_run, correct, refused
):
    recipe = small_recipe(
        prompts={"source": "owner/problems"}, reward={"correct": correct}, run={"steps": 12}
    )
    plan = Place(ranks=1, ranks_here=1, gpu_bytes=None, is_plan=True)
    with ExitStack() as stack:
        opener = RunOpener(
            recipe, Comm(), SimpleNamespace(type="cpu"), RunDirectory(ours_run.path), stack,
            resume=True, place=plan,
        )  # fmt: skip
        problems = list(opener.problems())
    assert [type(each) for each in problems] == [RecipeError] * refused
    assert all("reward.correct 0.5, was 1.0" in str(each) for each in problems)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_without_replay_goes_on_with_a_notice_if_it_carries_no_rollouts_on(
    is_async, monkeypatch
):
    stored = 0
    monkeypatch.setattr(reward_watch, "count_stored", lambda path: stored)
    recipe = small_recipe(replay={"preset": "grpo"})
    if is_async:
        recipe.run.__dict__["mode"] = "async"
    facts = {"functions": [], "incorrect": 0.0, "overlong_buffer_tokens": None}
    facts["special_tokens"] = "drop"
    before, now = ({**facts, "correct": correct} for correct in (1.0, 2.0))
    checkpoint = Path("checkpoints/step_000003")
    notices = notices_of_change(recipe, checkpoint, before, now)
    assert "before step 4" in notices[0] and "reward.correct 2.0, was 1.0" in notices[0]
    assert len(notices) == (2 if is_async else 1)  # groups that wait keep their rewards
    assert notices_of_change(recipe, checkpoint, now, now) == []
    stored = 7  # of steps with replay before
    with pytest.raises(RecipeError, match="The buffer has 7 rollouts"):
        notices_of_change(recipe, checkpoint, before, now)


def test_a_registered_function_is_known_by_its_file(monkeypatch):
    monkeypatch.setitem(VERIFIERS._places, "mine", "/a/score.py:f")
    (function,) = reward_facts(RewardSection(function="mine"), {"/a/score.py:f": "1"})["functions"]
    assert function["sha256"] == "1"


def test_what_decides_rewards_is_compared_and_nothing_else():
    own = RewardSection(function=[{"function": "/a/score.py:f", "weight": 2.0}])
    before = reward_facts(own, {"/a/score.py:f": "1"})
    moved = RewardSection(
        function=[{"function": "/b/score.py:f", "weight": 2.0}], workers=7, time_limit_seconds=1
    )
    assert changes_of_reward(before, reward_facts(moved, {"/b/score.py:f": "1"})) == []
    assert len(changes_of_reward(before, reward_facts(moved, {"/b/score.py:f": "2"}))) == 1
    other = RewardSection(function=["minerva", "m:g"], overlong_buffer_tokens=4)
    function, overlong = changes_of_reward(before, reward_facts(other, {"m:g": "1"}))
    assert function.startswith("reward.function")
    assert overlong == "reward.overlong_buffer_tokens 4, was None"
