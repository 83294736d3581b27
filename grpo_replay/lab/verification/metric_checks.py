"""Checks of metrics.jsonl, recomputed step by step from rollouts/ and draws/, and of the ledger of
an asynchronous run.

Times, metrics computed from times, the log-prob gap and metrics that need the policy (loss,
gradient norm, KL to the reference) are not recomputed.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_replay.lab.verification.rollout_checks import is_too_old
from grpo_replay.lab.verification.run_files import Check, RunFiles
from grpo_replay.storage.starts import Start

_OUTCOMES = ("clip_fraction", "ratio_mean", "approx_kl", "ratio_ess")

Values = dict[str, float | int | None]


def check_metrics(
    check: Check, line: Mapping[str, Any], expected: Values, first_line: Mapping[str, Any]
) -> None:
    """Compare a line with recomputed values. A missing metric is a failure if the first line of the
    run has it. Metrics by verdict or age that are not expected must be 0 or null."""
    verdicts = {name: 0 for name in line if name.startswith("verdict/")}
    ages = {name: None for name in line if name.startswith("replay/age_")}
    for name, value in {**verdicts, **ages, **expected}.items():
        if name in line or name in first_line:
            logged = line.get(name, "missing")
            holds = name in line and _same(logged, value)
            check.expect(holds, f"step {line['step']}: {name} {logged}, recomputed {value}")


def _same(logged: float | None, expected: float | None) -> bool:
    """Returns whether two values agree; float64 sums in another order differ by 1e-13. NaN is
    logged as null, as with a loss of another trainer whose statistics are unknown."""
    is_unknown = expected is None or math.isnan(expected)
    if logged is None or expected is None or is_unknown:
        return logged is None and is_unknown
    return math.isclose(logged, expected, rel_tol=1e-9, abs_tol=1e-9)


def check_rate(check: Check, line: Mapping[str, Any], start: Start | None) -> None:
    """Check the learning rate of a step that made an update against its schedule."""
    logged, step = line.get("learning_rate"), int(line["step"])
    if logged is not None and start is not None:
        expected = start.rate_of(step)
        holds = math.isclose(logged, expected, rel_tol=1e-9)
        check.expect(holds, f"step {step}: learning_rate {logged}, scheduled {expected}")


def generated_metrics(run: RunFiles, step: int) -> Values:
    """Compute the metrics of all rollouts generated in the step, dropped ones included."""
    columns = run.rollouts_of(step)
    if not len(columns["reward"]):
        return {}  # `check_groups` fails
    _, first, group_N = np.unique(columns["group_id"], return_index=True, return_inverse=True)
    has_reward_N = ~np.isnan(columns["reward"])
    rewarded = np.bincount(group_N, weights=has_reward_N)
    correct, std = columns["group_correct"][first][rewarded > 0], columns["group_reward_std"][first]
    lengths = columns["completion_tokens"]
    return {
        "reward": mean_of(columns["reward"][has_reward_N]),
        "reward_std": mean_of(std[~np.isnan(std)]),
        "reward/missing_fraction": mean_of(~has_reward_N),
        "frac_reward_zero_std": mean_of(columns["group_reward_std"][has_reward_N] == 0),
        "groups/all_correct_fraction": mean_of(correct == rewarded[rewarded > 0]),
        "groups/all_wrong_fraction": mean_of(correct == 0),
        "completions/mean_length": mean_of(lengths),
        "completions/min_length": int(lengths.min()),
        "completions/max_length": int(lengths.max()),
        "completions/clipped_ratio": mean_of(columns["truncated"]),
        "cost/generated_tokens": int(lengths.sum()),
        "cost/generated_rollouts": len(lengths),
        **{f"verdict/{name}": n for name, n in Counter(columns["verdict"].tolist()).items()},
    }


def mean_of(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def used_metrics(run: RunFiles, step: int, survivors: int) -> Values:
    """Compute the metrics of the step's updates, for fresh and for replayed rollouts. In a pool,
    draws of fresh rollouts are not replayed. With `replay.shadow` draws were not trained on."""
    recipe, draws, born = run.recipe, run.draws_of(step), run.rollouts_of(step)
    is_replayed = (draws["age_steps"] > 0) | recipe.replay.stores_first
    draws_fresh = len(is_replayed) and not recipe.replay.trains_on_all_fresh(step)
    fresh = born[born["tokens"] >= 0]
    if draws_fresh:
        fresh = draws[~is_replayed]
    replayed = draws[is_replayed]
    measured = draws[is_replayed & (draws["tokens"] >= 0)]
    trained_on = [fresh, replayed] if recipe.replay.trains_on_draws else [fresh]
    both = np.concatenate([rows[["tokens", "entropy"]] for rows in trained_on])
    trained, count = len(both), len(replayed)
    passes = recipe.batch.epochs
    updates = passes * min(recipe.batch.updates_of(trained), trained)
    ages = replayed["age"]
    draws_per_update = recipe.draws_per_step > 1 and count and recipe.replay.trains_on_draws
    advantages = run.rollouts["advantage"][run.rows_of(replayed["rollout_id"])]
    return {
        "updates": len(np.unique(draws["update"])) if draws_per_update else updates,
        "entropy": _token_mean(both, "entropy"),
        "fresh/rollouts": survivors,
        **_outcomes_of("fresh", fresh),
        "replay/rollouts": count,
        "replay/ratio": count / survivors if survivors else None,
        **_outcomes_of("replay", measured),
        "replay/age_mean": mean_of(ages),
        "replay/age_max": int(ages.max()) if count else None,
        "replay/positive_fraction": mean_of(advantages > 0),
        **_by_age(measured, measured["age"]),
        "cost/trained_rollouts": passes * trained,
        "cost/trained_tokens": passes * int(both["tokens"].sum()),
    }


def _by_age(replayed: np.ndarray, ages: np.ndarray) -> Values:
    """Computes the outcomes of replayed rollouts in bins of ages: 1, 2, 3-4, 5-8, 9-16, …"""
    high_N = [1 << max(age - 1, 0).bit_length() for age in ages.tolist()]
    bin_N = np.array(
        [str(age) if age <= 2 else f"{h // 2 + 1}-{h}" for age, h in zip(ages, high_N, strict=True)]
    )
    return {
        f"replay/age_{age_bin}/{name}": _outcome(replayed[bin_N == age_bin], name)
        for age_bin in np.unique(bin_N)
        for name in _OUTCOMES
    }


def _outcomes_of(side: str, columns: np.ndarray) -> Values:
    highest = np.where(columns["tokens"] > 0, columns["ratio_max"], 0.0)
    return {
        **{f"{side}/{name}": _outcome(columns, name) for name in _OUTCOMES},
        f"{side}/ratio_max": float(highest.max()) if len(highest) else None,
    }


def _outcome(columns: np.ndarray, name: str) -> float | None:
    """Returns the mean of an outcome over tokens; `ratio_ess` is (Σρ)² / (N·Σρ²)."""
    if name != "ratio_ess":
        return _token_mean(columns, name)
    mean, squared = _token_mean(columns, "ratio_mean"), _token_mean(columns, "ratio_squared_mean")
    return mean**2 / squared if mean is not None and squared else None


def _token_mean(columns: np.ndarray, name: str) -> float | None:
    tokens = columns["tokens"]
    # A rollout without tokens has no outcome (null).
    values = np.where(tokens > 0, columns[name], 0.0)
    return float((values * tokens).sum() / tokens.sum()) if tokens.sum() else None


_ENDS = ("inserted", "zero_variance", "no_reward", "stale", "cancelled", "lost")


def check_ledger(run: RunFiles) -> Check:
    """Check generated = inserted + zero_variance + no_reward + stale + cancelled + lost + in
    flight, in rollouts and tokens at every step, with the first four recomputed from rollouts/."""
    check = Check("ledger", "balances at every step, and agrees with rollouts/")
    recomputed: Counter[str] = Counter()
    for line in run.metrics:
        step = int(line["step"])
        if step in run.rows_of_step:
            recomputed.update(_ledger_entries(run, step))
        for name in (f"{end}_{unit}" for end in _ENDS[:4] for unit in ("rollouts", "tokens")):
            logged = line.get(f"ledger/{name}")
            check.expect(
                logged == recomputed[name],
                f"step {step}: ledger/{name} {logged}, recomputed {recomputed[name]}",
            )
        for unit in ("rollouts", "tokens"):
            parts = sum(line.get(f"ledger/{name}_{unit}", 0) for name in (*_ENDS, "in_flight"))
            generated = line.get(f"ledger/generated_{unit}")
            check.expect(
                generated == parts,
                f"step {step}: {generated} {unit} generated, {parts} accounted for",
            )
    return check


def _ledger_entries(run: RunFiles, step: int) -> dict[str, int]:
    """Counts rollouts and tokens of a step by the ledger entry that they must end in; what is
    dropped for no other reason is partial, and counts as stale."""
    recipe, columns = run.recipe, run.rollouts_of(step)
    std, tokens = columns["group_reward_std"], columns["completion_tokens"]
    has_no_signal = np.isnan(std) | ((std == 0) & recipe.replay.drop_zero_variance)
    is_stale = is_too_old(recipe.replay, step, columns["birth_step"])
    end_N = np.select(
        [columns["kept"], is_stale, np.isnan(columns["reward"]), has_no_signal],
        ["inserted", "stale", "no_reward", "zero_variance"],
        "stale",
    )
    counts = {f"{end}_rollouts": int((end_N == end).sum()) for end in _ENDS}
    return counts | {f"{end}_tokens": int(tokens[end_N == end].sum()) for end in _ENDS}
