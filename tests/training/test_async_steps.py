"""Pieces of an asynchronous step by hand: shares of time, undrawn evictions, what is waited for."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from buffer_makers import make_rollout
from collected import group
from small_runs.asynchronous import BUFFER_ONLY, async_recipe
from small_runs.trained import GROUP, PROMPTS

from grpo_replay.collection.arrivals import Arrivals
from grpo_replay.collection.intake import Intake
from grpo_replay.collection.journal import Journal
from grpo_replay.collection.messages import CollectorSettings, Drop, Report, Step
from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import SamplerError, ServersLost
from grpo_replay.recipe import Recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.insertion import entries_of
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.run_directory import JOURNAL_FOLDER
from grpo_replay.training import asynchronous
from grpo_replay.training.asynchronous import (
    FollowerSource,
    MainSource,
    ServerTimes,
    ServerUse,
    trained_ages,
)
from grpo_replay.training.rollout_source import Parts, StepRecord, StepRollouts
from grpo_replay.training.trainer import count_step
from grpo_replay.types import ComposedBatch, Draw


def test_shares_of_the_servers_time_are_differences_of_two_reports():
    """Two servers, two ranks. First step: 20 s of servers, 5 idle and 3 paused. Second: 10 more,
    4 idle and 1 paused. Another collector counts from zero, and pauses go on."""
    times = ServerTimes(gpus_per_rank=1 / 2)
    assert times.step(Report(idle_seconds=5.0, server_seconds=20.0), 3.0) == ServerUse(6.0, 0.4)
    assert times.step(Report(idle_seconds=9.0, server_seconds=30.0), 4.0) == ServerUse(2.5, 0.5)
    assert times.step(Report(idle_seconds=1.0, server_seconds=8.0), 5.0) == ServerUse(3.0, 0.25)


def test_without_a_server_in_use_there_is_no_share_and_no_more_than_all_is_idle():
    times = ServerTimes(gpus_per_rank=1)
    assert times.step(Report(), 0.0) == ServerUse(0.0, None)
    assert times.step(Report(idle_seconds=4.0, server_seconds=5.0), 9.0) == ServerUse(0.0, 1.0)
    assert times.step(Report(idle_seconds=4.0, server_seconds=5.0), 9.0) == ServerUse(0.0, None)


class Waiting:
    """An intake whose waits end at once, and are looked at afterwards."""

    def __init__(self, recipe: Recipe) -> None:
        self.arrivals = Arrivals.of(recipe)
        self.replaying, self.newest_report, self.done = False, Report(), []

    def close_step(self, step) -> tuple:
        """Nothing, so that what a step waits for stays in the queue."""
        return ()

    def wait(self, is_ready, stop, version) -> bool:
        self.is_ready = is_ready
        return not stop.requested

    def outstanding_groups(self) -> int:
        return 7

    def __getattr__(self, name: str):
        """Whatever else it is told to do is written down."""
        return lambda *arguments: self.done.append((name, *arguments))


@dataclass
class Servers:
    """A sampler of two servers that notes the versions it gets, and generates nothing."""

    policy_version: int = 2
    pushed: list[int] = field(default_factory=list)
    stop_token_ids: tuple[int, ...] = (1, 5)
    pusher: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(paused_seconds=0.0))
    servers: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            all=[SimpleNamespace(prefix="run-7/", url=url) for url in ("a", "b")]
        )
    )

    def load_weights(self, tensors, version: int) -> None:
        assert list(tensors) == ["of the policy"]
        self.policy_version = version
        self.pushed.append(version)

    def generate(self, requests) -> tuple:
        return ()


ENGINE = SimpleNamespace(pushed_tensors=lambda bucket_bytes: iter(["of the policy"]))


def main_source(recipe: Recipe) -> tuple[MainSource, Waiting]:
    """Before step 3, with a queue to which nothing has arrived."""
    intake = Waiting(recipe)
    return MainSource(parts_of(recipe), RunState(step=2, policy_version=2), intake), intake


def parts_of(recipe: Recipe, folder: Path = Path("run"), comm: Comm | None = None) -> Parts:
    buffer = ReplayBuffer(recipe.replay, recipe.sampling.group_size)
    unused, scorer = SimpleNamespace(), SimpleNamespace(first_error=None)
    return Parts(
        recipe, comm or Comm(), ENGINE, Servers(), scorer, range(11), unused, buffer,
        SimpleNamespace(path=folder),
    )  # fmt: skip


URLS = ["http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("changes", "fill"),
    [({}, 20), ({"ratio": 0.5}, 10), ({"ratio": 2.0, "capacity_rollouts": 24}, 24)],
)
def test_buffer_only_waits_until_the_buffer_can_give_one_batch(changes, fill):
    """A batch of 5 prompts times 4 at most, or as much as the buffer can hold. Groups without a
    signal count, because the preset stores them."""
    recipe = async_recipe(
        URLS,
        {"sampling": {"prompts_per_step": 5, "group_size": 4}, "replay": BUFFER_ONLY | changes},
    )
    source, intake = main_source(recipe)
    source.parts.buffer.insert([make_rollout(i) for i in range(2)], 1)
    assert source.take(3)
    arrived = 2
    for index in range(6):
        assert intake.is_ready() == (arrived >= fill)
        intake.arrivals.apply_record(group((0, index), rewards=(1.0, 1.0, -1.0, 1.0)))
        arrived += 4
    assert intake.is_ready()


def test_buffer_only_waits_for_rollouts_that_may_be_drawn_again():
    changes = {"replay": BUFFER_ONLY | {"with_replacement": False, "max_uses": 1}}
    recipe = async_recipe(URLS, {"sampling": {"prompts_per_step": 1, "group_size": 4}} | changes)
    source, intake = main_source(recipe)
    buffer = source.parts.buffer
    buffer.insert([make_rollout(i) for i in range(4)], 1)
    assert source.take(2) and intake.is_ready()
    buffer.draw(4, 2, np.random.default_rng(0))
    assert source.take(3) and not intake.is_ready()


def test_the_first_error_of_a_collectors_verifiers_is_kept():
    source, intake = main_source(async_recipe(URLS))
    for error in ("the first", "another"):
        intake.newest_report = Report(first_error=error)
        source.take(3)
        assert source.parts.scorer.first_error == "the first"


def test_fresh_anchored_waits_for_the_groups_of_its_step_that_are_young_enough():
    recipe = async_recipe(
        URLS,
        {"sampling": {"prompts_per_step": 2}, "replay": {"max_age_steps": 1, "warmup_steps": 1}},
    )
    source, intake = main_source(recipe)
    for index, version in enumerate([0, 1, 2]):
        assert source.take(3)
        assert not intake.is_ready()
        intake.arrivals.apply_record(group((0, index), version))
    assert intake.is_ready()


def test_a_stop_while_a_step_waits_takes_nothing():
    source, intake = main_source(async_recipe(URLS))
    source.parts.stop.request("a test")
    assert source.take(3) is None
    assert [name for name, *_ in intake.done] == ["go_live"]


def test_the_loss_of_the_last_server_takes_nothing_and_ends_the_run_afterwards(monkeypatch):
    source, intake = main_source(async_recipe(URLS))
    lost = ServersLost("none is left")

    def wait(*_):
        raise lost

    monkeypatch.setattr(intake, "wait", wait)
    assert source.take(3) is None
    assert source.parts.stop.error is lost
    assert [name for name, *_ in intake.done] == ["go_live"]


def test_a_journal_that_has_ended_is_not_sampled_further():
    recipe = async_recipe(URLS, {"sampling": {"collection": {"replay_journal": "before"}}})
    source, intake = main_source(recipe)
    with pytest.raises(SamplerError, match=r"no step 3; lower run\.steps"):
        source.take(3)
    source.advance(3)
    assert intake.done == []


@pytest.mark.parametrize(("held", "pushed"), [(1, [2]), (2, [])])
def test_servers_that_hold_another_version_get_the_policy_before_the_first_step(held, pushed):
    """As after a resume; a rank without an intake takes its part in the gather. Once is enough."""
    parts = parts_of(async_recipe(URLS), comm=ReadyMain())
    parts.sampler.policy_version = held
    source = FollowerSource(parts, RunState(policy_version=2))
    source.advance(2)  # repeated from the journal
    assert parts.sampler.pushed == []
    for step in (3, 4):
        taken = source.take(step)
        assert (taken.generated, taken.measured, taken.generation_seconds) == ((), (), None)
    assert parts.sampler.pushed == pushed
    for version in (3, 6):
        source.advance(version)
    assert parts.sampler.pushed == [*pushed, 3], "and after every step but the last"


def test_a_rank_without_an_intake_has_no_rollouts_of_a_recorded_step():
    parts = parts_of(async_recipe(URLS), comm=ReadyMain(recorded=True))
    taken = FollowerSource(parts, RunState(policy_version=2)).take(3)
    assert (taken.generated, taken.measured) == ((), ())
    assert parts.sampler.pushed == []


class ReadyMain(Comm):
    """The second of two ranks; the first says whether the step is recorded, that it has waited,
    that it waited without an error, and that there is something to take."""

    def __init__(self, recorded: bool = False) -> None:
        super().__init__(rank=1, world_size=2)
        self._said = cycle([recorded, True, None, True])

    def broadcast(self, value):
        return next(self._said)


def test_after_a_step_the_servers_get_every_nth_version_and_the_collector_goes_on():
    source, intake = main_source(async_recipe(URLS, {"run": {"sync_every_steps": 2}}))
    source.advance(3)  # repeated from the journal: nothing samples yet
    assert (intake.done, source.parts.sampler.pushed) == ([], [])
    source.take(4)
    intake.done.clear()
    source.parts.sampler.pushed = Pushes(intake)
    for version in (3, 4, 6):
        source.advance(version)
    assert intake.done == [
        ("cancel_stale", 4), ("give_credit", 3),
        ("cancel_stale", 5), ("pushed", 4), ("give_credit", 4),
        ("close",),
    ]  # fmt: skip


class Pushes:
    """Versions that were pushed, among what the intake was told."""

    def __init__(self, intake: Waiting) -> None:
        self.append = lambda version: intake.done.append(("pushed", version))


def test_what_a_step_takes_by_hand():
    """Of three groups that arrived in the run, after a fourth that was lost, one is for this step;
    two were counted before."""
    source, intake = main_source(async_recipe(URLS))
    source.state.prompt_cursor, source.state.next_group_id = 3, 2
    for index in range(3):
        intake.arrivals.apply_record(group((0, index)))
    intake.arrivals.apply_record(Drop(0, 3, "lost", 0, 0))
    generated = (make_rollout(8, birth_step=3), make_rollout(9, birth_step=2))
    intake.close_step = lambda step: generated
    intake.newest_report = Report(idle_seconds=3.0, server_seconds=6.0)
    taken = source.take(3)
    assert (taken.prompts, taken.groups, taken.generation_seconds) == (1, 1, 3.0)
    assert (len(taken.measured), len(taken.generated)) == (1, 2)
    assert taken.nominal_rollouts == PROMPTS * GROUP


def test_a_first_step_without_rollouts_of_the_newest_weights_samples_short_ones(monkeypatch):
    monkeypatch.setattr(asynchronous, "PROBED_TOKENS", 3)
    source, intake = main_source(async_recipe(URLS))
    asked = []
    monkeypatch.setattr(
        source.parts.sampler, "generate", lambda requests: asked.extend(requests) or [], False
    )
    intake.close_step = lambda step: (make_rollout(8, birth_step=1), make_rollout(9, birth_step=1))
    source.take(3)
    assert [request.max_tokens for request in asked] == [3, 3]
    source.take(4)
    assert len(asked) == 2, "and not again before UNCHECKED_STEPS steps"


def test_counters_of_a_step_by_hand():
    """Two rollouts of 3 tokens arrived, each after a prompt of 2; the batch replays one of 4."""
    drawn = tuple(entries_of([make_rollout(7, tokens=4)]))
    draw = Draw(drawn, np.ones(1), np.array([2]), 1.0, 0.0)
    batch = ComposedBatch(drawn, np.ones(1, bool), draw.ages, draw)
    taken = StepRollouts([make_rollout(0), make_rollout(1)], [], 2, 3, 2, None)
    state = RunState(step=4, prompt_cursor=10, next_group_id=8, next_rollout_id=32)
    count_step(state, StepRecord(5, taken, [], None, batch, [], []), group_size=4, epochs=1)
    assert (state.step, state.replayed_rollouts) == (5, 1)
    assert (state.generated_tokens, state.trained_tokens, state.processed_tokens) == (6, 4, 10)
    assert (state.prompt_cursor, state.next_group_id, state.next_rollout_id) == (13, 10, 40)


def test_a_checkpoint_has_the_journal_on_the_disk_first_and_the_end_ends_the_collector(tmp_path):
    source, intake = main_source(async_recipe(URLS))
    source.save(tmp_path)
    assert intake.done == [("sync",)]
    source.close()
    assert intake.done == [("sync",), ("close",)]


def test_a_step_takes_what_has_arrived_when_its_wait_ends(monkeypatch):
    """It waited 6 of its 12 seconds, in which two servers worked 3 seconds for one rank."""
    source, intake = main_source(async_recipe(URLS))
    now = [100.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(asynchronous, "time", clock)
    monkeypatch.setattr(intake, "wait", lambda *_: now.append(now.pop() + 6) or True)
    arrived = [
        replace(make_rollout(index, birth_step=birth), policy_version_end=3)
        for index, birth in ((8, 3), (9, 2))
    ]
    intake.close_step = lambda *words: intake.done.append(("cut", *words)) or arrived
    intake.newest_report = Report(idle_seconds=1.0, server_seconds=4.0)
    taken = source.take(3)
    assert [words[:2] for words in intake.done[1:]] == [("poll", 2), ("cut", 3)]
    assert (taken.generated, taken.generation_seconds) == (arrived, 3.0)
    source.parts.clock = SimpleNamespace(read=lambda: {"step": 12.0})
    source.parts.buffer.insert([make_rollout(i, birth_step=-9) for i in (6, 7)], 2)
    source.parts.buffer.evict(3)
    draw = Draw.empty()
    batch = ComposedBatch(tuple(entries_of(arrived)), np.zeros(2, bool), draw.ages, draw)
    found = source.metrics(StepRecord(3, taken, arrived, None, batch, [], []))
    assert (found["async/trainer_idle"], found["async/sampler_idle"]) == (0.5, 0.25)
    assert (found["async/partial_rollouts"], found["async/outstanding_groups"]) == (2, 7)
    assert (found["sampler/policy_version"], found["async/undrawn_evicted"]) == (2, 2)
    assert found["ledger/generated_rollouts"] == 0
    assert (found["async/age_mean"], found["async/age_max"]) == (0.5, 1)


def test_a_recorded_step_is_repeated_without_waiting():
    source, intake = main_source(async_recipe(URLS))
    intake.replaying = True
    intake.take_recorded = lambda step: [make_rollout(step)]
    taken = source.take(3)
    assert [rollout.rollout_id for rollout in taken.generated] == [3]
    assert taken.generation_seconds is None and taken.repeated
    source.parts.clock = SimpleNamespace(read=lambda: {"step": 2.0})
    draw = Draw.empty()
    batch = ComposedBatch((), np.zeros(0, bool), draw.ages, draw)
    found = source.metrics(StepRecord(3, taken, (), None, batch, [], []))
    assert (found["async/trainer_idle"], found["async/sampler_idle"]) == (0.0, None)
    source.advance(3)
    assert intake.done == [], "nothing samples yet"


def test_a_collector_is_started_with_the_servers():
    source, intake = main_source(async_recipe(URLS))
    source.take(3)
    settings = CollectorSettings(
        source.recipe, "run-7", ["a", "b"], (1, 5), Path("run/log/collector.log")
    )
    assert intake.done[0] == ("go_live", settings, 11, 2)
    source.parts.sampler.pusher.on_switch("a", 3)
    assert intake.done[-1] == ("announce", "a", 3)


@pytest.mark.parametrize("repeats", [False, True])
def test_a_resumed_source_brings_servers_the_policy_and_reads_the_journal_that_it_repeats(
    tmp_path, monkeypatch, repeats
):
    """The intake is closed before its journal."""
    closed = []
    for kind in (Intake, Journal):
        monkeypatch.setattr(kind, "close", lambda each: closed.append(type(each)))
    before, run = tmp_path / "before", tmp_path / "run"
    journal, _ = Journal.open((before if repeats else run) / JOURNAL_FOLDER)
    for step in (1, 2, 3, 4):
        journal.append(Step(step, 0, 0, 0, 0, 0))
    collection = {"replay_journal": str(before)} if repeats else {}
    recipe = async_recipe(URLS, {"replay": BUFFER_ONLY, "sampling": {"collection": collection}})
    parts, state, stack = parts_of(recipe, run), RunState(step=3, policy_version=4), ExitStack()
    source = asynchronous.open_async_source(parts, state, tmp_path, stack)
    assert parts.sampler.pushed == [4]
    assert source.take(4).repeated, "the step after the checkpoint's"
    stack.close()
    assert closed == [Intake, *([] if repeats else [Journal])]


@pytest.mark.parametrize(
    ("update_N", "updates", "ages"), [(None, 1, (2.0, 4)), ([0, 1], 2, (4.5, 8))]
)
def test_ages_are_those_of_what_trains(update_N, updates, ages):
    """Step 9 trains on a rollout of step 5, and one of step 9. In the unit of two updates a step
    their ages are 8, and 1 of the second update."""
    trained = (make_rollout(1, birth_step=5), make_rollout(2, birth_step=9))
    draw = replace(Draw.empty(), updates=updates, update_N=update_N and np.array(update_N))
    batch = ComposedBatch(tuple(entries_of(trained)), np.zeros(2, bool), draw.ages, draw)
    taken = StepRollouts(trained, (), 0, 0, 0, None)
    found = trained_ages(StepRecord(9, taken, (), None, batch, [], []))
    assert (found["async/age_mean"], found["async/age_max"]) == ages
