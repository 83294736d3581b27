"""The dry run: known recipes, wrong recipes, and both output formats."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from grpo_replay.cli import dry_run_display as display
from grpo_replay.cli.app import app
from grpo_replay.cli.dry_run_display import _measured
from grpo_replay.engine import models
from grpo_replay.engine.models import load_config
from grpo_replay.errors import RecipeError
from grpo_replay.lab.dry_run import planner
from grpo_replay.lab.dry_run import start_checks as checks
from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.lab.dry_run.estimates import Known, Speed
from grpo_replay.lab.dry_run.memory import ModelShape, SamplerMemory
from grpo_replay.lab.dry_run.planner import (
    Findings,
    Generation,
    Machines,
    advise,
    find_machines,
    plan_sampler,
    rungs,
)
from grpo_replay.lab.dry_run.start_checks import (
    check_devices,
    check_disk_space,
)
from grpo_replay.recipe import load_recipe
from grpo_replay.sampling.vllm_requests import engine_arguments
from grpo_replay.storage.atomic import free_bytes
from grpo_replay.storage.checkpoint import GIB, stored_bytes


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def no_verifier(monkeypatch):
    """Verifier processes take seconds to start; test_dry_run_rewards.py has them."""
    monkeypatch.setattr(checks, "check_rewards", lambda *_: None)


def report_of(name: str, *overrides: str, gpu: float | None = None, nodes: int = 1) -> dict:
    recipe = load_recipe(name, list(overrides))
    ranks = [recipe.engine.num_processes] * nodes
    return dry_run(recipe, gpu, ranks_of_nodes=ranks)


def test_the_4b_plan_on_eight_gpus_of_80_gib():
    report = report_of("qwen3-4b", gpu=80)
    memory = report["memory"]
    assert report["fits"] is True and report["advice"] is None
    assert report["model"]["parameters"] == 4_022_468_096 and report["model"]["tied_head"]
    parameters, ranks = 4_022_468_096, 8
    assert memory["parameters_gib"] == pytest.approx(2 * parameters / ranks / 2**30, abs=1e-3)
    # master weights and moments, and the gradient shards that ZeRO-3 holds
    assert memory["optimizer_gib"] == pytest.approx(14 * parameters / ranks / 2**30, abs=1e-3)
    assert memory["gradients_gib"] == memory["parameters_gib"]
    assert memory["sampler_awake_gib"] == 48 and memory["sampler_asleep_gib"] == 1.5
    training = memory["phases_gib"]["forward_backward"]
    assert training == pytest.approx(
        1.5 + sum(memory[f"{name}_gib"] for name in (
            "base", "parameters", "gradients", "optimizer", "gathered", "bucket", "activations",
            "backward_work",
        )), abs=0.01,
    )  # fmt: skip
    # after an evaluation: bf16 weights and counters of 1,024 requests, rounded up by torch
    pinned = 1.5 * (2 * parameters + 1024 * 4 * (151_936 + 151_936 / 32)) / 2**30
    assert report["storage"]["sampler_host_gib_per_rank"] == pytest.approx(pinned, abs=0.01)
    # 36 layers, one bf16 hidden state of 2,560 per token of two rows of 9,216, and the last ones
    assert memory["activations_gib"] > 36 * 2 * 2560 * 18_432 / 2**30
    assert report["sampler"]["longest_rollouts_at_once"] >= 8
    assert memory["peak_gib"] == max(memory["phases_gib"].values()) < 80


@pytest.mark.slow
def test_the_4b_plan_with_lora_on_one_gpu_of_80_gib():
    one = ("engine.num_processes=1",)
    full = report_of("qwen3-4b", *one, gpu=80)
    assert full["fits"] is False
    report = report_of("qwen3-4b", "model.lora.r=16", *one, gpu=80)
    memory, parameters = report["memory"], 4_022_468_096
    # 36 layers: q, k, v, o, gate, up and down, r·(in + out) each
    inputs_and_outputs = 2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728)
    adapters = 36 * 16 * inputs_and_outputs
    assert report["model"]["adapter_parameters"] == adapters == 33_030_144
    assert report["fits"] is True
    assert memory["parameters_gib"] == pytest.approx(2 * (parameters + adapters) / 2**30, abs=1e-3)
    assert memory["optimizer_gib"] == pytest.approx(12 * adapters / 2**30, abs=1e-3)
    assert memory["peak_gib"] < 80
    # the merged model, and of the adapters bf16 values twice, fp32 ones and two moments
    checkpoint = (2 * parameters + 16 * adapters) / 2**30
    assert report["storage"]["checkpoint_gib"] == pytest.approx(checkpoint, abs=1e-3)


def test_refills_are_in_the_estimate():
    survival = 124.9 / 256
    once = report_of("qwen3-4b", gpu=80)["step"]
    twice = report_of("qwen3-4b", "sampling.max_refills=1", gpu=80)["step"]
    assert once["generated_rollouts"] == 256
    assert twice["generated_rollouts"] == round(256 * (2 - survival))
    assert twice["surviving_rollouts_expected"] == round(256 * (2 - survival) * survival)
    assert twice["generated_tokens_most"] == 2 * once["generated_tokens_most"]


def test_rollouts_and_tokens_of_a_step_of_paper_a():
    report = report_of("qwen3-1.7b", gpu=80)
    step, replay = report["step"], report["replay"]
    assert step["generated_rollouts"] == 256
    assert step["generated_tokens_most"] == 256 * 8192
    # paper A at 1.7B: 112.7 survivors, so 56 replayed and 169 trained on
    assert step["surviving_rollouts_expected"] == 113
    assert (step["replayed_rollouts_expected"], step["trained_rollouts_expected"]) == (56, 169)
    assert replay["first_replay_step"] == 21 and replay["horizon_steps"] == 10
    assert replay["stored_rollouts_expected"] == 1127 and not replay["capacity_binds"]
    assert replay["stored_rollouts_most"] == 2560
    # ids and two log-probs of 8,192 tokens, prompts of 1,024 ids, objects; no text
    most = 2560 * (12 * 8192 + 4 * 1024 + 1000) / 2**30
    assert report["storage"]["buffer_memory_gib_most"] == pytest.approx(most, abs=1e-3)


def test_dry_run_and_plan_agree_on_the_size_of_the_buffer(capsys):
    from commands import run_plan as run

    # The same rollouts in both: all survive, none is shorter than the longest.
    lengths = ("prompts.max_prompt_length=1024", "sampling.max_completion_length=8192")
    report = report_of("qwen3-1.7b", *lengths, gpu=80)
    run(recipe="qwen3-1.7b", overrides=lengths, mu=5.0, survival=1.0, as_json=True)
    plan = json.loads(capsys.readouterr().out)
    assert plan["current"]["stored_rollouts"] == report["replay"]["stored_rollouts_most"]
    assumed = plan["assumptions"]
    said = stored_bytes(2560, assumed["prompt_tokens"], assumed["completion_tokens"])
    assert plan["current"]["memory_bytes"] == pytest.approx(said, rel=1e-6)
    most = stored_bytes(2560, 1024, 8192) / 2**30
    assert report["storage"]["buffer_memory_gib_most"] == pytest.approx(most, abs=1e-3)


def test_a_sampler_that_is_never_evaluated_with_copies_nothing_to_host_memory():
    report = report_of("qwen3-4b", "eval.benchmarks=[]", gpu=80)
    assert report["storage"]["sampler_host_gib_per_rank"] == 0
    eager = report_of("qwen3-4b", "sampling.vllm.enforce_eager=true", gpu=80)
    assert eager["memory"]["sampler_asleep_gib"] == 0.5
    assert "0.5 GiB for vLLM's buffers, which stay while it sleeps" in str(eager["assumptions"])
    assert "graphs" not in str(eager["assumptions"])


@pytest.mark.slow
def test_plain_grpo_stores_nothing_and_fifo_fills_its_capacity():
    grpo = report_of("qwen3-1.7b", "replay.preset=grpo", gpu=80)
    assert grpo["replay"]["stored_rollouts_most"] == 0
    assert grpo["replay"]["first_replay_step"] is None
    assert grpo["step"]["trained_rollouts_expected"] == 113
    fifo = report_of("fifo-qwen3-0.6b", gpu=80)
    assert fifo["replay"]["stored_rollouts_expected"] == 84
    assert fifo["step"]["trained_rollouts_expected"] == 60
    assert fifo["replay"]["first_replay_step"] == 1


def test_an_age_limit_of_60_steps_makes_the_capacity_bind_at_256_prompts():
    report = report_of(
        "qwen3-1.7b", "replay.max_age_steps=60", "sampling.prompts_per_step=256", gpu=80
    )
    assert report["replay"]["capacity_binds"]
    assert report["replay"]["stored_rollouts_most"] == 30_000


PLANS = {
    # the machines, and what the overrides that fit begin with
    "one of 24 GB": (24, 1, 1, "model.lora.r="),
    "one of 80 GB": (80, 1, 1, "model.lora.r="),
    "eight of 80 GB": (80, 8, 1, None),
    "four nodes of eight": (80, 8, 4, None),
    "eight of 16 GB": (16, 8, 1, "model.lora.r="),
}


@pytest.mark.parametrize("gib, gpus, nodes, first", PLANS.values(), ids=PLANS)
def test_the_4b_plan_fits_or_gets_a_set_of_overrides_with_which_it_does(
    monkeypatch, gib, gpus, nodes, first
):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    one = f"engine.num_processes={gpus}"
    report = report_of("qwen3-4b", one, gpu=gib, nodes=nodes)
    assert report["hardware"]["processes"] == gpus * nodes
    advice = report["advice"]
    if first is None:
        assert advice is None and report["fits"] is True and report["exit_code"] == 0
        return
    assert report["fits"] is False and report["exit_code"] == 2
    assert advice["fits"] and advice["set"][0].startswith(first)
    assert not any("num_processes" in each for each in advice["set"])
    again = report_of("qwen3-4b", one, *advice["set"], gpu=gib, nodes=nodes)
    assert again["memory"]["fits"] and again["memory"]["peak_gib"] == advice["peak_gib"] <= gib


def test_advice_names_only_what_is_needed():
    small = report_of("qwen3-4b", "model.gradient_checkpointing=false", gpu=80)
    assert small["fits"] is False
    assert small["advice"]["set"] == ["model.gradient_checkpointing=true"]


def test_four_nodes_shard_over_all_their_ranks():
    one, four = (report_of("qwen3-4b", gpu=80, nodes=nodes) for nodes in (1, 4))
    parts = ("parameters_gib", "optimizer_gib")
    for part in parts:
        assert four["memory"][part] == pytest.approx(one["memory"][part] / 4, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, advised", [(8, ["engine.num_processes=1"]), (1, None)])
def test_no_more_gpus_are_used_or_advised_than_there_are(monkeypatch, ranks, advised):
    import torch

    class Properties:
        total_memory = 80 * GIB

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    report = report_of("qwen3-0.6b", f"engine.num_processes={ranks}")
    said = [each for each in report["problems"] if "engine.num_processes" in each]
    assert [("this machine has 1 GPUs" in each) for each in said] == [True] * (advised is not None)
    assert (report["advice"] and report["advice"]["set"]) == advised


def test_a_problem_is_no_plan_that_fits():
    report = report_of("tiny", "model.path=nowhere/at/all/of/it")
    assert report["exit_code"] == 3 and report["problems"]
    assert report["fits"] is False


def test_attention_for_gpus_is_a_problem_on_a_cpu():
    report = report_of("tiny", "engine.device=cpu", "model.attn_implementation=flex_attention")
    assert "model.attn_implementation flex_attention needs a GPU; use sdpa" in report["problems"]


@pytest.mark.parametrize("key", ["replay.priority", "advantage.estimator", "loss.kind"])
def test_a_function_that_cannot_be_loaded_is_a_problem(key):
    report = report_of("tiny", f"{key}=nowhere.py:f")
    assert any(f"{key} " in text and "no file" in text for text in report["problems"])


def test_every_rung_is_a_valid_set_of_overrides():
    given = ["model.gradient_checkpointing=false", "engine.zero_stage=2"]
    recipe = load_recipe("qwen3-4b", given)
    found = list(rungs(recipe, Machines("cuda", (8,), 80 * GIB, 8)))
    assert len(found) >= 8
    for rung in found:
        load_recipe("qwen3-4b", [*given, *rung])


@pytest.mark.slow
def test_a_share_too_small_for_one_rollout_does_not_fit():
    report = report_of("qwen3-4b", "sampling.vllm.gpu_memory_utilization=0.12", gpu=80)
    assert report["fits"] is False and report["sampler"]["longest_rollouts_at_once"] == 0
    (word,) = report["advice"]["set"]
    assert word.startswith("sampling.vllm.gpu_memory_utilization=")


def test_vllm_needs_room_for_no_more_tokens_than_the_model_has_positions():
    longer = ["sampling.backend=vllm", "eval.max_completion_length=4000"]
    recipe = load_recipe("tiny", longer)
    assert recipe.longest_sequence == 4016
    sampler = report_of("tiny", *longer)["sampler"]
    assert sampler["model_length_tokens"] == 128
    assert (
        engine_arguments(recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=False)[
            "max_model_len"
        ]
        == 128
    )


def test_the_warning_of_float32_counts_the_rollouts_that_train(monkeypatch):
    asked = []
    monkeypatch.setattr(models, "float32_warning", lambda *words: asked.append(words[2]))
    report_of("tiny", "sampling.max_completion_length=24", "eval.max_completion_length=90")
    assert asked == [16 + 24]


def test_a_max_model_len_beyond_the_positions_is_refused_only_with_vllm():
    too_long = "sampling.vllm.max_model_len=129"
    refused = report_of("tiny", "sampling.backend=vllm", too_long)
    assert any("max_model_len 129 exceeds the 128 positions" in p for p in refused["problems"])
    assert report_of("tiny", too_long)["fits"] is True


@pytest.mark.slow
def test_zero_stages_shrink_what_a_rank_holds():
    at_rest = []
    for stage in (0, 1, 2, 3):
        memory = report_of("qwen3-1.7b", f"engine.zero_stage={stage}", gpu=80)["memory"]
        at_rest.append(memory["parameters_gib"] + memory["optimizer_gib"] + memory["gradients_gib"])
    assert at_rest == sorted(at_rest, reverse=True) and at_rest[3] < 0.3 * at_rest[0]


def test_hub_components_that_cannot_be_checked_are_listed():
    report = report_of("qwen3-0.6b", gpu=80)
    text = "\n".join(report["unchecked"])
    for part in (
        "tokenizer of Qwen/Qwen3-0.6B-Base",
        "weights of Qwen/",
        "prompts of agentica-org/",
    ):
        assert part in text
    assert "sizes of Qwen/Qwen3-0.6B-Base from the configuration shipped" in str(
        report["assumptions"]
    )


@pytest.mark.slow
def test_chat_models_of_qwen3_have_more_positions_than_base_models():
    settings = (
        "sampling.max_completion_length=32768", "sampling.vllm.max_model_len=null",
        "batch.max_tokens_per_microbatch=36864",
    )  # fmt: skip
    assert load_recipe("fifo-qwen3-0.6b").model.path == "Qwen/Qwen3-0.6B"
    report = report_of("fifo-qwen3-0.6b", *settings, gpu=80)
    assert report["sampler"]["model_length_tokens"] > 32_768
    base = report_of("fifo-qwen3-0.6b", *settings, "model.path=Qwen/Qwen3-0.6B-Base", gpu=80)
    assert any("room for 32768" in problem for problem in base["problems"])


@pytest.mark.parametrize(
    "overrides, elsewhere, gpus",
    [
        (["sampling.backend=vllm"], False, None),
        (["sampling.backend=vllm_server", "sampling.servers.launch=1"], False,
         "engine.num_processes 4: this machine has 3 GPUs for them, and 1 for the servers"),
        (["sampling.backend=vllm_server", "sampling.servers.launch=2",
          "sampling.vllm.tensor_parallel_size=2"], True,
         "GPUs: the recipe uses 4 on each node and 4 for the servers that it starts"),
    ],
)  # fmt: skip
def test_what_a_run_needs_of_vllm_and_gpus_is_checked(monkeypatch, overrides, elsewhere, gpus):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    recipe = load_recipe("tiny", ["engine.num_processes=4", *overrides])
    findings = Findings()
    machines = Machines("cuda", (4,), 80 * GIB, 4 if gpus is None else 3, elsewhere)
    check_devices(recipe.model, recipe.sampling, machines, findings)
    said = findings.unchecked if elsewhere else findings.problems
    assert f"sampling.backend {recipe.sampling.backend}: vLLM is not installed" in said[-1]
    assert [gpus in each for each in said[:-1]] if gpus else len(said) == 1


@pytest.mark.slow
def test_advice_reads_the_configuration_once_whatever_it_tries(monkeypatch):
    reads = Mock(side_effect=load_config)
    monkeypatch.setattr("grpo_replay.engine.models.load_config", reads)
    recipe = load_recipe("tiny", ["model.random_init={num_hidden_layers: 2}"])
    found = advise(recipe, Machines("cpu", (1,), 1))
    assert found is not None and len(found.overrides) > 1 and reads.call_count == 1


@pytest.mark.slow
def test_overrides_that_contradict_another_setting_are_not_advised():
    overlong = load_recipe("tiny", ["reward.overlong_buffer_tokens=15"])  # of 20
    found = advise(overlong, Machines("cpu", (1,), 1))
    assert found is not None and not found.plan.fits
    assert not any("max_completion_length" in word for word in found.overrides)


def test_the_nodes_of_a_hostfile_are_planned_without_contacting_them(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("far-a slots=2\nfar-b slots=4\n")
    words = ["train", "tiny", "--dry-run", "--json", "--hostfile", str(hosts)]
    report = json.loads(CliRunner().invoke(app, words).stdout)
    assert (report["hardware"]["nodes"], report["hardware"]["processes"]) == (2, 6)
    both = CliRunner().invoke(app, [*words, "--nodes", "2"])
    assert both.exit_code == 2 and "choose one" in str(both.exception) + both.output
    alone = CliRunner().invoke(app, ["train", "tiny", "--nodes", "2"])
    assert "--nodes needs --dry-run" in str(alone.exception) + alone.output


def test_servers_elsewhere_need_neither_vllm_nor_gpus_here(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    report = report_of("tiny", "sampling.backend=vllm_server", "sampling.servers.urls=[http://a:1]")
    assert report["problems"] == []


def test_there_is_no_verdict_for_an_unknown_model():
    report = report_of("qwen3-0.6b", "model.path=nobody/nothing-at-all", gpu=80)
    assert report["fits"] is None and report["memory"] is None
    assert "sizes of the model" in report["unchecked"][-1]
    assert report["step"]["generated_rollouts"] == 256


@pytest.fixture
def model_folder(tmp_path):
    """A tiny model without a tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=32, intermediate_size=32, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_folder_without_a_tokenizer_is_a_problem(model_folder):
    report = report_of("tiny", f"model.path={model_folder}")
    assert any("no tokenizer in" in problem for problem in report["problems"])
    assert report["fits"] is False and report["memory"]["fits"] and report["exit_code"] == 3


