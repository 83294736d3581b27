"""The tuning stage: per arm, the values with the best mean over the tuning seeds."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.lab.sweep.cells import read_summary
from grpo_replay.lab.sweep.grid import Arm, Cell, Comparison, value_name
from grpo_replay.lab.sweep.sweep_file import TuneSection
from grpo_replay.storage.atomic import write_json_whole

CHOSEN = "chosen.json"


@dataclass(frozen=True, slots=True)
class Choice:
    """The values chosen for an arm. `scores` maps each candidate to its metric by seed; `tied` are
    other candidates with the same mean; `at_edge` are keys whose value is the grid's least or
    greatest number."""

    arm: str
    overrides: tuple[str, ...]
    scores: Mapping[tuple[str, ...], Mapping[int, float]]
    tied: tuple[str, ...]
    at_edge: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "set": list(self.overrides),
            "tied": list(self.tied),
            "at_edge": list(self.at_edge),
            "candidates": [
                {
                    "name": value_name(candidate),
                    "set": list(candidate),
                    "mean": fmean(by_seed.values()),
                    "seeds": {str(seed): value for seed, value in by_seed.items()},
                }
                for candidate, by_seed in self.scores.items()
            ],
        }

    def describe(self, metric: str) -> list[str]:
        """Sentences for the user; a tie has one of its own."""
        means = ", ".join(
            f"{value_name(candidate)} {fmean(values.values()):.4f}"
            for candidate, values in self.scores.items()
        )
        told = [f"{self.arm}: tuning chose {value_name(self.overrides)} by {metric} ({means})"]
        if self.tied:
            told.append(
                f"{self.arm}: {' and '.join(self.tied)} tied with {value_name(self.overrides)}, "
                "which was taken because tune.grid names it first; more tune.seeds would decide"
            )
        for key in self.at_edge:
            told.append(
                f"{self.arm}: {value_name(self.overrides)} is at the edge of tune.grid.{key}: a "
                "value beyond it may be better"
            )
        return told


def choose(arm: Arm, tune: TuneSection) -> Choice:
    """The candidate with the highest mean of the metric over the tuning runs, which are all
    finished.

    Of candidates with the same mean, the first of the grid. Raises OutputDirectoryError for a run
    without the metric.
    """
    scores = {
        candidate: {cell.seed: _metric_of(cell, tune.metric) for cell in cells}
        for candidate, cells in arm.tuning.items()
    }
    means = {candidate: fmean(values.values()) for candidate, values in scores.items()}
    highest = max(means.values())
    best = [each for each in means if math.isclose(means[each], highest, abs_tol=1e-12)]
    tied = tuple(map(value_name, best[1:]))
    return Choice(arm.name, best[0], scores, tied, tuple(_at_edge(tune, best[0])))


def _at_edge(tune: TuneSection, chosen: Sequence[str]) -> Iterator[str]:
    for key, values in tune.grid.items():
        numbers = [float(v) for v in values if isinstance(v, int | float) and v is not bool(v)]
        value = next(word.partition("=")[2] for word in chosen if word.startswith(f"{key}="))
        if len(numbers) == len(values) > 1 and float(value) in (min(numbers), max(numbers)):
            yield key


def _metric_of(cell: Cell, metric: str) -> float:
    value: Any = read_summary(cell)
    for key in metric.split(".", 1):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise OutputDirectoryError(
            f"{cell.folder}/summary.json has {value!r} for {metric}, so nothing can be chosen: "
            "remove the run to repeat it, or choose another tune.metric"
        )
    return float(value)


def check_choice(comparison: Comparison, choice: Choice) -> None:
    """Raises OutputDirectoryError if chosen.json has another choice, which runs may have used."""
    path = comparison.root / CHOSEN
    before = (read_choices(comparison.root) or {"arms": {}})["arms"].get(choice.arm)
    if before is not None and before["set"] != list(choice.overrides):
        raise OutputDirectoryError(
            f"{path}: {choice.arm} was compared with {', '.join(before['set'])}, and the tuning "
            f"runs now say {', '.join(choice.overrides)}: a tuning run was changed; restore it, "
            "or choose another --output-dir"
        )


def record_choice(comparison: Comparison, choice: Choice) -> None:
    """Write the choice to chosen.json."""
    tune = comparison.file.tune
    assert tune is not None
    document = read_choices(comparison.root) or {
        "metric": tune.metric,
        "seeds": list(tune.seeds),
        "arms": {},
    }
    document["arms"][choice.arm] = choice.to_json()
    write_json_whole(comparison.root / CHOSEN, document)


def read_choices(root: Path) -> dict[str, Any] | None:
    """The document chosen.json; None if nothing was chosen yet. Raises OutputDirectoryError."""
    path = root / CHOSEN
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputDirectoryError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("arms"), dict):
        raise OutputDirectoryError(f"{path}: expected an object with 'arms'; it was changed")
    return document


def tuning_cells(arm: Arm) -> Sequence[Cell]:
    """All tuning runs of an arm."""
    return [cell for cells in arm.tuning.values() for cell in cells]
