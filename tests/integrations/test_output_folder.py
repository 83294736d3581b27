"""The folder of a run in another trainer. TRL is not needed here."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from grpo_replay import ReplayConfig
from grpo_replay.cli.app import app
from grpo_replay.errors import CheckpointError, OutputDirectoryError, RecipeError
from grpo_replay.integrations.grpo_config import GRPO_CONFIG, sections_of
from grpo_replay.integrations.output_folder import (
    OutputFolder,
    refuse_another_run,
    refuse_without_history,
)
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.report.finished_run import UnfinishedRun, read_finished_run
from grpo_replay.recipe import resolve_recipe
from grpo_replay.storage.run_directory import refuse_missing

ARGS = SimpleNamespace(
    steps_per_generation=2, gradient_accumulation_steps=1, max_steps=-1, generation_batch_size=32,
    num_generations=8, temperature=0.9, max_completion_length=20, scale_rewards="group",
    mask_truncated_completions=False, learning_rate=1e-4, seed=3, beta=0.0, loss_type="dapo",
    epsilon=0.1, epsilon_high=None, delta=None, importance_sampling_level="token",
)  # fmt: skip


def folder(path, args=ARGS, **settings):
    replay = ReplayConfig.of("ours", **{"warmup_steps": 1, **settings})
    return OutputFolder(path, replay, sections_of(args, "a/model", False, 7), GRPO_CONFIG)


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
    with pytest.raises(RecipeError, match="warmup_steps 4 is not less than the 4 generation"):
        folder(tmp_path, warmup_steps=4)


def test_going_back_removes_what_came_later(tmp_path):
    folder(tmp_path).open(0, False)
    for step in (1, 2, 3):
        (tmp_path / "rollouts" / f"step_00000{step}.parquet").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    with pytest.raises(OutputDirectoryError, match="another run"):
        refuse_another_run(tmp_path, GRPO_CONFIG, may_resume=True)
    (tmp_path / "checkpoint-2").mkdir()
    refuse_another_run(tmp_path, GRPO_CONFIG, may_resume=True)
    with pytest.raises(OutputDirectoryError, match="another run"):
        refuse_another_run(tmp_path, GRPO_CONFIG)
    with pytest.raises(CheckpointError, match=r"fewer than the 4 steps .* earlier one"):
        folder(tmp_path).open(4, True)
    hotter = SimpleNamespace(**{**vars(ARGS), "temperature": 1.0})
    with pytest.warns(UserWarning, match=r"other settings: sampling.temperature: 0.9 -> 1.0"):
        folder(tmp_path, hotter).open(2, True)
    assert open_source(tmp_path).recipe.sampling.temperature == 1.0
    folder(tmp_path, hotter).open(2, True)  # the same again, without a warning
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert len(list((tmp_path / "rollouts").iterdir())) == 2
    folder(tmp_path).open(0, True)  # from a checkpoint inside the first generation batch
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert not list((tmp_path / "rollouts").iterdir())


def test_a_folder_of_another_trainer_is_neither_resumed_nor_a_run_to_continue(tmp_path):
    """Not even its lines of metrics are touched: `train --resume` would start again."""
    folder(tmp_path).open(0, False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="resume_from_checkpoint"):
        refuse_missing(tmp_path)
    found = CliRunner().invoke(app, ["train", "--resume", "--output-dir", str(tmp_path)])
    assert found.exit_code == 3
    with pytest.raises(UnfinishedRun, match=str(tmp_path)):
        read_finished_run(tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_run_is_not_resumed_where_its_history_is_not(tmp_path):
    with pytest.raises(CheckpointError, match="resume with output_dir runs/a"):
        refuse_without_history(tmp_path, Path("runs/a"), 2, GRPO_CONFIG)
    refuse_without_history(tmp_path, Path("runs/a"), 0, GRPO_CONFIG)
    (tmp_path / "metrics.jsonl").touch()
    refuse_without_history(tmp_path, Path("runs/a"), 2, GRPO_CONFIG)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"delta": 0.5}, "GRPOConfig: delta: Input should be greater than 1, found 0.5"),
        ({"epsilon": 0.0}, "GRPOConfig: epsilon: Input should be greater than 0, found 0.0"),
        ({"learning_rate": 0.0}, "GRPOConfig: learning_rate: Input should be greater than 0"),
    ],
)
def test_settings_are_refused_by_the_names_of_trl(tmp_path, changes, named):
    args = SimpleNamespace(**{**vars(ARGS), **changes})
    with pytest.raises(RecipeError) as seen:
        sections = sections_of(args, "m", False, 1000)
        OutputFolder(tmp_path, ReplayConfig.of("ours"), sections, GRPO_CONFIG)
    assert named in str(seen.value) and "loss." not in str(seen.value)


def test_a_length_without_limit_leaves_the_default_of_the_recipe():
    args = SimpleNamespace(**{**vars(ARGS), "max_completion_length": None})
    recipe = resolve_recipe([sections_of(args, "m", False, 70)])
    assert recipe.sampling.max_completion_length == 8192


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0.1, 0.1, None, "clipped", "token_mean")),
        ({"epsilon_high": 0.3, "delta": 5.0}, (0.1, 0.3, 5.0, "clipped", "token_mean")),
        ({"loss_type": "dr_grpo"}, (0.1, 0.1, None, "clipped", "constant")),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            (0.1, 0.1, None, "gspo", "sequence_mean"),
        ),
        # Not known: the defaults.
        ({"loss_type": "cispo", "epsilon_high": 5.0}, (0.2, 0.28, 10.0, "clipped", "token_mean")),
    ],
)
def test_the_recipe_has_the_loss_and_one_draw_a_step(changes, expected):
    args = SimpleNamespace(**{**vars(ARGS), **changes})
    recipe = resolve_recipe([sections_of(args, "a/model", True, 70)])
    names = ("epsilon", "epsilon_high", "dual_clip", "kind", "aggregation")
    assert tuple(getattr(recipe.loss, name) for name in names) == expected
    assert recipe.model.dtype == "bfloat16"
    fifo = {"replay": {"preset": "fifo", "ratio": 1}}
    assert resolve_recipe([sections_of(args, "m", False, 70), fifo]).draws_per_step == 1
