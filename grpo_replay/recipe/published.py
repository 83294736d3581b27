"""What the papers measured for their models, by name: assumptions for a recipe that has no run yet.

Paper A: survivors of the zero-variance filter out of 256 rollouts. Paper B: μ, the cost of
generating one rollout over that of training on it once.
"""

import math
from collections.abc import Iterable
from pathlib import PurePath

from grpo_replay.recipe import Recipe

SURVIVORS_OF_256 = {"Qwen3-0.6B": 86.5, "Qwen3-1.7B": 112.7, "Qwen3-4B": 124.9}  # -Base
COST_RATIO = {"Qwen3-0.6B": 6.84, "Qwen2.5-7B": 5.28}

BILLIONS = {"Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.7, "Qwen3-4B": 4.0, "Qwen2.5-7B": 7.6}
"""Parameters of the models whose μ is measured, or lies between."""

_TINY_SURVIVAL = 0.63  # of the shipped tiny recipe: 0.626 over 200 steps
_OTHER = "Qwen3-1.7B"


def assumed_survival(recipe: Recipe) -> tuple[float, str]:
    """The share of rollouts that the zero-variance filter keeps, and where it comes from."""
    if not recipe.replay.drop_zero_variance:
        return 1.0, "replay.drop_zero_variance is false"
    if recipe.model.path == "builtin:tiny":
        return _TINY_SURVIVAL, "a run of the tiny recipe"
    name = _known_name(recipe, SURVIVORS_OF_256)
    kept = SURVIVORS_OF_256[name or _OTHER]
    another = "" if name else ", another model"
    return kept / 256, f"paper A's {name or _OTHER}-Base, {kept} of 256{another}"


def assumed_cost_ratio(recipe: Recipe) -> tuple[float, str]:
    """μ of the recipe's model, and where it comes from: measured by paper B, or for the sizes
    between interpolated over the logarithm of the size."""
    name = _known_name(recipe, BILLIONS)
    if name in COST_RATIO:
        return COST_RATIO[name], f"paper B's {name}"
    if name is None:
        return COST_RATIO["Qwen2.5-7B"], "paper B's Qwen2.5-7B, another model"
    (small, at_small), (large, at_large) = COST_RATIO.items()
    share = math.log(BILLIONS[name] / BILLIONS[small]) / math.log(BILLIONS[large] / BILLIONS[small])
    return at_small + share * (
        at_large - at_small
    ), f"between paper B's {small} and {large} by size"


def _known_name(recipe: Recipe, known: Iterable[str]) -> str | None:
    """The model of the recipe's hub id, folder or builtin name among the known ones; a base model
    goes by the name of its family and size."""
    path = recipe.model.path.removeprefix("builtin:")
    last = PurePath(path).name.lower().removesuffix("-base")
    return next((name for name in known if name.lower() == last), None)
