"""The collector against fake servers, which fail exactly when told."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from collected import InstantScorer, NumberedPrompts
from fake_server import Answer, FakeServer

from grpo_replay.collection.arrivals import Arrived
from grpo_replay.collection.collector import Collector
from grpo_replay.collection.messages import (
    LOGPROBS,
    TOKEN_IDS,
    Cancel,
    CollectorSettings,
    Credit,
    Delivery,
    Drop,
    Group,
    Hello,
    Stop,
    Version,
    unpack,
)
from grpo_replay.errors import SamplerError
from grpo_replay.recipe import Recipe, resolve_recipe
from grpo_replay.types import RequestKey, completion_seed


class Harness:
    """A collector in this process, its messages, and rank 0's part."""

    def __init__(self, servers: list[FakeServer], **settings) -> None:
        self.servers = servers
        self.received: list[Delivery] = []
        self.scorer = InstantScorer()
        section = {"urls": [s.url for s in servers], "max_in_flight": 4, **settings}
        self.recipe: Recipe = resolve_recipe(
            [{"sampling": {"group_size": 2, "servers": section, "max_completion_length": 8}}]
        )

    def run(self, scenario, seconds: float = 200.0) -> None:
        """Run the collector and a coroutine function that plays rank 0, then stop."""

        async def both() -> None:
            self.collector = self.make()
            work = asyncio.create_task(self.collector.run())
            play = asyncio.create_task(scenario())
            done, _ = await asyncio.wait([work, play], return_when=asyncio.FIRST_COMPLETED)
            if play in done:
                play.result()
                self.collector.handle(Stop())
            else:
                play.cancel()
            await work

        asyncio.run(asyncio.wait_for(both(), seconds))

    def make(self) -> Collector:
        urls = self.recipe.sampling.servers.urls
        return Collector(
            CollectorSettings(self.recipe, "run", urls, (1,), Path("log")),
            NumberedPrompts(), lambda ids: " ".join(map(str, ids)), self.scorer,
            self.received.append,
        )  # fmt: skip

    def greet(self, outstanding=(), cursor=0, credit: int = 10**6) -> None:
        self.collector.handle(Hello(list(outstanding), cursor))
        self.collector.handle(Credit(credit))

    def groups(self) -> list[Group]:
        return [d.body for d in self.received if isinstance(d.body, Group)]

    def drops(self) -> list[Drop]:
        return [d.body for d in self.received if isinstance(d.body, Drop)]

    async def until(self, condition, seconds: float = 100.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.collector.report()}"
            await asyncio.sleep(0.02)

    async def until_unused(self, server: FakeServer, seconds: float = 0.3) -> None:
        """Until no request has come for that long: those on their way when it was excluded do."""
        seen, since = -1, 0.0

        def unused() -> bool:
            nonlocal seen, since
            if server.in_flight or server.served != seen:
                seen, since = server.served, time.monotonic()
            return time.monotonic() - since > seconds

        await self.until(unused)

    def check_balance(self) -> None:
        """The collector's own count equals what it sent and what it holds, at every message."""
        rollouts = tokens = 0
        for delivery in self.received:
            body, report = delivery.body, delivery.report
            if isinstance(body, Group):
                rollouts, tokens = rollouts + len(body.rows), tokens + body.tokens
            if isinstance(body, Drop):
                rollouts, tokens = rollouts + body.rollouts, tokens + body.tokens
            assert report.generated_rollouts == rollouts + report.held_rollouts
            assert report.generated_tokens == tokens + report.held_tokens


@pytest.fixture
def pair(server) -> Iterator[list[FakeServer]]:
    other = FakeServer()
    other.seconds = 0.02
    yield [server, other]
    other.stop()


def test_groups_come_scored_in_the_order_of_the_prompts_with_their_own_seeds(server):
    harness = Harness([server])

    async def scenario():
        harness.greet(credit=3)
        await harness.until(lambda: len(harness.groups()) == 3)
        await asyncio.sleep(0.2)

    harness.run(scenario)
    groups = sorted(harness.groups(), key=lambda each: each.position)
    assert [g.position for g in groups] == [(0, 0), (0, 1), (0, 2)]  # and no fourth: the credit
    first = groups[0]
    assert [row.reward for row in first.rows] == [1.0, -1.0]
    np.testing.assert_array_equal(unpack(first.rows[0].token_ids, TOKEN_IDS), [7, 1])
    assert first.rows[0].spans == ((0, 0, 2),)
    assert first.rows[0].text == "7 1"
    seeds = {completion_seed(42, RequestKey(0, p, i)) for p in range(3) for i in range(2)}
    assert set(server.seeds) == seeds
    harness.check_balance()


