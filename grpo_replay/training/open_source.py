"""Opens the source of a run's rollouts, chosen by the mode of its recipe."""

from contextlib import ExitStack
from pathlib import Path

from grpo_replay.storage.checkpoint import RunState
from grpo_replay.training.rollout_source import Parts, RolloutSource


def open_source(
    parts: Parts, state: RunState, checkpoint: Path | None, stack: ExitStack
) -> RolloutSource:
    """Open the source for the recipe's mode, at `state`. After a resume from `checkpoint`, the
    sampler gets the weights that it had then. `stack` closes the source. Collective."""
    if not parts.recipe.run.is_async:
        from grpo_replay.training.synchronous import SynchronousSource

        return SynchronousSource.open(parts, state, checkpoint)
    # Imported here because it loads the clients of servers and collector.
    from grpo_replay.training.asynchronous import open_async_source

    return open_async_source(parts, state, checkpoint, stack)
