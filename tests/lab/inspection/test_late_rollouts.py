"""Rollouts taken some steps after their birth, as in asynchronous runs: a use counts once."""

from collections import Counter
from pathlib import Path

import by_hand
import numpy as np
import pytest
from small_runs.synthetic import SyntheticRun, synthetic_recipe

from grpo_replay.lab.inspection.compute import outcomes_by_age, summarise
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import growth_points

STEPS = 8


@pytest.fixture(scope="module")
def late(tmp_path_factory) -> dict[str, Path]:
    """By preset, a run whose rollouts are taken two steps after their birth."""
    folder = tmp_path_factory.mktemp("late")
    for preset in ("ours", "fifo"):
        SyntheticRun(folder / preset, synthetic_recipe(preset, STEPS), steps_late=2).write(STEPS)
    return {preset: folder / preset for preset in ("ours", "fifo")}


def test_a_use_in_the_step_that_took_the_rollout_counts_once_at_its_age(late):
    draws = by_hand.rows_of(late["fifo"] / "draws")
    found = outcomes_by_age(open_source(late["fifo"]))
    assert {age: each.uses for age, each in found.items()} == Counter(
        row["age_steps"] for row in draws
    )
    assert min(found) == 0 and found[0].uses == sum(row["step"] == 1 for row in draws)


def test_the_growth_with_age_is_measured_from_fresh_rollouts(late):
    points = {
        age: excess for age, excess, _ in growth_points(outcomes_by_age(open_source(late["fifo"])))
    }
    assert points[2] == pytest.approx(0.004 * 2**1.5, rel=1e-4)


def test_rollouts_trained_on_without_a_draw_are_fresh_and_draws_are_not(late):
    rows = by_hand.rows_of(late["ours"] / "rollouts")
    draws = by_hand.rows_of(late["ours"] / "draws")
    found = outcomes_by_age(open_source(late["ours"]))
    assert found[0].uses == sum(row["tokens"] is not None for row in rows) > 0
    uses = Counter(row["age_steps"] for row in draws)
    assert {age: each.uses for age, each in found.items() if age > 0} == uses and uses


def test_the_first_draw_comes_after_the_step_that_trained_on_the_rollout_as_fresh(late):
    seen = summarise(open_source(late["ours"]))
    taken, last, gaps = {}, {}, Counter()
    for step in range(1, STEPS + 1):
        for row in by_hand.rows_of_step(late["ours"] / "rollouts", step):
            taken[row["rollout_id"]] = step
        for row in by_hand.rows_of_step(late["ours"] / "draws", step):
            gaps[step - last.get(row["rollout_id"], taken[row["rollout_id"]])] += 1
            last[row["rollout_id"]] = step
    assert seen.last_use.new == 0
    assert seen.last_use.gaps == gaps
    assert np.sum(list(gaps.values())) > 50
