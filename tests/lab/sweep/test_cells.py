"""What a cell's folder says of its run, and what is refused before a process is started there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.lab.sweep.cells import (
    CellState,
    Progress,
    error_line,
    is_running,
    locked_log,
    note_start,
    process_in,
    shell_command,
    state_of,
)
from grpo_replay.lab.sweep.grid import Cell
from grpo_replay.recipe import recipe_to_yaml
from grpo_replay.storage.run_directory import RunDirectory


@pytest.fixture
def cell(tmp_path):
    return Cell(tmp_path / "s", "", "ours", 3, "tiny", ("run.steps=30",))


def start(cell, steps=None, **environment):
    """The files of a run; finished after `steps`."""
    cell.folder.mkdir(parents=True)
    (cell.folder / "recipe.yaml").write_text(recipe_to_yaml(cell.resolved_recipe()))
    (cell.folder / "environment.json").write_text(
        json.dumps({"grpo_replay": "0.1.0"} | environment)
    )
    if steps is not None:
        summary = {"steps": steps, "wall_seconds": 1}
        (cell.folder / "summary.json").write_text(json.dumps(summary))


def test_a_cell_is_new_then_started_then_done(cell):
    assert state_of(cell) is CellState.NEW
    start(cell)
    assert state_of(cell) is CellState.STARTED
    (cell.folder / "summary.json").write_text('{"steps": 30, "wall_seconds": 1}')
    assert state_of(cell) is CellState.DONE


def test_the_command_starts_or_resumes(cell):
    command = shell_command(cell, CellState.NEW)
    assert command == (
        f"grpo-replay train tiny --set run.steps=30 --set run.seed=3 --output-dir {cell.folder}"
    )
    resumed = shell_command(cell, CellState.STARTED)
    assert resumed == f"grpo-replay train --resume --output-dir {cell.folder}"


def test_a_run_killed_while_it_made_its_folders_is_new(cell):
    for name in ("rollouts", "log"):
        (cell.folder / name).mkdir(parents=True)
    (cell.folder / ".lock").touch()
    (cell.folder / "recipe.yaml.tmp").touch()
    assert state_of(cell) is CellState.NEW
    RunDirectory(cell.folder).refuse_occupied()


def test_a_folder_with_other_files_is_refused(cell):
    cell.folder.mkdir(parents=True)
    (cell.folder / "thesis.tex").touch()
    with pytest.raises(OutputDirectoryError, match="holds files but no run"):
        state_of(cell)


def test_a_run_of_another_recipe_is_refused_with_the_difference(cell):
    start(cell)
    text = (cell.folder / "recipe.yaml").read_text()
    (cell.folder / "recipe.yaml").write_text(text.replace(" steps: 30", " steps: 31"))
    with pytest.raises(OutputDirectoryError, match=r"another recipe: run\.steps 31, now 30"):
        state_of(cell)


def test_a_run_that_was_resumed_with_another_recipe_is_refused(cell):
    start(cell)
    text = (cell.folder / "recipe.yaml").read_text()
    (cell.folder / "recipes").mkdir()
    changed = cell.folder / "recipes" / "step_000006.yaml"
    changed.write_text(text.replace("steps: 30", "steps: 60"))
    with pytest.raises(OutputDirectoryError, match=r"another recipe: run\.steps 60, now 30"):
        state_of(cell)


def test_a_run_of_a_newer_version_is_refused(cell):
    start(cell, grpo_replay="99.0")
    with pytest.raises(OutputDirectoryError, match=r"written by grpo-replay 99\.0, newer"):
        state_of(cell)


def test_a_process_that_someone_else_started_in_a_cell_is_named_while_it_lives(cell):
    start(cell)
    assert process_in(cell) is None
    code = (
        "import sys, pathlib\nfrom grpo_replay.storage.run_directory import RunDirectory\n"
        "run = RunDirectory(pathlib.Path(sys.argv[1])); run.lock(); print('locked', flush=True)\n"
        "sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, cell.folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline()
    assert process_in(cell) == f"process {other.pid}"
    other.communicate()
    assert process_in(cell) is None


def test_a_cell_is_running_while_any_process_with_its_output_lives(cell):
    assert not is_running(cell)
    with locked_log(cell) as log:
        grandchild = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'])"
        process = subprocess.Popen(
            [sys.executable, "-c", grandchild], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        note_start(log, process.pid, cell, CellState.NEW)
    process.wait()
    assert is_running(cell)  # by the child that the process left behind
    told = f"ours/seed-3 is running: process {process.pid}"
    with pytest.raises(OutputDirectoryError, match=told), locked_log(cell):
        pass
    process.stdin.close()
    for _ in range(200):
        if not is_running(cell):
            break
        subprocess.run(["sleep", "0.05"])
    assert not is_running(cell)


@pytest.mark.parametrize(
    "printed, line",
    [
        ("note\nerror: the first line\nmore", "the first line"),
        ("Traceback (most recent call last):\n  File\nValueError: bad\nBug", "ValueError: bad"),
        ("something\nlast words", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_error_is_found_in_the_last_attempt(cell, printed, line):
    cell.log.parent.mkdir(parents=True)
    cell.log.write_text("# process 1: a\nerror: of an earlier attempt\n")
    with locked_log(cell) as log:
        note_start(log, 2, cell, CellState.STARTED)
        os.write(log, printed.encode())
    assert error_line(cell.log) == line


def test_progress_follows_a_file_that_grows_and_is_cut_by_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    progress = Progress(path)
    progress.refresh()
    assert (progress.step, progress.accuracy) == (0, None)
    path.write_text('{"step": 1}\n{"step": 2, "eval/mean": 0.25}\n{"step": 3')
    progress.refresh()
    assert (progress.step, progress.accuracy) == (2, 0.25)
    long = json.dumps({"step": 4, "more": "x" * 40_000})
    path.write_text(f'{{"step": 1}}\n{long}\n{long.replace("4", "5", 1)}\n')
    progress.refresh()
    assert (progress.step, progress.accuracy) == (5, 0.25)
    path.write_text('{"step": 1}\n')
    progress.refresh()
    assert progress.step == 1


def test_the_log_lies_outside_the_run_directory(cell):
    assert not cell.log.is_relative_to(cell.folder)
    assert re.fullmatch(r".*/s/log/ours/seed-3\.log", str(Path(cell.log)))
