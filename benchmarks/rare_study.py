"""Records, missing runs and numbers of the sweep `tiny-rare`, whose protocol is in its file.

    python benchmarks/rare_study.py record runs/tiny-rare        # docs/records/tiny-rare.csv
    python benchmarks/rare_study.py missing runs/tiny-rare | sh  # run what has no record
    python benchmarks/rare_study.py compare                      # the numbers of the protocol

A row of the record is a run at one of its evaluations. A run that is recorded needs no folder any
more: on another machine only the missing ones run, at the rates that the tuning runs chose.
"""

from __future__ import annotations

import argparse
import csv
import json
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
from grpo_replay.lab.sweep.sweep_file import find_sweep, read_sweep_file
from grpo_replay.shipped_recipes import shipped_recipes_folder

SWEEP = "tiny-rare"
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


def cells_of(root: Path) -> list[Cell]:
    source = find_sweep(SWEEP)
    return expand(read_sweep_file(source), source, root)


def read_record() -> list[dict[str, str]]:
    if not RECORD.exists():
        return []
    with RECORD.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_record(rows: Iterable[Row]) -> None:
    ordered = sorted(rows, key=lambda row: (row["stage"], row["arm"], float(row["rate"]),
                                            int(row["seed"]), int(row["step"])))  # fmt: skip
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
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


def stage_of(cell: Cell) -> str:
    return "compare" if cell.candidate is None else "tune"


def record(root: Path) -> None:
    """Add the finished runs of a folder to the record. A run that is there stays as it is."""
    rows = read_record()
    before = runs_of(rows)
    for cell in cells_of(root):
        try:
            run = read_finished_run(cell.folder)
        except UnfinishedRun:
            continue
        name = (stage_of(cell), cell.arm, f"{run.recipe.optimizer.learning_rate:g}", str(cell.seed))
        if name not in before:
            rows += rows_of(run, name[0], cell.arm)
    write_record(rows)
    after = runs_of(rows)
    print(f"{RECORD.name}: {len(after)} runs, {len(after - before)} of them new")


def missing(root: Path) -> list[str]:
    """The commands of the runs without a record, and of the comparison as far as its rates are
    chosen."""
    rows = read_record()
    recorded, cells = runs_of(rows), cells_of(root)
    found = []
    for cell in cells:
        candidate = cell.candidate
        if candidate is None:
            candidate = chosen(rows, [c for c in cells if c.arm == cell.arm and c.candidate])
            if candidate is None:
                continue
            cell = cell.with_choice(candidate)
        rate = f"{float(candidate[0].partition('=')[2]):g}"
        if (stage_of(cell), cell.arm, rate, str(cell.seed)) not in recorded:
            found.append(shell_command(cell, CellState.NEW))
    return found


def chosen(rows: Sequence[Row], tuning: Sequence[Cell]) -> tuple[str, ...] | None:
    """The candidate of an arm with the best mean accuracy after the last step; None while one of
    its tuning runs has no record."""
    finals = final_accuracies(rows)
    scores: dict[tuple[str, ...], list[float]] = {}
    for cell in tuning:
        assert cell.candidate is not None
        rate = f"{float(cell.candidate[0].partition('=')[2]):g}"
        if (name := ("tune", cell.arm, rate, str(cell.seed))) not in finals:
            return None
        scores.setdefault(cell.candidate, []).append(finals[name])
    return max(scores, key=lambda candidate: fmean(scores[candidate]))


def final_accuracies(rows: Sequence[Row]) -> dict[tuple[str, ...], float]:
    """The accuracy after the last step of every recorded run."""
    last: dict[tuple[str, ...], Row] = {}
    for row in rows:
        name = tuple(row[column] for column in RUN)
        if name not in last or int(row["step"]) > int(last[name]["step"]):
            last[name] = row
    return {name: fmean(float(row[each]) for each in BENCHMARKS) for name, row in last.items()}


def courses() -> list[Course]:
    """The recorded runs."""
    by_run: dict[tuple[str, ...], list[Row]] = {}
    for row in read_record():
        by_run.setdefault(tuple(row[column] for column in RUN), []).append(row)
    return [Course.of(rows) for rows in by_run.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "missing", "compare"))
    parser.add_argument("folder", nargs="?", type=Path, help="the folder of the sweep")
    given = parser.parse_args()
    if given.action == "compare":
        print(compare(courses()))
    elif given.folder is None:
        parser.error(f"{given.action} needs the folder of the sweep")
    elif given.action == "record":
        record(given.folder)
    else:
        print("\n".join(missing(given.folder)))


if __name__ == "__main__":
    main()
