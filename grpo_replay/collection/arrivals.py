"""The queue of groups that have arrived, the selection of each step, and the ledger.

All of it is a function of the journal alone: the same records in the same order give the same ids,
selections and balance, live or replayed.

The ledger accounts for every generated rollout, in rollouts and in tokens:

    generated = inserted + zero_variance + no_reward + stale + cancelled + lost + in flight

The collector counts `generated`; rank 0 counts the right-hand side. Both must agree at every step.
In flight are rollouts that the collector holds and those that have arrived but were not trained on
yet. Tokens are completion tokens of finished completions: those of an aborted request are unknown
to its client and not counted.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from grpo_replay.collection.messages import (
    LOGPROBS,
    TOKEN_IDS,
    Drop,
    Group,
    PromptPosition,
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
    """The account of a run's rollouts so far.

    An arrived rollout is `queued` until it is closed as inserted (stored, or trained on if the run
    stores nothing), zero_variance, no_reward or stale. Cancelled and lost ones never arrive.
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
        """Store the collector's counts."""
        self.generated, self.held = generated, held

    @property
    def delivered(self) -> Amount:
        """The amount that rank 0 has counted: queued or closed."""
        total = self.queued
        for amount in self.closed.values():
            total = total.plus(amount)
        return total

    def check(self, step: int) -> None:
        """Raises LedgerError if the two sides of the balance differ at the end of `step`."""
        accounted = self.delivered.plus(self.held)
        if accounted != self.generated:
            parts = ", ".join(f"{name} {amount}" for name, amount in self.closed.items())
            raise LedgerError(
                f"step {step}: the collector generated {self.generated}, but {accounted} are "
                f"accounted for ({parts}, queued {self.queued}, held {self.held}): rollouts were "
                "lost or counted twice. This is a bug; the last checkpoint is intact"
            )

    def metrics(self) -> dict[str, int]:
        """Returns the metrics `ledger/*`, in rollouts and tokens, cumulative over the run."""
        amounts = {"generated": self.generated, **self.closed, "in_flight": self.in_flight}
        return {
            f"ledger/{name}_{unit}": value
            for name, amount in amounts.items()
            for unit, value in amount._asdict().items()
        }


