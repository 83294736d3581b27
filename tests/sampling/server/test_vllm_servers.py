"""The HTTP sampler against real vLLM servers on loopback: two that stay, and what can go wrong."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_helpers import (
    free_ports,
    frozen,
    group_members,
    http_sampler,
    kill_server,
    launch,
    wait_for,
)
from tiny_policy import (
    Policy,
    by_key,
    changed,
    gaps,
    long_prompt_requests,
    make_requests,
    named_tensors,
    push,
    save_policy,
    tiny_recipe,
)

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import SamplerError
from grpo_replay.recipe import Recipe
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.server.routes import block_on
from grpo_replay.sampling.server.sampler import VllmServerSampler
from grpo_replay.sampling.server.server_process import LaunchedServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[2] / "support" / "server_run_program.py"


@pytest.fixture(scope="module")
def pair(tied: Policy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LaunchedServer]]:
    """Two servers, started from weights that no test expects: whoever opens a sampler on their
    URLs must bring them the policy's."""
    foreign = save_policy(tmp_path_factory.mktemp("foreign"), tie=True, seed=99)
    servers = launch(foreign.folder, tmp_path_factory.mktemp("logs"), count=2)
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def sampler(tied: Policy, pair: Sequence[LaunchedServer]) -> Iterator[VllmServerSampler]:
    with http_sampler(tied, pair) as opened:
        yield opened


def test_two_servers_match_the_policy_after_every_sync(tied, sampler):
    """First they hold other weights, then those that the sampler opened with, then two pushes."""
    requests = make_requests()
    completions = list(sampler.generate(requests))
    assert gaps(tied.model, requests, completions).max() < 1e-4
    assert {c.policy_version for c in completions} == {0}
    for seed in (31, 32):
        model = changed(tied, seed)
        version = push(sampler, model)
        completions = list(sampler.generate(requests))
        assert gaps(model, requests, completions).max() < 1e-4
        assert {(c.policy_version, c.policy_version_end) for c in completions} == {
            (version, version)
        }


def test_completions_equal_those_of_the_in_process_engine(tied, tied_sampler, sampler):
    push(tied_sampler, tied.model)
    requests = make_requests(count=32, temperature=0.9)
    expected = by_key(list(tied_sampler.generate(requests)))
    for completion in sampler.generate(requests):
        other = expected[completion.key]
        np.testing.assert_array_equal(completion.token_ids, other.token_ids)
        np.testing.assert_allclose(completion.sampler_logprobs, other.sampler_logprobs, atol=1e-5)
        assert completion.finish_reason == other.finish_reason


def test_a_cached_prompt_of_the_old_policy_is_not_reused(tied, sampler):
    requests = long_prompt_requests()
    for seed in (33, 34):
        model = changed(tied, seed)
        push(sampler, model)
        for _ in range(2):
            assert gaps(model, requests, list(sampler.generate(requests))).max() < 1e-4


def test_weights_travel_in_several_files_and_leave_nothing_behind(tied, pair, tmp_path):
    with http_sampler(tied, pair, weight_transfer=str(tmp_path)) as sampler:
        sampler._transfer._bucket_bytes = 20_000
        written = []
        stage = sampler._transfer.stage

        def watch(*arguments):
            stage(*arguments)
            written.extend(tmp_path.rglob("*.safetensors"))

        sampler._transfer.stage = watch
        model = changed(tied, 35)
        push(sampler, model)
        requests = make_requests()
        assert gaps(model, requests, list(sampler.generate(requests))).max() < 1e-4
        assert len(written) > 3
        assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.iterdir())


def test_a_partial_sync_reaches_no_server(tied, sampler):
    model = changed(tied, 36)
    pairs = [(n, t) for n, t in named_tensors(model) if n != "lm_head.weight"]
    labels = [block_on(server.weight_label()) for server in sampler._pool.servers]
    with pytest.raises(SamplerError, match=r"missing tensor lm_head\.weight"):
        sampler.load_weights(pairs, 1)
    assert [block_on(server.weight_label()) for server in sampler._pool.servers] == labels
    with pytest.raises(SamplerError, match="version 1 was left incomplete"):
        sampler.generate(make_requests(count=1))
    push(sampler, model)
    requests = make_requests()
    assert gaps(model, requests, list(sampler.generate(requests))).max() < 1e-4


def test_weights_of_another_run_are_detected(sampler):
    sampler._pool.servers[0].set_weight_label("other/0")
    with pytest.raises(SamplerError, match=r"labelled \['other/0'\], not of this run"):
        list(sampler.generate(make_requests()))


def test_a_server_with_another_model_is_refused(tmp_path, pair):
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    other = save_policy(tmp_path, tie=False, hidden_size=96, **layers)
    with pytest.raises(SamplerError) as caught, http_sampler(other, pair):
        pass
    message = str(caught.value)
    assert pair[0].url in message
    assert "has hidden size 64, not 96" in message
    assert "has number of layers 3, not 2" in message
    assert "has vocabulary" not in message


