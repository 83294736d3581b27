"""The trials of a model: every rank gets rank 0's outcome, and NaN is no agreement."""

import shutil
from typing import Any

import numpy as np
import pytest
import torch
from architectures import random_model
from commands import run_eval, run_train
from core_engine import open_engine
from small_runs.trained import small_recipe, train_small_run

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.model_trials import can_share, refuse_crossing, refuse_other_logprobs
from grpo_replay.engine.models import load_config, load_policy
from grpo_replay.errors import ModelError, RecipeError, SamplerError
from grpo_replay.recipe import ModelSection, recipe_to_yaml
from grpo_replay.tiny import BASE_DIR

MODEL = random_model("qwen3")


class SecondRank(Comm):
    """Rank 1 of 2, beside a rank 0 that broadcasts `answer`."""

    def __init__(self, answer: Any) -> None:
        super().__init__(1, 2)
        self.answer, self.heard = answer, 0

    def broadcast(self, value: Any) -> Any:
        self.heard += 1
        return self.answer


def test_a_rank_whose_trial_of_shared_prompts_raises_takes_rank_0s_answer_all_the_same():
    def forward(*_: Any) -> np.ndarray:
        raise RuntimeError("the model takes no mask of four dimensions")

    comm = SecondRank(True)
    assert can_share(MODEL.config, "float32", 64, forward, comm)
    assert comm.heard == 1
    assert not can_share(MODEL.config, "float32", 64, forward, Comm())


def test_memory_that_runs_out_in_the_trial_is_not_taken_for_mixed_completions():
    def forward(*_: Any) -> np.ndarray:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        can_share(MODEL.config, "float32", 64, forward, Comm())


@pytest.mark.parametrize("of_logits", [True, False])
def test_logprobs_that_are_no_numbers_fail_the_trial_of_the_head(of_logits):
    def forward(batch: Any, through_logits: bool = False) -> np.ndarray:
        return np.full(len(batch.target_ids_C), np.nan if through_logits == of_logits else -1.0)

    with pytest.raises(ModelError):
        refuse_other_logprobs(MODEL, "float32", forward, Comm())


@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_a_model_whose_weights_hold_no_numbers_is_refused_by_training_and_evaluation(
    value, tmp_path
):
    folder, model = shutil.copytree(BASE_DIR, tmp_path / "model"), load_policy(ModelSection(), 0)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3] = value
    model.save_pretrained(folder)
    with pytest.raises(ModelError, match="hold NaN or infinity"):
        train_small_run(tmp_path / "run", model={"path": str(folder)})
    with pytest.raises(SamplerError, match="hold NaN or infinity"):
        run_eval(str(folder), recipe="tiny", output=str(tmp_path / "eval.json"))


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
    "short_factor": [1.0] * 16, "long_factor": [1.5] * 16,
}  # fmt: skip


def longrope_of(kind: str, folder):
    limit = {"original_max_position_embeddings": 24}  # where Phi-3 says it
    random_model(kind, rope_parameters=dict(LONGROPE), **limit).save_pretrained(folder)
    return ModelSection(path=str(folder), tokenizer="builtin:bytes")


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_sequences_that_cross_the_length_of_longrope_are_refused_by_training_and_dry_run(
    kind, tmp_path, capsys
):
    """A short row has other log-probs beside a long one."""
    sections = {
        "model": longrope_of(kind, tmp_path / "model").model_dump(),
        "prompts": {"max_prompt_length": 10},
        "eval": {"benchmarks": []}, "run": {"steps": 1}, "replay": {"preset": "grpo"},
    }  # fmt: skip
    said = rf"{kind} with rope_type longrope .* more than 24 tokens .* may have 26"
    with pytest.raises(RecipeError, match=said):
        train_small_run(tmp_path / "run", sampling={"max_completion_length": 16}, **sections)
    recipe = small_recipe(sampling={"max_completion_length": 16}, **sections)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    run_train(str(tmp_path / "recipe.yaml"), dry_run=True)
    assert "longrope" in capsys.readouterr().out
    section = longrope_of(kind, tmp_path / "model")
    refuse_crossing(section, load_config(section), 24)


def test_a_model_whose_rows_depend_on_the_longest_of_a_micro_batch_fails_its_trial(
    tmp_path, processes
):
    """Whatever it calls that: the trial reads no configuration."""
    policy = load_policy(longrope_of("llama", tmp_path), 0)
    within, across = ({"max_prompt_length": length} for length in (4, 5))  # and 20 of completions
    with open_engine(processes, policy, prompts=within):
        pass
    said = r"llama change when .* a row of 25 tokens"
    with pytest.raises(ModelError, match=said), open_engine(processes, policy, prompts=across):
        pass
