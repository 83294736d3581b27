"""Rolling weight updates on fake servers: one after the other, kept for those that come later."""

import re
import time
from collections.abc import Iterator

import pytest
from fake_policy_server import FakePolicyServer
from small_runs.asynchronous import async_recipe
from tiny_policy import changed, make_requests, named_tensors, save_policy, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import SamplerError
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.server.rolling import KEEPER_SECONDS, RollingServerSampler
from grpo_replay.sampling.server.sampler import VllmServerSampler
from grpo_replay.tiny import BASE_DIR


@pytest.fixture
def servers() -> Iterator[list[FakePolicyServer]]:
    pair = [FakePolicyServer(), FakePolicyServer()]
    yield pair
    for server in pair:
        server.stop()


@pytest.fixture
def policy(tmp_path):
    return save_policy(tmp_path / "policy", tie=True)


def open_sampler(urls: list[str], sync_folder, **servers) -> RollingServerSampler:
    section = {"sampling": {"servers": {"weight_transfer": str(sync_folder), **servers}}}
    return RollingServerSampler.open(
        SamplerOpening.of(async_recipe(urls, section), str(BASE_DIR), Comm())
    )


@pytest.fixture
def sampler(servers, tmp_path) -> Iterator[RollingServerSampler]:
    opened = open_sampler([server.url for server in servers], tmp_path / "sync")
    yield opened
    opened.close()


def wait_until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


UPDATE = ["pause", "updating", "reload_weights", "reset_prefix_cache", "version", "resume"]


def words(server: FakePolicyServer) -> list[str]:
    """The control calls since the sampler was open, labels by what they say."""
    start = server.calls.index("pause")
    labels = {True: "updating", False: "version"}
    return [
        labels[call.endswith("/updating")] if "/" in call else call for call in server.calls[start:]
    ]


def test_an_update_pauses_empties_the_cache_labels_and_confirms(sampler, servers, policy):
    """NeMo-RL#4018: a prefix cache that survives an update answers with the old policy."""
    sampler.load_weights(named_tensors(changed(policy, 1)), 1)
    for server in servers:
        assert words(server) == [*UPDATE, *UPDATE]  # version 0 at the opening, then version 1
        assert server.label.endswith("/1")


def test_everything_is_gathered_before_anything_is_sent(sampler, servers, policy):
    """trl#7103: gathers between sends hang with more than one rank."""
    seen = [len(server.calls) for server in servers]
    gathered = 0

    def gather():
        nonlocal gathered
        for pair in named_tensors(changed(policy, 2)):
            assert [len(server.calls) for server in servers] == seen
            gathered += 1
            yield pair

    sampler.load_weights(gather(), 1)
    assert gathered > 20
    assert all(len(server.calls) > count for server, count in zip(servers, seen, strict=True))


def test_servers_are_updated_one_after_the_other(sampler, servers, policy):
    """At any time at most one of them is paused."""
    paused: set[str] = set()
    most = 0
    for server in servers:
        original = server.control

        def control(path, body, server=server, original=original):
            nonlocal most
            paused.add(server.url) if path.startswith("/pause") else None
            paused.discard(server.url) if path == "/resume" else None
            most = max(most, len(paused))
            return original(path, body)

        server.control = control
    sampler.load_weights(named_tensors(changed(policy, 3)), 1)
    assert most == 1


def test_the_last_staged_version_stays_until_the_next_is_published(
    sampler, servers, policy, tmp_path
):
    def staged() -> list[str]:
        return sorted(path.name for path in (tmp_path / "sync").glob("*/version-*"))

    assert staged() == ["version-0"]
    sampler.load_weights(named_tensors(changed(policy, 4)), 1)
    assert staged() == ["version-1"]
    sampler.close()
    assert staged() == []


def test_a_server_that_fails_to_load_has_no_version_and_the_other_goes_on(sampler, servers, policy):
    told = {}
    sampler.on_switch = told.__setitem__
    servers[0].load_status = 500
    sampler.load_weights(named_tensors(changed(policy, 5)), 1)
    assert servers[0].label.endswith("/updating")
    assert servers[1].label.endswith("/1")
    assert told == {servers[0].url: None, servers[1].url: 1}
    servers[0].load_status = 200  # what was wrong is mended: the keeper brings version 1
    assert wait_until(lambda: servers[0].label.endswith("/1"))
    assert servers[0].loaded[-1] == "version-1"


def test_a_server_that_was_restarted_gets_the_newest_version(sampler, servers, policy):
    sampler.load_weights(named_tensors(changed(policy, 6)), 1)
    port = int(servers[0].url.rsplit(":", 1)[1])
    servers[0].stop()
    sampler.load_weights(named_tensors(changed(policy, 7)), 2)
    assert servers[1].label.endswith("/2")
    servers[0] = FakePolicyServer(port)
    assert wait_until(lambda: servers[0].label.endswith("/2"))
    assert servers[0].loaded == ["version-2"]
    sampler.load_weights(named_tensors(changed(policy, 8)), 3)
    assert {server.label.rsplit("/")[-1] for server in servers} == {"3"}


