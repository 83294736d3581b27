"""Checks of rollouts/: groups, births, policy versions, kept flags, advantages, what was trained
on; and behaviour log-probs against the weights of the checkpoints.

A checkpoint of step v holds the policy that sampled step v + 1. A sample of rows is recomputed by
plain forward passes. The caller gives the policies, so that nothing here loads torch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from grpo_replay.lab.verification.run_files import Check, Columns, RunFiles, chosen, naming
from grpo_replay.recipe import AdvantageSection, Recipe, ReplaySection
from grpo_replay.recipe.open_lists import ADVANTAGES
from grpo_replay.storage.rollout_log import read_rollout_table, step_path
from grpo_replay.storage.run_directory import is_of_another_trainer

ROWS_PER_CHECKPOINT = 32  # whose log-probs are recomputed, spread evenly
_EXACT_NATS = 1e-3  # fp32 in another order


def groups_of(columns: Columns) -> Iterator[tuple[int, np.ndarray]]:
    """The id and the indices of each group of a step."""
    ids = columns["group_id"]
    return ((int(group), np.flatnonzero(ids == group)) for group in np.unique(ids))


def check_groups(run: RunFiles) -> Check:
    """Each step has whole groups of G completions, sampled by weights that existed. Ids are unique.

    A synchronous step has `prompts_per_step` groups, with refills at most so many more each time,
    born in it and sampled by the weights of the last push. A group of an asynchronous run or of a
    host, which may sample ahead, is born in the step after its oldest policy version."""
    check = Check("groups", "G completions for each prompt of a step, born and sampled before it")
    ids, counts = np.unique(run.rollouts["rollout_id"], return_counts=True)
    check.expect_all(counts == 1, lambda i: f"rollout {ids[i]} is in the files {counts[i]} times")
    pushed = {int(line["step"]): line.get("sampler/policy_version") for line in run.metrics}
    of_host = is_of_another_trainer(run.folder)
    for step in run.rows_of_step:
        recipe, found = run.recipe, run.rollouts_of(step)
        in_step = pushed[step] if recipe.run.sync_every_steps > 1 else step - 1
        groups, size = dict(groups_of(found)), recipe.sampling.group_size
        first, last = found["policy_version"], found["policy_version_end"]
        oldest = first.copy()
        for group, members in groups.items():
            oldest[members] = first[members].min()
            indices = sorted(found["completion_index"][members].tolist())
            prompts = len(set(found["prompt_id"][members].tolist()))
            check.expect(
                indices == list(range(size)) and prompts == 1,
                f"step {step}, group {group}: completion indices {indices} of {prompts} prompt(s), "
                f"expected 0 to {size - 1} of one",
            )
        if recipe.run.is_async or of_host:
            right = (found["birth_step"] == oldest + 1) & (first >= 0) & (first <= last)
            right &= last < step
        else:
            right = (found["birth_step"] == step) & (first == in_step) & (last == in_step)
        if not recipe.run.is_async:
            least = recipe.sampling.prompts_per_step
            check.expect(
                least <= len(groups) <= least * (recipe.sampling.max_refills + 1),
                f"step {step}: {len(groups)} groups, of {least} prompts",
            )
        check.expect_all(
            right,
            naming(f"step {step}", found, "birth_step", "policy_version", "policy_version_end"),
        )
    return check


def check_advantages(run: RunFiles) -> list[Check]:
    """Group statistics, kept flags and advantages against the rewards, group by group."""
    checks = (
        Check("kept flags", "kept where there is a signal, and the recipe masks nothing"),
        Check("group statistics", "mean, standard deviation, correct count recomputed"),
        Check("advantages", "(r - mean) / (std + epsilon) recomputed from the rewards"),
    )
    in_float32 = is_of_another_trainer(run.folder)
    for step in run.rows_of_step:
        found = run.rollouts_of(step)
        for _, members in groups_of(found):
            _check_group(step, run.recipe, chosen(found, members), checks, in_float32)
    return list(checks)


def _check_group(
    step: int,
    recipe: Recipe,
    group: dict[str, np.ndarray],
    checks: tuple[Check, Check, Check],
    in_float32: bool,
) -> None:
    """`in_float32`: the trainer computes mean and deviation so, as TRL's. A rounded mean is off by
    as much as its rewards are large."""
    kept, statistics, advantages = checks
    reward_G = group["reward"]
    came_G = ~np.isnan(reward_G)
    mean, std = _mean_and_std(reward_G[came_G], recipe.advantage.std)
    correct = int((group["first_score"] >= np.float32(recipe.reward.correct)).sum())
    keeps_G = _keeps(step, recipe, group, came_G, std)
    group |= {"recomputed": _advantages(recipe.advantage, reward_G, came_G, mean, std)}
    statistics.expect_all(
        _close(group["group_reward_mean"], mean)
        & _close(group["group_reward_std"], std)
        & (group["group_correct"] == correct),
        naming(
            f"step {step} with mean {mean:.7g}, std {std:.7g} and {correct} correct",
            *(group, "group_reward_mean", "group_reward_std", "group_correct"),
        ),
    )
    lengths_G = np.where(keeps_G, group["completion_token_ids"], -1)
    kept.expect_all(
        (group["kept"] == keeps_G)
        & (group["behavior_logprobs"] == lengths_G)
        & (keeps_G | np.isnan(group["advantage"])),
        naming(
            f"step {step} in a group of rewards {reward_G.tolist()}",
            *(group, "kept", "advantage", "completion_token_ids", "behavior_logprobs"),
        ),
    )
    group = chosen(group, keeps_G)
    size = np.abs(group["reward"]).max(initial=0.0) / std if in_float32 and std > 0 else 0.0
    advantages.expect_all(
        _close(group["advantage"], group["recomputed"], 2e-6 + 3e-7 * size),
        naming(f"step {step}", group, "advantage", "recomputed"),
    )


def _mean_and_std(rewards: np.ndarray, kind: str) -> tuple[float, float]:
    """Mean and standard deviation of a group's rewards; the latter exactly 0 if all are equal. NaN
    for fewer than two: the group has no statistics."""
    if len(rewards) < 2:
        return np.nan, np.nan
    equal = rewards.max() == rewards.min()
    return rewards.mean(), 0.0 if equal else rewards.std(ddof=kind == "sample")


def _keeps(step: int, recipe: Recipe, group: Columns, came_G: np.ndarray, std: float) -> np.ndarray:
    """Which rollouts of a group train. An asynchronous step also drops what is too old, and
    partial rollouts if the recipe drops them."""
    has_signal = std > 0 or (std == 0 and not recipe.replay.drop_zero_variance)
    keeps_G = came_G & has_signal
    keeps_G &= (group["trainable"] > 0) | (group["completion_token_ids"] == 0)
    keeps_G &= ~(recipe.reward.mask_truncated & (group["finish_reason"] == "length"))
    if recipe.run.is_async:
        keeps_G &= ~is_too_old(recipe.replay, step, group["birth_step"])
        if recipe.sampling.collection.partial_rollouts == "drop":
            keeps_G &= group["policy_version"] == group["policy_version_end"]
    return keeps_G


def is_too_old(settings: ReplaySection, step: int, births: np.ndarray) -> np.ndarray:
    limit = settings.max_age_steps
    return np.zeros(len(births), bool) if limit is None else step - births > limit


def _advantages(
    settings: AdvantageSection, reward_G: np.ndarray, came_G: np.ndarray, mean: float, std: float
) -> np.ndarray:
    """The advantage of each member of a group; NaN where a reward did not come. An estimator that
    is not the papers' is the function that the recipe names."""
    if not std > 0:
        return reward_G * 0.0
    if settings.estimator == "group_relative":
        return (reward_G - mean) / (std + settings.epsilon if settings.divide_by_std else 1.0)
    own_G = reward_G.copy()
    own_G[came_G] = ADVANTAGES.load(settings.estimator)(reward_G[came_G], settings)
    return own_G