def test_a_server_with_other_settings_is_refused(tied, pair):
    with pytest.raises(SamplerError, match="its dtype is float32, not bfloat16"):
        recipe = _recipe(tied, pair, vllm={"dtype": "bfloat16"})
        VllmServerSampler.open(SamplerOpening.of(recipe, str(tied.folder), Comm()))
    with pytest.raises(SamplerError, match="its longest sequence is 224, not 400"):
        recipe = _recipe(tied, pair, vllm={"max_model_len": 400})
        VllmServerSampler.open(SamplerOpening.of(recipe, str(tied.folder), Comm()))


def test_an_unreachable_server_is_an_error(tied, pair):
    urls = [pair[0].url, f"http://127.0.0.1:{free_ports(1)[0]}"]
    with pytest.raises(SamplerError, match=f"{urls[1]} cannot be reached"):
        recipe = tiny_recipe(tied.folder, backend="vllm_server", servers={"urls": urls})
        VllmServerSampler.open(SamplerOpening.of(recipe, str(tied.folder), Comm()))


def test_a_taken_port_is_an_error_that_names_it(tied):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        servers = {"launch": 1, "address": f"127.0.0.1:{port}"}
        recipe = tiny_recipe(tied.folder, backend="vllm_server", servers=servers)
        with pytest.raises(SamplerError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            VllmServerSampler.open(SamplerOpening.of(recipe, str(tied.folder), Comm()))


def test_the_other_server_takes_over_from_one_that_hangs(tied, pair):
    with http_sampler(tied, pair, on_failure="drop", request_timeout_seconds=20) as sampler:
        requests = make_requests(count=48)
        with frozen(pair[1]):
            started = time.monotonic()
            completions = list(sampler.generate(requests))
            assert time.monotonic() - started < 90
            assert list(sampler._pool.lost) == [pair[1].url]
            version = push(sampler, changed(tied, 37))
            assert {c.policy_version for c in sampler.generate(requests)} == {version}
        assert gaps(tied.model, requests, completions).max() < 1e-4


def test_a_server_that_hangs_stops_the_run_in_time(tied, pair):
    with http_sampler(tied, pair, request_timeout_seconds=5) as sampler, frozen(pair[1]):
        started = time.monotonic()
        with pytest.raises(
            SamplerError, match=rf"{pair[1].url} is lost: it generated no token for 5 s"
        ):
            list(sampler.generate(make_requests(count=48)))
        assert time.monotonic() - started < 30


@pytest.mark.parametrize("on_failure", ["stop", "drop"])
def test_a_server_that_does_not_take_a_version_is_not_used(tied, pair, on_failure):
    settings = {"on_failure": on_failure, "request_timeout_seconds": 12}
    with http_sampler(tied, pair, **settings) as sampler:
        model = changed(tied, 38)
        with frozen(pair[0]):
            if on_failure == "stop":
                with pytest.raises(SamplerError, match="it did not take policy version 1"):
                    push(sampler, model)
                with pytest.raises(SamplerError, match="version 1 was left incomplete"):
                    sampler.generate(make_requests(count=1))
                return
            push(sampler, model)
        requests = make_requests()
        completions = list(sampler.generate(requests))
        assert list(sampler._pool.lost) == [pair[0].url]
        assert gaps(model, requests, completions).max() < 1e-4


def test_a_killed_trainer_leaves_no_server_behind(tied, tmp_path):
    (port,) = free_ports(1)
    trainer = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(tied.folder), str(port), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        guard = int(trainer.stdout.readline())
        assert len(group_members(guard)) >= 3, "guard, API server and engine"
        trainer.kill()
        assert wait_for(lambda: not group_members(guard), seconds=30)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def test_a_server_killed_during_a_step_is_replaced_and_the_last_one_stops_the_run(tied, pair):
    """Last: the pair is gone afterwards."""
    with http_sampler(tied, pair, on_failure="drop") as sampler:
        requests = make_requests(count=64)
        iterator = sampler.generate(requests)
        completions = [next(iterator)]
        kill_server(pair[1])
        completions += list(iterator)
        assert gaps(tied.model, requests, completions).max() < 1e-4
        push(sampler, changed(tied, 39))
        assert len(list(sampler.generate(requests))) == 64
        assert list(sampler._pool.lost) == [pair[1].url]
    assert wait_for(lambda: not group_members(pair[1].guard.pid), seconds=30)
    with http_sampler(tied, pair[:1]) as sampler:
        iterator = sampler.generate(make_requests(count=400))  # not over before the kill
        next(iterator)
        kill_server(pair[0])
        started = time.monotonic()
        with pytest.raises(SamplerError, match=f"{pair[0].url} is lost"):
            list(iterator)
        assert time.monotonic() - started < 30
    assert wait_for(lambda: not group_members(pair[0].guard.pid), seconds=30)


def _recipe(policy: Policy, pair: Sequence[LaunchedServer], **sampling: Any) -> Recipe:
    urls = {"urls": [server.url for server in pair]}
    return tiny_recipe(policy.folder, backend="vllm_server", servers=urls, **sampling)
