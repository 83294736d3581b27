"""SWEEP.yaml: a recipe, named arms, seeds, and values to tune before the arms are compared. The
folder of a sweep has it as sweep.yaml, beside chosen.json, the values that were chosen."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from grpo_replay.errors import OutputDirectoryError, RecipeError, SweepFileError, did_you_mean
from grpo_replay.recipe import Section
from grpo_replay.recipe.layers import find_shipped, plain_problems, read_yaml, shown, to_yaml
from grpo_replay.shipped_recipes import shipped_sweeps

SWEEP = "sweep.yaml"
CHOSEN = "chosen.json"
RESERVED = ("tune", "log")
"""Folders of a sweep that hold no arm."""


def _folder_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=+,-]{0,99}", text):
        raise ValueError(
            f"{shown(text)} is to name a folder: use up to 100 letters, digits and . _ = + , -, "
            "and begin with a letter or digit"
        )
    return text


def _not_empty(values: Any) -> Any:
    if not values:
        raise ValueError("is empty")
    return values


T = TypeVar("T")
Some = Annotated[T, AfterValidator(_not_empty)]
Name = Annotated[str, AfterValidator(_folder_name)]
Seed = Annotated[StrictInt, Field(ge=0)]
Seeds = Some[list[Seed]]
Scalar = str | bool | int | float


class TuneSection(Section):
    """The tuning stage: every arm is run with every value of the grid on the tuning seeds."""

    seeds: Seeds
    """Seeds of the tuning runs. None of them may be a seed of the comparison."""
    grid: Some[dict[str, Some[list[Scalar]]]]
    """Recipe key to the values to try. Several keys form every combination."""
    metric: Literal["final.mean"] = "final.mean"
    """Entry of summary.json whose mean over the tuning seeds is maximised."""

    def candidates(self) -> list[tuple[str, ...]]:
        """The combinations of the grid, each as `key=value` overrides."""
        return _combinations(self.grid)


class SweepFile(Section):
    """The contents of SWEEP.yaml."""

    format: Literal[1] = 1
    """Version of this file's format."""
    name: Name
    """Name of the sweep. Its folder is `runs/NAME` unless `--output-dir` says otherwise."""
    recipe: str | Some[list[str]]
    """Recipe file or shipped recipe. A list makes one comparison per recipe, each in a folder of
    its own."""
    set: list[str] = Field(default_factory=list)
    """Overrides of every run, as `key=value`."""
    arms: Some[dict[Name, list[str]]]
    """The methods that are compared: a name, and its overrides as `key=value`."""
    grid: dict[str, Some[list[Scalar]]] = Field(default_factory=dict)
    """Recipe key to values: every arm is run with every combination of those keys that it does not
    set itself, as the arm `NAME,KEY=VALUE`."""
    seeds: Seeds
    """`run.seed` of the runs of every arm."""
    tune: TuneSection | None = None
    """Values to choose per arm on other seeds before the comparison."""

    @field_validator("arms")
    @classmethod
    def _has_allowed_names(cls, arms: dict[str, list[str]]) -> dict[str, list[str]]:
        for name in arms:
            if name in RESERVED:
                raise ValueError(f"an arm cannot be called {name!r}: a folder of the sweep is")
        _refuse_doubles((name.lower() for name in arms), "arms: names that differ only in case:")
        return arms

    @model_validator(mode="after")
    def _is_consistent(self) -> "SweepFile":
        _refuse_doubles(self.seeds, "seeds:")
        for place, overrides in (("set", self.set), *self.arms.items()):
            _check_overrides(place, overrides)
        for key, values in self.grid.items():
            # 1.0 is 1, but true is not
            _refuse_doubles(
                (_text(v) if v is True or v is False else v for v in values), f"grid.{key}:"
            )
            if key in map(_key_of, self.set):
                raise ValueError(f"set sets {key}, which grid varies: remove it from one of them")
        if self.tune is not None:
            self._check_tuning(self.tune)
        return self

    def _check_tuning(self, tune: TuneSection) -> None:
        _refuse_doubles(tune.seeds, "tune.seeds:")
        if common := sorted({*tune.seeds} & {*self.seeds}):
            raise ValueError(
                f"tune.seeds and seeds share {', '.join(map(str, common))}: values that were "
                "chosen on a seed look better on it; use other seeds"
            )
        for key, values in tune.grid.items():
            _check_overrides("tune.grid", [f"{key}=0"])
            _refuse_doubles((_text(value) for value in values), f"tune.grid.{key}:")
            for place, overrides in (("set", self.set), *self.arms.items()):
                if key in map(_key_of, overrides):
                    raise ValueError(
                        f"{place} sets {key}, which tune.grid chooses: remove it from one of them"
                    )
        for name in map(value_name, tune.candidates()):
            if "/" in name or name.startswith(".") or len(name) > 200:
                raise ValueError(
                    f"tune.grid: {name!r} cannot name a folder: tune numbers, true, false or short "
                    "words"
                )

    def expanded(self) -> "SweepFile":
        """The sweep with an arm for every combination of the grid, and no grid."""
        arms = {}
        for name, overrides in self.arms.items():
            own = [key for key in self.grid if key not in map(_key_of, overrides)]
            for values in _combinations({key: self.grid[key] for key in own}):
                full = ",".join([name, value_name(values)]) if values else name
                if full in arms:
                    raise ValueError(
                        f"arms: {full} is there twice with what grid makes: rename one"
                    )
                arms[full] = [*overrides, *values]
        return SweepFile.model_validate({**self.model_dump(), "arms": arms, "grid": {}})

    @property
    def recipes(self) -> list[str]:
        return [self.recipe] if isinstance(self.recipe, str) else list(self.recipe)


