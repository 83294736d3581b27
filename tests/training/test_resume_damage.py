"""A resume checks before it removes: damage is named, and nothing is lost by asking."""

import io
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from slow_tests import slow_except
from small_runs.trained import SMALL, FinishedRun, train_small_run
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.cli.train_command import RunDisplay
from grpo_replay.errors import CheckpointError, OutputDirectoryError
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import resolve_recipe
from grpo_replay.storage.checkpoint import file_facts, find_checkpoint, verify_checkpoint
from grpo_replay.storage.recipe_history import read_recipe_file
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training import Observer, resuming
from grpo_replay.training.run import RunResult, run_training

OURS = {"run": {"steps": 12}, "checkpoint": {"every_steps": 3, "keep": 100}}


@pytest.fixture
def run(ours_run, tmp_path) -> Path:
    """A run of 12 steps whose last checkpoint is that of step 9, so that a resume would go back."""
    path = Path(shutil.copytree(ours_run.path, tmp_path / "run", symlinks=True))
    shutil.rmtree(path / "checkpoints" / "step_000012")
    return path


def files_of(run: Path) -> dict[str, bytes]:
    """Every file but the log and the lock."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.parent.name != "log" and path.name not in (".lock",)
        and path.name != "environment.json"
    }  # fmt: skip


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}"


def refresh_manifest(folder: Path) -> None:
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    (folder / "manifest.json").write_text(json.dumps({"files": file_facts(folder, list(listed))}))


def a_buffer_of_another_step(run: Path) -> str:
    shutil.copy(checkpoint(run, 6) / "buffer.parquet", checkpoint(run, 9))
    refresh_manifest(checkpoint(run, 9))
    return r"step_000009/buffer\.parquet is the buffer after step 6"


def an_older_checkpoint_under_a_newer_name(run: Path) -> str:
    """What passed the verification, and then cost the newer checkpoint and its steps."""
    shutil.copytree(checkpoint(run, 6), checkpoint(run, 11))
    return r"step_000011 is of step 6"


def a_doubled_line(run: Path) -> str:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:5], *lines[4:]]))
    return r"metrics\.jsonl:6 is of step 5"


def no_metrics(run: Path) -> str:
    (run / "metrics.jsonl").unlink()
    return r"metrics\.jsonl is missing"


def an_engine_that_cannot_be_read(run: Path) -> str:
    (checkpoint(run, 9) / "engine" / "layout.json").write_text("{")
    refresh_manifest(checkpoint(run, 9))
    return r"layout\.json cannot be read"


DAMAGES = [a_buffer_of_another_step, an_older_checkpoint_under_a_newer_name, a_doubled_line,
           no_metrics, an_engine_that_cannot_be_read]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_run_is_refused_and_nothing_is_removed(run, processes, damage):
    expected = damage(run)
    before = files_of(run)
    with pytest.raises(CheckpointError, match=expected) as seen:
        train_small_run(run, resume=True, **OURS)
    assert seen.value.exit_code == 3
    assert files_of(run) == before


class Listener(Observer):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_start(self, recipe, run_dir, state, notices) -> None:
        self.heard += notices


def test_a_resume_with_changes_keeps_the_history_and_still_verifies(run, ours_run, processes):
    """Also: `latest` is a folder, and an old rollouts/ file is gone, which costs a notice only."""
    latest = run / "checkpoints" / "latest"
    latest.unlink()
    shutil.copytree(checkpoint(run, 9), latest)
    first = (run / "recipe.yaml").read_bytes()
    lost = run / "rollouts" / "step_000002.parquet"
    kept = lost.read_bytes()
    lost.unlink()
    changed = {"run": {"steps": 15}, "replay": {"ratio": 1.0, "max_age_steps": 2}}
    recipe = resolve_recipe([SMALL, OURS, changed])
    listener = Listener()
    result = run_training(recipe, run, True, listener)
    assert not result.interrupted and result.step == 15
    assert any(
        "step_000002.parquet is missing" in each and "goes on" in each for each in listener.heard
    )
    assert any("replay.ratio: 0.5 -> 1.0" in each for each in listener.heard)
    assert latest.is_symlink() and latest.resolve().name == "step_000015"
    assert (run / "recipe.yaml").read_bytes() == first
    assert [path.name for path in (run / "recipes").iterdir()] == ["step_000009.yaml"]
    lost.write_bytes(kept)
    report = verify_run(run)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.steps == 15
    metrics = FinishedRun(run, None).timeless_metrics
    assert metrics[:9] == ours_run.timeless_metrics[:9]
    (run / "recipes" / "step_000009.yaml").unlink()
    assert not verify_run(run).passed  # one recipe for all steps does not explain them


def test_a_finished_run_is_resumed_by_its_directory_alone(ours_run, tmp_path, processes):
    path = shutil.copytree(ours_run.path, tmp_path / "run", symlinks=True)
    before = files_of(path)
    done = CliRunner().invoke(app, ["train", "--resume", "--output-dir", str(path)])
    assert done.exit_code == 0, done.output
    after = files_of(path)
    for name in ("summary.json", "files.json"):
        assert after.pop(name) and before.pop(name)
    assert after == before


def test_damage_to_an_old_file_does_not_fail_a_run_that_trained_well(run, capsys):
    (run / "draws" / "step_000004.parquet").write_bytes(b"PAR1")
    errors = io.StringIO()
    summary = json.loads((run / "summary.json").read_text())
    display = RunDisplay(Console(file=errors, width=200))
    display._recipe = read_recipe_file(run / "recipe.yaml")  # as at the start
    display.conclude(RunResult(run, 12, False, summary))
    assert "draws/step_000004.parquet" in errors.getvalue()
    assert "12 steps in" in capsys.readouterr().out


def test_damage_is_told_when_the_run_is_resumed(run):
    assert RunDirectory(run).check(9) is None
    (run / "draws" / "step_000004.parquet").unlink()
    (run / "rollouts" / "step_000007.parquet").write_bytes(b"PAR1")
    told = RunDirectory(run).check(9)
    assert "draws/step_000004.parquet is missing" in told
    assert "rollouts/step_000007.parquet has 4 bytes" in told
    assert RunDirectory(run).check(3) is None


def test_a_recipe_that_was_edited_is_refused(run):
    """Or another run's: only --set changes the recipe of a run."""
    file = run / "recipe.yaml"
    seed = f"seed: {read_recipe_file(file).run.seed}\n"
    file.write_text(file.read_text().replace(seed, "seed: 43\n"))
    with pytest.raises(OutputDirectoryError, match=r"recipe\.yaml has .* bytes.*with --set"):
        RunDirectory(run).check(9)