def test_a_model_folder_without_weights_is_a_problem(model_folder):
    for file in model_folder.glob("*.safetensors"):
        file.unlink()
    report = report_of("tiny", f"model.path={model_folder}")
    assert any("no weights in" in problem for problem in report["problems"])
    missing = report_of("tiny", f"model.path={model_folder / 'missing'}")
    assert not missing["fits"] and not any("no weights" in each for each in missing["problems"])


def test_a_wrong_dataset_field_is_a_problem_with_its_line(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2"}\n')
    report = report_of("tiny", f"prompts.source={file}")
    assert any("train.jsonl:2" in p and "'answer'" in p for p in report["problems"])


def test_benchmark_files_are_read_and_compared_with_the_prompts(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text("problem,answer\n1+1,2\n2+2,4\n")
    own = [f"prompts.source={file}", "prompts.id_field=null"]
    report = report_of("tiny", *own, f"eval.benchmarks=[{file}]")
    said = [each for each in report["assumptions"] if "2 of 2 problems of benchmark" in each]
    assert len(said) == 1 and "'train' are also training prompts" in said[0]
    assert any("fewer than sampling.prompts_per_step" in each for each in report["assumptions"])
    report = report_of("tiny", *own, f"eval.benchmarks=[{tmp_path}/none.csv]")
    assert any("none.csv does not exist" in problem for problem in report["problems"])


def benchmark_of(tmp_path, terms: int) -> str:
    file = tmp_path / "held_out.jsonl"
    rows = [("1+2", "3"), ("+".join("1" * terms), str(terms))]
    file.write_text("".join(json.dumps({"problem": p, "answer": a}) + "\n" for p, a in rows))
    return f"eval.benchmarks=[{file}]"


def test_a_problem_of_a_benchmark_that_is_too_long_stops_the_run(tmp_path):
    """`1+…+1=` of 30 ones takes 60 tokens, of 16 allowed."""
    report = report_of("tiny", benchmark_of(tmp_path, 30), "prompts.max_prompt_length=16")
    (problem,) = report["problems"]
    assert "benchmark 'held_out', problem '1': its prompt has 60 tokens, more than" in problem
    assert report["exit_code"] == 3 and report["fits"] is False
    assert report_of("tiny", benchmark_of(tmp_path, 4))["problems"] == []


def test_an_evaluation_that_is_greedy_twice_stops_the_run():
    report = report_of("tiny", "eval.greedy=true", "eval.temperature=0")
    (problem,) = report["problems"]
    assert "evaluates greedily twice: set only one" in problem and report["exit_code"] == 2
    assert report_of("tiny", "eval.greedy=false", "eval.temperature=0")["problems"] == []


def test_an_evaluated_prompt_and_its_completion_need_room_in_the_model(tmp_path):
    """`1+…+1=` of 50 ones takes 100 tokens: of 128 positions, a completion has 28."""
    own = [benchmark_of(tmp_path, 50), "prompts.max_prompt_length=110",
           "batch.max_tokens_per_microbatch=400"]  # fmt: skip
    assert report_of("tiny", *own, "eval.max_completion_length=28")["problems"] == []
    (problem,) = report_of("tiny", *own, "eval.max_completion_length=29")["problems"]
    assert "a prompt of 100 tokens and a completion of up to 29 are 129 tokens" in problem
    assert "lower eval.max_completion_length for the evaluation" in problem


def test_prompts_of_a_hub_dataset_are_unchecked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = report_of("tiny", "prompts.source=[./here.jsonl, openai/gsm8k]")
    assert report["problems"] == [] and report["prompt"] is None
    said = "here.jsonl, openai/gsm8k: the run reads a hub dataset at its start"
    assert any(said in each for each in report["unchecked"])


@pytest.mark.parametrize(("function", "columns"), [
    ("minerva", {"problem", "answer"}), ("own.py:score", {"problem", "answer", "level"}),
])  # fmt: skip
def test_rows_are_read_as_by_the_run(tmp_path, monkeypatch, function, columns):
    """A built-in verifier reads no column of its own."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def score(completion, answer, row):\n    return 1.0\n")
    Path("rows.jsonl").write_text('{"problem": "1+1", "answer": "2", "level": 3}\n')
    own = ["prompts.source=rows.jsonl", "prompts.id_field=null", f"reward.function={function}"]
    recipe = load_recipe("tiny", own)
    machines = find_machines("cpu", [1], 0, None)
    prompts, _ = checks.check_parts(recipe, recipe.model, machines, Findings())
    assert set(prompts.sample(1)[0].row) == columns


def own_additions(tmp_path, question: str) -> list[str]:
    file = tmp_path / "train.csv"
    rows = [f"{question.format(a=a, b=a + 7)},{2 * a + 7}" for a in range(20, 80)]
    file.write_text("\n".join(["question,solution", *rows]) + "\n")
    return [f"prompts.source={file}", "prompts.problem_field=question",
            "prompts.answer_field=solution", "prompts.id_field=null",
            f"eval.benchmarks=[{file}]", "prompts.max_prompt_length=128",
            "batch.max_tokens_per_microbatch=16384"]  # fmt: skip


@pytest.mark.parametrize("prompt", [None, 40])
def test_a_completion_that_leaves_no_room_is_one_problem(tmp_path, monkeypatch, capsys, prompt):
    """Of 128 positions, `What is 20 + 27?` takes 17 tokens with a beginning token and `=`."""
    own = own_additions(tmp_path, "What is {a} + {b}?")
    if prompt is None:  # prompts that cannot be read from here
        monkeypatch.setattr(checks, "_check_prompts", lambda *_: None)
    recipe = load_recipe("tiny", [*own, "sampling.max_completion_length=8192"])
    report = dry_run(recipe)
    (problem,) = report["problems"]
    assert "sampling.max_completion_length 8192 leaves no room for a prompt" in problem
    longest = 1 if prompt is None else 17
    assert f"room for 128 (its positions, or sampling.vllm.max_model_len): lower it to " \
        f"{128 - longest} or less" in problem  # fmt: skip
    assert report["exit_code"] == 2 and report["memory"]["fits"]
    display.run(recipe)
    shown = capsys.readouterr().out
    assert "None" not in shown and shown.count("no room for a prompt") == 2  # first and last


def test_prompts_of_unknown_characters_are_among_the_first_lines(tmp_path, capsys):
    own = own_additions(tmp_path, "What is {a} + {b}?")
    recipe = load_recipe("tiny", own)
    report = dry_run(recipe)
    (said,) = report["warnings"]
    assert said.startswith("60 of 60 prompts have characters that the tokenizer does not have")
    assert said not in report["assumptions"] and report["exit_code"] == 0
    display.run(recipe)
    assert capsys.readouterr().out.startswith("warning: 60 of 60 prompts")


def test_unknown_characters_of_some_prompts_are_a_notice(tmp_path):
    own = own_additions(tmp_path, "{a}+{b}")
    file = tmp_path / "train.csv"
    file.write_text(file.read_text().replace("20+27", "20 plus 27"))
    report = report_of("tiny", *own)
    assert report["warnings"] == [] and "1 of 60 prompts have" in str(report["assumptions"])


def test_one_prompt_is_shown_as_the_model_sees_it(tmp_path, capsys):
    own = own_additions(tmp_path, "{a}+{b}")
    recipe = load_recipe("tiny", [*own, 'prompts.user_template="[b]\\n{problem}="'])
    assert dry_run(recipe)["prompt"] == "[b]\n20+27="
    display.run(recipe)
    assert 'first prompt: "[b]\\n20+27="' in capsys.readouterr().out
    assert report_of("qwen3-4b", gpu=80)["prompt"] is None  # its prompts cannot be read here
    assert display._excerpt("a" * 200 + "b" * 2000 + "c" * 100) == (
        f'"{"a" * 200}" … 2,000 characters … "{"c" * 100}"'
    )


def test_settings_that_cannot_work_are_problems():
    report = report_of("tiny", "engine.offload=optimizer", "engine.zero_stage=3")
    assert any("offloading needs a GPU" in problem for problem in report["problems"])
    report = report_of("qwen3-4b", "sampling.vllm.tensor_parallel_size=3", gpu=80)
    assert any("tensor_parallel_size 3 does not divide" in p for p in report["problems"])


def test_lengths_beyond_the_models_positions_are_a_problem():
    longer = ["sampling.max_completion_length=38976", "batch.max_tokens_per_microbatch=40000"]
    report = report_of("qwen3-4b", *longer)
    said = "max_completion_length 38976 leaves no room for a prompt"
    assert any(said in each and "room for 17408" in each for each in report["problems"])
    assert (report["fits"], report["exit_code"]) == (False, 2)


LONG_LIMITS = ["prompts.max_prompt_length=1024", "sampling.max_completion_length=32"]


def test_limits_beyond_the_positions_are_allowed_if_no_prompt_is_so_long():
    report = report_of("tiny", *LONG_LIMITS)  # 1,056 tokens at most, 128 positions
    assert report["problems"] == [] and report["fits"] is True
    assert report["sampler"]["model_length_tokens"] == 128


@pytest.mark.slow
def test_a_run_accepts_the_lengths_that_its_dry_run_accepts(tmp_path):
    words = ["run.steps=1", "replay.preset=grpo", "eval.benchmarks=[]", *LONG_LIMITS]
    overrides = [word for each in words for word in ("--set", each)]
    done = run_cli("tiny", *overrides, "--output-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("sampling.max_completion_length=126", "lower sampling.max_completion_length, or prompts"),
        ("eval.max_completion_length=128", "eval.max_completion_length 128 leaves no room"),
    ],
)
def test_a_completion_without_room_is_a_problem_before_the_run_refuses_it(override, problem):
    (found,) = report_of("tiny", override)["problems"]
    assert problem in found and "builtin:tiny has room for 128" in found


def test_prompts_that_were_not_read_may_be_too_long_for_the_model():
    longer = ["prompts.max_prompt_length=30000", "batch.max_tokens_per_microbatch=40000",
              "sampling.vllm.max_model_len=32768"]  # fmt: skip
    said = str(report_of("qwen3-4b", *longer, gpu=80)["unchecked"])
    assert "prompts of more than 24576 tokens" in said and "8192" in said
    assert "prompts of more than" not in str(report_of("qwen3-4b", gpu=80)["unchecked"])


def test_hours_come_from_a_run_and_from_nothing_else(runs, capsys):
    unknown = report_of("qwen3-4b", gpu=80)
    assert unknown["time"]["hours"] is None and "hours" not in str(unknown["assumptions"])
    assert "--from-run" not in str(unknown)  # of `train` alone: a sweep has no such option
    display.run(load_recipe("qwen3-4b"), gpu_memory_gib=80)
    shown = capsys.readouterr().out
    assert "hours come with --from-run DIR" in shown and "GPU-hours" not in shown
    known = _measured(str(runs["ours"]))
    longer = dry_run(load_recipe("qwen3-4b"), 80, known=known)
    assert longer["step"]["generated_tokens_expected"] == round(
        known.measured["completion_tokens"] * 256
    )
    assert "measured in the run" in str(longer["assumptions"])


@pytest.mark.parametrize("measured_on, linear", [(None, False), (8, False), (1, True)])
def test_a_speed_says_where_it_is_from_and_whether_it_is_carried_over(measured_on, linear):
    known = Known(speed=Speed(2000, 5000, 1.0, "measured in runs/a", measured_on))
    report = dry_run(load_recipe("qwen3-4b"), 80, known=known)
    assert report["time"]["gpu_hours"] == pytest.approx(8 * report["time"]["hours"], rel=0.01)
    (said,) = [each for each in report["assumptions"] if each.startswith("hours: ")]
    assert "2,000 tokens generated and 5,000 trained" in said and "measured in runs/a" in said
    assert ("however many GPUs there are" in said) is linear


def test_zero_3_options_and_batches_that_cannot_be_are_refused_by_the_recipe():
    with pytest.raises(RecipeError, match=r"engine\.offload everything needs engine\.zero_stage 3"):
        load_recipe("qwen3-4b", ["engine.offload=everything", "engine.zero_stage=2"])
    with pytest.raises(RecipeError, match="less than the longest possible rollout, 9216 tokens"):
        load_recipe("qwen3-4b", ["batch.max_tokens_per_microbatch=9000"])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_a_problem(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    (problem,) = report_of("tiny", f"tracking.report_to=[tensorboard, {name}]")["problems"]
    assert f"tracking.report_to names '{name}'" in problem and f"'grpo-replay[{name}]'" in problem
    assert report_of("tiny", "tracking.report_to=[tensorboard]")["problems"] == []


def test_without_peft_a_recipe_with_lora_still_gets_its_report(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    report = report_of("tiny", "model.lora.r=8")
    (problem,) = report["problems"]
    assert problem == (
        "model.lora needs peft, which is not installed: pip install 'grpo-replay[lora]'"
    )
    assert report["memory"]["fits"] and report["model"]["adapter_parameters"] > 0
    assert report["fits"] is False and report["exit_code"] == 2


def test_the_sampler_has_room_for_the_rollouts_of_an_evaluation(monkeypatch):
    """tiny: 128 rollouts a step; in an evaluation 500 problems x 4 samples and a greedy one."""
    counted = []

    def count(shape, dtype_bytes, rows, prompt_tokens, completion_tokens, on_cuda):
        counted.append((rows, completion_tokens))
        return SamplerMemory(rows, 0, None)

    monkeypatch.setattr(planner, "hf_memory", count)
    gib = report_of("tiny", "eval.max_completion_length=24")["memory"]["sampler_awake_gib"]
    assert counted == [(128, 20), (1024, 24)] and gib == round(1024 / GIB, 3)
    counted.clear()
    report_of("tiny", "sampling.max_batch_rollouts=64")
    report_of("tiny", "eval.benchmarks=[]")
    assert counted == [(64, 20), (64, 20), (128, 20)]


def test_an_evaluation_that_does_not_fit_is_sampled_in_smaller_batches():
    recipe = load_recipe("tiny", ["sampling.max_batch_rollouts=1000000"])
    found = advise(recipe, Machines("cpu", (1,), 2 * GIB), Generation(1_000_000, 16, 20))
    assert found.plan.fits and found.overrides == ("sampling.max_batch_rollouts=256",)


def test_the_dtype_of_the_sampler_decides_what_it_holds_on_a_cpu_too(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    shape = ModelShape(
        parameters=2**30, largest_parameter=1, tied_head=True, layers=1,
        hidden=8, vocabulary=50, kv_elements_per_token=64, attention_width=8, max_positions=128,
    )  # fmt: skip

    def sampler(dtype: str) -> SamplerMemory:
        recipe = load_recipe("tiny", ["sampling.backend=vllm", f"sampling.vllm.dtype={dtype}"])
        size = {"float32": 4, "bfloat16": 2}[recipe.sampled_dtype]
        return plan_sampler(recipe.sampling, 16, size, shape, Machines("cpu", (1,), GIB))

    assert sampler("auto").awake == sampler("float32").awake == 4 * GIB + GIB  # 1 GiB of cache
    assert sampler("bfloat16").awake == 2 * GIB + GIB
    assert sampler("bfloat16").cache_tokens == 2 * sampler("auto").cache_tokens


@pytest.mark.slow
def test_a_hub_tokenizer_that_cannot_be_used_says_why(tmp_path):
    """A tokenizer without EOS, cached as the hub's client does."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    commit = "0123456789" * 4
    snapshot = tmp_path / "hub/models--somebody--digits/snapshots" / commit
    snapshot.mkdir(parents=True)
    words = Tokenizer(models.WordLevel({"1": 0, "2": 1}, unk_token="1"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(snapshot)
    (snapshot / "config.json").write_text('{"model_type": "qwen3"}')
    refs = tmp_path / "hub/models--somebody--digits/refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    done = run_cli(
        "tiny", "--dry-run", "--json", "--set", "model.tokenizer=somebody/digits",
        HF_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["unchecked"]
    assert any("somebody/digits" in line and "no EOS token" in line for line in said)


def run_cli(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from grpo_replay.cli.app import main; main()", "train", *words],
        capture_output=True, text=True, timeout=120, env={**os.environ, **variables},
    )  # fmt: skip


@pytest.mark.slow
def test_json_is_one_document_on_stdout_and_the_exit_code_says_that_it_does_not_fit():
    words = ["train", "qwen3-4b", "--dry-run", "--json", "--gpu-memory-gib", "4"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.stderr
    report = json.loads(done.stdout)
    assert report["fits"] is False
    assert {"problems", "unchecked", "assumptions", "memory", "step", "replay", "storage", "time",
            "sampler", "model", "hardware", "advice", "exit_code"} <= set(report)  # fmt: skip


@pytest.mark.slow
def test_what_deepspeed_says_when_it_is_loaded_is_not_in_the_document():
    """It is loaded for settings of its own, and would look for a GPU aloud."""
    done = run_cli("tiny", "--dry-run", "--json", "--set", "engine.zero.overlap_comm=true",
                   "--set", "eval.benchmarks=[]", CUDA_VISIBLE_DEVICES="")  # fmt: skip
    assert json.loads(done.stdout)["fits"] is True and "Setting accelerator" not in done.stderr


def test_the_screen_begins_with_the_problems_and_ends_with_the_answer():
    words = ["train", "tiny", "--dry-run", "--set", "model.path=nowhere/at/all"]
    done = CliRunner().invoke(app, words)
    lines = done.stdout.splitlines()
    assert done.exit_code == 3 and lines[0].startswith("problem: ")
    assert lines[-1] == lines[0].replace("problem", "would not start", 1)


@pytest.mark.slow
def test_a_plan_without_room_says_so_in_its_last_line(capsys):
    display.run(load_recipe("qwen3-4b"), gpu_memory_gib=4.0)
    assert capsys.readouterr().out.splitlines()[-1] == "would not start: not enough memory"


LORA = ["engine.num_processes=1", "model.lora.r=16", "optimizer.learning_rate=1e-5"]


def test_little_room_on_an_assumed_gpu_is_remarked_on(capsys):
    report = report_of("qwen3-4b", *LORA, gpu=24)
    assert report["fits"] is True and report["memory"]["tight"] is True
    display.run(load_recipe("qwen3-4b", LORA), gpu_memory_gib=24.0)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "fits, tight: only 0.7 GiB are left: 23.3 of 24.0 GiB at the peak (generation)"
    assert report_of("qwen3-4b", gpu=80)["memory"]["tight"] is False


def test_advice_leaves_five_percent_and_no_less_on_a_larger_card():
    left = []
    for size in (22.5, 23.5, 24, 40, 80):
        advice = report_of("qwen3-4b", "engine.num_processes=1", gpu=size)["advice"]
        assert advice["fits"] and not advice["tight"]
        left.append(size - advice["peak_gib"])
        assert left[-1] >= 0.05 * size
    assert left == sorted(left)


@pytest.mark.slow
def test_advice_without_room_is_the_one_that_leaves_most():
    """A card on which only the smallest rung fits, and that tightly."""
    recipe = load_recipe("tiny")
    smallest = min(
        advise(recipe, Machines("cpu", (1,), capacity)).plan.peak for capacity in (1, GIB // 2)
    )
    found = advise(recipe, Machines("cpu", (1,), int(1.01 * smallest)))
    assert found.plan.fits and found.plan.tight and found.plan.peak == smallest


def test_few_rollouts_at_once_are_warned_about(capsys):
    """38,288 tokens of cache are 4 rollouts of 1,024 + 8,192 tokens: 64 rounds for 256. Completions
    of 2,048 would make 12 at once."""
    report = report_of("qwen3-4b", *LORA, gpu=24)
    (said,) = report["warnings"]
    assert "4 rollouts of the longest 9,216 tokens at once, of 256 on an engine" in said
    assert "64 rounds" in said and "sampling.max_completion_length=2048 it holds 12" in said
    display.run(load_recipe("qwen3-4b", LORA), gpu_memory_gib=24.0)
    assert capsys.readouterr().out.startswith("warning: generation is very slow")
    shorter = report_of("qwen3-4b", *LORA, "sampling.max_completion_length=2048", gpu=24)
    assert shorter["warnings"] == [] == report_of("qwen3-4b", gpu=80)["warnings"]


def test_tokens_of_a_prompt_are_those_of_the_prompts_that_were_read(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"problem": "1+2", "answer": "3"}\n{"problem": "11+12", "answer": "23"}\n')
    words = [f"prompts.source={path}", "prompts.id_field=null", "eval.benchmarks=[]"]
    report = report_of("tiny", *words)
    # "1+2=" and "11+12=": 4 and 6 tokens
    assert "and 5 a prompt (the mean of the prompts that were read)" in str(report["assumptions"])


def test_what_the_hub_does_not_give_is_said_shortly(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = [each for each in report_of("qwen3-4b", gpu=80)["unchecked"] if "Base" in each]
    assert "tokenizer of Qwen/Qwen3-4B-Base: neither in the local cache nor fetched from the hub" \
        in found  # fmt: skip
    assert max(map(len, found)) < 120 and ".." not in str(found)


@pytest.mark.slow
def test_the_screen_ends_with_the_verdict():
    done = run_cli("two-gpus", "--dry-run", "--gpu-memory-gib", "24")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("fits: ")
    assert "596,049,920 parameters (tied head)" in done.stdout
    assert "vLLM's KV cache" in done.stdout and "expected / most" in done.stdout


def scaling_page() -> str:
    return (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_plan_in_the_documentation_is_what_the_dry_run_prints():
    done = run_cli("qwen3-4b", "--dry-run", "--gpu-memory-gib", "80", COLUMNS="100")
    of_here = ("unchecked", "assumption: on this machine")
    printed = [line for line in done.stdout.splitlines() if not line.startswith(of_here)]
    assert len(printed) > 30
    assert "\n".join(printed) in scaling_page()


@pytest.mark.slow
def test_the_documentation_says_what_the_dry_run_answers_for_32k_completions():
    longest = ["sampling.max_completion_length=32768", "batch.max_tokens_per_microbatch=33792"]
    (refused,) = report_of("qwen3-4b", *longest, gpu=80)["problems"]
    assert "room for 17408" in refused
    longest += ["model.path=Qwen/Qwen3-4B", "sampling.vllm.max_model_len=33792"]
    report = report_of("qwen3-4b", *longest, gpu=80)
    memory, at_once = report["memory"], report["sampler"]["longest_rollouts_at_once"]
    assert report["fits"] is True and report["problems"] == []
    page = " ".join(scaling_page().split())
    for word in longest:
        assert f"`{word}`" in page
    backward, peak = memory["phases_gib"]["forward_backward"], memory["peak_gib"]
    assert memory["peak_gib"] == memory["phases_gib"]["generation"]
    assert (
        f"{backward:.1f} GiB a rank in the backward pass, and {peak:.1f} while vLLM samples, "
        f"{at_once} of the longest rollouts at once"
    ) in page


HERE = Machines("cpu", (1,), GIB)


def test_disk_space_is_checked_where_the_run_would_write(tmp_path, monkeypatch):
    asked = []
    free = lambda path: asked.append(path) or 100 * GIB  # noqa: E731
    monkeypatch.setattr("grpo_replay.training.resuming.free_bytes", free)
    place = tmp_path / "not" / "yet"
    kinds = ("problems", "warnings", "assumptions", "unchecked")
    far = Machines("cuda", (8,), GIB, 8, elsewhere=True), Machines("cpu", (1, 1), GIB)
    for one, kind, words in (
        (120, "problems", "needs 120.0 GiB, and " + str(place / "checkpoints") + " has 100.0 GiB"),
        (60, "warnings", "(checkpoint.keep 3 and one being written) take 240.0 GiB"),
        (20, None, ""),
    ):
        for machines in (HERE, *far):
            findings = Findings()
            check_disk_space(one * GIB, 3, place, machines, findings)
            said = {name: getattr(findings, name) for name in kinds}
            expected = kind and (kind if machines is HERE else "assumptions")
            assert [name for name, found in said.items() if found] == [expected] * bool(kind)
            assert findings.exit_code == (3 if machines is HERE and kind == "problems" else 0)
            assert kind is None or words in said[expected][0]
            assert kind is None or said[expected][0].startswith("on this") == (machines is not HERE)
    assert set(asked) == {place / "checkpoints"}


def test_a_resume_needs_room_for_the_checkpoints_that_are_not_there_yet(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_replay.training.resuming.free_bytes", lambda _: 2 * GIB)
    for step in (1, 2, 3):
        (tmp_path / f"checkpoints/step_{step:06d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step_{step:06d}/manifest.json").write_text("{}")
    findings = Findings()
    check_disk_space(GIB, 3, tmp_path, HERE, findings)
    assert findings == Findings()


def test_free_space_is_that_of_the_nearest_existing_folder(tmp_path):
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.01)


@pytest.mark.parametrize("parameters, head, ranks", [
    (596_049_920, 151_936 * 1024, 4), (1_720_574_976, 151_936 * 2048, 4),
    (4_022_468_096, 151_936 * 2560, 8),
])  # fmt: skip
def test_the_network_table_in_the_documentation_is_by_its_formulas(parameters, head, ranks):
    shared = 2 * parameters * (ranks - 1) / ranks / 2**30
    for gib in (3 * shared, shared, 2 * shared, 2 * (parameters + head) / 2**30):
        assert f"{gib:.2f} GiB" in scaling_page()
