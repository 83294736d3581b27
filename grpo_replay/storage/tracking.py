"""Experiment trackers behind one interface: TensorBoard, Weights & Biases and trackio."""

import importlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from grpo_replay.named_functions import has_module
from grpo_replay.recipe import Recipe, TrackingSection

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the numbers of a step. None is skipped, NaN is NaN in all of them."""
        ...

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record some completions of a step as a table. All rows have the same keys."""
        ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Writes events to RUN/tensorboard. After a resume, those from `first_step` on are hidden.

    A new run loads TensorBoard with its first record, because loading it takes a second, which
    would delay the first step.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder, self._first_step = folder, first_step
        self._opened: SummaryWriter | None = None
        if first_step > 1:  # hide events even if the resumed run makes no step
            self._writer()

    def _writer(self) -> "SummaryWriter":
        if self._opened is None:
            from torch.utils.tensorboard import SummaryWriter

            self._opened = SummaryWriter(str(self._folder), purge_step=self._first_step)
        return self._opened

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        writer = self._writer()
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "step":
                writer.add_scalar(name, value, step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        head = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
        lines = [*head, *(" | ".join(map(_markdown_cell, row.values())) for row in rows)]
        self._writer().add_text("samples", "\n".join(f"| {line} |" for line in lines), step)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


def _markdown_cell(value: Any) -> str:
    """Format a value for a table cell: as code, on one line, without the cell separator."""
    text = " ".join(str(value).split()).replace("`", "'").replace("|", "¦")
    return f"`{text}`" if isinstance(value, str) else text


class HostedTracker:
    """Logs to W&B or trackio, which have the same functions. A resumed run continues its record:
    W&B finds it by an id in the run directory, trackio by its name.

    W&B drops values of its own steps that it has seen before, and a resume repeats steps. So the
    step is logged as a metric there, and used as the axis of all others.
    """

    def __init__(self, name: str, recipe: Recipe, run_dir: Path) -> None:
        """Starts or continues the record of the run, with its recipe as configuration."""
        self._module = importlib.import_module(name)
        known = {"id": _run_id(run_dir / f"{name}_id")} if name == "wandb" else {}
        self._module.init(
            project=os.environ.get(f"{name.upper()}_PROJECT", "grpo-replay"),
            name=os.environ.get(f"{name.upper()}_NAME", run_dir.name),
            config=recipe.model_dump(mode="json"),
            resume="allow",
            **known,
        )
        self._has_own_axis = name == "wandb"
        if self._has_own_axis:
            self._module.define_metric("step")
            self._module.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._log(step, {k: v for k, v in metrics.items() if v is not None and k != "step"})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._has_own_axis:
            self._module.log({"step": step, **values})
        else:
            self._module.log(values, step=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import pandas

        table = self._module.Table(dataframe=pandas.DataFrame(rows))
        self._log(step, {"samples": table})

    def close(self) -> None:
        self._module.finish()


def _run_id(file: Path) -> str:
    """Read the id in a file; the first attempt creates it."""
    if not file.exists():
        file.write_text(secrets.token_hex(8))
    return file.read_text()


def missing_trackers(tracking: TrackingSection) -> list[str]:
    """Return a message for each tracker that the recipe names and that is not installed."""
    return [
        f"tracking.report_to names {name!r}, which is not installed: "
        f"pip install 'grpo-replay[{name}]', or remove it from the list"
        for name in tracking.report_to
        if name != "tensorboard" and not has_module(name)
    ]


def open_trackers(recipe: Recipe, run_dir: Path, first_step: int) -> list[Tracker]:
    """Open the trackers that the recipe names. All must be installed."""
    trackers: list[Tracker] = []
    for name in recipe.tracking.report_to:
        if name == "tensorboard":
            trackers.append(TensorBoardTracker(run_dir / "tensorboard", first_step))
            continue
        trackers.append(HostedTracker(name, recipe, run_dir))
    return trackers
