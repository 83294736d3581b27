"""starts.jsonl: what checks of a run need of the values that a resume may change. A line for the
first start, and for each resume that changed one of them or emptied the buffer:

    {"after_step": 6, "empty_buffer": false, "dtype": "float32", "steps": 12,
     "learning_rate": 1e-06, "schedule": "constant", "warmup_steps": 0}
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from grpo_replay.recipe import OptimizerSection, Recipe
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.storage.rollout_log import read_metrics

STARTS_FILE = "starts.jsonl"


@dataclass(frozen=True, slots=True)
class Start:
    """What holds after `after_step`, up to the next start: `model.dtype`, `run.steps` and the
    schedule of the learning rate. With `empty_buffer` the buffer began empty there."""

    after_step: int
    empty_buffer: bool
    dtype: str
    steps: int
    learning_rate: float
    schedule: str
    warmup_steps: int

    def rate_of(self, step: int) -> float:
        """The learning rate of training step `step`."""
        names = ("learning_rate", "schedule", "warmup_steps")
        section = OptimizerSection.model_validate({name: getattr(self, name) for name in names})
        return section.rate_of(step, self.steps)


def read_starts(run_dir: Path) -> tuple[Start, ...]:
    """The starts of a run, by step; none of a run in another trainer. Raises SnapshotError."""
    return tuple(Start(**line) for line in read_metrics(run_dir / STARTS_FILE))


def start_of(starts: Sequence[Start], step: int) -> Start | None:
    """The start that made `step` (1-based); None if it is not known."""
    earlier = [start for start in starts if start.after_step < step]
    return earlier[-1] if earlier else None


def record_start(run_dir: Path, recipe: Recipe, step: int, empty_buffer: bool = False) -> None:
    """Record that the run goes on after `step` by `recipe`. Starts there and later are removed, as
    their steps are."""
    optimizer = recipe.optimizer
    new = Start(
        step, empty_buffer, recipe.model.dtype, recipe.run.steps,
        optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps,
    )  # fmt: skip
    kept = [start for start in read_starts(run_dir) if start.after_step < step]
    same = kept and replace(kept[-1], after_step=step, empty_buffer=empty_buffer) == new
    if not same or empty_buffer:
        kept.append(new)
    lines = (json.dumps(asdict(start)) for start in kept)
    write_text_whole(run_dir / STARTS_FILE, "".join(f"{line}\n" for line in lines))