def test_a_server_may_come_later_but_one_must_be_there(servers, tmp_path):
    port = int(servers[1].url.rsplit(":", 1)[1])
    servers[1].stop()
    opened = open_sampler([server.url for server in servers], tmp_path / "sync")
    try:
        servers[1] = FakePolicyServer(port)
        assert wait_until(lambda: servers[1].label.endswith("/0"))
    finally:
        opened.close()
    urls = [server.url for server in servers]
    for server in servers:
        server.stop()
    with pytest.raises(SamplerError, match="none of the vLLM servers answers"):
        open_sampler(urls, tmp_path / "other")


def test_on_failure_stop_ends_the_run_at_an_update(servers, policy, tmp_path):
    urls = [server.url for server in servers]
    opened = open_sampler(urls, tmp_path / "sync", on_failure="stop")
    servers[0].load_status = 500
    try:
        with pytest.raises(SamplerError, match="on_failure is stop"):
            opened.load_weights(named_tensors(changed(policy, 9)), 1)
    finally:
        opened.close()


@pytest.mark.slow
def test_a_server_that_is_back_during_an_update_gets_the_new_version(sampler, servers, policy):
    """It still has the label of the version that the sampler holds until the update is complete."""
    old, port = servers[0].label, int(servers[0].url.rsplit(":", 1)[1])
    servers[0].stop()
    load = servers[1].control

    def slowly(path, body):
        if path.startswith("/collective_rpc") and body["method"] == "reload_weights":
            servers[0] = FakePolicyServer(port)
            servers[0].label = old
            time.sleep(3 * KEEPER_SECONDS)
        return load(path, body)

    servers[1].control = slowly
    sampler.load_weights(named_tensors(changed(policy, 10)), 1)
    assert wait_until(lambda: servers[0].label.endswith("/1"))
    assert servers[0].loaded == ["version-1"]


@pytest.mark.slow
def test_an_evaluation_goes_on_when_its_only_server_is_back(tmp_path):
    server = FakePolicyServer(seconds=0.3)
    opened = open_sampler([server.url], tmp_path / "sync", max_in_flight=1)
    completions = opened.generate(make_requests(count=6))
    found = [next(completions)]
    server.stop()
    server = FakePolicyServer(int(server.url.rsplit(":", 1)[1]))
    try:
        found += completions
        assert len({completion.key for completion in found}) == 6
    finally:
        opened.close()
        server.stop()


@pytest.mark.slow
def test_an_evaluation_that_is_left_alone_ends_with_a_message(tmp_path):
    server = FakePolicyServer(seconds=0.3)
    limits = {"max_in_flight": 1, "request_timeout_seconds": 2.0}
    opened = open_sampler([server.url], tmp_path / "sync", **limits)
    completions = opened.generate(make_requests(count=6))
    next(completions)
    server.stop()
    try:
        with pytest.raises(SamplerError, match=r"no vLLM server came back for 2 s"):
            list(completions)
    finally:
        opened.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_that_splits_prompts_is_refused_on_a_cpu(servers, tmp_path, device):
    """vLLM 0.32 would die as soon as it splits the prompt of a seeded request."""
    servers[1].device, servers[1].splits_prompts = device, True
    urls = [server.url for server in servers]
    if device == "cuda":
        open_sampler(urls, tmp_path / "sync").close()
        return
    with pytest.raises(SamplerError, match="dies on a CPU: --no-enable-chunked-prefill; start it"):
        open_sampler(urls, tmp_path / "sync")


@pytest.mark.parametrize(
    "version, message",
    [("0.26.0", "does not keep a label of its weights"), ("0.31.0+cpu", "run.mode async needs")],
)
def test_a_server_of_an_older_vllm_is_refused(servers, tmp_path, version, message):
    servers[1].vllm_version = version
    with pytest.raises(SamplerError, match=f"it runs vLLM {re.escape(version)}, .*{message}"):
        open_sampler([server.url for server in servers], tmp_path / "sync")


@pytest.mark.parametrize("version", ["0.27.1", "0.31.0", "0.32.0", "0.33.0", "dev"])
def test_a_synchronous_run_takes_an_older_vllm_and_says_what_is_asked_instead(
    servers, policy, tmp_path, caplog, version
):
    labels_tokens = version not in ("0.27.1", "0.31.0")
    for server in servers:
        server.vllm_version, server.labels_tokens = version, labels_tokens
    section = {"urls": [each.url for each in servers], "weight_transfer": str(tmp_path / "sync")}
    recipe = tiny_recipe(BASE_DIR, backend="vllm_server", servers=section)
    opened = VllmServerSampler.open(SamplerOpening.of(recipe, str(BASE_DIR), Comm()))
    try:
        opened.load_weights(named_tensors(policy.model), 1)
        completions = list(opened.generate(make_requests(count=8)))
    finally:
        opened.close()
    assert {each.policy_version for each in completions} == {1}
    assert ("its label is asked for after every completion" in caplog.text) != labels_tokens
