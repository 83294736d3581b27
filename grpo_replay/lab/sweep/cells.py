"""The cells of a sweep, its runs: folder, recipe and state of each, and the command that starts or
continues it.

OUTPUT_DIR/ARM/seed-N/                      the comparison
OUTPUT_DIR/tune/ARM/VALUE-NAME/seed-N/      the tuning stage
"""

import enum
import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_replay.errors import OutputDirectoryError, RecipeError, SweepFileError, did_you_mean
from grpo_replay.lab.sweep.sweep_file import SweepFile, value_name
from grpo_replay.recipe import Recipe, find_recipe, load_recipe
from grpo_replay.storage.run_directory import RunDirectory, read_summary
from grpo_replay.storage.stored_recipe import differences, read_recipe_file

_load = functools.lru_cache(maxsize=None)(load_recipe)


class CellState(enum.Enum):
    """The content of a cell's folder: no run, one to resume, or a finished one."""

    NEW = "new"
    STARTED = "started"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep in `root`.

    `candidate` are the values that a tuning run tries; it is None in the comparison. The overrides
    of a comparison cell lack the tuned values until they are chosen.
    """

    root: Path
    arm: str
    seed: int
    recipe: str
    overrides: tuple[str, ...]
    candidate: tuple[str, ...] | None = None
    awaits_tuning: bool = False

    @property
    def name(self) -> str:
        """The folder relative to that of the sweep; names the cell in messages."""
        if self.candidate is None:
            return f"{self.arm}/seed-{self.seed}"
        return f"tune/{self.arm}/{value_name(self.candidate)}/seed-{self.seed}"

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.root / self.name

    @property
    def log(self) -> Path:
        """The log file of the cell's processes."""
        return self.root / "log" / f"{self.name}.log"

    def all_overrides(self) -> tuple[str, ...]:
        return (*self.overrides, *(self.candidate or ()), f"run.seed={self.seed}")

    def resolved_recipe(self) -> Recipe:
        """Returns the recipe of the run. Raises SweepFileError that names the arm."""
        try:
            return _load(self.recipe, self.all_overrides())
        except RecipeError as error:
            raise SweepFileError(f"arm {self.arm}: {str(error).removeprefix('--set: ')}") from error

    def with_choice(self, chosen: Sequence[str]) -> "Cell":
        """Returns the comparison cell with the values that tuning chose."""
        return replace(self, overrides=(*self.overrides, *chosen), awaits_tuning=False)

    @property
    def accuracy(self) -> float | None:
        """Mean held-out accuracy at the end of the run; None before, or without evaluation."""
        return ((read_summary(self.folder) or {}).get("final") or {}).get("mean")


def expand(sweep: SweepFile, source: Path, root: Path, only: str | None = None) -> list[Cell]:
    """List the cells of a sweep that was read from `source`, of all arms or of the arm `only`, with
    folders in `root`. Tuning comes first, then seed by seed, so that all arms progress alike.
    Raises SweepFileError for an unknown arm, override or recipe."""
    if only is not None and only not in sweep.arms:
        hint = did_you_mean(only, sweep.arms)
        raise SweepFileError(
            f"--only {only}: no such arm{hint}; the sweep has: {', '.join(sweep.arms)}"
        )
    recipe = _recipe_name(sweep.recipe, source)
    arms = {
        name: (*sweep.set, *overrides)
        for name, overrides in sweep.arms.items()
        if only in (None, name)
    }
    candidates = sweep.tune.candidates() if sweep.tune else []
    tuning = [
        Cell(root, name, seed, recipe, overrides, candidate)
        for name, overrides in arms.items()
        for candidate in candidates
        for seed in (sweep.tune.seeds if sweep.tune else ())
    ]
    comparison = [
        Cell(root, name, seed, recipe, overrides, awaits_tuning=bool(candidates))
        for seed in sweep.seeds
        for name, overrides in arms.items()
    ]
    for cell in tuning or comparison:
        if not cell.resolved_recipe().eval.benchmarks and tuning:
            raise SweepFileError(
                f"{source}: tune: the recipe evaluates nothing: set eval.benchmarks"
            )
    return [*tuning, *comparison]


def _recipe_name(word: str, source: Path) -> str:
    """Returns the recipe argument of `train`: the absolute path of a file, looked for first next to
    the sweep file, or the name of a shipped recipe. Raises SweepFileError without one."""
    local_file = source.parent / word
    try:
        path = local_file if local_file.is_file() else find_recipe(word)
    except RecipeError as error:
        raise SweepFileError(f"{source}: recipe: {error}") from error
    return word if path.name.removesuffix(".yaml") == word else str(path.resolve())


def state_of(cell: Cell) -> CellState:
    """Read a cell's state. Raises OutputDirectoryError if its folder has another recipe's run."""
    if not RunDirectory(cell.folder).recipe_path.exists():
        return CellState.NEW
    expected = cell.resolved_recipe()
    stored = expected
    if not cell.awaits_tuning:
        stored = read_recipe_file(RunDirectory(cell.folder).recipe_path)
    if changes := differences(stored, expected):
        shown = ", ".join(f"{key} {old!r}, now {new!r}" for key, old, new in changes[:3])
        raise OutputDirectoryError(
            f"{cell.folder} is a run of another recipe: {shown}: choose another --output-dir, "
            "or restore the recipe or the sweep file"
        )
    summary = read_summary(cell.folder)
    is_done = summary and summary["steps"] >= expected.run.steps
    return CellState.DONE if is_done else CellState.STARTED


def train_arguments(cell: Cell, state: CellState) -> list[str]:
    """The arguments of `grpo-replay` that start the run, or continue it with its own recipe."""
    folder = ["--output-dir", str(cell.folder)]
    if state is CellState.STARTED:
        return ["train", "--resume", *folder]
    overrides = [word for override in cell.all_overrides() for word in ("--set", override)]
    return ["train", cell.recipe, *overrides, *folder]


def shell_command(cell: Cell, state: CellState) -> str:
    """Returns the command of the cell as one line for a shell."""
    return shlex.join(["grpo-replay", *train_arguments(cell, state)])


STARTED = "# process "
"""Prefix of the first line that an attempt at a cell writes to its log."""


def error_line(log: Path) -> str | None:
    """Returns the first line of the error that ended a cell's last attempt; None without one."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = text.rpartition(STARTED)[2].splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else None
