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
    """The file of a recipe, given its path or the name of a shipped recipe.

    Raises RecipeError, with the shipped names, if there is none.
    """
    return find_shipped(name_or_path, shipped_recipes(), "recipe")


def find_shipped(name_or_path: str, shipped: Mapping[str, Path], kind: str) -> Path:
    """A file by its path, or by its name among those of a `kind` that are shipped. Raises
    RecipeError, with the shipped names, if there is none."""
    path = Path(name_or_path)
    with contextlib.suppress(OSError):  # a name that is too long for the file system
        if path.is_file():
            return path
    if name_or_path in shipped:
        return shipped[name_or_path]
    beside = [file.name for file in path.parent.glob("*.yaml")]
    hint = did_you_mean(name_or_path, shipped) or did_you_mean(path.name, beside)
    raise RecipeError(
        f"no {kind} {shown(name_or_path)}: not a file and not a shipped {kind}{hint}; "
        f"shipped: {', '.join(shipped)}"
    )


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The validated recipe from a file and `key=value` overrides. Raises RecipeError."""
    path = find_recipe(name_or_path)
    layer = read_recipe_layer(path)
    layer.setdefault("name", path.stem)
    return resolve_recipe([layer, parse_overrides(overrides)], (recipe_source(path), "--set"))


def recipe_source(path: Path) -> str:
    """What the recipe in `path` is called in messages: a shipped one by its name."""
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
    """The value of a YAML file, as `parse_yaml` reads it. Raises RecipeError with file and line."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{place}: not valid YAML: {problem_of(error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The nested mapping of `--set section.key=value` overrides. Values are YAML, as in a file;
    those of text settings are text (`parse_text`). Relative paths (`anchor_paths`) start at the
    working directory."""
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


def _annotation_of(place: Sequence[int | str]) -> Any:
    """The type of a key by its parts; None if there is no such key."""
    section: Any = Recipe
    for part in place:
        fields = getattr(section, "model_fields", {})
        section = fields[part].annotation if part in fields else None
    return section


def resolve_recipe(
    layers: Sequence[Mapping[str, Any]], source: str | Sequence[str] = "recipe"
) -> Recipe:
    """The validated recipe of `layers`, lowest precedence first. `source` is where they come from,
    in words: all of them, or each. Raises RecipeError that names the source of the bad value."""
    sources = [source] * len(layers) if isinstance(source, str) else source
    merged: dict[str, Any] = {}
    of_preset: set[str] = set()
    for layer in layers:
        replay = layer.get("replay")
        replay = replay if isinstance(replay, Mapping) else {}
        preset = replay.get("preset")
        if isinstance(preset, str) and preset in REPLAY_PRESETS:
            of_preset = _apply_preset(merged.setdefault("replay", {}), preset, of_preset)
        _deep_update(merged, layer)
        of_preset -= set(replay)
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        origins = list(zip(layers, sources, strict=True))
        raise RecipeError(_explain(plain_problems(error, merged), origins)) from error


def _apply_preset(replay: dict[str, Any], preset: str, of_preset: set[str]) -> set[str]:
    """Set the values of a preset. What the one before it had set, the keys `of_preset`, returns to
    its default, except under `grpo`: it is the baseline of the recipe that it is set in. Returns
    the keys that presets have set now."""
    if preset != "grpo":
        for key in of_preset:
            del replay[key]
        of_preset = set()
    replay.update(REPLAY_PRESETS[preset])
    return of_preset | set(REPLAY_PRESETS[preset])


def recipe_to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML. Loading it gives the same recipe."""
    return to_yaml(recipe.model_dump(mode="json"))


