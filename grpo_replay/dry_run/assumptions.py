"""Survival and cost ratio assumed for a recipe before its first run, from the papers' models.

Paper A: survivors of the zero-variance filter out of 256 rollouts. Paper B: μ, the cost of
generating one rollout divided by the cost of training on it once. The dry run and `plan` use both.
"""

import math
from collections.abc import Iterable
from pathlib import PurePath

from grpo_replay.recipe import Recipe

SURVIVORS_OF_256 = {"Qwen3-0.6B": 86.5, "Qwen3-1.7B": 112.7, "Qwen3-4B": 124.9}  # -Base
COST_RATIO = {"Qwen3-0.6B": 6.84, "Qwen2.5-7B": 5.28}

BILLIONS = {"Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.7, "Qwen3-4B": 4.0, "Qwen2.5-7B": 7.6}
"""Billions of parameters of the models whose μ was measured or is interpolated."""

_TINY_SURVIVAL = 0.63  # measured on the shipped tiny recipe: 0.626 over 200 steps
_UNKNOWN_MODEL_USES = "Qwen3-1.7B"


def assumed_survival(recipe: Recipe) -> tuple[float, str]:
    """Share of rollouts that survive the zero-variance filter, and where the number comes from."""
    if not recipe.replay.drop_zero_variance:
        return 1.0, "replay.drop_zero_variance is false"
    if recipe.model.path == "builtin:tiny":
        return _TINY_SURVIVAL, "a run of the tiny recipe"
    name = _known_name(recipe, SURVIVORS_OF_256)
    measured = name or _UNKNOWN_MODEL_USES
    kept = SURVIVORS_OF_256[measured]
    another = "" if name else ", another model"
    return kept / 256, f"paper A's {measured}-Base, {kept} of 256{another}"


def assumed_cost_ratio(recipe: Recipe) -> tuple[float, str]:
    """μ of the recipe's model, and where it comes from: measured by paper B, or for sizes between
    its models interpolated over the logarithm of the size."""
    name = _known_name(recipe, BILLIONS)
    if name in COST_RATIO:
        return COST_RATIO[name], f"paper B's {name}"
    if name is None:
        return COST_RATIO["Qwen2.5-7B"], "paper B's Qwen2.5-7B, another model"
    (small, at_small), (large, at_large) = COST_RATIO.items()
    share = math.log(BILLIONS[name] / BILLIONS[small]) / math.log(BILLIONS[large] / BILLIONS[small])
    cost_ratio = at_small + share * (at_large - at_small)
    return cost_ratio, f"between paper B's {small} and {large} by size"


def _known_name(recipe: Recipe, known: Iterable[str]) -> str | None:
    """The known model that `model.path` (hub id, folder or builtin name) names, with or without the
    suffix `-Base`; None if it names another model."""
    path = recipe.model.path.removeprefix("builtin:")
    last = PurePath(path).name.lower().removesuffix("-base")
    return next((name for name in known if name.lower() == last), None)
