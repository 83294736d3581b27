"""Checks of rollouts/: groups, births, policy versions, what was trained on, kept flags,
advantages; and behaviour log-probs against the weights of the checkpoints.

A checkpoint of step v holds the policy that sampled step v + 1. A sample of rows is recomputed by
plain forward passes. The caller gives the policies, so that nothing here loads torch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from grpo_replay.lab.verification.run_files import Check, RunFiles, Tally
from grpo_replay.recipe import AdvantageSection
from grpo_replay.recipe.open_lists import ADVANTAGES
from grpo_replay.storage.rollout_log import read_rollout_table, step_path

ROWS_PER_CHECKPOINT = 32
"""Rows whose log-probs are recomputed for each checkpoint, spread evenly."""

_TOLERANCE = 2e-6  # relative; rounding a number to float32 once gives at most 6e-8
_EXACT_NATS = 1e-3  # fp32 in another order
_SAMPLED = (
    *("rollout_id", "policy_version", "policy_version_end", "kept", "completion_mask"),
    *("prompt_token_ids", "completion_token_ids", "behavior_logprobs"),
)

Row = Mapping[str, Any]


def check_groups(run: RunFiles) -> Check:
    """Each step has `prompts_per_step` groups of G completions born in it, with refills at most so
    many more each time. Ids are unique."""
    tally = Tally("groups", "G completions for each prompt of a step, ids unique")
    ids, counts = np.unique(run.rollouts["rollout_id"], return_counts=True)
    tally.expect_all(counts == 1, lambda i: f"rollout {ids[i]} is in the files {counts[i]} times")
    for step, rows in run.rows_of_step.items():
        groups, settings = run.groups(rows), run.recipe_at(step).sampling
        if run.recipe_at(step).run.is_async:
            _check_late_births(run, step, groups, tally)
        else:
            births, least = run.rollouts["birth_step"][rows], settings.prompts_per_step
            ids = run.rollouts["rollout_id"][rows]
            tally.expect_all(births == step, _naming(step, ids, birth_step=births))
            tally.expect(
                least <= len(groups) <= least * (settings.max_refills + 1),
                f"step {step}: {len(groups)} groups, of {least} prompts",
            )
        size = settings.group_size
        for group_id, members in groups.items():
            indices = sorted(run.rollouts["completion_index"][members].tolist())
            prompts = set(run.rollouts["prompt_id"][members].tolist())
            tally.expect(
                indices == list(range(size)) and len(prompts) == 1,
                f"step {step}, group {group_id}: completion indices {indices} of {len(prompts)} "
                f"prompt(s), expected 0 to {size - 1} of one",
            )
    return tally.result()


def _naming(step: int, ids: np.ndarray, **columns: np.ndarray) -> Callable[[int], str]:
    """Says which rollout of a step is wrong, and what its columns hold."""

    def name(i: int) -> str:
        values = ", ".join(f"{name} {values[i]}" for name, values in columns.items())
        return f"step {step}: rollout {ids[i]} has {values}"

    return name


def _check_late_births(
    run: RunFiles, step: int, groups: dict[int, np.ndarray], tally: Tally
) -> None:
    """An asynchronous group is born in the step after its oldest policy version, at or before the
    step that took it. A step takes `prompts_per_step` groups that are not too old; where it trains
    on draws alone, whatever has arrived."""
    stale = 0
    for group, members in groups.items():
        births = run.rollouts["birth_step"][members]
        expected = int(run.rollouts["policy_version"][members].min()) + 1
        tally.expect(
            bool((births == expected).all()) and expected <= step,
            f"step {step}, group {group}: birth_step {births[0]}, its oldest version was "
            f"{expected - 1}",
        )
        stale += run.is_too_old(step, expected)
    replay, wanted = run.recipe_at(step).replay, run.recipe_at(step).sampling.prompts_per_step
    tally.expect(
        len(groups) - stale == wanted or (replay.replays and replay.stores_first),
        f"step {step}: {len(groups)} groups, {stale} of them stale; expected {wanted} others",
    )


def check_versions(run: RunFiles) -> Check:
    """The policy version that sampled each rollout. In sync mode it is that of the last weight
    push, one every `sync_every_steps` steps. An asynchronous step takes none from weights that did
    not exist."""
    statement = "sampled by the weights of the last push before the step"
    if run.recipe.run.is_async:
        statement = "first ≤ last version < the step that took the rollout"
    tally = Tally("policy versions", statement)
    logged = {int(line["step"]): line.get("sampler/policy_version") for line in run.metrics}
    pushed = _last_pushes(run)
    for step, rows in run.rows_of_step.items():
        ids = run.rollouts["rollout_id"][rows]
        first, last = (run.rollouts[n][rows] for n in ("policy_version", "policy_version_end"))
        if run.recipe_at(step).run.is_async:
            holds = (first >= 0) & (first <= last) & (last < step)
        else:
            holds = (first == pushed[step]) & (last == pushed[step])
            tally.expect(
                logged[step] in (pushed[step], None),
                f"step {step}: sampler/policy_version {logged[step]}, the last push was "
                f"{pushed[step]}",
            )
        tally.expect_all(holds, _naming(step, ids, policy_version=first, policy_version_end=last))
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


def check_trained(run: RunFiles) -> Check:
    """Dropped rollouts were never trained on. All fresh survivors were, in steps that train on all
    of them, and every drawn rollout was, each with all its tokens."""
    tally = Tally(
        "trained", "no dropped rollout; every fresh survivor where all train; every drawn one"
    )
    columns = run.rollouts
    for step, rows in run.rows_of_step.items():
        ids, kept, tokens = (columns[name][rows] for name in ("rollout_id", "kept", "tokens"))
        trained = tokens >= 0
        all_train = run.recipe_at(step).replay.trains_all_fresh(step)
        right = np.where(kept, trained | (not all_train), ~trained)
        right &= ~trained | (tokens == columns["trainable"][rows])
        tally.expect_all(right, _naming(step, ids, kept=kept, trained_tokens=tokens))
    length_of = dict(
        zip(columns["rollout_id"].tolist(), columns["trainable"].tolist(), strict=True)
    )
    for step, draws in run.draws_of_step.items():
        for rollout_id, tokens in zip(draws["rollout_id"], draws["tokens"], strict=True):
            length = length_of.get(int(rollout_id))
            tally.expect(
                tokens == length,
                f"step {step}: drawn rollout {rollout_id} trained {tokens} tokens of {length}",
            )
    return tally.result()


class Policy(Protocol):
    def logprobs(
        self, prompt_token_ids: np.ndarray, completion_token_ids: np.ndarray, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs, entropies) of the completion's tokens, float64 [T]."""
        ...


