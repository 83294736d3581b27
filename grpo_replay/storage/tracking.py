"""Experiment trackers behind one interface: TensorBoard, Weights & Biases and trackio."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from grpo_replay.recipe import Recipe


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the numbers of a step. Values that are None are skipped."""
        ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in RUN/tensorboard. After a resume, events from `first_step` on are hidden."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class HostedTracker:
    """W&B or trackio. Both have the same functions that we call."""

    def __init__(self, module: Any, recipe: Recipe, run_name: str) -> None:
        self._module = module
        module.init(
            project=recipe.tracking.project,
            name=recipe.tracking.run_name or run_name,
            config=recipe.model_dump(mode="json"),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = {k: v for k, v in metrics.items() if v is not None and k != "step"}
        self._module.log(numbers, step=step)

    def close(self) -> None:
        self._module.finish()


def missing_trackers(recipe: Recipe) -> list[str]:
    """One message per tracker that the recipe names and that is not installed."""
    return [
        f"tracking.report_to names {name!r}, which is not installed: "
        f"pip install 'grpo-replay[{name}]', or remove it from the list"
        for name in recipe.tracking.report_to
        if name != "tensorboard" and importlib.util.find_spec(name) is None
    ]


def open_trackers(recipe: Recipe, run_dir: Path, first_step: int) -> list[Tracker]:
    """Open the trackers that the recipe names. All must be installed."""
    trackers: list[Tracker] = []
    for name in recipe.tracking.report_to:
        if name == "tensorboard":
            trackers.append(TensorBoardTracker(run_dir / "tensorboard", first_step))
            continue
        trackers.append(HostedTracker(importlib.import_module(name), recipe, run_dir.name))
    return trackers
