"""`grpo-replay train RECIPE --smoke`: three steps of everything that the recipe asks for.

Two processes, as a user would start them: one warms up, replays and writes a checkpoint, the other
resumes. What did not work is read from the files of the run.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_replay.cli.options import TrainOptions
from grpo_replay.errors import DataError, LaunchError, SnapshotError, UsageError
from grpo_replay.evaluation.benchmarks import find_benchmarks
from grpo_replay.lab.sweep.cell_processes import ENTRY
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.terminal.console import open_console

PROBLEMS = 8
"""Evaluated problems, over all benchmarks; at least one of each."""

_ANY_LENGTH = "run.steps=1000000000"  # a file whose steps are fewer than its warm-up may be tried


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
    started, failures, code = time.monotonic(), list[str](), 0
    for process, words in enumerate(_commands(options, changes, folder)):
        code = _run_to_its_end(words)
        if code != 0:
            failures = [_ended(folder, process, code)]
            break
    else:
        failures = list(missing(folder, recipe))
    seconds = time.monotonic() - started
    console = open_console(soft_wrap=True)
    for failure in failures:
        console.print(f"failed: {failure}")
    if not failures:
        console.print(f"worked: {', '.join(_stages(recipe))} in {seconds:.0f} s")
    if failures or options.output_dir is not None:
        open_console(stderr=True, soft_wrap=True).print(f"the run is in {folder}")
    else:
        shutil.rmtree(folder.parent)
    return code or (DataError.exit_code if failures else 0)


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


def _ended(folder: Path, process: int, code: int) -> str:
    """How far a process came that did not end well."""
    what = ("the run", "the resume")[process]
    done = len(RunDirectory(folder).read_metrics())
    return f"{what} ended with exit code {code} after {done} of 3 steps: see the message above"


def missing(folder: Path, recipe: Recipe) -> Iterator[str]:
    """Sentences on what a run, whose two processes ended well, did not do."""
    from grpo_replay.lab.verification.verify import verify_run

    rows, before = RunDirectory(folder).read_metrics(), None
    for row in rows:
        step, replayed = row["step"], row["replay/rollouts"]
        if not row["fresh/rollouts"] and not replayed:
            yield f"step {step} trained on nothing: {_why_nothing(row)}"
        elif before is not None and recipe.replays and not replayed:
            yield f"step {step} replayed nothing: {_why_nothing(before)}"
        before = row
    if [row["step"] for row in rows] != [1, 2, 3]:
        yield f"{len(rows)} of 3 steps are in metrics.jsonl"
    for step in _evaluated(recipe):
        if not (folder / "eval" / f"step_{step:06d}.json").exists():
            yield f"step {step} was not evaluated"
    try:
        if not verify_run(folder).passed:
            yield f"what the files say is not right: see inspect-buffer {folder} --verify"
    except SnapshotError as error:
        yield str(error)


def _evaluated(recipe: Recipe) -> tuple[int, ...]:
    """The steps that are evaluated."""
    if not recipe.eval.benchmarks:
        return ()
    return (0, 2, 3) if recipe.eval.at_start else (2, 3)


def _why_nothing(row: Mapping[str, Any]) -> str:
    wrong, right = row["groups/all_wrong_fraction"], row["groups/all_correct_fraction"]
    return (
        f"in step {row['step']}, {100 * wrong:.0f} % of the groups were all wrong and "
        f"{100 * right:.0f} % all correct; see the samples above"
    )


def _stages(recipe: Recipe) -> list[str]:
    """What the recipe asks for."""
    evaluations = len(_evaluated(recipe))
    return [
        "3 steps",
        *(["replay"] if recipe.replays else []),
        *([f"{evaluations} evaluations"] if evaluations else []),
        *("checkpoint", "resume", "files read back"),
    ]