def check_with_models(run: RunFiles, open_policy: Callable[[int], Policy]) -> Check:
    """The rows of the step after every checkpoint, and of the first. `open_policy(step)` is the
    policy after a step, 0 the one that the run began with."""
    tally = Tally("behaviour log-probs", "recomputed from the weights that sampled")
    for step in (0, *sorted(run.checkpoint_steps())):
        if step + 1 in run.rows_of_step:
            _check_step(run, step + 1, open_policy(step), tally)
    return tally.result()


def _check_step(run: RunFiles, step: int, policy: Policy, tally: Tally) -> None:
    recipe = run.recipe_at(step)
    exact = recipe.model.dtype == "float32" and recipe.loss.behavior_logprobs == "trainer"
    for row in _sampled_by(run, step):
        prompt, completion = (np.array(row[f"{n}_token_ids"]) for n in ("prompt", "completion"))
        logprobs, _ = policy.logprobs(prompt, completion, recipe.sampling.temperature)
        gaps = np.abs(logprobs - row["behavior_logprobs"])
        if row["completion_mask"] is not None:
            gaps = gaps[np.array(row["completion_mask"])]
        gap, limit = (gaps.max(), _EXACT_NATS) if exact else (gaps.mean(), recipe.logprob_gap_limit)
        tally.expect(
            bool(gap <= limit),
            f"step {step}, rollout {row['rollout_id']}: behaviour log-probs are {gap:.3g} nats "
            f"from those of the weights, at most {limit:g} are expected",
        )


def _sampled_by(run: RunFiles, step: int) -> list[Row]:
    """Kept rows of a step that the weights before it sampled alone: at most so many, spread."""
    table = read_rollout_table(step_path(run.folder / "rollouts", step), _SAMPLED)
    rows = [
        row
        for row in table.to_pylist()
        if row["policy_version"] == row["policy_version_end"] == step - 1
        if row["kept"] and row["completion_token_ids"]
    ]
    count = min(len(rows), ROWS_PER_CHECKPOINT)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, count).astype(int)]


