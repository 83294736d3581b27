"""Reads and writes starts.jsonl: values that a resume may change and that checks of a run need. It
has a line for the first start, and for each resume that changed a value or emptied the buffer:

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
    """Values from `after_step` to the next start: `model.dtype`, `run.steps` and the schedule of
    the learning rate. `empty_buffer`: the buffer was empty at this start."""

    after_step: int
    empty_buffer: bool
    dtype: str
    steps: int
    learning_rate: float
    schedule: str
    warmup_steps: int

    def rate_of(self, step: int) -> float:
        """Returns the learning rate of training step `step`."""
        names = ("learning_rate", "schedule", "warmup_steps")
        section = OptimizerSection.model_validate({name: getattr(self, name) for name in names})
        return section.rate_of(step, self.steps)


def read_starts(run_dir: Path) -> tuple[Start, ...]:
    """The starts of a run, by step; empty for a run in another trainer. Raises SnapshotError."""
    return tuple(Start(**line) for line in read_metrics(run_dir / STARTS_FILE))


def start_of(starts: Sequence[Start], step: int) -> Start | None:
    """Returns the start after which `step` (1-based) was made; None if unknown."""
    earlier = [start for start in starts if start.after_step < step]
    return earlier[-1] if earlier else None


def record_start(run_dir: Path, recipe: Recipe, step: int, empty_buffer: bool = False) -> None:
    """Record that the run continues after `step` with `recipe`. Removes starts at this step and
    later, whose steps are removed too."""
    optimizer = recipe.optimizer
    new = Start(
        step, empty_buffer, recipe.model.dtype, recipe.run.steps,
        optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps,
    )  # fmt: skip
    kept = [start for start in read_starts(run_dir) if start.after_step < step]
    is_same = kept and replace(kept[-1], after_step=step, empty_buffer=empty_buffer) == new
    if not is_same or empty_buffer:
        kept.append(new)
    lines = (json.dumps(asdict(start)) for start in kept)
    write_text_whole(run_dir / STARTS_FILE, "".join(f"{line}\n" for line in lines))
