"""Recipes from files, presets and `--set` overrides: find, read, merge, validate."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from grpo_replay.errors import RecipeError, did_you_mean
from grpo_replay.recipe.base import Section
from grpo_replay.recipe.recipe import Recipe

_PAPER_A = {"with_replacement": False, "drop_zero_variance": True}
_PAPER_B = {"with_replacement": True, "drop_zero_variance": False}

REPLAY_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"enabled": False},
    "ours": {
        "enabled": True,
        "unit": "rollout",
        "priority": "abs_advantage",
        "composition": "fresh_anchored",
        **_PAPER_A,
    },
    "uniform": {
        "enabled": True,
        "unit": "query",
        "priority": "uniform",
        "composition": "pool",
        **_PAPER_A,
    },
    "group_std": {
        "enabled": True,
        "unit": "query",
        "priority": "group_std",
        "composition": "pool",
        **_PAPER_A,
    },
    "fifo": {
        "enabled": True,
        "unit": "rollout",
        "priority": "uniform",
        "composition": "buffer_only",
        "max_age_steps": None,
        "warmup_steps": 0,
        **_PAPER_B,
    },
}
"""The values that each preset sets (paper A, section 5; `fifo`: paper B). `grpo` does not set
`drop_zero_variance`, so that it is the baseline of any recipe."""


def shipped_recipes_folder() -> Path:
    """The folder of the recipes that ship with the package (wheel or checkout)."""
    here = Path(__file__).resolve().parents[1]
    inside = here / "recipes"
    return inside if inside.is_dir() else here.parent / "recipes"


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe, given its path or the name of a shipped recipe.

    Raises RecipeError, with the shipped names, if there is none.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(shipped_recipes_folder().glob("*.yaml"))}
    if name_or_path in shipped:
        return shipped[name_or_path]
    hint = did_you_mean(name_or_path, shipped)
    raise RecipeError(
        f"no recipe {name_or_path!r}: not a file and not a shipped recipe{hint}; "
        f"shipped: {', '.join(shipped)}"
    )


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The validated recipe from a file and `key=value` overrides. Raises RecipeError."""
    path = find_recipe(name_or_path)
    layer = read_recipe_layer(path)
    layer.setdefault("name", path.stem)
    return resolve_recipe([layer, parse_overrides(overrides)], source=str(path))


def read_recipe_layer(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. Raises RecipeError with file and line."""
    try:
        layer = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{place}: not valid YAML: {getattr(error, 'problem', error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    if layer is None:
        return {}
    if not isinstance(layer, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, found a {_kind(layer)}")
    return layer


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The nested mapping of `--set section.key=value` overrides. Values are YAML."""
    layer: dict[str, Any] = {}
    for word in overrides:
        key, separator, text = word.partition("=")
        if not separator or not key.strip():
            raise RecipeError(f"--set {word!r}: expected key=value, such as replay.ratio=0.25")
        try:
            value = _yaml_value(text, is_text=_is_text(key.strip()))
        except yaml.YAMLError as error:
            raise RecipeError(f"--set {word!r}: {text!r} is not valid YAML") from error
        node = layer
        *parents, leaf = key.strip().split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise RecipeError(f"--set {word!r}: {parent} was already set to a value")
        node[leaf] = value
    return layer


def _is_text(key: str) -> bool:
    """True if the type of a setting is `str` or `str | None`."""
    section: Any = Recipe
    for part in key.split("."):
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return False
        field = section.model_fields.get(part)
        section = field.annotation if field else None
    return section in (str, str | None)


def _yaml_value(text: str, is_text: bool) -> Any:
    if is_text:
        return _text_value(text)
    # YAML 1.1 reads 1e-4 as a string because it has no dot.
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text.strip()):
        return float(text)
    return yaml.safe_load(text)


def _text_value(text: str) -> str | None:
    # Keep text settings as text: a numeric revision, a field called `on`, the template `{problem}`.
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text.strip()
    return value if value is None or isinstance(value, str) else text.strip()


def resolve_recipe(layers: Sequence[Mapping[str, Any]], source: str = "recipe") -> Recipe:
    """The validated recipe of `layers`, lowest precedence first. Raises RecipeError."""
    merged: dict[str, Any] = {}
    for layer in layers:
        _check_keys(layer, Recipe, (), source)
        replay = layer.get("replay")
        preset = replay.get("preset") if isinstance(replay, Mapping) else None
        if isinstance(preset, str) and preset in REPLAY_PRESETS:
            _deep_update(merged, {"replay": dict(REPLAY_PRESETS[preset])})
        _deep_update(merged, layer)
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        raise RecipeError(_explain(error, source)) from error


def recipe_to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML. Loading it gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _deep_update(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _deep_update(target[key], value)
        else:
            target[key] = _copied(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, list) else value


def _check_keys(
    layer: Mapping[str, Any], section: type[BaseModel], at: tuple[str, ...], source: str
) -> None:
    fields = section.model_fields
    for key, value in layer.items():
        place = ".".join((*at, str(key)))
        if key not in fields:
            hint = did_you_mean(str(key), fields)
            where = f"section {'.'.join(at)}" if at else "the recipe"
            raise RecipeError(
                f"{source}: unknown key {place!r}{hint}; {where} has: {', '.join(fields)}"
            )
        inner = fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            if not isinstance(value, Mapping):
                raise RecipeError(f"{source}: {place} is a section and needs keys, found {value!r}")
            _check_keys(value, inner, (*at, str(key)), source)


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"]) or "contradiction"
        message = item["msg"].removeprefix("Value error, ")
        found = f", found {item['input']!r}" if item["loc"] else ""
        lines.append(f"{source}: {place}: {message}{found}")
    return "\n".join(lines)


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    return type(value).__name__
