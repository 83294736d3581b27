"""Checks of rollouts/: groups, births, policy versions, kept flags, advantages and trained tokens;
and behaviour log-probs against the weights of the checkpoints.

A checkpoint of step v holds the policy that sampled step v + 1. Plain forward passes recompute a
sample of its rows. The caller opens the policies, so that this module does not import torch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from grpo_replay.lab.verification.run_files import Check, RunFiles, describe_row
from grpo_replay.recipe import AdvantageSection, Recipe, ReplaySection
from grpo_replay.recipe.open_lists import ADVANTAGES
from grpo_replay.storage.rollout_log import read_rollout_table, step_path
from grpo_replay.storage.run_directory import is_of_another_trainer

ROWS_PER_CHECKPOINT = 32  # rows with recomputed log-probs, spread evenly
_EXACT_NATS = 1e-3  # fp32 in another order


def groups_of(columns: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the id and the row indices of each group of a step."""
    ids = columns["group_id"]
    return ((int(group), np.flatnonzero(ids == group)) for group in np.unique(ids))


def check_groups(run: RunFiles) -> Check:
    """Check that rollout ids are unique, and that every step has whole groups of G completions,
    sampled by weights that existed.

    A synchronous step has `prompts_per_step` groups, and at most as many more per refill, born in
    that step and sampled by the weights of the last push. A group of an asynchronous run or of a
    host, which may sample ahead, is born in the step after its oldest policy version."""
    check = Check("groups", "G completions for each prompt of a step, born and sampled before it")
    ids, counts = np.unique(run.rollouts["rollout_id"], return_counts=True)
    check.expect_all(counts == 1, lambda i: f"rollout {ids[i]} is in the files {counts[i]} times")
    pushed = {int(line["step"]): line.get("sampler/policy_version") for line in run.metrics}
    is_of_host = is_of_another_trainer(run.folder)
    for step in run.rows_of_step:
        recipe, columns = run.recipe, run.rollouts_of(step)
        version = pushed[step] if recipe.run.sync_every_steps > 1 else step - 1
        groups, size = dict(groups_of(columns)), recipe.sampling.group_size
        first, last = columns["policy_version"], columns["policy_version_end"]
        oldest = first.copy()
        for group, members in groups.items():
            oldest[members] = first[members].min()
            indices = sorted(columns["completion_index"][members].tolist())
            prompts = len(set(columns["prompt_id"][members].tolist()))
            check.expect(
                indices == list(range(size)) and prompts == 1,
                f"step {step}, group {group}: completion indices {indices} of {prompts} prompt(s), "
                f"expected 0 to {size - 1} of one",
            )
        births = columns["birth_step"]
        if recipe.run.is_async or is_of_host:
            is_right = (births == oldest + 1) & (first >= 0) & (first <= last) & (last < step)
        else:
            is_right = (births == step) & (first == version) & (last == version)
        if not recipe.run.is_async:
            least = recipe.sampling.prompts_per_step
            check.expect(
                least <= len(groups) <= least * (recipe.sampling.max_refills + 1),
                f"step {step}: {len(groups)} groups, of {least} prompts",
            )
        names = ("birth_step", "policy_version", "policy_version_end")
        check.expect_all(is_right, describe_row(f"step {step}", columns, *names))
    return check


def check_advantages(run: RunFiles) -> list[Check]:
    """Check group statistics, kept flags and advantages against the rewards, group by group."""
    checks = (
        Check("kept flags", "kept where there is a signal, and the recipe masks nothing"),
        Check("group statistics", "mean, standard deviation, correct count recomputed"),
        Check("advantages", "(r - mean) / (std + epsilon) recomputed from the rewards"),
    )
    in_float32 = is_of_another_trainer(run.folder)
    for step in run.rows_of_step:
        columns = run.rollouts_of(step)
        for _, members in groups_of(columns):
            _check_group(step, run.recipe, columns[members], checks, in_float32)
    return list(checks)


