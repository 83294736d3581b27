"""Whole runs with LoRA: the push and the files. Killed and resumed: test_resume."""

import json
import shutil

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

from grpo_replay.api import evaluate
from grpo_replay.engine.models import load_policy
from grpo_replay.engine.saved_policies import PlainPolicy
from grpo_replay.errors import CheckpointError, ModelError
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.evaluation.session import find_model
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.storage.checkpoint import verify_checkpoint

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


def test_merged_weights_are_the_policy_at_every_push_too(tmp_path, processes):
    merged = train_small_run(tmp_path / "merged", **SECTIONS, sampling={"lora": "merged"})
    gaps = [line["sampler/logprob_gap_max"] for line in merged.metrics]
    assert len(gaps) == 4 and max(gaps) <= LARGEST_GAP


def test_the_sampler_has_the_adapters_of_the_policy_at_every_push(run):
    gaps = [line["sampler/logprob_gap_max"] for line in run.metrics]
    assert len(gaps) == 4 and max(gaps) <= LARGEST_GAP
    log = (run.path / "log/attempt_001.log").read_text()
    assert "parameters of adapters train" in log
    assert verify_run(run.path).passed
    base = load_policy(run.recipe.model, 0).state_dict()
    moved = {name for name, tensor in run.weights().items() if relative(tensor, base[name]) > 1e-4}
    assert moved == {name for name in base if "_proj" in name}


def test_the_first_step_samples_and_freezes_what_a_run_of_all_parameters_does(run, ours_run):
    for one, other in zip(run.rollouts(1), ours_run.rollouts(1), strict=True):
        for name in ("completion_token_ids", "behavior_logprobs", "advantage"):
            assert one[name] == other[name]


def test_the_last_checkpoint_alone_has_the_merged_model_which_is_the_adapters_on_the_base(run):
    first, last = (run.path / f"checkpoints/step_{step:06d}" for step in (2, 4))
    assert not (first / "model").exists()
    merged = AutoModelForCausalLM.from_pretrained(last / "model", dtype=torch.float32)
    base = load_policy(run.recipe.model, 0)
    adapted = PeftModel.from_pretrained(base, last / "adapter").merge_and_unload()
    for name, tensor in adapted.named_parameters():
        assert relative(tensor, merged.get_parameter(name)) < 1e-6, name
    config = json.loads((first / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 16)
    for card in (first / "adapter/README.md", last / "adapter/README.md", last / "model/README.md"):
        assert "Post-trained from" in card.read_text()
    verify_checkpoint(first)


BF16 = SECTIONS | {
    "model": {"dtype": "bfloat16", "lora": {"r": 4}},
    "optimizer": {"learning_rate": 1e-5},
    "run": {"steps": 2},
    "replay": {"preset": "grpo"},
}


def test_the_last_checkpoint_of_a_run_in_bfloat16_has_the_whole_change_in_float32(
    tmp_path, processes
):
    run = train_small_run(tmp_path / "run", **BF16, sampling={"lora": "merged"})
    assert "adapters merged in bfloat16" in (run.path / "log/attempt_001.log").read_text()
    folder = run.path / "checkpoints/latest"
    base = load_policy(small_recipe(**BF16).model, 0).float()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    whole = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().state_dict()
    saved = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    assert saved.dtype == torch.float32
    found, expected = (
        torch.cat([(state[n] - before[n]).double().flatten() for n in before if "_proj" in n])
        for state in (saved.state_dict(), whole)
    )
    assert relative(found, expected) < 1e-3


FAR = BF16 | {
    "optimizer": {"learning_rate": 3e-2},
    "run": {"steps": 3},
    "checkpoint": {"every_steps": 1},
    "eval": {"benchmarks": ["tiny"], "at_start": False, "max_problems": 1, "samples": 1},
}
"""The rate is so large that answers change."""


@pytest.fixture(scope="module")
def far(tmp_path_factory, processes) -> FinishedRun:
    return train_small_run(tmp_path_factory.mktemp("far") / "run", **FAR)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, processes) -> FinishedRun:
    """Evaluated after each step."""
    evaluation = {"benchmarks": ["tiny"], "every_steps": 1, "max_problems": 6, "samples": 2}
    return train_small_run(
        tmp_path_factory.mktemp("evaluated") / "run", **FAR | {"eval": evaluation}
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_the_evaluation_of_a_checkpoint_is_that_of_the_trainer(evaluated, tmp_path, step):
    during = read_report(evaluated.path / f"eval/step_{step:06d}.json")
    ckpt = str(evaluated.path / f"checkpoints/step_{step:06d}")
    after = evaluate(ckpt, tmp_path / "after.json")
    for name in ("problem_id", "completion_text", "correct"):
        assert after.samples[name] == during.samples[name]
    base = read_report(evaluated.path / "eval/step_000000.json")
    assert base.samples["completion_text"] != during.samples["completion_text"]
    assert after.model["path"].endswith("/adapter")
    merged = evaluate(ckpt, tmp_path / "merged.json", overrides=["sampling.lora=merged"])
    assert merged.model["sha256"] == after.model["sha256"]


def test_behaviour_log_probs_are_recomputed_from_adapters_and_base(far, run):
    for each in (far, run):
        checkpoints = {0: None} | {
            step: each.path / f"checkpoints/step_{step:06d}" for step in (1, 2)
        }
        report = verify_run(each.path, lambda step, of=checkpoints, r=each.recipe:
                            PlainPolicy(r, of[step]))  # fmt: skip
        assert report.passed, [check for check in report.checks if not check.passed]


def test_adapters_are_evaluated_on_the_base_that_they_were_trained_on(far, tmp_path):
    copied = shutil.copytree(far.path, tmp_path / "copied")
    text = (copied / "recipe.yaml").read_text()
    (copied / "recipe.yaml").write_text(text.replace("builtin:tiny\n", "builtin:tiny-long\n", 1))
    with pytest.raises(ModelError, match="another model than the one that the run began with"):
        evaluate(str(copied), tmp_path / "report.json")
    (copied / "recipe.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"recipe.yaml, which names their base"):
        evaluate(str(copied), tmp_path / "report.json")
    assert find_model(str(copied / "checkpoints/latest/model")).base is None
