"""SWEEP.yaml: a recipe, named arms, seeds, and values to tune before the arms are compared. The
folder of a sweep has a copy, sweep.yaml, and the tuned values, chosen.json."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, StrictInt, ValidationError, model_validator

from grpo_replay.errors import SweepFileError
from grpo_replay.recipe import Section
from grpo_replay.recipe.base import distinct
from grpo_replay.recipe.layers import find_shipped, read_yaml, to_yaml
from grpo_replay.shipped_recipes import shipped_sweeps

SWEEP = "sweep.yaml"
CHOSEN = "chosen.json"
RESERVED = ("tune", "log")
"""Folders of a sweep that are not arms."""


def _folder_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+,-]{0,99}", text) or text in RESERVED:
        raise ValueError(
            f"{text!r} names a folder: use up to 100 letters, digits and . _ = + , -, "
            f"begin with a letter or digit, and leave out {' and '.join(RESERVED)}"
        )
    return text


T = TypeVar("T")
Some = Annotated[T, Field(min_length=1)]
Name = Annotated[str, AfterValidator(_folder_name)]
Seeds = Annotated[Some[list[Annotated[StrictInt, Field(ge=0)]]], AfterValidator(distinct)]
Scalar = str | bool | int | float
Grid = dict[str, Some[list[Scalar]]]


class TuneSection(Section):
    """The tuning stage: every arm is run with every value of the grid on the tuning seeds; the
    values with the best mean of `final.mean` in summary.json are then used in the comparison."""

    seeds: Seeds
    """Seeds of the tuning runs. None of them may be a seed of the comparison."""
    grid: Some[Grid]
    """Recipe key to the values to try. Several keys form every combination."""

    def candidates(self) -> list[tuple[str, ...]]:
        """Returns the combinations of the grid, each as `key=value` overrides."""
        return _combinations(self.grid)


class SweepFile(Section):
    """The contents of SWEEP.yaml."""

    format: Literal[1] = 1
    """Version of this file's format."""
    name: Name
    """Name of the sweep. Its folder is `runs/NAME` unless `--output-dir` says otherwise."""
    recipe: str
    """Recipe file or shipped recipe."""
    set: list[str] = Field(default_factory=list)
    """Overrides of every run, as `key=value`."""
    arms: Some[dict[Name, list[str]]]
    """The methods that are compared: a name, and its overrides as `key=value`."""
    grid: Grid = Field(default_factory=dict)
    """Recipe key to values: every arm is run with every combination of those keys that it does not
    set itself, as the arm `NAME,KEY=VALUE`."""
    seeds: Seeds
    """`run.seed` of the runs of every arm."""
    tune: TuneSection | None = None
    """Values to choose per arm on other seeds before the comparison."""

    @model_validator(mode="after")
    def _is_consistent(self) -> "SweepFile":
        """Refuses overrides of seeds or tuned keys, and seeds that tuning and comparison share."""
        tuned = self.tune.grid if self.tune else {}
        for name, overrides in (("set", self.set), *self.arms.items()):
            keys = _keys(overrides)
            if "run.seed" in keys:
                raise ValueError(f"{name} sets run.seed: the seeds of a sweep are listed in seeds")
            if both := [key for key in keys if key in tuned]:
                raise ValueError(f"{name} sets {both[0]}, which tune.grid varies: remove one")
        if self.tune and (common := sorted({*self.tune.seeds} & {*self.seeds})):
            raise ValueError(
                f"tune.seeds and seeds share {', '.join(map(str, common))}: values that were "
                "chosen on a seed look better on it; use other seeds"
            )
        for name in map(value_name, self.tune.candidates() if self.tune else []):
            _folder_name(name)
        return self

    def expanded(self) -> "SweepFile":
        """Return the sweep with an arm for every combination of the grid, and no grid. An arm that
        sets a key of the grid itself keeps that value."""
        arms: dict[str, list[str]] = {}
        for name, overrides in self.arms.items():
            varied = [key for key in self.grid if key not in _keys(overrides)]
            for values in _combinations({key: self.grid[key] for key in varied}):
                arm = ",".join([name, value_name(values)]) if values else name
                arms[arm] = [*overrides, *values]
        return SweepFile.model_validate({**self.model_dump(), "arms": arms, "grid": {}})


def _combinations(grid: Mapping[str, Sequence[Scalar]]) -> list[tuple[str, ...]]:
    settings = ([f"{key}={_text(value)}" for value in values] for key, values in grid.items())
    return list(dict.fromkeys(itertools.product(*settings)))


def _text(value: Scalar) -> str:
    """Returns a value as `--set` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def value_name(overrides: Sequence[str]) -> str:
    """Return the folder name of tuned values: `learning_rate=5e-05`, several joined by commas. Keys
    with the same last part keep their sections."""
    pairs = [word.partition("=") for word in overrides]
    leaves = [key.rpartition(".")[2] for key, _, _ in pairs]
    are_distinct = len(set(leaves)) == len(leaves)
    return ",".join(
        f"{leaf if are_distinct else key}={value}" for leaf, (key, _, value) in zip(leaves, pairs)
    )


def _keys(overrides: Sequence[str]) -> list[str]:
    return [word.partition("=")[0].strip() for word in overrides]


def find_sweep(name_or_path: str) -> Path:
    """The file of a sweep, given its path or the name of a shipped sweep. Raises RecipeError."""
    return find_shipped(name_or_path, shipped_sweeps(), "sweep")


def read_sweep_file(path: Path) -> SweepFile:
    """Read a sweep, with its grid expanded to arms. Raises RecipeError, with file and key."""
    document = read_yaml(path)
    if not isinstance(document, Mapping):
        raise SweepFileError(f"{path}: a sweep is a mapping with name, recipe, arms and seeds")
    try:
        return SweepFile.model_validate(document).expanded()
    except ValidationError as error:
        problems = [
            f"{path}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.errors()
        ]
        problems.append(f"{path}: the keys of a sweep are {', '.join(SweepFile.model_fields)}")
        raise SweepFileError(
            "\n".join(problems).replace(": Value error,", ":").replace(": : ", ": ")
        ) from error


def sweep_to_yaml(sweep: SweepFile) -> str:
    """Returns the sweep as YAML. Reading it gives the same sweep."""
    return to_yaml(sweep.model_dump(mode="json"))


def read_choices(folder: Path) -> dict[str, Any]:
    """Returns the tuned values by arm, from chosen.json; empty before tuning is complete."""
    path = folder / CHOSEN
    return json.loads(path.read_text(encoding="utf-8"))["arms"] if path.exists() else {}
