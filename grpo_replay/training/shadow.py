"""Replay in shadow (`replay.shadow`): training is plain GRPO, and a buffer beside it measures what
replay would train on, how off-policy that would be, and what it would cost.

A probe scores drawn rollouts under the policy just before its update. Nothing here draws random
numbers, so a run in shadow equals plain GRPO bit for bit.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from grpo_replay.recipe import ReplaySection
from grpo_replay.storage.rollout_log import mean_over_steps
from grpo_replay.types import Draw, Rollout

RARE_SUCCESS = 0.25
"""Maximum fraction of correct completions in the group of a rare success."""


def probe_is_due(settings: ReplaySection, step: int) -> bool:
    """Returns whether the draw of `step` is probed."""
    return settings.shadow and step % settings.probe_every_steps == 0


def probe_indices(draw: Draw, limit: int) -> list[int]:
    """Choose at most `limit` drawn rollouts to probe, so that all ages are represented: the first
    rollout of every age, then the second of every age, and so on. Returns ascending indices."""
    seen_of_age: Counter[int] = Counter()
    ranked = []
    for index, age in enumerate(draw.ages.tolist()):
        ranked.append((seen_of_age[age], age, index))
        seen_of_age[age] += 1
    return sorted(index for _, _, index in sorted(ranked)[:limit])


def shadow_metrics(
    draw: Draw, fresh: Sequence[Rollout], group_size: int, seconds: float
) -> dict[str, Any]:
    """Compute what the draw would add to the fresh survivors; `seconds` are buffer's and probe's.

    `shadow/rare_success_fraction`: share of the draw that is a rare success (A > 0, at most a
    quarter of the group correct) of a prompt without a success in the fresh batch.
    `shadow/new_prompt_fraction`: share of the prompts of batch and draw that only the draw has.
    Both fractions are None without a draw.
    """
    cost = {"cost/shadow_seconds": seconds}
    if not draw.entries:
        return {"shadow/rare_success_fraction": None, "shadow/new_prompt_fraction": None, **cost}
    solved_prompts = {rollout.prompt_id for rollout in fresh if (rollout.advantage or 0.0) > 0}
    fresh_prompts = {rollout.prompt_id for rollout in fresh}
    drawn_prompts = {rollout.prompt_id for rollout in draw.rollouts}
    rare = [
        (rollout.advantage or 0.0) > 0
        and rollout.group_correct <= RARE_SUCCESS * group_size
        and rollout.prompt_id not in solved_prompts
        for rollout in draw.rollouts
    ]
    return {
        "shadow/rare_success_fraction": float(np.mean(rare)),
        "shadow/new_prompt_fraction": (
            len(drawn_prompts - fresh_prompts) / len(drawn_prompts | fresh_prompts)
        ),
        **cost,
    }


Lines = Sequence[Mapping[str, Any]]
"""Lines of a metrics.jsonl."""

RUN_MEANS = (
    *("replay/rollouts", "replay/clip_fraction", "replay/ratio_ess", "replay/approx_kl"),
    *("shadow/rare_success_fraction", "shadow/new_prompt_fraction"),
)


def summarise_replay(metrics: Lines, settings: ReplaySection) -> dict[str, Any]:
    """Summarise the cost of replay in a run, or what it would have cost in shadow.

    `mu` is the median over steps, None if unknown. `compute_share` is the fraction of the compute
    B + μR that replay takes, in units of training on one rollout. `advice` is a sentence. In shadow
    there are also `means` of metrics, and `shadow_time_share`, the fraction of time that buffer and
    probe took.
    """
    mus = [line["cost/mu"] for line in metrics if line.get("cost/mu") is not None]
    mu = median(mus) if mus else None
    replayed, trained, generated = (
        sum(line.get(name) or 0 for line in metrics)
        for name in ("replay/rollouts", "cost/trained_rollouts", "cost/generated_rollouts")
    )
    compute = trained + (replayed if settings.shadow else 0) + (mu or 0.0) * generated
    summary = {
        "shadow": settings.shadow,
        "mu": mu,
        "compute_share": replayed / compute if mu is not None and compute else None,
        "advice": advice(mu),
    }
    if settings.shadow:
        seconds, all_seconds = (
            sum(line[name] for line in metrics) for name in ("cost/shadow_seconds", "step_time")
        )
        summary["means"] = {name: mean_over_steps(name, metrics) for name in RUN_MEANS}
        summary["shadow_time_share"] = seconds / all_seconds if all_seconds else None
    return summary


def advice(mu: float | None) -> str | None:
    """Returns the advice of docs/results.md at a cost ratio μ; None if μ is unknown."""
    if mu is None:
        return None
    if mu < 1:
        experience = "below 1 no replay has paid in our runs: leave it off (replay.preset=grpo)"
    elif mu < 4:
        experience = "between 1 and 4 our runs leave it open: compare with replay.preset=grpo"
    else:
        experience = (
            "at 4.8 `ours` was +2.3 [+0.6, +3.9] points ahead of GRPO at equal rollouts, on one "
            "tiny model, and not by the clock: try it; where successes were rare, "
            "replay.positive_fraction=1 was +2.3 [+1.3, +3.3] ahead at equal compute, were μ 5"
        )
    return (
        f"to generate a rollout cost {mu:.2g} (μ) times what training on one cost; {experience}; "
        "docs/results.md"
    )


def describe_replay(replay: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences for the end of a run from `summarise_replay`: in shadow what replay would
    have done, then its share of the compute with advice, unless μ is unknown."""

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.3g} %"

    if replay["shadow"]:
        means = {name.partition("/")[2]: value for name, value in replay["means"].items()}
        measured = "no probe fell into a step with a draw (replay.probe_every_steps)"
        if means["approx_kl"] is not None:
            measured = (
                f"{percent(means['clip_fraction'])} of their tokens clipped, effective sample size "
                f"{percent(means['ratio_ess'])}, KL {means['approx_kl']:.2g} nats"
            )
        yield (
            f"in shadow: {means['rollouts'] or 0:.0f} rollouts a step would be replayed; "
            f"{measured}; {percent(means['rare_success_fraction'])} are rare successes that the "
            f"fresh batch lacks, {percent(means['new_prompt_fraction'])} of the prompts would be "
            "theirs alone; buffer and probe took "
            f"{percent(replay['shadow_time_share'])} of the time"
        )
    if replay["advice"] is not None:
        takes, share = "would take" if replay["shadow"] else "took", replay["compute_share"]
        yield f"replay {takes} {percent(share)} of the compute; {replay['advice']}"
