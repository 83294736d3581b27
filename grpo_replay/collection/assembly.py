"""Rollouts from the groups that arrived."""

from dataclasses import dataclass, replace

import numpy as np

from grpo_replay.collection.arrivals import Amount, Arrived, Ledger, Selection
from grpo_replay.collection.messages import LOGPROBS, TOKEN_IDS, Row, unpack
from grpo_replay.recipe import Recipe
from grpo_replay.replay.rollouts import assemble_rollouts
from grpo_replay.types import Completion, Prompt, RequestKey, Rollout, Verdict


@dataclass(frozen=True, slots=True, eq=False)
class TakenRollouts:
    """The rollouts that a step takes, in the order of arrival; those to train on and store are
    `kept`. `straddlers` counts rollouts sampled by more than one version."""

    generated: tuple[Rollout, ...]
    straddlers: int


def take_rollouts(selection: Selection, recipe: Recipe, ledger: Ledger) -> TakenRollouts:
    """Rollouts of a selection, each settled in the ledger: as stale if its group is too old or it
    straddles an update that the recipe drops it for, as no_reward if its reward did not come, as
    zero_variance if its group has no signal, else as inserted."""
    stale = {each.number for each in selection.stale}
    generated: list[Rollout] = []
    drops = recipe.sampling.collection.straddlers == "drop"
    by_arrival = sorted((*selection.taken, *selection.stale), key=lambda each: each.number)
    for arrived in by_arrival:
        for rollout in _rollouts(arrived, recipe):
            category = _category(rollout, arrived.number in stale, drops)
            ledger.settle(category, Amount(1, len(rollout.completion_token_ids)))
            if rollout.kept and category != "inserted":
                rollout = replace(rollout, kept=False, advantage=None)
            generated.append(rollout)
    return TakenRollouts(tuple(generated), sum(map(straddles, generated)))


def rollouts_to_insert(arrived: Arrived, recipe: Recipe) -> int:
    """How many rollouts of a group that is not too old `take_rollouts` settles as inserted."""
    drops = recipe.sampling.collection.straddlers == "drop"
    rollouts = _rollouts(arrived, recipe)
    return sum(_category(rollout, False, drops) == "inserted" for rollout in rollouts)


def straddles(rollout: Rollout) -> bool:
    """True if more than one policy version sampled the rollout."""
    return rollout.policy_version != rollout.policy_version_end


def _category(rollout: Rollout, stale: bool, drops_straddlers: bool) -> str:
    if stale:
        return "stale"
    if rollout.reward is None:
        return "no_reward"
    if not rollout.kept:
        return "zero_variance"
    dropped = drops_straddlers and straddles(rollout)
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
