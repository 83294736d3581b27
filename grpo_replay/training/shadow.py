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
    """Whether the draw of `step` is probed."""
    return settings.shadow and step % settings.probe_every_steps == 0


def probe_indices(draw: Draw, limit: int) -> list[int]:
    """Indices of at most `limit` drawn rollouts, ascending. Ages take turns: the first rollout of
    each age is chosen, then the second of each, and so on."""
    turns: Counter[int] = Counter()
    ranked = []
    for index, age in enumerate(draw.ages.tolist()):
        ranked.append((turns[age], age, index))
        turns[age] += 1
    return sorted(index for _, _, index in sorted(ranked)[:limit])


def shadow_metrics(
    draw: Draw, fresh: Sequence[Rollout], group_size: int, seconds: float
) -> dict[str, Any]:
    """Metrics of what the draw would add to the fresh survivors of the step, and the `seconds`
    spent on buffer and probe.

    `shadow/rare_success_fraction`: share of the draw that is a rare success (A > 0, at most a
    quarter of the group correct) of a prompt without a success in the fresh batch.
    `shadow/new_prompt_fraction`: share of the prompts of batch and draw that only the draw has.
    Both fractions are None without a draw.
    """
    cost = {"cost/shadow_seconds": seconds}
    if not draw.entries:
        return {"shadow/rare_success_fraction": None, "shadow/new_prompt_fraction": None, **cost}
    solved = {rollout.prompt_id for rollout in fresh if (rollout.advantage or 0.0) > 0}
    present = {rollout.prompt_id for rollout in fresh}
    drawn = {rollout.prompt_id for rollout in draw.rollouts}
    rare = [
        (rollout.advantage or 0.0) > 0
        and rollout.group_correct <= RARE_SUCCESS * group_size
        and rollout.prompt_id not in solved
        for rollout in draw.rollouts
    ]
    return {
        "shadow/rare_success_fraction": float(np.mean(rare)),
        "shadow/new_prompt_fraction": len(drawn - present) / len(drawn | present),
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
    """Advice by the results of docs/results.md at a cost ratio μ; None if μ is unknown."""
    if mu is None:
        return None
    if mu < 1:
        measured = "below 1 no replay has paid in our runs: leave it off (replay.preset=grpo)"
    elif mu < 4:
        measured = "between 1 and 4 our runs leave it open: compare with replay.preset=grpo"
    else:
        measured = (
            "at 4.8 `ours` was +2.3 [+0.6, +3.9] points ahead of GRPO at equal rollouts, on one "
            "tiny model, and not by the clock: try it"
        )
    return (
        f"to generate a rollout cost {mu:.2g} (μ) times what training on one cost; {measured}; "
        "docs/results.md"
    )


def describe_replay(replay: Mapping[str, Any]) -> Iterator[str]:
    """Describe the cost of replay, or in shadow its effect and cost; nothing if μ is unknown."""

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
