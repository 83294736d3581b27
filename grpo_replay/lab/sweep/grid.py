"""The cells of a sweep: which runs there are, where they live, and the recipe of each; and their
folder, with its lock and sweep.yaml, which says whose cells are in it.

OUTPUT_DIR/ARM/seed-N/                      the comparison
OUTPUT_DIR/tune/ARM/VALUE-NAME/seed-N/      the tuning stage
OUTPUT_DIR/RECIPE/…                         both, for every recipe of a list
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_replay.errors import OutputDirectoryError, RecipeError, SweepFileError, did_you_mean
from grpo_replay.lab.sweep.sweep_file import (
    SWEEP,
    SweepFile,
    read_folder,
    sweep_to_yaml,
    value_name,
)
from grpo_replay.recipe import Recipe, find_recipe, load_recipe
from grpo_replay.storage.atomic import named_if_unwritable, write_text_whole
from grpo_replay.storage.recipe_history import differences
from grpo_replay.storage.run_directory import LOCK, RunDirectory

_load = functools.lru_cache(maxsize=None)(load_recipe)


def log_of(root: Path, place: Path | str) -> Path:
    """The log of the cell in `place`, a folder relative to `root`."""
    return root / "log" / f"{place}.log"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep.

    `value` names the values that a tuning run tries; it is None in the comparison. `place` is the
    cell's folder relative to `root`, the folder of its comparison. The overrides of a comparison
    cell lack the tuned values until they are chosen.
    """

    root: Path
    label: str
    arm: str
    seed: int
    recipe: str
    overrides: tuple[str, ...]
    value: str | None = None
    awaits_choice: bool = False

    @property
    def place(self) -> Path:
        if self.value is None:
            return Path(self.arm) / f"seed-{self.seed}"
        return Path("tune") / self.arm / self.value / f"seed-{self.seed}"

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.root / self.place

    @property
    def log(self) -> Path:
        """What the cell's processes print. Locked while any of them is alive."""
        return log_of(self.root, self.place)

    @property
    def name(self) -> str:
        """The folder relative to the sweep's, which is how messages name the cell."""
        return f"{self.label}{self.place}"

    def all_overrides(self) -> tuple[str, ...]:
        return (*self.overrides, f"run.seed={self.seed}")

    def resolved_recipe(self) -> Recipe:
        """The recipe of the run. Raises SweepFileError that names the arm."""
        try:
            return _load(self.recipe, self.all_overrides())
        except RecipeError as error:
            raise SweepFileError(f"arm {self.arm}: {str(error).removeprefix('--set: ')}") from error

    def with_choice(self, chosen: Sequence[str]) -> "Cell":
        """The comparison cell with the values that tuning chose."""
        return replace(self, overrides=(*self.overrides, *chosen), awaits_choice=False)


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm under one recipe. `tuning` maps each candidate to its runs; empty without tuning."""

    name: str
    tuning: dict[tuple[str, ...], tuple[Cell, ...]]
    comparison: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The arms under one recipe: what `sweep.yaml` in `root` describes."""

    root: Path
    file: SweepFile
    arms: tuple[Arm, ...]


def expand(sweep: SweepFile, source: Path, output_dir: Path) -> tuple[Comparison, ...]:
    """The comparisons of a sweep read from `source`, one per recipe, fully checked.

    Raises SweepFileError for an override that no recipe has, values that contradict each other, or
    a recipe that is not found.
    """
    names = [_recipe_name(word, source) for word in sweep.recipes]
    stems = [recipe_stem(name) for name in names]
    for stem in stems:
        if stems.count(stem) > 1:
            raise SweepFileError(f"{source}: recipe: {stem} is there twice")
    listed = not isinstance(sweep.recipe, str)
    comparisons = []
    for name, stem in zip(names, stems, strict=True):
        own = sweep.model_copy(update={"recipe": name})
        root = output_dir / stem if listed else output_dir
        comparisons.append(_comparison(own, name, root, f"{stem}/" if listed else ""))
    for comparison in comparisons:
        _check_recipes(comparison, source)
    return tuple(comparisons)


def _recipe_name(word: str, source: Path) -> str:
    """What `train` is given: an absolute path, or the name of a shipped recipe."""
    beside = source.parent / word
    try:
        found = beside if beside.is_file() else find_recipe(word)
    except RecipeError as error:
        raise SweepFileError(f"{source}: recipe: {error}") from error
    return word if recipe_stem(str(found)) == word else str(found.resolve())


def recipe_stem(name: str) -> str:
    """The name of a shipped recipe, or of a recipe's file: `qwen3-0.6b`."""
    return Path(name).name.removesuffix(".yaml")