def check_advantages(run: RunFiles) -> list[Check]:
    """Group statistics, kept flags and advantages against the rewards, group by group."""
    rule = "where the group has a signal, the reward came and the recipe masks nothing"
    tallies = (
        Tally("kept flags", f"kept exactly {rule}; nulls only elsewhere"),
        Tally("group statistics", "mean, standard deviation, correct count recomputed"),
        Tally("advantages", "(r - mean) / (std + epsilon) recomputed from the rewards"),
    )
    for step, rows in run.rows_of_step.items():
        for members in run.groups(rows).values():
            _check_group(run, step, members, *tallies)
    return [tally.result() for tally in tallies]


def _check_group(
    run: RunFiles, step: int, members: np.ndarray, kept: Tally, statistics: Tally, advantages: Tally
) -> None:
    recipe = run.recipe_at(step)
    found = {name: values[members] for name, values in run.rollouts.items()}
    rewards = found["reward"].astype(np.float64)
    came = ~np.isnan(rewards)
    mean, std = _mean_and_std(rewards[came].tolist(), recipe.advantage.std)
    correct = int((found["first_score"] >= np.float32(recipe.reward.correct)).sum())
    differ = len(np.unique(rewards[came])) > 1
    tokens = found["completion_token_ids"]
    keeps = came & ((found["trainable"] > 0) | (tokens == 0))
    keeps &= differ or (came.sum() > 1 and not recipe.replay.drop_zero_variance)
    keeps &= ~(recipe.reward.mask_truncated & found["truncated"])
    keeps &= [not run.is_dropped(step, row) for row in members]

    def here(i: int) -> str:
        return f"step {step}, group {found['group_id'][i]}, rollout {found['rollout_id'][i]}"

    means, deviations = found["group_reward_mean"], found["group_reward_std"]
    statistics.expect_all(
        _close(means, mean) & _close(deviations, std) & (found["group_correct"] == correct),
        lambda i: (
            f"{here(i)}: mean {means[i]}, std {deviations[i]}, {found['group_correct'][i]} "
            f"correct, recomputed {mean:.7g}, {std:.7g}, {correct}"
        ),
    )
    is_null = found["advantage_is_null"]
    kept.expect_all(
        (found["kept"] == keeps)
        & (found["behavior_logprobs"] == np.where(keeps, tokens, -1))
        & (keeps | is_null),
        lambda i: (
            f"{here(i)}: kept is {found['kept'][i]} with {found['behavior_logprobs'][i]} behaviour "
            f"log-probs (-1: null) for {tokens[i]} tokens, but rewards are {rewards.tolist()}"
        ),
    )
    expected = _advantages(recipe.advantage, rewards.tolist(), mean, std)
    advantages.expect_all(
        _close(found["advantage"], np.array(expected))[keeps],
        lambda i: (
            f"{here(np.flatnonzero(keeps)[i])}: advantage {found['advantage'][keeps][i]}, "
            f"recomputed {np.array(expected)[keeps][i]:.7g}"
        ),
    )


def _advantages(
    settings: AdvantageSection, rewards: list[float], mean: float, std: float
) -> list[float]:
    """The advantage of each member of a group; NaN where a reward did not come. An estimator that
    is not the papers' is the function that the recipe names."""
    came = np.array([reward for reward in rewards if not math.isnan(reward)])
    if len(set(came.tolist())) < 2:
        return [reward * 0.0 for reward in rewards]
    if settings.estimator == "group_relative":
        divisor = std + settings.epsilon if settings.divide_by_std else 1.0
        return [(reward - mean) / divisor for reward in rewards]
    own = iter(ADVANTAGES.load(settings.estimator)(came, settings))
    return [math.nan if math.isnan(reward) else float(next(own)) for reward in rewards]


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


def _close(found: np.ndarray, expected: float | np.ndarray) -> np.ndarray:
    limit = _TOLERANCE * np.maximum(1.0, np.abs(expected))
    return (np.abs(found - expected) <= limit) | (np.isnan(found) & np.isnan(expected))
