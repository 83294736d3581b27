"""Recipes from files, presets and `--set` overrides: find, read, merge, validate; and the replay
section of a trainer that has no recipe.

Relative paths in a recipe file start at the folder of the file, those of `--set` at the working
directory. So a recipe works from every working directory. Both become absolute, so that the recipe
that a run saves, in a folder of its own, names the same files.

YAML is that of `yaml_text`; after `--set`, the value of a text setting stays as it is written:
`revision=1e3`.
"""

import contextlib
import copy
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final, get_args

import yaml
from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from grpo_replay.errors import RecipeError, did_you_mean
from grpo_replay.recipe.grpo_sections import REPLAY_PRESETS, ReplaySection
from grpo_replay.recipe.input_sections import GYM
from grpo_replay.recipe.recipe import Recipe, replay_contradictions
from grpo_replay.recipe.yaml_text import parse_yaml, problem_of, to_yaml
from grpo_replay.shipped_recipes import shipped_recipes, shipped_recipes_folder


def find_recipe(name_or_path: str) -> Path:
    """Returns the file of a recipe, given its path or the name of a shipped recipe.

    Raises RecipeError, with the shipped names, if there is none.
    """
    return find_shipped(name_or_path, shipped_recipes(), "recipe")


def find_shipped(name_or_path: str, shipped: Mapping[str, Path], kind: str) -> Path:
    """Return the file of a recipe or sweep (`kind`), by its path or, if there is no such file, the
    name of a `shipped` one. Raises RecipeError, with the shipped names, if there is none."""
    path = Path(name_or_path)
    with contextlib.suppress(OSError):  # a name that is too long for the file system
        if path.is_file():
            return path
    if name_or_path in shipped:
        return shipped[name_or_path]
    siblings = [file.name for file in path.parent.glob("*.yaml")]
    hint = did_you_mean(name_or_path, shipped) or did_you_mean(path.name, siblings)
    raise RecipeError(
        f"no {kind} {shown(name_or_path)}: not a file and not a shipped {kind}{hint}; "
        f"shipped: {', '.join(shipped)}"
    )


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Returns the validated recipe from a file and `key=value` overrides. Raises RecipeError."""
    path = find_recipe(name_or_path)
    layer = read_recipe_layer(path)
    layer.setdefault("name", path.stem)
    return resolve_recipe([layer, parse_overrides(overrides)], (recipe_source(path), "--set"))


def recipe_source(path: Path) -> str:
    """The name of the recipe in `path` for messages: that of a shipped recipe, else the path."""
    return f"recipe {path.stem}" if path.parent == shipped_recipes_folder() else str(path)


def read_recipe_layer(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. Relative paths of data and reward functions become absolute
    (`anchor_paths`). Raises RecipeError with file and line."""
    layer = read_yaml(path)
    if layer is None:
        return {}
    if not isinstance(layer, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, found {shown(layer)}")
    anchor_paths(layer, path.parent)
    return layer


def read_yaml(path: Path) -> Any:
    """Read the value of a YAML file (`parse_yaml`). Raises RecipeError with file and line."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{location}: not valid YAML: {problem_of(error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse `--set section.key=value` overrides to a nested mapping, a recipe layer. Values are
    YAML, as in a file; those of text settings are text (`parse_text`). Relative paths
    (`anchor_paths`) start at the working directory."""
    layer: dict[str, Any] = {}
    for word in overrides:
        key, separator, text = word.partition("=")
        if not separator or not key.strip():
            raise RecipeError(f"--set {shown(word)}: expected key=value, such as replay.ratio=0.25")
        *parents, leaf = key.strip().split(".")
        node = layer
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise RecipeError(f"--set {shown(word)}: {parent} was already set to a value")
        try:
            kind = _annotation_of(key.strip().split("."))
            node[leaf] = parse_text(text) if is_text(kind, text) else parse_yaml(text)
        except yaml.YAMLError as error:
            raise RecipeError(
                f"--set {shown(word)}: not valid YAML: {problem_of(error)}"
            ) from error
    anchor_paths(layer, Path.cwd())
    return layer


def _annotation_of(key: Sequence[int | str]) -> Any:
    """Returns the type of a recipe key, given its parts; None if there is no such key."""
    section: Any = Recipe
    for part in key:
        fields = getattr(section, "model_fields", {})
        section = fields[part].annotation if part in fields else None
    return section


def resolve_recipe(
    layers: Sequence[Mapping[str, Any]], source: str | Sequence[str] = "recipe"
) -> Recipe:
    """Merge `layers`, lowest precedence first, and validate the recipe. Explicit keys of a preset's
    layer and of later ones win over the preset's. `source` names the origin of the layers in
    messages: one name for all, or one for each. Raises RecipeError with that name."""
    sources = [source] * len(layers) if isinstance(source, str) else source
    merged: dict[str, Any] = {}
    preset_keys: set[str] = set()
    for layer in layers:
        replay = layer.get("replay")
        replay = replay if isinstance(replay, Mapping) else {}
        preset = replay.get("preset")
        if isinstance(preset, str) and preset in REPLAY_PRESETS:
            preset_keys = _apply_preset(merged.setdefault("replay", {}), preset, preset_keys)
        _deep_update(merged, layer)
        preset_keys -= set(replay)
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        origins = list(zip(layers, sources, strict=True))
        raise RecipeError(_explain(plain_problems(error, merged), origins)) from error


def _apply_preset(replay: dict[str, Any], preset: str, preset_keys: set[str]) -> set[str]:
    """Set the values of a preset, and return all keys that presets have set. Choosing a preset
    undoes what an earlier preset set (`preset_keys`), except for `grpo`, which is the baseline of
    the recipe that it is set in."""
    if preset != "grpo":
        for key in preset_keys:
            del replay[key]
        preset_keys = set()
    replay.update(REPLAY_PRESETS[preset])
    return preset_keys | set(REPLAY_PRESETS[preset])


def recipe_to_yaml(recipe: Recipe) -> str:
    """Returns the resolved recipe as YAML. Loading it gives the same recipe."""
    return to_yaml(recipe.model_dump(mode="json"))


def _deep_update(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _deep_update(target[key], value)
        else:
            target[key] = copy.deepcopy(value)


def plain_problems(error: ValidationError, values: Any) -> list[Any]:
    """Return the problems that pydantic reports, with keys as they are written in `values`:
    pydantic adds the names of the types that a value may have. If a value may be text or a list,
    the problem that it is not text is left out where there are problems inside the list."""
    problems: list[Any] = [
        {**problem, "loc": _key_in(values, problem["loc"])} for problem in error.errors()
    ]
    parents = {problem["loc"][:end] for problem in problems for end in range(len(problem["loc"]))}
    return [
        problem
        for problem in problems
        if problem["type"] != "string_type" or problem["loc"] not in parents
    ]


def _key_in(value: Any, loc: Sequence[int | str]) -> tuple[int | str, ...]:
    """Returns the parts of pydantic's `loc` that are keys, indices or missing keys of `value`;
    others are names of types that pydantic added."""
    key: list[int | str] = []
    for index, part in enumerate(loc):
        exists = part in value if isinstance(value, Mapping) else isinstance(part, int)
        is_missing_key = index == len(loc) - 1 and isinstance(value, Mapping)
        if exists or part == "[key]" or is_missing_key:
            key.append(part)
            value = value[part] if exists and isinstance(value, Mapping | list) else None  # type: ignore[index]
    return tuple(key)


def _explain(
    problems: Sequence[Any], origins: Sequence[tuple[Mapping[str, Any], str]], *section: str
) -> str:
    """Writes a line per problem: the bad value's source, key, what is allowed, the value. `origins`
    are the layers with their sources, `section` the validated one; empty for a recipe."""
    lines = []
    for problem in problems:
        message, loc = problem["msg"].removeprefix("Value error, "), (*section, *problem["loc"])
        source, key = _source_of(loc, origins), ".".join(map(str, loc))
        if not problem["loc"]:
            sources = " with ".join(dict.fromkeys(source for layer, source in origins if layer))
            lines.append(f"{sources or 'recipe'}: contradiction: {message}")
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{source}: unknown key {shown(key)}{_hint_and_allowed_keys(loc)}")
        else:
            lines.append(f"{source}: {key}: {message}, found {shown(problem['input'])}")
    return "\n".join(lines)


def _hint_and_allowed_keys(loc: Sequence[int | str]) -> str:
    """Returns the end of a message about an unknown key: a hint, and the keys that its section has.
    The hint names the sections of the recipe that have a key of exactly this name, else the closest
    key of its own section."""
    *parents, name = loc
    fields = getattr(_annotation_of(parents) if parents else Recipe, "model_fields", {})
    hint = did_you_mean(str(name), fields)
    if elsewhere := [
        f"{section}.{name}"
        for section in Recipe.model_fields
        if name in getattr(_annotation_of([section]), "model_fields", {})
    ]:
        hint = f" (did you mean {' or '.join(map(shown, elsewhere))}?)"
    owner = f"section {'.'.join(map(str, parents))}" if parents else "the recipe"
    return hint + (f"; {owner} has: {', '.join(fields)}" if fields else "")


def _source_of(loc: Sequence[int | str], origins: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    """Returns the source of the last layer that has the key `loc`, or the most of its parts."""

    def depth(layer: Any) -> int:
        for number, part in enumerate(loc):
            if not (isinstance(layer, Mapping) and part in layer):
                return number
            layer = layer[part]
        return len(loc)

    return max(reversed(origins), key=lambda origin: depth(origin[0]))[1]


DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Files of prompts and benchmarks."""


def anchor_paths(layer: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of a recipe layer absolute, in place.

    These are files and folders of prompts and benchmarks, `eval.data_folder`, `file.py:function`,
    and models and tokenizers that begin with a dot. `owner/name` is a hub id, for prompts only if
    there is no such folder; the name of a benchmark does not change. Values of a wrong type are
    left for the validation.
    """

    def absolute(path: str) -> str:
        return os.path.abspath(folder / os.path.expanduser(path))

    def data_path(path: str) -> str:
        is_local = path.endswith(DATA_SUFFIXES) or path.startswith((".", "~"))
        is_folder = path != "" and os.path.isdir(folder / path)
        return absolute(path) if is_local or is_folder else path

    def benchmark_path(path: str) -> str:
        return data_path(path) if "/" in path or path.endswith((".", *DATA_SUFFIXES)) else path

    def model_path(path: str) -> str:
        return absolute(path) if path.startswith((".", "~")) else path

    def function_path(function: str) -> str:
        source, separator, name = function.rpartition(":")
        return f"{absolute(source)}:{name}" if separator and source.endswith(".py") else function

    conversions = {
        "prompts.source": data_path,
        "model.path": model_path,
        "model.tokenizer": model_path,
        "sampling.backend": function_path,
        "reward.function": function_path,
        "advantage.estimator": function_path,
        "replay.priority": function_path,
        "loss.kind": function_path,
        "eval.reward": function_path,
        "eval.benchmarks": benchmark_path,
        "eval.data_folder": absolute,
    }
    for name, convert in conversions.items():
        section, key = name.split(".")
        values = layer.get(section)
        if isinstance(values, dict) and key in values:
            values[key] = _map_texts(values[key], key, convert)


def _map_texts(value: Any, key: str, convert: Callable[[str], str]) -> Any:
    """Convert the texts in the value of a key: the value itself, the elements of a list, and in an
    element that is a mapping the value under the same key."""
    if isinstance(value, str):
        return convert(value)
    if isinstance(value, list):
        return [_map_texts(element, key, convert) for element in value]
    if isinstance(value, dict) and key in value:
        return value | {key: _map_texts(value[key], key, convert)}
    return value


def short_path(path: str) -> str:
    """`path` as messages show it: relative if it is below the working directory."""
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        if os.path.isabs(path) and Path(path).is_relative_to(Path.cwd()):
            return os.path.relpath(path)
    return path


def is_on_hub(source: str) -> bool:
    """Returns whether a model or data source is a hub id: neither built in nor a local path, which
    is known by its prefix, its suffix or because it exists."""
    is_named = source.startswith(("builtin:", GYM, "/", ".", "~")) or source.endswith(DATA_SUFFIXES)
    return not is_named and not Path(source).exists()


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def parse_text(text: str) -> str | None:
    """Return the value of a text setting after `--set`: `text` without surrounding spaces, or
    without its quotes if all of it is quoted; None if it is empty, `~` or `null`."""
    word = text.strip()
    if word in ("", "~", "null"):
        return None
    if word[0] in "'\"":
        with contextlib.suppress(yaml.YAMLError):
            return str(parse_yaml(word))
    return word


def is_text(annotation: Any, value: str = "") -> bool:
    """Returns whether a setting of this type is text (or null). A setting that may also be a list
    is text unless `value` begins like a list."""
    if annotation in (str, str | None):
        return True
    return str in get_args(annotation) and not value.lstrip().startswith(("[", "{"))


def shown(value: Any) -> str:
    """Format a value for an error message: shortened if it is long or deep, and without the user
    name and password of a URL."""
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", _SHORT.repr(value))


_CONFIG_SOURCE = "ReplayConfig"
"""The source of a ReplayConfig's values, in messages."""


@final
class ReplayConfig(ReplaySection):
    """The settings of a replay buffer: the keys of `replay` in docs/recipe.md.

    `ReplayConfig.of(name, **changes)` has the values of a preset, and `changes`. A bad value,
    an unknown key or a contradiction raises RecipeError, as in a recipe.
    """

    @classmethod
    def of(cls, name: str, **changes: Any) -> "ReplayConfig":
        """Returns the settings of the preset `name`: grpo, uniform, group_std, ours or fifo."""
        return cls.model_validate({**changes, "preset": name})

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "ReplayConfig":
        if problems := list(replay_contradictions(self)):
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_as_a_recipe_does(
        cls, values: Any, validate: ModelWrapValidatorHandler["ReplayConfig"]
    ) -> "ReplayConfig":
        """Turns pydantic's ValidationError into a RecipeError like that of a recipe."""
        try:
            return validate(values)
        except ValidationError as error:
            origins = [({"replay": values}, _CONFIG_SOURCE)]
            problems = plain_problems(error, values)
            raise RecipeError(_explain(problems, origins, "replay")) from None
