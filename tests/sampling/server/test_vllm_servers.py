"""The HTTP sampler against real vLLM servers on loopback: two that stay, and what can go wrong."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

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
    changed,
    gaps,
    logprobs_of,
    make_requests,
    push,
    save_policy,
)

from grpo_replay.errors import ServersLost
from grpo_replay.sampling.server.routes import background_loop, block_on
from grpo_replay.sampling.server.sampler import VllmServerSampler
from grpo_replay.sampling.server.server_process import LaunchedServer
from grpo_replay.types import Completion

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


def test_a_partial_rollout_has_the_log_probs_of_the_weights_that_sampled_each_token(tied, pair):
    """It runs while the weights change. In its second part, keys of the old ones would be seen."""
    with http_sampler(tied, pair[:1]) as sampler:
        client, old = sampler.servers.all[0], tied.model
        request = replace(make_requests(count=1)[0], max_tokens=200)
        for seed in range(40, 50):  # one may end before the update
            before = block_on(client.generated_tokens(30))
            answer = asyncio.run_coroutine_threadsafe(
                client.generate(request, ()), background_loop()
            )
            assert wait_for(lambda b=before: block_on(client.generated_tokens(30)) > b + 9, 30)
            new = changed(tied, seed)
            push(sampler, new)
            choice = answer.result(60)
            if len(choice.weight_versions) == 2:
                break
            old = new
    first, second = choice.weight_versions
    assert (first.start, first.end, second.end) == (0, second.start, 200)
    tokens = np.array(choice.token_ids, np.int32)
    found = np.array([each.logprob for each in choice.logprobs.content])
    completion = Completion(request.key, tokens, found.astype(np.float32), "length", 0, 1)
    by_old, by_new = (logprobs_of(model, request, completion) for model in (old, new))
    own = np.concatenate([by_old[: first.end], by_new[first.end :]])
    assert np.abs(found - own).max() < 1e-4
    assert np.abs(by_old - by_new)[first.end :].max() > 0.1, "it would be seen"


def test_weights_travel_in_several_files_and_leave_nothing_behind(tied, pair, tmp_path):
    with http_sampler(tied, pair, weight_transfer=str(tmp_path)) as sampler:
        sampler._files._bucket_bytes = 20_000
        written = []
        stage = sampler._files.stage

        def watch(*arguments):
            stage(*arguments)
            written.extend(tmp_path.rglob("*.safetensors"))

        sampler._files.stage = watch
        model = changed(tied, 35)
        push(sampler, model)
        requests = make_requests()
        assert gaps(model, requests, list(sampler.generate(requests))).max() < 1e-4
        assert len(written) > 3
        assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.iterdir())


def test_the_other_server_takes_over_from_one_that_hangs(tied, pair):
    with http_sampler(tied, pair, request_timeout_seconds=20) as sampler:
        requests = make_requests(count=48)
        with frozen(pair[1]):
            started = time.monotonic()
            completions = list(sampler.generate(requests))
            assert time.monotonic() - started < 90
            assert list(sampler.servers.lost) == [pair[1].url]
            version = push(sampler, changed(tied, 37))
            assert {c.policy_version for c in sampler.generate(requests)} == {version}
        assert gaps(tied.model, requests, completions).max() < 1e-4


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
    with http_sampler(tied, pair) as sampler:
        requests = make_requests(count=64)
        iterator = sampler.generate(requests)
        completions = [next(iterator)]
        kill_server(pair[1])
        completions += list(iterator)
        assert gaps(tied.model, requests, completions).max() < 1e-4
        push(sampler, changed(tied, 39))
        assert len(list(sampler.generate(requests))) == 64
        assert list(sampler.servers.lost) == [pair[1].url]
    assert wait_for(lambda: not group_members(pair[1].guard.pid), seconds=30)
    with http_sampler(tied, pair[:1]) as sampler:
        iterator = sampler.generate(make_requests(count=400))  # not over before the kill
        next(iterator)
        kill_server(pair[0])
        started = time.monotonic()
        with pytest.raises(ServersLost, match=pair[0].url):
            list(iterator)
        assert time.monotonic() - started < 30
    assert wait_for(lambda: not group_members(pair[0].guard.pid), seconds=30)
