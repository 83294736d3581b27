"""A resume checks before it removes: a damaged checkpoint is named, and nothing is lost by asking.
What it changes is remembered."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from small_runs.trained import (
    SMALL,
    FinishedRun,
    Listener,
    files_of,
    interrupted,
    same_weights,
    small_recipe,
    train_small_run,
)
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import CheckpointError, OutputDirectoryError, RecipeError
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import recipe_to_yaml, resolve_recipe
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training import resuming
from grpo_replay.training.run import run_training

NO_STD = {"advantage": {"std": "none"}}
OURS = {"run": {"steps": 12}, "checkpoint": {"every_steps": 3, "keep": 100}}


@pytest.fixture
def run(ours_run, tmp_path) -> Path:
    """A run of 12 steps whose last checkpoint is that of step 9, so that a resume would go back."""
    path = Path(shutil.copytree(ours_run.path, tmp_path / "run", symlinks=True))
    shutil.rmtree(path / "checkpoints" / "step_000012")
    return path


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}"


def test_a_damaged_checkpoint_is_refused_and_nothing_is_removed(run, processes):
    """An older one that somebody gave a newer name."""
    shutil.copytree(checkpoint(run, 6), checkpoint(run, 11))
    before = files_of(run)
    with pytest.raises(CheckpointError, match=r"step_000011 is of step 6") as seen:
        train_small_run(run, resume=True, **OURS)
    assert seen.value.exit_code == 3
    assert files_of(run) == before


def test_a_run_goes_on_to_no_fewer_steps_than_it_has_and_beside_no_other_process(run, processes):
    before = files_of(run)
    with pytest.raises(RecipeError, match=r"run\.steps 8: .*step 9"):
        train_small_run(run, resume=True, **OURS | {"run": {"steps": 8}})
    running = RunDirectory(run)
    running.lock()
    with pytest.raises(OutputDirectoryError, match="in use by process"):
        train_small_run(run, resume=True, **OURS)
    running.unlock()
    assert files_of(run) == before


def test_a_run_that_another_process_took_on_by_one_step_meanwhile_is_refused(
    one_update_run, tmp_path
):
    path = Path(shutil.copytree(one_update_run.path, tmp_path / "run", symlinks=True))
    shutil.rmtree(checkpoint(path, 12))
    recipe, run_dir = one_update_run.recipe, RunDirectory(path)
    start = resuming.find_start(recipe, run_dir, Comm(), resume=True)
    assert start.state.step == 11
    shutil.copytree(checkpoint(one_update_run.path, 12), checkpoint(path, 12))
    with ExitStack() as stack, pytest.raises(OutputDirectoryError, match="newer checkpoint"):
        resuming.take_directory(recipe, run_dir, Comm(), start, stack)


def test_a_resume_with_changes_keeps_the_history_and_still_verifies(run, ours_run, processes):
    first = (run / "recipe.yaml").read_bytes()
    changed = {"run": {"steps": 15}, "replay": {"ratio": 1.0, "max_age_steps": 2}}

    def try_to_lock() -> None:
        with pytest.raises(OutputDirectoryError, match="in use by process"):
            RunDirectory(run).lock()  # the run has it

    listener = Listener({10: try_to_lock})
    result = run_training(resolve_recipe([SMALL, OURS, changed]), run, True, listener)
    assert not result.interrupted and result.step == 15
    assert listener.at_start[0] == "steps 10 to 12, after the checkpoint, are made again"
    assert any("replay.ratio: 0.5 -> 1.0" in each for each in listener.at_start)
    assert (run / "checkpoints" / "latest").resolve().name == "step_000015"
    assert (run / "recipe.yaml").read_bytes() == first
    assert [path.name for path in (run / "recipes").iterdir()] == ["step_000009.yaml"]
    report = verify_run(run)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.steps == 15
    assert FinishedRun(run, None).timeless_metrics[:9] == ours_run.timeless_metrics[:9]
    (run / "recipes" / "step_000009.yaml").unlink()
    assert not verify_run(run).passed  # one recipe for all steps does not explain them


def test_advantages_of_two_rules_do_not_meet_in_a_buffer(run):
    other = resolve_recipe([SMALL, OURS, NO_STD])
    with pytest.raises(RecipeError, match=r"advantage\.std 'none', was .*restore_buffer=false"):
        run_training(other, run, True, Listener())
    without = resolve_recipe([SMALL, OURS, NO_STD, {"replay": {"preset": "grpo"}}])
    with pytest.raises(RecipeError, match=r"advantage\.std 'none', was "):
        run_training(without, run, True, Listener())  # it would carry the buffer on
    checkpoint = max((run / "checkpoints").glob("step_*"))
    emptied = resolve_recipe([SMALL, OURS, NO_STD, {"checkpoint": {"restore_buffer": False}}])
    for recipe in (emptied, resolve_recipe([SMALL, OURS])):
        resuming.refuse_other_advantages(recipe, run, checkpoint)
    resuming.refuse_other_advantages(other, run, None)
    step = int(checkpoint.name.removeprefix("step_"))
    (run / "recipes").mkdir(exist_ok=True)
    (run / f"recipes/step_{step:06d}.yaml").write_text(recipe_to_yaml(emptied))  # and died at once
    resuming.refuse_other_advantages(resolve_recipe([SMALL, OURS]), run, checkpoint)
    with pytest.raises(RecipeError, match="advantage"):
        resuming.refuse_other_advantages(other, run, checkpoint)


def test_a_buffer_that_is_not_restored_starts_empty(run, processes):
    emptied = {"checkpoint": OURS["checkpoint"] | {"restore_buffer": False}, "run": {"steps": 11}}
    listener = Listener()
    run_training(small_recipe(**emptied), run, True, listener)
    assert any("starts empty" in each for each in listener.at_start)
    metrics = FinishedRun(run, None).metrics
    assert metrics[8]["buffer/rollouts"] > 0
    assert metrics[9]["replay/rollouts"] == 0  # nothing was there to draw
    assert metrics[10]["replay/rollouts"] > 0


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(tmp_path, processes):
    sections = {"run": {"steps": 2}, "replay": {"preset": "grpo"}}
    interrupted(tmp_path / "run", 1, **sections)
    listener = Listener()
    run_training(small_recipe(**sections), tmp_path / "run", True, listener)
    assert any("no checkpoint yet" in each for each in listener.at_start)
    whole = train_small_run(tmp_path / "whole", **sections)
    resumed = FinishedRun(tmp_path / "run", None)
    assert resumed.timeless_metrics == whole.timeless_metrics
    assert same_weights(resumed.weights(), whole.weights())


def test_a_finished_run_is_resumed_by_its_directory_alone(ours_run, tmp_path, processes):
    path = shutil.copytree(ours_run.path, tmp_path / "run", symlinks=True)
    before = files_of(path)
    done = CliRunner().invoke(app, ["train", "--resume", "--output-dir", str(path)])
    assert done.exit_code == 0, done.output
    assert "all 12 steps are made" in done.output
    after = files_of(path)
    assert after.pop("summary.json") and before.pop("summary.json")
    assert after == before


def test_a_checkpoint_that_a_rank_does_not_see_is_named(tmp_path):
    """Rank 0 found it; --output-dir of another node is another disk."""
    assert resuming._seen_by_all(None, tmp_path, Comm()) is None
    seen = tmp_path / "step_000003"
    seen.mkdir()
    assert resuming._seen_by_all(Path("of/rank/0/step_000003"), tmp_path, Comm()) == seen
    with pytest.raises(OutputDirectoryError, match="step_000004 is not there"):
        resuming._seen_by_all(Path("step_000004"), tmp_path, Comm())