def test_further_credit_lets_a_collector_go_on(server):
    harness = Harness([server])

    async def scenario():
        harness.greet(credit=2)
        await harness.until(lambda: len(harness.groups()) == 2)
        harness.collector.handle(Credit(5))
        await harness.until(lambda: len(harness.groups()) == 5)
        await asyncio.sleep(0.2)

    harness.run(scenario)
    assert len(harness.groups()) == harness.collector.report().started_groups == 5


def test_outstanding_prompts_come_first_and_the_epoch_goes_on(server):
    harness = Harness([server])

    async def scenario():
        harness.greet(outstanding=[(0, 1), (0, 3)], cursor=5, credit=4)
        await harness.until(lambda: len(harness.groups()) == 4)

    harness.run(scenario)
    places = {(0, 1), (0, 3), (0, 5), (1, 0)}
    assert {g.position for g in harness.groups()} == places
    assert set(server.seeds) == {
        completion_seed(42, RequestKey(*place, i)) for place in places for i in range(2)
    }


def test_requests_are_continuous_and_bounded_in_flight(server):
    server.seconds = 0.05
    harness = Harness([server], max_in_flight=4)

    async def scenario():
        harness.greet()
        await harness.until(lambda: len(harness.groups()) >= 8)

    harness.run(scenario)
    assert server.most_in_flight == 4
    report = harness.collector.report()
    assert report.idle_seconds < report.server_seconds / 3


def test_a_group_whose_member_fails_for_good_ends_as_lost(server, monkeypatch):
    monkeypatch.setattr("grpo_replay.sampling.server.dispatcher.MAX_RETRIES", 0)
    server.statuses = [500, 200, 500, 500]  # the second group's first completion has finished
    harness = Harness([server], max_in_flight=1)

    async def scenario():
        harness.greet(credit=4)
        await harness.until(lambda: len(harness.groups() + harness.drops()) == 4)

    harness.run(scenario)
    dropped = [(drop.reason, drop.rollouts, drop.tokens) for drop in harness.drops()]
    assert dropped == [("lost", 0, 0), ("lost", 1, 2), ("lost", 0, 0)]
    assert {d.position for d in harness.drops()} | {g.position for g in harness.groups()} == {
        (0, 0), (0, 1), (0, 2), (0, 3)
    }  # fmt: skip
    harness.check_balance()
    assert harness.scorer.incomplete == [
        f"{d.position[0]}.{d.position[1]}" for d in harness.drops()
    ]
    assert set(harness.scorer.groups.values()) == {harness.recipe.sampling.group_size}


def test_a_server_with_other_weights_is_not_used_until_it_has_ours(pair):
    pair[1].label = "default"
    harness = Harness(pair)

    async def scenario():
        harness.greet()
        await harness.until(lambda: len(harness.groups()) >= 4)
        assert pair[1].served == 0
        pair[1].label = "run/3"
        harness.collector.handle(Version(pair[1].url, 3))
        await harness.until(lambda: pair[1].served > 4)

    harness.run(scenario)
    versions = {row.spans[0][0] for group in harness.groups() for row in group.rows}
    assert versions == {0, 3}


def test_a_server_whose_update_failed_is_not_used(pair):
    """trl#5932: a label without the weights. Rank 0 changes the label before it loads."""
    harness = Harness(pair)

    async def scenario():
        harness.greet()
        await harness.until(lambda: all(each.served for each in pair))
        pair[1].label = "run/updating"
        harness.collector.handle(Version(pair[1].url, None))
        await harness.until_unused(pair[1])
        served = pair[1].served
        pair[1].label = "run/1"
        harness.collector.handle(Version(pair[1].url, 1))
        await harness.until(lambda: pair[1].served > served)

    harness.run(scenario)
    harness.check_balance()


def test_a_server_that_is_being_updated_when_a_request_fails_is_used_again(server):
    """It is the only one, and not lost."""
    server.statuses, server.label = [500], "run/updating"
    harness = Harness([server])

    async def scenario():
        harness.greet(credit=1)
        await asyncio.sleep(0.3)
        assert harness.groups() == []
        server.label = "run/1"
        await harness.until(lambda: len(harness.groups()) == 1)

    harness.run(scenario)


