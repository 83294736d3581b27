"""starts.jsonl: the values that a resume may change and checks need, by the steps that had them."""

import pytest

from grpo_replay.recipe import load_recipe
from grpo_replay.storage.starts import read_starts, record_start, start_of

FALLING = ["run.steps=40", "optimizer.learning_rate=8.0", "optimizer.schedule=linear"]


def record(run, step, *words, empty_buffer=False):
    """The steps after which a start is recorded now."""
    record_start(run, load_recipe("tiny", ["run.steps=30", *words]), step, empty_buffer)
    return [start.after_step for start in read_starts(run)]


def test_a_change_holds_for_the_steps_after_it(tmp_path):
    assert record(tmp_path, 0) == [0]
    assert record(tmp_path, 6, "replay.ratio=0.2") == [0]  # nothing that is recorded
    assert record(tmp_path, 6, *FALLING) == [0, 6]
    assert record(tmp_path, 9, *FALLING) == [0, 6]
    starts = read_starts(tmp_path)
    assert [start_of(starts, step).steps for step in (1, 6, 7, 40)] == [30, 30, 40, 40]
    assert start_of(starts, 11).rate_of(11) == pytest.approx(8.0 * 30 / 40)
    assert start_of((), 1) is None


def test_a_resume_before_a_change_removes_it_with_its_steps(tmp_path):
    record(tmp_path, 0)
    record(tmp_path, 6, *FALLING)
    assert record(tmp_path, 3, *FALLING) == [0, 3]
    assert record(tmp_path, 3) == [0]
    assert read_starts(tmp_path)[0].steps == 30


def test_an_emptied_buffer_is_recorded_unless_the_resume_is_made_again_with_it(tmp_path):
    record(tmp_path, 0)
    assert record(tmp_path, 6, empty_buffer=True) == [0, 6]
    assert record(tmp_path, 9) == [0, 6]
    assert [start.empty_buffer for start in read_starts(tmp_path)] == [False, True]
    assert record(tmp_path, 6) == [0]
