"""The source of a run's rollouts, by the mode of its recipe."""

from contextlib import ExitStack
from pathlib import Path

from grpo_replay.storage.checkpoint import RunState
from grpo_replay.training.rollout_source import Parts, RolloutSource


def open_source(
    parts: Parts, state: RunState, checkpoint: Path | None, stack: ExitStack
) -> RolloutSource:
    """The source of the recipe's mode, at `state`. After a resume from `checkpoint`, the sampler
    has the weights that it had then. Collective. What is opened is closed with `stack`."""
    if not parts.recipe.run.is_async:
        from grpo_replay.training.synchronous import SynchronousSource

        return SynchronousSource.open(parts, state, checkpoint)
    # Loads the clients of servers and collector.
    from grpo_replay.training.asynchronous import open_collected

    return open_collected(parts, state, checkpoint, stack)
