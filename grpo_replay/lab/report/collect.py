"""Collects the arms of a report from its PATHs: runs, sweeps and folders of runs.

An arm is a set of runs that differ only in their seed. All arms of a report are comparable.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_replay.errors import DataError, EvaluationFileError, UsageError, no_such_path
from grpo_replay.evaluation.evaluation_report import refuse_incomparable
from grpo_replay.lab.report.finished_run import (
    FinishedRun,
    UnfinishedRun,
    read_finished_run,
)
from grpo_replay.lab.sweep.cells import Cell, error_line
from grpo_replay.lab.sweep.sweep_file import SWEEP, read_choices, read_sweep_file
from grpo_replay.recipe import Recipe
from grpo_replay.storage.run_directory import is_of_another_trainer
from grpo_replay.storage.stored_recipe import flatten, shareable
from grpo_replay.terminal.console import tracked

MANY_PATHS = 4

BASE_MODEL_KEYS = ("path", "revision", "random_init")
"""Keys of the recipe's model section that define the base model."""

NOT_AN_AXIS = ("name", "run.seed", "sampling.servers.address", "sampling.servers.urls")
"""Keys in which the runs of one arm may differ."""


@dataclass(frozen=True, slots=True, eq=False)
class Arm:
    """The finished runs of one arm by seed, and the reasons why others are missing. `tuned` are the
    overrides that a tuning stage chose."""

    name: str
    runs: dict[int, FinishedRun]
    missing: dict[int, str] = field(default_factory=dict)
    tuned: str = ""

    def paired_with(self, other: "Arm") -> list[tuple[FinishedRun, FinishedRun]]:
        """(this arm's run, the other's) for every seed that both have."""
        return [(run, other.runs[s]) for s, run in self.runs.items() if s in other.runs]


@dataclass(frozen=True, slots=True, eq=False)
class Experiment:
    """The comparable arms of a report. `notes` are sentences on differences that are allowed."""

    name: str
    arms: tuple[Arm, ...]
    baseline: Arm
    notes: tuple[str, ...]

    @property
    def runs(self) -> list[FinishedRun]:
        return [run for arm in self.arms for run in arm.runs.values()]


def collect(paths: Sequence[str], baseline: str | None = None) -> Experiment:
    """Collect the experiment in these folders, each PATH or NAME=PATH.

    Raises DataError for a run that is unfinished or cannot be read, and if two runs cannot be
    compared; UsageError for an unknown baseline, or an arm with one seed twice. In a sweep,
    unfinished cells are listed as missing instead.
    """
    named: dict[str, list[Path]] = {}
    for word in dict.fromkeys(paths):
        name, path = _split_name(word)
        named.setdefault(name, []).append(path)
    arms = _merge_arms([arm for name, own in named.items() for arm in _named_arms(name, own)])
    if not any(arm.runs for arm in arms):
        cells = [f"{arm.name} seed {s}: {why}" for arm in arms for s, why in arm.missing.items()]
        raise DataError(f"{' '.join(paths)}: no finished run yet: {'; '.join(cells)}")
    _refuse_other_experiments([run for arm in arms for run in arm.runs.values()])
    names = [name or path.resolve().name for name, own in named.items() for path in own]
    return Experiment(
        name=f"{len(names)} runs" if len(names) > MANY_PATHS else ", ".join(names),
        arms=tuple(arms),
        baseline=_baseline(arms, baseline),
        notes=tuple(_notes(arms)),
    )


def _split_name(word: str) -> tuple[str, Path]:
    """Split NAME=PATH; the name of a PATH is "". An existing path is a PATH, also with an equals
    sign, as in the folders of tuned values."""
    name, equals, path = word.partition("=")
    if equals and name and path and "/" not in name and not Path(word).exists():
        return name, Path(path)
    return "", Path(word)


def _named_arms(name: str, paths: Sequence[Path]) -> list[Arm]:
    """Reads the arms in these paths. With a `name`, one arm gets it, several become NAME/ARM."""
    arms = [arm for path in paths for arm in _arms_in(path)]
    unnamed = [run.recipe for arm in arms if not arm.name for run in arm.runs.values()]
    names = iter(_recipe_names(unnamed))
    arms = _merge_arms([arm if arm.name else replace(arm, name=next(names)) for arm in arms])
    if not name:
        return arms
    several = len(arms) > 1
    return [replace(arm, name=f"{name}/{arm.name}" if several else name) for arm in arms]


def _arms_in(path: Path) -> list[Arm]:
    """Reads the arms of a sweep, or one per run of a folder, which has no name yet."""
    if not path.exists():
        raise DataError(no_such_path(path))
    if (path / SWEEP).exists():
        return _arms_of_sweep(path)
    if (path / "recipe.yaml").exists():
        run, arm_folder = read_finished_run(path), path.resolve().parent
        in_sweep = (arm_folder.parent / SWEEP).exists()
        return [Arm(arm_folder.name if in_sweep else "", {run.seed: run})]
    folders = sorted(file.parent for file in path.glob("*/recipe.yaml"))
    runs = [run for run in folders if not is_of_another_trainer(run)]  # it evaluates nothing
    if not runs:
        raise DataError(f"{path}: no run, folder of runs or sweep")
    return [arm for run in runs for arm in _arms_in(run)]


