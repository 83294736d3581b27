"""The memory model: shards by hand, traced activations against formulas, a real engine."""

import importlib.util
import math
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from outside_ranks import RANK_NAMES
from transformers import Qwen3MoeConfig

from grpo_replay.engine.models import load_config
from grpo_replay.lab.dry_run import trace as trace_module
from grpo_replay.lab.dry_run.estimates import stored_bytes
from grpo_replay.lab.dry_run.memory import (
    PROCESS,
    PROCESS_ZERO,
    VLLM_BUFFERS,
    VLLM_GRAPHS,
    EngineSetting,
    ForwardMemory,
    ModelShape,
    engine_memory,
    hf_cache_tokens,
    hf_memory,
    vllm_memory,
)
from grpo_replay.lab.dry_run.planner import Machines, _engine_setting, plan_memory
from grpo_replay.lab.dry_run.trace import (
    Microbatch,
    forward_memory,
    model_shape,
    trace,
)
from grpo_replay.recipe import load_recipe
from grpo_replay.sampling.decode_modes import RowLayer
from grpo_replay.sampling.decoding import INITIAL_CAPACITY
from grpo_replay.training.disk_room import GIB, checkpoint_size

SHAPE = ModelShape(
    parameters=1000, tied_head=True, layers=2,
    hidden=8, vocabulary=50, kv_elements_per_token=64, attention_width=8, max_positions=128,
)  # fmt: skip
NOTHING = ForwardMemory(0, 0)


def setting(stage: int, dtype_bytes: int, ranks: int = 4, **more) -> EngineSetting:
    values = {"on_cuda": False, "bucket_elements": 300, "live_elements": 600} | more
    return EngineSetting(zero_stage=stage, ranks=ranks, dtype_bytes=dtype_bytes, **values)


@pytest.mark.parametrize(
    ("stage", "dtype_bytes", "parameters", "gradients", "optimizer"),
    [
        (0, 4, 4000, 4000, 8000),
        (0, 2, 2000, 6000, 12000),  # bf16 and fp32 gradients; master and moments
        (1, 2, 2000, 2000, 3000),
        (2, 2, 2000, 2 * 500, 3000),  # a micro-batch's shard beside the accumulated one
        (3, 2, 500, 500, 3500),  # the accumulated one is held from the start
    ],
)
def test_a_thousand_parameters_on_four_ranks(stage, dtype_bytes, parameters, gradients, optimizer):
    memory = engine_memory(SHAPE, NOTHING, setting(stage, dtype_bytes))
    assert (memory.parameters, memory.gradients, memory.optimizer) == (
        parameters, gradients, optimizer,
    )  # fmt: skip


def test_lora_trains_its_adapters_alone_and_the_last_checkpoint_has_the_merged_model():
    """1,000 parameters of the base and 100 of adapters, on four ranks."""
    shape = replace(SHAPE, adapters=100)
    for stage, expected in ((0, (2200, 600, 1200)), (2, (2200, 100, 300)), (3, (550, 50, 350))):
        memory = engine_memory(shape, NOTHING, setting(stage, 2))
        assert (memory.parameters, memory.gradients, memory.optimizer) == expected
        assert memory.bucket <= 2 * 100
    assert checkpoint_size(1000, 2, 2, adapters=100) == ((2 + 2 + 4 + 8) * 100, 4 * 1000)
    assert checkpoint_size(1000, 2, 2) == ((2 + 2 + 4 + 8) * 1000, 0)
    assert stored_bytes(2, prompt_tokens=100, completion_tokens=1000) == 2 * (400 + 12_000 + 1000)


