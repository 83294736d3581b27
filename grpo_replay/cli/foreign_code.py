"""The code that a recipe names (import paths of functions, classes that vLLM imports, and
`trust_remote_code`). Every command announces it before it runs, or refuses it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_replay.errors import UsageError
from grpo_replay.recipe.layers import parse_overrides
from grpo_replay.recipe.open_lists import ADVANTAGES, LOSSES, PRIORITIES, SAMPLERS, VERIFIERS
from grpo_replay.recipe.recipe import Recipe
from grpo_replay.storage.stored_recipe import texts_in
from grpo_replay.terminal.console import printable


def announce_or_refuse_code(code: Sequence[str], origin: str, refuse: bool, announce: bool) -> None:
    """Print the `code` of a recipe on stderr if `announce`. Raises UsageError if `refuse`."""
    if not code:
        return
    listed = "; ".join(code)
    if refuse:
        raise UsageError(
            f"--no-code: {origin} brings code that would run: {listed}. Read it, then leave "
            "--no-code out, or choose something else with --set"
        )
    if announce:
        text = f"{origin} brings code that will run: {listed} (--no-code refuses it)"
        print(printable(text), file=sys.stderr, flush=True)


def code_of(
    recipe: Recipe, sections: Sequence[str] = (), overrides: Sequence[str] = ()
) -> list[str]:
    """List `key value` of everything in `recipe`, or in these `sections` of it, that runs as code.
    Keys that the user gave by --set (`overrides`) are left out."""
    overridden = parse_overrides(overrides)
    return [
        f"{key} {value}"
        for key, value in _code_values(recipe)
        if (not sections or key.partition(".")[0] in sections) and not _is_set(key, overridden)
    ]


def _code_values(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yields key and value of all that runs as code and does not ship with this package."""
    if recipe.model.trust_remote_code:
        yield "model.trust_remote_code", f"true ({recipe.model.path})"
    backend, verifier = recipe.sampling.backend, recipe.eval.reward
    entries = [("sampling.backend", SAMPLERS, backend)]
    entries += [("reward.function", VERIFIERS, term.function) for term in recipe.reward.functions]
    entries += [
        ("advantage.estimator", ADVANTAGES, recipe.advantage.estimator),
        ("replay.priority", PRIORITIES, recipe.replay.priority),
        ("loss.kind", LOSSES, recipe.loss.kind),
        ("eval.reward", VERIFIERS, verifier),
    ]
    yield from ((key, value) for key, shipped, value in entries if value not in shipped.names)
    for key, value in texts_in(recipe.sampling.vllm.extra_settings):
        if "." in value or ":" in value:  # the form of a module's class or of a file
            yield f"sampling.vllm.{key}", value


def _is_set(key: str, tree: Mapping[str, Any]) -> bool:
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True
