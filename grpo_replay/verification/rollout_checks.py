"""Checks of rollouts/ alone: groups, statistics, advantages, the filter, what was trained on."""

import math

import numpy as np

from grpo_replay.verification.report import Check, Tally
from grpo_replay.verification.run_files import RunFiles

_FLOAT32_TOLERANCE = 2e-6  # relative; a stored number is rounded once, 6e-8


def check_files(run: RunFiles) -> Check:
    """metrics.jsonl counts 1, 2, 3, … and every step has its rollouts."""
    tally = Tally("files", "steps without gaps or duplicates, rollouts of each")
    for position, step in enumerate(run.steps, start=1):
        tally.expect(step == position, f"metrics.jsonl line {position} is step {step}")
        tally.expect(step in run.rows_of_step, f"rollouts/step_{step:06d}.parquet is missing")
    return tally.result()


def check_groups(run: RunFiles) -> Check:
    """Every step has its prompts, each with G completions of the same birth and one id each."""
    tally = Tally("groups", "G completions for each prompt of a step, ids unique")
    ids, counts = np.unique(run.rollouts["rollout_id"], return_counts=True)
    tally.expect_all(counts == 1, lambda i: f"rollout {ids[i]} is in the files {counts[i]} times")
    size = run.recipe.sampling.group_size
    for step, rows in run.rows_of_step.items():
        births = run.rollouts["birth_step"][rows]
        tally.expect_all(
            births == step,
            lambda i, step=step, births=births, first=rows.start: (
                f"step {step}: rollout {run.rollouts['rollout_id'][first + i]} has birth_step "
                f"{births[i]}"
            ),
        )
        groups = _groups(run, rows)
        wanted = run.recipe.sampling.prompts_per_step
        tally.expect(len(groups) == wanted, f"step {step}: {len(groups)} groups, expected {wanted}")
        for group_id, members in groups.items():
            indices = sorted(run.rollouts["completion_index"][members].tolist())
            prompts = set(run.rollouts["prompt_id"][members].tolist())
            tally.expect(
                indices == list(range(size)) and len(prompts) == 1,
                f"step {step}, group {group_id}: completion indices {indices} of {len(prompts)} "
                f"prompt(s), expected 0 to {size - 1} of one",
            )
    return tally.result()


def check_versions(run: RunFiles) -> Check:
    """The version of the weights that sampled each rollout, where the recipe decides it: in sync
    mode that of the last push, every k-th step, before the rollout's step."""
    tally = Tally("policy versions", "sampled by the weights of the last push before the step")
    if run.recipe.run.mode != "sync":
        return tally.result()
    every = run.recipe.run.sync_every_steps
    logged = {int(line["step"]): line.get("sampler/policy_version") for line in run.metrics}
    for step, rows in run.rows_of_step.items():
        expected = (step - 1) // every * every
        for name in ("policy_version", "policy_version_end"):
            found = run.rollouts[name][rows]
            tally.expect_all(
                found == expected,
                lambda i, step=step, name=name, found=found, first=rows.start, at=expected: (
                    f"step {step}: rollout {run.rollouts['rollout_id'][first + i]} has {name} "
                    f"{found[i]}, the last push was {at}"
                ),
            )
        tally.expect(
            logged[step] in (expected, None),
            f"step {step}: sampler/policy_version {logged[step]}, the last push was {expected}",
        )
    return tally.result()


def check_advantages(run: RunFiles) -> list[Check]:
    """Group statistics, kept flags and advantages against the rewards, group by group."""
    rule = (
        "where a group's rewards differ" if run.recipe.replay.drop_zero_variance else "everywhere"
    )
    kept = Tally("kept flags", f"kept exactly {rule}; nulls only elsewhere")
    statistics = Tally("group statistics", "mean, standard deviation and correct count recomputed")
    advantages = Tally("advantages", "(r - mean) / (std + epsilon) recomputed from the rewards")
    for step, rows in run.rows_of_step.items():
        for group_id, members in _groups(run, rows).items():
            place = f"step {step}, group {group_id}"
            _check_group(run, place, members, kept, statistics, advantages)
    return [kept.result(), statistics.result(), advantages.result()]


