"""No wait is endless, and a slow start is no reason to give up."""

import pytest

from grpo_replay.collection import intake as module
from grpo_replay.collection.intake import PATIENCE, Patience
from grpo_replay.collection.messages import Drop, Report
from grpo_replay.errors import SamplerError
from grpo_replay.recipe import resolve_recipe


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def patience(clock) -> Patience:
    servers = {"request_timeout_seconds": 10.0}
    return Patience(resolve_recipe([{"sampling": {"servers": servers}}]).sampling.servers, 2)


def test_a_collector_may_take_longer_to_start_than_completions_to_finish(patience, clock):
    clock[0] += 60
    patience.refuse_endless("step 1", Report())
    patience.note(Report())  # its first
    clock[0] += PATIENCE * 10
    patience.note(Report())
    patience.refuse_endless("step 1", Report())
    clock[0] += 1
    patience.note(Report())
    with pytest.raises(SamplerError, match=r"waited for step 1: no completion finished for 40 s"):
        patience.refuse_endless("step 1", Report())
    patience.begin()  # another wait
    patience.refuse_endless("step 2", Report())


def test_completions_in_grading_are_worth_waiting_for(patience, clock):
    patience.note(Report(generated_rollouts=4, grading=4))
    for _ in range(10):
        clock[0] += 39
        patience.note(Report(generated_rollouts=4, grading=4))
        patience.refuse_endless("step 1", Report())


def test_a_silent_collector_is_left_to_the_link_which_replaces_it(patience, clock):
    patience.note(Report())
    clock[0] += 1000
    patience.refuse_endless("step 1", Report())


def test_a_finished_completion_shows_progress(patience, clock):
    for generated in range(100):
        patience.note(Report(running=1, generated_rollouts=generated))
        clock[0] += 39
        patience.refuse_endless("step 3", Report())


def test_four_groups_lost_in_a_row_are_too_many(patience):
    lost = Drop(0, 0, "lost", 0, 0)
    for body in (lost, lost, lost, Drop(0, 0, "cancelled", 0, 0), lost, lost, lost):
        patience.note_delivery(body)
    with pytest.raises(SamplerError, match="4 groups in a row were lost"):
        patience.note_delivery(lost)
