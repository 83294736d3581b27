"""The table of cells: all of them, or what matters where there is no room."""

import io
from dataclasses import asdict
from pathlib import Path

import pytest

from grpo_replay.cli import sweep_command
from grpo_replay.cli.app import COMMANDS
from grpo_replay.cli.sweep_command import SweepDisplay, cells_table, print_estimate
from grpo_replay.lab.dry_run.planner import Findings
from grpo_replay.lab.sweep.cells import CellState, Progress
from grpo_replay.lab.sweep.grid import Cell
from grpo_replay.lab.sweep.sweep_run import Entry, Status
from grpo_replay.terminal.console import PlainConsole


def entry(
    seed: int, status: Status, step: int = 0, accuracy: float | None = None, message="", arm="a"
):
    cell = Cell(Path("out"), "", arm, seed, "tiny", ())
    progress = Progress(Path("none"), step=step)
    return Entry(cell, status, CellState.STARTED, 20, progress, message, accuracy=accuracy)


def shown(renderable) -> list[str]:
    console = PlainConsole(file=io.StringIO(), width=80, markup=False)
    console.print(renderable)
    return console.file.getvalue().splitlines()


def test_every_cell_has_a_row_with_state_step_and_accuracy():
    lines = shown(
        cells_table([
            entry(1, Status.DONE, accuracy=0.4567),
            entry(2, Status.RUNNING, step=7, accuracy=0.3),
            entry(3, Status.WAITING),
        ])
    )  # fmt: skip
    assert lines[0].strip() == "3 cells: 1 waiting, 1 running, 1 done"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        ["a/seed-1", "done", "20/20", "45.7"],
        ["a/seed-2", "running", "7/20", "30.0"],
        ["a/seed-3", "waiting", "", ""],
    ]


def test_without_room_what_failed_and_what_runs_comes_first():
    many = [entry(seed, Status.DONE) for seed in range(50)]
    many += [entry(60, Status.RUNNING), entry(61, Status.FAILED)]
    lines = [line for line in shown(cells_table(many, room=5)) if "│" in line]
    assert len(lines) == 5
    assert "seed-61" in lines[0] and "failed" in lines[0] and "seed-60" in lines[1]
    assert "and 48 more" in lines[-1]


def test_elsewhere_than_on_a_terminal_each_change_and_each_evaluation_is_a_line():
    console = PlainConsole(file=io.StringIO(), width=200, markup=False)
    with SweepDisplay(console) as display:
        running = entry(2, Status.RUNNING, message="process 7")
        display.on_change(running)
        display.on_progress([running])
        running.progress.step, running.accuracy = 10, 0.25
        display.on_progress([running, entry(3, Status.WAITING)])
        display.on_progress([running])
        display.on_change(entry(2, Status.FAILED, step=12, message="no [file]", accuracy=0.25))
    assert console.file.getvalue().splitlines() == [
        "running a/seed-2: process 7",
        "running a/seed-2: step 10/20, 25.0 %",
        "failed a/seed-2: step 12/20, 25.0 %, no [file]",
    ]


@pytest.fixture
def asked(monkeypatch):
    """The steps of the recipes that a dry run was asked for; one of 40 steps would not start."""
    steps = []

    def dry_run(recipe, output_dir):
        steps.append(recipe.run.steps)
        found = Findings(exit_code=3 if recipe.run.steps == 40 else 0, unchecked=["a server"])
        return {
            "step": {"generated_tokens_expected": 50_000, "trained_tokens_expected": 100_000},
            "storage": {"checkpoints_gib_most": 0.5}, "hardware": {"processes": 16},
            "memory": {"peak_gib": 120.55}, "fits": None, **asdict(found),
        }  # fmt: skip

    monkeypatch.setattr(sweep_command, "dry_run", dry_run)
    return steps


def to_do(arm: str, seed: int, steps: int, status=Status.WAITING, disk=CellState.NEW, **of_cell):
    cell = Cell(Path("out"), "", arm, seed, "tiny", (f"run.steps={steps}",), **of_cell)
    return Entry(cell, status, disk, steps, Progress(Path("none")))


def estimate_of(entries, capsys) -> tuple[int, list[str]]:
    code = print_estimate(entries)
    return code, [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_the_dry_run_has_one_row_for_cells_of_one_recipe(asked, capsys):
    entries = [to_do("a", 1, 40, Status.DONE), to_do("a", 2, 40), to_do("b", 1, 30)]
    code, lines = estimate_of(entries, capsys)
    assert asked == [40, 30] and code == 3
    rows = [line for line in lines if " × 16 " in line]
    assert rows == [
        "a 1 done, 1 new 40 2.0 M 4.0 M 120.55 × 16 ?",
        "b 1 new 30 1.5 M 3.0 M 120.55 × 16 ?",
    ]
    assert "3 cells, 2 unfinished; to do: 3,500,000 tokens generated, 7,000,000 trained; " \
        "checkpoints 1.50 GiB" in lines  # fmt: skip
    assert lines.count("unchecked: a server") == 1


@pytest.mark.parametrize("width", [60, 80])
def test_the_dry_run_loses_no_name_and_no_digit_on_a_narrow_terminal(asked, width, monkeypatch):
    console = PlainConsole(file=io.StringIO(), width=width, markup=False)
    monkeypatch.setattr(sweep_command, "open_console", lambda: console)
    kinds = [(Status.DONE, CellState.DONE)] * 12 + [(Status.RUNNING, CellState.STARTED)] * 2
    kinds += [(Status.WAITING, CellState.STARTED)] * 3 + [(Status.WAITING, CellState.NEW)] * 10
    print_estimate([
        to_do("prioritised-r1", seed, 2500, *kind) for seed, kind in enumerate(kinds)
    ])  # fmt: skip
    text = console.file.getvalue()
    words = set(text.split())
    assert "…" not in text and "prioritised-" in text and "r1" in text
    assert {"2,500", "1,875.0", "3,750.0", "120.55", "16"} < words
    assert {"12", "done,", "3", "started,", "10", "new", "2", "running,"} < words


def test_what_would_stop_a_cell_is_the_exit_code_unless_the_cell_is_done(asked, capsys):
    entries = [to_do(f"a{steps}", seed, steps) for steps in (30, 40) for seed in (1, 2)]
    assert print_estimate(entries) == 3 and asked == [30, 40]
    assert print_estimate(entries[:2]) == 0
    for entry in entries[2:]:
        entry.status = Status.DONE
    assert print_estimate(entries) == 0


def test_the_dry_run_of_a_sweep_that_could_not_start_ends_with_its_exit_code(tmp_path, capsys):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "{name: s, recipe: tiny, set: [prompts.max_prompt_length=1], seeds: [1],"
        " arms: {a: [replay.preset=grpo], b: []}}"
    )
    options = COMMANDS["sweep"](str(path), dry_run=True, output_dir=str(tmp_path / "out"))
    assert sweep_command.run(options) == 3
    assert "problem: prompts.source 'builtin:tiny': none of" in capsys.readouterr().out
