"""Groups that arrived and were not trained on yet, and which of them a step takes; and their
rollouts.

A function of the journal alone: the same records in the same order give the same ids, selections
and balance, live or replayed.

The ledger says what became of every rollout that was generated, in rollouts and in tokens:

    generated = inserted + zero_variance + no_reward + stale + cancelled + lost + in flight

`generated` is counted by the collector, at the source; the other side by rank 0, where each rollout
ends. Both must agree at every step. In flight is what the collector holds and what has arrived but
was not trained on yet. Tokens are completion tokens of finished completions: those of a request
that was cut off are unknown to its client and count nowhere.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from grpo_replay.collection.messages import (
    LOGPROBS,
    TOKEN_IDS,
    Drop,
    Group,
    Place,
    Record,
    Restart,
    Row,
    Step,
    unpack,
)
from grpo_replay.errors import JournalError, LedgerError
from grpo_replay.recipe import Recipe
from grpo_replay.replay.rollouts import assemble_rollouts
from grpo_replay.types import Completion, Graded, Prompt, RequestKey, Rollout, Verdict

CATEGORIES = ("inserted", "zero_variance", "no_reward", "stale", "cancelled", "lost")


class Amount(NamedTuple):
    rollouts: int = 0
    tokens: int = 0

    def plus(self, other: "Amount") -> "Amount":
        return Amount(self.rollouts + other.rollouts, self.tokens + other.tokens)

    def minus(self, other: "Amount") -> "Amount":
        return Amount(self.rollouts - other.rollouts, self.tokens - other.tokens)


class Ledger:
    """The balance of a run so far.

    A rollout that arrives is `queued` until it is closed as inserted (stored, or trained on if the
    run stores nothing), zero_variance, no_reward or stale. Cancelled and lost ones never arrive.
    """

    def __init__(self) -> None:
        self.generated = Amount()
        self.held = Amount()  # by the collector, as of the same report as `generated`
        self.queued = Amount()
        self.closed = dict.fromkeys(CATEGORIES, Amount())

    @property
    def in_flight(self) -> Amount:
        return self.queued.plus(self.held)

    def arrive(self, amount: Amount) -> None:
        self.queued = self.queued.plus(amount)

    def close(self, category: str, amount: Amount) -> None:
        """Close the account of rollouts that had arrived."""
        self.queued = self.queued.minus(amount)
        self.closed[category] = self.closed[category].plus(amount)

    def write_off(self, category: str, amount: Amount) -> None:
        """Close the account of rollouts that will not arrive: cancelled or lost."""
        self.closed[category] = self.closed[category].plus(amount)

    def report(self, generated: Amount, held: Amount) -> None:
        """Take over the collector's count."""
        self.generated, self.held = generated, held

    @property
    def delivered(self) -> Amount:
        """What rank 0 knows of: queued or closed."""
        total = self.queued
        for amount in self.closed.values():
            total = total.plus(amount)
        return total

    def check(self, step: int) -> None:
        """Raises LedgerError if the two sides differ."""
        accounted = self.delivered.plus(self.held)
        if accounted != self.generated:
            parts = ", ".join(f"{name} {amount}" for name, amount in self.closed.items())
            raise LedgerError(
                f"step {step}: the collector generated {self.generated}, but {accounted} are "
                f"accounted for ({parts}, queued {self.queued}, held {self.held}): rollouts were "
                "lost or counted twice. This is a bug; the last checkpoint is intact"
            )

    def metrics(self) -> dict[str, int]:
        """The metrics `ledger/*`, cumulative over the run."""
        amounts = {"generated": self.generated, **self.closed, "in_flight": self.in_flight}
        return {
            f"ledger/{name}_{unit}": value
            for name, amount in amounts.items()
            for unit, value in amount._asdict().items()
        }


