"""The request pool against fake servers that fail in chosen ways. Needs no vLLM."""

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest
from fake_server import FakeServer
from tiny_policy import make_requests

from grpo_replay.errors import SamplerError
from grpo_replay.recipe import ServersSection
from grpo_replay.sampling.server import dispatcher
from grpo_replay.sampling.server.dispatcher import Dispatcher
from grpo_replay.sampling.server.routes import (
    HttpClient,
    Refused,
    Unreachable,
    VllmServer,
    block_on,
)
from grpo_replay.sampling.server.sampler import PoolSettings, ServerPool

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


def make_pool(fakes: list[FakeServer], **settings) -> ServerPool:
    defaults = {
        "in_flight_per_server": 4,
        "request_timeout_seconds": 5.0,
        "drop_lost": False,
        "vocabulary": 24,
    }
    servers = [VllmServer(fake.url, "run") for fake in fakes]
    return ServerPool(servers, PoolSettings(**(defaults | settings)))


async def other_tasks() -> int:
    """Tasks of the background loop, once those that are being cancelled have ended."""
    await asyncio.sleep(0.2)
    return len(asyncio.all_tasks()) - 1


def test_ranks_share_the_requests_in_flight():
    section = ServersSection(max_in_flight=8)
    each = [PoolSettings.of(section, 24, ranks).in_flight_per_server for ranks in (1, 3, 16)]
    assert each == [8, 2, 1]


def test_every_request_gets_its_completion_and_servers_share_them(fakes):
    servers = fakes(2)
    for server in servers:
        server.seconds = 0.02
    requests = make_requests(count=24)
    completions = list(make_pool(servers).run(requests, STOP, 0))
    assert sorted(c.key for c in completions) == sorted(r.key for r in requests)
    assert [server.served for server in servers] == pytest.approx([12, 12], abs=8)
    assert all(2 <= server.most_in_flight <= 4 for server in servers)


def test_every_server_begins_with_its_share_however_fast_the_others_are(fakes, monkeypatch):
    """A server that answers at once must not take the first share of another."""
    servers = fakes(2)
    pool = make_pool(servers)
    asked = []
    generate = VllmServer.generate

    async def instantly(server, *arguments):
        asked.append(server.url)
        return answers[server.url]

    request = make_requests(count=1)[0]
    answers = {server.url: block_on(generate(server, request, STOP)) for server in pool.servers}
    monkeypatch.setattr(VllmServer, "generate", instantly)
    for count, shares in ((8, (4, 4)), (7, (4, 3)), (6, (3, 3)), (1, (1, 0))):
        asked.clear()
        assert len(list(pool.run(make_requests(count=count), STOP, 0))) == count
        assert tuple(asked.count(server.url) for server in servers) == shares


def test_a_failed_request_is_tried_on_the_other_server(fakes):
    servers = fakes(2)
    servers[0].statuses = [500] * 100
    completions = list(make_pool(servers).run(make_requests(count=8), STOP, 0))
    assert len(completions) == 8
    assert (servers[0].served, servers[1].served) == (0, 8)


def test_a_single_server_is_tried_again(fakes):
    (server,) = fakes(1)
    server.statuses = [503, 500]
    assert len(list(make_pool([server]).run(make_requests(count=1), STOP, 0))) == 1


def test_an_aborted_completion_is_asked_for_again(fakes):
    (server,) = fakes(1)
    server.aborts = 2
    assert len(list(make_pool([server]).run(make_requests(count=1), STOP, 0))) == 1
    assert server.served == 3


def test_a_request_that_keeps_failing_stops_the_run(fakes):
    (server,) = fakes(1)
    server.statuses = [500] * 100
    with pytest.raises(SamplerError, match=r"failed 3 times.*HTTP 500: as told"):
        list(make_pool([server]).run(make_requests(count=1), STOP, 0))


def test_a_refused_request_is_not_tried_again(fakes):
    servers = fakes(2)
    servers[0].statuses = servers[1].statuses = [400]
    with pytest.raises(SamplerError, match=r"refused request \(1, 0, 0\): HTTP 400: as told"):
        list(make_pool(servers).run(make_requests(count=1), STOP, 0))
    assert servers[0].served + servers[1].served == 0


@pytest.mark.parametrize(
    ("label", "why"), [("default", "it was restarted"), ("b7/3", "another run updates it; each")]
)
def test_a_server_that_came_back_with_other_weights_is_lost(fakes, label, why):
    servers = fakes(2)
    servers[0].label = label
    servers[0].statuses = [500] * 100
    pool = make_pool(servers, drop_lost=True)
    assert len(list(pool.run(make_requests(count=8), STOP, 0))) == 8
    assert f"labelled {label!r}, not of this run: {why}" in pool.lost[servers[0].url]
    assert [server.url for server in pool.live()] == [servers[1].url]


