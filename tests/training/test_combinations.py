"""The design space: whole runs in which every value of every axis and every option occurs.

The default suite trains the presets in other files; these runs are slow.
"""

import pytest
from small_runs.trained import small_recipe, train_small_run

from grpo_replay.errors import RecipeError
from grpo_replay.lab.verification.verify import verify_run

RUNS = {
    "single rollouts by group spread, with replacement": {
        "replay": {"priority": "group_std", "with_replacement": True, "ratio": 1.5},
        "loss": {"aggregation": "sequence_mean", "dual_clip": None},
        "advantage": {"std": "sample"},
    },
    "single rollouts of a pool, constant denominator, KL at ZeRO 3": {
        "replay": {"priority": "uniform", "composition": "pool", "max_age_steps": 1},
        "loss": {"aggregation": "constant", "beta": 0.05},
        "engine": {"zero_stage": 3},
        "model": {"gradient_checkpointing": True},
    },
    "single rollouts of a buffer, graded rewards, many updates": {
        "replay": {"composition": "buffer_only", "warmup_steps": 0, "priority_exponent": 1.0},
        "reward": {"function": "core_rewards:graded"},
        "batch": {"updates_per_step": 64}, "optimizer": {"learning_rate": 1e-4},
    },
    "queries beside fresh rollouts, without an age limit, GSPO": {
        "replay": {"unit": "query", "priority": "group_std", "ratio": 2.0, "max_age_steps": None},
        "loss": {"kind": "gspo", "aggregation": "sequence_mean"},
        "sampling": {"max_refills": 2},
        "optimizer": {"schedule": "cosine", "warmup_steps": 3},
    },
    "queries of a pool, without division by the spread, in bfloat16": {
        "replay": {"preset": "uniform", "warmup_steps": 2, "with_replacement": True},
        "advantage": {"std": "none"},
        "model": {"dtype": "bfloat16"}, "engine": {"zero_stage": 2},
        "loss": {"sampler_ratio": {"high": 2.0}},
    },
    "queries of a buffer": {
        "replay": {"unit": "query", "priority": "uniform", "composition": "buffer_only",
                   "warmup_steps": 0, "ratio": 1.5},
    },
    "AsymRE with a positive bias": {
        "replay": {"preset": "fifo", "warmup_steps": 0, "max_age_steps": None,
                   "capacity_rollouts": 30, "positive_fraction": 0.2},
        "loss": {"kind": "asymre"},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_axis_and_option_trains(tmp_path, processes, name):
    run = train_small_run(tmp_path / "run", **RUNS[name])
    assert [line["step"] for line in run.metrics] == list(range(1, 11))
    assert sum(line["updates"] > 0 for line in run.metrics) >= 5
    assert sum(line["replay/rollouts"] for line in run.metrics) > 5
    assert all(line["loss"] is not None for line in run.metrics if line["updates"])
    report = verify_run(run.path)
    assert report.passed, [check for check in report.checks if not check.passed]
    drawn = [[draw["rollout_id"] for draw in run.draws(step)] for step in range(1, 11)]
    if run.recipe.replay.with_replacement:
        assert any(len(set(ids)) < len(ids) for ids in drawn)
    if run.recipe.replay.unit == "query":
        for step in range(1, 11):
            groups = [
                (draw.get("update"), run.all_rollouts[draw["rollout_id"]]["group_id"])
                for draw in run.draws(step)
            ]  # `buffer_only` draws for every update
            assert all(groups.count(group) % 4 == 0 for group in groups)
    if run.recipe.loss.beta:
        kls = [line["kl"] for line in run.metrics if line["updates"]]
        assert all(kl >= 0 for kl in kls) and kls[-1] > 1e-4
    if run.recipe.batch.updates_per_step == 64:  # one per rollout, if there are fewer rollouts
        for line in run.metrics:
            assert line["updates"] == line["cost/trained_rollouts"]
    if run.recipe.loss.kind == "gspo":  # its draws have no age limit
        assert max(draw["age_steps"] for draw in run.all_draws) > 3


def test_a_sampler_that_lags_needs_its_own_log_probs_and_evaluations_after_pushes():
    with pytest.raises(RecipeError, match=r"loss\.behavior_logprobs"):
        small_recipe(run={"sync_every_steps": 4})
    sections = {
        "run": {"sync_every_steps": 4, "steps": 20},
        "loss": {"behavior_logprobs": "sampler"},
        "eval": {"benchmarks": ["tiny"], "every_steps": 6},
    }
    with pytest.raises(RecipeError, match=r"every_steps 6 .*run\.sync_every_steps 4"):
        small_recipe(**sections)
    with pytest.raises(RecipeError, match=r"every_steps \[4, 6\] .*run\.sync_every_steps 4"):
        small_recipe(**{**sections, "eval": {"benchmarks": ["tiny"], "every_steps": [4, 6]}})
    for multiples in (8, [4, 16]):
        evaluated = {"benchmarks": ["tiny"], "every_steps": multiples}
        assert small_recipe(**{**sections, "eval": evaluated})