def test_a_partial_rollout_arrives_with_the_version_and_the_log_prob_of_every_token(
    server, monkeypatch
):
    """An update during the completion. A reward function is told the step of the version that
    sampled the first token."""
    answer = Answer([7, 8, 1], [-0.25, -0.5, -1.0], ["run/4", "run/5", "run/5"])
    monkeypatch.setattr(server, "sample", lambda body: answer)
    harness = Harness([server])

    async def scenario():
        harness.greet(credit=1)
        await harness.until(lambda: len(harness.groups()) == 1)

    harness.run(scenario)
    (group,) = harness.groups()
    for row in group.rows:
        assert row.spans == ((4, 0, 1), (5, 1, 3))
        assert unpack(row.token_ids, TOKEN_IDS).tolist() == [7, 8, 1]
        assert unpack(row.logprobs, LOGPROBS).tolist() == [-0.25, -0.5, -1.0]
    assert Arrived(0, group).birth_step == 5
    assert [request.step for request in harness.scorer.asked] == [5, 5]
    assert not any(request.truncated for request in harness.scorer.asked)


def test_groups_that_would_be_too_old_are_cancelled_and_counted(server):
    """The server hears of it too: nobody waits for an answer."""
    server.seconds = 1.0
    harness = Harness([server])

    async def scenario():
        harness.greet(credit=2)
        await harness.until(lambda: server.in_flight == 4)
        harness.collector.handle(Cancel(0))
        assert harness.drops() == []
        harness.collector.handle(Cancel(1))
        assert [(d.reason, d.rollouts) for d in harness.drops()] == [("cancelled", 0)] * 2
        await harness.until(lambda: harness.collector.report().running == 0)
        await harness.until(lambda: server.hung_up == 4)

    harness.run(scenario)
    harness.check_balance()


def test_a_group_that_waits_for_its_verdicts_alone_is_not_cancelled(server):
    """Its rollouts are whole: rank 0 says whether they are too old for a step."""
    harness = Harness([server])

    async def scenario():
        harness.scorer.stalled = True
        harness.greet(credit=1)
        await harness.until(lambda: harness.collector.report().grading == 2)
        harness.collector.handle(Cancel(1))
        assert harness.drops() == []
        harness.scorer.stalled = False
        await harness.until(lambda: len(harness.groups()) == 1)

    harness.run(scenario)
    harness.check_balance()


def test_a_server_whose_version_is_too_old_gets_no_requests_until_it_is_updated(pair):
    """With `run.sync_every_steps`, or while the others are updated first."""
    harness = Harness(pair)

    async def scenario():
        collector = harness.collector
        harness.greet()
        await harness.until(lambda: all(each.served for each in pair))
        pair[0].label = "run/3"
        collector.handle(Version(pair[0].url, 3))
        collector.handle(Cancel(2))
        await harness.until_unused(pair[1])
        served = pair[1].served
        pair[1].label = "run/3"
        collector.handle(Version(pair[1].url, 3))
        await harness.until(lambda: pair[1].served > served)

    harness.run(scenario)
    harness.check_balance()


def test_a_stalled_verifier_delays_its_group_and_nothing_else(server):
    """Sampling goes on; the pool's time limit ends the stall (tests/rewards)."""
    harness = Harness([server])

    async def scenario():
        harness.scorer.stalled = True
        harness.greet()
        await harness.until(lambda: server.served > 20)
        assert harness.groups() == []
        report = harness.collector.report()
        assert report.held_rollouts == report.grading > 16
        harness.scorer.stalled = False
        await harness.until(lambda: len(harness.groups()) > 8)

    harness.run(scenario)
    harness.check_balance()


def test_an_error_of_what_runs_beside_ends_the_collector(server):
    """Otherwise one that reads no more commands would go on with its heartbeat."""

    async def take_commands() -> None:
        await asyncio.sleep(0)
        raise ValueError("a prompt that is not there")

    async def run() -> None:
        await Harness([server]).make().run(take_commands(), asyncio.sleep(60))

    with pytest.raises(ValueError, match="a prompt that is not there"):
        asyncio.run(run())


def test_a_refused_request_ends_the_collector_with_its_reason(server):
    server.statuses = [400]
    harness = Harness([server])

    async def scenario():
        harness.greet(credit=1)
        await asyncio.sleep(150)

    with pytest.raises(SamplerError, match="as told"):
        harness.run(scenario)
