"""Whole runs with LoRA: the push, the files, a resume."""

import json
import shutil

import pytest
import torch
from core_engine import relative
from peft import PeftModel
from small_runs.trained import (
    FinishedRun,
    interrupted,
    same_files,
    same_weights,
    small_recipe,
    train_small_run,
)
from transformers import AutoModelForCausalLM

from grpo_replay.engine.models import load_policy, load_tokenizer
from grpo_replay.errors import ModelError
from grpo_replay.lab.verification.verify import verify_run

LARGEST_GAP = 1e-4
SECTIONS = {
    "model": {"lora": {"r": 4, "lora_alpha": 16}},
    "optimizer": {"learning_rate": 1e-2},
    "run": {"steps": 6},
    "checkpoint": {"every_steps": 3},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, processes) -> FinishedRun:
    return train_small_run(tmp_path_factory.mktemp("lora") / "run", **SECTIONS)


def test_the_merged_weights_are_the_policy_at_every_push(run):
    gaps = [line["sampler/logprob_gap_max"] for line in run.metrics]
    assert len(gaps) == 6 and max(gaps) <= LARGEST_GAP
    shares = [line["sampler/merged_share"] for line in run.metrics]
    assert shares == pytest.approx([1] * 6, abs=1e-4)
    log = (run.path / "log/attempt_001.log").read_text()
    assert "merged weights" not in log
    assert verify_run(run.path).passed
    assert "parameters of adapters train" in (run.path / "log/attempt_001.log").read_text()
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
    log = (run.path / "log/attempt_001.log").read_text()
    assert f"step 2: {share:.0%} of what the adapters change is in the merged weights" in log


@pytest.mark.slow
def test_a_resumed_run_is_the_run_never_stopped_with_dropout_and_kl(tmp_path, processes):
    sections = SECTIONS | {
        "model": {"lora": {"r": 4, "lora_dropout": 0.2}},
        "loss": {"beta": 0.02},
        "engine": {"zero_stage": 3},
        "replay": {"warmup_steps": 1},
        "run": {"steps": 4},
        "checkpoint": {"every_steps": 2},
    }
    interrupted(tmp_path / "run", 3, **sections)
    resumed = train_small_run(tmp_path / "run", resume=True, **sections)
    whole = train_small_run(tmp_path / "whole", **sections)
    assert resumed.timeless_metrics == whole.timeless_metrics
    assert same_files(whole.path, resumed.path, "rollouts") == 4
    assert same_weights(whole.weights(), resumed.weights())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stage_and_precision_trains(tmp_path, processes, stage, dtype):
    sections = SECTIONS | {
        "model": {"dtype": dtype, "lora": {"r": 4}, "gradient_checkpointing": True},
        "engine": {"zero_stage": stage},
    }
    run = train_small_run(tmp_path / "run", **sections)
    limit = small_recipe(**sections).logprob_gap_limit
    assert max(line["sampler/logprob_gap_mean"] for line in run.metrics) <= limit
    assert sum(line["updates"] > 0 for line in run.metrics) >= 3  # a step may have no survivors


@pytest.mark.slow
def test_a_resume_finds_its_base_where_it_lies_now_and_no_other(run, tmp_path, processes):
    shutil.copytree(run.path, tmp_path / "run")
    base = load_policy(run.recipe.model, 0)
    for name in ("moved", "other"):
        base.save_pretrained(tmp_path / name)
        load_tokenizer(run.recipe.model).save_pretrained(tmp_path / name)
        with torch.no_grad():
            base.model.norm.weight[3] += 0.5
    further = SECTIONS | {"run": {"steps": 7}}
    other = further | {"model": SECTIONS["model"] | {"path": str(tmp_path / "other")}}
    with pytest.raises(ModelError, match="is another model than the one that the run began with"):
        train_small_run(tmp_path / "run", resume=True, **other)
    moved = further | {"model": SECTIONS["model"] | {"path": str(tmp_path / "moved")}}
    assert len(train_small_run(tmp_path / "run", resume=True, **moved).metrics) == 7
