"""When a run reached an accuracy, as the benchmark beside TRL counts it."""

import pytest
from against_trl import seconds_to


def run(**accuracy: float) -> dict:
    """Ten seconds to the first step, one for each further one; evaluated after steps 2, 4 and 6."""
    found = {step.removeprefix("step_"): value for step, value in accuracy.items()}
    return {"cpu": [10.0, 11.0, 12.0, 13.0, 14.0, 15.0], "accuracy": found}


@pytest.mark.parametrize(
    "level, seconds",
    [(0.40, 11.0), (0.45, 12.0), (0.50, 13.0), (0.55, 14.0), (0.61, float("inf"))],
)
def test_a_level_is_reached_between_two_evaluations(level, seconds):
    rising = run(step_2=0.40, step_4=0.50, step_6=0.60)
    assert seconds_to(level, rising, "cpu") == pytest.approx(seconds)


def test_a_later_fall_does_not_count():
    assert seconds_to(0.5, run(step_2=0.4, step_4=0.5, step_6=0.3), "cpu") == 13.0


def test_a_level_that_the_first_evaluation_exceeds_counts_from_there():
    assert seconds_to(0.3, run(step_2=0.4, step_4=0.5), "cpu") == 11.0
