"""Requests of one step to fake servers that fail in chosen ways. Needs no vLLM."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fake_server import Answer, FakeServer
from server_helpers import wait_for
from tiny_policy import make_requests

from grpo_replay.errors import SamplerError, ServersLost
from grpo_replay.recipe import ServersSection
from grpo_replay.sampling.server import dispatcher
from grpo_replay.sampling.server.dispatcher import Servers, sample
from grpo_replay.sampling.server.routes import VllmServer, block_on
from grpo_replay.types import Completion

STOP = (1,)


@pytest.fixture
def fakes() -> Iterator[Callable[[int], list[FakeServer]]]:
    made: list[FakeServer] = []

    def make(count: int) -> list[FakeServer]:
        made.extend(FakeServer() for _ in range(count))
        return made

    yield make
    for fake in made:
        fake.stop()


def make_pool(fakes: list[FakeServer], seconds: float = 60.0) -> Servers:
    section = ServersSection(max_in_flight=4, request_timeout_seconds=seconds)
    return Servers([VllmServer(fake.url, "run") for fake in fakes], section)


def run(pool: Servers, count: int, version: int = 0) -> list[Completion]:
    return list(sample(pool, make_requests(count=count), STOP, version))


async def other_tasks() -> int:
    """Tasks of the background loop, once those that are being cancelled have ended."""
    deadline = time.monotonic() + 30
    while (left := len(asyncio.all_tasks()) - 1) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return left


def test_ranks_share_the_requests_in_flight():
    section = ServersSection(max_in_flight=8)
    each = [Servers([], section, ranks).in_flight_per_server for ranks in (1, 3, 16)]
    assert each == [8, 2, 1]


def test_every_request_gets_its_completion_and_servers_share_them(fakes):
    servers = fakes(2)
    for server in servers:
        server.seconds = 0.02
    requests = make_requests(count=24)
    completions = list(sample(make_pool(servers), requests, STOP, 0))
    assert sorted(c.key for c in completions) == sorted(r.key for r in requests)
    assert [server.served for server in servers] == pytest.approx([12, 12], abs=8)
    assert all(2 <= server.most_in_flight <= 4 for server in servers)


def test_a_failed_request_is_tried_on_the_other_server(fakes):
    """Although that one is full for a while, and the first is well but for its requests."""
    servers = fakes(2)
    servers[0].statuses, servers[1].seconds = [500] * 100, 0.1
    completions = run(make_pool(servers), 8)
    assert len(completions) == 8
    assert (servers[0].served, servers[1].served) == (0, 8)


def test_an_aborted_completion_is_asked_for_again(fakes):
    (server,) = fakes(1)
    server.aborts = 2
    assert len(run(make_pool([server]), 1)) == 1
    assert server.served == 3


def test_a_request_that_keeps_failing_stops_the_run(fakes):
    (server,) = fakes(1)
    server.statuses = [500] * 100
    with pytest.raises(SamplerError, match="HTTP 500: as told"):
        run(make_pool([server]), 1)
    assert len(server.seeds) == 3


@pytest.mark.parametrize(
    ("status", "named"), [(400, "HTTP 400: as told"), (401, "HTTP 401: as told .*VLLM_API_KEY")]
)
def test_a_refused_request_is_not_tried_again(fakes, status, named):
    servers = fakes(2)
    servers[0].statuses = servers[1].statuses = [status]
    with pytest.raises(SamplerError, match=named):
        run(make_pool(servers), 1)
    assert len(servers[0].seeds) + len(servers[1].seeds) == 1


@pytest.mark.parametrize("label", ["default", "b7/3"])
def test_a_server_that_came_back_with_other_weights_is_lost(fakes, label):
    """Restarted, or updated by another run."""
    servers = fakes(2)
    servers[0].label, servers[1].seconds = label, 0.1
    servers[0].statuses = [500] * 100
    pool = make_pool(servers)
    assert len(run(pool, 8)) == 8
    assert list(pool.lost) == [servers[0].url] and repr(label) in pool.lost[servers[0].url]


def test_a_completion_of_another_version_stops_the_run(fakes):
    (server,) = fakes(1)
    server.label = "run/3"
    with pytest.raises(SamplerError, match="sampled by policy versions"):
        run(make_pool([server]), 1, 2)


def test_a_completion_with_a_log_prob_too_few_stops_the_run(fakes, monkeypatch):
    (server,) = fakes(1)
    monkeypatch.setattr(server, "sample", lambda body: Answer([7, 1], [-0.5], ["run/0"] * 2))
    with pytest.raises(SamplerError, match=r"completion \(1, 0, 0\)"):
        run(make_pool([server]), 1)


def test_an_unexpected_error_reaches_the_caller(fakes, monkeypatch):
    """If it ended only its own task, the caller would wait forever."""
    (server,) = fakes(1)
    pool = make_pool([server])
    monkeypatch.setattr(VllmServer, "generate", lambda *_: server.no_such_thing)
    for count in (1, 8):
        with pytest.raises(AttributeError, match="no_such_thing"):
            run(pool, count)
    monkeypatch.undo()
    assert len(run(pool, 8)) == 8


def test_a_server_that_is_gone_is_dropped_and_the_last_one_stops_the_run(fakes):
    servers = fakes(2)
    servers[0].stop()
    servers[1].seconds = 0.1
    pool = make_pool(servers)
    assert len(run(pool, 8)) == 8
    servers[1].stop()
    with pytest.raises(ServersLost, match=servers[1].url):
        run(pool, 8)
    with pytest.raises(ServersLost):
        run(pool, 8)


@pytest.mark.slow
def test_a_completion_may_take_as_long_as_the_server_generates(fakes):
    servers = fakes(2)
    servers[0].seconds = 2.5
    pool = make_pool(servers, 0.4)
    assert len(run(pool, 3)) == 3
    assert pool.lost == {}, "neither the slow one nor the one that was idle meanwhile"


def test_a_server_that_generates_nothing_for_too_long_is_lost(fakes):
    servers = fakes(2)
    servers[0].seconds, servers[0].generates = 600.0, False
    pool = make_pool(servers, 1.0)
    assert len(run(pool, 6)) == 6, "what waited for it was cut"
    assert list(pool.lost) == [servers[0].url]


def test_requests_that_wait_for_a_lost_server_are_given_to_others_at_once(fakes, monkeypatch):
    """One request finds that the server was restarted; the others there could wait forever."""
    servers = fakes(2)
    servers[0].statuses, servers[0].label, servers[0].seconds = [500], "default", 600.0
    monkeypatch.setattr(dispatcher, "MAX_RETRIES", 1)
    pool = make_pool(servers, 600.0)
    assert len(run(pool, 8)) == 8
    assert list(pool.lost) == [servers[0].url]


def test_an_abandoned_iterator_cancels_its_requests(fakes, monkeypatch):
    """Requests are cancelled, not waited for: the server goes on when all of that is over."""
    (server,) = fakes(1)
    answer, go_on, held = server.sample, threading.Event(), []

    def sample_later(body):
        held.append(body)
        assert go_on.wait(250)
        return answer(body)

    iterator = sample(make_pool([server]), make_requests(count=16), STOP, 0)
    next(iterator)
    monkeypatch.setattr(server, "sample", sample_later)
    assert wait_for(lambda: len(held) == 4, 60)
    iterator.close()
    assert block_on(other_tasks()) == 0
    go_on.set()
    assert wait_for(lambda: server.hung_up == 4, 60), "vLLM aborts one whose connection is closed"


def test_a_completion_survives_that_the_server_closes_the_kept_connection(fakes):
    (server,) = fakes(1)
    pool = make_pool([server])
    assert len(run(pool, 8)) == 8
    server.close_connections()
    assert len(run(pool, 8)) == 8
