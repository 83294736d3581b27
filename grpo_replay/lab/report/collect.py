"""From the PATHs of a report to its arms: runs, sweeps, folders of runs and evaluation files.

An arm is a set of runs that differ only in their seed. All arms of a report are comparable.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_replay.errors import DataError, EvaluationFileError, UsageError, did_you_mean
from grpo_replay.evaluation.comparison import differences
from grpo_replay.evaluation.evaluation_report import refuse_incomparable
from grpo_replay.lab.report.finished_run import (
    FinishedRun,
    UnfinishedRun,
    read_evaluation,
    read_finished_run,
)
from grpo_replay.lab.sweep.cells import error_line, log_of
from grpo_replay.lab.sweep.sweep_file import SWEEP, SweepFile, read_choices, read_folder
from grpo_replay.recipe import Recipe
from grpo_replay.recipe.layers import short_path
from grpo_replay.storage.recipe_history import flatten, shareable
from grpo_replay.terminal.console import tracked

MANY_PATHS = 4

BASE_MODEL_KEYS = ("path", "revision", "random_init")
"""Keys of the recipe's model section that make another base model."""

NOT_AN_AXIS = ("name", "run.seed")
"""Keys in which the runs of one arm may differ."""

OF_THE_MACHINE = (
    "batch.max_tokens_per_microbatch", "batch.packing", "checkpoint.",
    "engine.", "eval.",
    "model.attn_implementation", "model.compile", "model.gradient_checkpointing",
    "reward.time_limit_seconds", "reward.workers",
    "sampling.collection.replay_journal", "sampling.logprob_gap_limit",
    "sampling.max_batch_rollouts", "sampling.servers.",
    "sampling.vllm.", "tracking.",
)  # fmt: skip
"""Keys, and sections of keys, that change where and how a run is computed, not its method. How it
is evaluated is compared by `evaluation.comparison`."""

_FOLDERS = re.compile(r"(?<![\w./])[/~](?:[^\s/]*/)+")
"""The folders of a path in an error, which a report that others read does not name."""


