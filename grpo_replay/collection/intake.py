"""The groups of each step on rank 0: first the journal's recorded steps, then the collector's.

A recorded step is repeated with exactly the groups that it had. Afterwards the intake is live:
arriving groups are journalled and queued, and `close_step` ends a step's arrivals. A collector that
dies is replaced; the rollouts that it held are lost, and their groups are sampled again.

Back-pressure is the number of groups that the collector may start (credit). `fresh_anchored` and
the use-once queue train on P prompts a step, so groups far ahead of the trainer would only grow
old. AReaL's rule (arXiv 2505.24298, eq. 3) bounds them:

    accepted + running ≤ (max_ahead_steps + v + 1) · P

with v the steps that the trainer has made. A run of S steps never needs more than S · P groups.
With `buffer_only` (paper B) the servers always have `max_in_flight` requests, and the buffer drops
the oldest rollouts. The collector stops once it has finished the groups of one whole buffer since
rank 0 last polled: more of them would evict each other before they are drawn.
"""

import logging
import threading
from collections.abc import Callable

from grpo_replay.collection.arrivals import (
    Amount,
    Arrivals,
    Selection,
    take_rollouts,
)
from grpo_replay.collection.journal import Journal, JournalRecords
from grpo_replay.collection.link import CollectorGone, Link
from grpo_replay.collection.messages import (
    Cancel,
    CollectorSettings,
    Credit,
    Delivery,
    Drop,
    Group,
    Hello,
    Report,
    Restart,
    Step,
    Version,
)
from grpo_replay.errors import CollectorError, JournalError, SamplerError
from grpo_replay.recipe import Recipe
from grpo_replay.sampling.server.dispatcher import MAX_RETRIES
from grpo_replay.stop import StopToken
from grpo_replay.types import Rollout

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
RESTARTS_WITHOUT_PROGRESS = 3
LOST_IN_A_ROW = 3
"""Number of consecutive lost groups that a run tolerates; at least those of one step."""


def accepted_limit(max_ahead_steps: int, version: int, prompts_per_step: int, steps: int) -> int:
    """Largest number of accepted and running groups after `version` steps of the trainer.

    With 8 prompts a step and max_ahead_steps 1: 16 before the first step, 24 after it; after the
    ninth of ten steps 80.
    """
    return min(max_ahead_steps + version + 1, steps) * prompts_per_step


