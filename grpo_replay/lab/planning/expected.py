"""Averages to expect of a recipe: survivors, μ and lengths; rollouts drawn and stored.

Before the first run they are assumed from the papers. Paper A has survivors of the zero-variance
filter out of 256 rollouts, and lengths; paper B has μ, the cost of generating one rollout divided
by the cost of training on it once. The dry run and `plan` make the same assumptions, and both
replace them by measured values where they have them.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from grpo_replay.recipe import Recipe, ReplaySection, SamplingSection

SURVIVORS_OF_256 = {"Qwen3-0.6B": 86.5, "Qwen3-1.7B": 112.7, "Qwen3-4B": 124.9}  # -Base
COST_RATIO = {"Qwen3-0.6B": 6.84, "Qwen2.5-7B": 5.28}

BILLION_PARAMETERS = {"Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.7, "Qwen3-4B": 4.0, "Qwen2.5-7B": 7.6}
"""Sizes of the models whose μ was measured or is interpolated."""

MEAN_COMPLETION_SHARE = 0.3
"""Mean divided by maximum completion length: 2,000-2,450 of 8,192 tokens in paper A."""
MEAN_PROMPT_SHARE = 0.15
"""Mean divided by maximum prompt length: about 150 of 1,024 tokens for competition problems."""

_TINY = {
    "builtin:tiny": {
        "survival": 0.68, "mu": 0.88, "completion_tokens": 11.0, "prompt_tokens": 6.0,
    },
    "builtin:tiny-long": {
        "survival": 0.70, "mu": 4.8, "completion_tokens": 215.0, "prompt_tokens": 10.0,
    },
}  # fmt: skip
"""Measured in runs of the tiny recipes (docs/report.md, docs/results.md), by `model.path`."""
_FOR_ANOTHER_MODEL = "Qwen3-1.7B"


@dataclass(frozen=True, slots=True)
class Expected:
    """Averages to expect of a recipe's run. `sources` says for every field where the number comes
    from."""

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
    """Returns the averages to expect of a recipe: those `measured` in a finished run, and
    assumptions for the others. Keys of `measured` are fields of `Expected`. `prompt_tokens` is the
    mean of the prompts, if they were read."""
    model, prompts = recipe.model.path, recipe.prompts
    drops_groups = recipe.replay.drop_zero_variance
    longest = recipe.sampling.max_completion_length
    assumed = {
        "survival": assumed_survival(model, drops_groups),
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
    replaced = {name: (value, "measured in the run") for name, value in (measured or {}).items()}
    if not drops_groups:
        replaced.pop("survival", None)  # the measured run may have dropped groups
    values = assumed | replaced
    return Expected(
        **{name: value for name, (value, _) in values.items()},
        sources={name: source for name, (_, source) in values.items()},
    )


def assumed_survival(model_path: str, drops_groups: bool) -> tuple[float, str]:
    """Returns the share of rollouts that survive the zero-variance filter, and its source."""
    if not drops_groups:
        return 1.0, "replay.drop_zero_variance is false"
    if model_path in _TINY:
        return _tiny_value("survival", model_path)
    name = _known_name(model_path, SURVIVORS_OF_256)
    paper_model = name or _FOR_ANOTHER_MODEL
    kept = SURVIVORS_OF_256[paper_model]
    another = "" if name else ", another model"
    return kept / 256, f"paper A's {paper_model}-Base, {kept} of 256{another}"


def assumed_cost_ratio(model_path: str) -> tuple[float, str]:
    """Returns μ of a model, and its source: paper B, which measured two models. Between their sizes
    μ is interpolated over the logarithm of the size; an unknown model has μ of the larger."""
    if model_path in _TINY:
        return _tiny_value("mu", model_path)
    name = _known_name(model_path, BILLION_PARAMETERS)
    if name in COST_RATIO:
        return COST_RATIO[name], f"paper B's {name}"
    if name is None:
        return COST_RATIO["Qwen2.5-7B"], "paper B's Qwen2.5-7B, another model"
    (small, at_small), (large, at_large) = COST_RATIO.items()
    size, smallest, largest = (BILLION_PARAMETERS[model] for model in (name, small, large))
    share = math.log(size / smallest) / math.log(largest / smallest)
    cost_ratio = at_small + share * (at_large - at_small)
    return cost_ratio, f"between paper B's {small} and {large} by size"


def _assumed_length(name: str, path: str, longest: int, share: float) -> tuple[float, str]:
    """Returns mean tokens, and their source: measured for a tiny model or its prompts, else a
    `share` of the `longest`."""
    if path in _TINY:
        tokens, source = _tiny_value(name, path)
        return min(tokens, longest), source
    return share * longest, f"{share:.0%} of the longest"


def _tiny_value(name: str, builtin: str) -> tuple[float, str]:
    return _TINY[builtin][name], f"a run of the {builtin.removeprefix('builtin:')} recipe"


def _known_name(model_path: str, known: Iterable[str]) -> str | None:
    """Returns the name among `known` that `model.path` (hub id, folder or builtin name) ends with,
    with or without `-Base`; None if it is another model."""
    last = PurePath(model_path.removeprefix("builtin:")).name.lower().removesuffix("-base")
    return next((name for name in known if name.lower() == last), None)


def stored_when_drawn(replay: ReplaySection, survivors: float) -> float:
    """Returns the rollouts in a full buffer when a step draws from it, for `survivors` a step."""
    max_age = math.inf if replay.max_age_steps is None else float(replay.max_age_steps)
    if replay.stores_first:
        return max(survivors, min(replay.capacity_rollouts, (max_age + 1) * survivors))
    return min(replay.capacity_rollouts, max_age * survivors)


def drawn_rollouts(
    replay: ReplaySection, generated: float, survivors: float, draws_per_step: int
) -> float:
    """Returns how many rollouts a step draws: at most `replay.max_uses` times its survivors, and
    without replacement, in each draw, at most those stored."""
    drawn = replay.ratio * (generated if replay.stores_first else survivors)
    if replay.max_uses is not None:
        drawn = min(drawn, replay.max_uses * survivors)
    if replay.with_replacement:
        return drawn
    return min(drawn, draws_per_step * stored_when_drawn(replay, survivors))


def expected_rollouts(sampling: SamplingSection, expected: Expected) -> tuple[float, float]:
    """Returns the rollouts generated in a step, and the survivors among them. A refill samples as
    many as were dropped."""
    generated = sum(
        sampling.rollouts_per_step * (1 - expected.survival) ** refill
        for refill in range(sampling.max_refills + 1)
    )
    return generated, generated * expected.survival