@dataclass(frozen=True, slots=True)
class Arrived:
    """A group, and how many groups arrived before it in the run."""

    number: int
    group: Group

    @property
    def birth_step(self) -> int:
        """The step whose policy is the oldest that sampled a token of the group: version v is the
        policy after v steps, with which a synchronous run samples step v + 1."""
        return 1 + min(row.spans[0][0] for row in self.group.rows)


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups that a step takes, in the order of arrival, and those too old for it."""

    taken: tuple[Arrived, ...]
    stale: tuple[Arrived, ...]


class Arrivals:
    """The queue on rank 0, and the ledger. `groups_per_step` is None if a step takes whatever is
    there (buffer_only). A group older than `max_age_steps` at its step is stale."""

    def __init__(
        self, groups_per_step: int | None, newest_first: bool, max_age_steps: int | None
    ) -> None:
        self.groups_per_step = groups_per_step
        self.newest_first = newest_first
        self.max_age_steps = max_age_steps
        self.ledger = Ledger()
        self.arrived_groups = 0
        self.records = 0  # groups and drops so far
        self.stale_groups = 0
        self.dropped_groups = 0  # cancelled or lost
        self._queue: list[Arrived] = []
        self._seen: set[Place] = set()

    @classmethod
    def of(cls, recipe: Recipe) -> "Arrivals":
        """An empty queue, by what the recipe says about arrivals."""
        never_gated = recipe.replay.trains_on_draws and recipe.replay.stores_first
        return cls(
            groups_per_step=None if never_gated else recipe.sampling.prompts_per_step,
            newest_first=recipe.sampling.collection.order == "newest_first",
            max_age_steps=recipe.replay.max_age_steps,
        )

    def __len__(self) -> int:
        return len(self._queue)

    def young(self, step: int) -> list[Arrived]:
        """The groups that wait and are not too old for `step`, in the order of arrival."""
        return [each for each in self._queue if not self._is_stale(each, step)]

    def outstanding(self, epoch_length: int) -> tuple[list[Place], int]:
        """The places before the last one seen that did not arrive, and the position after it.

        A set, not "the smallest place missing": what follows that one may have arrived already.
        """
        seen = {epoch * epoch_length + index for epoch, index in self._seen}
        cursor = max(seen, default=-1) + 1
        return [divmod(p, epoch_length) for p in range(cursor) if p not in seen], cursor

    def take_in(self, record: Record) -> None:
        """Process a record other than a step. Raises JournalError for a place seen before."""
        if isinstance(record, Restart):
            self.ledger.write_off("lost", Amount(record.rollouts, record.tokens))
            return
        assert not isinstance(record, Step)
        if record.place in self._seen:
            raise JournalError(f"the group of epoch and prompt {record.place} is journalled twice")
        self._seen.add(record.place)
        self.records += 1
        if isinstance(record, Drop):
            self.dropped_groups += 1
            self.ledger.write_off(record.reason, Amount(record.rollouts, record.tokens))
            return
        self._queue.append(Arrived(self.arrived_groups, record))
        self.arrived_groups += 1
        self.ledger.arrive(Amount(len(record.rows), record.tokens))

    def select(self, step: int) -> Selection:
        """Take the groups of `step` out of the queue, and those too old for it."""
        stale = [each for each in self._queue if self._is_stale(each, step)]
        young = self.young(step)
        count, newest = self.groups_per_step, self.newest_first
        if count is not None and len(young) < count:
            raise JournalError(f"step {step} takes {count} groups, {len(young)} have arrived")
        taken = young if count is None else young[-count:] if newest else young[:count]
        gone = {each.number for each in (*taken, *stale)}
        self._queue = [each for each in self._queue if each.number not in gone]
        self.stale_groups += len(stale)
        return Selection(tuple(taken), tuple(stale))

    def _is_stale(self, arrived: Arrived, step: int) -> bool:
        limit = self.max_age_steps
        return limit is not None and step - arrived.birth_step > limit


def take_rollouts(selection: Selection, recipe: Recipe, ledger: Ledger) -> tuple[Rollout, ...]:
    """Rollouts of a selection, in the order of arrival; those to train on and store are `kept`.

    The ledger closes each of them: as stale if its group is too old, or it is partial and the
    recipe drops such; as no_reward if it has no reward; as zero_variance if it is not kept (no
    signal in its group, or masked); else as inserted."""
    stale = {each.number for each in selection.stale}
    generated: list[Rollout] = []
    drops = recipe.sampling.collection.partial_rollouts == "drop"
    by_arrival = sorted((*selection.taken, *selection.stale), key=lambda each: each.number)
    for arrived in by_arrival:
        for rollout in _rollouts(arrived, recipe):
            category = _category(rollout, arrived.number in stale, drops)
            ledger.close(category, Amount(1, len(rollout.completion_token_ids)))
            if rollout.kept and category != "inserted":
                rollout = replace(rollout, kept=False, advantage=None)
            generated.append(rollout)
    return tuple(generated)


def rollouts_to_insert(arrived: Arrived, recipe: Recipe) -> int:
    """How many rollouts of a group that is not too old `take_rollouts` closes as inserted."""
    drops = recipe.sampling.collection.partial_rollouts == "drop"
    rollouts = _rollouts(arrived, recipe)
    return sum(_category(rollout, False, drops) == "inserted" for rollout in rollouts)


def is_partial(rollout: Rollout) -> bool:
    """True if the weights changed while the rollout was sampled: it has several policy versions."""
    return rollout.policy_version != rollout.policy_version_end


def _category(rollout: Rollout, stale: bool, drops_partial: bool) -> str:
    if stale:
        return "stale"
    if rollout.reward is None:
        return "no_reward"
    if not rollout.kept:
        return "zero_variance"
    dropped = drops_partial and is_partial(rollout)
    return "stale" if dropped else "inserted"


def _rollouts(arrived: Arrived, recipe: Recipe) -> list[Rollout]:
    """The rollouts of one group, with ids from its number. The birth step is that of its oldest
    token, and travels as the step of the keys; each rollout has its own versions."""
    group, size = arrived.group, recipe.sampling.group_size
    assert len(group.rows) == size, f"group {arrived.number} has {len(group.rows)} rows"
    prompt = Prompt(
        group.prompt_id, "", unpack(group.prompt_token_ids, TOKEN_IDS).astype(np.int32), "", {}
    )
    birth, index = arrived.birth_step, 0
    keys = [RequestKey(birth, index, member) for member in range(size)]
    graded = {
        key: Graded(_completion(key, row), row.text, Verdict(row.reward, row.verdict, row.scores))
        for key, row in zip(keys, group.rows, strict=True)
    }
    return assemble_rollouts(
        {index: prompt},
        graded,
        recipe,
        step=birth,
        first_rollout_id=arrived.number * size,
        first_group_id=arrived.number,
    )


def _completion(key: RequestKey, row: Row) -> Completion:
    return Completion(
        key=key,
        token_ids=unpack(row.token_ids, TOKEN_IDS).astype(np.int32),
        sampler_logprobs=unpack(row.logprobs, LOGPROBS).astype(np.float32),
        finish_reason=row.finish_reason,
        policy_version=row.spans[0][0],
        policy_version_end=row.spans[-1][0],
    )
