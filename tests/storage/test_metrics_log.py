"""metrics.jsonl: whole up to the checkpoint, or refused before anything is removed."""

import json

import pytest

from grpo_replay.errors import CheckpointError, OutputDirectoryError, SnapshotError
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.recipe_history import record_recipe
from grpo_replay.storage.rollout_log import first_steps, read_metrics
from grpo_replay.storage.run_directory import RunDirectory

LINES = [json.dumps({"step": step, "reward": 0.5}) for step in (1, 2, 3, 4)]


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))


def test_the_lines_up_to_the_checkpoint_are_kept_as_they_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [*LINES, '{"step": 5, "rew'])
    assert first_steps(path, 3) == LINES[:3]


@pytest.mark.parametrize(
    "lines, problem",
    [
        (LINES[:2], "ends after 2 complete lines"),
        ([*LINES[:2], LINES[1], *LINES[2:]], "metrics.jsonl:3 is of step 2, expected step 3"),
        ([LINES[0], *LINES[2:]], "metrics.jsonl:2 is of step 3, expected step 2"),
        ([LINES[0], "[2]", *LINES[2:]], "metrics.jsonl:2: not a line of metrics"),
        ([LINES[0], '"step"', *LINES[2:]], "metrics.jsonl:2: not a line of metrics"),
        ([LINES[0], '{"step": 2, "reward": "high"}', *LINES[2:]], "reward is 'high'"),
    ],
    ids=["short", "a doubled line", "a gap", "a list", "a word", "text for a number"],
)
def test_other_lines_are_refused_with_their_place(tmp_path, lines, problem):
    path = tmp_path / "metrics.jsonl"
    write(path, lines)
    with pytest.raises(CheckpointError) as seen:
        first_steps(path, 3)
    assert problem in str(seen.value) and "Nothing was changed" in str(seen.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is missing"):
        first_steps(tmp_path / "metrics.jsonl", 3)
    assert first_steps(tmp_path / "metrics.jsonl", 0) == []


@pytest.mark.parametrize("line", ["7", "null", '{"step": "1"}', '{"step": true}', "[" * 100_000])
def test_a_line_that_is_not_an_object_with_a_step_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    write(path, [LINES[0], line])
    with pytest.raises(SnapshotError, match=r"metrics\.jsonl:2: not a line of metrics"):
        read_metrics(path)


def test_a_run_whose_checkpoints_were_removed_is_not_started_again_over_its_steps(tmp_path):
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.create(load_recipe("tiny", ["checkpoint.every_steps=3"]))
    write(run_dir.metrics_path, LINES)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*4 steps.*every 3"):
        run_dir.check(0)
    write(run_dir.metrics_path, LINES[:3])  # killed while it wrote the first one
    run_dir.check(0)
    record_recipe(run_dir.path, load_recipe("tiny", ["checkpoint.every_steps=2"]), 0)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*3 steps.*every 2"):
        run_dir.check(0)
    record_recipe(run_dir.path, load_recipe("tiny", ["checkpoint.every_steps=4"]), 0)
    write(run_dir.metrics_path, LINES)
    run_dir.check(0)
    run_dir.unlock()


def test_a_disk_that_is_full_at_a_line_of_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OutputDirectoryError, match=r"metrics\.jsonl cannot be written \(No space"):
        RunDirectory(tmp_path).append_metrics({"step": 1})


def test_a_metric_that_is_not_finite_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError):
        RunDirectory(tmp_path).append_metrics({"step": 1, "loss": float("nan")})
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ([], True),
        (["optimizer.learning_rate=1e-5", "run.seed=9"], True),
        (["model.gradient_checkpointing=true", "model.lora.r=4"], True),
        (["model.path=builtin:tiny-long"], False),
        (["model.random_init=true"], False),
    ],
)
def test_a_run_that_starts_again_keeps_the_evaluation_of_its_base_model_only(
    tmp_path, changes, stays
):
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.create(load_recipe("tiny"))
    report = run_dir.path / "eval" / "step_000000.json"
    report.write_text("{}")
    run_dir.go_back(load_recipe("tiny", changes), 0)
    assert report.exists() == stays
    run_dir.unlock()


def test_going_back_that_meets_a_read_only_folder_is_an_error_of_the_folder(tmp_path, monkeypatch):
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.create(load_recipe("tiny"))

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted", str(run_dir.path))

    monkeypatch.setattr("grpo_replay.storage.run_directory.remove_later", refuse)
    with pytest.raises(OutputDirectoryError, match=r"cannot be written.*not permitted"):
        run_dir.go_back(load_recipe("tiny"), 0)
    run_dir.unlock()
