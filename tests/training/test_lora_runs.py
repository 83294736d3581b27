"""Whole runs with LoRA: the push and the files. Killed and resumed: test_resume."""

import json

import pytest
import torch
from core_engine import relative
from peft import PeftModel
from small_runs.trained import (
    FinishedRun,
    small_recipe,
    train_small_run,
)
from transformers import AutoModelForCausalLM

from grpo_replay.engine.models import load_policy
from grpo_replay.lab.verification.verify import verify_run

LARGEST_GAP = 1e-4
SECTIONS = {
    "model": {"lora": {"r": 4, "lora_alpha": 16}},
    "optimizer": {"learning_rate": 1e-2},
    "run": {"steps": 4},
    "checkpoint": {"every_steps": 2},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, processes) -> FinishedRun:
    return train_small_run(tmp_path_factory.mktemp("lora") / "run", **SECTIONS)


def test_merged_weights_are_the_policy_at_every_push_too(tmp_path, run, processes):
    merged = train_small_run(tmp_path / "merged", **SECTIONS, sampling={"lora": "merged"})
    gaps = [line["sampler/logprob_gap_max"] for line in merged.metrics]
    assert len(gaps) == 4 and max(gaps) <= LARGEST_GAP
    shares = [line["sampler/merged_share"] for line in merged.metrics]
    assert shares == pytest.approx([1] * 4, abs=1e-4)
    assert "sampler/merged_share" not in run.metrics[0]


def test_the_sampler_has_the_adapters_of_the_policy_at_every_push(run):
    gaps = [line["sampler/logprob_gap_max"] for line in run.metrics]
    assert len(gaps) == 4 and max(gaps) <= LARGEST_GAP
    log = (run.path / "log/attempt_001.log").read_text()
    assert "merged weights" not in log and "parameters of adapters train" in log
    assert verify_run(run.path).passed
    base = load_policy(run.recipe.model, 0).state_dict()
    moved = {name for name, tensor in run.weights().items() if relative(tensor, base[name]) > 1e-4}
    assert moved == {name for name in base if "_proj" in name}


def test_the_first_step_samples_and_freezes_what_a_run_of_all_parameters_does(run, tmp_path):
    sections = SECTIONS | {"model": {}, "replay": {"warmup_steps": 0}, "run": {"steps": 1}}
    whole = train_small_run(tmp_path / "whole", **sections)
    for one, other in zip(run.rollouts(1), whole.rollouts(1), strict=True):
        for name in ("completion_token_ids", "behavior_logprobs", "advantage"):
            assert one[name] == other[name]


def test_model_and_adapter_of_a_checkpoint_are_the_same_policy(run):
    folder = run.path / "checkpoints/latest"
    merged = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    base = load_policy(run.recipe.model, 0)
    adapted = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    for name, tensor in adapted.named_parameters():
        assert relative(tensor, merged.get_parameter(name)) < 1e-6, name
    config = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 16)


def test_a_run_in_bfloat16_says_how_much_of_the_adapters_its_merged_weights_hold(
    tmp_path, processes
):
    """The share of the last push, from the files of the checkpoint: 1e-5 is far below what
    bfloat16 resolves."""
    sections = SECTIONS | {
        "model": {"dtype": "bfloat16", "lora": {"r": 4}},
        "optimizer": {"learning_rate": 1e-5},
        "run": {"steps": 2},
        "replay": {"preset": "grpo"},
        "sampling": {"lora": "merged"},
    }
    run = train_small_run(tmp_path / "run", **sections)
    folder = run.path / "checkpoints/latest"
    base = load_policy(small_recipe(**sections).model, 0).float()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    whole = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    kept, changed = (
        torch.cat([(state[n] - before[n]).double().flatten() for n in before if "_proj" in n])
        for state in (merged.state_dict(), whole)
    )
    share = run.metrics[-1]["sampler/merged_share"]
    assert share == pytest.approx(float(kept @ changed / (changed @ changed)), rel=1e-3)
    assert 0 < share < 0.5
    assert f"step 2: {share:.0%} " in (run.path / "log/attempt_001.log").read_text()
