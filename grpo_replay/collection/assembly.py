"""Rollouts from the groups that arrived."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_replay.collection.arrivals import Arrived, Selection
from grpo_replay.collection.ledger import Amount, Ledger
from grpo_replay.collection.messages import LOGPROBS, TOKEN_IDS, Row, unpack
from grpo_replay.recipe import Recipe
from grpo_replay.replay.rollouts import assemble_rollouts
from grpo_replay.types import Completion, Prompt, RequestKey, Rollout, Verdict


@dataclass(frozen=True, slots=True, eq=False)
class TakenRollouts:
    """The rollouts that a step takes. `generated` has all of them, in the order of arrival;
    `fresh` those to train on and store, with the sampler's log-probs as behaviour log-probs.
    `straddlers` counts rollouts sampled by more than one version."""

    generated: tuple[Rollout, ...]
    fresh: tuple[Rollout, ...]
    straddlers: int


def take_rollouts(selection: Selection, recipe: Recipe, ledger: Ledger) -> TakenRollouts:
    """Rollouts of a selection, each settled in the ledger: as stale if its group is too old or it
    straddles an update that the recipe drops it for, as no_reward if its reward did not come, as
    zero_variance if its group has no signal, else as inserted."""
    stale = {each.number for each in selection.stale}
    generated: list[Rollout] = []
    by_arrival = sorted((*selection.taken, *selection.stale), key=lambda each: each.number)
    for arrived in by_arrival:
        for rollout in _rollouts(arrived, recipe):
            category = _category(rollout, arrived.number in stale, recipe)
            ledger.settle(category, Amount(1, len(rollout.completion_token_ids)))
            if category == "inserted":
                rollout = replace(rollout, behavior_logprobs=rollout.sampler_logprobs)
            elif rollout.kept:
                rollout = replace(rollout, kept=False, advantage=None)
            generated.append(rollout)
    fresh = tuple(rollout for rollout in generated if rollout.kept)
    return TakenRollouts(tuple(generated), fresh, sum(map(straddles, generated)))


def rollouts_to_insert(arrived: Arrived, recipe: Recipe) -> int:
    """How many rollouts of a group that is not too old `take_rollouts` settles as inserted."""
    rollouts = _rollouts(arrived, recipe)
    return sum(_category(rollout, stale=False, recipe=recipe) == "inserted" for rollout in rollouts)


def straddles(rollout: Rollout) -> bool:
    """True if more than one policy version sampled the rollout."""
    return rollout.policy_version != rollout.policy_version_end


def _category(rollout: Rollout, stale: bool, recipe: Recipe) -> str:
    if stale:
        return "stale"
    if rollout.reward is None:
        return "no_reward"
    if not rollout.kept:
        return "zero_variance"
    dropped = recipe.sampling.collection.straddlers == "drop" and straddles(rollout)
    return "stale" if dropped else "inserted"


def _rollouts(arrived: Arrived, recipe: Recipe) -> list[Rollout]:
    """The rollouts of one group, with ids from its number. The birth step is that of its oldest
    token; each rollout has its own versions."""
    group, size = arrived.group, recipe.sampling.group_size
    assert len(group.rows) == size, f"group {arrived.number} has {len(group.rows)} rows"
    prompt = Prompt(
        group.prompt_id, "", unpack(group.prompt_token_ids, TOKEN_IDS).astype(np.int32), "", {}
    )
    birth, index = arrived.birth_step, 0
    keys = [RequestKey(birth, index, member) for member in range(size)]
    return assemble_rollouts(
        {index: prompt},
        {key: _completion(key, row) for key, row in zip(keys, group.rows, strict=True)},
        {key: row.text for key, row in zip(keys, group.rows, strict=True)},
        {key: _verdict(row) for key, row in zip(keys, group.rows, strict=True)},
        birth,
        recipe,
        first_rollout_id=arrived.number * size,
        first_group_id=arrived.number,
    )


def _verdict(row: Row) -> Verdict:
    return Verdict(row.reward, row.verdict, row.scores)


def _completion(key: RequestKey, row: Row) -> Completion:
    return Completion(
        key=key,
        token_ids=unpack(row.token_ids, TOKEN_IDS).astype(np.int32),
        sampler_logprobs=unpack(row.logprobs, LOGPROBS).astype(np.float32),
        finish_reason=row.finish_reason,
        policy_version=row.spans[0][0],
        policy_version_end=row.spans[-1][0],
    )


def mean_lengths(rollouts: Sequence[Rollout]) -> tuple[float | None, float | None]:
    """Mean completion length of the rollouts kept, and of those dropped for age or straddling.
    Dropping what is late favours short answers; these two show by how much."""
    kept = [len(r.completion_token_ids) for r in rollouts if r.kept]
    dropped = [
        len(r.completion_token_ids)
        for r in rollouts
        if not r.kept and r.reward is not None and r.group_reward_std
    ]
    return _mean(kept), _mean(dropped)


def _mean(values: Sequence[int]) -> float | None:
    return float(np.mean(values)) if values else None
