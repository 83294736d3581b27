"""The code that a recipe brings (functions of the user's by their place, classes that vLLM imports,
and `trust_remote_code`), and what every command does with it: name it before it runs, or refuse it.
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


def consider_code(code: Sequence[str], whose: str, refuse: bool, announce: bool) -> None:
    """Print the `code` of a recipe on stderr, with `announce`. Raises UsageError to `refuse` it."""
    if not code:
        return
    named = "; ".join(code)
    if refuse:
        raise UsageError(
            f"--no-code: {whose} brings code that would run: {named}. Read it, then leave "
            "--no-code out, or choose something else with --set"
        )
    if announce:
        text = f"{whose} brings code that will run: {named} (--no-code refuses it)"
        print(printable(text), file=sys.stderr, flush=True)


def code_of(
    recipe: Recipe, sections: Sequence[str] = (), overrides: Sequence[str] = ()
) -> list[str]:
    """`key value` of all that would run as code when `recipe` is used, in the order of its
    sections, or of these `sections` alone. What the `--set` words `overrides` say is the user's."""
    given = parse_overrides(overrides)
    return [
        f"{key} {value}"
        for key, value in _places(recipe)
        if (not sections or key.partition(".")[0] in sections) and not _is_given(key, given)
    ]


def _places(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    if recipe.model.trust_remote_code:
        yield "model.trust_remote_code", f"true ({recipe.model.path})"
    backend, verifier = recipe.sampling.backend, recipe.eval.reward
    named = [("sampling.backend", SAMPLERS, backend)]
    named += [("reward.function", VERIFIERS, each.function) for each in recipe.reward.functions]
    named += [
        ("advantage.estimator", ADVANTAGES, recipe.advantage.estimator),
        ("replay.priority", PRIORITIES, recipe.replay.priority),
        ("loss.kind", LOSSES, recipe.loss.kind),
        ("eval.reward", VERIFIERS, verifier),
    ]
    yield from ((key, value) for key, known, value in named if value not in known.names)
    for key, value in texts_in(recipe.sampling.vllm.others):
        if "." in value or ":" in value:  # the form of a module's class or of a file
            yield f"sampling.vllm.{key}", value


def _is_given(key: str, given: Mapping[str, Any]) -> bool:
    node: Any = given
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True
