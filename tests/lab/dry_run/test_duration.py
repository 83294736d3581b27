"""Hours of a run: worked by hand from stated, measured and assumed speeds."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from grpo_replay.lab.dry_run.dry_run_report import _choose_speed, _decode_floor
from grpo_replay.lab.dry_run.estimates import (
    GPUS,
    DecodeFloor,
    Known,
    Speed,
    assumed_speed,
    describe_replay,
    describe_step,
    describe_time,
    expected_longest,
    expected_of,
    update_flops,
)
from grpo_replay.lab.dry_run.memory import ModelShape
from grpo_replay.lab.dry_run.planner import Machines
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import measured_speed
from grpo_replay.recipe import load_recipe, recipe_to_yaml
from grpo_replay.storage.checkpoint import GIB

FOUR_GPUS = Machines("cuda", (4,), 80 * GIB, 4, elsewhere=True)
CPU = Machines("cpu", (1,), 8 * GIB)
SHAPE = ModelShape(
    parameters=10**9, largest_parameter=1, tied_head=True, layers=10,
    hidden=8, vocabulary=50, kv_elements_per_token=64, attention_width=1000, max_positions=None,
)  # fmt: skip


def time_of(recipe, machines, speed, **measured):
    expected = expected_of(recipe, measured)
    step, stored = describe_step(recipe, expected), describe_replay(recipe, expected)
    return describe_time(
        recipe, step, stored["first_replay_step"], expected, speed, machines.total_ranks,
        machines.on_cuda,
    )  # fmt: skip


def test_hours_by_hand():
    """256 rollouts of 1,000 tokens, 100 kept, 50 replayed from step 21 on; 200 steps, 4 GPUs of
    2,000 tokens/s generated and 5,000 trained.

    Generation 256,000 / 8,000 = 32 s. Log-probs 100,000 / 20,000 / 3 = 1.67 s. Updates
    20 · 5 s + 180 · 7.5 s = 1,450 s. In all 200 · 33.67 + 1,450 = 8,183 s = 2.27 h.
    """
    recipe = load_recipe("qwen3-1.7b")
    found = time_of(
        recipe, FOUR_GPUS, Speed(2000, 5000, "stated"), survival=100 / 256, completion_tokens=1000
    )
    assert found["generation_seconds_per_step"] == 32
    assert found["training_seconds_per_step"] == 7.5
    assert found["other_seconds_per_step"] == 1.67
    assert (found["hours"], found["gpu_hours"]) == (2.27, 9.09)


@pytest.mark.parametrize(
    ("words", "replayed"),
    [
        (["replay.ratio=2"], 200),
        (["replay.ratio=20"], 1000),  # all that ten steps store
        (["replay.ratio=20", "replay.capacity_rollouts=500"], 500),
        (["replay.ratio=20", "replay.with_replacement=true"], 2000),
    ],
)
def test_no_more_is_drawn_without_replacement_than_is_stored(words, replayed):
    """100 of 256 rollouts survive, and are stored for ten steps."""
    recipe = load_recipe("qwen3-1.7b", words)
    found = describe_step(recipe, expected_of(recipe, {"survival": 100 / 256}))
    assert found["replayed_rollouts_expected"] == replayed
    assert found["trained_rollouts_expected"] == 100 + replayed


@pytest.mark.parametrize(
    ("prompts", "processes", "each"), [(1, 8, 2), (1, 4, 4), (1, 3, 6), (5, 3, 27), (1, 32, 1)]
)
def test_a_step_lasts_as_long_as_the_rank_that_samples_most(prompts, processes, each):
    """Groups of 16 completions of 1,000 tokens, dealt to ranks of 500 tokens/s: 2 s each, on the
    busiest rank. One prompt on 8 ranks takes 4 s, on 3 ranks 12 s (16 = 5 + 5 + 6)."""
    recipe = load_recipe("fifo-qwen2.5-7b", [f"sampling.prompts_per_step={prompts}"])
    hardware = Machines("cuda", (processes,), 80 * GIB, processes)
    found = time_of(recipe, hardware, Speed(500, 5000, "stated"), completion_tokens=1000)
    assert found["generation_seconds_per_step"] == 2 * each


SERVERS = ["sampling.backend=vllm_server", "loss.behavior_logprobs=sampler"]


def test_servers_generate_and_their_gpus_count():
    """As above: 256,000 tokens on two GPUs of one server are 64 s, and 6 GPUs are in use."""
    launched = ["sampling.servers.launch=1", "sampling.vllm.tensor_parallel_size=2"]
    elsewhere = ["sampling.servers.urls=[http://a:1, http://b:1]"]
    for servers in (launched, elsewhere):
        recipe = load_recipe("qwen3-1.7b", [*SERVERS, *servers])
        speed = Speed(2000, 5000, "stated")
        found = time_of(recipe, FOUR_GPUS, speed, survival=100 / 256, completion_tokens=1000)
        assert found["generation_seconds_per_step"] == 64
        assert found["hours"] == pytest.approx((200 * 64 + 1450) / 3600, rel=0.005)
        assert found["gpu_hours"] == pytest.approx(6 * found["hours"], rel=0.005)


@pytest.mark.parametrize("launched, hours", [(1, 200 * 128 / 3600), (32, 1450 / 3600)])
def test_an_asynchronous_step_takes_as_long_as_the_slower_of_servers_and_trainers(launched, hours):
    """One server needs 128 s a step, 32 need 4 s; updates take 5 s, 7.5 s from step 21 on."""
    recipe = load_recipe(
        "qwen3-1.7b", [*SERVERS, "run.mode=async", f"sampling.servers.launch={launched}"]
    )
    speed = Speed(2000, 5000, "stated")
    found = time_of(recipe, FOUR_GPUS, speed, survival=100 / 256, completion_tokens=1000)
    assert found["hours"] == pytest.approx(hours, rel=0.005)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("training", [1.5, 3.5], ids=["servers-limit", "trainers-limit"])
def test_an_asynchronous_run_predicts_its_own_duration(tmp_path, training, gpus):
    """Two servers that are busy for 2 s each in a step of 4 s, on two ranks; replay from the second
    step on."""
    recipe = load_recipe("tiny-async", [
        "sampling.servers.launch=2", f"sampling.vllm.tensor_parallel_size={gpus}",
        "replay.warmup_steps=0", "engine.num_processes=2",
        "replay.drop_zero_variance=false",
    ])  # fmt: skip
    line = {
        "cost/generated_tokens": 1280, "cost/generation_seconds": 2.0 * gpus, "step_time": 4.0,
        "cost/trained_tokens": 2560, "cost/training_seconds": training,
    }  # fmt: skip
    lines = [json.dumps({"step": step, **line}) + "\n" for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "environment.json").write_text('{"world_size": 2}')
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    speed = measured_speed(open_source(tmp_path))
    assert speed.generated == 320 / gpus  # of one GPU of one server
    assert speed.measured_on == 2 * gpus
    two = Machines("cpu", (2,), 8 * GIB)
    found = time_of(recipe, two, speed, completion_tokens=10.0)
    assert found["hours"] == pytest.approx(240 * 4 / 3600, rel=0.01)


def test_experts_that_a_token_does_not_visit_and_frozen_weights_cost_less():
    expected = expected_of(
        load_recipe("qwen3-0.6b"), {"completion_tokens": 900.0, "prompt_tokens": 100.0}
    )
    attention = 6 * 10 * 1000 * 1000**2
    assert update_flops(SHAPE, expected) == 6 * 10**9 * 1000 + attention
    sparse = replace(SHAPE, active_parameters=10**8)
    assert update_flops(sparse, expected) == 6 * 10**8 * 1000 + attention
    lora = replace(SHAPE, adapters=10**6)
    assert update_flops(lora, expected) == (4 * 10**9 + 6 * 10**6) * 1000 + attention


def test_a_sampler_whose_logprobs_are_used_saves_the_pass():
    sampled = load_recipe("qwen3-1.7b", ["loss.behavior_logprobs=sampler"])
    speed = Speed(2000, 5000, "stated")
    assert time_of(sampled, FOUR_GPUS, speed)["other_seconds_per_step"] == 0
    # A measured run says how long the rest of a step takes.
    measured = Speed(2000, 5000, "measured", other_seconds=12)
    assert time_of(sampled, FOUR_GPUS, measured)["other_seconds_per_step"] == 12


def test_the_floor_is_that_of_the_longest_completion():
    assert GPUS["A100"].bandwidth == 2.04e12
    # 1 + 1/2 + 1/3 + 1/4 = 25/12 of the mean, and never more than the limit
    assert expected_longest(120, 1000, 4) == pytest.approx(250)
    assert expected_longest(120, 200, 4) == 200 and expected_longest(120, 200, 1) == 120
    # two rounds of 250 tokens of 2.04 GB at 2.04 TB/s: 1 ms each
    assert DecodeFloor(250, 2.04e9, "A100", rounds=2).seconds == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("overrides", "speed", "bytes_each"),
    [
        ([], Speed(2000, 5000, "assumed", assumed=True), 2),
        ([], Speed(2000, 5000, "measured", measured_on=1), 2),
        (["sampling.vllm.quantization=fp8_per_tensor"], Speed(1, 1, "", assumed=True), 1),
        (["sampling.vllm.tensor_parallel_size=2"], Speed(1, 1, "", assumed=True), 1),
        ([], Speed(2000, 5000, "measured", measured_on=4), None),
        ([], Speed(2000, 5000, "stated"), None),
        ([*SERVERS, "run.mode=async", "sampling.servers.launch=1"],
         Speed(1, 1, "", assumed=True), None),
    ],
)  # fmt: skip
def test_what_is_measured_at_this_size_or_stated_has_no_floor(overrides, speed, bytes_each):
    recipe = load_recipe("qwen3-1.7b", overrides)
    plan = SimpleNamespace(shape=SHAPE)
    found = _decode_floor(recipe, expected_of(recipe), plan, speed, FOUR_GPUS)
    assert (found and found.weight_bytes) == (bytes_each and bytes_each * 10**9)


def test_the_assumed_speed_is_a_share_of_the_peak_and_the_cost_ratio_of_the_plan():
    recipe = load_recipe("qwen3-0.6b")
    expected = expected_of(recipe, {"completion_tokens": 1000.0, "prompt_tokens": 0.0, "mu": 5.0})
    speed = assumed_speed(SHAPE, expected, "bfloat16")
    # 6 operations for each of 1e9 parameters, and 6 · 10 · 1,000 · 1,000 for attention, per token
    assert speed.trained == pytest.approx(0.3 * 989e12 / (6e9 + 6e7))
    assert speed.generated == pytest.approx(speed.trained / 5)
    assert speed.assumed and "μ 5" in speed.source and "H100" in speed.source
    known = assumed_speed(SHAPE, expected, "bfloat16", "NVIDIA A100-SXM4-80GB")
    assert known.trained / speed.trained == pytest.approx(312 / 989)


def test_one_stated_speed_gives_the_other_by_the_cost_ratio():
    recipe = load_recipe("qwen3-0.6b")
    expected = expected_of(recipe)
    assert expected.mu == 6.84
    trained = Known(trained_tokens_per_second=6840).stated_speed(expected.mu)
    assert (trained.generated, trained.trained) == (pytest.approx(1000), 6840)
    generated = Known(generated_tokens_per_second=1000).stated_speed(expected.mu)
    assert (generated.generated, generated.trained) == (1000, pytest.approx(6840))
    both = Known(1, 2).stated_speed(expected.mu)
    assert (both.generated, both.trained, both.source) == (1, 2, "stated")


def test_nothing_is_assumed_of_the_speed_of_a_cpu():
    recipe = load_recipe("tiny")
    assert _choose_speed(Known(), expected_of(recipe), None, "float32", CPU) is None
    unknown = {"steps": 240, "hours": None, "gpu_hours": None, "speed_is": None}
    assert time_of(recipe, CPU, None) == unknown


def test_the_speed_of_a_run_is_that_of_one_of_its_ranks(runs, tmp_path):
    lines = [json.loads(line) for line in (runs["ours"] / "metrics.jsonl").open()]
    generated = sum(line["cost/generated_tokens"] for line in lines)
    trained = sum(line["cost/trained_tokens"] for line in lines)
    generating = sum(line["cost/generation_seconds"] for line in lines)
    training = sum(line["cost/training_seconds"] for line in lines)
    for line in lines:
        both = line["cost/generation_seconds"] + line["cost/training_seconds"]
        line["step_time"] = both + 2.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "environment.json").write_text('{"world_size": 2}')
    speed = measured_speed(open_source(tmp_path))
    assert speed.generated == pytest.approx(generated / generating / 2)
    assert speed.trained == pytest.approx(trained / training / 2)
    assert speed.other_seconds == pytest.approx(2.5)
    assert str(tmp_path) in speed.source
    assert measured_speed(open_source(runs["ours"])) is None  # no step_time


def test_measured_values_replace_assumptions_and_say_so():
    recipe = load_recipe("qwen3-0.6b")
    found = expected_of(recipe, {"survival": 0.5, "completion_tokens": 700.0})
    assert (found.survival, found.completion_tokens, found.mu) == (0.5, 700, 6.84)
    assert found.sources["survival"] == "measured in the run"
    assert found.sources["mu"] == "paper B's Qwen3-0.6B"
    keeps_all = load_recipe("fifo-qwen3-0.6b")
    assert expected_of(keeps_all, {"survival": 0.5}).survival == 1
