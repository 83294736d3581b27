"""The dry run: known recipes, wrong recipes, and both output formats."""

import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.lab.dry_run import planner
from grpo_replay.lab.dry_run.dry_run_display import print_dry_run
from grpo_replay.lab.dry_run.dry_run_report import Findings, _check_start, dry_run
from grpo_replay.lab.dry_run.memory import SamplerMemory
from grpo_replay.lab.dry_run.planner import Machines
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training.disk_room import GIB
from grpo_replay.training.opening import RunOpener


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def no_verifier(monkeypatch):
    """Verifier processes take seconds to start; test_dry_run_rewards.py has them."""
    monkeypatch.setattr(RunOpener, "_try_rewards", lambda _: None)


def report_of(name: str, *overrides: str, gpu: float | None = None, nodes: int = 1) -> dict:
    recipe = load_recipe(name, list(overrides))
    ranks = [recipe.engine.num_processes] * nodes
    return dry_run(recipe, gpu, ranks_of_nodes=ranks).to_json()


def checked(recipe, machines: Machines, folder: Path) -> tuple[RunOpener, Findings]:
    findings = Findings()
    with ExitStack() as stack:
        run_dir = RunDirectory(folder)
        return _check_start(recipe, run_dir, False, machines, findings, stack), findings


@cache
def planned_4b() -> dict:
    return report_of("qwen3-4b", "engine.zero_stage=3", gpu=80)


def test_the_4b_plan_on_eight_gpus_of_80_gib():
    report = planned_4b()
    four = report_of("qwen3-4b", "engine.zero_stage=3", gpu=80, nodes=4)
    memory = report["memory"]
    assert report["fits"] is True and report["advice"] == []
    for part in ("parameters_gib", "optimizer_gib"):
        assert four["memory"][part] == pytest.approx(memory[part] / 4, abs=2e-3)
    assert report["model"]["parameters"] == 4_022_468_096 and report["model"]["tied_head"]
    parameters, ranks = 4_022_468_096, 8
    assert memory["parameters_gib"] == pytest.approx(2 * parameters / ranks / 2**30, abs=1e-3)
    # master weights and moments, and the gradient shards that ZeRO-3 holds
    assert memory["optimizer_gib"] == pytest.approx(14 * parameters / ranks / 2**30, abs=1e-3)
    assert memory["gradients_gib"] == memory["parameters_gib"]
    assert memory["sampler_awake_gib"] == 48 and memory["sampler_asleep_gib"] == 1.5
    training = memory["forward_backward_gib"]
    assert training == pytest.approx(
        1.5 + sum(memory[f"{name}_gib"] for name in (
            "base", "parameters", "gradients", "optimizer", "gathered", "bucket", "activations",
            "backward_work",
        )), abs=0.01,
    )  # fmt: skip
    # 36 layers, one bf16 hidden state of 2,560 per token of two rows of 9,216, and the last ones
    assert memory["activations_gib"] > 36 * 2 * 2560 * 18_432 / 2**30
    assert report["sampler"]["longest_rollouts_at_once"] >= 8
    assert memory["peak_gib"] == memory["generation_gib"] < 80


def test_weights_stay_whole_on_gpus_of_which_the_state_takes_half_at_most(tmp_path):
    """Of 4B in bfloat16, ZeRO-2 takes 7.5 GiB of each GPU and 75 GiB of all: 45 on two."""
    parameters = 4_022_468_096
    for gpus, gib, shards in ((8, 80, 1), (2, 89, 2), (2, 91, 1)):
        memory = report_of("qwen3-4b", f"engine.num_processes={gpus}", gpu=gib)["memory"]
        held = 2 * parameters / shards / 2**30
        assert memory["parameters_gib"] == pytest.approx(held, abs=1e-3), (gpus, gib)
    eight = Machines("cuda", (8,), 80 * 2**30, elsewhere=True)
    opener, _ = checked(load_recipe("qwen3-4b"), eight, tmp_path / "run")
    assert opener.zero_stage == 2


