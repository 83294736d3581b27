"""`grpo-replay train RECIPE --smoke`: three steps of everything that the recipe asks for.

Two processes, as a user would start them: one warms up, replays and writes a checkpoint, the other
resumes. What worked is read from the files of the run.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from grpo_replay.cli.options import TrainOptions
from grpo_replay.errors import DataError, LaunchError, SnapshotError, UsageError
from grpo_replay.evaluation.benchmarks import find_benchmarks
from grpo_replay.lab.sweep.cell_processes import ENTRY
from grpo_replay.recipe import EvalSection, Recipe, load_recipe
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.terminal.console import open_console, printable

PROBLEMS = 8
"""Evaluated problems, over all benchmarks; at least one of each."""

_ANY_LENGTH = "run.steps=1000000000"  # a file whose steps are fewer than its warm-up may be tried
_SEE = "see the message above"
_TIMED = re.compile(r": (evaluation|checkpoint) of step (\d+): ([\d.]+) s$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a recipe asks for, of what the three steps show: the steps that are evaluated, if it
    names any benchmark, and whether it replays."""

    evaluations: tuple[int, ...]
    replays: bool

    @classmethod
    def of(cls, evaluation: EvalSection, replays: bool) -> "_Wanted":
        steps = (0, 2, 3) if evaluation.at_start else (2, 3)
        return cls(steps if evaluation.benchmarks else (), replays)


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the result. `missing` says what did not work; None if it did. `reached` is False
    for what did not even begin, `skipped` True for what the recipe does not ask for."""

    name: str
    seconds: float | None
    outcome: str = ""
    missing: str | None = None
    reached: bool = True
    skipped: bool = False

    @property
    def state(self) -> str:
        if self.skipped:
            return "skipped"
        if not self.reached:
            return "not reached"
        return "failed" if self.missing else "ok"


def run(options: TrainOptions) -> int:
    """Try the recipe of `options`; returns 0 only if all of it worked.

    Without --output-dir the run goes to a temporary folder, which is removed if all worked.
    """
    if options.recipe is None:
        raise UsageError("--smoke needs a RECIPE: it starts a run of its own")
    recipe = load_recipe(options.recipe, [*options.overrides, _ANY_LENGTH])
    changes = smoke_settings(recipe)
    load_recipe(options.recipe, [*options.overrides, *changes])  # refused before anything starts
    folder = Path(options.output_dir or tempfile.mkdtemp(prefix="grpo-replay-smoke-")) / "run"
    if options.output_dir is not None:
        folder = folder.parent
        RunDirectory(folder).refuse_occupied()
    seconds, code = [], 0
    for words in _commands(options, changes, folder):
        started = time.monotonic()
        code = _run_to_its_end(words)
        seconds.append(time.monotonic() - started)
        if code != 0:
            break
    stages = list(_stages(_Wanted.of(recipe.eval, recipe.replays), folder, seconds))
    stages = with_cause(stages)
    failed = code or any(stage.state in ("failed", "not reached") for stage in stages)
    _print(stages, options.recipe)
    if failed or options.output_dir is not None:
        open_console(stderr=True, soft_wrap=True).print(f"the run is in {folder}")
    else:
        shutil.rmtree(folder.parent)
    return code or (DataError.exit_code if failed else 0)


def with_cause(stages: list[Stage]) -> list[Stage]:
    """The stages, of which the first that did not work is the one that failed: where it left no
    trace, it counts as reached."""
    first = next((s for s in stages if s.state in ("failed", "not reached")), None)
    if first is None or first.reached:
        return stages
    return [replace(s, missing=_SEE, reached=True) if s is first else s for s in stages]


def smoke_settings(recipe: Recipe) -> list[str]:
    """The settings of `--set` that make three steps of a recipe: one of warm-up, two that replay,
    a checkpoint after the second, evaluations of a few problems."""
    benchmarks = find_benchmarks(recipe.eval, recipe.prompts)
    problems = max(1, PROBLEMS // max(1, len(benchmarks)))
    return [
        "run.steps=3",
        f"replay.warmup_steps={min(recipe.replay.warmup_steps, 1)}",
        f"optimizer.warmup_steps={min(recipe.optimizer.warmup_steps, 1)}",
        "checkpoint.every_steps=2",
        "eval.every_steps=null",
        "eval.samples=1",
        f"eval.max_problems={min(recipe.eval.max_problems or problems, problems)}",
    ]


def _commands(options: TrainOptions, changes: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """The words after `grpo-replay` of both processes. The first ends after step 2."""
    ranks = ["--output-dir", str(folder)]
    if options.num_processes is not None:
        ranks += ["--num-processes", str(options.num_processes)]
    if options.hostfile is not None:
        ranks += ["--hostfile", options.hostfile]
    settings = [*options.overrides, *changes, "run.steps=2"]
    given = [word for each in settings for word in ("--set", each)]
    refused = ["--no-code"] if options.no_code else []  # a run that was let in may be resumed
    yield ["train", str(options.recipe), *given, *ranks, *refused]
    yield ["train", "--resume", *ranks, "--set", "run.steps=3"]


def _run_to_its_end(words: Sequence[str]) -> int:
    """The exit code of a command. It shows its progress, but not the result of its few steps."""
    command = [sys.executable, "-m", ENTRY, str(os.getpid()), *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    code = None
    while code is None:
        with contextlib.suppress(KeyboardInterrupt):  # the process has heard it too
            code = process.wait()
    if code < 0:
        print(f"the run was killed by {signal.Signals(-code).name}", file=sys.stderr)
        return LaunchError.exit_code
    return code


def _stages(wanted: _Wanted, folder: Path, seconds: Sequence[float]) -> Iterator[Stage]:
    """What each stage took and did, from the files of the run and the seconds of its processes."""
    run_dir, timed = RunDirectory(folder), _timed(folder)
    steps = {row["step"]: row for row in run_dir.read_metrics()}

    def rest(process: int, own: Sequence[int]) -> float | None:
        """The seconds that a process spent on anything but these steps and what follows them."""
        if len(seconds) <= process:
            return None
        named = sum(taken for (_, step), taken in timed.items() if step in own)
        return seconds[process] - named - sum(steps[s]["step_time"] for s in own if s in steps)

    begun = bool(steps) or ("evaluation", 0) in timed
    none = f"completed no step: {_SEE}"
    yield Stage("start", rest(0, (0, 1, 2)), missing=None if begun else none)
    yield _evaluation(wanted, timed, steps)
    yield _step(wanted, steps, 1, "warm-up")
    yield _step(wanted, steps, 2, "replay")
    saved = timed.get(("checkpoint", 2))
    lost = None if saved is not None else "not written"
    yield Stage("checkpoint", saved, _size(folder), lost, reached=2 in steps)
    stuck = None if 3 in steps else f"did not come to step 3: {_SEE}"
    yield Stage("resume", rest(1, (3,)), missing=stuck, reached=len(seconds) > 1)
    yield _step(wanted, steps, 3, "resumed")
    if 3 in steps:
        yield _verified(folder)


def _timed(folder: Path) -> dict[tuple[str, int], float]:
    """The seconds of evaluations and checkpoints by step, from the logs of the run."""
    logs = sorted((folder / "log").glob("attempt_*.log"))
    found = [_TIMED.findall(log.read_text(encoding="utf-8", errors="replace")) for log in logs]
    return {(what, int(step)): float(taken) for each in found for what, step, taken in each}


def _evaluation(
    wanted: _Wanted,
    timed: Mapping[tuple[str, int], float],
    steps: Mapping[int, Mapping[str, Any]],
) -> Stage:
    if not wanted.evaluations:
        return Stage("evaluation", None, "eval.benchmarks is empty", skipped=True)
    taken = [seconds for (what, _), seconds in timed.items() if what == "evaluation"]
    absent = [step for step in wanted.evaluations if ("evaluation", step) not in timed]
    due = [step for step in absent if step in steps or (step == 0 and steps)]
    accuracy = steps.get(3, {}).get("eval/mean")
    return Stage(
        "evaluation",
        sum(taken) if taken else None,
        f"{len(taken)} times" + ("" if accuracy is None else f", at last {100 * accuracy:.0f} %"),
        f"none of step {', '.join(map(str, due))}" if due else None,
        reached=bool(taken or due),
    )


def _step(wanted: _Wanted, steps: Mapping[int, Mapping[str, Any]], step: int, what: str) -> Stage:
    name, row = f"step {step}, {what}", steps.get(step)
    if row is None:
        return Stage(name, None, reached=False)
    fresh, replayed = row["fresh/rollouts"], row["replay/rollouts"]
    missing = None
    if not fresh and not replayed:
        missing = f"trained on nothing: {_why_nothing(row)}"
    elif step > 1 and wanted.replays and not replayed:
        missing = f"replayed nothing: {_why_nothing(steps[step - 1])}"
    spent = ", ".join(
        f"{doing} {row[f'cost/{doing}_seconds']:.1f}"
        for doing in ("generation", "reward", "training")
    )
    return Stage(name, row["step_time"], f"{fresh} fresh, {replayed} replayed; {spent}", missing)


def _why_nothing(row: Mapping[str, Any]) -> str:
    wrong, right = row["groups/all_wrong_fraction"], row["groups/all_correct_fraction"]
    return (
        f"in step {row['step']}, {100 * wrong:.0f} % of the groups were all wrong and "
        f"{100 * right:.0f} % all correct; see the samples above"
    )


def _size(folder: Path) -> str:
    files = [path for path in (folder / "checkpoints").glob("step_000002/**/*") if path.is_file()]
    return f"{sum(path.stat().st_size for path in files) / 1e6:,.1f} MB" if files else ""


def _verified(folder: Path) -> Stage:
    """`inspect-buffer --verify` on the run."""
    from grpo_replay.lab.verification.verify import verify_run

    started = time.monotonic()
    try:
        wrong = None if verify_run(folder).passed else "see inspect-buffer --verify"
    except SnapshotError as error:
        wrong = str(error)
    return Stage("files", time.monotonic() - started, "read back and recomputed", wrong)


def _print(stages: Sequence[Stage], recipe: str) -> None:
    table = Table(title=f"smoke test of {recipe}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("stage")
    table.add_column("")
    table.add_column("seconds", justify="right")
    table.add_column("")
    for stage in stages:
        taken = "" if stage.seconds is None else f"{stage.seconds:.1f}"
        missing = stage.missing if stage.state == "failed" else None
        told = "; ".join(part for part in (missing, stage.outcome) if part)
        table.add_row(stage.name, stage.state, taken, printable(told))
    open_console().print(table)
