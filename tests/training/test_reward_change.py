"""A resume with another source file of a reward function is refused."""

from pathlib import Path

import pytest
from small_runs.trained import interrupted, train_small_run

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import RewardSection
from grpo_replay.recipe.open_lists import VERIFIERS
from grpo_replay.training.resuming import refuse_edited_rewards
from grpo_replay.training.reward_watch import reward_digests

REWARD = """
def score(completion, answer):
    return 1.0 if f"{{{answer}}}" in completion else -1.0
"""


def test_an_edited_source_file_is_refused_before_anything_changes(tmp_path, processes):
    source, run = tmp_path / "score.py", tmp_path / "run"
    source.write_text(REWARD)
    sections = {
        "reward": {"function": f"{source}:score", "workers": 1}, "replay": {"warmup_steps": 1},
        "run": {"steps": 3}, "checkpoint": {"every_steps": 1},
    }  # fmt: skip
    interrupted(run, 2, **sections)
    source.write_text(REWARD.replace("-1.0", "0.0"))
    before = {path: path.read_bytes() for path in run.rglob("*.*") if path.is_file()}
    with pytest.raises(RecipeError, match=r"source file of score was edited") as error:
        train_small_run(run, resume=True, **sections)
    assert error.value.exit_code == 2
    assert before and {path: path.read_bytes() for path in before} == before
    (tmp_path / "moved").mkdir()
    moved = source.rename(tmp_path / "moved" / "score.py")
    moved.write_text(REWARD)
    sections["reward"]["function"] = f"{moved}:score"
    assert len(train_small_run(run, resume=True, **sections).metrics) == 3


def test_a_registered_function_is_known_by_its_file(monkeypatch):
    monkeypatch.setitem(VERIFIERS._import_paths, "mine", "/a/score.py:f")
    assert reward_digests(RewardSection(function="mine"), {"/a/score.py:f": "1"}) == {"mine": "1"}


def test_each_of_several_functions_is_compared_by_its_name():
    reward = RewardSection(function=["boxed", "/a/score.py:f", "/b/score.py:g"])
    before = reward_digests(reward, {"/a/score.py:f": "1", "/b/score.py:g": "1"})
    assert before == {"boxed": None, "f": "1", "g": "1"}
    run = Path("runs/a")
    refuse_edited_rewards(before, before, run)
    refuse_edited_rewards({}, before, run)  # the first start
    with pytest.raises(RecipeError, match=r"of g was edited.*runs/a/checkpoints/latest/model"):
        refuse_edited_rewards(before, before | {"g": "2"}, run)
