"""From the PATHs of a report to its arms: runs, sweeps, folders of runs and evaluation files.

An arm is a set of runs that differ only in their seed. All arms of a report are comparable.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_replay.errors import (
    CheckpointError,
    DataError,
    EvaluationFileError,
    UsageError,
    did_you_mean,
)
from grpo_replay.evaluation.comparison import differences
from grpo_replay.evaluation.evaluation_report import refuse_incomparable
from grpo_replay.lab.report.finished_run import (
    FinishedRun,
    UnfinishedRun,
    read_evaluation,
    read_finished_run,
)
from grpo_replay.lab.sweep.cells import error_line
from grpo_replay.lab.sweep.grid import log_of
from grpo_replay.lab.sweep.sweep_file import SWEEP, SweepFile, read_choices, read_folder
from grpo_replay.recipe import REPLAY_PRESETS, Recipe, ReplaySection
from grpo_replay.recipe.layers import short_path
from grpo_replay.storage.checkpoint import newest_state
from grpo_replay.storage.recipe_history import flatten, shareable
from grpo_replay.storage.sealed_files import changed_files
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

    The seed of an evaluation file is None.
    """

    name: str
    runs: dict[int | None, FinishedRun]
    missing: dict[int, str] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        return [seed for seed in self.runs if seed is not None]

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the first run; None for evaluation files and without a finished run."""
        return next((run.recipe for run in self.runs.values()), None)


@dataclass(frozen=True, slots=True, eq=False)
class Experiment:
    """The arms of a report, all comparable with each other.

    `notes` are sentences on differences that were let pass. `tuned` has, by arm, the overrides
    that a tuning stage chose.
    """

    name: str
    arms: tuple[Arm, ...]
    baseline: Arm
    notes: tuple[str, ...]
    tuned: dict[str, str]

    @property
    def runs(self) -> list[FinishedRun]:
        return [run for arm in self.arms for run in arm.runs.values()]


def collect(paths: Sequence[str], baseline: str | None = None) -> Experiment:
    """The experiment in these files and folders.

    Raises DataError for a run that is unfinished, damaged or of a newer version, and if two runs
    cannot be compared; UsageError for an unknown baseline, or an arm with one seed twice. In a
    sweep, unfinished cells are listed as missing instead.
    """
    found = _Found([], [], [], {})
    for path in dict.fromkeys(map(Path, paths)):
        _add_path(path, found)
    arms = [*_merged(found.arms), *group_by_recipe(found.runs), *evaluation_arms(found.files)]
    _refuse_same_names(arms)
    runs = [(_name(arm, run), run) for arm in arms for run in arm.runs.values()]
    if not runs:
        cells = [f"{arm.name} seed {s}: {why}" for arm in arms for s, why in arm.missing.items()]
        raise DataError(f"{' '.join(paths)}: no finished run yet: {'; '.join(cells)}")
    refuse_other_experiments(runs)
    return Experiment(
        name=_name_of(paths),
        arms=tuple(arms),
        baseline=next(arm for arm in arms if arm.name == choose_baseline(arms, baseline)),
        notes=(*_notes(arms), *_same_names(arms)),
        tuned=found.tuned,
    )


def _name_of(paths: Sequence[str]) -> str:
    """The names of the files and folders; their number if there are many."""
    if len(paths) > MANY_PATHS:
        return f"{len(paths)} runs"
    return ", ".join(path.resolve().name for path in map(Path, paths))


def refuse_other_experiments(runs: Sequence[tuple[str, FinishedRun]]) -> None:
    """Raises EvaluationFileError, naming the difference, unless all evaluated the same problems
    under the same settings with as many samples, starting from the same base model."""
    name, first = runs[0]
    for other_name, other in runs[1:]:
        refuse_incomparable(name, first.final, other_name, other.final)
        _refuse_other_samples(name, first, other_name, other)
    trained = [(name, run) for name, run in runs if run.recipe is not None]
    for other_name, other in trained[1:]:
        _refuse_other_base(*trained[0], other_name, other)


@dataclass(slots=True)
class _Found:
    arms: list[Arm]  # of sweeps
    runs: list[FinishedRun]  # outside sweeps
    files: list[FinishedRun]  # evaluation files
    tuned: dict[str, str]


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
    if sweep is not None and isinstance(sweep.recipe, str):
        _add_sweep(folder, sweep, found)
    elif (folder / "recipe.yaml").exists():
        _add_run(folder, found)
    else:
        _add_folder(folder, found)


def _add_folder(folder: Path, found: _Found) -> None:
    inner = sorted(child for child in folder.iterdir() if child.is_dir())
    if sweeps := [child for child in inner if (child / SWEEP).exists()]:
        raise UsageError(
            f"{folder} holds {len(sweeps)} comparisons: report one of them at a time: "
            + ", ".join(short_path(str(child)) for child in sweeps)
        )
    runs = [child for child in inner if (child / "recipe.yaml").exists()]
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
    for arm in sweep.arms:
        runs: dict[int | None, FinishedRun] = {}
        missing = {}
        for seed in tracked(sweep.seeds, f"reading {arm}"):
            place = f"{arm}/seed-{seed}"
            try:
                add_run(runs, _cell(folder / place, seed), arm)
            except UnfinishedRun as error:
                failure = error_line(log_of(folder, place))
                why = f": {_FOLDERS.sub('', failure)}" if failure else ""
                missing[seed] = f"{error.reason}{why}"
        found.arms.append(Arm(arm, runs, missing))
    choices = read_choices(folder)
    if choices is not None:
        found.tuned |= {arm: ", ".join(each["set"]) for arm, each in choices["arms"].items()}


def _cell(path: Path, seed: int) -> FinishedRun:
    run = read_finished_run(path)
    if run.seed != seed:
        raise DataError(
            f"{path}: its recipe has run.seed {run.seed}: the folder was renamed or belongs to "
            "another sweep"
        )
    return run


def _merged(arms: Sequence[Arm]) -> list[Arm]:
    """Arms of one name as one: several cells of a sweep, or several sweeps. A seed that is finished
    in one of them is not missing."""
    merged: dict[str, Arm] = {}
    for arm in arms:
        known = merged.setdefault(arm.name, Arm(arm.name, {}, {}))
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
        raise UsageError(
            f"two arms would be called {double}: one of the sweep, and one of runs or files given "
            "beside it; report them separately"
        )


def _name(arm: Arm, run: FinishedRun) -> str:
    if run.seed is None:
        return arm.name
    return f"{arm.name} seed {run.seed} ({short_path(str(run.path))})"


def _refuse_other_samples(name_a: str, a: FinishedRun, name_b: str, b: FinishedRun) -> None:
    for benchmark, result in a.final.sampled.benchmarks.items():
        k_b = b.final.sampled.benchmarks[benchmark].k
        if result.k != k_b:
            raise EvaluationFileError(
                f"{benchmark} has {result.k} samples of each problem in {name_a}, but {k_b} in "
                f"{name_b}: pass@k cannot be compared; evaluate both with the same eval.samples"
            )


def _refuse_other_base(name_a: str, a: FinishedRun, name_b: str, b: FinishedRun) -> None:
    assert a.recipe is not None and b.recipe is not None
    for key in BASE_MODEL_KEYS:
        ours, theirs = (getattr(run.recipe.model, key, None) for run in (a, b) if run.recipe)
        if ours != theirs:
            raise EvaluationFileError(
                f"{name_a} trains model.{key} {ours!r}, but {name_b} {theirs!r}: results of other "
                "base models cannot be compared; report them separately"
            )


def _notes(arms: Sequence[Arm]) -> list[str]:
    """Files that are not what their run wrote, recipes that changed at a resume, and other
    differences from the first run, each once. Names are without paths, for others to read."""
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
    altered = [
        f"{each}: {problem}" for each, run in runs if run.log for problem in changed_files(run.path)
    ]
    return [*altered, *found.values(), *_other_steps(runs), *_other_prompts(runs)]


def _other_steps(runs: Sequence[tuple[str, FinishedRun]]) -> list[str]:
    """That some runs trained for more steps than others, with one of each."""
    one_of = {len(run.log): name for name, run in runs if run.log}
    if len(one_of) < 2:
        return []
    listed = ", ".join(f"{steps} by {name}" for steps, name in sorted(one_of.items()))
    return [f"the runs trained for different numbers of steps: {listed}"]


def _other_prompts(runs: Sequence[tuple[str, FinishedRun]]) -> Iterator[str]:
    """Sources of prompts whose problems, answers or order were others in one run than in another,
    or before a resume than after, though their recipes read them alike; as far as checkpoints
    tell. The builtin ones depend on the seed."""
    seen: dict[str, dict[str, str]] = {}
    for name, run in runs:
        if run.recipe is None or "builtin:" in str(run.recipe.prompts.source):
            continue
        section = shareable(run.recipe.prompts.model_dump(mode="json"))
        places = seen.setdefault(repr(section), {})
        with suppress(CheckpointError):
            prompts = newest_state(run.path / "checkpoints").prompts
            for first, digest in prompts.items():
                places.setdefault(digest, f"{name} from step {first}" if len(prompts) > 1 else name)
    for places in seen.values():
        if len(places) > 1:
            listed = " than in ".join(places.values())
            yield f"prompts.source has other problems or answers, or another order, in {listed}"


def _same_names(arms: Sequence[Arm]) -> Iterator[str]:
    """What is taken for one file, because the runs of an arm name it alike, though in folders of
    their own."""
    for arm in arms:
        runs = list(arm.runs.values())
        for run in runs[1:]:
            a, b = settings_of(runs[0].recipe), settings_of(run.recipe)
            for key in differing_keys([a, b]):
                alike = shareable(a.get(key)) == shareable(b.get(key))
                if alike and not key.startswith(OF_THE_MACHINE):
                    yield (
                        f"arm {arm.name}: {key} {shareable(a[key])!r} is in other folders in "
                        f"{runs[0].path.name} and in {run.path.name}: taken for the same"
                    )


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
    if keys := differing_keys([a, b]):
        found = ", ".join(
            f"{key} is {a.get(key)!r} in {first.path} and {b.get(key)!r} in {other.path}"
            for key in keys
        )
        raise UsageError(
            f"arm {arm} has runs of several recipes: {found}; the runs of an arm must have the "
            "same recipe except for the seed and for settings of the machine: give the two to "
            "separate reports"
        )


def _method_of(run: FinishedRun) -> dict[str, Any]:
    """Its recipe without what is `OF_THE_MACHINE`, and the steps that the run trained."""
    settings = settings_of(run.recipe)
    method = {
        key: shareable(each)  # each machine has its own folders
        for key, each in settings.items()
        if not key.startswith(OF_THE_MACHINE)
    }
    return {**method, "run.steps": len(run.log)}


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
    """One arm for each evaluation file, named by its stem, or its path from their common folder if
    stems are equal."""
    stems = [run.path.stem for run in files]
    unique = len(set(stems)) == len(stems)
    paths = [run.path.absolute() for run in files]
    top = os.path.commonpath([path.parent for path in paths]) if paths else ""
    names = stems if unique else [os.path.relpath(path, top) for path in paths]
    return [Arm(name, {None: run}) for name, run in zip(names, files, strict=True)]


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
    return [  # files of one name may lie in two folders
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all recipes."""
    keys: Iterable[str] = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if any(each.get(key) != settings[0].get(key) for each in settings)]


def chosen_keys(arms: Sequence[Arm]) -> list[str]:
    """The keys in which arms differ by choice: not those that only follow from the preset."""
    recipes = [arm.recipe for arm in arms if arm.recipe is not None]
    keys = differing_keys([settings_of(recipe) for recipe in recipes])
    return [key for key in keys if not all(_follows(recipe.replay, key) for recipe in recipes)]


def _follows(replay: ReplaySection, key: str) -> bool:
    """True if the value of a replay key is that of the preset, or if it has no effect."""
    section, _, name = key.partition(".")
    if section != "replay" or name == "preset":
        return False
    preset = REPLAY_PRESETS[replay.preset]
    if name in preset:
        return bool(getattr(replay, name) == preset[name])
    return not replay.replays


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
