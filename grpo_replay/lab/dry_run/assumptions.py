"""What is assumed for a recipe before its first run, from the papers' models.

Paper A: survivors of the zero-variance filter out of 256 rollouts, and lengths. Paper B: μ, the
cost of generating one rollout divided by the cost of training on it once. The dry run and `plan`
make the same assumptions, and both take what a finished run measured instead.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from grpo_replay.recipe import Recipe

SURVIVORS_OF_256 = {"Qwen3-0.6B": 86.5, "Qwen3-1.7B": 112.7, "Qwen3-4B": 124.9}  # -Base
COST_RATIO = {"Qwen3-0.6B": 6.84, "Qwen2.5-7B": 5.28}

BILLIONS = {"Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.7, "Qwen3-4B": 4.0, "Qwen2.5-7B": 7.6}
"""Billions of parameters of the models whose μ was measured or is interpolated."""

MEAN_COMPLETION_SHARE = 0.3
"""Mean over maximum completion length: paper A's base models, 2,000-2,450 of 8,192 tokens."""
MEAN_PROMPT_SHARE = 0.15
"""Mean over maximum prompt length: about 150 of 1,024 tokens for competition problems."""

_TINY = {
    "builtin:tiny": {
        "survival": 0.68, "mu": 0.88, "completion_tokens": 11.0, "prompt_tokens": 6.0,
    },
    "builtin:tiny-long": {
        "survival": 0.70, "mu": 4.8, "completion_tokens": 215.0, "prompt_tokens": 10.0,
    },
}  # fmt: skip
"""Measured in runs of the tiny recipes (docs/planning.md, docs/tiny.md), by `model.path`."""
_UNKNOWN_MODEL_USES = "Qwen3-1.7B"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a recipe is expected to do on average. `sources` has the origin of each in words."""

    survival: float  # share of the generated rollouts that are kept, (0, 1]
    mu: float
    completion_tokens: float  # mean of one rollout
    prompt_tokens: float
    sources: Mapping[str, str]


def expected_of(recipe: Recipe, measured: Mapping[str, float] | None = None) -> Expected:
    """What to expect of a recipe: `measured` values of a finished run, and assumptions for the
    others. Keys of `measured` are fields of `Expected`."""
    assumed = {
        "survival": assumed_survival(recipe),
        "mu": assumed_cost_ratio(recipe),
        "completion_tokens": assumed_completion_tokens(recipe),
        "prompt_tokens": assumed_prompt_tokens(recipe),
    }
    found = dict(measured or {})
    if not recipe.replay.drop_zero_variance:
        found.pop("survival", None)  # the measured run may have dropped groups
    chosen = assumed | {name: (value, "measured in the run") for name, value in found.items()}
    return Expected(
        **{name: value for name, (value, _) in chosen.items()},
        sources={name: why for name, (_, why) in chosen.items()},
    )


def assumed_survival(recipe: Recipe) -> tuple[float, str]:
    """Share of rollouts that survive the zero-variance filter, and where the number comes from."""
    if not recipe.replay.drop_zero_variance:
        return 1.0, "replay.drop_zero_variance is false"
    if recipe.model.path in _TINY:
        return _of_tiny("survival", recipe.model.path)
    name = _known_name(recipe, SURVIVORS_OF_256)
    measured = name or _UNKNOWN_MODEL_USES
    kept = SURVIVORS_OF_256[measured]
    another = "" if name else ", another model"
    return kept / 256, f"paper A's {measured}-Base, {kept} of 256{another}"


def assumed_cost_ratio(recipe: Recipe) -> tuple[float, str]:
    """μ of the recipe's model, and where it comes from: measured by paper B, or for sizes between
    its models interpolated over the logarithm of the size."""
    if recipe.model.path in _TINY:
        return _of_tiny("mu", recipe.model.path)
    name = _known_name(recipe, BILLIONS)
    if name in COST_RATIO:
        return COST_RATIO[name], f"paper B's {name}"
    if name is None:
        return COST_RATIO["Qwen2.5-7B"], "paper B's Qwen2.5-7B, another model"
    (small, at_small), (large, at_large) = COST_RATIO.items()
    share = math.log(BILLIONS[name] / BILLIONS[small]) / math.log(BILLIONS[large] / BILLIONS[small])
    cost_ratio = at_small + share * (at_large - at_small)
    return cost_ratio, f"between paper B's {small} and {large} by size"


def assumed_completion_tokens(recipe: Recipe) -> tuple[float, str]:
    """Mean length of a completion, and where it comes from."""
    longest = recipe.sampling.max_completion_length
    if recipe.model.path in _TINY:
        tokens, source = _of_tiny("completion_tokens", recipe.model.path)
        return min(tokens, longest), source
    return MEAN_COMPLETION_SHARE * longest, f"{MEAN_COMPLETION_SHARE:.0%} of the longest"


def assumed_prompt_tokens(recipe: Recipe) -> tuple[float, str]:
    """Mean length of a prompt, and where it comes from."""
    longest = recipe.prompts.max_prompt_length
    if recipe.prompts.source in _TINY:
        tokens, source = _of_tiny("prompt_tokens", recipe.prompts.source)
        return min(tokens, longest), source
    return MEAN_PROMPT_SHARE * longest, f"{MEAN_PROMPT_SHARE:.0%} of the longest"


def _of_tiny(name: str, builtin: str) -> tuple[float, str]:
    return _TINY[builtin][name], f"a run of the {builtin.removeprefix('builtin:')} recipe"


def _known_name(recipe: Recipe, known: Iterable[str]) -> str | None:
    """The known model that `model.path` (hub id, folder or builtin name) names, with or without the
    suffix `-Base`; None if it names another model."""
    path = recipe.model.path.removeprefix("builtin:")
    last = PurePath(path).name.lower().removesuffix("-base")
    return next((name for name in known if name.lower() == last), None)
