"""Secrets stay off the disk, and a user's hosts and folders out of what people share.

A recipe with a secret is refused where it would be written.
"""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from grpo_replay.errors import RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.terminal.secrets import without_secrets

VARIABLES = "HF_TOKEN, VLLM_API_KEY, WANDB_API_KEY"


def refuse_secrets(recipe: Recipe) -> None:
    """Raises RecipeError that names the key if a value of the recipe has a secret in it."""
    for key, text in _texts(recipe.model_dump(mode="json")):
        if without_secrets(text) != text:
            raise RecipeError(
                f"{key} holds what looks like a secret: it would be written to recipe.yaml and to "
                f"the card of every checkpoint. Take it out, and set it in the environment "
                f"({VARIABLES})"
            )


def shareable_yaml(recipe: Recipe) -> str:
    """The recipe as YAML for a card or a page: without names of hosts, and of local paths only the
    last part."""

    def shared(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shared(each) for key, each in value.items()}
        if isinstance(value, list):
            return [shared(each) for each in value]
        return shareable(value) if isinstance(value, str) else value

    tree = shared(recipe.model_dump(mode="json"))
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def shareable(text: str) -> str:
    """The last part of a local path; `http://HOST` for a URL; other text unchanged."""
    if text.startswith(("http://", "https://")):
        return f"{urlsplit(text).scheme}://HOST"
    if text.startswith(("/", "~")):
        return Path(text).name
    return text


def _texts(value: Any, key: str = "") -> list[tuple[str, str]]:
    """(dotted key, text) of every text in nested mappings and lists."""
    if isinstance(value, str):
        return [(key, value)]
    if isinstance(value, list):
        return [pair for each in value for pair in _texts(each, key)]
    inner = value.items() if isinstance(value, dict) else ()
    return [pair for name, each in inner for pair in _texts(each, f"{key}.{name}" if key else name)]
