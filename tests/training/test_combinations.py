"""The design space: every point that makes sense trains ten steps, every other is refused.

The default suite trains the presets, which use every value of every axis, and four options.
"""

import itertools

import pytest
from slow_tests import slow_except
from small_runs.trained import small_recipe, train_small_run

from grpo_replay.errors import RecipeError
from grpo_replay.lab.verification.verify import verify_run

UNITS = ("rollout", "query")
PRIORITIES = ("abs_advantage", "uniform", "group_std")
COMPOSITIONS = ("fresh_anchored", "pool", "buffer_only")
PRESETS = ("grpo", "uniform", "group_std", "ours", "fifo")

WARMUP = {"fresh_anchored": 2, "pool": 2, "buffer_only": 0}
AXES = list(itertools.product(UNITS, PRIORITIES, COMPOSITIONS))
SENSIBLE = [axes for axes in AXES if axes[:2] != ("query", "abs_advantage")]

OPTIONS = {
    "asymre": {"loss": {"kind": "asymre"}, "replay": {"preset": "fifo", "warmup_steps": 0}},
    "asymre, no replay": {"loss": {"kind": "asymre"}, "replay": {"preset": "grpo"}},
    "kl": {"loss": {"beta": 0.05}},
    "kl, ZeRO 3": {"loss": {"beta": 0.05}, "engine": {"zero_stage": 3}},
    "sequence_mean": {"loss": {"aggregation": "sequence_mean"}},
    "constant": {"loss": {"aggregation": "constant"}},
    "no dual clip": {"loss": {"dual_clip": None}},
    "sampler log-probs": {"loss": {"behavior_logprobs": "sampler"}},
    "sequence ratio": {"loss": {"kind": "gspo", "aggregation": "sequence_mean"}},
    "sampler weights": {"loss": {"sampler_ratio_cap": 2.0}},
    "no division by std": {"advantage": {"std": "none"}},
    "cosine with warm-up": {"optimizer": {"schedule": "cosine", "warmup_steps": 3}},
    "refills": {"sampling": {"max_refills": 2}},
    "sample std": {"advantage": {"std": "sample"}},
    "mini_batch_rollouts": {"batch": {"mini_batch_rollouts": 5}},
    "many updates": {
        "batch": {"updates_per_step": 64}, "optimizer": {"learning_rate": 1e-4},
    },
    "ratio 2": {"replay": {"ratio": 2.0}},
    "no age limit": {"replay": {"max_age_steps": None}},
    "age 1": {"replay": {"max_age_steps": 1}},
    "exponent 0": {"replay": {"priority_exponent": 0.0}},
    "exponent 1": {"replay": {"priority_exponent": 1.0}},
    "graded rewards": {"reward": {"function": "core_rewards:graded"}},
    "bf16": {"model": {"dtype": "bfloat16"}, "engine": {"zero_stage": 2}},
    "checkpointing": {"model": {"gradient_checkpointing": True}, "engine": {"zero_stage": 3}},
    "positive bias": {
        "replay": {"preset": "fifo", "warmup_steps": 0, "capacity_rollouts": 30,
                   "positive_fraction": 0.2},
    },
    **{
        f"with replacement, {unit}, {composition}": {
            "replay": {"unit": unit, "priority": "uniform", "composition": composition,
                       "with_replacement": True, "ratio": 1.5, "warmup_steps": WARMUP[composition]},
        }
        for unit in UNITS
        for composition in COMPOSITIONS
    },
}  # fmt: skip

QUICK = ("bf16",)


def train_ten_steps(path, **sections):
    run = train_small_run(path, **sections)
    assert [line["step"] for line in run.metrics] == list(range(1, 11))
    assert sum(line["updates"] > 0 for line in run.metrics) >= 5
    replayed = sum(line["replay/rollouts"] for line in run.metrics)
    assert replayed > 5 if run.recipe.replays else replayed == 0
    assert all(line["loss"] is not None for line in run.metrics if line["updates"])
    report = verify_run(path)
    assert report.passed, [check for check in report.checks if not check.passed]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("unit, priority, composition", SENSIBLE)
def test_every_point_of_the_design_space_trains(tmp_path, processes, unit, priority, composition):
    run = train_ten_steps(
        tmp_path / "run",
        replay={
            "unit": unit, "priority": priority, "composition": composition,
            "warmup_steps": WARMUP[composition],
        },
    )  # fmt: skip
    if unit == "query":
        for step in range(1, 11):
            drawn = [
                (d.get("update"), run.all_rollouts[d["rollout_id"]]["group_id"])
                for d in run.draws(step)
            ]  # `buffer_only` draws for every update
            assert all(drawn.count(group) == 4 for group in drawn)