def _arms_of_sweep(folder: Path) -> list[Arm]:
    """Reads a sweep's arms with their finished comparison runs by seed; others are in
    `Arm.missing`, with a reason."""
    sweep, choices, arms = read_sweep_file(folder / SWEEP), read_choices(folder), []
    for name in sweep.arms:
        tuned = ", ".join(choices[name]["set"]) if name in choices else ""
        arm = Arm(name, {}, {}, tuned)
        for seed in tracked(sweep.seeds, f"reading {name}"):
            try:
                arm.runs[seed] = read_finished_run(folder / name / f"seed-{seed}")
            except UnfinishedRun as error:
                log = Cell(folder, name, seed, sweep.recipe, ()).log
                failed = f", failed: see {log.relative_to(folder)}" if error_line(log) else ""
                arm.missing[seed] = error.reason + failed
        arms.append(arm)
    return arms


def _merge_arms(arms: Sequence[Arm]) -> list[Arm]:
    """Merge arms of the same name. Raises UsageError if two have a run of the same seed. A seed
    that is finished in one of them is not missing."""
    merged: dict[str, Arm] = {}
    for arm in arms:
        target = merged.setdefault(arm.name, Arm(arm.name, {}, {}, arm.tuned))
        for seed in arm.runs:
            if seed in target.runs:
                raise UsageError(
                    f"arm {arm.name} has seed {seed} twice: {target.runs[seed].path} and "
                    f"{arm.runs[seed].path}; give one of them, or name one as NAME=PATH"
                )
        target.runs.update(arm.runs)
        target.missing.update(arm.missing)
    return [
        replace(arm, missing={s: why for s, why in arm.missing.items() if s not in arm.runs})
        for arm in merged.values()
    ]


def _refuse_other_experiments(runs: Sequence[FinishedRun]) -> None:
    """Raises EvaluationFileError, which names the difference, unless all runs start from the same
    base model and evaluate the same problems with the same settings and number of samples."""
    first = runs[0]
    for other in runs[1:]:
        refuse_incomparable(str(first.path), first.final, str(other.path), other.final)
        for benchmark, result in first.final.sampled.benchmarks.items():
            k = other.final.sampled.benchmarks[benchmark].k
            if result.k != k:
                raise EvaluationFileError(
                    f"{benchmark} has {result.k} samples of each problem in {first.path}, but {k} "
                    f"in {other.path}: evaluate both with the same eval.samples"
                )
        for key in BASE_MODEL_KEYS:
            ours, theirs = (getattr(run.recipe.model, key) for run in (first, other))
            if ours != theirs:
                raise EvaluationFileError(
                    f"{first.path} trains model.{key} {ours!r}, but {other.path} {theirs!r}: "
                    "results of other base models cannot be compared; report them separately"
                )


def _notes(arms: Sequence[Arm]) -> Iterable[str]:
    """Yield notes on arms whose runs differ in more than the seed, and steps without a time."""
    for arm in arms:
        if keys := _differing_keys([_settings(run.recipe) for run in arm.runs.values()]):
            yield f"the runs of {arm.name} differ in {', '.join(keys)}"
        untimed = [f"seed {seed}" for seed, run in arm.runs.items()
                   if any(line.get("step_time") is None for line in run.lines)]  # fmt: skip
        if untimed:
            yield (
                f"{arm.name}, {', '.join(untimed)}: steps were repeated from the journal and "
                "waited for no sampler, so nothing is compared by seconds"
            )


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe as dotted keys, without `NOT_AN_AXIS`."""
    flat = flatten(recipe.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if key not in NOT_AN_AXIS}


def _recipe_names(recipes: Sequence[Recipe]) -> list[str]:
    """Names each recipe: its preset, and the keys in which recipes of that preset differ."""
    names = []
    for recipe in recipes:
        preset = recipe.replay.preset
        peers = [_settings(other) for other in recipes if other.replay.preset == preset]
        own = _settings(recipe)
        values = [f"{key.split('.')[-1]}={shareable(own[key])}" for key in _differing_keys(peers)]
        names.append(" ".join([preset, *values]))
    return names


def _differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the keys whose values are not the same in all recipes."""
    keys: Iterable[str] = dict.fromkeys(key for recipe in settings for key in recipe)
    first = settings[0] if settings else {}
    return [key for key in keys if any(recipe.get(key) != first.get(key) for recipe in settings)]


def _baseline(arms: Sequence[Arm], name: str | None) -> Arm:
    """Returns the arm `name`; without a name `grpo`, the only arm that does not replay, or the
    first. Raises UsageError if there is no such arm with a finished run."""
    finished = {arm.name: arm for arm in arms if arm.runs}
    if name is not None and name not in finished:
        raise UsageError(f"--baseline {name}: the finished arms are {', '.join(finished)}")
    plain = [arm for arm in finished.values()
             if not any(run.recipe.replays for run in arm.runs.values())]  # fmt: skip
    first = plain[0] if len(plain) == 1 else next(iter(finished.values()))
    return finished[name] if name else finished.get("grpo", first)
