"""What a run's directory lacks: an inspection of it cannot tell all."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_replay.errors import RecipeError, SnapshotError
from grpo_replay.lab.inspection.source import Source
from grpo_replay.storage.recipe_history import read_history


def find_gaps(source: Source) -> Iterator[str]:
    """One warning for each kind of file that lacks steps up to the inspected one."""
    if source.run_dir is None or source.recipe is None or source.step is None:
        return
    steps = range(1, source.step + 1)
    yield from _metrics(source, steps)
    try:
        history = read_history(source.run_dir)
    except RecipeError as error:
        raise SnapshotError(f"the recipe of the run is invalid: {error}") from error
    logged = [step for step in steps if history.at(step).tracking.log_rollouts]
    replayed = [step for step in logged if history.at(step).replays]
    yield from _files("rollouts", source.rollout_files, logged)
    yield from _files("draws", source.draw_files, replayed)


def _metrics(source: Source, steps: Sequence[int]) -> Iterator[str]:
    found = [int(line["step"]) for line in source.metrics]
    if not found:
        yield (
            "metrics.jsonl is missing or empty: nothing is known of the training itself. Restore "
            "it from a copy."
        )
    elif found != list(steps):
        wrong = next(
            (step for step, line in zip(steps, found, strict=False) if step != line), len(found) + 1
        )
        yield (
            f"metrics.jsonl does not have each of the {len(steps)} steps once and in order, from "
            f"step {wrong} on. Restore it from a copy."
        )


def _files(
    folder: str, files: Sequence[tuple[int, Path]], expected: Sequence[int]
) -> Iterator[str]:
    present = {step for step, _ in files}
    missing = [step for step in expected if step not in present]
    if missing:
        more = f" and of {len(missing) - 1} more steps" if len(missing) > 1 else ""
        yield (
            f"{folder}/ lacks the file of step {missing[0]}{more}: their rows are missing from "
            "everything shown here. Restore them from a copy."
        )