def _check_group(
    step: int,
    recipe: Recipe,
    group: np.ndarray,
    checks: tuple[Check, Check, Check],
    in_float32: bool,
) -> None:
    """Recompute a group's statistics, kept flags and advantages from its rewards, and record in
    `checks` where the log differs. `in_float32`: the trainer computes mean and deviation in
    float32, as TRL does, with an error that grows with the rewards."""
    kept, statistics, advantages = checks
    reward_G = group["reward"]
    has_reward_G = ~np.isnan(reward_G)
    mean, std = _mean_and_std(reward_G[has_reward_G], recipe.advantage.std)
    correct = int((group["first_score"] >= np.float32(recipe.reward.correct)).sum())
    keeps_G = _keeps(step, recipe, group, has_reward_G, std)
    advantage_G = _recomputed_advantages(recipe.advantage, reward_G, has_reward_G, mean, std)
    statistics.expect_all(
        _close(group["group_reward_mean"], mean)
        & _close(group["group_reward_std"], std)
        & (group["group_correct"] == correct),
        describe_row(
            f"step {step} with mean {mean:.7g}, std {std:.7g} and {correct} correct",
            *(group, "group_reward_mean", "group_reward_std", "group_correct"),
        ),
    )
    # a list column holds lengths, and -1 for null: a dropped rollout has no log-probs
    lengths_G = np.where(keeps_G, group["completion_tokens"], -1)
    kept.expect_all(
        (group["kept"] == keeps_G)
        & (group["behavior_logprobs"] == lengths_G)
        & (keeps_G | np.isnan(group["advantage"])),
        describe_row(
            f"step {step} in a group of rewards {reward_G.tolist()}",
            *(group, "kept", "advantage", "completion_tokens", "behavior_logprobs"),
        ),
    )
    group, advantage_G = group[keeps_G], advantage_G[keeps_G]
    largest = np.abs(group["reward"]).max(initial=0.0) / std if in_float32 and std > 0 else 0.0
    advantages.expect_all(
        _close(group["advantage"], advantage_G, 2e-6 + 3e-7 * largest),
        describe_row(f"step {step}", group, "advantage", recomputed=advantage_G),
    )


def _mean_and_std(rewards: np.ndarray, kind: str) -> tuple[float, float]:
    """Mean and standard deviation of a group's rewards; the latter is exactly 0 if all are equal.
    Both are NaN for fewer than two rewards."""
    if len(rewards) < 2:
        return np.nan, np.nan
    are_equal = rewards.max() == rewards.min()
    return rewards.mean(), 0.0 if are_equal else rewards.std(ddof=kind == "sample")


def _keeps(
    step: int, recipe: Recipe, group: np.ndarray, has_reward_G: np.ndarray, std: float
) -> np.ndarray:
    """Returns which rollouts of a group must be kept, bool [G]: with a reward, in a group with a
    signal, not masked; in an asynchronous step young enough, not partial if those are dropped."""
    has_signal = std > 0 or (std == 0 and not recipe.replay.drop_zero_variance)
    keeps_G = has_reward_G & has_signal
    keeps_G &= (group["trainable"] > 0) | (group["completion_tokens"] == 0)
    keeps_G &= ~(recipe.reward.mask_truncated & group["truncated"])
    if recipe.run.is_async:
        keeps_G &= ~is_too_old(recipe.replay, step, group["birth_step"])
        if recipe.sampling.collection.partial_rollouts == "drop":
            keeps_G &= group["policy_version"] == group["policy_version_end"]
    return keeps_G


def is_too_old(settings: ReplaySection, step: int, births: np.ndarray) -> np.ndarray:
    limit = settings.max_age_steps
    return np.zeros(len(births), bool) if limit is None else step - births > limit


