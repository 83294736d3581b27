"""A resume with another reward than that of the stored rollouts is refused, or empties them. Other
prompts are noticed."""

import io
import json
import shutil
from pathlib import Path

import pytest
from commands import run_inspect
from rich.console import Console
from small_runs.trained import FinishedRun, interrupted, small_recipe, train_small_run

from grpo_replay.cli.train_command import RunDisplay
from grpo_replay.errors import RecipeError
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import RewardSection
from grpo_replay.training.reward_watch import changes_of_reward, notices_of_change, reward_facts
from grpo_replay.training.run import run_training

REWARD = """
def score(completion, answer):
    return 1.0 if f"{{{answer}}}" in completion else -1.0
"""


@pytest.fixture(scope="module")
def begun(tmp_path_factory, processes) -> Path:
    """A folder with score.py and a run that was stopped after step 4, its checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("changed")
    (folder / "score.py").write_text(REWARD)
    interrupted(folder / "run", 4, **sections(folder))
    return folder


@pytest.fixture
def folder(begun, tmp_path) -> Path:
    return shutil.copytree(begun, tmp_path / "copy")


def sections(folder: Path, **checkpoint) -> dict:
    return {
        "reward": {"function": f"{folder}/score.py:score", "workers": 1},
        "run": {"steps": 5}, "checkpoint": {"every_steps": 3, **checkpoint},
    }  # fmt: skip


def resumed(folder: Path, **checkpoint) -> tuple[FinishedRun, str]:
    """The run, and its screen."""
    recipe = small_recipe(**sections(folder, **checkpoint))
    screen = Console(file=io.StringIO(), width=500, force_terminal=False)
    run_training(recipe, folder / "run", True, RunDisplay(screen))
    return FinishedRun(folder / "run", recipe), screen.file.getvalue()


@pytest.mark.slow
def test_the_same_source_resumes_without_a_word_wherever_it_lies(folder, processes):
    _, screen = resumed(folder)
    assert "reward is another" not in screen


def test_the_same_facts_are_no_change(folder):
    facts = reward_facts(RewardSection(), {})
    checkpoint = folder / "run" / "checkpoints" / "step_000003"
    assert notices_of_change(small_recipe(), checkpoint, facts, facts) == []


def test_an_edited_source_file_is_refused_before_anything_changes(folder, processes):
    (folder / "score.py").write_text(REWARD.replace("-1.0", "0.0"))
    files = {path: path.read_bytes() for path in (folder / "run").rglob("*.parquet")}
    metrics = (folder / "run/metrics.jsonl").read_bytes()
    with pytest.raises(
        RecipeError,
        match=r"before step 4: the source file of score.py:score has changed. The buffer has \d+ "
        r"rollouts.*restore_buffer=false",
    ) as error:
        resumed(folder)
    assert error.value.exit_code == 2
    assert {path: path.read_bytes() for path in files} == files
    assert (folder / "run/metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
def test_the_user_may_empty_the_buffer(folder, processes):
    (folder / "score.py").write_text(REWARD.replace("-1.0", "0.0"))
    emptied, screen = resumed(folder, restore_buffer=False)
    assert "has changed" in screen and "the replay buffer starts empty" in screen
    assert emptied.metrics[3]["replay/rollouts"] == 0
    assert {row["reward"] for row in emptied.rollouts(4)} == {0.0, 1.0}
    assert {row["reward"] for row in emptied.rollouts(3)} == {-1.0, 1.0}
    assert verify_run(emptied.path).passed


@pytest.mark.slow
def test_a_run_that_stores_nothing_resumes_with_a_notice(tmp_path, processes):
    plain = {"replay": {"preset": "grpo"}, "checkpoint": {"every_steps": 2}}
    train_small_run(tmp_path / "run", run={"steps": 2}, **plain)
    recipe = small_recipe(run={"steps": 3}, reward={"incorrect": 0.0}, **plain)
    screen = Console(file=io.StringIO(), width=500, force_terminal=False)
    run_training(recipe, tmp_path / "run", True, RunDisplay(screen))
    assert "another than before step 3: reward.incorrect 0.0, was -1.0" in screen.file.getvalue()


@pytest.mark.slow
def test_other_prompts_are_noticed_and_rollouts_keep_their_own(tmp_path, processes, capsys):
    prompts, own = (
        tmp_path / "own.jsonl",
        {"prompts": {"source": f"{tmp_path}/own.jsonl", "id_field": None}},
    )
    problems = [{"problem": f"{a}+{b}", "answer": str(a + b)} for a in range(9) for b in range(9)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in problems))
    interrupted(tmp_path / "run", 4, run={"steps": 5}, checkpoint={"every_steps": 3}, **own)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in problems[::-1]))
    recipe = small_recipe(run={"steps": 5}, checkpoint={"every_steps": 3}, **own)
    screen = Console(file=io.StringIO(), width=500, force_terminal=False)
    run_training(recipe, tmp_path / "run", True, RunDisplay(screen))
    assert "the prompts are others than before step 4" in screen.file.getvalue()
    run_inspect(
        str(tmp_path / "run"), where="birth_step > 0", text=True, as_json=True, limit=10_000
    )
    printed = capsys.readouterr()
    assert "changed since the steps of" in printed.err
    rows = json.loads(printed.out)["rollouts"]
    assert {row["birth_step"] for row in rows if row["problem"] is None} == {1, 2, 3}
    reversed_rows = problems[::-1]
    for row in rows:
        if row["problem"] is not None:
            assert row["birth_step"] >= 4
            expected = reversed_rows[int(row["prompt_id"])]
            assert (row["problem"], row["answer"]) == (expected["problem"], expected["answer"])


def test_what_decides_rewards_is_compared_and_nothing_else():
    own = RewardSection(function=[{"function": "/a/score.py:f", "weight": 2.0}])
    before = reward_facts(own, {"/a/score.py:f": "1"})
    moved = RewardSection(
        function=[{"function": "/b/score.py:f", "weight": 2.0}], workers=7, time_limit_seconds=1
    )
    assert changes_of_reward(before, reward_facts(moved, {"/b/score.py:f": "1"})) == []
    assert changes_of_reward(before, reward_facts(moved, {"/b/score.py:f": "2"})) == [
        "the source file of score.py:f has changed"
    ]
    other = RewardSection(function=["minerva", "m:g"], overlong_buffer_tokens=4)
    assert changes_of_reward(before, reward_facts(other, {"m:g": "1"})) == [
        "reward.function 1 · minerva + 1 · m:g, was 2 · score.py:f",
        "reward.overlong_buffer_tokens 4, was None",
    ]
