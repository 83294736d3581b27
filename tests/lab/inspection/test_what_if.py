"""What-if: the settings of a run reproduce its draws; other settings match runs with them."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from commands import run_inspect as run
from small_runs.synthetic import write_synthetic_run

from grpo_replay.errors import RecipeError, UsageError
from grpo_replay.lab.inspection.rebuild import (
    changed_recipe,
    kept_with_settings,
    refuse_longer_age_limit,
    simulate,
    statistics,
    what_if,
)
from grpo_replay.lab.inspection.rollout_columns import Rollouts, read_log
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.inspection.views import _STATISTICS
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.stored_recipe import recipe_to_resume

STEPS = 60
# Draws vary between simulations of one log; these counts are deterministic.
FIXED = ("replayed_rollouts", "stored_mean", "age_p95")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """The folder of a run of `STEPS` steps, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("long")

    @cache
    def made(preset: str, seed: int = 3, **replay: int) -> Path:
        return write_synthetic_run(
            folder / f"{preset}-{seed}", preset, steps=STEPS, seed=seed, **replay
        ).folder

    return made


def simulated(source, recipe, count: int = 24) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of every statistic over simulations with different draws."""
    log = read_log(source.rollout_files)
    results = [simulate(log, recipe, seed) for seed in range(1000, 1000 + count)]
    return {
        name: (
            float(np.mean([result[name] for result in results])),
            float(np.std([result[name] for result in results], ddof=1)),
        )
        for name in results[0]
    }


@pytest.mark.slow
def test_own_settings_reproduce_a_runs_draws_and_other_settings_those_of_runs_with_them(long_run):
    for preset in ("ours", "uniform", "fifo"):
        source = open_source(long_run(preset))
        logged = what_if(source, []).logged
        for name, (mean, deviation) in simulated(source, source.recipe).items():
            # 4.5 standard deviations of one simulation: a correct draw fails once in 10^5.
            near = pytest.approx(mean, abs=4.5 * deviation + 1e-9)
            assert math.isnan(logged[name]) or logged[name] == near, name
    source = open_source(long_run("ours"))
    other = changed_recipe(source.recipe, ["priority_exponent=4"])
    mean, deviation = simulated(source, other)["abs_advantage_mean"]
    assert abs(what_if(source, []).logged["abs_advantage_mean"] - mean) > 4.5 * deviation
    predicted = what_if(source, ["max_age_steps=2"]).changed
    seeds = [long_run("ours", 50 + seed, max_age_steps=2) for seed in range(4)]
    real = [what_if(open_source(run), []).logged for run in seeds]
    for name in ("age_mean", "abs_advantage_mean", "never_drawn_share", "stored_mean"):
        values = [run[name] for run in real]
        spread = max(np.std(values, ddof=1), 0.02 * abs(np.mean(values)))
        assert predicted[name] == pytest.approx(np.mean(values), abs=4 * spread), name


def test_deterministic_statistics_have_no_error(runs):
    result = what_if(open_source(runs["ours"]), ["max_age_steps=2"])
    for name in FIXED:
        assert result.same_error[name] == pytest.approx(0.0, abs=1e-12), name
    assert result.same_error["age_mean"] > 0
    assert result.changed["age_p95"] == 2.0 and result.same["age_mean"] > result.changed["age_mean"]
    assert result.changes == {"max_age_steps": [5, 2]}


def two_groups(**columns) -> Rollouts:
    """A group with a signal, taken in step 1, and one without, taken in step 2."""
    values = dict(
        rollout_id=[0, 1, 2, 3],
        group_id=[0, 0, 1, 1],
        birth_step=[1, 1, 2, 2],
        logged_step=[1, 1, 2, 2],
        reward=[1.0, -1.0, 1.0, 1.0],
        advantage=[1.0, -1.0, np.nan, np.nan],
        group_reward_std=[1.0, 1.0, 0.0, 0.0],
        group_correct=[1, 1, 2, 2],
        completion_tokens=[10, 20, 5, 5],
        truncated=[False] * 4,
        behavior_logprob_mean=[0.0] * 4,
        kept=[True, True, False, False],
        prompt_id=["a", "a", "b", "b"],
    )
    values |= columns
    return np.rec.fromarrays(list(map(np.asarray, values.values())), names=list(values))


def test_statistics_of_a_hand_made_run():
    """Two survivors of one group, one dropped group; the second rollout drawn twice at age 1."""
    log = two_groups()
    trained, replayed, ages = np.array([0, 1, 1, 1]), np.array([1, 1]), np.array([1, 1])
    assert statistics(log, trained, replayed, ages, [2.0, 4.0], [2, 2]) == dict(
        replayed_rollouts=2.0,
        age_mean=1.0,
        age_p95=1.0,
        abs_advantage_mean=1.0,
        positive_share=0.0,
        never_drawn_share=0.5,
        ess_mean=3.0,
        stored_mean=2.0,
        trained_tokens_per_generated=70 / 40,
    )


def asynchronous(*overrides: str):
    small = ("sampling.group_size=2", "sampling.prompts_per_step=1", "replay.warmup_steps=0")
    return load_recipe("tiny-async", [*small, *overrides])


def stale_group() -> Rollouts:
    """Two groups with a signal, taken in the steps 3 and 7, the second six steps after its birth:
    it was dropped."""
    return two_groups(
        birth_step=np.array([3, 3, 1, 1]),
        logged_step=np.array([3, 3, 7, 7]),
        group_reward_std=np.ones(4),
        group_correct=np.ones(4, np.int32),
    )


def test_what_an_asynchronous_run_dropped_as_stale_stays_dropped():
    """Two draws a step, also in the three steps in which nothing arrived; at the end of the fifth
    step the first group leaves the buffer."""
    recipe = asynchronous("replay.preset=fifo", "replay.max_age_steps=4", "replay.ratio=1")
    found = simulate(stale_group(), recipe, seed=0)
    assert (found["replayed_rollouts"], found["stored_mean"]) == (10, 8 / 5)
    assert found["abs_advantage_mean"] == 1.0
    assert found["never_drawn_share"] == 0.0


def test_what_is_stored_is_counted_at_the_end_of_each_step():
    """The group of the first of five steps is there after all of them."""
    recipe = asynchronous("replay.preset=fifo", "replay.max_age_steps=5", "replay.ratio=1")
    assert simulate(stale_group(), recipe, seed=0)["stored_mean"] == 2.0


def test_a_shorter_age_limit_drops_what_arrives_late():
    log = stale_group()
    log.kept[2:] = True
    log.advantage[2:] = (1.0, -1.0)
    for limit, kept in ((6, 4), (5, 2), ("null", 4)):
        settings = asynchronous(f"replay.max_age_steps={limit}").replay
        assert kept_with_settings(log, settings).kept.sum() == kept


def test_what_a_run_masked_stays_out_where_it_kept_groups_of_equal_rewards():
    log = stale_group()
    log.group_reward_std[:] = 0.0
    everything = asynchronous("replay.preset=fifo").replay
    log.kept[:] = (True, True, True, False)
    assert kept_with_settings(log, everything).kept.tolist() == [True, True, True, False]
    log.kept[:] = False  # a run that dropped such groups
    assert kept_with_settings(log, everything).kept.all()


def test_an_age_limit_that_needs_what_was_dropped_is_refused():
    log = stale_group()
    refuse_longer_age_limit(log, None, 6)
    refuse_longer_age_limit(log, 4, 4)
    refuse_longer_age_limit(log, 6, None)  # nothing came later
    for limit in (5, None):
        with pytest.raises(UsageError, match="2 rollouts that arrived more than 4 steps late"):
            refuse_longer_age_limit(log, 4, limit)


def test_replay_can_be_simulated_for_a_run_without_it(runs):
    result = what_if(
        open_source(runs["grpo"]), ["preset=ours", "max_age_steps=5", "warmup_steps=3"]
    )
    assert result.logged["replayed_rollouts"] == 0
    assert math.isnan(result.logged["age_mean"])
    assert result.changed["replayed_rollouts"] > 0
    assert result.changes["preset"] == ["grpo", "ours"]


def test_changed_settings_are_those_of_a_resume(tmp_path):
    """A preset sets what is its own; the run's other settings stay."""
    run = write_synthetic_run(tmp_path / "run", "fifo", steps=8, max_age_steps=2)
    recipe = open_source(run.folder).recipe
    assert changed_recipe(recipe, []).replay == recipe.replay
    for changes in (["ratio=1"], ["preset=ours"], ["preset=ours", "warmup_steps=4"]):
        overrides = [f"replay.{change}" for change in changes]
        resumed = recipe_to_resume(run.folder, None, overrides)
        assert changed_recipe(recipe, changes).replay == resumed.replay
    ours = changed_recipe(recipe, ["preset=ours"]).replay
    assert (ours.composition, ours.max_age_steps) == ("fresh_anchored", 2)


def test_invalid_keys_and_values_raise(runs):
    source = open_source(runs["ours"])
    with pytest.raises(RecipeError, match="did you mean 'max_age_steps'"):
        what_if(source, ["max_age_step=5"])
    with pytest.raises(RecipeError, match=r"replay\.ratio"):
        what_if(source, ["ratio=-1"])
    with pytest.raises(UsageError, match="max_age_steps: expected key=value"):
        what_if(source, ["max_age_steps"])


def test_the_comparison_names_the_changes_and_has_every_statistic(runs, capsys):
    changes = ["max_age_steps=2", "priority_exponent=1"]
    run(str(runs["ours"]), what_if=changes)
    text = capsys.readouterr().out
    assert "max_age_steps 5 → 2" in text and "priority_exponent 0.5 → 1" in text
    run(str(runs["ours"]), what_if=changes, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert list(document["changed"]) == [name for name, *_ in _STATISTICS]