def test_a_phase_is_the_sum_of_what_is_alive_at_the_same_time():
    memory = engine_memory(SHAPE, ForwardMemory(700, 1000), setting(3, 2))
    # parameters 500, optimizer 3500; bucket 2·300, gathered 2·600, activations and work 1000
    assert memory.at_rest == PROCESS_ZERO + 4000
    assert memory.backward_peak == PROCESS_ZERO + 4000 + 500 + 600 + 1200 + 1000
    # bucket and new shard stay; fp32 gradient 4 for each of 250
    assert memory.step_peak == PROCESS_ZERO + 4000 + 600 + 500 + 4 * 250
    assert memory.peak == memory.backward_peak
    # stage 0 copies its gradients when the activations are gone: the larger of the two counts
    memory = engine_memory(SHAPE, ForwardMemory(700, 1000), setting(0, 4))
    assert memory.backward_peak == PROCESS + 12000 + 4000 + max(1000, 4 * 300)
    assert memory.step_peak == PROCESS + 12000 + 4000
    alone = engine_memory(SHAPE, ForwardMemory(700, 1000), setting(0, 4, ranks=1))
    assert (alone.flat_copy, alone.backward_peak) == (0, PROCESS + 12000 + 4000 + 1000)


def test_a_gpu_allocates_the_whole_bucket():
    cpu = engine_memory(SHAPE, NOTHING, setting(2, 2, bucket_elements=10**6))
    gpu = engine_memory(SHAPE, NOTHING, setting(2, 2, bucket_elements=10**6, on_cuda=True))
    assert (cpu.bucket, gpu.bucket) == (2 * 1000, 2 * 10**6)


def test_offloading_moves_state_to_the_host():
    plain = engine_memory(SHAPE, NOTHING, setting(3, 2, on_cuda=True))
    moved = engine_memory(
        SHAPE, NOTHING,
        setting(3, 2, on_cuda=True, offload_optimizer=True, offload_parameters=True),
    )  # fmt: skip
    assert moved.optimizer == 0 and moved.parameters == 0
    assert moved.host >= 12 * 250 + 500 and moved.peak < plain.peak


def test_the_rest_of_vllms_share_is_kv_cache():
    memory = vllm_memory(SHAPE, 2, 10 * GIB, 0.5, 1, sleeps=True)
    counters = 256 * (4 * SHAPE.vocabulary + 4 * math.ceil(SHAPE.vocabulary / 32))
    overhead = VLLM_GRAPHS + VLLM_BUFFERS
    assert memory.awake == 5 * GIB
    assert memory.cache_tokens == (5 * GIB - 2000 - counters - overhead) // 128
    assert vllm_memory(SHAPE, 2, GIB, 0.5, 1, sleeps=True).cache_tokens < 0
    twice = vllm_memory(SHAPE, 2, 10 * GIB, 0.5, 2, sleeps=True).cache_tokens
    assert twice >= 2 * memory.cache_tokens - counters // 64 - 1
    large = vllm_memory(SHAPE, 2, 80 * GIB, 0.5, 1, sleeps=True)
    assert large.cache_tokens == (40 * GIB - 2000 - 4 * counters - overhead) // 128


def test_a_sleeping_vllm_keeps_its_graphs():
    asleep = vllm_memory(SHAPE, 2, 10 * GIB, 0.5, 1, sleeps=True)
    assert asleep.asleep == VLLM_GRAPHS + VLLM_BUFFERS
    eager = vllm_memory(SHAPE, 2, 10 * GIB, 0.5, 1, sleeps=True, graphs=False)
    assert eager.asleep == VLLM_BUFFERS
    assert eager.cache_tokens > asleep.cache_tokens
    awake = vllm_memory(SHAPE, 2, 10 * GIB, 0.5, 1, sleeps=False)
    assert awake.asleep == 5 * GIB


def test_the_hf_sampler_holds_a_second_copy_and_a_cache_of_all_rows():
    memory = hf_memory(SHAPE, 4, rows=3, prompt_tokens=10, completion_tokens=20)
    assert memory.asleep == 4000
    assert memory.awake == 4000 + 4 * 64 * 3 * 30 + 2 * 4 * 3 * 50
    grouped = replace(SHAPE, attention_width=32)  # twice the heads that have keys
    repeated = 4 * 3 * 30 * 2 * 32
    assert hf_memory(grouped, 4, 3, 10, 20).awake == memory.awake + repeated