@pytest.mark.parametrize("preset", slow_except(["ours"], PRESETS))
def test_every_preset_trains(tmp_path, processes, preset):
    replay = {"preset": preset}
    if preset == "fifo":  # what the small recipe says about age and warm-up yields to the preset
        replay |= {"max_age_steps": None, "warmup_steps": 0}
    run = train_ten_steps(tmp_path / "run", replay=replay)
    settings = run.recipe.replay
    assert (settings.enabled, settings.unit, settings.priority, settings.composition) == {
        "grpo": (False, "rollout", "abs_advantage", "fresh_anchored"),
        "ours": (True, "rollout", "abs_advantage", "fresh_anchored"),
        "uniform": (True, "query", "uniform", "pool"),
        "group_std": (True, "query", "group_std", "pool"),
        "fifo": (True, "rollout", "uniform", "buffer_only"),
    }[preset]


@pytest.mark.parametrize("name", slow_except(QUICK, OPTIONS))
def test_every_option_trains(tmp_path, processes, name):
    run = train_ten_steps(tmp_path / "run", **OPTIONS[name])
    if name == "mini_batch_rollouts":
        for line in run.metrics:
            batch = line["fresh/rollouts"] + line["replay/rollouts"]
            assert line["updates"] == -(-batch // 5)
    if name == "many updates":  # one per rollout, if there are fewer rollouts than updates
        for line in run.metrics:
            assert line["updates"] == line["fresh/rollouts"] + line["replay/rollouts"]
    if name.startswith("kl"):
        kls = [line["kl"] for line in run.metrics if line["updates"]]
        assert all(kl >= 0 for kl in kls) and kls[-1] > 1e-4
    if name.startswith("with replacement"):
        repeated = [
            len(ids) - len(set(ids))
            for ids in ([d["rollout_id"] for d in run.draws(step)] for step in range(1, 11))
        ]
        assert sum(repeated) > 0
    if name == "no age limit":
        assert max(draw["age_steps"] for draw in run.all_draws) > 3


SENSELESS = {
    **{
        f"query abs_advantage {composition}": (
            {"unit": "query", "priority": "abs_advantage", "composition": composition,
             "warmup_steps": WARMUP[composition]},
            "belongs to a rollout",
        )
        for composition in COMPOSITIONS
    },
    "warm-up as long as the run": ({"warmup_steps": 10}, "would never replay"),
    "buffer_only with a warm-up": (
        {"composition": "buffer_only", "warmup_steps": 2}, "draws from the first step on",
    ),
    "buffer_only with ratio 0": (
        {"composition": "buffer_only", "warmup_steps": 0, "ratio": 0}, "train on nothing",
    ),
    "capacity below one step": ({"capacity_rollouts": 23}, "would be evicted"),
    "positive bias of queries": (
        {"unit": "query", "priority": "uniform", "positive_fraction": 0.2}, "single rollouts",
    ),
    "age 0": ({"max_age_steps": 0}, "greater than or equal to 1"),
    "negative ratio": ({"ratio": -0.5}, "greater than or equal to 0"),
}  # fmt: skip


def test_a_sampler_that_lags_needs_its_own_log_probs_and_evaluations_after_pushes():
    with pytest.raises(RecipeError, match=r"set loss\.behavior_logprobs sampler"):
        small_recipe(run={"sync_every_steps": 4})
    sections = {
        "run": {"sync_every_steps": 4, "steps": 20},
        "loss": {"behavior_logprobs": "sampler"},
        "eval": {"benchmarks": ["tiny"], "every_steps": 6},
    }
    with pytest.raises(
        RecipeError, match=r"every_steps 6 is not a multiple of run\.sync_every_steps 4"
    ):
        small_recipe(**sections)
    assert small_recipe(**{**sections, "eval": {"benchmarks": ["tiny"], "every_steps": 8}})


@pytest.mark.parametrize("name", SENSELESS)
def test_senseless_points_are_refused_with_a_reason(name):
    replay, reason = SENSELESS[name]
    with pytest.raises(RecipeError, match=reason):
        small_recipe(replay=replay)


def test_the_number_of_combinations():
    """15 points of the axes, 5 presets and 31 options train; 10 are refused."""
    assert (len(SENSIBLE), len(PRESETS), len(OPTIONS), len(SENSELESS)) == (15, 5, 31, 10)
    assert len(AXES) == len(SENSIBLE) + 3
