"""Rank 0's side with a real collector in a thread and fake servers: journal, credit, restarts."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from collected import InstantScorer, NumberedPrompts, group
from fake_server import FakeServer
from threaded_link import ThreadedLink

from grpo_replay.collection import intake as intake_module
from grpo_replay.collection.arrivals import Amount
from grpo_replay.collection.intake import Intake
from grpo_replay.collection.journal import Journal, JournalRecords, read_journal
from grpo_replay.collection.messages import (
    Cancel,
    CollectorSettings,
    Credit,
    Delivery,
    Drop,
    Group,
    Restart,
    Step,
    Version,
)
from grpo_replay.errors import CollectorError, JournalError, LedgerError, SamplerError, ServersLost
from grpo_replay.recipe import Recipe, resolve_recipe
from grpo_replay.stop import StopToken

PER_STEP, STEPS = 2, 4


@pytest.fixture(autouse=True)
def threads(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(intake_module, "Link", ThreadedLink)
    ThreadedLink.made = []
    ThreadedLink.prompts, ThreadedLink.scorer = NumberedPrompts(), InstantScorer
    yield
    for link in ThreadedLink.made:
        link.close()


def recipe(server: FakeServer, **sections) -> Recipe:
    servers = {"urls": [server.url], "request_timeout_seconds": 60.0}
    return resolve_recipe(
        [
            {
                "sampling": {
                    "backend": "vllm_server", "prompts_per_step": PER_STEP, "group_size": 2,
                    "servers": servers, "collection": {"max_ahead_steps": 1},
                },
                "run": {"mode": "async", "steps": STEPS},
                "loss": {"behavior_logprobs": "sampler"},
                "replay": {"warmup_steps": 1},
            },
            sections,
        ]
    )  # fmt: skip


class Run:
    """Steps of a trainer without a policy."""

    def __init__(self, settings: Recipe, folder: Path, done: int = 0) -> None:
        self.journal, records = Journal.open(folder)
        self.intake = Intake(settings, self.journal, records, done)
        self.recipe, self.done = settings, done
        self.taken: dict[int, list[int]] = {}
        self.is_live = False

    def step(self) -> None:
        step, intake = self.done + 1, self.intake
        if intake.replaying:
            taken = intake.take_recorded(step)
        else:
            if not self.is_live:
                self.go_live()
            needed = intake.arrivals.groups_per_step or 1
            ready = lambda: len(intake.arrivals.young(step)) >= needed  # noqa: E731
            assert intake.wait(ready, StopToken(), self.done)
            intake.poll(self.done)
            taken = intake.close_step(step)
        self.taken[step] = [rollout.rollout_id for rollout in taken]
        self.done = step
        intake.give_credit(self.done)

    def go_live(self) -> None:
        urls = self.recipe.sampling.servers.urls
        settings = CollectorSettings(self.recipe, "run", urls, (1,), Path("log"))
        self.intake.go_live(settings, epoch_length=6, version=self.done)
        self.is_live = True

    def close(self) -> None:
        self.intake.close()
        self.journal.close()


def places(folder: Path) -> list[tuple[int, int]]:
    return [record.position for record in read_journal(folder) if isinstance(record, Group)]


def test_every_step_gets_its_groups_and_the_last_none_too_many(server, tmp_path):
    """Nothing waits at the first step or the last, and no group is sampled that none trains on."""
    run = Run(recipe(server), tmp_path)
    for _ in range(STEPS):
        run.step()
    run.intake.close()
    assert ThreadedLink.made[0].closed
    assert run.intake.outstanding_groups() == 0
    assert [len(ids) for ids in run.taken.values()] == [PER_STEP * 2] * STEPS
    assert len(places(tmp_path)) == len(set(places(tmp_path))) == PER_STEP * STEPS
    assert run.intake.arrivals.ledger.metrics()["ledger/inserted_rollouts"] == PER_STEP * STEPS * 2
    run.intake.arrivals.ledger.check(STEPS)
    run.close()


def credits_sent() -> list[int]:
    """To the first collector."""
    return [c.groups for c in ThreadedLink.made[0].commands if isinstance(c, Credit)]


def test_credit_stays_one_step_ahead_of_the_trainer(server, tmp_path):
    run = Run(recipe(server), tmp_path)
    run.step()
    credits = credits_sent()
    assert (credits[0], credits[-1]) == (2 * PER_STEP, 3 * PER_STEP)
    run.close()


BUFFER_ONLY = {"preset": "fifo", "warmup_steps": 0, "capacity_rollouts": 7}


@pytest.mark.parametrize(
    ("sections", "bound", "running"),
    [
        ({}, 2 * PER_STEP, 0),
        ({"replay": {"preset": "grpo"}}, 2 * PER_STEP, 0),
        ({"replay": BUFFER_ONLY}, 4, 3),
    ],
    ids=["fresh_anchored", "use once", "buffer_only"],
)
def test_a_trainer_that_stands_still_gets_no_more_groups_than_it_may_use(
    server, tmp_path, sections, bound, running
):
    """Two steps' groups; with `buffer_only` the four groups of two that fill the buffer, and those
    that run when it is full. The collector goes on when the trainer does."""
    run = Run(recipe(server, sampling={"servers": {"max_in_flight": 3}}, **sections), tmp_path)
    run.go_live()
    collector = ThreadedLink.made[0]._collector

    more = int(running > 0)  # that run do not count

    def started_in_the_end() -> int:
        deadline = time.monotonic() + 60
        while collector._started < credits_sent()[-1] + more and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)  # for those that run, and one too many
        return collector._started

    assert bound + more <= (first := started_in_the_end()) <= bound + running
    run.step()
    last = credits_sent()[-1]
    assert first < last + more <= started_in_the_end() <= last + running
    run.close()


def test_a_group_that_is_lost_or_cancelled_is_replaced_once(server, tmp_path):
    """One was lost before the collector began; it starts with two steps' credit all the same."""
    run = Run(recipe(server), tmp_path)
    run.intake.arrivals.apply_record(Drop(0, 5, "lost", 0, 0))
    run.go_live()
    assert credits_sent() == [2 * PER_STEP]
    run.intake.arrivals.apply_record(Drop(0, 4, "cancelled", 0, 0))
    run.intake.give_credit(0)
    assert credits_sent() == [2 * PER_STEP, 2 * PER_STEP + 1]
    run.close()


