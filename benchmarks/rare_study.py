"""Records, missing runs and numbers of the sweep `tiny-rare`, whose protocol is in its file.

    python benchmarks/rare_study.py run runs/tiny-rare       # what has no record, one by one
    python benchmarks/rare_study.py missing runs/tiny-rare   # its commands, for a queue
    python benchmarks/rare_study.py record runs/tiny-rare    # into docs/records/tiny-rare.csv
    python benchmarks/rare_study.py compare                  # the numbers of the protocol

A row of the record is a run at one of its evaluations. A run that is recorded needs no folder any
more: on another machine only the others run, in the order and at the rates of the protocol (the
tuning, a wider grid while an arm prefers an edge of it, and then the comparison).
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import pyarrow.parquet as pq
from rare_numbers import BENCHMARKS, Course, compare, letter_of

from grpo_replay.evaluation.statistics import problem_table
from grpo_replay.lab.report.finished_run import (
    FinishedRun,
    UnfinishedRun,
    evaluation_at,
    read_finished_run,
)
from grpo_replay.lab.sweep.cells import Cell, CellState, expand, shell_command
from grpo_replay.lab.sweep.sweep_file import SweepFile, find_sweep, read_sweep_file
from grpo_replay.shipped_recipes import shipped_recipes_folder
from grpo_replay.storage.run_directory import RunDirectory

SWEEP = "tiny-rare"
RATE = "optimizer.learning_rate"
RECORD = Path(__file__).resolve().parents[1] / "docs" / "records" / f"{SWEEP}.csv"
RUN = ("stage", "arm", "rate", "seed")
"""The columns that name a run. `stage` is `tune` or `compare`."""
COLUMNS = (
    *RUN,
    *("step", "generated", "trained", "trained_tokens", "seconds"),
    *("rare", "hard", "pass", "solved", "mixed", "fresh_success", "replay_success"),
    *(f"{name}_correct" for name in BENCHMARKS),
)
Row = Mapping[str, str]


def read_record(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def write_record(rows: Iterable[Row], file: Path) -> None:
    ordered = sorted(rows, key=lambda row: (row["stage"], row["arm"], float(row["rate"]),
                                            int(row["seed"]), int(row["step"])))  # fmt: skip
    with file.open("w", encoding="utf-8", newline="") as text:
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(ordered)


def runs_of(rows: Iterable[Row]) -> set[tuple[str, ...]]:
    return {tuple(row[name] for name in RUN) for row in rows}


def rows_of(run: FinishedRun, stage: str, arm: str) -> list[dict[str, str]]:
    """A row for each evaluation. Sums and shares are over all steps up to it."""
    sums = {
        name: run.running_total(f"cost/{metric}")
        for name, metric in (("generated", "generated_rollouts"), ("trained", "trained_rollouts"),
                             ("trained_tokens", "trained_tokens"))
    }  # fmt: skip
    seconds, shares = run.running_total("step_time"), shares_of(run)
    found = []
    for step in run.evaluations:
        report = evaluation_at(run, step)
        assert report.samples is not None, f"{run.path}: the samples of step {step} are gone"
        tables = {name: problem_table(report.samples, name) for name in BENCHMARKS}
        correct = {name: table.correct_N.tolist() for name, table in tables.items()}
        found.append(
            {
                "stage": stage, "arm": arm, "rate": f"{run.recipe.optimizer.learning_rate:g}",
                "seed": str(run.seed), "step": str(step), "seconds": f"{seconds[step]:.1f}",
                **{name: str(int(total[step])) for name, total in sums.items()},
                **{name: f"{table.accuracy_N.mean():.6f}" for name, table in tables.items()},
                "pass": f"{fmean(table.passed_N.mean() for table in tables.values()):.6f}",
                **{name: f"{share[step]:.6f}" for name, share in shares.items()},
                **{f"{name}_correct": "".join(map(letter_of, correct[name]))
                   if stage == "compare" else "" for name in BENCHMARKS},
            }
        )  # fmt: skip
    return found


def shares_of(run: FinishedRun) -> dict[str, np.ndarray]:
    """float64 [T + 1] each: the share of the training problems that had a correct rollout up to a
    step, of groups with several rewards, and of successes among the fresh survivors and among the
    rollouts that were replayed. 0 where there is none."""
    problems = shipped_recipes_folder() / "tiny-rare" / "train.jsonl"
    ids = {json.loads(line)["problem_id"] for line in problems.read_text().splitlines()}
    ever, solved, counts = set[str](), [0], [np.zeros(5)]
    for number, line in enumerate(run.lines, 1):
        file = run.path / "rollouts" / f"step_{number:06d}.parquet"
        table = pq.read_table(file, columns=["prompt_id", "reward", "kept"]).to_pydict()
        kept_N, correct_N = np.array(table["kept"]), np.array(table["reward"]) == 1
        ever |= set(np.array(table["prompt_id"])[correct_N])
        solved.append(len(ever & ids))
        replayed = line["replay/rollouts"]
        successes = replayed * (line["replay/positive_fraction"] or 0.0)
        fresh = kept_N.sum(), (kept_N & correct_N).sum()
        counts.append(np.array([len(kept_N), *fresh, replayed, successes]))
    generated, kept, fresh_good, replayed_sum, replayed_good = np.cumsum(counts, axis=0).T
    return {
        "solved": np.array(solved) / len(ids),
        "mixed": kept / np.maximum(generated, 1),
        "fresh_success": fresh_good / np.maximum(kept, 1),
        "replay_success": replayed_good / np.maximum(replayed_sum, 1),
    }


def rate_of(cell: Cell) -> str:
    """As in the record."""
    words = dict(word.split("=", 1) for word in cell.all_overrides())
    return f"{float(words[RATE]):g}"


def name_of(cell: Cell) -> tuple[str, ...]:
    """The cell as `RUN` names it."""
    stage = "compare" if cell.candidate is None else "tune"
    return stage, cell.arm, rate_of(cell), str(cell.seed)


def cells_of(root: Path, rows: Sequence[Row]) -> list[Cell]:
    """The runs of the sweep in `root` as far as the record says which they are: those of the
    tuning, and, once no arm prefers an edge of the grid, those of the comparison."""
    source = find_sweep(SWEEP)
    sweep = read_sweep_file(source)
    finals = final_accuracies(rows)
    tuning: list[Cell] = []
    best: dict[str, Cell] = {}
    for arm in sweep.arms:
        cells = tuning_of(arm, sweep, source, root, finals)
        tuning += cells
        if all(name_of(cell) in finals for cell in cells):
            best[arm] = chosen(cells, finals)
    if len(best) < len(sweep.arms):
        return tuning
    compared = [cell for cell in expand(sweep, source, root) if cell.candidate is None]
    return [*tuning, *(cell.with_choice(best[cell.arm].candidate or ()) for cell in compared)]


def tuning_of(
    arm: str, sweep: SweepFile, source: Path, root: Path, finals: Mapping[tuple[str, ...], float]
) -> list[Cell]:
    """The tuning runs of an arm. Its grid gets the next value for as long as it prefers an edge."""
    assert sweep.tune is not None
    grid = sorted(map(float, sweep.tune.grid[RATE]))
    while True:
        tune = sweep.tune.model_copy(update={"grid": {RATE: grid}})
        cells = expand(sweep.model_copy(update={"tune": tune}), source, root, arm)
        tuning = [cell for cell in cells if cell.candidate is not None]
        if any(name_of(cell) not in finals for cell in tuning):
            return tuning
        best = rate_of(chosen(tuning, finals))
        if best == f"{grid[0]:g}":
            grid.insert(0, grid[0] / 2)
        elif best == f"{grid[-1]:g}":
            grid.append(2 * grid[-1])
        else:
            return tuning


def chosen(tuning: Sequence[Cell], finals: Mapping[tuple[str, ...], float]) -> Cell:
    """A tuning run of an arm with the rate of the best mean accuracy after the last step."""
    by_rate: dict[str, list[Cell]] = {}
    for cell in tuning:
        by_rate.setdefault(rate_of(cell), []).append(cell)
    best = max(by_rate.values(), key=lambda cells: fmean(finals[name_of(c)] for c in cells))
    return best[0]


def record(root: Path, file: Path) -> None:
    """Add the finished runs of a folder to the record. A run that is there stays as it is."""
    rows = read_record(file)
    before = runs_of(rows)
    while True:  # recorded tuning runs say which further runs there are
        known = runs_of(rows)
        for cell in cells_of(root, rows):
            if name_of(cell) in known:
                continue
            try:
                run = read_finished_run(cell.folder)
            except UnfinishedRun:
                continue
            rows += rows_of(run, name_of(cell)[0], cell.arm)
        if runs_of(rows) == known:
            break
    write_record(rows, file)
    print(f"{file.name}: {len(known)} runs, {len(known - before)} of them new", file=sys.stderr)


def missing(root: Path, file: Path) -> list[str]:
    """The commands of the runs without a record."""
    rows = read_record(file)
    recorded = runs_of(rows)
    return [
        shell_command(cell, CellState.STARTED if is_begun(cell) else CellState.NEW)
        for cell in cells_of(root, rows)
        if name_of(cell) not in recorded
    ]


def is_begun(cell: Cell) -> bool:
    return RunDirectory(cell.folder).recipe_path.exists()


def run(root: Path, file: Path) -> None:
    """Run what has no record, one run after the other, and record it."""
    failed = set[str]()
    while True:
        record(root, file)
        left = [line for line in missing(root, file) if line not in failed]
        if not left:
            break
        print(left[0], flush=True)
        if subprocess.run(shlex.split(left[0]), stdout=subprocess.DEVNULL, check=False).returncode:
            print(f"failed: {left[0]}", flush=True)
            failed.add(left[0])


def final_accuracies(rows: Sequence[Row]) -> dict[tuple[str, ...], float]:
    """The accuracy after the last step of every recorded run."""
    last: dict[tuple[str, ...], Row] = {}
    for row in rows:
        name = tuple(row[column] for column in RUN)
        if name not in last or int(row["step"]) > int(last[name]["step"]):
            last[name] = row
    return {name: fmean(float(row[each]) for each in BENCHMARKS) for name, row in last.items()}


def courses(file: Path) -> list[Course]:
    """The recorded runs."""
    by_run: dict[tuple[str, ...], list[Row]] = {}
    for row in read_record(file):
        by_run.setdefault(tuple(row[column] for column in RUN), []).append(row)
    return [Course.of(rows) for rows in by_run.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("run", "record", "missing", "compare"))
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs") / SWEEP)
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    given = parser.parse_args()
    if given.action == "compare":
        print(compare(courses(given.record)))
    elif given.action == "missing":
        print("\n".join(missing(given.folder, given.record)))
    else:
        {"run": run, "record": record}[given.action](given.folder, given.record)


if __name__ == "__main__":
    main()
