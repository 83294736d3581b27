"""The table of cells: all of them, or what matters where there is no room."""

import io
from dataclasses import asdict
from pathlib import Path

import pytest

from grpo_replay.cli import sweep_command
from grpo_replay.cli.app import COMMANDS
from grpo_replay.cli.sweep_command import SweepDisplay, cells_table, estimate_table
from grpo_replay.lab.dry_run.planner import Findings
from grpo_replay.lab.sweep.cells import CellState, Progress
from grpo_replay.lab.sweep.grid import Cell
from grpo_replay.lab.sweep.sweep_run import Entry, Status
from grpo_replay.terminal.console import PlainConsole, print_table


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


def test_the_dry_run_sums_the_seeds_of_an_arm_in_one_row():
    def cell(name: str, state: str, tokens: int) -> dict:
        return {"name": name, "state": state, "awaits_tuning": name.startswith("a/"),
                "generated_tokens": tokens, "trained_tokens": 2 * tokens,
                "peak_gib": 0.75, "processes": 2, "fits": True}  # fmt: skip

    cells = [
        cell("tune/a/rate=1/seed-1", "done", 0),
        cell("tune/a/rate=1/seed-2", "new", 1_000_000),
        cell("a/seed-3", "new", 1_500_000),
    ]
    rows = [" ".join(line.split()) for line in shown(estimate_table({"cells": cells}))[-3:-1]]
    assert rows == [
        "tune/a/rate=1 1 done, 1 new 1.0 M 2.0 M 0.75 × 2 yes",
        "a 1 new* 1.5 M 3.0 M 0.75 × 2 yes",
    ]


@pytest.mark.parametrize("width", [60, 80])
def test_the_dry_run_loses_no_name_and_no_digit_on_a_narrow_terminal(width):
    counts = {"done": 12, "started": 3, "new": 10, "running": 2}
    cells = [
        {"name": f"prioritised-r1/seed-{state}{seed}", "state": state, "awaits_tuning": True,
         "generated_tokens": 45_678_900, "trained_tokens": 91_357_800,
         "peak_gib": 120.55, "processes": 16, "fits": None}
        for state, count in counts.items() for seed in range(count)
    ]  # fmt: skip
    console = PlainConsole(file=io.StringIO(), width=width, markup=False)
    print_table(console, estimate_table({"cells": cells}))
    text = console.file.getvalue()
    words = set(text.split())
    assert "…" not in text and "prioritised-" in text and "r1" in text
    assert {"1,233.3", "2,466.7", "120.55", "16"} < words
    assert {"12", "done,", "3", "started,", "10", "new,", "2", "running*"} < words


def test_seeds_share_an_estimate_and_other_numbers_of_steps_have_their_own(monkeypatch):
    asked = []

    def dry_run(recipe, output_dir):
        asked.append(recipe.run.steps)
        found = Findings(exit_code=3 if recipe.run.steps == 40 else 0)
        return {
            "step": {"generated_tokens_expected": recipe.run.steps, "trained_tokens_expected": 1},
            "storage": {"checkpoints_gib_most": 0}, "hardware": {"processes": 1},
            "memory": None, "fits": None, **asdict(found),
        }  # fmt: skip

    monkeypatch.setattr(sweep_command, "dry_run", dry_run)
    entries = []
    for steps, seed in ((30, 1), (30, 2), (40, 1), (40, 2)):
        cell = Cell(Path("out"), "", f"a{steps}", seed, "tiny", (f"run.steps={steps}",))
        progress = Progress(Path("none"))
        entries.append(Entry(cell, Status.WAITING, CellState.NEW, steps, progress))
    cells = sweep_command.estimate(entries)["cells"]
    assert asked == [30, 40]
    assert [cell["generated_tokens"] for cell in cells] == [900, 900, 1600, 1600]
    # what would stop a cell is the exit code, unless the cell is done
    assert sweep_command.print_estimate(entries, as_json=True) == 3
    assert sweep_command.print_estimate(entries, as_json=False) == 3
    assert sweep_command.print_estimate(entries[:2], as_json=False) == 0
    for entry in entries[2:]:
        entry.status = Status.DONE
    assert sweep_command.print_estimate(entries, as_json=True) == 0


def test_the_dry_run_of_a_sweep_that_could_not_start_ends_with_its_exit_code(tmp_path, capsys):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "{name: s, recipe: tiny, set: [prompts.max_prompt_length=1], seeds: [1],"
        " arms: {a: [replay.preset=grpo], b: []}}"
    )
    options = COMMANDS["sweep"](str(path), dry_run=True, output_dir=str(tmp_path / "out"))
    assert sweep_command.run(options) == 3
    assert "problem: prompts.source 'builtin:tiny': none of" in capsys.readouterr().out