def test_groups_that_grow_too_old_in_the_queue_are_replaced_up_to_the_last_step(server, tmp_path):
    """Four steps ahead, but no older than one: most of what is sampled is never trained on."""
    settings = recipe(
        server, run={"steps": 10}, replay={"max_age_steps": 1},
        sampling={"collection": {"max_ahead_steps": 4}},
    )  # fmt: skip
    server.seconds = 0.0
    run = Run(settings, tmp_path)
    for step in range(1, 11):
        run.step()
        while run.intake.arrivals.arrived_groups < credits_sent()[-1]:
            run.intake.poll(step, 0.05)  # the collector samples all that it may
        server.label = f"run/{step}"
        run.intake.announce(server.url, step)
    assert [len(run.taken[step]) >= 2 * PER_STEP for step in run.taken] == [True] * 10
    assert run.intake.arrivals.stale_groups > 0
    run.close()


def test_a_resumed_run_repeats_its_steps_and_then_samples_what_is_outstanding(server, tmp_path):
    first = Run(recipe(server), tmp_path)
    for _ in range(2):
        first.step()
    first.close()  # whatever had not arrived is sampled again
    second = Run(recipe(server), tmp_path, done=1)
    for _ in range(STEPS - 1):
        second.step()
    assert second.taken[2] == first.taken[2]
    assert sorted(places(tmp_path)) == sorted({divmod(p, 6) for p in range(PER_STEP * STEPS)})
    second.intake.arrivals.ledger.check(STEPS)
    second.close()