class Intake:
    """The source of a run's groups on rank 0. `records` is the journal so far; the checkpoint
    contains its first `step` steps."""

    def __init__(
        self, recipe: Recipe, journal: Journal | None, records: JournalRecords, step: int
    ) -> None:
        """Repeats the first `step` recorded steps, which a resumed run has made. `journal` is None
        for a run that only replays. Raises JournalError if the journal is shorter."""
        self.recipe = recipe
        self.arrivals = Arrivals.of(recipe)
        self.newest_report = Report()
        self._journal = journal
        self._pending = iter(records)
        self._recorded_steps = records.steps
        self._link: Link | None = None
        # A second Ctrl-C closes the intake while a thread still waits in it.
        self._using_link = threading.RLock()
        self._settings: CollectorSettings | None = None
        self._epoch_length = 0
        self._base = Amount()  # generated before the present collector
        self._accepted_at_hello = self._discarded_at_hello = 0
        self._delivered_groups = 0  # by the present collector
        self._fruitless_restarts = 0
        self._lost_in_a_row = 0
        if step > self._recorded_steps:
            raise JournalError(
                f"the journal ends at step {self._recorded_steps}, the checkpoint is of step "
                f"{step}: restore the run's journal/ folder from the same copy as the checkpoint"
            )
        for done in range(1, step + 1):
            self.take_recorded(done)

    @property
    def replaying(self) -> bool:
        """True while the journal has further steps."""
        return self._recorded_steps > 0

    def take_recorded(self, step: int) -> tuple[Rollout, ...]:
        """Repeat a step of the journal with exactly the groups that it had, and return its
        rollouts. Raises JournalError if the next recorded step is another one."""
        while not isinstance(record := next(self._pending), Step):
            self.arrivals.apply_record(record)
        if record.step != step or record.arrivals != self.arrivals.records:
            raise JournalError(
                f"the journal goes on with step {record.step} after {record.arrivals} arrivals, "
                f"expected step {step} after {self.arrivals.records}"
            )
        self._recorded_steps -= 1
        return self._settle(self.arrivals.select(step), record)

    def close_step(self, step: int) -> tuple[Rollout, ...]:
        """End a live step's arrivals: journal the end, and return the rollouts of its groups and,
        with `kept` False, of groups too old for it. Both leave the queue. Raises LedgerError if the
        counts are not the collector's."""
        assert self._journal is not None
        report, ledger = self.newest_report, self.arrivals.ledger
        held = Amount(report.held_rollouts, report.held_tokens)
        record = Step(step, self.arrivals.records, *ledger.generated, *held)
        self._journal.append(record)
        return self._settle(self.arrivals.select(step), record)

    def _settle(self, selection: Selection, record: Step) -> tuple[Rollout, ...]:
        """Close a step's rollouts in the ledger, check that it balances with the collector's counts
        in `record`, and return the rollouts."""
        ledger = self.arrivals.ledger
        rollouts = take_rollouts(selection, self.recipe, ledger)
        generated = Amount(record.generated_rollouts, record.generated_tokens)
        ledger.report(generated, Amount(record.held_rollouts, record.held_tokens))
        ledger.check(record.step)
        return rollouts

    def go_live(self, settings: CollectorSettings, epoch_length: int, version: int) -> None:
        """Apply the journal's records after its last step, and start a collector."""
        for record in self._pending:
            self.arrivals.apply_record(record)
        self._settings, self._epoch_length = settings, epoch_length
        self._start_collector(version)

    def _start_collector(self, version: int) -> None:
        """Starts a collector process, the first or a replacement, at policy `version`, with the
        prompts whose groups are missing. Its counts begin at 0, so the present ones are kept."""
        assert self._settings is not None and self._journal is not None
        self._write_off_lost()
        arrivals = self.arrivals
        self._base = arrivals.ledger.generated
        self._accepted_at_hello = arrivals.arrived_groups - arrivals.stale_groups
        self._discarded_at_hello = arrivals.stale_groups + arrivals.dropped_groups
        self._delivered_groups = 0
        self.newest_report = Report()
        outstanding, cursor = arrivals.outstanding(self._epoch_length)
        self._link = Link(self._settings)
        self._link.send(Hello(outstanding, cursor))
        self.cancel_stale(version + 1)
        self.give_credit(version)

    def _write_off_lost(self) -> None:
        """Count as lost, in journal and ledger, the rollouts that an earlier collector had
        generated by its last report and not delivered."""
        ledger = self.arrivals.ledger
        generated, delivered = ledger.generated, ledger.delivered
        lost = Amount(*(max(a - b, 0) for a, b in zip(generated, delivered, strict=True)))
        if lost != Amount():
            record = Restart(*lost)
            assert self._journal is not None
            self._journal.append(record)
            self.arrivals.apply_record(record)
        ledger.report(ledger.delivered, Amount())

    def give_credit(self, version: int) -> None:
        """Tell the collector how many groups it may start in all since its Hello, after `version`
        training steps: with `buffer_only` the groups of one whole buffer ahead of what it has
        delivered, not counting running ones; else `_credit_for_steps`."""
        if self._link is None:
            return
        if self.arrivals.groups_per_step is None:
            capacity, size = self.recipe.replay.capacity_rollouts, self.recipe.sampling.group_size
            buffer_groups = -(-capacity // size)
            self._link.send(Credit(self._delivered_groups + buffer_groups, finished_only=True))
        else:
            self._link.send(Credit(self._credit_for_steps(version)))

    def _credit_for_steps(self, version: int) -> int:
        """Returns how many groups the collector may start: the limit of AReaL's rule, less the
        groups accepted before it began, plus one for every group since then that was stale,
        cancelled or lost and so must be replaced."""
        arrivals, sampling = self.arrivals, self.recipe.sampling
        limit = accepted_limit(
            sampling.collection.max_ahead_steps, version, sampling.prompts_per_step,
            self.recipe.run.steps,
        )  # fmt: skip
        stale_in_queue = len(arrivals) - len(arrivals.young(version + 1))
        discarded = arrivals.stale_groups + stale_in_queue + arrivals.dropped_groups
        discarded -= self._discarded_at_hello
        return limit - self._accepted_at_hello + discarded

    def cancel_stale(self, next_step: int) -> None:
        """Cancel running groups that would be too old for `next_step`."""
        limit = self.arrivals.max_age_steps
        if self._link is not None and limit is not None:
            # Age at the step: next_step - (version + 1).
            self._link.send(Cancel(next_step - 1 - limit))

    def announce(self, url: str, version: int | None) -> None:
        """Tell the collector that a server was updated, or (None) that its update failed."""
        if self._link is not None:
            self._link.send(Version(url, version))

    def poll(self, version: int, timeout_seconds: float = 0.0) -> None:
        """Journal and queue arrived groups, give credit, and replace an ended collector."""
        with self._using_link:
            assert self._link is not None, "the intake is closed"
            try:
                for delivery in self._link.receive(timeout_seconds):
                    self._receive(delivery)
            except CollectorGone as gone:
                self._replace_collector(gone, version)
            self.give_credit(version)

    def _receive(self, delivery: Delivery) -> None:
        """Journals and queues a delivered group or drop, and takes over the collector's report.
        Raises SamplerError after too many consecutive lost groups."""
        assert self._journal is not None
        body, self.newest_report = delivery.body, delivery.report
        if isinstance(body, Group | Drop):
            self._journal.append(body)
            self.arrivals.apply_record(body)
            self._delivered_groups += 1
            self._fruitless_restarts = 0
            self._refuse_endless_loss(body)
        report = self.newest_report
        generated = Amount(report.generated_rollouts, report.generated_tokens)
        held = Amount(report.held_rollouts, report.held_tokens)
        self.arrivals.ledger.report(self._base.plus(generated), held)

    def _refuse_endless_loss(self, body: Group | Drop) -> None:
        """Raises SamplerError after too many consecutive lost groups."""
        is_lost = isinstance(body, Drop) and body.reason == "lost"
        self._lost_in_a_row = self._lost_in_a_row + 1 if is_lost else 0
        if self._lost_in_a_row > max(LOST_IN_A_ROW, self.recipe.sampling.prompts_per_step):
            raise SamplerError(
                f"{self._lost_in_a_row} groups in a row were lost: requests fail on every server "
                f"more than {MAX_RETRIES} times; see the collector's log in log/, and the servers'"
            )

    def _replace_collector(self, gone: CollectorGone, version: int) -> None:
        """Starts a new collector after one that died or hangs. Raises CollectorError if several in
        a row ended without delivering a group."""
        assert self._link is not None
        self._fruitless_restarts += 1
        if self._fruitless_restarts > RESTARTS_WITHOUT_PROGRESS:
            raise CollectorError(
                f"the collector ended {self._fruitless_restarts} times without delivering a group, "
                f"last because {gone}"
            ) from gone
        logger.warning("the collector is replaced: %s", gone)
        self._link.close()
        self._start_collector(version)

    def wait(self, is_ready: Callable[[], bool], stop: StopToken, version: int) -> bool:
        """Poll until `is_ready`; False if a stop was requested first.

        The wait ends: ServersLost is raised if no server is left (one that generates nothing is
        dropped), SamplerError if too many groups are lost in a row, CollectorError if collectors
        keep ending. Verdicts have a time limit of their own."""
        while not is_ready():
            if stop.requested:
                return False
            self.poll(version, POLL_SECONDS)
        return True

    def outstanding_groups(self) -> int:
        """Counts the groups that the collector works on or that are queued."""
        return self.newest_report.started_groups - self._delivered_groups + len(self.arrivals)

    def sync(self) -> None:
        """Flush the journal, before a checkpoint that relies on it."""
        if self._journal is not None:
            self._journal.sync()

    def close(self) -> None:
        """End the collector. May be called twice."""
        with self._using_link:
            if self._link is not None:
                self._link.close()
                self._link = None
