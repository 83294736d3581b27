"""Asynchronous runs with a real vLLM server: the tiny model learns from what it sampled itself."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from server_helpers import launch
from small_runs.asynchronous import async_recipe, replay_run, train_async_run
from small_runs.trained import same_weights
from tiny_policy import make_requests

from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.sampling.server.routes import Choice, VllmServer, background_loop
from grpo_replay.sampling.server.server_process import LaunchedServer
from grpo_replay.tiny import BASE_DIR

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LaunchedServer]:
    torch.set_num_threads(1)
    (server,) = launch(BASE_DIR, tmp_path_factory.mktemp("logs"), count=1)
    yield server
    server.stop()


def test_a_run_trains_on_what_the_server_sampled(server, tmp_path: Path, processes):
    """The gap proves that pushed weights arrived: 1e-6 nats in fp32. Without a step ahead, every
    group of a step is sampled by the present policy, so the gap is measured at each. Versions and
    ages are recomputed from the files."""
    recipe = async_recipe(
        [server.url],
        {"sampling": {"logprob_gap_limit": 1e-3, "collection": {"max_ahead_steps": 0}}},
        {"reward": {"function": "math_verify"}},
        {"run": {"steps": 6}, "optimizer": {"learning_rate": 1e-4}},
    )
    run = train_async_run(recipe, tmp_path / "run")
    gaps = [line["sampler/logprob_gap_mean"] for line in run.metrics]
    assert None not in gaps and max(gaps) < 1e-5
    assert len({row["policy_version_end"] for row in run.all_rollouts.values()}) > 2
    report = verify_run(run.path)
    assert report.passed, report.to_json()
    assert same_weights(run.weights(), replay_run(run, tmp_path / "again").weights())


def switched(server: LaunchedServer, max_tokens: int, pause_first: bool) -> list[str]:
    """The labels of the spans of a completion during which the label changes from 0 to 1."""
    client = VllmServer(server.url, "spans")
    client.set_weight_label(client.label(0))
    (request,) = make_requests(count=1, max_tokens=max_tokens)

    def sent_for(seconds: float) -> Future[Choice]:
        answer = asyncio.run_coroutine_threadsafe(client.generate(request, ()), background_loop())
        time.sleep(seconds)
        return answer

    if pause_first:
        client.pause(30)
        answer = sent_for(0.3)
    else:
        for _ in range(20):  # on a busy machine one may end before the pause
            answer = sent_for(0.1)
            client.pause(30)
            if not answer.done():
                break
            client.resume()
    assert not answer.done()
    client.set_weight_label(client.label(1))
    assert client.drop_cached_prompts()
    client.resume()
    found = answer.result(60)
    assert len(found.token_ids) == max_tokens == found.weight_versions[-1].end
    return [span.version for span in found.weight_versions]


def test_a_request_admitted_during_an_update_is_sampled_by_the_new_weights_alone(server):
    """PipelineRL#121."""
    assert switched(server, 20, pause_first=True) == ["spans/1"]


def test_a_request_in_flight_is_frozen_and_goes_on_with_the_new_weights(server):
    """`pause` in its default mode would abort it. The tiny base holds 128 tokens."""
    assert switched(server, 120, pause_first=False) == ["spans/0", "spans/1"]
