"""Checks of metrics.jsonl: what follows from rollouts/ and draws/, recomputed step by step; and
the ledger of an asynchronous run.

Not recomputed: times and what is computed from them, the log-prob gap, and what needs the policy
(loss, gradient norm, KL to the reference).
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_replay.lab.verification.run_files import Check, Columns, RunFiles, Tally

_TOLERANCE = 1e-9  # relative; float64 sums in different orders differ by 1e-13
_OUTCOMES = ("clip_fraction", "ratio_mean", "approx_kl")

Values = dict[str, float | int | None]


EVERY_RUN = (
    *("fresh/rollouts", "replay/rollouts", "replay/ratio", "replay/ess", "replay/age_mean"),
    *("replay/age_max", "reward", "cost/trained_tokens", "buffer/rollouts", "buffer/evicted"),
)
"""Metrics that each line of any run has."""


def check_metrics(
    tally: Tally, step: int, line: Mapping[str, Any], expected: Values, written: set[str]
) -> None:
    """Compare a line with recomputed values. One that is not there is a failure only if an earlier
    line, or any run, has its `family`: runs of an earlier version lack some."""
    written.update(EVERY_RUN, map(family, line))
    for name, value in expected.items():
        if name in line or family(name) in written:
            found = line.get(name, "missing")
            holds = name in line and _same(line[name], value)
            tally.expect(holds, f"step {step}: {name} {found}, recomputed {value}")


def family(name: str) -> str:
    """The name; verdict or replay/age_ for names that a line has only where they count some."""
    return re.sub(r"^(verdict|replay/age_)[\d-]*/.*", r"\1", name)


def _same(found: float | None, expected: float | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return abs(found - expected) <= _TOLERANCE * max(1.0, abs(expected))


def generated_metrics(run: RunFiles, step: int) -> Values:
    """Of everything generated in the step."""
    rows = run.rows_of_step[step]
    if rows.start == rows.stop:
        return {}  # an error of the groups
    column = {name: values[rows] for name, values in run.rollouts.items()}
    _, first, group_N = np.unique(column["group_id"], return_index=True, return_inverse=True)
    came = ~np.isnan(column["reward"])
    rewarded = np.bincount(group_N, weights=came)
    correct, std = column["group_correct"][first][rewarded > 0], column["group_reward_std"][first]
    lengths = column["completion_token_ids"]
    verdicts = Counter(column["verdict"].tolist())
    return {
        "reward": _mean(column["reward"][came]),
        "reward_std": _mean(std[~np.isnan(std)]),
        "reward/missing_fraction": float((~came).mean()),
        "frac_reward_zero_std": _mean(column["group_reward_std"][came] == 0),
        "groups/all_correct_fraction": _mean(correct == rewarded[rewarded > 0]),
        "groups/all_wrong_fraction": _mean(correct == 0),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": int(lengths.min()),
        "completions/max_length": int(lengths.max()),
        "completions/clipped_ratio": float((column["finish_reason"] == "length").mean()),
        "cost/generated_tokens": int(lengths.sum()),
        "cost/generated_rollouts": len(lengths),
        **{f"verdict/{status}": count for status, count in verdicts.items()},
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.astype(np.float64).mean()) if len(values) else None


def trained_metrics(run: RunFiles, step: int, draws: Columns) -> Values:
    """Of the step's update: what was trained on, as fresh and as replayed."""
    rows, replay = run.rows_of_step[step], run.recipe_at(step).replay
    born = {name: run.rollouts[name][rows] for name in (*_OUTCOMES, *_OTHERS)}
    fresh = _chosen(born, born["tokens"] >= 0)
    old = draws["age_steps"] > 0
    if len(old) and replay.pools_fresh:
        fresh = _chosen(draws, ~old)
    if len(old) and replay.stores_first:
        fresh, old = _chosen(draws, np.zeros(len(old), bool)), np.ones(len(old), bool)
    replayed = _chosen(draws, old)
    both = {name: np.concatenate([fresh[name], replayed[name]]) for name in fresh}
    count = len(both["tokens"])
    updates = min(run.recipe_at(step).batch.updates_of(count), count)
    return {
        "updates": len(np.unique(draws["update"])) if "update" in draws else updates,
        "entropy": _token_mean(both, "entropy"),
        **_side("fresh", fresh),
        **_side("replay", replayed),
        "cost/trained_rollouts": count,
        "cost/trained_tokens": int(both["tokens"].sum()),
    }


