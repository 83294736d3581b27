"""What goes over HTTP to vLLM servers and comes back: requests, weight updates, the checks at the
start. Held against a fake server that keeps every request, for both modes of a run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_policy_server import EOS, OUTLINE, FakePolicyServer
from fake_server import GENERATE, Answer, FakeServer
from safetensors.torch import load_file
from server_helpers import open_sampler, sampled_during
from small_runs.asynchronous import async_recipe
from tiny_policy import changed, make_requests, named_tensors, tiny_recipe

from grpo_replay.errors import SamplerError
from grpo_replay.recipe import Recipe
from grpo_replay.sampling.sampler_protocol import Sampler
from grpo_replay.sampling.server.routes import Unreachable, VllmServer, block_on
from grpo_replay.tiny import BASE_DIR
from grpo_replay.types import GenerationRequest


def recipe_of(mode: str, url: str, folder: Path, **vllm: object) -> Recipe:
    servers = {"urls": [url], "weight_transfer": str(folder)}
    if mode == "async":
        return async_recipe([url], {"sampling": {"servers": servers}})
    return tiny_recipe(BASE_DIR, backend="vllm_server", servers=servers, vllm=vllm)


@pytest.fixture(scope="module", params=["sync", "async"])
def opened(request, tmp_path_factory) -> Iterator[tuple[FakePolicyServer, Sampler]]:
    """A server, and a sampler that uses it."""
    server = FakePolicyServer()
    sampler = open_sampler(recipe_of(request.param, server.url, tmp_path_factory.mktemp("sync")))
    yield server, sampler
    sampler.close()
    server.stop()


@pytest.mark.parametrize("answer", [b"<html>502</html>", b"{}", b"[]"])
def test_another_program_on_the_port_of_a_server_is_no_answer(monkeypatch, answer):
    async def answered(*_: object, **__: object) -> bytes:
        return answer

    server = VllmServer("http://127.0.0.1:9", "run")
    monkeypatch.setattr(server, "request", answered)
    with pytest.raises(Unreachable, match="/weight_info is not that of vLLM"):
        block_on(server.weight_label())
    with pytest.raises(Unreachable, match="/reset_prefix_cache"):
        server.drop_cached_prompts()


def test_the_tokens_of_a_server_are_those_of_all_its_engines():
    server = FakeServer()
    server.engines, server.generated = 3, 100
    assert block_on(VllmServer(server.url, "run").generated_tokens(30)) == 100
    server.stop()


def requests_of_many_kinds() -> list[GenerationRequest]:
    """Each with its own prompt, seed, temperature, nucleus and length."""
    kinds = [(1.0, 1.0, 24), (0.7, 1.0, 9), (1.3, 0.8, 8), (0.0, 0.5, 7)]
    return [
        replace(
            each,
            prompt_token_ids=np.arange(5, 6 + index, dtype=np.int32),
            temperature=temperature, top_p=top_p, max_tokens=longest,
        )
        for index, (each, (temperature, top_p, longest)) in enumerate(
            zip(make_requests(count=4), kinds, strict=True)
        )
    ]  # fmt: skip


def test_a_request_carries_its_prompt_its_seed_and_its_own_distribution(opened):
    """Fields that a generation_config.json may change are neutral. Greedy has no nucleus."""
    server, sampler = opened
    server.requests.clear()
    requests = requests_of_many_kinds()
    assert len(list(sampler.generate(requests))) == 4
    sent = {each.body["sampling_params"]["seed"]: each.body for each in server.asked(GENERATE)}
    assert sent.keys() == {request.seed for request in requests}
    for request in requests:
        body = sent[request.seed]
        assert body["token_ids"] == request.prompt_token_ids.tolist()
        assert body["sampling_params"].items() >= {
            "temperature": request.temperature,
            "top_p": request.top_p if request.temperature > 0 else 1.0,
            "max_tokens": request.max_tokens,
            "stop_token_ids": [EOS], "ignore_eos": True, "logprobs": 0, "top_k": 0, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }.items()  # fmt: skip


def test_a_completion_has_the_tokens_the_log_probs_and_the_version_of_its_answer(
    opened, monkeypatch
):
    """The second of each pair ends at its maximum length."""
    server, sampler = opened
    requests = [
        replace(each, max_tokens=4 - index % 2) for index, each in enumerate(make_requests(count=6))
    ]
    tokens = {
        each.seed: [5 + i, 6 + i, EOS if i % 2 == 0 else 7] for i, each in enumerate(requests)
    }

    def sample(body) -> Answer:
        labels = [server.label] * 3
        return Answer(
            tokens[body["sampling_params"]["seed"]], [-0.125, -0.25, -0.5], labels,
            "stop" if body["sampling_params"]["max_tokens"] == 4 else "length",
        )  # fmt: skip

    monkeypatch.setattr(server, "sample", sample)
    found = {each.key: each for each in sampler.generate(requests)}
    assert found.keys() == {request.key for request in requests}
    for index, request in enumerate(requests):
        completion = found[request.key]
        assert completion.token_ids.tolist() == tokens[request.seed]
        assert completion.sampler_logprobs.tolist() == [-0.125, -0.25, -0.5]
        assert completion.finish_reason == ("stop" if index % 2 == 0 else "length")
        versions = {completion.policy_version, completion.policy_version_end}
        assert versions == {sampler.policy_version}


def test_an_update_freezes_requests_loads_recomputes_their_keys_labels_and_goes_on(
    opened, tied, monkeypatch
):
    """NeMo-RL#4018: a prefix cache that survives an update answers with the old policy. The label
    says "updating" while the weights are neither the old ones nor the new."""
    server, sampler = opened
    run, version = server.label.partition("/")[0], sampler.policy_version + 1
    loaded, control = {}, server.control

    def reading(path, body):
        if path == "/collective_rpc":
            for file in Path(body["kwargs"]["weights_path"]).iterdir():
                loaded.update(load_file(file))
        return control(path, body)

    monkeypatch.setattr(server, "control", reading)
    server.requests.clear()
    model = changed(tied, version)
    sampler.load_weights(named_tensors(model), version)
    pause, updating, load, reset, label, resume = (
        each for each in server.requests if each.method == "POST"
    )
    assert (pause.path, pause.query["mode"]) == ("/pause", "keep"), "nothing is aborted"
    assert (updating.path, updating.body) == (
        "/update_weight_version", {"new_version": f"{run}/updating"}
    )  # fmt: skip
    assert (load.path, load.body["method"]) == ("/collective_rpc", "reload_weights")
    assert (reset.path, reset.query) == ("/reset_prefix_cache", {"reset_running_requests": "true"})
    assert (label.path, label.body) == (
        "/update_weight_version", {"new_version": f"{run}/{version}"}
    )  # fmt: skip
    assert (resume.path, server.requests[-1].path) == ("/resume", "/weight_info"), "confirmed last"
    pushed = dict(named_tensors(model))
    assert loaded.keys() == pushed.keys() and len(pushed) > 30
    assert all(loaded[name].equal(tensor) for name, tensor in pushed.items())


def test_every_token_of_a_partial_rollout_has_the_log_prob_and_the_version_of_its_own_weights(
    opened, tied
):
    """It stops after two tokens; then the weights change, and it goes on with the new ones."""
    server, sampler = opened
    run, old = server.label.partition("/")[0], sampler.policy_version
    server.logprob_of = lambda label: -0.25 - int(label.rpartition("/")[2])
    server.hold_after = 2
    try:
        completion, spans, tries = sampled_during(
            lambda: sampler.load_weights(named_tensors(changed(tied, 9)), old + 1), server, run, old
        )
    finally:
        server.hold_after = None
    count = len(completion.token_ids)
    assert count > 3 and tries == 0, "it was sent once"
    assert spans == ((old, 0, 2), (old + 1, 2, count))
    assert (completion.policy_version, completion.policy_version_end) == (old, old + 1)
    own = [-0.25 - old] * 2 + [-1.25 - old] * (count - 2)
    assert completion.sampler_logprobs.tolist() == own


def with_setting(section: str, name: str, value: object) -> Callable[[FakePolicyServer], None]:
    return lambda server: server.settings[section].update({name: value})


def with_outline(old: str, new: str) -> Callable[[FakePolicyServer], None]:
    return lambda server: setattr(server, "outline", OUTLINE.replace(old, new))


DIFFERENCES: dict[str, tuple[Callable[[FakePolicyServer], None], str]] = {
    "log-probs before temperature and nucleus": (
        with_setting("model_config", "logprobs_mode", "raw_logprobs"), "raw_logprobs",
    ),
    "precision": (with_setting("model_config", "dtype", "torch.bfloat16"), "bfloat16"),
    "quantization": (with_setting("model_config", "quantization", "fp8"), "fp8"),
    "prompts in parts, of which vLLM 0.32 dies on a CPU": (
        with_setting("scheduler_config", "enable_chunked_prefill", True), "chunked-prefill",
    ),
    "longest sequence": (lambda server: setattr(server, "max_model_len", 5), "5"),
    "width": (with_outline("=64", "=96"), "hidden size 96"),
    "depth": (with_outline("(0-2): 3 x", "(0-1): 2 x"), "number of layers 2"),
    "vocabulary": (with_outline("=24", "=25"), "vocabulary 25"),
    "no count of tokens": (lambda server: setattr(server, "generates", None), "log-stats"),
    "a vLLM without labels": (lambda server: setattr(server, "vllm_version", "0.31.0"), "0.31.0"),
}  # fmt: skip


@pytest.mark.parametrize("change, named", DIFFERENCES.values(), ids=list(DIFFERENCES))
def test_a_server_that_differs_from_the_run_is_refused_at_the_start(change, named, tmp_path):
    server = FakePolicyServer()
    change(server)
    try:
        with pytest.raises(SamplerError) as refused:
            open_sampler(recipe_of("sync", server.url, tmp_path))
    finally:
        server.stop()
    assert server.url in str(refused.value) and named in str(refused.value)
    assert "pause" not in server.calls, "its weights were left alone"


def test_a_server_without_the_fp32_head_of_the_policy_is_refused(tmp_path):
    server = FakePolicyServer()
    overrides = {"head_dtype": "float32"}
    try:
        with pytest.raises(SamplerError, match="head_dtype"):
            open_sampler(recipe_of("sync", server.url, tmp_path, hf_overrides=overrides))
        server.settings["model_config"]["hf_overrides"] = overrides
        open_sampler(recipe_of("sync", server.url, tmp_path, hf_overrides=overrides)).close()
    finally:
        server.stop()