def _close(found: np.ndarray, expected: float | np.ndarray, tolerance: float = 2e-6) -> np.ndarray:
    """Rounding a number to float32 once gives at most 6e-8."""
    return np.isclose(found, expected, rtol=2e-6, atol=tolerance, equal_nan=True)


def check_trained(run: RunFiles) -> Check:
    """Dropped rollouts were never trained on. All fresh survivors were, in steps that train on all
    of them, and every drawn rollout was, each with all its tokens."""
    check = Check("trained", "no dropped rollout; fresh survivors where all train; every drawn one")
    for step in run.rows_of_step:
        found = run.rollouts_of(step)
        kept, trained = found["kept"], found["tokens"] >= 0
        replay = run.recipe.replay
        right = np.where(kept, trained | (not replay.trains_on_all_fresh(step)), ~trained)
        right &= ~trained | (found["tokens"] == found["trainable"])
        check.expect_all(right, naming(f"step {step}", found, "kept", "tokens"))
    for step, draws in run.draws_of_step.items():
        lengths = run.rollouts["trainable"][run.rows_of(draws["rollout_id"])]
        in_shadow = run.recipe.replay.shadow  # only a probe has outcomes
        right = (draws["tokens"] == lengths) | (in_shadow & (draws["tokens"] < 0))
        check.expect_all(right, naming(f"step {step}", draws, "age_steps", "tokens"))
    return check


