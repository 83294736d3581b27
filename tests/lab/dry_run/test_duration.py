"""Hours of a run: worked by hand from measured speeds."""

import json

import pytest

from grpo_replay.lab.dry_run.estimates import (
    Speed,
    describe_replay,
    describe_step,
    describe_time,
    expected_of,
)
from grpo_replay.lab.dry_run.planner import Machines
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import measured_speed
from grpo_replay.recipe import load_recipe, recipe_to_yaml
from grpo_replay.storage.checkpoint import GIB

FOUR_GPUS = Machines("cuda", (4,), 80 * GIB, 4, elsewhere=True)
CPU = Machines("cpu", (1,), 8 * GIB)
ONE_GPU = Speed(2000, 5000, 0.5, "measured")


def time_of(recipe, machines, speed, **measured):
    expected = expected_of(recipe, measured)
    step, stored = describe_step(recipe, expected), describe_replay(recipe, expected)
    return describe_time(
        recipe, step, stored["first_replay_step"], expected, speed, machines.total_ranks,
        machines.on_cuda,
    )  # fmt: skip


def test_hours_by_hand():
    """256 rollouts of 1,000 tokens, 100 kept, 50 replayed from step 21 on; 200 steps, 4 GPUs of
    2,000 tokens/s generated and 5,000 trained, and half a second for the rest of a step.

    Generation 256,000 / 8,000 = 32 s. Updates 20 · 5 s + 180 · 7.5 s = 1,450 s. In all
    200 · 32.5 + 1,450 = 7,950 s = 2.21 h.
    """
    recipe = load_recipe("qwen3-1.7b")
    found = time_of(recipe, FOUR_GPUS, ONE_GPU, survival=100 / 256, completion_tokens=1000)
    assert found["generation_seconds_per_step"] == 32
    assert found["training_seconds_per_step"] == 7.5
    assert found["other_seconds_per_step"] == 0.5
    assert (found["hours"], found["gpu_hours"]) == (2.21, 8.83)


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
    found = time_of(recipe, hardware, Speed(500, 5000, 0.5, "measured"), completion_tokens=1000)
    assert found["generation_seconds_per_step"] == 2 * each


SERVERS = ["sampling.backend=vllm_server", "loss.behavior_logprobs=sampler"]


def test_servers_generate_and_their_gpus_count():
    """As above: 256,000 tokens on two GPUs of one server are 64 s, and 6 GPUs are in use."""
    launched = ["sampling.servers.launch=1", "sampling.vllm.tensor_parallel_size=2"]
    elsewhere = ["sampling.servers.urls=[http://a:1, http://b:1]"]
    for servers in (launched, elsewhere):
        recipe = load_recipe("qwen3-1.7b", [*SERVERS, *servers])
        found = time_of(recipe, FOUR_GPUS, ONE_GPU, survival=100 / 256, completion_tokens=1000)
        assert found["generation_seconds_per_step"] == 64
        assert found["hours"] == pytest.approx((200 * 64.5 + 1450) / 3600, rel=0.005)
        assert found["gpu_hours"] == pytest.approx(6 * found["hours"], rel=0.005)


@pytest.mark.parametrize("launched, hours", [(1, 200 * 128.5 / 3600), (32, 1550 / 3600)])
def test_an_asynchronous_step_takes_as_long_as_the_slower_of_servers_and_trainers(launched, hours):
    """One server needs 128 s a step, 32 need 4 s; updates take 5 s, 7.5 s from step 21 on;
    the rest of a step half a second."""
    recipe = load_recipe(
        "qwen3-1.7b", [*SERVERS, "run.mode=async", f"sampling.servers.launch={launched}"]
    )
    found = time_of(recipe, FOUR_GPUS, ONE_GPU, survival=100 / 256, completion_tokens=1000)
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


def test_without_a_measured_speed_there_are_no_hours():
    unknown = {"steps": 240, "hours": None, "gpu_hours": None, "speed_is": None}
    assert time_of(load_recipe("tiny"), CPU, None) == unknown


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