def test_a_sync_flushes_the_journal_and_a_repetition_has_none(server, tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(Journal, "sync", lambda journal: flushed.append(journal))
    run = Run(recipe(server), tmp_path)
    run.intake.sync()
    assert flushed == [run.journal]
    Intake(recipe(server), None, JournalRecords.of(tmp_path), 0).sync()
    assert len(flushed) == 1
    run.close()


def test_the_journal_alone_repeats_every_selection(server, tmp_path):
    run = Run(recipe(server), tmp_path)
    for _ in range(STEPS):
        run.step()
    run.close()
    again = Intake(recipe(server), None, JournalRecords.of(tmp_path), 0)
    for step in range(1, STEPS + 1):
        taken = again.take_recorded(step)
        assert [rollout.rollout_id for rollout in taken] == run.taken[step]
        assert again.outstanding_groups() == len(again.arrivals)
    assert again.arrivals.ledger.closed == run.intake.arrivals.ledger.closed


def test_a_journal_that_lost_rollouts_ends_its_repetition(server, tmp_path):
    """Its collector generated five rollouts, and four of them arrived."""
    journal, _ = Journal.open(tmp_path)
    for place in range(PER_STEP):
        journal.append(group((0, place)))
    journal.append(Step(1, PER_STEP, 5, 15, 0, 0))
    journal.close()
    again = Intake(recipe(server), None, JournalRecords.of(tmp_path), 0)
    with pytest.raises(LedgerError, match="step 1"):
        again.take_recorded(1)


def test_a_poll_takes_what_is_there_and_does_not_wait(server, tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(ThreadedLink, "receive", lambda _, seconds: waited.append(seconds) or ())
    run = Run(recipe(server), tmp_path)
    run.go_live()
    run.intake.poll(0)
    assert waited == [0.0]
    run.close()


def test_a_checkpoint_that_is_ahead_of_its_journal_is_refused(server, tmp_path):
    run = Run(recipe(server), tmp_path)
    run.step()
    run.close()
    with pytest.raises(JournalError, match=r"ends at step 1, the checkpoint is of step 2"):
        Run(recipe(server), tmp_path, done=2)


def test_a_dead_collector_is_replaced_and_no_prompt_is_sampled_twice(server, tmp_path):
    server.seconds = 0.1
    run = Run(recipe(server), tmp_path)
    run.step()
    ThreadedLink.made[0].die()
    run.intake.poll(run.done)
    for _ in range(STEPS - 1):
        run.step()
    assert len(ThreadedLink.made) == 2
    assert ThreadedLink.made[0].closed, "it may be stuck, and not dead"
    assert len(places(tmp_path)) == len(set(places(tmp_path))) == PER_STEP * STEPS
    ledger = run.intake.arrivals.ledger
    ledger.check(STEPS)
    lost = [record for record in read_journal(tmp_path) if isinstance(record, Restart)]
    assert ledger.closed["lost"].rollouts == sum(record.rollouts for record in lost)
    run.close()


def test_a_collector_that_lost_its_last_server_ends_the_run_with_that_error(server, tmp_path):
    server.seconds, server.generates = 600.0, False
    servers = {"urls": [server.url], "request_timeout_seconds": 1.0}
    run = Run(recipe(server, sampling={"servers": servers}), tmp_path)
    with pytest.raises(ServersLost, match=r"generated no token for 1 s"):
        run.step()
    run.close()


def test_a_new_collector_knows_which_weights_are_too_old(server, tmp_path):
    run = Run(recipe(server, replay={"max_age_steps": 3}), tmp_path)
    run.step()
    ThreadedLink.made[0].die()
    run.step()
    run.close()
    first, second = (link.commands for link in ThreadedLink.made)
    assert Cancel(0 - 3) in first[:3]
    assert Cancel(1 - 3) in second[:3]  # of step 2, which comes after version 1


def test_the_collector_hears_which_weights_a_server_has(server, tmp_path):
    run = Run(recipe(server), tmp_path)
    run.step()
    run.intake.announce(server.url, 1)
    run.intake.announce(server.url, None)
    run.close()
    told = [each for each in ThreadedLink.made[0].commands if isinstance(each, Version)]
    assert told == [Version(server.url, 1), Version(server.url, None)]


@pytest.mark.parametrize("lived", [True, False])
def test_a_collector_that_keeps_dying_ends_the_run(server, tmp_path, monkeypatch, lived):
    run = Run(recipe(server), tmp_path)
    if lived:
        run.step()
    real = ThreadedLink.__init__

    def stillborn(self, settings):
        real(self, settings)
        self.die()

    monkeypatch.setattr(ThreadedLink, "__init__", stillborn)
    if lived:
        ThreadedLink.made[0].die()
    server.seconds = 5.0
    with pytest.raises(CollectorError, match="ended 4 times without delivering a group"):
        for _ in range(STEPS):
            run.step()
    assert len(ThreadedLink.made) == 4
    run.close()


def test_groups_lost_one_after_the_other_end_the_run(server, tmp_path):
    run = Run(recipe(server), tmp_path)
    run.go_live()
    reasons = ["lost", "lost", "lost", "cancelled", "lost", "lost", "lost", "lost"]
    deliveries = [
        Delivery(Drop(9, group, reason, 0, 0), run.intake.newest_report)
        for group, reason in enumerate(reasons)
    ]
    for delivery in deliveries[:-1]:
        run.intake._receive(delivery)
    with pytest.raises(SamplerError, match="4 groups in a row were lost"):
        run.intake._receive(deliveries[-1])
    run.close()


def test_a_stop_request_ends_the_wait(server, tmp_path):
    server.seconds = 30.0
    run = Run(recipe(server), tmp_path)
    run.go_live()
    stop = StopToken()
    stop.request("a test")
    assert not run.intake.wait(lambda: False, stop, 0)
    run.close()


def test_groups_journalled_after_the_last_step_wait_for_the_next_one(server, tmp_path):
    run = Run(recipe(server), tmp_path)
    run.step()
    ready = lambda: isinstance(list(read_journal(tmp_path))[-1], Group)  # noqa: E731
    assert run.intake.wait(ready, StopToken(), run.done)
    run.close()
    again = Run(recipe(server), tmp_path, done=1)
    known = again.intake.arrivals.arrived_groups
    again.go_live()
    assert again.intake.arrivals.arrived_groups == len(places(tmp_path)) > known >= PER_STEP
    again.close()


def test_what_a_collector_generated_and_did_not_deliver_is_written_off_once(server, tmp_path):
    """It generated 9 rollouts of 90 tokens; a group of two with six tokens has arrived."""
    run = Run(recipe(server), tmp_path)
    run.intake.arrivals.apply_record(group())
    ledger = run.intake.arrivals.ledger
    ledger.report(Amount(9, 90), Amount(7, 84))
    run.intake.give_credit(0)  # without a collector: nothing to tell
    server.seconds = 30.0
    run.go_live()
    assert ledger.closed["lost"] == Amount(7, 84)
    run.intake._write_off_lost()
    assert ledger.closed["lost"] == Amount(7, 84)
    assert (ledger.generated, ledger.held) == (Amount(9, 90), Amount())
    ledger.check(1)
    assert [r for r in read_journal(tmp_path) if isinstance(r, Restart)] == [Restart(7, 84)]
    run.close()
