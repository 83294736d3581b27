"""Reads and writes the recipe of a run, recipe.yaml: its first recipe, with the changes of resumes
(`training.resuming` has the keys that may change).

A recipe with a secret is refused before it is written. Files that people share contain no hosts and
folders of the user.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from grpo_replay.errors import RecipeError, UsageError
from grpo_replay.recipe import (
    Recipe,
    load_recipe,
    parse_overrides,
    read_recipe_layer,
    recipe_to_yaml,
    resolve_recipe,
)
from grpo_replay.recipe.layers import to_yaml
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.terminal.quiet import without_secrets

RECIPE_FILE = "recipe.yaml"
_NAMED_DIFFERENCES = 5


def read_recipe_file(path: Path) -> Recipe:
    """Returns a recipe that a run wrote. Raises RecipeError."""
    return resolve_recipe([read_recipe_layer(path)], source=str(path))


def recipe_to_resume(run_dir: Path, name: str | None, overrides: Sequence[str]) -> Recipe:
    """Read the run's recipe with `overrides`, the `--set` arguments of the command line.

    `name` is the RECIPE of the command line, if given. Raises UsageError if it differs from the
    run's recipe in more than the overrides, RecipeError if the run's recipe is not valid.
    """
    path = run_dir / RECIPE_FILE
    source = f"{path} with --set" if overrides else str(path)
    layers = [read_recipe_layer(path), parse_overrides(overrides)]
    resumed = resolve_recipe(layers, source=source)
    if name is not None:
        refuse_other_recipe_file(load_recipe(name, overrides), resumed, name, run_dir)
    return resumed


def refuse_other_recipe_file(
    given: Recipe, stored: Recipe, name: str, run_dir: Path, unlike: Collection[str] = ()
) -> None:
    """Raises UsageError if recipe `given` differs from `stored` in other keys than `unlike`."""
    differing = [
        difference for difference in differences(stored, given) if difference[0] not in unlike
    ]
    if not differing:
        return
    lines = [f"{key} is {old!r} in the run, {new!r} in {name}" for key, old, new in differing]
    more = len(lines) - _NAMED_DIFFERENCES
    key, _, value = differing[0]
    raise UsageError(
        f"--resume: {name} is not the recipe of the run in {run_dir}: "
        f"{'; '.join(lines[:_NAMED_DIFFERENCES])}{f'; and {more} more' if more > 0 else ''}. "
        "Leave RECIPE out to go on with the run's own recipe; change single values with --set, "
        f"such as --set {key}={_word(value)}"
    )


def _word(value: Any) -> str:
    """Format a value as an argument of `--set`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_recipe(path: Path, recipe: Recipe, comment: str = "") -> None:
    """Write a recipe atomically. Raises RecipeError if it holds a secret."""
    refuse_secrets(recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_whole(path, (f"# {comment}\n" if comment else "") + recipe_to_yaml(recipe))


def differences(one: BaseModel, other: BaseModel) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in one, value in the other) of every leaf that differs."""
    a, b = flatten(one.model_dump()), flatten(other.model_dump())
    keys = dict.fromkeys([*a, *b])
    return [(key, a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)]


def content_differences(one: Recipe, other: Recipe) -> list[tuple[str, Any, Any]]:
    """Returns the `differences` except those of only the folder of a file or the host of a URL."""
    a, b = (flatten(shareable(recipe.model_dump(mode="json"))) for recipe in (one, other))
    return [item for item in differences(one, other) if a.get(item[0]) != b.get(item[0])]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested mapping to one level: dotted keys to leaf values. Empty ones are leaves."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


VARIABLES = "HF_TOKEN, VLLM_API_KEY, WANDB_API_KEY"


def refuse_secrets(recipe: Recipe) -> None:
    """Raises RecipeError that names the key if a value of the recipe has a secret in it."""
    for key, text in texts_in(recipe.model_dump(mode="json")):
        if without_secrets(text) != text:
            raise RecipeError(
                f"{key} holds what looks like a secret: it would be written to recipe.yaml and to "
                f"the card of every checkpoint. Take it out, and set it in the environment "
                f"({VARIABLES})"
            )


def shareable_yaml(recipe: Recipe) -> str:
    """Format a recipe as `shareable` YAML, for a model card or a page."""
    return to_yaml(shareable(recipe.model_dump(mode="json")))


def shareable(value: Any) -> Any:
    """Replace local paths by their last part and URLs by `http://HOST`, also inside mappings and
    lists. Other values are unchanged."""
    if isinstance(value, dict):
        return {key: shareable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shareable(inner) for inner in value]
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        return f"{urlsplit(value).scheme}://HOST"
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def texts_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every text in nested mappings and lists."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from texts_in(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner, key)
