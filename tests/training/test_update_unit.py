"""Paper B's unit is the optimizer update: a FIFO step of several updates makes a draw for each, and
the tools count ages, last use and uses in updates."""

import json
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_runs.trained import spied_updates

from grpo_replay.lab.inspection.compute import summarise
from grpo_replay.lab.inspection.rebuild import what_if
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import load_recipe
from grpo_replay.training import Observer
from grpo_replay.training.run import run_training

QUICK = ["eval.benchmarks=[]", "tracking.report_to=[]", "reward.function=minerva",
         "reward.workers=1", "engine.device=cpu"]  # fmt: skip
GROUPS, UPDATES, STEPS = 5, 3, 5
"""Groups of 16 that a step takes, its updates of 60, and the steps."""
ARM = ["sampling.prompts_per_step=5", "replay.ratio=2.25", f"batch.updates_per_step={UPDATES}"]


@pytest.fixture(scope="module")
def arm(tmp_path_factory, processes):
    """A finished run, and the rollouts of every update as the engine got them."""
    folder = tmp_path_factory.mktemp("updates") / "run"
    with spied_updates() as updates:
        recipe = load_recipe("fifo-tiny", [*QUICK, f"run.steps={STEPS}", *ARM])
        run_training(recipe, folder, False, Observer())
    return folder, [[row.rollout_id for row in rows] for rows in updates]


def in_updates(draws, groups, updates, capacity=84):
    """Paper B in a few lines, its time the update: ages at use, gaps since the last use (None: new)
    and uses of the rollouts `draws[u]` of each update u."""
    stored, born, last, ages, gaps, uses = [], {}, {}, Counter(), Counter(), Counter()
    for u, drawn in enumerate(draws):
        if u % updates == 0:
            new = range(len(born), len(born) + 16 * groups)
            stored = [*stored, *new][-capacity:]
            born |= dict.fromkeys(new, u)
        if callable(drawn):
            drawn = drawn(stored)
        for rollout in drawn:
            assert rollout in stored
            ages[u - born[rollout]] += 1
            gaps[u - last[rollout] if rollout in last else None] += 1
            uses[rollout] += 1
            last[rollout] = u
    return ages, gaps, uses, [len(draws) - 1 - born[rollout] for rollout in stored]


def test_ages_last_use_and_uses_are_those_of_a_simulation_in_updates(arm):
    folder, seen = arm
    assert {len(rollouts) for rollouts in seen} == {60}
    ages, gaps, uses, stored = in_updates(seen, GROUPS, UPDATES)
    found = summarise(open_source(folder, None))
    assert {row.age: row.replayed for row in found.staleness if row.replayed} == ages
    assert {row.age: row.stored for row in found.staleness if row.stored} == Counter(stored)
    assert {**found.last_use.gaps, None: found.last_use.new} == gaps
    born = 16 * GROUPS * len(seen) // UPDATES
    unused = {0: born - len(uses)} if born > len(uses) else {}
    assert found.uses_over_run == Counter(uses.values()) + Counter(unused)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    total = sum(line["replay/age_mean"] * line["replay/rollouts"] for line in metrics)
    assert total == pytest.approx(sum(age * count for age, count in ages.items()))
    assert metrics[-1]["buffer/age_mean"] == pytest.approx(np.mean(stored))
    assert verify_run(folder).passed


def test_the_draw_log_has_the_update_of_every_draw(arm):
    folder, seen = arm
    rows = [
        row
        for path in sorted((folder / "draws").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    assert len(rows) == 60 * len(seen)
    for update, rollouts in enumerate(seen, start=1):
        mine = rows[60 * (update - 1) : 60 * update]
        assert {row["update"] for row in mine} == {update}
        assert sorted(row["rollout_id"] for row in mine) == sorted(rollouts)


def test_the_law_of_ages_and_last_use_is_that_of_uniform_draws_in_updates(arm):
    """As paper B's arm at y = 2.2: what if draws it five times, the simulation fifty. Its ages are
    in steps."""
    folder, seen = arm
    rng = np.random.default_rng(0)
    draws = [lambda stored: rng.choice(stored, 60)] * len(seen)
    means = []
    for _ in range(50):
        ages, *_ = in_updates(draws, GROUPS, UPDATES)
        means.append(sum(age // UPDATES * n for age, n in ages.items()) / ages.total())
    result = what_if(open_source(folder, None), [])
    assert result.same["age_mean"] == pytest.approx(np.mean(means), abs=3 * np.std(means) + 0.01)
    assert result.logged["age_mean"] == pytest.approx(np.mean(means), abs=4 * np.std(means))