def _combinations(grid: Mapping[str, list[Scalar]]) -> list[tuple[str, ...]]:
    return list(itertools.product(*([f"{key}={_text(v)}" for v in grid[key]] for key in grid)))


def value_name(overrides: Sequence[str]) -> str:
    """A name for overrides, the folder of a tuned value: `learning_rate=5e-05`, or several joined
    by commas. Keys with the same last part keep their sections."""
    pairs = [word.partition("=") for word in overrides]
    leaves = [key.rpartition(".")[2] for key, _, _ in pairs]
    short = len(set(leaves)) == len(leaves)
    return ",".join(
        f"{leaf if short else key}={value}" for leaf, (key, _, value) in zip(leaves, pairs)
    )


def _check_overrides(place: str, overrides: list[str]) -> None:
    for word in overrides:
        if "=" not in word or not _key_of(word):
            raise ValueError(f"{place}: {word!r}: expected key=value, such as replay.ratio=0.25")
    keys = [_key_of(word) for word in overrides]
    _refuse_doubles(keys, f"{place}:")
    if "run.seed" in keys:
        raise ValueError(f"{place} sets run.seed: the seeds of a sweep are listed in seeds")


def _key_of(override: str) -> str:
    return override.partition("=")[0].strip()


def _refuse_doubles(values: Iterable[object], place: str) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{place} {value} is there twice")
        seen.add(value)


def _text(value: Scalar) -> str:
    """A value as `--set` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def find_sweep(name_or_path: str) -> Path:
    """The file of a sweep, given its path or the name of a shipped sweep. Raises RecipeError."""
    return find_shipped(name_or_path, shipped_sweeps(), "sweep")


def read_sweep_file(path: Path) -> SweepFile:
    """Read and check a sweep. Raises RecipeError with file and place."""
    document = read_yaml(path)
    if not isinstance(document, Mapping):
        raise SweepFileError(f"{path}: a sweep is a mapping with name, recipe, arms and seeds")
    unknown = [str(key) for key in document if key not in SweepFile.model_fields]
    if unknown:
        hint = did_you_mean(unknown[0], SweepFile.model_fields)
        known = ", ".join(SweepFile.model_fields)
        raise SweepFileError(f"{path}: unknown key {unknown[0]!r}{hint}; a sweep has: {known}")
    try:
        return SweepFile.model_validate(document).expanded()
    except ValidationError as error:
        raise SweepFileError(_explain(plain_problems(error, document), path)) from error
    except ValueError as error:  # of `expanded`
        raise SweepFileError(f"{path}: {error}") from error


def _explain(problems: Sequence[Any], path: Path) -> str:
    lines = []
    for item in problems:
        where = item["loc"][:-2] if item["loc"][-1:] == ("[key]",) else item["loc"]
        place = ".".join(map(str, where))
        message = item["msg"].removeprefix("Value error, ")
        ours = item["type"] == "value_error"  # our messages name what was found
        found = f", found {shown(item['input'])}" if place and not ours else ""
        lines.append(f"{path}: {place + ': ' if place else ''}{message}{found}")
    return "\n".join(lines)


def sweep_to_yaml(sweep: SweepFile) -> str:
    """The sweep as YAML. Reading it gives the same sweep."""
    return to_yaml(sweep.model_dump(mode="json"))


def read_folder(folder: Path) -> SweepFile | None:
    """The sweep that a folder holds; None without sweep.yaml. Raises OutputDirectoryError."""
    path = folder / SWEEP
    if not path.exists():
        return None
    try:
        return read_sweep_file(path)
    except RecipeError as error:
        raise OutputDirectoryError(str(error)) from error


def read_choices(folder: Path) -> dict[str, Any] | None:
    """The document chosen.json; None if nothing was chosen yet. Raises OutputDirectoryError."""
    path = folder / CHOSEN
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputDirectoryError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("arms"), dict):
        raise OutputDirectoryError(f"{path}: expected an object with 'arms'; it was changed")
    return document