def test_the_cache_of_the_hf_sampler_is_counted_as_it_grows():
    """Room for 10 + 512 tokens, then for 523 + 261 and 785 + 392; 1,010 are written."""
    capacities = []
    layer = RowLayer(torch.zeros(1, 1, 10, 1), torch.zeros(1, 1, 10, 1), 10 + INITIAL_CAPACITY)
    for _ in range(1000):
        capacities.append(layer._capacity)
        layer.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    *_, before, last = sorted({*capacities, layer._capacity})
    assert hf_cache_tokens(10, 1000) == (last, before) == (1177, 784)
    assert hf_cache_tokens(10, 512) == (522, 0)
    # 64 elements a token in two layers: while one grows, 16 are its old keys
    logits = 2 * 4 * 3 * 50
    on_gpu = hf_memory(SHAPE, 4, 3, 10, 1000, on_cuda=True).awake
    assert on_gpu == 4000 + 4 * 3 * (64 * 1177 + 16 * 784) + logits
    on_cpu = hf_memory(SHAPE, 4, 3, 10, 1000).awake
    assert on_cpu == 4000 + 4 * 3 * (64 * 1010 + 16 * 784) + logits


QWEN = ["model.path=builtin:qwen3-0.6b", "model.random_init=true", "model.dtype=bfloat16"]


def qwen(*overrides: str):
    return load_recipe("qwen3-0.6b", [*QWEN, *overrides])


def traced(recipe, layers: int, rows: int, length: int, completion: int) -> ForwardMemory:
    chunk = recipe.logprob_chunk_tokens(151_936)
    batch = Microbatch(rows, length, completion, chunk)
    return trace(recipe.model, load_config(recipe.model), layers, batch)


def test_compiled_layers_save_less_of_what_they_would_without_checkpointing(monkeypatch):
    """0.64 * 700 in place of 700, and 300 of work as before."""
    monkeypatch.setattr(trace_module, "forward_memory", lambda *_: ForwardMemory(700, 1000))
    found = {}
    for settings in product(("false", "true"), ("false", "true")):
        names = "model.compile", "model.gradient_checkpointing"
        words = [f"{name}={word}" for name, word in zip(names, settings, strict=True)]
        memory = plan_memory(qwen(*words), Machines("cuda", (1,), 80 * GIB)).engine
        found[settings] = memory.activations, memory.backward_work
    assert found.pop(("true", "false")) == (448, 300)
    assert set(found.values()) == {(700, 300)}


@pytest.mark.parametrize(
    ("overrides", "copied"),
    [([], False), (["loss.beta=0.1"], True), (["loss.beta=0.1", "model.lora.r=8"], False)],
)
def test_the_reference_is_a_copy_unless_adapters_can_be_left_out(overrides, copied):
    recipe, machines = qwen(*overrides), Machines("cpu", (1,), GIB)
    with_kl = recipe.loss.beta > 0
    found = _engine_setting(recipe.engine, 0, recipe.model, with_kl, machines)
    assert found.reference_copy == copied


def test_adapters_are_traced_as_peft_makes_them():
    """The sizes of peft's adapters, and what its layers keep for the backward pass."""
    from grpo_replay.engine.weights import LoraAdapters
    from grpo_replay.lab.dry_run import trace as module

    section = qwen("model.lora.r=8").model
    config = module._with_layers(load_config(section), 2)
    model = module._meta_model(config, torch.bfloat16, "eager")
    with torch.device("meta"):
        by_peft = LoraAdapters.attach(model, section.lora, seed=0).parameters
    assert model_shape(config, section.lora).adapters == by_peft
    own = traced(qwen("model.lora.r=8"), 2, 2, 256, 128)

    def with_peft(model, lora):
        with torch.device("meta"):
            LoraAdapters.attach(model, lora, seed=0)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_attach_adapters", with_peft)
        theirs = traced(qwen("model.lora.r=8"), 2, 2, 256, 128)
    assert own.saved == theirs.saved and own.peak == pytest.approx(theirs.peak, rel=0.01)


