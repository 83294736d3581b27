"""The Python API: recipe → train → evaluate → inspect, in this process. See docs/api.md.

The functions print nothing. Each corresponds to a command, takes its options as arguments, and
raises the errors of `grpo_replay.errors` that the command would print.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_replay.errors import UsageError
from grpo_replay.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from grpo_replay.evaluation.evaluation_report import EvaluationReport
    from grpo_replay.lab.inspection.buffer_summary import Inspection
    from grpo_replay.training.run import RunResult

__all__ = ["Recipe", "evaluate", "inspect", "load_recipe", "train"]


def train(recipe: Recipe, output_dir: str | Path, resume: bool = False) -> "RunResult":
    """Train in this process, on one rank. The result names the run directory and holds the summary.

    Ctrl-C ends the run after the current step, with a checkpoint: `interrupted` is then true.
    Raises UsageError for a recipe of several ranks, which only the command can start.
    """
    if recipe.engine.num_processes > 1:
        raise UsageError(
            f"engine.num_processes {recipe.engine.num_processes}: train() is one process; use "
            "grpo-replay train, or launch this program with torchrun"
        )
    from grpo_replay.distributed.environment import prepare_rank, rank_environment
    from grpo_replay.storage.run_directory import RunDirectory
    from grpo_replay.terminal.quiet import quiet_libraries

    if not resume:
        RunDirectory(Path(output_dir)).refuse_occupied()
    prepare_rank(rank_environment())
    with quiet_libraries():
        from grpo_replay.training.observer import Observer
        from grpo_replay.training.run import run_training

        return run_training(recipe, Path(output_dir), resume, Observer())


def evaluate(
    model: str | Path,
    output: str | Path,
    recipe: str | None = None,
    benchmarks: Sequence[str] = (),
    samples: int | None = None,
    overrides: Sequence[str] = (),
) -> "EvaluationReport":
    """Evaluate a checkpoint, a model folder or a Hugging Face id, and write the report to `output`.

    `overrides` are those of `--set`. Defaults are those of `grpo-replay eval`.
    """
    from grpo_replay.distributed.environment import prepare_rank, rank_environment
    from grpo_replay.evaluation.evaluation_recipe import (
        EvalOptions,
        evaluate_on_rank,
        resolve_evaluation,
    )
    from grpo_replay.evaluation.model_source import find_model
    from grpo_replay.evaluation.output_files import check_output, write_output

    options = EvalOptions(
        str(model), recipe=recipe, benchmarks=benchmarks, k=samples, overrides=overrides
    )
    source, file = find_model(str(model)), Path(output)
    resolved = resolve_evaluation(options, source)
    check_output(file)
    prepare_rank(rank_environment())
    report = evaluate_on_rank(resolved, source, file, world_size=1)
    assert report is not None  # this is rank 0
    write_output(report, file)
    return report


def inspect(path: str | Path, step: int | None = None) -> "Inspection":
    """What the buffer of a run, a checkpoint or a snapshot holds and did (docs/buffer.md)."""
    from grpo_replay.lab.inspection.compute import summarise
    from grpo_replay.lab.inspection.source import open_source

    return summarise(open_source(str(path), step))
