"""What a run tells its user before the first step."""

from collections.abc import Sequence
from typing import Any

from small_runs.trained import small_recipe

from grpo_replay.training import opening, run
from grpo_replay.training.observer import Observer


class Listener(Observer):
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