def test_a_completion_of_another_version_stops_the_run(fakes):
    (server,) = fakes(1)
    server.label = "run/3"
    with pytest.raises(SamplerError, match=r"versions \[3\] where 2 was asked for"):
        list(make_pool([server]).run(make_requests(count=1), STOP, 2))


def test_unlabelled_tokens_are_of_the_servers_weights_if_these_stay(fakes):
    """vLLM before 0.32: its label is asked for after the completion."""
    (server,) = fakes(1)
    server.label, server.labels_tokens = "run/2", False
    completions = make_pool([server]).run(make_requests(count=2), STOP, 2)
    assert {(c.policy_version, c.policy_version_end) for c in completions} == {(2, 2)}


@pytest.mark.parametrize(
    "label, message",
    [("x/2", "now labelled 'x/2', not 2"), ("run/3", r"versions \[3\] where 2 was asked for")],
)
def test_unlabelled_tokens_of_a_server_with_other_weights_stop_the_run(fakes, label, message):
    (server,) = fakes(1)
    server.label, server.labels_tokens = label, False
    with pytest.raises(SamplerError, match=message):
        list(make_pool([server]).run(make_requests(count=1), STOP, 2))


def test_a_nan_logprob_from_a_server_stops_the_run(fakes):
    (server,) = fakes(1)
    server.logprob = -9999.0
    with pytest.raises(SamplerError, match="log-prob of token 0 is not finite"):
        list(make_pool([server]).run(make_requests(count=1), STOP, 0))


@pytest.mark.timeout(30)
def test_an_unexpected_error_reaches_the_caller(fakes, monkeypatch):
    """If it ended only its own task, the caller would wait forever."""
    (server,) = fakes(1)
    pool = make_pool([server])
    monkeypatch.setattr(VllmServer, "generate", lambda *_: server.no_such_thing)
    for count in (1, 8):
        with pytest.raises(AttributeError, match="no_such_thing"):
            list(pool.run(make_requests(count=count), STOP, 0))
    monkeypatch.undo()
    assert len(list(pool.run(make_requests(count=8), STOP, 0))) == 8


@pytest.mark.timeout(30)
@pytest.mark.parametrize("label", [3, None, ["run/3"]])
def test_a_server_whose_weight_label_is_not_text_is_lost(fakes, label):
    (server,) = fakes(1)
    server.label = label
    with pytest.raises(SamplerError, match=rf"{server.url} is lost: .*sampled by weights labelled"):
        list(make_pool([server]).run(make_requests(count=1), STOP, 3))


@pytest.mark.timeout(30)
def test_a_server_that_does_not_report_its_weights_is_lost(fakes, monkeypatch):
    """A proxy in its place may answer every request, but not as vLLM does."""
    (server,) = fakes(1)
    server.statuses = [500] * 100
    monkeypatch.setattr(VllmServer, "weight_label", lambda *_: {}["weight_version"])
    with pytest.raises(SamplerError, match=r"HTTP 500: as told; then .*KeyError"):
        list(make_pool([server]).run(make_requests(count=1), STOP, 0))


def test_a_server_that_is_gone_stops_or_is_dropped(fakes):
    servers = fakes(2)
    servers[0].stop()
    with pytest.raises(SamplerError, match=f"{servers[0].url} is lost: .*on_failure is stop"):
        list(make_pool(servers).run(make_requests(count=8), STOP, 0))
    pool = make_pool(servers, drop_lost=True)
    assert len(list(pool.run(make_requests(count=8), STOP, 0))) == 8
    servers[1].stop()
    with pytest.raises(SamplerError, match=f"the last vLLM server, {servers[1].url}, is lost"):
        list(pool.run(make_requests(count=8), STOP, 0))


def test_the_last_look_raises_what_a_watcher_found_meanwhile(fakes):
    """Both ask a server at the same time, and the watcher is the first to have the answer."""
    (server,) = fakes(1)
    server.label = "other/0"
    pool = make_pool([server])

    async def look() -> None:
        dispatcher = Dispatcher(pool, STOP, tuple, print, print, version=0)
        dispatcher.servers[server.url].down = "a request failed"
        await asyncio.wait([dispatcher.failure])
        assert dispatcher.failure.exception() is not None
        try:
            await dispatcher.settle()
        finally:
            await dispatcher.close()

    with pytest.raises(SamplerError, match="labelled 'other/0', not of this run"):
        block_on(look())


@pytest.mark.slow
@pytest.mark.timeout(30)
def test_a_completion_may_take_as_long_as_the_server_generates(fakes):
    servers = fakes(2)
    servers[0].seconds = 2.5
    pool = make_pool(servers, request_timeout_seconds=0.4)
    assert len(list(pool.run(make_requests(count=3), STOP, 0))) == 3
    assert pool.lost == {}, "neither the slow one nor the one that was idle meanwhile"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("drop_lost", [True, False])