def _recomputed_advantages(
    settings: AdvantageSection,
    reward_G: np.ndarray,
    has_reward_G: np.ndarray,
    mean: float,
    std: float,
) -> np.ndarray:
    """Computes the advantage of each member of a group, NaN where the reward is missing, 0 without
    a signal. An estimator other than the papers' is the function that the recipe names."""
    if not std > 0:
        return reward_G * 0.0
    if settings.estimator == "group_relative":
        return (reward_G - mean) / (std + settings.epsilon if settings.divide_by_std else 1.0)
    estimator, advantage_G = ADVANTAGES.load(settings.estimator), reward_G.copy()
    advantage_G[has_reward_G] = estimator(reward_G[has_reward_G], settings)
    return advantage_G


def _close(logged: np.ndarray, expected: float | np.ndarray, tolerance: float = 2e-6) -> np.ndarray:
    """Equal but for rounding to float32, which has a relative error of at most 6e-8."""
    return np.isclose(logged, expected, rtol=2e-6, atol=tolerance, equal_nan=True)


def check_trained(run: RunFiles) -> Check:
    """Check that no dropped rollout was trained on, that every fresh survivor was in steps that
    train on all of them, and that every drawn rollout was; each with all its tokens."""
    check = Check("trained", "no dropped rollout; fresh survivors where all train; every drawn one")
    for step in run.rows_of_step:
        columns = run.rollouts_of(step)
        kept, trained = columns["kept"], columns["tokens"] >= 0
        trains_all = run.recipe.replay.trains_on_all_fresh(step)
        is_right = np.where(kept, trained | (not trains_all), ~trained)
        is_right &= ~trained | (columns["tokens"] == columns["trainable"])
        check.expect_all(is_right, describe_row(f"step {step}", columns, "kept", "tokens"))
    for step, draws in run.draws_of_step.items():
        lengths = run.rollouts["trainable"][run.rows_of(draws["rollout_id"])]
        in_shadow = run.recipe.replay.shadow  # only a probe has outcomes
        is_right = (draws["tokens"] == lengths) | (in_shadow & (draws["tokens"] < 0))
        check.expect_all(is_right, describe_row(f"step {step}", draws, "age_steps", "tokens"))
    return check


def check_with_models(run: RunFiles, open_policy: Callable[[int], Any]) -> Check:
    """Check behaviour log-probs in the first step and in the step after every checkpoint.

    `open_policy(step)` opens the policy after a step, 0 for the initial one. Its method
    `logprobs(prompt, completion, temperature)` returns log-probs and entropies, float64 [T]. Steps
    with another `model.dtype` than the recipe's are left out."""
    check = Check("behaviour log-probs", "recomputed from the weights that sampled")
    weights = ("model/config.json", "adapter/adapter_config.json")
    saved = (
        step
        for step, path in run.checkpoints().items()
        if any((path / file).exists() for file in weights)
    )
    for step in (0, *saved):
        start = run.start_of(step + 1)
        has_same_dtype = start is None or start.dtype == run.recipe.model.dtype
        if has_same_dtype and step + 1 in run.rows_of_step:
            _check_logprobs(run, step + 1, open_policy(step), check)
    return check


def _check_logprobs(run: RunFiles, step: int, policy: Any, check: Check) -> None:
    """Checks a sample of a step's rows: the largest gap of every row if the trainer computed them
    in fp32, else its mean gap against the limit of sampler and trainer."""
    recipe = run.recipe
    exact = recipe.model.dtype == "float32" and recipe.loss.behavior_logprobs == "trainer"
    for row in _sampled_rows(run, step):
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


def _sampled_rows(run: RunFiles, step: int) -> list[dict[str, Any]]:
    """Reads at most `ROWS_PER_CHECKPOINT` kept rows of a step, spread evenly, of which the weights
    before it sampled every token."""
    rows = [
        row
        for row in read_rollout_table(step_path(run.folder / "rollouts", step)).to_pylist()
        if row["policy_version"] == row["policy_version_end"] == step - 1
        if row["kept"] and row["completion_token_ids"]
    ]
    count = min(len(rows), ROWS_PER_CHECKPOINT)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, count).astype(int)]
