"""`grpo-replay train`: launch the ranks if needed, train, and print the result."""

import datetime
import logging
import sys
from pathlib import Path

from grpo_replay.cli.foreign_code import code_of, consider_code
from grpo_replay.cli.options import TrainOptions
from grpo_replay.distributed.environment import prepare_rank, rank_environment
from grpo_replay.errors import INTERRUPTED, CheckpointError, UsageError
from grpo_replay.recipe import Recipe, load_recipe
from grpo_replay.storage.recipe_history import recipe_to_resume
from grpo_replay.storage.run_directory import RunDirectory, refuse_missing
from grpo_replay.storage.tracking import missing_trackers

_OF_DRY_RUNS = (
    *("sample", "gpu_memory_gib", "from_run"),
    *("generated_tokens_per_second", "trained_tokens_per_second", "nodes", "as_json"),
)


def run(options: TrainOptions) -> int:
    """Train as the recipe says, or print the dry run; returns the exit code.

    Raises UsageError for options that cannot be combined.
    """
    if options.smoke:
        return _smoke(options)
    recipe = _read_recipe(options)
    _consider_code(recipe, options)
    if options.dry_run:
        return _dry_run(recipe, options)
    _check_options(recipe, options)
    environment = rank_environment()
    run_dir = Path(options.output_dir) if options.output_dir else _default_directory(recipe.name)
    if not options.resume and not environment.is_launched:
        RunDirectory(run_dir).refuse_occupied()
    if not environment.is_launched and (recipe.engine.num_processes > 1 or options.hostfile):
        from grpo_replay.distributed.launch import launch_ranks

        by_hostfile = options.hostfile and options.num_processes is None
        return launch_ranks(
            _arguments_of_ranks(run_dir, options.output_dir),
            None if by_hostfile else recipe.engine.num_processes,
            Path(options.hostfile) if options.hostfile else None,
            recipe.engine.threads_per_process,
        )
    prepare_rank(environment)
    return _train(recipe, run_dir, options.resume, environment.rank == 0)


def _smoke(options: TrainOptions) -> int:
    for name in ("resume", "dry_run", *_OF_DRY_RUNS):
        if getattr(options, name) not in (None, False):
            raise UsageError(f"--smoke starts a run: leave out {_spelled(name)}")
    from grpo_replay.cli.smoke import run as try_out

    return try_out(options)


def _dry_run(recipe: Recipe, options: TrainOptions) -> int:
    from grpo_replay.cli.dry_run_display import run as report

    return report(
        recipe, options.as_json, options.gpu_memory_gib, options.output_dir, options.from_run,
        options.generated_tokens_per_second, options.trained_tokens_per_second,
        _ranks_of_nodes(recipe.engine.num_processes, options), options.sample,
    )  # fmt: skip


def _ranks_of_nodes(num_processes: int, options: TrainOptions) -> list[int]:
    """The ranks of every node that a dry run plans for, without contacting any."""
    if options.hostfile is None:
        return [num_processes] * (options.nodes or 1)
    if options.nodes is not None:
        raise UsageError("--nodes and --hostfile both give the nodes: choose one")
    from grpo_replay.distributed.launch import read_hostfile

    hosts = read_hostfile(Path(options.hostfile))
    return [options.num_processes or host.slots for host in hosts]


def _read_recipe(options: TrainOptions) -> Recipe:
    """The recipe of a new run, or with --resume the run's own with the overrides."""
    name, overrides = options.recipe, list(options.overrides)
    if options.num_processes is not None:
        overrides.append(f"engine.num_processes={options.num_processes}")
    if options.resume and options.output_dir is None:
        raise UsageError("--resume needs --output-dir, the directory of the run to continue")
    run_dir = Path(options.output_dir or ".")
    if options.resume and not RunDirectory(run_dir).is_unborn:
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


def _consider_code(recipe: Recipe, options: TrainOptions) -> None:
    """Name the code that a resumed run brings by itself, or with --no-code refuse any."""
    own = options.resume and options.recipe is None
    whose = f"the run in {options.output_dir}" if own else f"recipe {options.recipe}"
    code = code_of(recipe, overrides=options.overrides)
    consider_code(code, whose, options.no_code, own and rank_environment().rank == 0)


def _check_options(recipe: Recipe, options: TrainOptions) -> None:
    for name in _OF_DRY_RUNS[:-1]:
        if getattr(options, name) is not None:
            raise UsageError(f"{_spelled(name)} needs --dry-run; a run uses the machine it finds")
    if options.as_json:
        raise UsageError("--json needs --dry-run; the numbers of a run are in its metrics.jsonl")
    if missing := missing_trackers(recipe):
        raise UsageError("; ".join(missing))


def _spelled(name: str) -> str:
    return "--json" if name == "as_json" else f"--{name.replace('_', '-')}"


def _train(recipe: Recipe, run_dir: Path, resume: bool, is_main: bool) -> int:
    from grpo_replay.cli.train_display import RunDisplay, open_display
    from grpo_replay.distributed.failures import wait_for_rank_0
    from grpo_replay.rewards.scorer import RewardScorer
    from grpo_replay.terminal.quiet import loading_libraries, quiet_libraries, send_to_log

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


def _default_directory(name: str) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{name}-{stamp}"


def _arguments_of_ranks(run_dir: Path, output_dir: str | None) -> list[str]:
    """The command line of the ranks, with a fixed run directory: its name contains the time."""
    arguments = sys.argv[1:]
    return arguments if output_dir else [*arguments, "--output-dir", str(run_dir)]