def test_a_server_that_generates_nothing_for_too_long_is_lost(fakes, drop_lost):
    servers = fakes(2)
    servers[0].seconds, servers[0].generates = 8.0, False
    pool = make_pool(servers, request_timeout_seconds=0.4, drop_lost=drop_lost)
    started = time.monotonic()
    if drop_lost:
        assert len(list(pool.run(make_requests(count=6), STOP, 0))) == 6
    else:
        with pytest.raises(SamplerError, match=f"{servers[0].url} is lost: it generated no token"):
            list(pool.run(make_requests(count=6), STOP, 0))
    assert time.monotonic() - started < 6, "what waited for it was cut"
    assert list(pool.lost) == [servers[0].url]
    assert "no token for 0.4 s with 3 requests outstanding" in pool.lost[servers[0].url]


@pytest.mark.timeout(30)
def test_requests_that_wait_for_a_lost_server_are_given_to_others_at_once(fakes, monkeypatch):
    """One request finds that the server was restarted; the others there could wait forever."""
    servers = fakes(2)
    servers[0].statuses, servers[0].label, servers[0].seconds = [500], "default", 8.0
    monkeypatch.setattr(dispatcher, "MAX_RETRIES", 1)
    pool = make_pool(servers, drop_lost=True, request_timeout_seconds=60.0)
    started = time.monotonic()
    assert len(list(pool.run(make_requests(count=8), STOP, 0))) == 8
    assert time.monotonic() - started < 5
    assert list(pool.lost) == [servers[0].url]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_busy_server_with_a_slow_health_check_is_kept(fakes):
    (server,) = fakes(1)
    server.statuses, server.health_seconds = [503], 6.0
    pool = make_pool([server])
    assert len(list(pool.run(make_requests(count=1), STOP, 0))) == 1
    assert pool.lost == {}


def test_no_token_counter_differs_from_a_count_of_zero(fakes):
    (server,) = fakes(1)
    client = VllmServer(server.url, "run")
    assert block_on(client.generated_tokens(5.0)) == 0.0
    server.generates = None
    assert block_on(client.generated_tokens(5.0)) is None


def test_an_abandoned_iterator_cancels_its_requests(fakes):
    (server,) = fakes(1)
    server.seconds = 0.05
    iterator = make_pool([server]).run(make_requests(count=16), STOP, 0)
    next(iterator)
    server.seconds = 1.0
    time.sleep(0.2)
    started = time.monotonic()
    iterator.close()
    assert block_on(other_tasks()) == 0
    assert time.monotonic() - started < 0.5, "requests are cancelled, not waited for"
    while server.in_flight:
        time.sleep(0.05)
    assert server.served < 16
    assert server.hung_up == 4, "vLLM aborts a request whose connection is closed"


def test_a_finished_run_leaves_no_task(fakes):
    servers = fakes(2)
    iterator = make_pool(servers).run(make_requests(count=8), STOP, 0)
    assert len([next(iterator) for _ in range(8)]) == 8
    assert block_on(other_tasks()) == 0, "also while the iterator is still open"


def test_completions_share_connections_and_control_requests_do_not(fakes):
    (server,) = fakes(1)
    assert len(list(make_pool([server]).run(make_requests(count=24), STOP, 0))) == 24
    assert server.connections == 4, "as many as requests in flight"
    client = HttpClient(server.url)
    for _ in range(3):
        client.get("/weight_info", 5.0)
    assert server.connections == 4 + 3


def test_a_completion_survives_that_the_server_closes_the_kept_connection(fakes):
    (server,) = fakes(1)
    pool = make_pool([server])
    assert len(list(pool.run(make_requests(count=8), STOP, 0))) == 8
    server.close_connections()
    assert len(list(pool.run(make_requests(count=8), STOP, 0))) == 8


def test_http_errors_are_distinguished(fakes):
    (server,) = fakes(1)
    client = HttpClient(server.url)
    body = {"sampling_params": {"seed": 0}}
    server.statuses = [404]
    with pytest.raises(Refused, match="HTTP 404: as told"):
        client.post("/inference/v1/generate", body, 5.0)
    server.seconds = 2.0
    with pytest.raises(Unreachable, match=r"within 0\.2 s"):
        client.post("/inference/v1/generate", body, 0.2)
    server.seconds = 0.0
    assert client.get("/weight_info", 5.0) == {"weight_version": "run/0"}
    server.stop()
    with pytest.raises(Unreachable):
        client.get("/health", 1.0)
    with pytest.raises(ValueError, match="not a URL"):
        HttpClient("10.0.0.5:8000")