@dataclass(frozen=True, slots=True, eq=False)
class Arm:
    """The finished runs of one arm by seed, and why others are missing.

    The seed of an evaluation file is None. `tuned` are the overrides that a tuning stage chose.
    """

    name: str
    runs: dict[int | None, FinishedRun]
    missing: dict[int, str] = field(default_factory=dict)
    tuned: str = ""

    @property
    def seeds(self) -> list[int]:
        return [seed for seed in self.runs if seed is not None]

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the first run; None for evaluation files and without a finished run."""
        return next((run.recipe for run in self.runs.values()), None)


@dataclass(frozen=True, slots=True, eq=False)
class Experiment:
    """The arms of a report, all comparable with each other. `notes` are sentences on differences
    that were let pass."""

    name: str
    arms: tuple[Arm, ...]
    baseline: Arm
    notes: tuple[str, ...]

    @property
    def runs(self) -> list[FinishedRun]:
        return [run for arm in self.arms for run in arm.runs.values()]


def collect(paths: Sequence[str], baseline: str | None = None) -> Experiment:
    """The experiment in these files and folders, each PATH or NAME=PATH.

    Raises DataError for a run that is unfinished, damaged or of a newer version, and if two runs
    cannot be compared; UsageError for an unknown baseline, or an arm with one seed twice. In a
    sweep, unfinished cells are listed as missing instead.
    """
    named: dict[str, list[Path]] = {}
    for word in dict.fromkeys(paths):
        name, path = _named(word)
        named.setdefault(name, []).append(path)
    arms = [arm for name, own in named.items() for arm in _arms_in(own, name)]
    _refuse_same_names(arms)
    runs = [(_name(arm, run), run) for arm in arms for run in arm.runs.values()]
    if not runs:
        cells = [f"{arm.name} seed {s}: {why}" for arm in arms for s, why in arm.missing.items()]
        raise DataError(f"{' '.join(paths)}: no finished run yet: {'; '.join(cells)}")
    refuse_other_experiments(runs)
    chosen = choose_baseline(arms, baseline)
    return Experiment(
        name=_name_of([name or path.resolve().name for name, own in named.items() for path in own]),
        arms=tuple(arms),
        baseline=next(arm for arm in arms if arm.name == chosen),
        notes=tuple(_notes(arms)),
    )


def _named(word: str) -> tuple[str, Path]:
    """The name ("" without one) and the path of PATH or NAME=PATH. What exists is a path, also with
    an equals sign, as the folders of tuned values have."""
    name, equals, path = word.partition("=")
    if equals and name and path and "/" not in name and not Path(word).exists():
        return name, Path(path)
    return "", Path(word)


def _arms_in(paths: Sequence[Path], name: str) -> list[Arm]:
    """The arms in these paths. With a name, a single arm is called so, and of several each
    NAME/ARM."""
    found = _Found([], [], [])
    for path in paths:
        _add_path(path, found)
    arms = [*_merged(found.arms), *group_by_recipe(found.runs), *evaluation_arms(found.files)]
    if name:
        names = [name] if len(arms) == 1 else [f"{name}/{arm.name}" for arm in arms]
        arms = [
            Arm(each, arm.runs, arm.missing, arm.tuned)
            for each, arm in zip(names, arms, strict=True)
        ]
    return arms


def _name_of(names: Sequence[str]) -> str:
    """The names of what is compared; their number if there are many."""
    return f"{len(names)} runs" if len(names) > MANY_PATHS else ", ".join(names)


def refuse_other_experiments(runs: Sequence[tuple[str, FinishedRun]]) -> None:
    """Raises EvaluationFileError, naming the difference, unless all evaluated the same problems
    under the same settings with as many samples, starting from the same base model."""
    name, first = runs[0]
    for other_name, other in runs[1:]:
        refuse_incomparable(name, first.final, other_name, other.final)
        for benchmark, result in first.final.sampled.benchmarks.items():
            k = other.final.sampled.benchmarks[benchmark].k
            if result.k != k:
                raise EvaluationFileError(
                    f"{benchmark} has {result.k} samples of each problem in {name}, but {k} in "
                    f"{other_name}: evaluate both with the same eval.samples"
                )
    models = [(name, run.recipe.model) for name, run in runs if run.recipe is not None]
    for (name, model), (other_name, other_model) in itertools.pairwise(models):
        for key in BASE_MODEL_KEYS:
            ours, theirs = getattr(model, key, None), getattr(other_model, key, None)
            if ours != theirs:
                raise EvaluationFileError(
                    f"{name} trains model.{key} {ours!r}, but {other_name} {theirs!r}: results of "
                    "other base models cannot be compared; report them separately"
                )


@dataclass(slots=True)
class _Found:
    arms: list[Arm]  # of sweeps
    runs: list[FinishedRun]  # outside sweeps
    files: list[FinishedRun]  # evaluation files


def _add_path(path: Path, found: _Found) -> None:
    if path.is_file() and path.name != SWEEP:
        found.files.append(read_evaluation(path))
        return
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise DataError(
            f"{path}: no such file or folder; give runs, sweeps, folders of runs, or evaluations"
        )
    sweep = read_folder(folder)
    if sweep is not None:
        _add_sweep(folder, sweep, found)
    elif (folder / "recipe.yaml").exists():
        _add_run(folder, found)
    else:
        runs = sorted(child.parent for child in folder.glob("*/recipe.yaml"))
        if not runs:
            raise DataError(
                f"{folder}: neither a run (recipe.yaml), a sweep ({SWEEP}) nor a folder of runs"
            )
        for child in runs:
            _add_run(child, found)


def _add_run(path: Path, found: _Found) -> None:
    """A run given by its own path must be finished; one of a sweep keeps the name of its arm."""
    run = read_finished_run(path)
    arm_folder = path.resolve().parent
    if (arm_folder.parent / SWEEP).exists():
        found.arms.append(Arm(arm_folder.name, {run.seed: run}))
    else:
        found.runs.append(run)


def _add_sweep(folder: Path, sweep: SweepFile, found: _Found) -> None:
    choices = read_choices(folder)
    for arm in sweep.arms:
        runs: dict[int | None, FinishedRun] = {}
        missing = {}
        for seed in tracked(sweep.seeds, f"reading {arm}"):
            place = f"{arm}/seed-{seed}"
            try:
                run = read_finished_run(folder / place)
                if run.seed != seed:
                    raise DataError(
                        f"{folder / place}: its recipe has run.seed {run.seed}: the folder was "
                        "renamed or belongs to another sweep"
                    )
                add_run(runs, run, arm)
            except UnfinishedRun as error:
                failure = error_line(log_of(folder, place))
                why = f": {_FOLDERS.sub('', failure)}" if failure else ""
                missing[seed] = f"{error.reason}{why}"
        tuned = ", ".join(choices[arm]["set"]) if arm in choices else ""
        found.arms.append(Arm(arm, runs, missing, tuned))


def _merged(arms: Sequence[Arm]) -> list[Arm]:
    """Arms of one name as one: several cells of a sweep, or several sweeps. A seed that is finished
    in one of them is not missing."""
    merged: dict[str, Arm] = {}
    for arm in arms:
        known = merged.setdefault(arm.name, Arm(arm.name, {}, {}, arm.tuned))
        for run in arm.runs.values():
            add_run(known.runs, run, arm.name)
        known.missing.update(arm.missing)
    for arm in merged.values():
        for seed in [seed for seed in arm.missing if seed in arm.runs]:
            del arm.missing[seed]
    return list(merged.values())


def _refuse_same_names(arms: Sequence[Arm]) -> None:
    names = [arm.name for arm in arms]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two arms would be called {double}: name one of them, as NAME=PATH")


def _name(arm: Arm, run: FinishedRun) -> str:
    if run.seed is None:
        return arm.name
    return f"{arm.name} seed {run.seed} ({short_path(str(run.path))})"


def _notes(arms: Sequence[Arm]) -> list[str]:
    """Recipes that changed at a resume, steps without a time, and other differences from the first
    run, each once. Names are without paths, for others to read."""
    runs = [
        (arm.name if seed is None else f"{arm.name} seed {seed}", run)
        for arm in arms
        for seed, run in arm.runs.items()
    ]
    name, first = runs[0]
    found = {
        change: f"{each}: its recipe changed at a resume: {change}"
        for each, run in runs
        for change in run.recipe_changes
    }
    for each, run in runs:
        if run.untimed_steps:
            found[each] = (
                f"{each}: {run.untimed_steps} steps were repeated from the journal and waited for "
                "no sampler: their time is unknown, and nothing is compared by seconds"
            )
    for other_name, other in runs[1:]:
        for sentence in differences(first.final, other.final):
            found.setdefault(sentence, f"A = {name}, B = {other_name}: {sentence}")
    return list(found.values())


def add_run(runs: dict[int | None, FinishedRun], run: FinishedRun, arm: str) -> None:
    """Add a run to those of its arm. Raises UsageError if its seed is there already, or if its
    method is another one."""
    if run.seed in runs:
        raise UsageError(
            f"arm {arm} has seed {run.seed} twice: {runs[run.seed].path} and {run.path}; give one "
            "of them"
        )
    if runs:
        _refuse_other_method(next(iter(runs.values())), run, arm)
    runs[run.seed] = run


def _refuse_other_method(first: FinishedRun, other: FinishedRun, arm: str) -> None:
    a, b = _method_of(first), _method_of(other)
    found = [
        f"{key} is {a.get(key)!r} in {first.path} and {b.get(key)!r} in {other.path}"
        for key in differing_keys([a, b])
    ]
    if found:
        raise UsageError(
            f"arm {arm} has runs of several recipes: {', '.join(found)}; the runs of an arm must "
            "have the same but for the seed and the machine: name one of them, as NAME=PATH"
        )


def _method_of(run: FinishedRun) -> dict[str, Any]:
    """Its recipe without what is `OF_THE_MACHINE`, and the steps that the run trained."""
    settings = settings_of(run.recipe)
    found = {key: shareable(each)  # each machine has its own folders
             for key, each in settings.items() if not key.startswith(OF_THE_MACHINE)}  # fmt: skip
    return {**found, "run.steps": len(run.log)}


def group_by_recipe(runs: Sequence[FinishedRun]) -> list[Arm]:
    """Runs outside a sweep as arms: one for each recipe, apart from `NOT_AN_AXIS`."""
    groups: dict[tuple[tuple[str, str], ...], list[FinishedRun]] = {}
    for run in runs:
        key = tuple((name, repr(value)) for name, value in settings_of(run.recipe).items())
        groups.setdefault(key, []).append(run)
    names = name_recipes([members[0].recipe for members in groups.values()])
    arms = []
    for name, members in zip(names, groups.values(), strict=True):
        seeds: dict[int | None, FinishedRun] = {}
        for run in members:
            add_run(seeds, run, name)
        arms.append(Arm(name, dict(sorted(seeds.items(), key=lambda item: item[0] or 0))))
    return arms


def evaluation_arms(files: Sequence[FinishedRun]) -> list[Arm]:
    """One arm for each evaluation file, named by its stem."""
    return [Arm(run.path.stem, {None: run}) for run in files]


def settings_of(recipe: Recipe | None) -> dict[str, Any]:
    """The recipe as dotted keys, without `NOT_AN_AXIS`; empty for an evaluation file."""
    if recipe is None:
        return {}
    flat = flatten(recipe.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if key not in NOT_AN_AXIS}


def name_recipes(recipes: Sequence[Recipe | None]) -> list[str]:
    """A name for each recipe: its preset, and in which keys it differs from others with it."""
    names = []
    for recipe in recipes:
        preset = recipe.replay.preset if recipe else ""
        peers = [settings_of(other) for other in recipes if other and other.replay.preset == preset]
        own = settings_of(recipe)
        words = [f"{key.split('.')[-1]}={shareable(own[key])}" for key in differing_keys(peers)]
        names.append(" ".join([preset, *words]))
    return names


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all recipes."""
    keys: Iterable[str] = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def choose_baseline(arms: Sequence[Arm], wanted: str | None) -> str:
    """The name of the baseline: `wanted`; else the arm `grpo`, the only arm that does not replay,
    or the first. Raises UsageError if there is no such arm, or it has no finished run."""
    names = [arm.name for arm in arms]
    if wanted is None:
        finished = [arm for arm in arms if arm.runs]
        plain = [arm.name for arm in finished if arm.recipe and not arm.recipe.replays]
        if "grpo" in (arm.name for arm in finished):
            return "grpo"
        return plain[0] if len(plain) == 1 else finished[0].name
    if wanted not in names:
        hint = did_you_mean(wanted, names)
        raise UsageError(f"--baseline {wanted}: no such arm{hint}; arms: {', '.join(names)}")
    if not next(arm for arm in arms if arm.name == wanted).runs:
        raise UsageError(f"--baseline {wanted}: this arm has no finished run yet")
    return wanted