def limit_file_size(temporary: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))


def forbid(temporary: Path) -> None:
    raise PermissionError(1, "Operation not permitted", str(temporary))


@pytest.mark.parametrize("obstacle", [limit_file_size, forbid], ids=["RLIMIT_FSIZE", "immutable"])
def test_a_checkpoint_that_may_not_be_written_is_no_bug_and_keeps_the_earlier_ones(
    tmp_path, processes, monkeypatch, obstacle
):
    begin, limits = resuming.begin_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def met(temporary: Path) -> None:
        begin(temporary)
        if temporary.name.endswith("2"):
            obstacle(temporary)

    monkeypatch.setattr(resuming, "begin_checkpoint", met)
    short = {"run": {"steps": 2}, "checkpoint": {"every_steps": 1}, "replay": {"preset": "grpo"}}
    try:
        with pytest.raises(OutputDirectoryError, match=r"tmp-step_000002.*step_000001 is com"):
            train_small_run(tmp_path / "run", **short)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000001"]
    verify_checkpoint(find_checkpoint(checkpoints))


OUTPUTS = [("--plot", "a.png"), ("--plot", "a.html"), ("--export", "a.jsonl"),
           ("--export", "a.parquet")]  # fmt: skip


@pytest.mark.parametrize("option, name", slow_except([OUTPUTS[3]], OUTPUTS))
def test_a_full_disk_at_a_plot_or_an_export_is_named(runs, tmp_path, option, name):
    os.symlink("/dev/full", tmp_path / f"{name}.tmp")
    done = CliRunner().invoke(
        app, ["inspect-buffer", str(runs["ours"]), option, str(tmp_path / name)]
    )
    assert done.exit_code == 3, done.output
    assert f"{name} cannot be written" in done.stderr and "No space left" in done.stderr
    assert "bug" not in done.stderr and not (tmp_path / name).exists()
