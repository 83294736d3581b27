"""The recipes of a run: the one it began with, and one more for each change at a resume.

    recipe.yaml                 the recipe of the first step on; never changed
    recipes/step_000006.yaml    the recipe of the steps after step 6, where the run was resumed

A resumed run goes on with the newest of them. Only explicit overrides change it. Secrets stay off
the disk (a recipe with one is refused where it would be written), and a user's hosts and folders
out of what people share.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
CHANGES_FOLDER = "recipes"
_NAME = re.compile(r"step_(\d{6,})\.yaml")
_NAMED_DIFFERENCES = 5


@dataclass(frozen=True, slots=True)
class RecipeHistory:
    """The recipes of a run. `changed[i]` is (step, recipe): the recipe of the steps after `step`,
    ascending."""

    first: Recipe
    changed: tuple[tuple[int, Recipe], ...] = ()

    def at(self, step: int) -> Recipe:
        """The recipe under which `step` (1-based) was trained."""
        found = self.first
        for after, recipe in self.changed:
            if after < step:
                found = recipe
        return found

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """All of them, in the order of their steps."""
        return self.first, *(recipe for _, recipe in self.changed)

    @property
    def latest(self) -> Recipe:
        return self.recipes[-1]


def recipe_file(run_dir: Path, step: int | None = None) -> Path:
    """The file of the recipe under which `step` was trained, or with which a resume goes on. The
    file need not exist."""
    found = run_dir / RECIPE_FILE
    for after, path in _changes(run_dir):
        if step is None or after < step:
            found = path
    return found


def read_recipe_file(path: Path) -> Recipe:
    """A recipe that a run wrote. Raises RecipeError."""
    return resolve_recipe([read_recipe_layer(path)], source=str(path))


def read_history(run_dir: Path) -> RecipeHistory:
    """All recipes of a run. Raises RecipeError if one cannot be read."""
    changed = tuple((after, read_recipe_file(path)) for after, path in _changes(run_dir))
    return RecipeHistory(read_recipe_file(run_dir / RECIPE_FILE), changed)


def recipe_to_resume(run_dir: Path, name: str | None, overrides: Sequence[str]) -> Recipe:
    """The run's own recipe with `overrides`, the `--set` words of the command line.

    `name` is the RECIPE of the command line, if given. Raises UsageError if it differs from the
    run's in more than the overrides, RecipeError if the run's own is not valid.
    """
    path = recipe_file(run_dir)
    source = f"{path} with --set" if overrides else str(path)
    layers = [read_recipe_layer(path), parse_overrides(overrides)]
    resumed = resolve_recipe(layers, source=source)
    if name is not None:
        refuse_another(load_recipe(name, overrides), resumed, name, run_dir)
    return resumed


def refuse_another(
    given: Recipe, own: Recipe, name: str, run_dir: Path, unlike: Collection[str] = ()
) -> None:
    """Raises UsageError if `given`, called `name`, differs from a run's `own` recipe in other keys
    than `unlike`."""
    found = [each for each in differences(own, given) if each[0] not in unlike]
    if not found:
        return
    lines = [f"{key} is {ours!r} in the run, {theirs!r} in {name}" for key, ours, theirs in found]
    more = len(lines) - _NAMED_DIFFERENCES
    key, _, value = found[0]
    raise UsageError(
        f"--resume: {name} is not the recipe of the run in {run_dir}: "
        f"{'; '.join(lines[:_NAMED_DIFFERENCES])}{f'; and {more} more' if more > 0 else ''}. "
        "Leave RECIPE out to go on with the run's own recipe; change single values with --set, "
        f"such as --set {key}={_word(value)}"
    )


def _word(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def record_recipe(run_dir: Path, recipe: Recipe, step: int) -> list[str]:
    """Keep `recipe` as that of the steps after `step`. Returns the changes against the recipe that
    the run had last, one line each. Recipes of later steps are removed, as their steps are."""
    changes = recipe_changes(run_dir, recipe)
    if read_recipe_file(recipe_file(run_dir, step + 1)) != recipe:
        write_recipe(change_file(run_dir, step), recipe, f"The recipe of the steps after {step}.")
    for after, path in _changes(run_dir):
        if after > step:
            path.unlink()
    return changes


def recipe_changes(run_dir: Path, recipe: Recipe) -> list[str]:
    """How `recipe` differs from the one that the run had last, one line for each key."""
    before = read_recipe_file(recipe_file(run_dir))
    return [f"{key}: {old!r} -> {new!r}" for key, old, new in differences(before, recipe)]


def write_recipe(path: Path, recipe: Recipe, comment: str = "") -> None:
    """Write a recipe atomically. Raises RecipeError if it holds a secret."""
    refuse_secrets(recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_whole(path, (f"# {comment}\n" if comment else "") + recipe_to_yaml(recipe))


def change_file(run_dir: Path, step: int) -> Path:
    return run_dir / CHANGES_FOLDER / f"step_{step:06d}.yaml"


def differences(one: BaseModel, other: BaseModel) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in one, value in the other) of every leaf that differs."""
    a, b = flatten(one.model_dump()), flatten(other.model_dump())
    keys = dict.fromkeys([*a, *b])
    return [(key, a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one level: dotted keys to leaf values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _changes(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, file) of every change, ascending."""
    folder = run_dir / CHANGES_FOLDER
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


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
    """The recipe as YAML for a card or a page: without names of hosts, and of local paths only the
    last part."""
    return to_yaml(shareable(recipe.model_dump(mode="json")))


def shareable(value: Any) -> Any:
    """The last part of a local path; `http://HOST` for a URL; other values unchanged. In mappings
    and lists, every value so."""
    if isinstance(value, dict):
        return {key: shareable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shareable(each) for each in value]
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        return f"{urlsplit(value).scheme}://HOST"
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def texts_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every text in nested mappings and lists."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from texts_in(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each, key)
