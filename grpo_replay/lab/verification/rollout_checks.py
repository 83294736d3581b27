"""Checks of rollouts/ alone: groups, statistics, advantages, the zero-variance filter, training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_replay.lab.verification.async_checks import (
    check_async_versions,
    check_birth_steps,
    is_dropped,
)
from grpo_replay.lab.verification.run_files import RunFiles
from grpo_replay.lab.verification.verification_report import Check, Tally
from grpo_replay.recipe import AdvantageSection
from grpo_replay.recipe.open_lists import ADVANTAGES

_FLOAT32_TOLERANCE = 2e-6  # relative; rounding a number to float32 once gives at most 6e-8


@dataclass(frozen=True, slots=True)
class _GroupTallies:
    kept: Tally
    statistics: Tally
    advantages: Tally


def check_files(run: RunFiles) -> Check:
    """metrics.jsonl lists steps 1, 2, 3, … and every step has a rollouts/ file."""
    tally = Tally("files", "steps without gaps or duplicates, each with its rollouts")
    for position, step in enumerate(run.steps, start=1):
        tally.expect(step == position, f"metrics.jsonl line {position} is step {step}")
        tally.expect(step in run.rows_of_step, f"rollouts/step_{step:06d}.parquet is missing")
    return tally.result()


def check_groups(run: RunFiles) -> Check:
    """Each step has `prompts_per_step` groups of G completions born in it, with refills at most so
    many more each time. Ids are unique."""
    tally = Tally("groups", "G completions for each prompt of a step, ids unique")
    ids, counts = np.unique(run.rollouts["rollout_id"], return_counts=True)
    tally.expect_all(counts == 1, lambda i: f"rollout {ids[i]} is in the files {counts[i]} times")
    for step, rows in run.rows_of_step.items():
        _check_groups_of_step(run, step, rows, tally)
    return tally.result()


def _check_groups_of_step(run: RunFiles, step: int, rows: slice, tally: Tally) -> None:
    groups = _groups(run, rows)
    if run.recipe_at(step).run.mode == "async":
        check_birth_steps(run, step, rows, len(groups), tally)
    else:
        _check_births(run, step, rows, len(groups), tally)
    size = run.recipe_at(step).sampling.group_size
    for group_id, members in groups.items():
        indices = sorted(run.rollouts["completion_index"][members].tolist())
        prompts = set(run.rollouts["prompt_id"][members].tolist())
        tally.expect(
            indices == list(range(size)) and len(prompts) == 1,
            f"step {step}, group {group_id}: completion indices {indices} of {len(prompts)} "
            f"prompt(s), expected 0 to {size - 1} of one",
        )


def _check_births(run: RunFiles, step: int, rows: slice, groups: int, tally: Tally) -> None:
    ids, births = run.rollouts["rollout_id"][rows], run.rollouts["birth_step"][rows]
    tally.expect_all(
        births == step, lambda i: f"step {step}: rollout {ids[i]} has birth_step {births[i]}"
    )
    settings = run.recipe_at(step).sampling
    least, most = settings.prompts_per_step, settings.prompts_per_step * (settings.max_refills + 1)
    expected = f"{least}" if least == most else f"{least} to {most}"
    tally.expect(least <= groups <= most, f"step {step}: {groups} groups, expected {expected}")


def check_versions(run: RunFiles) -> Check:
    """The policy version that sampled each rollout. In sync mode it is that of the last weight
    push, one every `sync_every_steps` steps."""
    if run.recipe.run.mode == "async":
        return check_async_versions(run)
    tally = Tally("policy versions", "sampled by the weights of the last push before the step")
    logged = {int(line["step"]): line.get("sampler/policy_version") for line in run.metrics}
    pushed = _last_pushes(run)
    for step, rows in run.rows_of_step.items():
        if run.recipe_at(step).run.mode != "sync":
            continue
        expected = pushed[step]
        for name in ("policy_version", "policy_version_end"):
            _check_versions_of_step(run, step, rows, name, expected, tally)
        tally.expect(
            logged[step] in (expected, None),
            f"step {step}: sampler/policy_version {logged[step]}, the last push was {expected}",
        )
    return tally.result()


def _last_pushes(run: RunFiles) -> dict[int, int]:
    """The version of the last push before each step. A sampler that lags keeps its weights over a
    resume, unless the recipe that resumes does not let it lag."""
    found, held = {}, 0
    for step in range(1, max(run.rows_of_step) + 1):
        every = run.recipe_at(step).run.sync_every_steps
        if every == 1:
            held = step - 1
        found[step] = held
        if step % every == 0:
            held = step
    return found


def _check_versions_of_step(
    run: RunFiles, step: int, rows: slice, name: str, expected: int, tally: Tally
) -> None:
    ids, found = run.rollouts["rollout_id"][rows], run.rollouts[name][rows]
    tally.expect_all(
        found == expected,
        lambda i: (
            f"step {step}: rollout {ids[i]} has {name} {found[i]}, the last push was {expected}"
        ),
    )


def check_advantages(run: RunFiles) -> list[Check]:
    """Group statistics, kept flags and advantages against the rewards, group by group."""
    drops = all(run.recipe_at(step).replay.drop_zero_variance for step in run.rows_of_step)
    rule = "where a group's rewards differ" if drops else "where the recipe says"
    if any(run.recipe_at(step).reward.mask_truncated for step in run.rows_of_step):
        rule += ", and it was not cut off"
    if np.isnan(run.rollouts["reward"]).any():
        rule += ", and its own came"
    tallies = _GroupTallies(
        kept=Tally("kept flags", f"kept exactly {rule}; nulls only elsewhere"),
        statistics=Tally("group statistics", "mean, standard deviation, correct count recomputed"),
        advantages=Tally("advantages", "(r - mean) / (std + epsilon) recomputed from the rewards"),
    )
    for step, rows in run.rows_of_step.items():
        for group_id, members in _groups(run, rows).items():
            place = f"step {step}, group {group_id}"
            _check_group(run, step, place, members, tallies)
    return [tallies.kept.result(), tallies.statistics.result(), tallies.advantages.result()]


def _check_group(
    run: RunFiles, step: int, place: str, members: np.ndarray, tallies: _GroupTallies
) -> None:
    recipe = run.recipe_at(step)
    rewards = [float(reward) for reward in run.rollouts["reward"][members]]
    came = [reward for reward in rewards if not math.isnan(reward)]
    differ = len(set(came)) > 1
    has_signal = differ or (len(came) > 1 and not recipe.replay.drop_zero_variance)
    settings = recipe.advantage
    mean, std = _mean_and_std(came, settings.std)
    first_scores = run.rollouts["first_score"][members]
    correct = int((first_scores >= np.float32(recipe.reward.correct)).sum())
    masks = recipe.reward.mask_truncated
    for row, reward in zip(members, rewards, strict=True):
        here = f"{place}, rollout {run.rollouts['rollout_id'][row]}"
        rollout = {name: column[row] for name, column in run.rollouts.items()}
        dropped = recipe.run.mode == "async" and is_dropped(run, step, row)
        keeps = has_signal and not (masks and rollout["truncated"]) and not dropped
        keeps &= not math.isnan(reward)
        _check_statistics(rollout, here, mean, std, correct, tallies.statistics)
        tallies.kept.expect(
            rollout["kept"] == keeps,
            f"{here}: kept is {rollout['kept']}, but rewards are {rewards}",
        )
        logprobs, tokens = rollout["behavior_logprobs"], rollout["completion_token_ids"]
        tallies.kept.expect(
            logprobs == (tokens if keeps else -1),
            f"{here}: {logprobs} behaviour log-probs (-1: null) for {tokens} tokens",
        )
        if not keeps:
            tallies.kept.expect(
                rollout["advantage_is_null"], f"{here}: dropped, but has an advantage"
            )
            continue
        divisor = std + settings.epsilon if settings.divide_by_std else 1.0
        advantage = (reward - mean) / divisor if differ else 0.0
        if differ and settings.estimator != "group_relative":
            advantage = _own_advantage(settings, rewards, int(np.flatnonzero(members == row)[0]))
        tallies.advantages.expect(
            _close(rollout["advantage"], advantage),
            f"{here}: advantage {rollout['advantage']}, recomputed {advantage:.7g}",
        )


def _own_advantage(settings: AdvantageSection, rewards: list[float], index: int) -> float:
    """What the estimator that the recipe names gives member `index` of a group; NaN rewards did
    not come."""
    came = [reward for reward in rewards if not math.isnan(reward)]
    before = [reward for reward in rewards[:index] if not math.isnan(reward)]
    return float(ADVANTAGES.load(settings.estimator)(np.array(came), settings)[len(before)])


def _mean_and_std(rewards: list[float], kind: str) -> tuple[float, float]:
    """Mean and standard deviation of a group's rewards; the latter exactly 0 if all are equal. NaN
    for fewer than two: the group has no statistics."""
    if len(rewards) < 2:
        return math.nan, math.nan
    mean = math.fsum(rewards) / len(rewards)
    if max(rewards) == min(rewards):
        return mean, 0.0
    divisor = len(rewards) - (kind == "sample")
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / divisor)


def _check_statistics(
    rollout: Mapping[str, Any], here: str, mean: float, std: float, correct: int, tally: Tally
) -> None:
    found = (rollout["group_reward_mean"], rollout["group_reward_std"])
    tally.expect(
        _close(found[0], mean) and _close(found[1], std),
        f"{here}: mean {found[0]}, std {found[1]}, recomputed {mean:.7g}, {std:.7g}",
    )
    tally.expect(
        rollout["group_correct"] == correct,
        f"{here}: group_correct {rollout['group_correct']}, recomputed {correct}",
    )


def check_trained(run: RunFiles) -> Check:
    """Dropped rollouts were never trained on. All fresh survivors were, in steps that train on all
    of them, and every drawn rollout was, each with all its tokens."""
    tally = Tally(
        "trained", "no dropped rollout; every fresh survivor where all train; every drawn one"
    )
    for step, rows in run.rows_of_step.items():
        _check_trained_as_fresh(run, step, rows, tally)
    ids, lengths = run.rollouts["rollout_id"], run.rollouts["completion_token_ids"]
    length_of = dict(zip(ids.tolist(), lengths.tolist(), strict=True))
    for step, draws in run.draws_of_step.items():
        for rollout_id, tokens in zip(draws["rollout_id"], draws["tokens"], strict=True):
            length = length_of.get(int(rollout_id))
            tally.expect(
                tokens == length,
                f"step {step}: drawn rollout {rollout_id} trained {tokens} tokens of {length}",
            )
    return tally.result()


def _check_trained_as_fresh(run: RunFiles, step: int, rows: slice, tally: Tally) -> None:
    replay = run.recipe_at(step).replay
    replays = replay.enabled and replay.ratio > 0
    all_train = not replays or step <= replay.warmup_steps or replay.composition == "fresh_anchored"
    ids, kept = run.rollouts["rollout_id"][rows], run.rollouts["kept"][rows]
    tokens, lengths = run.rollouts["tokens"][rows], run.rollouts["completion_token_ids"][rows]
    trained = tokens >= 0
    right = np.where(kept, trained if all_train else True, ~trained)
    right &= ~trained | (tokens == lengths)
    tally.expect_all(
        right,
        lambda i: (
            f"step {step}: rollout {ids[i]} has kept {kept[i]} and {tokens[i]} trained tokens "
            "(-1: not trained)"
        ),
    )


def _groups(run: RunFiles, rows: slice) -> dict[int, np.ndarray]:
    ids = run.rollouts["group_id"][rows]
    return {int(i): rows.start + np.flatnonzero(ids == i) for i in np.unique(ids)}


def _close(found: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(found)
    return abs(float(found) - expected) <= _FLOAT32_TOLERANCE * max(1.0, abs(expected))
