"""Checks of asynchronous runs: births and versions, what was stale, the ledger."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_replay.lab.verification.run_files import RunFiles
from grpo_replay.lab.verification.verification_report import Check, Tally
from grpo_replay.recipe import Recipe

ENDS = ("inserted", "zero_variance", "no_reward", "stale", "cancelled", "lost")


def check_birth_steps(run: RunFiles, step: int, rows: slice, groups: int, tally: Tally) -> None:
    """A group is born in the step after its oldest policy version, at or before the step that took
    it. Without a gate a step takes any number of groups, else `prompts_per_step` that are not too
    old."""
    columns = run.rollouts
    ids, births = columns["group_id"][rows], columns["birth_step"][rows]
    versions = columns["policy_version"][rows]
    stale = 0
    for group in np.unique(ids).tolist():
        members = ids == group
        expected = int(versions[members].min()) + 1
        tally.expect(
            bool((births[members] == expected).all()) and expected <= step,
            f"step {step}, group {group}: birth_step {births[members][0]}, its oldest version was "
            f"{expected - 1}",
        )
        stale += is_too_old(run.recipe, step, expected)
    if not never_gated(run.recipe):
        wanted = run.recipe.sampling.prompts_per_step
        tally.expect(
            groups - stale == wanted,
            f"step {step}: {groups} groups, {stale} of them stale; expected {wanted} others",
        )


def never_gated(recipe: Recipe) -> bool:
    """True if a step takes whatever has arrived."""
    return recipe.replays and recipe.replay.composition == "buffer_only"


def is_too_old(recipe: Recipe, step: int, birth_step: int) -> bool:
    limit = recipe.replay.max_age_steps
    return limit is not None and step - birth_step > limit


def is_dropped(run: RunFiles, step: int, row: int) -> bool:
    """True if a rollout is not trained on although its group has a signal: too old, or it straddles
    an update and the recipe drops such."""
    columns = run.rollouts
    straddles = columns["policy_version"][row] != columns["policy_version_end"][row]
    drops = run.recipe.sampling.collection.straddlers == "drop" and straddles
    return bool(drops) or is_too_old(run.recipe, step, int(columns["birth_step"][row]))


def check_async_versions(run: RunFiles) -> Check:
    """No rollout is sampled by weights that did not exist, and the versions of one are in order."""
    tally = Tally("policy versions", "first ≤ last version < the step that took the rollout")
    for step, rows in run.rows_of_step.items():
        _check_versions_of_step(run, step, rows, tally)
    return tally.result()


def _check_versions_of_step(run: RunFiles, step: int, rows: slice, tally: Tally) -> None:
    ids = run.rollouts["rollout_id"][rows]
    first, last = (run.rollouts[name][rows] for name in ("policy_version", "policy_version_end"))
    tally.expect_all(
        (first >= 0) & (first <= last) & (last < step),
        lambda i: f"step {step}: rollout {ids[i]} has versions {first[i]} to {last[i]}",
    )


def check_ledger(run: RunFiles) -> Check:
    """generated = inserted + zero_variance + no_reward + stale + cancelled + lost + in flight, in
    rollouts and tokens at every step; the first four as recomputed from rollouts/."""
    tally = Tally("ledger", "balances at every step, and agrees with rollouts/")
    found = {(name, unit): 0 for name in ENDS[:4] for unit in ("rollouts", "tokens")}
    for line in run.metrics:
        step = int(line["step"])
        _check_balance(line, step, tally)
        rows = run.rows_of_step.get(step)
        for row in range(rows.start, rows.stop) if rows else ():
            category = _category(run, step, row)
            found[category, "rollouts"] += 1
            found[category, "tokens"] += int(run.rollouts["completion_token_ids"][row])
        for (name, unit), expected in found.items():
            logged = line.get(f"ledger/{name}_{unit}")
            tally.expect(
                logged == expected,
                f"step {step}: ledger/{name}_{unit} {logged}, recomputed {expected}",
            )
    return tally.result()


def _category(run: RunFiles, step: int, row: int) -> str:
    columns = run.rollouts
    if columns["kept"][row]:
        return "inserted"
    if is_too_old(run.recipe, step, int(columns["birth_step"][row])):
        return "stale"
    if np.isnan(columns["reward"][row]):
        return "no_reward"
    std = columns["group_reward_std"][row]
    without_signal = np.isnan(std) or (std == 0 and run.recipe.replay.drop_zero_variance)
    return "zero_variance" if without_signal else "stale"


def _check_balance(line: Mapping[str, Any], step: int, tally: Tally) -> None:
    for unit in ("rollouts", "tokens"):
        parts = [line.get(f"ledger/{name}_{unit}", 0) for name in (*ENDS, "in_flight")]
        generated = line.get(f"ledger/generated_{unit}")
        tally.expect(
            generated == sum(parts),
            f"step {step}: {generated} {unit} generated, {sum(parts)} accounted for",
        )
