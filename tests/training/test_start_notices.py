"""What a run tells its user before the first step."""

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
from small_runs.trained import small_recipe

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training import Observer, opening, run


class Listener(Observer):
    def __init__(self) -> None:
        self.status: list[str] = []

    def on_status(self, text: str) -> None:
        self.status.append(text)

    def on_start(self, recipe: Any, run_dir: Any, state: Any, notices: Sequence[str]) -> None:
        self.notices = list(notices)


def test_attention_without_a_fused_kernel_is_warned_of(tmp_path, monkeypatch):
    asked = []

    def warn(model: Any, config: Any, longest: int, on_cuda: bool) -> str:
        asked.append((model.dtype, config.num_attention_heads, longest, on_cuda))
        return "scores are large"

    monkeypatch.setattr(opening, "float32_warning", warn)
    recipe = small_recipe(run={"steps": 1}, replay={"preset": "grpo"}, eval={"benchmarks": []})
    listener = Listener()
    run.run_training(recipe, tmp_path / "run", False, listener)
    assert "scores are large" in listener.notices
    longest = recipe.prompts.max_prompt_length + recipe.sampling.max_completion_length
    ((dtype, heads, tokens, on_cuda),) = asked
    assert (dtype, tokens, on_cuda) == ("float32", longest, False) and heads >= 1


def test_a_run_whose_longest_sequence_the_model_has_no_positions_for_does_not_begin(
    tmp_path, processes, monkeypatch
):
    """What is checked before the model is built counts with the recipe's limits, this with the
    longest prompt."""
    asked = []
    monkeypatch.setattr(opening, "check_room", lambda *words: asked.append(words[-1]))
    recipe = small_recipe(run={"steps": 1}, replay={"preset": "grpo"}, eval={"benchmarks": []})
    run.run_training(recipe, tmp_path / "run", False, Listener())
    assert len(asked) == 1 and 3 <= asked[0] <= recipe.prompts.max_prompt_length


def test_prompts_that_are_too_long_are_counted(tmp_path, processes):
    recipe = small_recipe(
        run={"steps": 1}, replay={"preset": "grpo"}, eval={"benchmarks": []},
        prompts={"max_prompt_length": 6},
    )  # fmt: skip
    listener = Listener()
    run.run_training(recipe, tmp_path / "run", False, listener)
    (notice,) = [each for each in listener.notices if "left out" in each]
    assert "longer than prompts.max_prompt_length 6" in notice


@pytest.mark.slow
def test_a_resume_without_a_checkpoint_says_that_it_begins_again(tmp_path, processes):
    recipe = small_recipe(run={"steps": 1}, replay={"preset": "grpo"}, eval={"benchmarks": []})
    run.run_training(recipe, tmp_path / "run", False, Listener())
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    listener = Listener()
    run.run_training(recipe, tmp_path / "run", True, listener)
    assert any("starts again from its first step" in each for each in listener.notices)


def test_a_resume_beside_the_run_itself_is_refused(tmp_path, processes):
    recipe = small_recipe(run={"steps": 1}, replay={"preset": "grpo"}, eval={"benchmarks": []})
    run.run_training(recipe, tmp_path / "run", False, Listener())
    running = RunDirectory(tmp_path / "run")
    running.lock()
    with pytest.raises(OutputDirectoryError, match="in use by process"):
        run.run_training(recipe, tmp_path / "run", True, Listener())


@pytest.mark.slow
def test_a_resume_on_other_ranks_or_another_stage_says_what_it_restores(tmp_path, processes):
    """And one on the same ranks, at the same stage, says nothing."""
    sections = {"replay": {"preset": "grpo"}, "eval": {"benchmarks": []}}
    recipe = small_recipe(run={"steps": 1}, **sections)
    run.run_training(recipe, tmp_path / "run", False, Listener())
    for step, stage, expected in ((2, 0, 0), (3, 2, 1)):
        listener = Listener()
        recipe = small_recipe(run={"steps": step}, engine={"zero_stage": stage}, **sections)
        run.run_training(recipe, tmp_path / "run", True, listener)
        found = [text for text in listener.status if text.startswith("restoring the engine state")]
        assert len(found) == expected
    assert found == ["restoring the engine state of 1 ranks at ZeRO 0 on 1 at ZeRO 2"]
