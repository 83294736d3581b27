"""What a cell's folder says of its run, and what is refused before a process is started there."""

import json

import pytest

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.lab.sweep.cells import Cell, CellState, shell_command, state_of
from grpo_replay.recipe import recipe_to_yaml
from grpo_replay.storage.run_directory import RunDirectory


@pytest.fixture
def cell(tmp_path):
    return Cell(tmp_path / "s", "ours", 3, "tiny", ("run.steps=30",))


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


def test_a_run_of_another_recipe_is_refused_with_the_difference(cell):
    start(cell)
    text = (cell.folder / "recipe.yaml").read_text()
    (cell.folder / "recipe.yaml").write_text(text.replace(" steps: 30", " steps: 31"))
    with pytest.raises(OutputDirectoryError, match=r"another recipe: run\.steps 31, now 30"):
        state_of(cell)
