"""metrics.jsonl: whole up to the checkpoint, or refused before anything is removed."""

import json

import pytest

from grpo_replay.errors import CheckpointError, OutputDirectoryError, SnapshotError
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.rollout_log import first_steps, read_metrics
from grpo_replay.storage.run_directory import RunDirectory

LINES = [json.dumps({"step": step, "reward": 0.5}) for step in (1, 2, 3, 4)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))


def test_the_lines_up_to_the_checkpoint_are_kept_as_they_are(path):
    assert first_steps(path, 0) == []
    write(path, [*LINES, '{"step": 5, "rew'])
    assert first_steps(path, 3) == LINES[:3]


@pytest.mark.parametrize("lines", [None, LINES[:2]], ids=["no file", "short"])
def test_fewer_lines_than_the_checkpoint_has_steps_are_refused(path, lines):
    if lines is not None:
        write(path, lines)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        first_steps(path, 3)


def test_a_line_that_is_not_json_is_named(path):
    write(path, [LINES[0], '{"step": 2, '])
    with pytest.raises(SnapshotError, match=r"metrics\.jsonl:2:"):
        read_metrics(path)


def test_a_run_whose_checkpoints_were_removed_is_not_started_again_over_its_steps(tmp_path):
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.create(load_recipe("tiny", ["checkpoint.every_steps=3"]))
    write(run_dir.metrics_path, LINES)
    with pytest.raises(CheckpointError, match=r"4 steps.*every 3"):
        run_dir.check(0)
    write(run_dir.metrics_path, LINES[:3])  # killed while it wrote the first one
    run_dir.check(0)
    run_dir.unlock()


def test_a_disk_that_is_full_at_a_line_of_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OutputDirectoryError, match=r"metrics\.jsonl.*No space"):
        RunDirectory(tmp_path).append_metrics({"step": 1})


def test_a_metric_that_is_not_finite_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError):
        RunDirectory(tmp_path).append_metrics({"step": 1, "loss": float("nan")})
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(("changes", "stays"), [([], True), (["model.dtype=bfloat16"], False)])
def test_a_run_that_starts_again_as_it_was_keeps_the_evaluation_of_its_base_model(
    tmp_path, changes, stays
):
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.create(load_recipe("tiny"))
    report = run_dir.path / "eval" / "step_000000.json"
    report.write_text("{}")
    run_dir.go_back(load_recipe("tiny", changes), 0)
    assert report.exists() == stays
    run_dir.unlock()