def _comparison(sweep: SweepFile, recipe: str, root: Path, label: str) -> Comparison:
    arms = []
    for name, overrides in sweep.arms.items():
        shared = (*sweep.set, *overrides)
        tuning = {}
        for candidate in sweep.tune.candidates() if sweep.tune else []:
            value = value_name(candidate)
            tuning[candidate] = tuple(
                Cell(root, label, name, seed, recipe, (*shared, *candidate), value)
                for seed in (sweep.tune.seeds if sweep.tune else [])
            )
        comparison = tuple(
            Cell(root, label, name, seed, recipe, shared, awaits_choice=bool(tuning))
            for seed in sweep.seeds
        )
        arms.append(Arm(name, tuning, comparison))
    return Comparison(root, sweep, tuple(arms))


def _check_recipes(comparison: Comparison, source: Path) -> None:
    """Load the recipe of every arm and candidate, once each."""
    for arm in comparison.arms:
        for cells in arm.tuning.values() or [arm.comparison]:
            recipe = cells[0].resolved_recipe()
            if arm.tuning and not recipe.eval.benchmarks:
                raise SweepFileError(
                    f"{source}: tune: the recipe evaluates nothing after the last step; set "
                    "eval.benchmarks"
                )


def choose_arms(comparisons: Sequence[Comparison], only: str | None) -> list[Comparison]:
    """The comparisons with the arms that `--only` names: ARM, RECIPE or RECIPE/ARM; all for None.

    Raises SweepFileError if there is none.
    """
    if only is None:
        return list(comparisons)
    chosen, known = [], []
    for comparison in comparisons:
        stem = recipe_stem(comparison.file.recipes[0])
        names = {arm.name: {arm.name, stem, f"{stem}/{arm.name}"} for arm in comparison.arms}
        known += [name for name in names if name not in known]
        arms = tuple(arm for arm in comparison.arms if only in names[arm.name])
        if arms:
            chosen.append(replace(comparison, arms=arms))
    if not chosen:
        raise SweepFileError(
            f"--only {only}: no such arm{did_you_mean(only, known)}; the sweep has: "
            f"{', '.join(known)}"
        )
    return chosen


def all_cells(comparisons: Sequence[Comparison]) -> Iterator[Cell]:
    """Every cell, tuning first; then seed by seed, so that arms stay level with each other."""
    for comparison in comparisons:
        for arm in comparison.arms:
            for cells in arm.tuning.values():
                yield from cells
    for comparison in comparisons:
        for seed in range(len(comparison.file.seeds)):
            for arm in comparison.arms:
                yield arm.comparison[seed]


def refuse_other_sweep(output_dir: Path, sweep: SweepFile) -> None:
    """Raises OutputDirectoryError unless the folder is new or holds this sweep, or a part of it:
    arms and seeds may be added, whose cells change no others."""
    if output_dir.exists() and not output_dir.is_dir():
        raise OutputDirectoryError(f"{output_dir} is a file: choose another --output-dir")
    before = read_folder(output_dir)
    if before is None:
        others = sorted(each.name for each in output_dir.glob("*") if each.name != LOCK)
        if others:
            raise OutputDirectoryError(
                f"{output_dir} holds {others[0]} but no {SWEEP}: choose an empty --output-dir"
            )
        return
    found = [
        (key, old, new)
        for key, old, new in differences(before, sweep)
        if not (key.startswith("arms.") and old is None)
        and not (key == "seeds" and set(old) < set(new))
    ]
    if found:
        changes = "; ".join(f"{key} was {old!r}, now {new!r}" for key, old, new in found[:3])
        raise OutputDirectoryError(
            f"{output_dir} holds another sweep: {changes}: choose another --output-dir, or restore "
            "the sweep file; only arms and seeds may be added"
        )


def open_folder(
    output_dir: Path, sweep: SweepFile, comparisons: Sequence[Comparison]
) -> RunDirectory:
    """Lock the folder until this process ends, and write sweep.yaml.

    Raises OutputDirectoryError if another sweep works in the folder, or it cannot be written.
    """
    with named_if_unwritable(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    lock = RunDirectory(output_dir)
    lock.lock()
    refuse_other_sweep(output_dir, sweep)
    with named_if_unwritable(output_dir):
        write_text_whole(output_dir / SWEEP, sweep_to_yaml(sweep))
        for comparison in comparisons:
            comparison.root.mkdir(parents=True, exist_ok=True)
            if comparison.root != output_dir:
                write_text_whole(comparison.root / SWEEP, sweep_to_yaml(comparison.file))
    return lock
