"""The folder of a run in another trainer. TRL is not needed here."""

from types import SimpleNamespace

import pytest

from grpo_replay import ReplayConfig
from grpo_replay.errors import OutputDirectoryError, RecipeError
from grpo_replay.integrations.output_folder import OutputFolder, sections_of
from grpo_replay.lab.inspection.source import open_source

ARGS = SimpleNamespace(
    steps_per_generation=2, gradient_accumulation_steps=1, max_steps=-1, generation_batch_size=32,
    num_generations=8, temperature=0.9, max_completion_length=20, scale_rewards="group",
    mask_truncated_completions=False, learning_rate=1e-4, seed=3,
)  # fmt: skip


def folder(path, **settings):
    replay = ReplayConfig.preset("ours", **{"warmup_steps": 1, **settings})
    return OutputFolder(path, replay, sections_of(ARGS, "a/model", 7))


def test_the_recipe_says_what_is_known_of_the_run(tmp_path):
    folder(tmp_path, ratio=0.25).open(0, False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    recipe = open_source(tmp_path).recipe
    assert (recipe.model.path, recipe.run.seed) == ("a/model", 3)
    assert recipe.run.steps == 4  # seven updates, two a step
    assert (recipe.sampling.prompts_per_step, recipe.sampling.group_size) == (4, 8)
    assert (recipe.advantage.std, recipe.advantage.epsilon) == ("sample", 1e-4)
    assert recipe.replay.ratio == 0.25


def test_a_warm_up_as_long_as_the_run_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="warmup_steps 4"):
        folder(tmp_path, warmup_steps=4)


def test_going_back_removes_what_came_later(tmp_path):
    folder(tmp_path).open(0, False)
    for step in (1, 2, 3):
        (tmp_path / "rollouts" / f"step_00000{step}.parquet").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    with pytest.raises(OutputDirectoryError, match="another run"):
        folder(tmp_path).open(0, False)
    folder(tmp_path).open(2, True)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert len(list((tmp_path / "rollouts").iterdir())) == 2
    folder(tmp_path).open(0, True)  # from a checkpoint inside the first generation batch
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert not list((tmp_path / "rollouts").iterdir())