def test_checkpointing_saves_one_hidden_state_per_layer_and_token():
    two, three = (traced(qwen(), layers, 2, 256, 128) for layers in (2, 3))
    assert three.saved - two.saved == 2 * 256 * 1024 * 2


def test_without_checkpointing_a_layer_keeps_its_attention_and_mlp():
    recipe = qwen("model.gradient_checkpointing=false", "model.dtype=float32")
    two, three = (traced(recipe, layers, 1, 512, 64) for layers in (2, 3))
    hidden, queries, keys, inner = 1024, 2048, 1024, 3072
    # norms: x, normalised x and the result, twice; q and k before and after their norms and
    # rotation; attention: values and output; MLP: gate, its activation, up, and their product
    least = 6 * hidden + 4 * queries + 3 * keys + 4 * inner
    per_token = (three.saved - two.saved) / 512 / 4
    assert least <= per_token <= 1.25 * least


def test_the_logits_exist_for_one_chunk_at_a_time():
    def peak(chunk: int | None) -> int:
        return traced(qwen(f"engine.logprob_chunk_tokens={chunk or 'null'}"), 1, 1, 1024, 900).peak

    one = 4 * 151_936  # fp32 logits of one token
    assert 300 * one < peak(450) - peak(150) < 5 * 300 * one
    assert peak(None) == peak(256)


def test_extrapolation_over_layers_is_exact():
    recipe = qwen("model.random_init={num_hidden_layers: 7}")
    batch = Microbatch(1, 512, 256, recipe.logprob_chunk_tokens(151_936))
    config = load_config(recipe.model)
    assert forward_memory(recipe.model, config, batch) == traced(recipe, 7, 1, 512, 256)


def test_experts_are_traced_in_both_precisions():
    config = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=64, moe_intermediate_size=16, num_experts=8,
        num_experts_per_tok=2, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    given = config.to_dict()
    model_shape(config)
    assert config.to_dict() == given, "transformers writes the traced dtype into what it is given"
    saved = {}
    for dtype in ("float32", "bfloat16"):
        section = load_recipe("tiny", [f"model.dtype={dtype}"]).model
        saved[dtype] = trace(section, config, 2, Microbatch(4, 64, 32, 64)).saved
    assert 1.5 < saved["float32"] / saved["bfloat16"] <= 2


@pytest.mark.parametrize(
    ("name", "parameters", "kv"),
    [
        ("0.6b", 596_049_920, 2 * 28 * 8 * 128),
        ("4b", 4_022_468_096, 2 * 36 * 8 * 128),
    ],
)
def test_the_shape_of_the_published_models(name, parameters, kv):
    recipe = load_recipe(f"qwen3-{name}", [f"model.path=builtin:qwen3-{name}"])
    shape = model_shape(load_config(recipe.model))
    assert shape.parameters == parameters and shape.tied_head
    assert shape.kv_elements_per_token == kv and shape.vocabulary == 151_936


def memory_benchmark():
    file = Path(__file__).parents[3] / "benchmarks" / "memory.py"
    spec = importlib.util.spec_from_file_location("memory_benchmark", file)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark
    spec.loader.exec_module(benchmark)
    return benchmark


@pytest.mark.slow
def test_a_real_engine_takes_the_predicted_memory_within_fifteen_percent(monkeypatch):
    for name in RANK_NAMES:
        monkeypatch.delenv(name, raising=False)
    benchmark = memory_benchmark()
    case = benchmark.CASES[0]
    base = benchmark.measure(benchmark.BASE_CASE)["peak_mib"]
    measured = benchmark.measure(case)["peak_mib"] - base
    assert measured == pytest.approx(benchmark.predicted_mib(case), rel=0.15)
    if importlib.util.find_spec("vllm") is None:  # its packages make every process larger
        assert base == pytest.approx(PROCESS / 2**20, rel=0.15)
