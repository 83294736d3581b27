"""LoRA over HTTP, against a fake server: one adapter a version, named in every request."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_policy_server import OUTLINE, FakePolicyServer
from fake_server import GENERATE
from peft import PeftModel
from server_helpers import open_sampler, sampled_during
from small_runs.asynchronous import async_recipe, replay_run, train_async_run
from small_runs.trained import same_weights
from tiny_policy import make_requests

from grpo_replay.engine.models import load_policy
from grpo_replay.engine.weights import expected_adapters
from grpo_replay.errors import SamplerError, ServersLost
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import ServersSection
from grpo_replay.sampling import weight_files
from grpo_replay.sampling.server.dispatcher import Dispatcher, Job, Servers
from grpo_replay.sampling.server.routes import VllmServer, block_on
from grpo_replay.sampling.server.sampler import ADAPTERS_KEPT, VllmServerSampler
from grpo_replay.sampling.vllm_requests import ADAPTERS_AT_ONCE
from grpo_replay.sampling.weight_files import AdapterTransfer

LORA = {"model": {"lora": {"r": 4}}}
ROOM = {"max_lora_rank": 8, "max_loras": 4, "max_cpu_loras": ADAPTERS_KEPT}


@pytest.fixture
def server() -> Iterator[FakePolicyServer]:
    server = FakePolicyServer()
    server.settings["lora_config"] = dict(ROOM)
    plain = "VocabParallelEmbedding(org_vocab_size=24, embedding_dim=64)"
    wrapped = f"VocabParallelEmbeddingWithLoRA()(\n      (base_layer): {plain}\n    )"
    server.outline = OUTLINE.replace(plain, wrapped)  # as vLLM prints it
    yield server
    server.stop()


def filled(sampler: VllmServerSampler, value: float) -> list[tuple[str, torch.Tensor]]:
    shapes = sampler._expected.shapes.items()
    return [(name, torch.full(shape, value)) for name, shape in shapes]


def test_base_once_then_an_adapter_a_version_which_its_requests_name(server, tmp_path):
    recipe = async_recipe(
        [server.url], LORA, {"sampling": {"servers": {"weight_transfer": str(tmp_path)}}}
    )
    sampler = open_sampler(recipe)
    run = sampler.servers.all[0].prefix
    assert server.loaded == ["version-0", "version-0"], "the base, then adapters of zeros"
    server.calls.clear()
    for version in range(1, ADAPTERS_KEPT + 2):
        sampler.load_weights(filled(sampler, version / 100), version)
    assert server.calls[:2] == ["v1/load_lora_adapter", f"{run}1"], "nothing is paused"
    assert len(server.calls) == 2 * (ADAPTERS_KEPT + 1)
    kept = sorted(each.name for each in tmp_path.glob("*/version-*"))
    assert len(kept) == ADAPTERS_KEPT and "version-1" not in kept
    (newest,) = tmp_path.glob(f"*/version-{version}")
    by_peft = PeftModel.from_pretrained(load_policy(recipe.model, 0), newest).state_dict()
    names = [name for name in by_peft if "lora_" in name]
    assert len(names) == len(expected_adapters(recipe.model)[0].shapes) > 30
    assert all((by_peft[name] == version / 100).all() for name in names)
    assert len(list(sampler.generate(make_requests(count=2)))) == 2
    assert [each.body["model"] for each in server.asked(GENERATE)] == [f"{run}{version}"] * 2
    sampler.close()
    assert not list(tmp_path.iterdir())


def test_a_partial_rollout_is_of_the_adapter_that_it_named_whatever_the_server_says(
    server, tmp_path
):
    """The label of a server's weights is that of all its requests."""
    recipe = async_recipe([server.url], LORA)
    sampler = open_sampler(recipe)
    run = sampler.servers.all[0].prefix.removesuffix("/")
    server.hold_after = 1
    completion, spans, tries = sampled_during(
        lambda: sampler.load_weights(filled(sampler, 0.1), 1), server, run, 0, with_adapters=True
    )
    assert len(completion.token_ids) > 1
    assert tries == 0 and spans == ((0, 0, len(completion.token_ids)),)
    assert (completion.policy_version, completion.policy_version_end) == (0, 0)
    sampler.close()


def test_a_server_that_was_restarted_gets_the_base_again(server):
    sampler = open_sampler(async_recipe([server.url], LORA))
    server.label = "default"
    server.loaded.clear()
    sampler.load_weights(filled(sampler, 0.1), 1)
    assert server.loaded == ["version-0", "version-1"] and server.label.endswith("/1")
    sampler.close()


def test_a_server_whose_base_did_not_load_is_no_more_used_until_it_has_it(server):
    """It is lost while it is paused, and comes back with the label of a load that never ended."""
    sampler = open_sampler(async_recipe([server.url], LORA))
    server.label, server.load_status = "default", 500
    sampler.load_weights(filled(sampler, 0.1), 1)
    assert list(sampler.servers.lost) == [server.url] and server.label.endswith("/updating")
    server.load_status = 200
    server.loaded.clear()
    server.calls.clear()
    sampler.load_weights(filled(sampler, 0.2), 2)
    assert server.loaded == ["version-0", "version-2"]
    assert "resume" in server.calls and not sampler.servers.lost
    assert len(list(sampler.generate(make_requests(count=1)))) == 1
    sampler.close()


