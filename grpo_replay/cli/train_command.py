"""`grpo-replay train`: launch the ranks if needed, train, and print the result."""

import datetime
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_replay.distributed.environment import prepare_rank, rank_environment
from grpo_replay.errors import INTERRUPTED, CheckpointError, UsageError
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.storage.recipe_history import recipe_to_resume
from grpo_replay.storage.run_directory import RunDirectory, refuse_missing
from grpo_replay.storage.tracking import missing_trackers


def run(
    recipe_name: str | None,
    overrides: Sequence[str] = (),
    output_dir: str | None = None,
    resume: bool = False,
    num_processes: int | None = None,
    hostfile: str | None = None,
    dry_run: bool = False,
    as_json: bool = False,
    gpu_memory_gib: float | None = None,
    from_run: str | None = None,
    generated_tokens_per_second: float | None = None,
    trained_tokens_per_second: float | None = None,
) -> int:
    """Train as the recipe says, or print the dry run; returns the exit code.

    Raises UsageError for options that cannot be combined.
    """
    if num_processes is not None:
        overrides = [*overrides, f"engine.num_processes={num_processes}"]
    if resume and output_dir is None:
        raise UsageError("--resume needs --output-dir, the directory of the run to continue")
    recipe = _read_recipe(recipe_name, overrides, Path(output_dir or "."), resume)
    if dry_run:
        if hostfile is not None:
            raise UsageError(
                "--hostfile with --dry-run: the dry run plans one node of engine.num_processes "
                "ranks; leave --hostfile out"
            )
        from grpo_replay.cli.dry_run_display import run as report

        report(
            recipe, as_json, gpu_memory_gib, output_dir, from_run, generated_tokens_per_second,
            trained_tokens_per_second,
        )  # fmt: skip
        return 0
    _refuse_without_dry_run({
        "--gpu-memory-gib": gpu_memory_gib,
        "--from-run": from_run,
        "--generated-tokens-per-second": generated_tokens_per_second,
        "--trained-tokens-per-second": trained_tokens_per_second,
    })  # fmt: skip
    _check_options(recipe, as_json)
    environment = rank_environment()
    run_dir = Path(output_dir) if output_dir else _default_directory(recipe)
    if not resume and not environment.is_launched:
        RunDirectory(run_dir).refuse_occupied()
    if not environment.is_launched and (recipe.engine.num_processes > 1 or hostfile):
        from grpo_replay.distributed.launch import launch_ranks

        return launch_ranks(
            _arguments_of_ranks(run_dir, output_dir),
            None if hostfile and num_processes is None else recipe.engine.num_processes,
            Path(hostfile) if hostfile else None,
            recipe.engine.threads_per_process,
        )
    prepare_rank(environment)
    return _train(recipe, run_dir, resume, environment.rank == 0)


def _refuse_without_dry_run(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"{name} needs --dry-run; a run uses the machine it finds")


def _read_recipe(name: str | None, overrides: Sequence[str], run_dir: Path, resume: bool) -> Recipe:
    """The recipe of a new run, or with `resume` the run's own with the overrides."""
    if resume and not RunDirectory(run_dir).is_unborn:
        refuse_missing(run_dir)
        return recipe_to_resume(run_dir, name, overrides)
    if name is None and resume:
        raise CheckpointError(
            f"--resume: the run in {run_dir} ended before it had stored its recipe: name RECIPE "
            "to start it there"
        )
    if name is None:
        raise UsageError("train needs a RECIPE; only --resume --output-dir DIR does without")
    return load_recipe(name, overrides)


def _check_options(recipe: Recipe, as_json: bool) -> None:
    if as_json:
        raise UsageError("--json needs --dry-run; the numbers of a run are in its metrics.jsonl")
    if missing := missing_trackers(recipe):
        raise UsageError("; ".join(missing))


def _train(recipe: Recipe, run_dir: Path, resume: bool, is_main: bool) -> int:
    from grpo_replay.cli.train_display import RunDisplay, open_display
    from grpo_replay.distributed.failures import wait_for_rank_0
    from grpo_replay.rewards.scorer import RewardScorer
    from grpo_replay.terminal.loading import loading_libraries
    from grpo_replay.terminal.quiet import quiet_libraries, send_to_log

    # Its workers load while this process loads torch.
    with open_display(is_main) as display, RewardScorer.open(recipe.reward) as scorer:
        display.on_status("loading torch, transformers and DeepSpeed")
        with quiet_libraries():
            with loading_libraries():
                from grpo_replay.training.run import run_training
            send_to_log()
            result = run_training(recipe, run_dir, resume, display, scorer)
    if isinstance(display, RunDisplay):
        display.conclude(result)
    logging.shutdown()
    if not result.interrupted:
        return 0
    wait_for_rank_0()
    return INTERRUPTED


def _default_directory(recipe: Recipe) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{recipe.name}-{stamp}"


def _arguments_of_ranks(run_dir: Path, output_dir: str | None) -> list[str]:
    """The command line of the ranks, with a fixed run directory: its name contains the time."""
    arguments = sys.argv[1:]
    return arguments if output_dir else [*arguments, "--output-dir", str(run_dir)]
