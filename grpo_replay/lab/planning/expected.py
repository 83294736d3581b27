"""What a recipe is expected to do: survivors, μ and lengths; rollouts drawn and stored.

Before the first run, the papers' models are assumed. Paper A: survivors of the zero-variance filter
out of 256 rollouts, and lengths. Paper B: μ, the cost of generating one rollout divided by the cost
of training on it once. The dry run and `plan` make the same assumptions, and both take what a
finished run measured instead.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from grpo_replay.recipe import Recipe, ReplaySection, SamplingSection

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
"""Measured in runs of the tiny recipes (docs/report.md, docs/results.md), by `model.path`."""
_UNKNOWN_MODEL_USES = "Qwen3-1.7B"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a recipe is expected to do on average. `sources` has the origin of each in words."""

    survival: float  # share of the generated rollouts that are kept, (0, 1]
    mu: float
    completion_tokens: float  # mean of one rollout
    prompt_tokens: float
    sources: Mapping[str, str]


def expected_of(
    recipe: Recipe,
    measured: Mapping[str, float] | None = None,
    prompt_tokens: float | None = None,
) -> Expected:
    """What to expect of a recipe: `measured` values of a finished run, and assumptions for the
    others. Keys of `measured` are fields of `Expected`. `prompt_tokens` is the mean of the prompts,
    if they were read."""
    model, prompts, drops = recipe.model.path, recipe.prompts, recipe.replay.drop_zero_variance
    longest = recipe.sampling.max_completion_length
    assumed = {
        "survival": assumed_survival(model, drops),
        "mu": assumed_cost_ratio(model),
        "completion_tokens": _assumed_length(
            "completion_tokens", model, longest, MEAN_COMPLETION_SHARE
        ),
        "prompt_tokens": _assumed_length(
            "prompt_tokens", prompts.source_names[0], prompts.max_prompt_length, MEAN_PROMPT_SHARE
        ),
    }
    if prompt_tokens is not None:
        assumed["prompt_tokens"] = prompt_tokens, "the mean of the prompts that were read"
    found = dict(measured or {})
    if not drops:
        found.pop("survival", None)  # the measured run may have dropped groups
    chosen = assumed | {name: (value, "measured in the run") for name, value in found.items()}
    return Expected(
        **{name: value for name, (value, _) in chosen.items()},
        sources={name: why for name, (_, why) in chosen.items()},
    )


def assumed_survival(model_path: str, drops: bool) -> tuple[float, str]:
    """Share of rollouts that survive the zero-variance filter, and where the number comes from."""
    if not drops:
        return 1.0, "replay.drop_zero_variance is false"
    if model_path in _TINY:
        return _of_tiny("survival", model_path)
    name = _known_name(model_path, SURVIVORS_OF_256)
    measured = name or _UNKNOWN_MODEL_USES
    kept = SURVIVORS_OF_256[measured]
    another = "" if name else ", another model"
    return kept / 256, f"paper A's {measured}-Base, {kept} of 256{another}"


def assumed_cost_ratio(model_path: str) -> tuple[float, str]:
    """μ of a model, and where it comes from: measured by paper B, or for sizes between its models
    interpolated over the logarithm of the size."""
    if model_path in _TINY:
        return _of_tiny("mu", model_path)
    name = _known_name(model_path, BILLIONS)
    if name in COST_RATIO:
        return COST_RATIO[name], f"paper B's {name}"
    if name is None:
        return COST_RATIO["Qwen2.5-7B"], "paper B's Qwen2.5-7B, another model"
    (small, at_small), (large, at_large) = COST_RATIO.items()
    share = math.log(BILLIONS[name] / BILLIONS[small]) / math.log(BILLIONS[large] / BILLIONS[small])
    cost_ratio = at_small + share * (at_large - at_small)
    return cost_ratio, f"between paper B's {small} and {large} by size"


def _assumed_length(name: str, builtin: str, longest: int, share: float) -> tuple[float, str]:
    if builtin in _TINY:
        tokens, source = _of_tiny(name, builtin)
        return min(tokens, longest), source
    return share * longest, f"{share:.0%} of the longest"


def _of_tiny(name: str, builtin: str) -> tuple[float, str]:
    return _TINY[builtin][name], f"a run of the {builtin.removeprefix('builtin:')} recipe"


def _known_name(model_path: str, known: Iterable[str]) -> str | None:
    """The known model that `model.path` (hub id, folder or builtin name) names, with or without the
    suffix `-Base`; None if it names another model."""
    last = PurePath(model_path.removeprefix("builtin:")).name.lower().removesuffix("-base")
    return next((name for name in known if name.lower() == last), None)


def stored_when_drawn(replay: ReplaySection, survivors: float) -> float:
    """Rollouts that the buffer holds when a step with so many survivors draws from it, at rest."""
    limit = math.inf if replay.max_age_steps is None else float(replay.max_age_steps)
    if replay.stores_first:
        return max(survivors, min(replay.capacity_rollouts, (limit + 1) * survivors))
    return min(replay.capacity_rollouts, limit * survivors)


def drawn_rollouts(
    replay: ReplaySection, generated: float, survivors: float, draws_per_step: int
) -> float:
    """Rollouts that a step draws: without replacement at most what is stored, and none more often
    than `replay.max_uses` allows."""
    drawn = replay.ratio * (generated if replay.stores_first else survivors)
    if replay.max_uses is not None:
        drawn = min(drawn, replay.max_uses * survivors)
    if replay.with_replacement:
        return drawn
    return min(drawn, draws_per_step * stored_when_drawn(replay, survivors))


def expected_rollouts(sampling: SamplingSection, expected: Expected) -> tuple[float, float]:
    """Rollouts generated in a step, and their survivors: a refill samples what was dropped."""
    generated = sum(
        sampling.rollouts_per_step * (1 - expected.survival) ** refill
        for refill in range(sampling.max_refills + 1)
    )
    return generated, generated * expected.survival
