"""Weight updates on fake servers: one after the other, and for those that were lost, too."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_policy_server import FakePolicyServer
from server_helpers import open_sampler
from small_runs.asynchronous import async_recipe
from tiny_policy import changed, make_requests, named_tensors, push

from grpo_replay.errors import ServersLost
from grpo_replay.sampling.server.push import switch_server
from grpo_replay.sampling.server.routes import VllmServer
from grpo_replay.sampling.server.sampler import VllmServerSampler


def sampler_on(urls: Sequence[str], sync_folder: Path, **servers: object) -> VllmServerSampler:
    section = {"sampling": {"servers": {"weight_transfer": str(sync_folder), **servers}}}
    return open_sampler(async_recipe(urls, section))


@pytest.fixture(scope="module")
def rolling(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """Two servers, a sampler on them, and the folder through which weights go. A test may replace a
    server by another one on its port."""
    folder = tmp_path_factory.mktemp("sync")
    servers = [FakePolicyServer(), FakePolicyServer()]
    sampler = sampler_on([server.url for server in servers], folder)
    yield SimpleNamespace(servers=servers, sampler=sampler, folder=folder)
    sampler.close()
    for server in servers:
        server.stop()


def port_of(server: FakePolicyServer) -> int:
    return int(server.url.rsplit(":", 1)[1])


def has_version(server: FakePolicyServer, version: int) -> bool:
    return server.label.endswith(f"/{version}")


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
    assert not list(rolling.folder.glob("*/version-*"))


def test_a_server_that_fails_to_load_has_no_version_and_the_other_goes_on(
    rolling, tied, monkeypatch
):
    servers, told = rolling.servers, {}
    monkeypatch.setattr(rolling.sampler.pusher, "on_switch", told.__setitem__)
    servers[0].load_status = 500
    version = push(rolling.sampler, changed(tied, 5))
    assert servers[0].label.endswith("/updating") and has_version(servers[1], version)
    assert told == {servers[0].url: None, servers[1].url: version}
    servers[0].load_status = 200  # what was wrong is mended
    version = push(rolling.sampler, changed(tied, 6))
    assert has_version(servers[0], version) and told[servers[0].url] == version


def test_a_server_that_was_restarted_is_used_again_from_the_next_version_on(rolling, tied):
    servers, sampler = rolling.servers, rolling.sampler
    servers[0].stop()
    version = push(sampler, changed(tied, 7))
    assert list(sampler.servers.lost) == [servers[0].url]
    assert has_version(servers[1], version)
    servers[0] = FakePolicyServer(port_of(servers[0]))
    version = push(sampler, changed(tied, 8))
    assert sampler.servers.lost == {} and all(has_version(server, version) for server in servers)
    assert servers[0].loaded == [f"version-{version}"]


def test_a_server_that_came_back_with_other_settings_is_not_used(rolling, tied):
    """Nobody had noticed that it was away."""
    servers, sampler = rolling.servers, rolling.sampler
    servers[0].stop()
    servers[0] = FakePolicyServer(port_of(servers[0]))
    servers[0].settings["model_config"]["logprobs_mode"] = "raw_logprobs"
    version = push(sampler, changed(tied, 9))
    assert "raw_logprobs" in sampler.servers.lost[servers[0].url]
    assert servers[0].loaded == [] and has_version(servers[1], version)
    servers[0].settings["model_config"]["logprobs_mode"] = "processed_logprobs"
    assert has_version(servers[0], push(sampler, changed(tied, 10)))


def test_an_update_that_no_server_takes_ends_what_is_sampled_next(rolling, tied):
    """The update itself does not end the run: the step is whole first, for the checkpoint."""
    servers, sampler = rolling.servers, rolling.sampler
    for server in servers:
        server.load_status = 500
    push(sampler, changed(tied, 11))
    with pytest.raises(ServersLost, match=servers[0].url):
        list(sampler.generate(make_requests(count=1)))
    for server in servers:
        server.load_status = 200
    push(sampler, changed(tied, 12))
    assert len(list(sampler.generate(make_requests(count=4)))) == 4


def test_a_server_may_come_later_but_one_must_be_there(tied, tmp_path):
    first, second = FakePolicyServer(), FakePolicyServer()
    urls = [first.url, second.url]
    second.stop()
    opened = sampler_on(urls, tmp_path / "sync")
    try:
        second = FakePolicyServer(port_of(second))
        assert has_version(second, push(opened, tied.model))
    finally:
        opened.close()
    assert not list((tmp_path / "sync").iterdir()), "nothing stays behind"
    first.stop()
    second.stop()
    with pytest.raises(ServersLost, match=r"sampling\.servers\.urls"):
        sampler_on(urls, tmp_path / "other")


def test_a_server_whose_prompt_cache_is_not_emptied_has_not_the_new_version():
    server = FakePolicyServer()
    server.label, control = "run/0", server.control

    def failing(path, body):
        return (200, {"success": False}) if "reset_prefix" in path else control(path, body)

    server.control = failing
    try:
        assert switch_server(VllmServer(server.url, "run"), None, 1, 5.0)
        assert server.label == "run/updating"
    finally:
        server.stop()