def check_with_models(run: RunFiles, open_policy: Callable[[int], Any]) -> Check:
    """The rows of the step after every checkpoint, and of the first. `open_policy(step)` is the
    policy after a step, 0 the one that the run began with: its `logprobs` gives those of a prompt,
    a completion and a temperature, float64 [T], and their entropies. Steps of another `model.dtype`
    than the recipe's are left out."""
    check = Check("behaviour log-probs", "recomputed from the weights that sampled")
    found, forms = run.checkpoints().items(), ("model/config.json", "adapter/adapter_config.json")
    saved = (step for step, path in found if any((path / form).exists() for form in forms))
    for step in (0, *saved):
        start = run.start_of(step + 1)
        is_alike = start is None or start.dtype == run.recipe.model.dtype
        if is_alike and step + 1 in run.rows_of_step:
            _check_logprobs(run, step + 1, open_policy(step), check)
    return check


def _check_logprobs(run: RunFiles, step: int, policy: Any, check: Check) -> None:
    recipe = run.recipe
    exact = recipe.model.dtype == "float32" and recipe.loss.behavior_logprobs == "trainer"
    for row in _sampled_by(run, step):
        prompt, completion = (np.array(row[f"{n}_token_ids"]) for n in ("prompt", "completion"))
        logprobs, _ = policy.logprobs(prompt, completion, recipe.sampling.temperature)
        gaps = np.abs(logprobs - row["behavior_logprobs"])
        if (mask := row.get("completion_mask")) is not None:
            gaps = gaps[np.array(mask)]
        gap, limit = (gaps.max(), _EXACT_NATS) if exact else (gaps.mean(), recipe.logprob_gap_limit)
        check.expect(
            bool(gap <= limit),
            f"step {step}, rollout {row['rollout_id']}: behaviour log-probs are {gap:.3g} nats "
            f"from those of the weights, at most {limit:g} are expected",
        )


def _sampled_by(run: RunFiles, step: int) -> list[dict[str, Any]]:
    """Kept rows of a step that the weights before it sampled alone: at most so many, spread."""
    rows = [
        row
        for row in read_rollout_table(step_path(run.folder / "rollouts", step)).to_pylist()
        if row["policy_version"] == row["policy_version_end"] == step - 1
        if row["kept"] and row["completion_token_ids"]
    ]
    count = min(len(rows), ROWS_PER_CHECKPOINT)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, count).astype(int)]