def _check_group(
    run: RunFiles, place: str, members: np.ndarray, kept: Tally, statistics: Tally, adv: Tally
) -> None:
    columns, section = run.rollouts, run.recipe.advantage
    rewards = [float(reward) for reward in columns["reward"][members]]
    differ = max(rewards) != min(rewards)
    keeps = differ or not run.recipe.replay.drop_zero_variance
    mean = math.fsum(rewards) / len(rewards)
    freedom = len(rewards) - (section.std == "sample")
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / max(freedom, 1)) if differ else 0
    correct = sum(reward >= np.float32(run.recipe.reward.correct) for reward in rewards)
    for row, reward in zip(members, rewards, strict=True):
        here = f"{place}, rollout {columns['rollout_id'][row]}"
        found = (columns["group_reward_mean"][row], columns["group_reward_std"][row])
        statistics.expect(
            _close(found[0], mean) and _close(found[1], std),
            f"{here}: mean {found[0]}, std {found[1]}, recomputed {mean:.7g}, {std:.7g}",
        )
        statistics.expect(
            columns["group_correct"][row] == correct,
            f"{here}: group_correct {columns['group_correct'][row]}, recomputed {correct}",
        )
        kept.expect(
            columns["kept"][row] == keeps,
            f"{here}: kept is {columns['kept'][row]}, but rewards are {rewards}",
        )
        logprobs, tokens = columns["behavior_logprobs"][row], columns["completion_token_ids"][row]
        kept.expect(
            logprobs == (tokens if keeps else -1),
            f"{here}: {logprobs} behaviour log-probs (-1: null) for {tokens} tokens",
        )
        if not keeps:
            kept.expect(columns["advantage_is_null"][row], f"{here}: dropped, but has an advantage")
            continue
        expected = (reward - mean) / (std + section.epsilon) if differ else 0.0
        adv.expect(
            _close(columns["advantage"][row], expected),
            f"{here}: advantage {columns['advantage'][row]}, recomputed {expected:.7g}",
        )


def check_trained(run: RunFiles) -> Check:
    """Dropped rollouts were never trained on; fresh ones, wherever all of them train, were."""
    replay = run.recipe.replay
    replays = replay.enabled and replay.ratio > 0
    tally = Tally("trained", "no dropped rollout; every fresh survivor, where all are; all drawn")
    columns = run.rollouts
    length_of = dict(
        zip(columns["rollout_id"].tolist(), columns["completion_token_ids"].tolist(), strict=True)
    )
    for step, rows in run.rows_of_step.items():
        tokens, kept = columns["tokens"][rows], columns["kept"][rows]
        lengths, first = columns["completion_token_ids"][rows], rows.start
        all_train = not replays or step <= replay.warmup_steps
        all_train = all_train or replay.composition == "fresh_anchored"
        trained = tokens >= 0
        right = np.where(kept, trained if all_train else True, ~trained)
        right &= ~trained | (tokens == lengths)
        tally.expect_all(
            right,
            lambda i, step=step, kept=kept, tokens=tokens, first=first: (
                f"step {step}: rollout {columns['rollout_id'][first + i]} has kept {kept[i]} and "
                f"{tokens[i]} trained tokens (-1: not trained)"
            ),
        )
    for step, draws in run.draws_of_step.items():
        for rollout_id, tokens in zip(draws["rollout_id"], draws["tokens"], strict=True):
            length = length_of.get(int(rollout_id))
            tally.expect(
                tokens == length,
                f"step {step}: drawn rollout {rollout_id} trained {tokens} tokens of {length}",
            )
    return tally.result()


def _groups(run: RunFiles, rows: slice) -> dict[int, np.ndarray]:
    ids = run.rollouts["group_id"][rows]
    return {int(i): rows.start + np.flatnonzero(ids == i) for i in np.unique(ids)}


def _close(found: float, expected: float) -> bool:
    return abs(float(found) - expected) <= _FLOAT32_TOLERANCE * max(1.0, abs(expected))
