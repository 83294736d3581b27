"""From the PATHs of a report to its arms: runs, sweeps, folders of runs and evaluation files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_replay.errors import DataError, EvaluationFileError, UsageError
from grpo_replay.evaluation.comparison import differences, refuse_incomparable
from grpo_replay.lab.report.arms import (
    Arm,
    add_run,
    choose_baseline,
    evaluation_arms,
    group_by_recipe,
    short_path,
)
from grpo_replay.lab.report.finished_run import (
    FinishedRun,
    UnfinishedRun,
    read_evaluation,
    read_json,
    read_run,
)
from grpo_replay.recipe import read_recipe_layer
from grpo_replay.terminal.progress import tracked

SWEEP_FILE = "sweep.yaml"
CHOSEN_FILE = "chosen.json"

MANY_PATHS = 4

BASE_MODEL_KEYS = ("path", "revision", "random_init", "config_overrides")
"""Keys of the recipe's model section that make another base model."""


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
        notes=tuple(_notes(runs)),
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
    if path.is_file() and path.name != SWEEP_FILE:
        found.files.append(read_evaluation(path))
        return
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise DataError(
            f"{path}: no such file or folder; give runs, sweeps, folders of runs, or evaluations"
        )
    if (folder / SWEEP_FILE).exists() and not has_comparisons(folder):
        _add_sweep(folder, found)
    elif (folder / "recipe.yaml").exists():
        _add_run(folder, found)
    else:
        _add_folder(folder, found)


def has_comparisons(folder: Path) -> bool:
    """True for the sweep of a list of recipes, which has a folder for each."""
    return isinstance(read_recipe_layer(folder / SWEEP_FILE).get("recipe"), list)


def _add_folder(folder: Path, found: _Found) -> None:
    inner = sorted(child for child in folder.iterdir() if child.is_dir())
    if sweeps := [child for child in inner if (child / SWEEP_FILE).exists()]:
        raise UsageError(
            f"{folder} holds {len(sweeps)} comparisons: report one of them at a time: "
            + ", ".join(short_path(child) for child in sweeps)
        )
    runs = [child for child in inner if (child / "recipe.yaml").exists()]
    if not runs:
        raise DataError(
            f"{folder}: neither a run (recipe.yaml), a sweep ({SWEEP_FILE}) nor a folder of runs"
        )
    for child in runs:
        _add_run(child, found)


def _add_run(path: Path, found: _Found) -> None:
    """A run given by its own path must be finished; one of a sweep keeps the name of its arm."""
    run = read_run(path)
    arm_folder = path.resolve().parent
    if (arm_folder.parent / SWEEP_FILE).exists():
        found.arms.append(Arm(arm_folder.name, {run.seed: run}))
    else:
        found.runs.append(run)


def _add_sweep(folder: Path, found: _Found) -> None:
    arms, seeds = read_outline(folder / SWEEP_FILE)
    for arm in arms:
        runs: dict[int | None, FinishedRun] = {}
        missing = {}
        for seed in tracked(seeds, f"reading {arm}"):
            try:
                add_run(runs, _cell(folder / arm / f"seed-{seed}", seed), arm)
            except UnfinishedRun as error:
                missing[seed] = error.reason
        found.arms.append(Arm(arm, runs, missing))
    found.tuned |= _read_tuned(folder)


def _cell(path: Path, seed: int) -> FinishedRun:
    run = read_run(path)
    if run.seed != seed:
        raise DataError(
            f"{path}: its recipe has run.seed {run.seed}: the folder was renamed or belongs to "
            "another sweep"
        )
    return run


def read_outline(path: Path) -> tuple[list[str], list[int]]:
    """The arms and seeds of a sweep. Raises DataError if the file does not have them."""
    sweep = read_recipe_layer(path)
    arms, seeds = sweep.get("arms"), sweep.get("seeds")
    whole = isinstance(seeds, list) and all(isinstance(seed, int) for seed in seeds)
    if not (isinstance(arms, dict) and arms and seeds and whole):
        raise DataError(f"{path}: not a sweep: it needs arms (a mapping) and seeds (whole numbers)")
    return [str(arm) for arm in arms], list(seeds)


def _read_tuned(folder: Path) -> dict[str, str]:
    """The overrides that the tuning stage of a sweep chose, by arm; empty without one."""
    path = folder / CHOSEN_FILE
    if not path.exists():
        return {}
    chosen = read_json(path).get("arms")
    if not isinstance(chosen, dict):
        raise DataError(f"{path}: expected an object with 'arms'; restore it from a copy")
    return {arm: ", ".join(choice["set"]) for arm, choice in chosen.items()}


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
    return arm.name if run.seed is None else f"{arm.name} seed {run.seed} ({short_path(run.path)})"


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


def _notes(runs: Sequence[tuple[str, FinishedRun]]) -> list[str]:
    """Recipes that changed at a resume, and other differences from the first run, each once."""
    name, first = runs[0]
    found = {
        change: f"{each}: its recipe changed at a resume: {change}"
        for each, run in runs
        for change in run.recipe_changes
    }
    for other_name, other in runs[1:]:
        for sentence in differences(first.final, other.final):
            found.setdefault(sentence, f"A = {name}, B = {other_name}: {sentence}")
    return list(found.values())
