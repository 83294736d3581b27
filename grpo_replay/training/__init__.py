"""Trains: Algorithm 1 (`trainer`), a whole run (`run`) with its metrics, weight sync, summary and
model card, and the observer of its progress.

Imports the rest of the core, never the laboratory or `cli`; torch only inside functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_replay.evaluation.evaluation_report import EvaluationReport
    from grpo_replay.recipe import Recipe
    from grpo_replay.storage.checkpoint import RunState


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to the user when a run opens. `key` is the stage that wrote it
    (`opening.RunOpener.stages`), or "disk"."""

    key: str
    text: str


class Observer:
    """Receives progress events; a no-op, used on ranks other than 0."""

    def on_start(
        self, recipe: "Recipe", run_dir: Path, state: "RunState", notices: Sequence[Notice]
    ) -> None:
        """Called when everything is loaded. `notices` are messages for the user."""

    def on_evaluation(self, step: int, report: "EvaluationReport") -> None: ...

    def on_step(self, metrics: Mapping[str, Any]) -> None: ...

    def on_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Receives some completions of the step (`run.sample_rows`)."""

    def on_notice(self, text: str) -> None:
        """Receives a message for the user; about servers, in another thread."""

    def on_status(self, text: str) -> None:
        """Called before long work; `text` says what it is."""
