"""Rolling weight updates on fake servers: one after the other, kept for those that come later."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_policy_server import FakePolicyServer
from small_runs.asynchronous import async_recipe
from tiny_policy import changed, make_requests, named_tensors, push

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import SamplerError
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.server.rolling import KEEPER_SECONDS, RollingServerSampler
from grpo_replay.sampling.server.routes import VllmServer
from grpo_replay.sampling.server.weight_transfer import switch_server
from grpo_replay.tiny import BASE_DIR


def open_sampler(urls: Sequence[str], sync_folder: Path, **servers: object) -> RollingServerSampler:
    section = {"sampling": {"servers": {"weight_transfer": str(sync_folder), **servers}}}
    return RollingServerSampler.open(
        SamplerOpening.of(async_recipe(urls, section), str(BASE_DIR), Comm())
    )


@pytest.fixture(scope="module")
def rolling(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """Two servers, a sampler on them, and the folder through which weights go. A test may replace a
    server by another one on its port."""
    folder = tmp_path_factory.mktemp("sync")
    servers = [FakePolicyServer(), FakePolicyServer()]
    sampler = open_sampler([server.url for server in servers], folder)
    yield SimpleNamespace(servers=servers, sampler=sampler, folder=folder)
    sampler.close()
    for server in servers:
        server.stop()


def port_of(server: FakePolicyServer) -> int:
    return int(server.url.rsplit(":", 1)[1])


def has_version(server: FakePolicyServer, version: int) -> bool:
    return server.label.endswith(f"/{version}")


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_everything_is_gathered_before_anything_is_sent(rolling, tied):
    """trl#7103: gathers between sends hang with more than one rank."""
    servers, sampler = rolling.servers, rolling.sampler
    seen = [len(server.calls) for server in servers]
    gathered = 0

    def gather():
        nonlocal gathered
        for pair in named_tensors(changed(tied, 2)):
            assert [len(server.calls) for server in servers] == seen
            gathered += 1
            yield pair

    sampler.load_weights(gather(), sampler.policy_version + 1)
    assert gathered > 20
    assert all(len(server.calls) > count for server, count in zip(servers, seen, strict=True))


def test_servers_are_updated_one_after_the_other(rolling, tied, monkeypatch):
    """At any time at most one of them is paused."""
    paused: set[str] = set()
    most = 0
    for server in rolling.servers:

        def control(path, body, server=server, original=server.control):
            nonlocal most
            paused.add(server.url) if path.startswith("/pause") else None
            paused.discard(server.url) if path == "/resume" else None
            most = max(most, len(paused))
            return original(path, body)

        monkeypatch.setattr(server, "control", control)
    version = push(rolling.sampler, changed(tied, 3))
    assert most == 1
    assert all(has_version(server, version) for server in rolling.servers)
    staged = [path.name for path in rolling.folder.glob("*/version-*")]
    assert staged == [f"version-{version}"], "for servers that come later"


def test_a_server_that_fails_to_load_has_no_version_and_the_other_goes_on(
    rolling, tied, monkeypatch
):
    servers, told = rolling.servers, {}
    monkeypatch.setattr(rolling.sampler, "on_switch", told.__setitem__)
    servers[0].load_status = 500
    version = push(rolling.sampler, changed(tied, 5))
    assert servers[0].label.endswith("/updating") and has_version(servers[1], version)
    assert told == {servers[0].url: None, servers[1].url: version}
    servers[0].load_status = 200  # what was wrong is mended: the keeper brings the version
    assert wait_until(lambda: has_version(servers[0], version))


def test_a_server_that_was_restarted_gets_the_newest_version(rolling, tied):
    servers, sampler = rolling.servers, rolling.sampler
    servers[0].stop()
    version = push(sampler, changed(tied, 7))
    assert has_version(servers[1], version)
    servers[0] = FakePolicyServer(port_of(servers[0]))
    assert wait_until(lambda: has_version(servers[0], version))
    assert servers[0].loaded == [f"version-{version}"]
    version = push(sampler, changed(tied, 8))
    assert all(has_version(server, version) for server in servers)


def test_a_server_may_come_later_but_one_must_be_there(tmp_path):
    first, second = FakePolicyServer(), FakePolicyServer()
    urls = [first.url, second.url]
    second.stop()
    opened = open_sampler(urls, tmp_path / "sync")
    try:
        second = FakePolicyServer(port_of(second))
        assert wait_until(lambda: has_version(second, 0))
    finally:
        opened.close()
    assert not list((tmp_path / "sync").iterdir()), "nothing stays behind"
    first.stop()
    second.stop()
    with pytest.raises(SamplerError, match="none of the vLLM servers answers"):
        open_sampler(urls, tmp_path / "other")


def test_a_server_whose_prompt_cache_is_not_emptied_has_not_the_new_version():
    server = FakePolicyServer()
    server.label, control = "run/0", server.control

    def failing(path, body):
        return (200, {"success": False}) if "reset_prefix" in path else control(path, body)

    server.control = failing
    try:
        assert switch_server(VllmServer(server.url, "run"), lambda _: None, 1, 5.0)
        assert server.label == "run/updating"
    finally:
        server.stop()


@pytest.mark.slow
def test_a_server_that_is_back_during_an_update_gets_the_new_version(rolling, tied, monkeypatch):
    """It still has the label of the version that the sampler holds until the update is complete."""
    servers = rolling.servers
    old, port = servers[0].label, port_of(servers[0])
    servers[0].stop()
    load = servers[1].control

    def slowly(path, body):
        if path.startswith("/collective_rpc") and body["method"] == "reload_weights":
            servers[0] = FakePolicyServer(port)
            servers[0].label = old
            time.sleep(3 * KEEPER_SECONDS)
        return load(path, body)

    monkeypatch.setattr(servers[1], "control", slowly)
    version = push(rolling.sampler, changed(tied, 10))
    assert wait_until(lambda: has_version(servers[0], version))


@pytest.mark.slow
def test_an_evaluation_goes_on_when_its_only_server_is_back(tmp_path):
    server = FakePolicyServer(seconds=0.3)
    opened = open_sampler([server.url], tmp_path / "sync", max_in_flight=1)
    completions = opened.generate(make_requests(count=6))
    found = [next(completions)]
    server.stop()
    server = FakePolicyServer(port_of(server))
    try:
        found += completions
        assert len({completion.key for completion in found}) == 6
    finally:
        opened.close()
        server.stop()