def _deep_update(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _deep_update(target[key], value)
        else:
            target[key] = copy.deepcopy(value)


def plain_problems(error: ValidationError, given: Any) -> list[Any]:
    """What pydantic found in `given`, with places as they are written there: without the names of
    types that a value may have. Of a list that might have been a name, what is wrong inside."""
    found: list[Any] = [{**item, "loc": _place_in(given, item["loc"])} for item in error.errors()]
    inside = {item["loc"][:at] for item in found for at in range(len(item["loc"]))}
    return [item for item in found if item["type"] != "string_type" or item["loc"] not in inside]


def _place_in(given: Any, loc: Sequence[int | str]) -> tuple[int | str, ...]:
    place: list[int | str] = []
    for index, part in enumerate(loc):
        is_there = part in given if isinstance(given, Mapping) else isinstance(part, int)
        if is_there or part == "[key]" or (index == len(loc) - 1 and isinstance(given, Mapping)):
            place.append(part)
            given = given[part] if is_there and isinstance(given, Mapping | list) else None  # type: ignore[index]
    return tuple(place)


def _explain(
    problems: Sequence[Any], origins: Sequence[tuple[Mapping[str, Any], str]], *at: str
) -> str:
    """One line per problem: the source of the bad value, its key, what is allowed, the value. `at`
    is the section that was validated; without it, it is a whole recipe."""
    lines = []
    for item in problems:
        message, loc = item["msg"].removeprefix("Value error, "), (*at, *item["loc"])
        source, place = _source_of(loc, origins), ".".join(map(str, loc))
        if not item["loc"]:
            sources = " with ".join(dict.fromkeys(source for layer, source in origins if layer))
            lines.append(f"{sources or 'recipe'}: contradiction: {message}")
        elif item["type"] == "extra_forbidden":
            section = Recipe if len(loc) == 1 else _annotation_of(loc[:-1])
            fields = getattr(section, "model_fields", {})
            where = f"section {'.'.join(map(str, loc[:-1]))}" if loc[:-1] else "the recipe"
            hint = did_you_mean(str(loc[-1]), fields)
            if elsewhere := [
                f"{section}.{loc[-1]}"
                for section in Recipe.model_fields
                if loc[-1] in getattr(_annotation_of([section]), "model_fields", {})
            ]:
                hint = f" (did you mean {' or '.join(map(shown, elsewhere))}?)"
            has = f"; {where} has: {', '.join(fields)}" if fields else ""
            lines.append(f"{source}: unknown key {shown(place)}{hint}{has}")
        else:
            lines.append(f"{source}: {place}: {message}, found {shown(item['input'])}")
    return "\n".join(lines)


def _source_of(loc: Sequence[int | str], origins: Sequence[tuple[Mapping[str, Any], str]]) -> str:
    """The source of the last layer that has the key, or the longest part of it."""

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
    and models and tokenizers that begin with a dot: `owner/name` is a hub id. So it is for prompts,
    unless there is such a folder; the name of a benchmark stays one. Values of a wrong type are
    left for the validation.
    """

    def absolute(path: str) -> str:
        return os.path.abspath(folder / os.path.expanduser(path))

    def of_data(path: str) -> str:
        is_local = path.endswith(DATA_SUFFIXES) or path.startswith((".", "~"))
        is_folder = path != "" and os.path.isdir(folder / path)
        return absolute(path) if is_local or is_folder else path

    def of_benchmark(path: str) -> str:
        return of_data(path) if "/" in path or path.endswith((".", *DATA_SUFFIXES)) else path

    def of_model(path: str) -> str:
        return absolute(path) if path.startswith((".", "~")) else path

    def of_function(function: str) -> str:
        place, separator, name = function.rpartition(":")
        return f"{absolute(place)}:{name}" if separator and place.endswith(".py") else function

    places = {
        "prompts.source": of_data,
        "model.path": of_model,
        "model.tokenizer": of_model,
        "sampling.backend": of_function,
        "reward.function": of_function,
        "advantage.estimator": of_function,
        "replay.priority": of_function,
        "loss.kind": of_function,
        "eval.reward": of_function,
        "eval.benchmarks": of_benchmark,
        "eval.data_folder": absolute,
    }
    for place, change in places.items():
        section, key = place.split(".")
        values = layer.get(section)
        if isinstance(values, dict) and key in values:
            values[key] = _changed(values[key], key, change)


def _changed(value: Any, key: str, change: Callable[[str], str]) -> Any:
    """The value of a key with its texts changed: the value itself, the entries of a list, and what
    entries of more than a name have under the same key."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(each, key, change) for each in value]
    if isinstance(value, dict) and key in value:
        return value | {key: _changed(value[key], key, change)}
    return value


def short_path(path: str) -> str:
    """`path` as messages show it: relative if it is below the working directory."""
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        if os.path.isabs(path) and Path(path).is_relative_to(Path.cwd()):
            return os.path.relpath(path)
    return path


def is_on_hub(source: str) -> bool:
    """True if a model or data source is a hub id: neither made here nor a local path, by its
    beginning, its suffix or because it exists."""
    is_named = source.startswith(("builtin:", GYM, "/", ".", "~")) or source.endswith(DATA_SUFFIXES)
    return not is_named and not Path(source).exists()


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def parse_text(text: str) -> str | None:
    """The value of a text setting after `--set`: `text` without the space around it. None if it is
    empty, `~` or `null`; what is in quotes if all of it is."""
    word = text.strip()
    if word in ("", "~", "null"):
        return None
    if word[0] in "'\"":
        with contextlib.suppress(yaml.YAMLError):
            return str(parse_yaml(word))
    return word


def is_text(annotation: Any, value: str = "") -> bool:
    """Whether a setting of this type is text (or null), given as `value`: a setting that may also
    be a list is text unless it begins as a list."""
    if annotation in (str, str | None):
        return True
    return str in get_args(annotation) and not value.lstrip().startswith(("[", "{"))


def shown(value: Any) -> str:
    """The value for an error message, shortened if it is long or deep, and without the user name
    and password of a URL."""
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", _SHORT.repr(value))


_OF_CONFIG = "ReplayConfig"
"""The source of the values of one, in messages."""


@final
class ReplayConfig(ReplaySection):
    """The settings of a replay buffer: the keys of `replay` in docs/recipe.md.

    `ReplayConfig.of(name, **changes)` has the values of a preset, and `changes`. A bad value,
    an unknown key or a contradiction raises RecipeError, as in a recipe.
    """

    @classmethod
    def of(cls, name: str, **changes: Any) -> "ReplayConfig":
        """The settings of the preset `name`: grpo, uniform, group_std, ours or fifo."""
        return cls.model_validate({**changes, "preset": name})

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> "ReplayConfig":
        if problems := list(replay_contradictions(self)):
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_as_a_recipe_does(
        cls, given: Any, validated: ModelWrapValidatorHandler["ReplayConfig"]
    ) -> "ReplayConfig":
        try:
            return validated(given)
        except ValidationError as error:
            problems, origins = plain_problems(error, given), [({"replay": given}, _OF_CONFIG)]
            raise RecipeError(_explain(problems, origins, "replay")) from None