@pytest.mark.slow
def test_the_4b_plan_with_lora_on_one_gpu_of_80_gib():
    one = ("engine.num_processes=1",)
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
    # of the adapters bf16 values twice, fp32 ones and two moments; the last has the merged model
    usual, last = 16 * adapters / 2**30, 4 * parameters / 2**30
    assert report["storage"]["checkpoint_gib"] == pytest.approx(usual + last, abs=2e-3)
    kept = 4 * usual + last
    assert report["storage"]["checkpoints_gib_most"] == pytest.approx(kept, abs=5e-3)


def test_refills_are_in_the_estimate():
    survival = 124.9 / 256
    once = planned_4b()["step"]
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
    assert replay["first_replay_step"] == 21
    assert replay["stored_rollouts_expected"] == 1127
    assert replay["stored_rollouts_most"] == 2560
    # ids and two log-probs of 8,192 tokens, prompts of 1,024 ids, objects; no text
    most = 2560 * (12 * 8192 + 4 * 1024 + 1000) / 2**30
    assert report["storage"]["buffer_memory_gib_most"] == pytest.approx(most, abs=1e-3)


def test_plain_grpo_stores_nothing_and_fifo_fills_its_capacity():
    grpo = report_of("qwen3-1.7b", "replay.preset=grpo", gpu=80)
    assert grpo["replay"]["stored_rollouts_most"] == 0
    assert grpo["replay"]["first_replay_step"] is None
    assert grpo["step"]["trained_rollouts_expected"] == 113
    fifo = report_of("fifo-qwen3-0.6b", gpu=80)
    assert fifo["replay"]["stored_rollouts_expected"] == 84
    assert fifo["step"]["trained_rollouts_expected"] == 60
    assert fifo["replay"]["first_replay_step"] == 1
    long = ("replay.max_age_steps=60", "sampling.prompts_per_step=256")
    assert report_of("qwen3-1.7b", *long, gpu=80)["replay"]["stored_rollouts_most"] == 30_000


def own_additions(tmp_path, question: str) -> list[str]:
    file = tmp_path / "train.csv"
    rows = [f"{question.format(a=a, b=a + 7)},{2 * a + 7}" for a in range(20, 80)]
    file.write_text("\n".join(["question,solution", *rows]) + "\n")
    return [f"prompts.source={file}", "prompts.problem_field=question",
            "prompts.answer_field=solution", "prompts.id_field=null",
            f"eval.benchmarks=[{file}]", "prompts.max_prompt_length=128",
            "batch.max_tokens_per_microbatch=16384"]  # fmt: skip


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


def test_the_screen_begins_with_the_problems_and_ends_with_the_answer():
    words = ["train", "tiny", "--dry-run", "--set", "model.path=nowhere/at/all"]
    done = CliRunner().invoke(app, words)
    lines = done.stdout.splitlines()
    assert done.exit_code == 3 and lines[0].startswith("problem: ")
    assert lines[-1] == lines[0].replace("problem", "would not start", 1)