def replayed_metrics(replayed: Columns, ages: np.ndarray, advantages: np.ndarray) -> Values:
    """Of the draws that count as replayed: the share of correct ones, and outcomes by age."""
    bins_N = np.array([_age_bin(int(age)) for age in ages])
    return {
        "replay/positive_fraction": _mean(advantages > 0),
        **{
            f"replay/age_{each}/{name}": _token_mean(_chosen(replayed, bins_N == each), name)
            for each in np.unique(bins_N)
            for name in _OUTCOMES
        },
    }


def _age_bin(age: int) -> str:
    """1, 2, 3-4, 5-8, 9-16, …"""
    high = 1 << max(age - 1, 0).bit_length()
    return str(age) if age <= 2 else f"{high // 2 + 1}-{high}"


def stored_metrics(births: np.ndarray, uses: np.ndarray, step: int, updates: int) -> Values:
    """Of the buffer after the step: births and uses of what is stored. Ages are at the last of its
    draws, one for each of so many updates."""
    ages = updates * (step - births) + updates - 1
    return {
        "buffer/age_mean": float(ages.mean()) if len(births) else None,
        "buffer/age_max": int(ages.max()) if len(births) else None,
        "buffer/times_used_mean": float(uses.mean()) if len(uses) else None,
    }


_OTHERS = ("tokens", "ratio_max", "entropy")


def _chosen(columns: Columns, chosen_N: np.ndarray) -> Columns:
    return {name: columns[name][chosen_N] for name in (*_OUTCOMES, *_OTHERS)}


def _side(side: str, columns: Columns) -> Values:
    highest = np.where(columns["tokens"] > 0, columns["ratio_max"], 0.0)
    return {
        **{f"{side}/{name}": _token_mean(columns, name) for name in _OUTCOMES},
        f"{side}/ratio_max": _known(highest.max()) if len(highest) else None,
    }


def _token_mean(columns: Columns, name: str) -> float | None:
    tokens = columns["tokens"].astype(np.float64)
    if tokens.sum() == 0:
        return None
    # A rollout without tokens has no outcome (null).
    return _known((np.where(tokens > 0, columns[name], 0.0) * tokens).sum() / tokens.sum())


def _known(value: float) -> float | None:
    """None for NaN: a loss of another trainer may leave its statistics unknown."""
    return None if math.isnan(value) else float(value)


_ENDS = ("inserted", "zero_variance", "no_reward", "stale", "cancelled", "lost")


def check_ledger(run: RunFiles) -> Check:
    """generated = inserted + zero_variance + no_reward + stale + cancelled + lost + in flight, in
    rollouts and tokens at every step; the first four as recomputed from rollouts/."""
    tally = Tally("ledger", "balances at every step, and agrees with rollouts/")
    found = {(name, unit): 0 for name in _ENDS[:4] for unit in ("rollouts", "tokens")}
    for line in run.metrics:
        step = int(line["step"])
        _check_balance(line, step, tally)
        rows = run.rows_of_step.get(step)
        for row in range(rows.start, rows.stop) if rows else ():
            end = _end_of(run, step, row)
            found[end, "rollouts"] += 1
            found[end, "tokens"] += int(run.rollouts["completion_token_ids"][row])
        for (name, unit), expected in found.items():
            logged = line.get(f"ledger/{name}_{unit}")
            tally.expect(
                logged == expected,
                f"step {step}: ledger/{name}_{unit} {logged}, recomputed {expected}",
            )
    return tally.result()


def _end_of(run: RunFiles, step: int, row: int) -> str:
    """The entry of the ledger that a rollout belongs to."""
    columns = run.rollouts
    if columns["kept"][row]:
        return "inserted"
    if run.is_too_old(step, int(columns["birth_step"][row])):
        return "stale"
    if np.isnan(columns["reward"][row]):
        return "no_reward"
    std = columns["group_reward_std"][row]
    drops = run.recipe_at(step).replay.drop_zero_variance
    return "zero_variance" if np.isnan(std) or (std == 0 and drops) else "stale"


def _check_balance(line: Mapping[str, Any], step: int, tally: Tally) -> None:
    for unit in ("rollouts", "tokens"):
        parts = [line.get(f"ledger/{name}_{unit}", 0) for name in (*_ENDS, "in_flight")]
        generated = line.get(f"ledger/generated_{unit}")
        tally.expect(
            generated == sum(parts),
            f"step {step}: {generated} {unit} generated, {sum(parts)} accounted for",
        )