@dataclass(frozen=True, slots=True)
class Arrived:
    """A group that has arrived, and its number: how many arrived before it in the run."""

    number: int
    group: Group

    @property
    def birth_step(self) -> int:
        """The step of the oldest policy version that sampled a token of the group. Version v is the
        policy after v steps, with which a synchronous run samples step v + 1."""
        return 1 + min(row.spans[0][0] for row in self.group.rows)


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups that a step takes, in the order of arrival, and those too old for it."""

    taken: tuple[Arrived, ...]
    stale: tuple[Arrived, ...]


class Arrivals:
    """The queue on rank 0, and the ledger. `groups_per_step` is None if a step takes all groups
    that have arrived (buffer_only). A group older than `max_age_steps` at its step is stale."""

    def __init__(
        self, groups_per_step: int | None, newest_first: bool, max_age_steps: int | None
    ) -> None:
        """Creates an empty queue and ledger; `Arrivals.of` takes the settings from a recipe."""
        self.groups_per_step = groups_per_step
        self.newest_first = newest_first
        self.max_age_steps = max_age_steps
        self.ledger = Ledger()
        self.arrived_groups = 0
        self.records = 0  # groups and drops so far
        self.stale_groups = 0
        self.dropped_groups = 0  # cancelled or lost
        self._queue: list[Arrived] = []
        self._seen: set[PromptPosition] = set()

    @classmethod
    def of(cls, recipe: Recipe) -> "Arrivals":
        """Creates an empty queue with the settings of the recipe."""
        takes_all = recipe.replay.trains_on_draws and recipe.replay.stores_first
        return cls(
            groups_per_step=None if takes_all else recipe.sampling.prompts_per_step,
            newest_first=recipe.sampling.collection.order == "newest_first",
            max_age_steps=recipe.replay.max_age_steps,
        )

    def __len__(self) -> int:
        return len(self._queue)

    def young(self, step: int) -> list[Arrived]:
        """Returns the queued groups that are not too old for `step`, in the order of arrival."""
        return [arrived for arrived in self._queue if not self._is_stale(arrived, step)]

    def outstanding(self, epoch_length: int) -> tuple[list[PromptPosition], int]:
        """Returns what a new collector must sample: the positions before the last arrived or
        dropped group whose own group is missing, and the cursor (prompts since the start of the
        run) from which it goes on. `epoch_length` is the number of prompts in an epoch.

        The cursor cannot be the first missing prompt: later ones may have arrived already.
        """
        seen = {epoch * epoch_length + index for epoch, index in self._seen}
        cursor = max(seen, default=-1) + 1
        return [divmod(n, epoch_length) for n in range(cursor) if n not in seen], cursor

    def apply_record(self, record: Record) -> None:
        """Apply a record of the journal other than a step: queue a group, or write off the rollouts
        of a drop or a restart. Raises JournalError if its prompt position was seen before."""
        if isinstance(record, Restart):
            self.ledger.write_off("lost", Amount(record.rollouts, record.tokens))
            return
        assert not isinstance(record, Step)
        if record.position in self._seen:
            raise JournalError(
                f"the group of epoch and prompt {record.position} is journalled twice"
            )
        self._seen.add(record.position)
        self.records += 1
        if isinstance(record, Drop):
            self.dropped_groups += 1
            self.ledger.write_off(record.reason, Amount(record.rollouts, record.tokens))
            return
        self._queue.append(Arrived(self.arrived_groups, record))
        self.arrived_groups += 1
        self.ledger.arrive(Amount(len(record.rows), record.tokens))

    def select(self, step: int) -> Selection:
        """Remove the groups of `step` and those too old for it from the queue, and return both.
        Takes all that are young enough if `groups_per_step` is None, else the newest or the oldest
        so many. Raises JournalError if there are too few."""
        stale = [arrived for arrived in self._queue if self._is_stale(arrived, step)]
        young = self.young(step)
        count, newest = self.groups_per_step, self.newest_first
        if count is not None and len(young) < count:
            raise JournalError(f"step {step} takes {count} groups, {len(young)} have arrived")
        taken = young if count is None else young[-count:] if newest else young[:count]
        removed = {arrived.number for arrived in (*taken, *stale)}
        self._queue = [arrived for arrived in self._queue if arrived.number not in removed]
        self.stale_groups += len(stale)
        return Selection(tuple(taken), tuple(stale))

    def _is_stale(self, arrived: Arrived, step: int) -> bool:
        limit = self.max_age_steps
        return limit is not None and step - arrived.birth_step > limit


def take_rollouts(selection: Selection, recipe: Recipe, ledger: Ledger) -> tuple[Rollout, ...]:
    """Returns the rollouts of a selection, in the order of arrival; `kept` are those to train on
    and store. The ledger closes every rollout in its category (`_category`)."""
    stale = {arrived.number for arrived in selection.stale}
    generated: list[Rollout] = []
    drops_partial = recipe.sampling.collection.partial_rollouts == "drop"
    by_arrival = sorted((*selection.taken, *selection.stale), key=lambda arrived: arrived.number)
    for arrived in by_arrival:
        for rollout in _rollouts(arrived, recipe):
            category = _category(rollout, arrived.number in stale, drops_partial)
            ledger.close(category, Amount(1, len(rollout.completion_token_ids)))
            if rollout.kept and category != "inserted":
                rollout = replace(rollout, kept=False, advantage=None)
            generated.append(rollout)
    return tuple(generated)


def rollouts_to_insert(arrived: Arrived, recipe: Recipe) -> int:
    """Number of rollouts that `take_rollouts` will insert from a group that is fresh enough."""
    drops = recipe.sampling.collection.partial_rollouts == "drop"
    rollouts = _rollouts(arrived, recipe)
    return sum(_category(rollout, False, drops) == "inserted" for rollout in rollouts)


def is_partial(rollout: Rollout) -> bool:
    """True if the weights changed while the rollout was sampled: it has several policy versions."""
    return rollout.policy_version != rollout.policy_version_end


def _category(rollout: Rollout, is_stale: bool, drops_partial: bool) -> str:
    """Returns how the ledger closes a rollout: stale if its group is too old, or it is partial
    (sampled across a weight update) and the recipe drops such; no_reward; zero_variance if not kept
    (no signal in its group, or masked); else inserted."""
    if is_stale:
        return "stale"
    if rollout.reward is None:
        return "no_reward"
    if not rollout.kept:
        return "zero_variance"
    return "stale" if drops_partial and is_partial(rollout) else "inserted"


def _rollouts(arrived: Arrived, recipe: Recipe) -> list[Rollout]:
    """Makes the rollouts of one arrived group, with ids from its number. The birth step of all is
    that of the group's oldest token, which is also the step of their request keys; every rollout
    has its own policy versions."""
    group, size = arrived.group, recipe.sampling.group_size
    assert len(group.rows) == size, f"group {arrived.number} has {len(group.rows)} rows"
    prompt = Prompt(
        group.prompt_id, "", unpack(group.prompt_token_ids, TOKEN_IDS).astype(np.int32), "", {}
    )
    birth_step, prompt_index = arrived.birth_step, 0  # a group by itself is assembled as prompt 0
    keys = [RequestKey(birth_step, prompt_index, member) for member in range(size)]
    graded = {
        key: Graded(_completion(key, row), row.text, Verdict(row.reward, row.verdict, row.scores))
        for key, row in zip(keys, group.rows, strict=True)
    }
    return assemble_rollouts(
        {prompt_index: prompt},
        graded,
        recipe,
        step=birth_step,
        first_rollout_id=arrived.number * size,
        first_group_id=arrived.number,
    )


def _completion(key: RequestKey, row: Row) -> Completion:
    """Decodes a journalled row; its policy versions are those of its first and last token."""
    return Completion(
        key=key,
        token_ids=unpack(row.token_ids, TOKEN_IDS).astype(np.int32),
        sampler_logprobs=unpack(row.logprobs, LOGPROBS).astype(np.float32),
        finish_reason=row.finish_reason,
        policy_version=row.spans[0][0],
        policy_version_end=row.spans[-1][0],
    )