def scaling_page() -> str:
    return (Path(__file__).parents[3] / "docs" / "scaling.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_plan_in_the_documentation_is_what_the_dry_run_prints():
    words = ["-m", "grpo_replay", "train", "qwen3-4b", "--dry-run", "--gpu-memory-gib", "80"]
    wide = os.environ | {"COLUMNS": "100"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=wide)
    printed = [line for line in done.stdout.splitlines() if not line.startswith("unchecked")]
    assert len(printed) > 30
    (begin,) = (at for at, line in enumerate(printed) if line.startswith(" Memory of a process"))
    (end,) = (at for at, line in enumerate(printed) if line.startswith(" Sampler"))
    memory = "\n".join(line.rstrip() for line in printed[begin:end])
    assert f"{memory}\n…\n{printed[-1]}\n" in scaling_page()


SHORT = ("engine.num_processes=1", "sampling.max_completion_length=1024",
         "sampling.vllm.gpu_memory_utilization=0.4")  # fmt: skip


def test_what_a_plan_that_does_not_fit_would_take_with_one_change():
    """0.6B in bfloat16: 6.7 GiB of master weights and moments. With an offloaded optimizer they are
    on the host, and the parameters of adapters have next to none."""
    report = report_of("qwen3-0.6b", *SHORT, gpu=14)
    assert (report["fits"], report["exit_code"]) == (False, 2)
    (problem,) = report["problems"]
    assert problem.startswith("not enough memory: ") and "of 14.0 GiB at the peak" in problem
    small, adapters, offloaded = report["advice"]
    assert small["set"] == ["batch.max_tokens_per_microbatch=2048"] and not small["fits"]
    assert adapters["set"] == ["model.lora.r=16", "optimizer.learning_rate=1e-05"]
    assert offloaded["set"] == ["engine.zero_stage=3", "engine.offload=optimizer"]
    for each in (adapters, offloaded):
        again = report_of("qwen3-0.6b", *SHORT, *each["set"], gpu=14)
        assert again["memory"]["fits"] is each["fits"] is True
        assert again["memory"]["peak_gib"] == each["peak_gib"] <= 14
        assert again["advice"] == []


def test_prompts_of_unknown_characters_are_warned_of_and_one_prompt_is_shown(tmp_path, capsys):
    recipe = load_recipe("tiny", own_additions(tmp_path, "What is {a} + {b}?"))
    said = [
        each["text"] for each in dry_run(recipe).to_json()["notices"] if each["key"] == "prompts"
    ]
    assert any(each.startswith("60 of 60 prompts have characters") for each in said)
    print_dry_run(dry_run(recipe))
    assert "note: 60 of 60 prompts have characters" in capsys.readouterr().out
    own = own_additions(tmp_path, "{a}+{b}")
    file = tmp_path / "train.csv"
    file.write_text(file.read_text().replace("30+37", "30 plus 37"))
    report = report_of("tiny", *own)
    assert "1 of 60 prompts" in str(report["notices"])
    assert report["prompt"] == "20+27="


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_a_run_needs_of_vllm_and_gpus_is_checked_where_it_runs(
    monkeypatch, tmp_path, elsewhere
):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    recipe = load_recipe("tiny", ["engine.num_processes=4", "sampling.backend=vllm"])
    machines = Machines("cuda", (4,), 80 * GIB, elsewhere)
    _, findings = checked(recipe, machines, tmp_path / "run")
    if elsewhere:
        assert findings.problems == [] and "vLLM is not installed" in str(findings.unchecked)
    else:
        gpus, vllm = findings.problems
        assert "local rank 3 needs GPU 3" in gpus and "vLLM is not installed" in vllm


def test_limits_beyond_the_positions_are_allowed_if_no_prompt_is_so_long():
    """1,056 tokens at most, 128 positions."""
    limits = "prompts.max_prompt_length=1024", "sampling.max_completion_length=32"
    report = report_of("tiny", *limits)
    assert report["problems"] == [] and report["fits"] is True


def test_prompts_are_measured(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"problem": "1+2", "answer": "3"}\n{"problem": "11+12", "answer": "23"}\n')
    words = [f"prompts.source={path}", "prompts.id_field=null", "eval.benchmarks=[]"]
    # "1+2=" and "11+12=": 4 and 6 tokens
    assert "and 5 a prompt" in str(report_of("tiny", *words)["assumptions"])


def test_what_cannot_be_read_from_here_is_listed_and_an_unknown_model_has_no_verdict():
    unknown = ("model.path=nobody/nothing-at-all", "prompts.source=[./here.jsonl, openai/gsm8k]")
    report = report_of("qwen3-0.6b", *unknown, gpu=80)
    assert report["fits"] is None and report["memory"] is None and report["prompt"] is None
    said = "\n".join(report["unchecked"])
    for part in ("tokenizer is neither", "openai/gsm8k", "sizes of the model"):
        assert part in said
    assert report["step"]["generated_rollouts"] == 256


def test_a_share_of_the_card_too_small_for_one_rollout_does_not_fit():
    report = report_of("qwen3-4b", "sampling.vllm.gpu_memory_utilization=0.12", gpu=80)
    assert report["fits"] is False and report["sampler"]["longest_rollouts_at_once"] == 0
