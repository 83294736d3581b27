"""A resume checks before it removes: a damaged checkpoint is named, and nothing is lost by asking.
It may change what changes no
update, the number of steps and the learning rate."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from small_runs.trained import (
    SMALL,
    FinishedRun,
    Listener,
    files_of,
    interrupted,
    same_weights,
    small_recipe,
    train_small_run,
)
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import CheckpointError, OutputDirectoryError, RecipeError
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import parse_overrides, resolve_recipe
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.storage.starts import read_starts
from grpo_replay.storage.stored_recipe import differences, read_recipe_file
from grpo_replay.training import resuming
from grpo_replay.training.run import run_training

OURS = {"run": {"steps": 12}, "checkpoint": {"every_steps": 3, "keep": 100}}


@pytest.fixture
def run(ours_run, tmp_path) -> Path:
    """A run of 12 steps whose last checkpoint is that of step 9, so that a resume would go back."""
    path = Path(shutil.copytree(ours_run.path, tmp_path / "run", symlinks=True))
    shutil.rmtree(path / "checkpoints" / "step_000012")
    return path


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}"


def test_a_damaged_checkpoint_is_refused_and_nothing_is_removed(run, processes):
    """An older one that somebody gave a newer name."""
    shutil.copytree(checkpoint(run, 6), checkpoint(run, 11))
    before = files_of(run)
    with pytest.raises(CheckpointError, match=r"step_000011 is of step 6") as seen:
        train_small_run(run, resume=True, **OURS)
    assert seen.value.exit_code == 3
    assert files_of(run) == before


def test_a_run_goes_on_to_no_fewer_steps_than_it_has_and_beside_no_other_process(run, processes):
    before = files_of(run)
    with pytest.raises(RecipeError, match=r"run\.steps 8: .*step 9"):
        train_small_run(run, resume=True, **OURS | {"run": {"steps": 8}})
    running = RunDirectory(run)
    running.lock()
    with pytest.raises(OutputDirectoryError, match="in use by process"):
        train_small_run(run, resume=True, **OURS)
    running.unlock()
    assert files_of(run) == before


def test_a_run_that_another_process_took_on_by_one_step_meanwhile_is_refused(
    one_update_run, tmp_path
):
    path = Path(shutil.copytree(one_update_run.path, tmp_path / "run", symlinks=True))
    shutil.rmtree(checkpoint(path, 12))
    recipe, run_dir = one_update_run.recipe, RunDirectory(path)
    start = resuming.find_start(recipe, run_dir, Comm(), resume=True)
    assert start.state.step == 11
    shutil.copytree(checkpoint(one_update_run.path, 12), checkpoint(path, 12))
    with ExitStack() as stack, pytest.raises(OutputDirectoryError, match="newer checkpoint"):
        resuming.take_directory(recipe, run_dir, Comm(), start, stack)


def test_a_resume_with_another_learning_rate_still_verifies(run, ours_run, processes):
    changed = {"run": {"steps": 15}, "optimizer": {"learning_rate": 5e-4, "schedule": "linear"}}

    def try_to_lock() -> None:
        with pytest.raises(OutputDirectoryError, match="in use by process"):
            RunDirectory(run).lock()  # the run has it

    listener, recipe = Listener({10: try_to_lock}), resolve_recipe([SMALL, OURS, changed])
    result = run_training(recipe, run, True, listener)
    assert not result.interrupted and result.step == 15
    assert listener.at_start[0] == "steps 10 to 12, after the checkpoint, are made again"
    assert any("optimizer.learning_rate: 0.001 -> 0.0005" in each for each in listener.at_start)
    assert (run / "checkpoints" / "latest").resolve().name == "step_000015"
    assert read_recipe_file(run / "recipe.yaml") == recipe
    report = verify_run(run)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.steps == 15
    resumed = FinishedRun(run, None)
    assert resumed.timeless_metrics[:9] == ours_run.timeless_metrics[:9]
    rates = {line["step"]: line["learning_rate"] for line in resumed.metrics if line["updates"]}
    for step, rate in rates.items():  # from 5e-4 at step 1 to 0 at step 16
        assert rate == pytest.approx(1e-3 if step < 10 else 5e-4 * (16 - step) / 15)
    early, late = min(rates), max(rates)
    assert early < 10 <= late
    for step in (early, late):
        planted = [line | {"learning_rate": 1.001 * line["learning_rate"]} if line["step"] == step
                   else line for line in resumed.metrics]  # fmt: skip
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in planted))
        (failed,) = [check for check in verify_run(run).checks if not check.passed]
        assert failed.failed == 1 and f"step {step}: learning_rate" in failed.detail


def test_the_same_changes_may_be_asked_for_at_every_resume(run, processes):
    words = ["train", "--resume", "--output-dir", str(run), "--set", "run.steps=10",
             "--set", "checkpoint.restore_buffer=false"]  # fmt: skip
    for _ in range(2):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        shutil.rmtree(checkpoint(run, 10))
    back = [*words[:-1], "checkpoint.restore_buffer=true"]
    assert CliRunner().invoke(app, back).exit_code == 0
    report = verify_run(run)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert [start.after_step for start in read_starts(run)] == [0, 9]


ALLOWED = {
    "name": "other",
    "model": {"dtype": "bfloat16", "attn_implementation": "eager", "compile": False,
              "gradient_checkpointing": True},
    "sampling": {"max_batch_rollouts": 3, "logprob_gap_limit": 2.0,
                 "collection": {"max_ahead_steps": 3}, "vllm": {"enforce_eager": True},
                 "servers": {"launch": 1}},
    "reward": {"workers": 3, "max_failed_share": 1.0, "time_limit_seconds": 1.0},
    "batch": {"max_tokens_per_microbatch": 300, "packing": True},
    "optimizer": {"learning_rate": 0.5, "schedule": "cosine", "warmup_steps": 1},
    "engine": {"zero_stage": 3, "num_processes": 2, "threads_per_process": 2},
    "run": {"steps": 99},
    "checkpoint": {"every_steps": 1, "keep": 5, "restore_buffer": False},
    "eval": {"seed": 3, "temperature": 0.1},
    "tracking": {"report_to": ["tensorboard"]},
}  # fmt: skip


def test_every_key_of_the_list_may_change():
    own, changed = small_recipe(), small_recipe(**ALLOWED)
    found = [key for key, _, _ in differences(own, changed)]
    assert all(any(key.startswith(each) for key in found) for each in resuming.MAY_CHANGE)
    resuming.refuse_other_recipe(own, changed, Path("run"))


REFUSED = {
    "replay.ratio": 1.0, "advantage.std": "none", "loss.epsilon": 0.1, "reward.correct": 2.0,
    "reward.function": "boxed", "sampling.group_size": 2, "prompts.max_prompt_length": 9,
    "model.path": "builtin:tiny-long", "model.lora.r": 4, "optimizer.max_grad_norm": 2.0,
    "batch.updates_per_step": 3, "run.seed": 7, "sampling.vllm.dtype": "bfloat16",
    "sampling.vllm.hf_overrides": {"head_dtype": "float32"}, "sampling.vllm.quantization": "fp8",
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_what_else_changes_is_refused_by_name(key):
    own, run = small_recipe(), Path("runs/a")
    words = parse_overrides([f"{key}={json.dumps(REFUSED[key])}"])
    other = resolve_recipe([own.model_dump(mode="json"), words])
    with pytest.raises(RecipeError) as refused:
        resuming.refuse_other_recipe(own, other, run)
    said = str(refused.value)
    for name, old, new in differences(own, other):
        assert f"{name} is {old!r} in the run, and {new!r} is asked for" in said
    assert "runs/a/checkpoints/latest/model): its optimizer and KL reference begin anew" in said
    assert "A resume may change name, model.dtype" in said and "eval.*" in said


def test_a_refused_resume_changes_no_file(run, processes):
    before = files_of(run)
    with pytest.raises(RecipeError, match=r"replay\.ratio is 0\.5 in the run, and 1\.0 is asked"):
        train_small_run(run, resume=True, **OURS | {"replay": {"ratio": 1.0}})
    assert files_of(run) == before


def test_files_may_move_to_another_folder():
    own, moved = (
        small_recipe(
            reward={"function": [f"{folder}/score.py:f", "boxed"]},
            prompts={"source": f"{folder}/train.jsonl"}, model={"path": f"{folder}/base"},
        )
        for folder in ("/a", "/b/c")
    )  # fmt: skip
    resuming.refuse_other_recipe(own, moved, Path("run"))
    other = small_recipe(reward={"function": "/b/other.py:f"})
    with pytest.raises(RecipeError, match=r"reward\.function"):
        resuming.refuse_other_recipe(small_recipe(reward={"function": "/b/a.py:f"}), other, Path())


def test_a_buffer_that_is_not_restored_starts_empty(run, processes):
    emptied = {"checkpoint": OURS["checkpoint"] | {"restore_buffer": False}, "run": {"steps": 11}}
    listener = Listener()
    run_training(small_recipe(**emptied), run, True, listener)
    assert any("starts empty" in each for each in listener.at_start)
    metrics = FinishedRun(run, None).metrics
    assert metrics[8]["buffer/rollouts"] > 0
    assert metrics[9]["replay/rollouts"] == 0  # nothing was there to draw
    assert metrics[10]["replay/rollouts"] > 0


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(tmp_path, processes):
    sections = {"run": {"steps": 2}, "replay": {"preset": "grpo"}}
    interrupted(tmp_path / "run", 1, **sections)
    listener = Listener()
    run_training(small_recipe(**sections), tmp_path / "run", True, listener)
    assert any("no checkpoint yet" in each for each in listener.at_start)
    whole = train_small_run(tmp_path / "whole", **sections)
    resumed = FinishedRun(tmp_path / "run", None)
    assert resumed.timeless_metrics == whole.timeless_metrics
    assert same_weights(resumed.weights(), whole.weights())


def test_a_run_that_ended_within_its_first_step_starts_again(tmp_path):
    recipe, run_dir = small_recipe(), RunDirectory(tmp_path / "run")
    run_dir.create(recipe)
    run_dir.metrics_path.touch()
    run_dir.unlock()
    start = resuming.find_start(recipe, run_dir, Comm(), resume=True)
    assert (start.checkpoint, start.is_new) == (None, False)
    assert start.notices == ["the run had no checkpoint yet: it starts again from its first step"]


def test_a_finished_run_is_resumed_by_its_directory_alone(ours_run, tmp_path, processes):
    path = shutil.copytree(ours_run.path, tmp_path / "run", symlinks=True)
    before = files_of(path)
    done = CliRunner().invoke(app, ["train", "--resume", "--output-dir", str(path)])
    assert done.exit_code == 0, done.output
    assert "all 12 steps are made" in done.output
    after = files_of(path)
    assert after.pop("summary.json") and before.pop("summary.json")
    assert after == before


def test_a_checkpoint_that_a_rank_does_not_see_is_named(tmp_path):
    """Rank 0 found it; --output-dir of another node is another disk."""
    assert resuming._visible_on_all_ranks(None, tmp_path, Comm()) is None
    seen = tmp_path / "step_000003"
    seen.mkdir()
    assert resuming._visible_on_all_ranks(Path("of/rank/0/step_000003"), tmp_path, Comm()) == seen
    with pytest.raises(OutputDirectoryError, match="step_000004 is missing"):
        resuming._visible_on_all_ranks(Path("step_000004"), tmp_path, Comm())
