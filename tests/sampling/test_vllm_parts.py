"""The pieces around vLLM that need no vLLM: names, files, commands, the guard."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architectures import random_config, random_model
from processes_left import is_alive
from safetensors.torch import load_file
from server_helpers import free_ports, kill_child_of, wait_for
from tiny_policy import changed, named_tensors, tiny_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import RankEnvironment
from grpo_replay.engine.models import byte_tokenizer, load_policy
from grpo_replay.engine.policy_module import Fp32Head, find_head
from grpo_replay.engine.weights import CheckedWeights, expected_weights
from grpo_replay.errors import ModelError, RecipeError, SamplerError
from grpo_replay.sampling.sampler_protocol import SamplerOpening, model_length
from grpo_replay.sampling.server import guard as server_guard
from grpo_replay.sampling.server import server_process as server_process
from grpo_replay.sampling.server.server_process import (
    devices_of_servers,
    launch_servers,
    server_command,
    server_devices,
)
from grpo_replay.sampling.vllm_local import VllmLocalSampler
from grpo_replay.sampling.vllm_process import SleepState
from grpo_replay.sampling.vllm_requests import (
    build_completion,
    engine_arguments,
    set_environment,
)
from grpo_replay.sampling.weight_files import FolderTransfer
from grpo_replay.types import GenerationRequest, RequestKey


def test_expected_weights_match_the_model(tied, untied):
    for policy in (tied, untied):
        expected = expected_weights(tiny_recipe(policy.folder).model)
        own = {name: tuple(tensor.shape) for name, tensor in named_tensors(policy.model)}
        assert dict(expected.shapes) == own
        assert len(own) == 3 * 11 + 3
        assert expected.bytes_needed == 4 * sum(t.numel() for _, t in named_tensors(policy.model))


def test_checked_weights_pass_on_what_fits_and_exhaust_the_source(tied):
    expected = expected_weights(tiny_recipe(tied.folder).model)
    source = iter([*named_tensors(tied.model), ("foreign", torch.zeros(1))])
    checked = CheckedWeights(source, expected)
    assert next(iter(checked))[0] == "model.embed_tokens.weight"
    checked.drain()
    assert next(source, None) is None
    assert checked.problems == ["unknown tensor foreign"]


def test_float32_tensors_are_good_enough_for_a_bfloat16_policy(tied):
    model = tiny_recipe(tied.folder).model.model_copy(update={"dtype": "bfloat16"})
    expected = expected_weights(model)
    for dtype, fits in ((torch.float32, True), (torch.bfloat16, True), (torch.float16, False)):
        checked = CheckedWeights(((n, t.to(dtype)) for n, t in named_tensors(tied.model)), expected)
        checked.drain()
        assert (not checked.problems) == fits


def test_files_hold_every_name_and_stay_near_the_bucket(tied, tmp_path):
    model = changed(tied, 1)
    folder = FolderTransfer(str(tmp_path), 1, 30_000)
    folder.stage(named_tensors(model), 3)
    files = sorted(tmp_path.glob("*/version-3/*.safetensors"))
    assert len(files) > 5
    # The largest tensor of this model is 48 KiB; no file holds more than it or the bucket.
    assert max(file.stat().st_size for file in files) < 52_000
    stored = {name: t for file in files for name, t in load_file(file).items()}
    assert stored.keys() == dict(named_tensors(model)).keys()
    for name, tensor in named_tensors(model):
        assert torch.equal(stored[name], tensor)
    folder.close()
    folder.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_without_room_is_refused_before_anything_is_written(tmp_path):
    folder = FolderTransfer(str(tmp_path), 2**60, 1)
    with pytest.raises(SamplerError, match=r"1073741824\.00 GiB.*weight_transfer"):
        folder.stage([("a", torch.zeros(1))], 1)
    assert not list(tmp_path.rglob("*.safetensors"))
    folder.close()


def test_a_server_is_started_as_an_engine_would_be(tied):
    recipe = tiny_recipe(tied.folder, vllm={"enable_prefix_caching": False})
    arguments = engine_arguments(
        recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=False
    )
    command = server_command(arguments, "127.0.0.1", 8300)
    text = " ".join(command)
    assert f"--model {tied.folder} --dtype float32 --max-model-len 224" in text
    assert "--logprobs-mode processed_logprobs --no-enable-prefix-caching" in text
    assert "--enforce-eager" in command and "--trust-remote-code" not in command
    assert "--revision" not in command, "no revision was named"
    assert "--no-enable-chunked-prefill" in command
    assert "gpu_memory_utilization" not in arguments
    on_gpu = engine_arguments(recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=True)
    assert on_gpu["gpu_memory_utilization"] == 0.6 and on_gpu["enforce_eager"] is False
    assert "enable_chunked_prefill" not in on_gpu


def test_an_fp32_head_asked_of_vllm_is_the_trainers_too(tied):
    overrides = {"rope_theta": 1e6, "head_dtype": "float32"}
    recipe = tiny_recipe(tied.folder, vllm={"hf_overrides": overrides})
    assert recipe.sampling.fp32_head and not tiny_recipe(tied.folder).sampling.fp32_head
    assert isinstance(find_head(load_policy(recipe.model, 0, fp32_head=True)), Fp32Head)
    found = engine_arguments(recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=True)
    command = server_command(found, "127.0.0.1", 8300)
    text = command[command.index("--hf-overrides") + 1]
    assert json.loads(text) == overrides, "vLLM reads JSON"
    with pytest.raises(RecipeError, match="head_dtype float32 or model"):
        tiny_recipe(tied.folder, vllm={"hf_overrides": {"head_dtype": "float64"}})


def test_what_vllm_switches_on_for_gpus_can_be_switched_off(tied):
    """docs/sampling.md names these; the model runner is chosen in the environment."""
    off = {"async_scheduling": False, "enforce_eager": True, "enable_sleep_mode": False}
    recipe = tiny_recipe(tied.folder, vllm=off)
    arguments = engine_arguments(
        recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=True
    )
    assert (arguments["async_scheduling"], arguments["enforce_eager"]) == (False, True)
    command = server_command(arguments, "127.0.0.1", 8300)
    assert {"--no-async-scheduling", "--enforce-eager"} <= set(command)
    default = tiny_recipe(tied.folder)
    arguments = engine_arguments(
        default.sampling, default.model, default.longest_sequence, on_gpu=True
    )
    command = server_command(arguments, "127.0.0.1", 8300)
    assert arguments["async_scheduling"] is None
    assert not any("async-scheduling" in word for word in command), "vLLM's own choice"


@pytest.mark.vllm
def test_every_argument_is_one_that_vllm_has(tied):
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    from grpo_replay.sampling.vllm_local import _colocation_arguments

    recipe = tiny_recipe(tied.folder)
    arguments = engine_arguments(
        recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=True
    )
    opening = SamplerOpening.from_recipe(recipe, recipe.model.path, Comm(0, 2))
    arguments |= _colocation_arguments(replace(opening, on_gpu=True))
    assert len(arguments) > 12
    assert not arguments.keys() - {field.name for field in fields(EngineArgs)}
    assert arguments["distributed_timeout_seconds"] == recipe.engine.timeout_seconds


def test_experts_whose_new_weights_vllm_takes_wrongly_are_refused_on_a_cpu(tmp_path):
    random_model("qwen3_moe").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SamplerError, match=r"experts .* use sampling\.backend hf"):
        VllmLocalSampler.open(
            SamplerOpening.from_recipe(tiny_recipe(tmp_path), str(tmp_path), Comm())
        )


def test_a_server_is_not_launched_on_a_port_that_stays_taken(tied, tmp_path, monkeypatch):
    monkeypatch.setattr(server_process, "PORT_SECONDS", 0.5)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        servers = {"launch": 1, "address": address}
        recipe = tiny_recipe(tied.folder, backend="vllm_server", servers=servers)
        with pytest.raises(SamplerError, match=f"{address}: Address already in use"):
            launch_servers(recipe.sampling, {}, on_gpu=False, log_folder=tmp_path)
        monkeypatch.setattr(server_process.time, "sleep", lambda _: stranger.close())
        assert devices_of_servers(recipe.sampling, 1, on_gpu=False) == [None]


def test_an_engine_does_not_span_nodes(tied, monkeypatch):
    from grpo_replay.sampling.vllm_local import _colocation_arguments

    six = RankEnvironment(world_size=6, local_world_size=3, is_launched=True)  # on two nodes
    for name, value in six.variables().items():
        monkeypatch.setenv(name, value)
    recipe = tiny_recipe(tied.folder, vllm={"tensor_parallel_size": 2})
    opening = SamplerOpening.from_recipe(recipe, recipe.model.path, Comm(0, 6))
    with pytest.raises(RecipeError, match="2 does not divide the 3 ranks of a node"):
        _colocation_arguments(opening)


def test_the_longest_sequence_is_derived_and_bounded_by_the_model(tied):
    recipe = tiny_recipe(tied.folder)
    assert model_length(recipe.sampling, recipe.model, recipe.longest_sequence) == 200 + 24
    longer = recipe.eval.model_copy(update={"max_completion_length": 100})
    longest = recipe.model_copy(update={"eval": longer}).longest_sequence
    assert model_length(recipe.sampling, recipe.model, longest) == 300
    endless = tiny_recipe(tied.folder, max_completion_length=4000)
    assert model_length(endless.sampling, endless.model, endless.longest_sequence) == 512
    with pytest.raises(RecipeError, match="max_model_len 513 exceeds the 512 positions"):
        wrong = tiny_recipe(tied.folder, vllm={"max_model_len": 513})
        model_length(wrong.sampling, wrong.model, wrong.longest_sequence)


def test_a_window_that_vllm_makes_longer_is_refused_where_a_sequence_fills_it(tmp_path):
    recipe = tiny_recipe(tmp_path)
    random_config("cohere2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"cohere2: .* than the trainer's 8, .* 128 tok"):
        engine_arguments(recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=False)
    random_config("cohere2", sliding_window=128).save_pretrained(tmp_path)
    assert (
        engine_arguments(recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=False)[
            "max_model_len"
        ]
        == 128
    )


@pytest.mark.parametrize("owner, name", [
    (torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache"),
])  # fmt: skip
def test_waking_with_a_host_copy_returns_its_pages_whatever_torch_calls_it(
    monkeypatch, owner, name
):
    """torch 2.11 has only the second."""
    asleep, returned = [], []
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True)),
        sleep=lambda level: asleep.append(level), wake_up=lambda parts: asleep.append(parts),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
    monkeypatch.setattr(owner, name, lambda: returned.append(name), raising=False)
    memory = SleepState(engine)
    for keep_weights in (False, True):
        memory.sleep(keep_weights)
        memory.wake("weights", "kv_cache")
    assert asleep == [2, ["weights"], ["kv_cache"], 1, ["weights"], ["kv_cache"]]
    assert returned == [name], "once: only the second sleep had a copy"


def test_environment_variables_of_the_user_are_kept():
    environment = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    set_environment(environment, on_gpu=False)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


def test_servers_take_the_gpus_after_the_trainer_s():
    assert server_devices(["0", "1", "2", "3"], 2, 2, 1) == ["2", "3"]
    assert server_devices(["4", "5", "6", "7"], 0, 2, 2) == ["4,5", "6,7"]
    with pytest.raises(RecipeError, match="3 of 4 are left"):
        server_devices(["0", "1", "2", "3"], 1, 2, 2)


def place_ranks(monkeypatch, world_size: int, ranks_here: int) -> None:
    """As torchrun tells rank 0; engine.num_processes stays at 1."""
    variables = {
        "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": ranks_here, "RANK": 0, "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "x",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_a_launched_server_leaves_every_rank_its_gpu_whoever_started_the_ranks(
    tied, monkeypatch, tmp_path
):
    place_ranks(monkeypatch, world_size=2, ranks_here=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1,2, 3,")
    says_its_gpu = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    monkeypatch.setattr(server_process, "server_command", lambda *_: says_its_gpu)
    servers = {"launch": 2, "address": f"127.0.0.1:{free_ports(2)[0]}"}
    recipe = tiny_recipe(tied.folder, backend="vllm_server", servers=servers)
    launched = launch_servers(recipe.sampling, {}, on_gpu=True, log_folder=tmp_path)
    for server in launched:
        server.guard.wait(60)
        server.stop()
    assert [server.log.read_text() for server in launched] == ["2\n", "3\n"]


@pytest.mark.parametrize(
    ("address", "host", "url"),
    [("[::1]:{}", "::1", "http://[::1]:{}"), ("[::]:{}", "::", "http://[::1]:{}"),
     ("0.0.0.0:{}", "0.0.0.0", "http://127.0.0.1:{}")],
)  # fmt: skip
def test_a_server_listens_on_the_address_of_the_recipe_and_is_reached_there(
    tied, monkeypatch, tmp_path, address, host, url
):
    (port,) = free_ports(1)
    echo = lambda _, *place: [sys.executable, "-c", f"print({place!r})"]  # noqa: E731
    monkeypatch.setattr(server_process, "server_command", echo)
    servers = {"launch": 1, "address": address.format(port)}
    recipe = tiny_recipe(tied.folder, backend="vllm_server", servers=servers)
    (server,) = launch_servers(recipe.sampling, {}, on_gpu=False, log_folder=tmp_path)
    server.guard.wait(60)
    server.stop()
    assert server.url == url.format(port)
    assert server.log.read_text() == f"{(host, port)!r}\n"


def test_servers_are_not_launched_for_ranks_on_other_machines(tied, monkeypatch, tmp_path):
    place_ranks(monkeypatch, world_size=16, ranks_here=8)
    monkeypatch.setattr(server_process, "_launch", lambda *_: pytest.fail("a server was launched"))
    recipe = tiny_recipe(tied.folder, backend="vllm_server", servers={"launch": 2})
    with pytest.raises(RecipeError, match=r"8 of the 16 ranks .* set sampling\.servers\.urls"):
        launch_servers(recipe.sampling, {}, on_gpu=False, log_folder=tmp_path)


def answer(tokens: list[int], finish: str | None, logprob: float = -0.5):
    """The completion of a request for at most three tokens; token 9 stops."""
    request = GenerationRequest(RequestKey(1, 0, 0), np.array([5], np.int32), 7, 3, 1.0)
    return build_completion(request, tokens, [logprob] * len(tokens), finish, (2, 4), [9])


def test_an_answer_ends_with_a_stop_token_or_at_the_maximum_length():
    found = answer([4, 6, 8], "length")
    assert (found.token_ids.tolist(), found.finish_reason) == ([4, 6, 8], "length")
    assert (found.policy_version, found.policy_version_end) == (2, 4)
    assert answer([4, 9], "stop").finish_reason == "stop"


@pytest.mark.parametrize(
    ("tokens", "finish"),
    [([4, 6], "length"), ([4, 6], "stop"), ([4, 6, 8], "abort"), ([4, 6, 8], None)],
)
def test_an_answer_that_was_cut_short_is_refused(tokens, finish):
    """A server that stops early, for want of memory or of room, would train as a truncation."""
    with pytest.raises(SamplerError, match="of at most 3 tokens"):
        answer(tokens, finish)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), -9999.0])
def test_an_answer_without_a_finite_log_prob_is_refused(logprob):
    with pytest.raises(SamplerError, match="log-prob of token 0 is not finite"):
        answer([4, 9], "stop", logprob)


STUBBORN = (
    "import signal,subprocess,sys,time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print(child.pid, flush=True); time.sleep(600)"
)


@pytest.mark.parametrize(
    "ending", ["guard is told to stop", "parent is killed", "server is killed"]
)
def test_the_guard_ends_its_whole_process_group(ending, tmp_path):
    """The guarded process and its child ignore SIGTERM."""
    script = tmp_path / "guard.py"
    text = Path(server_guard.__file__).read_text()
    script.write_text(text.replace("GRACE_SECONDS = 5.0", "GRACE_SECONDS = 0.5"))
    guarded = [sys.executable, str(script), "PARENT", sys.executable, "-c", STUBBORN]
    launcher = (
        "import os,subprocess,sys,time;"
        f"words = {guarded!r}; words[2] = str(os.getpid());"
        "guard = subprocess.Popen(words, start_new_session=True);"
        "print(guard.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    try:
        numbers = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(is_alive(number) for number in numbers)
        if ending == "parent is killed":
            parent.kill()
        elif ending == "guard is told to stop":
            os.kill(numbers[0], signal.SIGTERM)
        else:
            kill_child_of(numbers[0])
        assert wait_for(lambda: not any(map(is_alive, numbers)), seconds=20)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_the_ranks_of_an_engine_have_the_requests_of_all_of_them_in_rank_order():
    """Four ranks, two engines: rank 3 gets those of ranks 2 and 3, its own behind rank 2's."""
    of_rank = [[_request(rank, index) for index in range(rank)] for rank in range(4)]
    sampler = object.__new__(VllmLocalSampler)
    sampler._tensor_parallel_size = 2
    sampler._comm = SimpleNamespace(rank=3, all_gather=lambda _: of_rank)
    found, offset = sampler._gather_requests(of_rank[3])
    assert offset == 2 and [(*each.key,) for each in found] == [
        (2, 0, 0), (2, 1, 0), (3, 0, 0), (3, 1, 0), (3, 2, 0),
    ]  # fmt: skip


def _request(rank: int, index: int) -> GenerationRequest:
    prompt = np.array([rank, index, 7], np.int32)
    return GenerationRequest(RequestKey(rank, index, 0), prompt, 2**63 - 1 - index, 9, 0, 0.8)
