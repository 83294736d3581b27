"""`grpo-replay train`: launch the ranks if needed, and train."""

import logging
import sys
from pathlib import Path

from grpo_replay.cli.foreign_code import announce_or_refuse_code, code_of
from grpo_replay.cli.options import TrainOptions
from grpo_replay.cli.run_display import RunDisplay, open_display
from grpo_replay.distributed.environment import prepare_rank, rank_environment, refuse_other_count
from grpo_replay.errors import INTERRUPTED, CheckpointError, UsageError
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.stop import StopToken
from grpo_replay.storage.run_directory import RunDirectory, default_run_dir, refuse_missing
from grpo_replay.storage.stored_recipe import recipe_to_resume
from grpo_replay.terminal.console import print_json


def run(options: TrainOptions) -> int:
    """Train, launch the ranks that train, or print the dry run; returns the exit code.

    Raises UsageError for options that cannot be combined.
    """
    recipe = _read_recipe(options)
    environment, ranks = rank_environment(), recipe.engine.num_processes
    requested = ranks if ranks > 1 else options.num_processes  # None: any number will do
    refuse_other_count(environment, requested, "engine.num_processes")
    _announce_or_refuse_code(recipe, options)
    if options.dry_run:
        return _dry_run(recipe, options)
    _check_options(options)
    run_dir = Path(options.output_dir) if options.output_dir else default_run_dir(recipe.name)
    if not options.resume and not environment.is_launched:
        RunDirectory(run_dir).refuse_occupied()
    if _launches_ranks(recipe, options):
        from grpo_replay.distributed.launch import launch_ranks

        # The ranks need a fixed run directory: the default name contains the time.
        fixed = [] if options.output_dir else ["--output-dir", str(run_dir)]
        return launch_ranks(
            [*sys.argv[1:], *fixed],
            recipe.engine.num_processes,
            recipe.engine.threads_per_process,
        )
    prepare_rank(environment)
    return _train(recipe, run_dir, options.resume, environment.rank == 0)


def _dry_run(recipe: Recipe, options: TrainOptions) -> int:
    """Print the report; the exit code is the one that the run would end with."""
    from grpo_replay.lab.dry_run.dry_run_display import print_dry_run
    from grpo_replay.lab.dry_run.dry_run_report import dry_run

    report = dry_run(
        recipe,
        options.gpu_memory_gib,
        Path(options.output_dir) if options.output_dir else None,
        [recipe.engine.num_processes] * (options.nodes or 1),
        options.sample,
        options.resume,
    )
    if options.as_json:
        print_json(report.to_json())
    else:
        print_dry_run(report)
    return report.findings.exit_code


def _read_recipe(options: TrainOptions) -> Recipe:
    """Read the recipe of a new run, or with --resume the run's own, with the overrides. A run that
    was killed while it opened has none yet, and is started anew."""
    name, overrides = options.recipe, list(options.overrides)
    if options.num_processes is not None:
        overrides.append(f"engine.num_processes={options.num_processes}")
    if options.resume and options.output_dir is None:
        raise UsageError("--resume needs --output-dir, the directory of the run to continue")
    run_dir = Path(options.output_dir or ".")
    if options.resume and not RunDirectory(run_dir).holds_only_opening_files:
        refuse_missing(run_dir)
        return recipe_to_resume(run_dir, name, overrides)
    if name is None and options.resume:
        raise CheckpointError(
            f"--resume: the run in {run_dir} ended before it had stored its recipe: name RECIPE "
            "to start it there"
        )
    if name is None:
        raise UsageError("train needs a RECIPE; only --resume --output-dir DIR does without")
    return load_recipe(name, overrides)


def _announce_or_refuse_code(recipe: Recipe, options: TrainOptions) -> None:
    """Announce the code that a resumed run's recipe names; with --no-code refuse any recipe's."""
    is_own = options.resume and options.recipe is None
    origin = f"the run in {options.output_dir}" if is_own else f"recipe {options.recipe}"
    code = code_of(recipe, overrides=options.overrides)
    runs_here = options.dry_run or not _launches_ranks(recipe, options)
    announces = is_own and runs_here and rank_environment().rank == 0
    announce_or_refuse_code(code, origin, options.no_code, announces)


def _launches_ranks(recipe: Recipe, options: TrainOptions) -> bool:
    """Returns whether this process starts the ranks instead of being one of them."""
    return recipe.engine.num_processes > 1 and not rank_environment().is_launched


def _check_options(options: TrainOptions) -> None:
    for name in ("sample", "gpu_memory_gib", "nodes", "as_json"):
        if getattr(options, name):
            spelled = name.removeprefix("as_").replace("_", "-")
            raise UsageError(f"--{spelled} needs --dry-run; a run has its metrics.jsonl")


def _train(recipe: Recipe, run_dir: Path, resume: bool, is_main: bool) -> int:
    """Trains in this process, as one rank; returns the exit code, 130 after a request to stop."""
    from grpo_replay.distributed.failures import leave_run
    from grpo_replay.rewards.scorer import RewardScorer
    from grpo_replay.terminal.quiet import loading_libraries, quiet_libraries, send_to_log

    stop = StopToken()
    with (
        stop.on_signals(),
        open_display(is_main, stop) as display,
        RewardScorer.open(recipe.reward) as scorer,  # its workers load while this process does
    ):
        display.on_status("loading torch, transformers and DeepSpeed")
        with quiet_libraries():
            with loading_libraries():
                from grpo_replay.training.run import run_training
            send_to_log()
            result = run_training(recipe, run_dir, resume, display, scorer, stop)
    if isinstance(display, RunDisplay):
        display.conclude(result)
    logging.shutdown()
    if not result.interrupted:
        return 0
    leave_run()
    return INTERRUPTED
