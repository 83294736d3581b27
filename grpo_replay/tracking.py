"""Trackers: TensorBoard, Weights & Biases and trackio behind one interface."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from grpo_replay.errors import UsageError
from grpo_replay.recipe import Recipe


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the numbers of a step; what is None is left out."""
        ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files in RUN/tensorboard. After a resume, what came after `first_step` is hidden."""

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
    """W&B or trackio, whose interfaces agree in what we use."""

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


def open_trackers(recipe: Recipe, run_dir: Path, first_step: int) -> list[Tracker]:
    """The trackers that the recipe names. Raises UsageError if one is not installed."""
    trackers: list[Tracker] = []
    for name in recipe.tracking.report_to:
        if name == "tensorboard":
            trackers.append(TensorBoardTracker(run_dir / "tensorboard", first_step))
            continue
        try:
            module = __import__(name)
        except ImportError as error:
            raise UsageError(
                f"tracking.report_to names {name!r}, which is not installed: "
                f"pip install 'grpo-replay[{name}]', or take it out"
            ) from error
        trackers.append(HostedTracker(module, recipe, run_dir.name))
    return trackers
