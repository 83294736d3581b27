"""The dry run: known recipes, wrong recipes, and both output formats."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.cli.dry_run_display import _measured
from grpo_replay.errors import RecipeError
from grpo_replay.lab.dry_run import start_checks as checks
from grpo_replay.lab.dry_run.dry_run_report import Known, dry_run
from grpo_replay.lab.dry_run.fit import Hardware, candidate_changes, first_change, plan_sampler
from grpo_replay.lab.dry_run.hub import hub_is_reachable
from grpo_replay.lab.dry_run.memory import ModelShape
from grpo_replay.lab.dry_run.sampler_memory import SamplerMemory
from grpo_replay.lab.dry_run.sizes import describe_host_copies
from grpo_replay.lab.dry_run.start_checks import Findings, check_disk_space
from grpo_replay.recipe import load_recipe
from grpo_replay.sampling.vllm_settings import engine_arguments
from grpo_replay.storage.atomic import free_bytes
from grpo_replay.storage.stored_sizes import GIB, stored_bytes


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def no_verifier(monkeypatch):
    """Verifier processes take seconds to start; test_dry_run_rewards.py has them."""
    monkeypatch.setattr(checks, "check_rewards", lambda *_: None)


def report_of(name: str, *overrides: str, gpu: float | None = None) -> dict:
    return dry_run(load_recipe(name, list(overrides)), gpu).to_json()


def test_the_4b_plan_on_eight_gpus_of_80_gib():
    report = report_of("qwen3-4b", gpu=80)
    memory = report["memory"]
    assert report["fits"] is True and report["first_change"] is None
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
    report = report_of("qwen3-4b", "model.lora.rank=16", *one, gpu=80)
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
    from grpo_replay.cli.plan_command import run

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


def test_a_plan_that_does_not_fit_names_one_override_that_makes_it_fit():
    small = report_of("qwen3-4b", "model.gradient_checkpointing=false", gpu=80)
    assert small["fits"] is False
    change = small["first_change"]
    assert change["set"] == "model.gradient_checkpointing=true" and change["fits"]
    again = report_of("qwen3-4b", "model.gradient_checkpointing=false", change["set"], gpu=80)
    assert again["fits"] is True
    assert again["memory"]["peak_gib"] == change["peak_gib"]


def test_a_chat_model_that_does_not_fit_gets_a_proposal_too():
    small = report_of("fifo-qwen3-0.6b", gpu=4)
    assert small["fits"] is False and small["first_change"]["set"]


def test_packs_under_an_attention_that_masks_all_pairs_are_remarked_upon():
    said = "computes and masks every pair of tokens in a pack of up to 16,384"
    padded, packed = report_of("tiny"), report_of("tiny", "batch.packing=true")
    assert [any(said in each for each in report["assumptions"]) for report in (padded, packed)] == [
        False, True,
    ]  # fmt: skip


def test_attention_for_gpus_is_a_problem_on_a_cpu():
    report = report_of("tiny", "engine.device=cpu", "model.attn_implementation=flex_attention")
    assert "model.attn_implementation flex_attention needs a GPU; use sdpa" in report["problems"]


@pytest.mark.parametrize("key", ["replay.priority", "advantage.estimator", "loss.kind"])
def test_a_function_that_cannot_be_loaded_is_a_problem(key):
    report = report_of("tiny", f"{key}=nowhere.py:f")
    assert any(f"{key} " in text and "no file" in text for text in report["problems"])


def test_every_suggested_change_is_a_valid_override():
    recipe = load_recipe("qwen3-4b", ["model.gradient_checkpointing=false", "engine.zero_stage=2"])
    changes = list(candidate_changes(recipe))
    assert len(changes) >= 8
    for change in changes:
        load_recipe("qwen3-4b", ["model.gradient_checkpointing=false", change])


@pytest.mark.slow
def test_a_share_too_small_for_one_rollout_does_not_fit():
    report = report_of("qwen3-4b", "sampling.vllm.gpu_memory_utilization=0.12", gpu=80)
    assert report["fits"] is False and report["sampler"]["longest_rollouts_at_once"] == 0
    assert report["first_change"]["set"].startswith("sampling.vllm.gpu_memory_utilization=")


def test_vllm_needs_room_for_no_more_tokens_than_the_model_has_positions():
    longer = ["sampling.backend=vllm", "eval.max_completion_length=4000"]
    recipe = load_recipe("tiny", longer)
    assert recipe.longest_sequence == 4016
    sampler = report_of("tiny", *longer)["sampler"]
    assert sampler["model_length_tokens"] == 128
    assert engine_arguments(recipe, recipe.model, on_gpu=False)["max_model_len"] == 128


def test_a_max_model_len_beyond_the_positions_is_refused_only_with_vllm():
    too_long = "sampling.vllm.max_model_len=129"
    with pytest.raises(RecipeError, match="max_model_len 129 exceeds the 128 positions"):
        dry_run(load_recipe("tiny", ["sampling.backend=vllm", too_long]))
    assert report_of("tiny", too_long)["fits"] is True


@pytest.mark.slow
def test_zero_stages_shrink_what_a_rank_holds():
    at_rest = []
    for stage in (0, 1, 2, 3):
        memory = report_of("qwen3-1.7b", f"engine.zero_stage={stage}", gpu=80)["memory"]
        at_rest.append(memory["parameters_gib"] + memory["optimizer_gib"] + memory["gradients_gib"])
    assert at_rest == sorted(at_rest, reverse=True) and at_rest[3] < 0.3 * at_rest[0]


@pytest.mark.slow
def test_network_traffic():
    parameters, share = 1_720_574_976, 3 / 4
    whole = 2 * parameters * share / 2**30
    three = report_of("qwen3-1.7b", gpu=80)["network"]
    assert three["per_microbatch_gib"] == pytest.approx(3 * whole, abs=2e-3)
    assert three["weight_push_gather_gib"] == pytest.approx(whole, abs=2e-3)
    two = report_of("qwen3-1.7b", "engine.zero_stage=2", gpu=80)["network"]
    assert (two["per_microbatch_gib"], two["per_update_gib"]) == (
        pytest.approx(whole, abs=2e-3), pytest.approx(whole, abs=2e-3),
    )  # fmt: skip
    servers = report_of(
        "qwen3-1.7b", "sampling.backend=vllm_server", "sampling.servers.urls=[http://a:1]", gpu=80
    )
    # the head travels too, though it is tied
    pushed = 2 * (parameters + 151_936 * 2048) / 2**30
    assert servers["network"]["weight_push_to_servers_gib"] == pytest.approx(pushed, abs=2e-3)
    assert servers["memory"]["sampler_awake_gib"] == 0


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


def test_chat_models_of_qwen3_have_more_positions_than_base_models():
    settings = (
        "sampling.max_completion_length=32768", "sampling.vllm.max_model_len=null",
        "batch.max_tokens_per_microbatch=36864",
    )  # fmt: skip
    assert load_recipe("fifo-qwen3-0.6b").model.path == "Qwen/Qwen3-0.6B"
    report = report_of("fifo-qwen3-0.6b", *settings, gpu=80)
    assert report["sampler"]["model_length_tokens"] > 32_768
    with pytest.raises(RecipeError, match="room for 32768"):
        report_of("fifo-qwen3-0.6b", *settings, "model.path=Qwen/Qwen3-0.6B-Base", gpu=80)


@pytest.mark.parametrize(
    "overrides, gpus",
    [
        (["sampling.backend=vllm"], None),
        (["sampling.backend=vllm_server", "sampling.servers.launch=1"],
         "4 per node and 1 for the servers that it starts"),
        (["sampling.backend=vllm_server", "sampling.servers.launch=2",
          "sampling.vllm.tensor_parallel_size=2"],
         "4 per node and 4 for the servers that it starts"),
    ],
)  # fmt: skip
def test_what_a_run_needs_of_vllm_and_gpus_is_checked(monkeypatch, overrides, gpus):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    recipe = load_recipe("tiny", ["engine.num_processes=4", *overrides])
    findings = Findings()
    checks._check_devices(recipe, "cuda", findings)
    (problem,) = findings.problems
    assert f"sampling.backend {recipe.sampling.backend}: vLLM is not installed" in problem
    wanted = [] if gpus is None else [f"GPUs: this machine has 4, the recipe uses {gpus}"]
    assert findings.unchecked == wanted


def test_a_change_that_contradicts_another_setting_is_not_proposed():
    overlong = load_recipe("tiny", ["reward.overlong_buffer_tokens=15"])  # of 20
    found = first_change(overlong, Hardware("cpu", 1, 1, False))
    assert found is not None and not found["fits"]
    assert not found["set"].startswith("sampling.max_completion_length")


def test_a_hostfile_is_not_ignored_by_the_dry_run():
    result = CliRunner().invoke(app, ["train", "tiny", "--dry-run", "--hostfile", "hosts"])
    assert result.exit_code == 2
    assert "--hostfile with --dry-run" in str(result.exception) + result.output


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
    assert report["fits"] is True


def test_a_model_folder_without_weights_is_a_problem(model_folder):
    for file in model_folder.glob("*.safetensors"):
        file.unlink()
    report = report_of("tiny", f"model.path={model_folder}")
    assert any("no weights in" in problem for problem in report["problems"])


def test_a_wrong_dataset_field_is_a_problem_with_its_line(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"problem": "1+1", "answer": "2"}\n{"problem": "1+2"}\n')
    report = report_of("tiny", f"prompts.source={file}")
    assert any("train.jsonl:2" in p and "'answer'" in p for p in report["problems"])


def test_settings_that_cannot_work_are_problems():
    report = report_of("tiny", "engine.offload_optimizer=true", "engine.zero_stage=3")
    assert any("offloading needs a GPU" in problem for problem in report["problems"])
    report = report_of("qwen3-4b", "sampling.vllm.tensor_parallel_size=3", gpu=80)
    assert any("tensor_parallel_size 3 does not divide" in p for p in report["problems"])


def test_lengths_beyond_the_models_positions_are_refused():
    with pytest.raises(RecipeError, match=r"completion of up to 38976 .*room for 17408"):
        dry_run(
            load_recipe(
                "qwen3-4b",
                ["sampling.max_completion_length=38976", "batch.max_tokens_per_microbatch=40000"],
            )
        )


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
        ("eval.max_completion_length=128", "lower eval.max_completion_length for the evaluation"),
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


def test_hours_come_from_a_statement_a_run_or_an_assumption(runs):
    stated = dry_run(load_recipe("tiny"), known=Known(trained_tokens_per_second=880)).to_json()
    assert stated["time"]["generated_tokens_per_second"] == 1000  # μ of the tiny model is 0.88
    assert stated["time"]["hours"] > 0 and stated["time"]["gpu_hours"] is None
    assert "hours: 1,000 tokens generated and 880 trained" in str(stated["assumptions"])
    unknown = report_of("tiny")
    assert unknown["time"]["hours"] is None and "--from-run" in str(unknown["assumptions"])
    assumed = report_of("qwen3-4b", gpu=80)["time"]
    assert assumed["gpu_hours"] == pytest.approx(8 * assumed["hours"], rel=0.01)
    assert "30% of 989 TFLOP/s" in assumed["speed_is"]
    measured = _measured(str(runs["ours"]))["measured"]
    assert measured["mu"] == pytest.approx(4.0)
    longer = dry_run(load_recipe("qwen3-4b"), 80, known=Known(measured=measured)).to_json()
    expected = measured["completion_tokens"] * 256
    assert longer["step"]["generated_tokens_expected"] == round(expected)
    assert "measured in the run" in str(longer["assumptions"])


def test_zero_3_options_and_batches_that_cannot_be_are_refused_by_the_recipe():
    with pytest.raises(RecipeError, match=r"engine\.offload_parameters needs engine\.zero_stage 3"):
        load_recipe("qwen3-4b", ["engine.offload_parameters=true", "engine.zero_stage=2"])
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
    report = report_of("tiny", "model.lora.rank=8")
    (problem,) = report["problems"]
    assert problem == (
        "model.lora needs peft, which is not installed: pip install 'grpo-replay[lora]'"
    )
    assert "sizes of the model: LoRA adapters are counted with peft" in report["unchecked"]
    assert report["fits"] is None and report["memory"] is None
    assert report["step"]["generated_rollouts"] == 128


def test_the_dtype_of_the_sampler_decides_what_it_holds_on_a_cpu_too(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    shape = ModelShape(
        parameters=2**30, parameters_in_files=2**30, largest_parameter=1, tied_head=True, layers=1,
        hidden=8, vocabulary=50, kv_elements_per_token=64, attention_width=8, max_positions=128,
    )  # fmt: skip

    def sampler(dtype: str) -> SamplerMemory:
        recipe = load_recipe("tiny", ["sampling.backend=vllm", f"sampling.vllm.dtype={dtype}"])
        return plan_sampler(recipe, shape, on_cuda=False, capacity=GIB)

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


def test_the_hub_switch_is_respected():
    assert not hub_is_reachable()


def run_cli(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from grpo_replay.cli.app import main; main()", "train", *words],
        capture_output=True, text=True, timeout=120, env={**os.environ, **variables},
    )  # fmt: skip


def test_json_is_one_document_on_stdout_and_the_exit_code_is_0_even_if_it_does_not_fit():
    words = ["train", "qwen3-4b", "--dry-run", "--json", "--gpu-memory-gib", "8"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["fits"] is False
    assert {"problems", "unchecked", "assumptions", "memory", "step", "replay", "storage", "time",
            "network", "sampler", "model", "hardware", "first_change"} <= set(report)  # fmt: skip


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
    printed = [line for line in done.stdout.splitlines() if not line.startswith("unchecked")]
    assert len(printed) > 30
    assert "\n".join(printed) in scaling_page()


def storage_of(one: float | None, most: float | None) -> dict:
    return {"checkpoint_gib": one, "checkpoints_gib_most": most}


def test_disk_space_is_checked_where_the_run_would_write(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(checks, "free_bytes", lambda path: asked.append(path) or int(100 * GIB))
    place = tmp_path / "not" / "yet"
    for one, most, kind in ((120, 480, "problems"), (60, 240, "assumptions"), (20, 80, None)):
        findings = Findings()
        check_disk_space(storage_of(one, most), place, "cpu", findings)
        said = {name: getattr(findings, name) for name in ("problems", "assumptions", "unchecked")}
        assert [name for name, found in said.items() if found] == ([kind] if kind else [])
    findings = Findings()
    check_disk_space(storage_of(None, None), place, "cpu", findings)
    assert findings == Findings()
    assert asked == [place] * 3


def test_free_space_is_that_of_the_nearest_existing_folder(tmp_path):
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.01)


@pytest.mark.parametrize(
    "overrides, why",
    [
        ([], None),
        (["model.dtype=float32"], "stored in bfloat16, not in model.dtype float32"),
        (["model.random_init=true"], "a random initialisation is made there"),
    ],
)
def test_whole_copies_in_host_memory_are_reported(overrides, why):
    recipe = load_recipe("qwen3-4b", ["model.path=builtin:qwen3-4b", *overrides])
    shape = ModelShape(4 * 10**9, 0, 0, True, 0, 0, 0, 0, 0, None)
    told = describe_host_copies(recipe, shape, Hardware("cuda", 8, 0, False))
    assert [why in each for each in told] == [True] * (why is not None)
    assert describe_host_copies(recipe, shape, Hardware("cpu", 8, 0, False)) == []
    if "model.dtype=float32" in overrides:
        assert told[0].startswith("119.209 GiB of host memory")  # 8 · 4e9 · 4 bytes


@pytest.mark.slow
def test_the_network_table_in_the_documentation_is_the_dry_runs():
    page = scaling_page()
    for name in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"):
        three = report_of(name, gpu=80)["network"]
        assert f"{three['per_microbatch_gib']:.2f} GiB" in page
        assert f"{three['weight_push_gather_gib']:.2f} GiB" in page
        zero = report_of(name, "engine.zero_stage=0", gpu=80)["network"]
        assert f"{zero['per_update_gib']:.2f} GiB" in page
        pushed = report_of(
            name, "sampling.backend=vllm_server", "sampling.servers.urls=[http://a:1]", gpu=80
        )["network"]["weight_push_to_servers_gib"]
        assert f"{pushed:.2f} GiB" in page