def test_a_server_that_forgot_its_adapter_gets_no_requests_until_it_has_one(server):
    """It was restarted while it was idle, so that no request failed."""
    other = FakePolicyServer(seconds=0.2)  # to be asked why takes less
    other.settings, other.outline = server.settings, server.outline
    sampler = open_sampler(async_recipe([server.url, other.url], LORA))
    server.adapters.clear()
    server.label = "default"
    assert len(list(sampler.generate(make_requests(count=8)))) == 8
    assert "it was restarted" in sampler.servers.lost[server.url]
    sampler.close()
    other.stop()


def test_a_completion_on_the_base_of_another_run_is_not_taken(server):
    sampler = open_sampler(async_recipe([server.url], LORA))
    server.label = "foreign/3"
    with pytest.raises(ServersLost, match="another run updates it"):
        list(sampler.generate(make_requests(count=1)))
    sampler.close()


def test_no_request_is_sent_with_more_versions_than_run_beside_each_other():
    """With those of four versions running, one of a fifth waits until one of them is no more."""
    client = VllmServer("http://127.0.0.1:1", "run", with_adapters=True)
    servers = Servers([client], ServersSection(max_in_flight=64))

    async def sent() -> list[int]:
        pool = Dispatcher(servers, (), tuple, print, print, version=0)
        (state,) = pool.servers.values()
        found = []
        for version in range(ADAPTERS_AT_ONCE + 1):
            state.version = version
            pool.waiting.extend(map(Job, make_requests(count=2)))
            pool.fill()
            found.append(len(state.running))
        pool.withdraw([job for job in state.running.values() if job.version == 0])
        pool.fill()
        found.append(len(state.running))
        await pool.close()
        return found

    assert block_on(sent()) == [2, 4, 6, 8, 8, 8]


def test_the_room_of_all_versions_that_stay_is_looked_for_at_first(tmp_path, monkeypatch):
    recipe = async_recipe(["http://127.0.0.1:1"], LORA)
    needed = expected_adapters(recipe.model)[0].bytes_needed
    usage = SimpleNamespace(free=5 * needed - 1)
    monkeypatch.setattr(weight_files.shutil, "disk_usage", lambda _: usage)
    for versions in (5, 4):
        transfer = AdapterTransfer(str(tmp_path), recipe.model, versions)
        zeros = [(name, torch.zeros(shape)) for name, shape in transfer.expected.shapes.items()]
        if versions == 5:
            with pytest.raises(SamplerError, match=r"5 set\(s\) of weights need"):
                transfer.stage(zeros, 0)
        else:
            transfer.stage(zeros, 0)
        transfer.close()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lora_config": None}, r"--enable-lora is missing \(or set sampling.lora merged\)"),
        ({"lora_config": ROOM | {"max_lora_rank": 1}}, "its --max-lora-rank is 1, less than 8"),
        ({"lora_config": ROOM | {"max_loras": 1}}, "its --max-loras is 1, less than 4"),
    ],
)
def test_a_server_without_room_for_the_adapters_is_refused(server, change, problem):
    server.settings |= change
    with pytest.raises(SamplerError, match=problem) as refused:
        open_sampler(async_recipe([server.url], LORA))
    assert "--enable-lora --max-lora-rank 8 --max-loras 4" in str(refused.value)


def test_a_server_that_loads_no_adapters_later_is_refused(server, monkeypatch):
    control = server.control
    monkeypatch.setattr(
        server, "control",
        lambda path, body: (404, {}) if "load_lora" in path else control(path, body),
    )  # fmt: skip
    with pytest.raises(SamplerError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 is missing"):
        open_sampler(async_recipe([server.url], LORA))


def test_a_server_that_does_not_take_the_adapter_is_lost_with_the_way_out(server):
    sampler = open_sampler(async_recipe([server.url], LORA))
    server.load_status = 400
    sampler.load_weights(filled(sampler, 0.1), 1)
    (reason,) = sampler.servers.lost.values()
    assert "HTTP 400" in reason and "sampling.lora merged" in reason
    sampler.close()


@pytest.mark.slow
def test_an_asynchronous_run_knows_the_version_of_every_rollout(server, tmp_path: Path, processes):
    """By the adapters that its requests named. The journal alone gives the same adapters."""
    named = {}
    sample = server.sample

    def noting(body):
        named[body["sampling_params"]["seed"]] = int(body["model"].rpartition("/")[2])
        return sample(body)

    server.sample, server.seconds = noting, 0.05
    run = train_async_run(async_recipe([server.url], LORA), tmp_path / "run")
    rows = [row for step in range(1, 7) for row in run.rollouts(step)]
    versions = {row["policy_version"] for row in rows}
    assert len(versions) > 2 and versions <= set(named.values())
    assert all(row["policy_version"] == row["policy_version_end"] for row in rows)
    report = verify_run(run.path)
    assert report.passed, report.to_json()
    assert same_weights(run.weights(), replay_run(run, tmp_path / "again").weights())
