"""The metrics of a training step: one flat mapping of names to numbers (see docs/metrics.md).

Undefined is None, never NaN. Token means are over tokens, not over rollouts.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress
from types import MappingProxyType
from typing import Any

import numpy as np

from grpo_replay.engine import UpdateResult
from grpo_replay.recipe import LossSection, Recipe
from grpo_replay.replay import BufferStats
from grpo_replay.replay.batch import sampler_weights
from grpo_replay.replay.compose import relative_compute
from grpo_replay.storage.atomic import json_values
from grpo_replay.training.rollout_source import STAGES, Metrics, StepRecord
from grpo_replay.training.shadow import shadow_metrics
from grpo_replay.training.weight_sync import LogprobGap
from grpo_replay.types import FAILED, ComposedBatch, Rollout, RolloutOutcome

VERDICTS = ("correct", "incorrect", "unparsable", "scored", *FAILED)


def step_metrics(
    record: StepRecord,
    recipe: Recipe,
    *,
    buffer: BufferStats,
    seconds: Mapping[str, float],
    source_metrics: Mapping[str, Any],
) -> dict[str, Any]:
    """Compute all metrics of a step in metrics.jsonl but those of an evaluation (docs/metrics.md).
    `seconds` are by stage; `source_metrics` come from the source of rollouts."""
    generated, trained = record.generated, record.batch.rollouts * recipe.batch.epochs
    loss = recipe.loss
    machines = recipe.replay.machines if recipe.replay.trains_on_draws else None
    return json_values(
        {
            "step": record.step,
            **generation_metrics(generated, recipe.sampling.group_size),
            **score_metrics(generated, recipe.reward.score_names),
            **update_metrics(record.results, loss.beta),
            **batch_metrics(record.batch, record.outcomes, len(record.fresh), record.probe),
            **_shadow_metrics(record, recipe, seconds),
            **buffer_metrics(buffer, recipe.draws_per_step),
            **gap_metrics(record.gap),
            **source_metrics,
            **sampler_weight_metrics(trained, loss),
            **cost_metrics(seconds, record.taken.generation_seconds, generated, trained),
            **({} if machines is None else {"cost/gamma": machines.gamma}),
        }
    )


GENERATION = (
    *("reward", "reward_std", "reward/missing_fraction", "frac_reward_zero_std"),
    *("groups/all_correct_fraction", "groups/all_wrong_fraction"),
    *("completions/mean_length", "completions/min_length"),
    *("completions/max_length", "completions/clipped_ratio"),
)


def generation_metrics(rollouts: Sequence[Rollout], group_size: int) -> Metrics:
    """Compute the metrics over everything generated in the step, dropped groups included;
    `rollouts` are whole groups in order. Rollouts without a reward have no part in the reward
    metrics but `reward/missing_fraction`. All None if nothing has arrived."""
    if not rollouts:
        return dict.fromkeys(GENERATION)
    rewarded_N = np.array([rollout.reward is not None for rollout in rollouts])
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    without_signal = [rollout.group_reward_std == 0 for rollout in rollouts]
    lengths_N = np.array([len(rollout.completion_token_ids) for rollout in rollouts])
    groups = rollouts[::group_size]
    stds = [group.group_reward_std for group in groups if group.group_reward_std is not None]
    rewarded_per_group = rewarded_N.reshape(-1, group_size).sum(axis=1)
    has_reward = rewarded_per_group > 0
    correct = np.array([group.group_correct for group in groups])[has_reward]
    truncated = np.array([rollout.finish_reason == "length" for rollout in rollouts])
    verdicts = Counter(rollout.verdict for rollout in rollouts)
    return {
        "reward": _mean(rewards),
        "reward_std": _mean(stds),
        "reward/missing_fraction": float(1 - rewarded_N.mean()),
        "frac_reward_zero_std": _mean(list(compress(without_signal, rewarded_N))),
        "groups/all_correct_fraction": _mean(correct == rewarded_per_group[has_reward]),
        "groups/all_wrong_fraction": _mean(correct == 0),
        "completions/mean_length": float(lengths_N.mean()),
        "completions/min_length": int(lengths_N.min()),
        "completions/max_length": int(lengths_N.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        **{f"verdict/{status}": verdicts[status] for status in VERDICTS if verdicts[status]},
    }


def score_metrics(rollouts: Sequence[Rollout], names: Sequence[str]) -> Metrics:
    """Compute mean and population standard deviation of every single score that a reward combines,
    over the rollouts with a reward. Empty without such rollouts, and if the reward is one score."""
    scores = [rollout.reward_scores for rollout in rollouts if rollout.reward is not None]
    if not all(scores) or not scores:
        return {}
    scores_NF = np.array(scores, dtype=np.float64)
    means_F, stds_F = scores_NF.mean(axis=0).tolist(), scores_NF.std(axis=0).tolist()
    return {
        f"rewards/{name}/{quantity}": value
        for name, mean, std in zip(names, means_F, stds_F, strict=True)
        for quantity, value in (("mean", mean), ("std", std))
    }


def update_metrics(results: Sequence[UpdateResult], beta: float) -> Metrics:
    """Compute means over the optimizer updates of the step, and the learning rate; None for a step
    without updates. `kl` is None without a KL term (`beta` 0)."""
    return {
        "updates": len(results),
        "micro_batches": sum(result.micro_batches for result in results),
        "padding_share": _mean([result.padding_share for result in results]),
        "loss": _mean([result.loss for result in results]),
        "grad_norm": _mean([result.grad_norm for result in results]),
        "kl": _mean([result.reference_kl for result in results]) if beta > 0 else None,
        "learning_rate": results[-1].learning_rate if results else None,
    }


def batch_metrics(
    batch: ComposedBatch,
    outcomes: Sequence[RolloutOutcome],
    fresh_rollouts: int,
    probe: Mapping[int, RolloutOutcome] = MappingProxyType({}),
) -> Metrics:
    """Compute statistics of the updates on fresh and on replayed rollouts, and by age. `outcomes`
    belong to the batch's rollouts. With `replay.shadow` the replayed ones are those of the draw,
    which is not trained on: their outcomes come from the `probe`, as far as it measured them."""
    fresh = [int(i) for i in np.flatnonzero(~batch.replayed)]
    return {
        "entropy": _token_mean(outcomes, "entropy"),
        "fresh/rollouts": fresh_rollouts,
        **_side("fresh", [outcomes[i] for i in fresh]),
        **_replay_metrics(batch, outcomes, fresh_rollouts, probe),
    }


def _replay_metrics(
    batch: ComposedBatch,
    outcomes: Sequence[RolloutOutcome],
    fresh_rollouts: int,
    probe: Mapping[int, RolloutOutcome],
) -> Metrics:
    """Computes the metrics `replay/*` of the replayed rollouts: their number, ages, loss statistics
    (also by age), and the effective sample size and entropy of the draw; None without a draw."""
    ages_N, rollouts, replayed_N = batch.ages, batch.rollouts, batch.replayed
    outcomes_N: list[RolloutOutcome | None] = list(outcomes)
    if not batch.trains_on_draw:
        ages_N, rollouts = batch.draw.in_updates(batch.draw.ages), batch.draw.rollouts
        outcomes_N, replayed_N = batch.drawn_outcomes(outcomes, probe), batch.draw.ages > 0
    replayed = [int(i) for i in np.flatnonzero(replayed_N)]
    ages = ages_N[replayed]
    pairs = ((int(ages_N[i]), outcomes_N[i]) for i in replayed)
    measured = [(age, outcome) for age, outcome in pairs if outcome is not None]
    positive = [(rollouts[i].advantage or 0.0) > 0 for i in replayed]
    has_draw = len(batch.draw.entries) > 0
    return {
        "replay/rollouts": len(replayed),
        "replay/ratio": len(replayed) / fresh_rollouts if fresh_rollouts else None,
        **_side("replay", [outcome for _, outcome in measured]),
        "replay/age_mean": float(ages.mean()) if replayed else None,
        "replay/age_max": int(ages.max()) if replayed else None,
        "replay/ess": batch.draw.effective_sample_size if has_draw else None,
        "replay/draw_entropy": batch.draw.entropy if has_draw else None,
        "replay/positive_fraction": float(np.mean(positive)) if replayed else None,
        **_by_age(measured),
    }


def _shadow_metrics(record: StepRecord, recipe: Recipe, seconds: Mapping[str, float]) -> Metrics:
    if not recipe.replay.shadow:
        return {}
    size, draw = recipe.sampling.group_size, record.batch.draw
    return shadow_metrics(draw, record.fresh, size, seconds["shadow"])


def _side(side: str, outcomes: Sequence[RolloutOutcome]) -> Metrics:
    """Computes the loss statistics of one `side` of the batch, "fresh" or "replay"."""
    return {
        f"{side}/clip_fraction": _token_mean(outcomes, "clip_fraction"),
        f"{side}/ratio_mean": _token_mean(outcomes, "ratio_mean"),
        f"{side}/ratio_ess": ratio_ess(outcomes),
        f"{side}/ratio_max": max((outcome.ratio_max for outcome in outcomes), default=None),
        f"{side}/approx_kl": _token_mean(outcomes, "approx_kl"),
    }


def age_bin(age: int) -> str:
    """Name of the bin of an age: 0, 1, 2, 3-4, 5-8, 9-16, …. Old rollouts add few names."""
    if age <= 2:
        return str(age)
    high = 1 << math.ceil(math.log2(age))
    return f"{high // 2 + 1}-{high}"


def _by_age(measured: Sequence[tuple[int, RolloutOutcome]]) -> Metrics:
    """Computes the statistics of every bin of ages; `measured` are pairs of age and outcome."""
    bins: dict[str, list[RolloutOutcome]] = {}
    for age, outcome in sorted(measured, key=lambda pair: pair[0]):
        bins.setdefault(age_bin(age), []).append(outcome)
    metrics = {
        f"replay/age_{name}/{quantity}": _token_mean(members, quantity)
        for name, members in bins.items()
        for quantity in ("clip_fraction", "ratio_mean", "approx_kl")
    }
    return metrics | {f"replay/age_{name}/ratio_ess": ratio_ess(bins[name]) for name in bins}


def ratio_ess(outcomes: Sequence[RolloutOutcome]) -> float | None:
    """Effective sample size per token under the importance weights ρ = π_θ / π_b: (Σρ)² / (N·Σρ²)
    over N tokens (Kish 1965). Ratios of 1 and 3 give 0.8."""
    mean, squared = _token_mean(outcomes, "ratio_mean"), _token_mean(outcomes, "ratio_squared_mean")
    return mean**2 / squared if mean is not None and squared else None


def buffer_metrics(stats: BufferStats, draws_per_step: int = 1) -> Metrics:
    """Compute the metrics of the buffer. Ages are those at the last draw of the step: with several
    draws per step they are in updates, as in `replay.compose`."""
    mean, oldest, last = stats.age_mean, stats.age_max, draws_per_step - 1
    return {
        "buffer/rollouts": stats.rollouts,
        "buffer/age_mean": None if mean is None else draws_per_step * mean + last,
        "buffer/age_max": None if oldest is None else draws_per_step * oldest + last,
        "buffer/evicted": stats.evicted,
        "buffer/priority_mean": stats.priority_mean,
        "buffer/times_used_mean": stats.times_used_mean,
    }


def gap_metrics(gap: LogprobGap | None) -> Metrics:
    return {
        "sampler/logprob_gap_mean": gap.mean if gap else None,
        "sampler/logprob_gap_max": gap.max if gap else None,
    }


def sampler_weight_metrics(trained: Sequence[Rollout], loss: LossSection) -> Metrics:
    """Compute the mean of the importance weights of `loss.sampler_ratio` over the batch's tokens,
    and the fraction at a bound (or masked); empty if the option is off."""
    if loss.sampler_ratio is None:
        return {}
    parts = [rollout.trained_values(sampler_weights(rollout, loss)) for rollout in trained]
    weights_C = np.concatenate([np.zeros(0, np.float32), *parts])
    bounds = loss.sampler_ratio
    limits = [0.0] if bounds.action == "mask" else [bounds.low, bounds.high or math.inf]
    capped_C = np.isin(weights_C, np.array(limits, np.float32))
    return {
        "sampler/weight_mean": float(weights_C.mean(dtype=np.float64)) if len(weights_C) else None,
        "sampler/weight_capped_fraction": float(capped_C.mean()) if len(weights_C) else None,
    }


def cost_metrics(
    seconds: Mapping[str, float],
    generation_seconds: float | None,
    generated: Sequence[Rollout],
    trained: Sequence[Rollout],
    updated_rows: int | None = None,
) -> Metrics:
    """Compute tokens, rollouts and seconds of the step, and two ratios of costs.

    μ is the seconds to generate a rollout over the seconds to train on one of `updated_rows` (all
    `trained`, unless a host in shadow trained on more). γ is paper B's relative compute,
    (1 + μR/B) / (1 + μR/B'): the cost per rollout trained on, relative to training once on each
    survivor (None without survivors). Both are None if `generation_seconds` is.
    """
    mu = gamma = None
    survivors = sum(rollout.kept for rollout in generated)
    rows = len(trained) if updated_rows is None else updated_rows
    if rows and generated and seconds["training"] > 0 and generation_seconds is not None:
        per_generated = generation_seconds / len(generated)
        mu = per_generated / (seconds["training"] / rows)
    if mu is not None and survivors > 0:
        gamma = relative_compute(len(trained) / survivors, mu * len(generated) / survivors)
    return {
        "cost/generated_tokens": sum(len(r.completion_token_ids) for r in generated),
        "cost/generated_rollouts": len(generated),
        "cost/trained_tokens": sum(r.trained_tokens for r in trained),
        "cost/trained_rollouts": len(trained),
        **{f"cost/{name}_seconds": seconds[name] for name in (*STAGES, "other")},
        "cost/generation_seconds": generation_seconds,
        "cost/mu": mu,
        "cost/gamma": gamma,
        "step_time": seconds["step"],
    }


TIME_DEPENDENT = ("step_time", "cost/mu", "cost/gamma")


def depends_on_time(name: str) -> bool:
    """Returns whether a metric differs between two runs that are otherwise the same."""
    return name in TIME_DEPENDENT or name.endswith("_seconds")


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _token_mean(outcomes: Sequence[RolloutOutcome], quantity: str) -> float | None:
    tokens = sum(outcome.tokens for outcome in outcomes)
    if tokens == 0:
        return None
    return sum(getattr(outcome, quantity) * outcome.tokens for outcome in outcomes) / tokens
