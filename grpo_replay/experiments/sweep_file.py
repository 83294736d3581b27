"""SWEEP.yaml: a recipe, named arms, seeds, and values to tune before the arms are compared."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, StrictInt, ValidationError, field_validator, model_validator

from grpo_replay.errors import SweepFileError, did_you_mean
from grpo_replay.recipe import Section, shipped_recipes_folder

FORMAT = 1
RESERVED = ("tune", "log")
"""Folders of a sweep that hold no arm."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$", max_length=100)]
Seed = Annotated[StrictInt, Field(ge=0)]
Seeds = Annotated[list[Seed], Field(min_length=1)]
Scalar = bool | int | float | str


class TuneSection(Section):
    """The tuning stage: every arm is run with every value of the grid on the tuning seeds."""

    seeds: Seeds
    """Seeds of the tuning runs. None of them may be a seed of the comparison."""
    grid: Annotated[dict[str, Annotated[list[Scalar], Field(min_length=1)]], Field(min_length=1)]
    """Recipe key to the values to try. Several keys form every combination."""
    metric: Annotated[str, Field(pattern=r"^final(_greedy)?\.[\w.-]+$")] = "final.mean"
    """Entry of summary.json whose mean over the tuning seeds is maximised."""

    def candidates(self) -> list[tuple[str, ...]]:
        """The combinations of the grid, each as `key=value` overrides."""
        axes = [[f"{key}={_text(value)}" for value in self.grid[key]] for key in self.grid]
        return list(itertools.product(*axes))


class SweepFile(Section):
    """The contents of SWEEP.yaml."""

    format: Literal[1] = 1
    """Version of this file's format."""
    name: Name
    """Name of the sweep. Its folder is `runs/NAME` unless `--output-dir` says otherwise."""
    recipe: str | Annotated[list[str], Field(min_length=1)]
    """Recipe file or shipped recipe. A list makes one comparison per recipe, each in a folder of
    its own."""
    set: list[str] = Field(default_factory=list)
    """Overrides of every run, as `key=value`."""
    arms: Annotated[dict[Name, list[str]], Field(min_length=1)]
    """The methods that are compared: a name, and its overrides as `key=value`."""
    seeds: Seeds
    """`run.seed` of the runs of every arm."""
    tune: TuneSection | None = None
    """Values to choose per arm on other seeds before the comparison."""

    @field_validator("arms")
    @classmethod
    def _has_allowed_names(cls, arms: dict[str, list[str]]) -> dict[str, list[str]]:
        for name in arms:
            if name in RESERVED:
                raise ValueError(f"an arm cannot be called {name!r}: the sweep has such a folder")
        _refuse_doubles((name.lower() for name in arms), "arm names that differ only in case:")
        return arms

    @model_validator(mode="after")
    def _is_consistent(self) -> "SweepFile":
        _refuse_doubles(self.seeds, "seeds: twice")
        for place, overrides in (("set", self.set), *self.arms.items()):
            _check_overrides(place, overrides)
        if self.tune is not None:
            self._check_tuning(self.tune)
        return self

    def _check_tuning(self, tune: TuneSection) -> None:
        _refuse_doubles(tune.seeds, "tune.seeds: twice")
        if common := sorted({*tune.seeds} & {*self.seeds}):
            raise ValueError(
                f"tune.seeds and seeds share {', '.join(map(str, common))}: values that were "
                "chosen on a seed look better on it; use other seeds"
            )
        for key, values in tune.grid.items():
            _check_overrides("tune.grid", [f"{key}=0"])
            _refuse_doubles((_text(value) for value in values), f"tune.grid.{key}: twice")
            for place, overrides in (("set", self.set), *self.arms.items()):
                if key in map(_key_of, overrides):
                    raise ValueError(
                        f"{place} sets {key}, which tune.grid chooses: remove it from one of them"
                    )

    @property
    def recipes(self) -> list[str]:
        return [self.recipe] if isinstance(self.recipe, str) else list(self.recipe)


def _check_overrides(place: str, overrides: list[str]) -> None:
    for word in overrides:
        if "=" not in word or not _key_of(word):
            raise ValueError(f"{place}: {word!r}: expected key=value, such as replay.ratio=0.25")
    keys = [_key_of(word) for word in overrides]
    _refuse_doubles(keys, f"{place} sets twice")
    if "run.seed" in keys:
        raise ValueError(f"{place} sets run.seed: the seeds of a sweep are listed in seeds")


def _key_of(override: str) -> str:
    return override.partition("=")[0].strip()


def _refuse_doubles(values: Iterable[object], what: str) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value}")
        seen.add(value)


def _text(value: Scalar) -> str:
    """A value as `--set` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice, of which PyYAML keeps the last silently."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is there twice in one mapping", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def shipped_sweeps() -> dict[str, Path]:
    """The sweeps that ship with the package, by name."""
    folder = shipped_recipes_folder() / "sweeps"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def find_sweep(name_or_path: str) -> Path:
    """The file of a sweep, given its path or the name of a shipped sweep. Raises SweepFileError."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = shipped_sweeps()
    if name_or_path in shipped:
        return shipped[name_or_path]
    raise SweepFileError(
        f"no sweep {name_or_path!r}: not a file and not a shipped sweep"
        f"{did_you_mean(name_or_path, shipped)}; shipped: {', '.join(shipped)}"
    )


def read_sweep_file(path: Path) -> SweepFile:
    """Read and check a sweep. Raises SweepFileError with file and place."""
    document = read_unique_yaml(path)
    if not isinstance(document, Mapping):
        raise SweepFileError(f"{path}: a sweep is a mapping with name, recipe, arms and seeds")
    _refuse_newer(path, document.get("format"))
    unknown = [str(key) for key in document if key not in SweepFile.model_fields]
    if unknown:
        hint = did_you_mean(unknown[0], SweepFile.model_fields)
        known = ", ".join(SweepFile.model_fields)
        raise SweepFileError(f"{path}: unknown key {unknown[0]!r}{hint}; a sweep has: {known}")
    try:
        return SweepFile.model_validate(document)
    except ValidationError as error:
        raise SweepFileError(_explain(error, path)) from error


def read_unique_yaml(path: Path) -> Any:
    """The document of a YAML file without doubled keys. Raises SweepFileError."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise SweepFileError(f"{place}: {getattr(error, 'problem', None) or error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SweepFileError(f"{path}: cannot be read: {error}") from error


def _refuse_newer(path: Path, version: Any) -> None:
    if isinstance(version, int) and version > FORMAT:
        raise SweepFileError(
            f"{path}: sweep format {version}, this version of grpo-replay reads {FORMAT}: use the "
            "version that wrote it"
        )


def _explain(error: ValidationError, path: Path) -> str:
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        found = f", found {item['input']!r}" if place and len(repr(item["input"])) < 80 else ""
        lines.append(f"{path}: {place + ': ' if place else ''}{message}{found}")
    return "\n".join(lines)


def sweep_to_yaml(sweep: SweepFile) -> str:
    """The sweep as YAML. Reading it gives the same sweep."""
    return yaml.safe_dump(sweep.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
