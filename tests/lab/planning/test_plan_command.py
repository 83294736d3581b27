"""`plan`: assumptions given, taken from a recipe, or measured in a run."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial

import by_hand
import pyarrow.parquet as pq
import pytest
from commands import run_plan as run
from small_runs.synthetic import (
    VARIANCE_AT_AGE_ONE,
    VARIANCE_EXPONENT,
    synthetic_recipe,
)
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.errors import SnapshotError, UsageError
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import (
    alternative_growths,
    estimate_from_run,
    fit_growth,
    measured_mu,
)
from grpo_replay.lab.planning.expected import (
    assumed_cost_ratio,
    assumed_survival,
    expected_of,
)
from grpo_replay.lab.planning.plan import Plan
from grpo_replay.lab.planning.theory import (
    PlanInputs,
    PowerGrowth,
    RatioGrowth,
    best_fifo,
    fifo_settings,
    judge,
    objective,
    recipe_design,
)
from grpo_replay.recipe import load_recipe, recipe_to_yaml, resolve_recipe


def plan_json(capsys, **options) -> dict:
    run(as_json=True, **options)
    return json.loads(capsys.readouterr().out)


def inputs(**changes) -> PlanInputs:
    values = dict(mu=5.28, rho=0.1, growth=PowerGrowth(0.2), survival=1.0, rollouts_per_step=256)
    return PlanInputs(**{**values, "sources": {}, **changes})


@pytest.mark.parametrize("growth", [RatioGrowth(1e-4, 4.0), PowerGrowth(300.0)])
def test_a_recipe_whose_old_rollouts_are_all_noise_gets_a_plan(growth):
    """x = 4,608/80 = 57.6, and exp(1e-4·57.6⁴) is beyond float64."""
    replay = load_recipe("fifo-tiny", ["replay.capacity_rollouts=4608"]).replay
    assumed = inputs(growth=growth, rollouts_per_step=80)
    plan = Plan(assumed, best_fifo(assumed), recipe_design(assumed, replay), {})
    document = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert document["designs"]["this_recipe"]["x"] == 57.6
    assert document["designs"]["this_recipe"]["verdict"]["ratio"] is None
    assert document["designs"]["best_FIFO"]["verdict"]["ratio"] < 2
    assert "pays at no μ" in document["verdict"]


def test_recipes_become_x_and_y():
    """Fresh once and r replayed, at ages 0 (fresh) to 6; without replacement at most once a step.
    FIFO holds N and draws B."""
    half = inputs(rollouts_per_step=32, survival=0.5)
    for ratio, uses in ((0.5, 1.5), (20.0, 7.0)):
        ours = synthetic_recipe("ours", 50, max_age_steps=6, ratio=ratio).replay
        design = recipe_design(half, ours)
        assert (design.x, design.y) == (7.0, uses)
        assert design.stored_rollouts == 6 * 16
        assert design.trained_rollouts_per_step == 16 * uses
    fifo = recipe_design(inputs(rollouts_per_step=32),
                     synthetic_recipe("fifo", capacity_rollouts=96, ratio=1.5).replay)  # fmt: skip
    assert (fifo.x, fifo.y) == (3.0, 1.5)


def test_recommended_settings_give_back_x_and_y():
    assumed = inputs(survival=0.4)
    best = best_fifo(assumed)
    fifo = fifo_settings(assumed, best)
    survivors = 0.4 * 256
    assert fifo["capacity_rollouts"] == pytest.approx(best.x * survivors, abs=1)
    assert fifo["ratio"] * 256 == pytest.approx(best.y * survivors)  # B, trained on per step


SMALL_BUFFER = ["sampling.prompts_per_step=5", "batch.updates_per_step=3", "replay.ratio=2.25"]


@pytest.mark.parametrize(
    ("recipe", "words", "growth"),
    [
        ("tiny", ["sampling.max_refills=2"], 0.2),  # two updates of one draw, groups dropped
        ("tiny", ["batch.mini_batch_rollouts=32"], 0.45),  # the least buffer
        ("qwen3-1.7b", [], 0.2),
        ("fifo-tiny", SMALL_BUFFER, 0.45),  # three updates, each with a draw
    ],
)
def test_a_recipe_with_the_recommended_settings_is_the_design(capsys, recipe, words, growth):
    document = plan_json(capsys, recipe=recipe, overrides=tuple(words), growth=growth)
    best = document["designs"]["best_FIFO"]
    given = [
        f"{section}.{key}={json.dumps(value)}"
        for section, settings in document["settings"].items()
        for key, value in settings.items()
    ]
    again = plan_json(capsys, recipe=recipe, overrides=(*words, *given), growth=growth)
    found = again["designs"]["this_recipe"]
    for key in ("x", "y", "stored_rollouts", "trained_rollouts_per_step"):
        assert found[key] == pytest.approx(best[key], rel=0.02), key
    assert found["verdict"]["ratio"] == pytest.approx(best["verdict"]["ratio"], rel=0.01)
    assert load_recipe(recipe, [*words, *given]).replay.warmup_steps == 0


def test_a_fresh_anchored_batch_has_its_own_ages(capsys):
    """r = 0.5: two thirds are fresh."""
    document = plan_json(capsys, recipe="qwen3-1.7b")
    mu = document["assumptions"]["mu"] / document["assumptions"]["survival"]
    # Cells of s^0.4: age s has (s + 1)^1.4 - s^1.4 times the variance of age 0.
    stored = sum((s + 1) ** 1.4 - s**1.4 for s in range(1, 11)) / 10
    one_step = (1 + 0.25 / 10) / 1.5**2
    bracket = (1 + 0.5 * stored) / 1.5**2 + 0.1 * (1 - one_step) * (1 + 0.5 * stored) / 1.5
    ratio = document["designs"]["this_recipe"]["verdict"]["ratio"]
    assert ratio == pytest.approx(bracket * (1 + 1.5 / mu) / (1 + 1 / mu))
    assert document["designs"]["this_recipe"]["stored_rollouts"] == pytest.approx(1127)


@pytest.mark.parametrize(
    ("recipe", "old", "true"),
    [(None, 1.36, 0.65), ("fifo-qwen3-0.6b", 1.46, 0.70), ("qwen3-1.7b", 1.79, 0.85)],
)
def test_no_replay_is_each_rollout_once_not_drawn_with_replacement(capsys, recipe, old, true):
    """J without replay over J of the best buffer; `old` is with J(1, 1), 2 + ρ times as much."""
    given = {"mu": None if recipe else 5.28, "growth": 0.2}
    found = plan_json(capsys, recipe=recipe, **given)["designs"]
    relative = 1 / found["best_FIFO"]["verdict"]["ratio"]
    assert relative == pytest.approx(true, abs=0.006)
    assert 2.1 * relative == pytest.approx(old, abs=0.006)
    answer = found["best_FIFO"]["verdict"]["answer"]
    assert answer == ("undecided" if recipe == "qwen3-1.7b" else "dearer")


def test_plan_and_dry_run_assume_the_same(capsys):
    for name in ("qwen3-0.6b", "qwen3-4b", "fifo-qwen3-0.6b", "tiny"):
        expected = expected_of(load_recipe(name))
        assumed = plan_json(capsys, recipe=name)["assumptions"]
        for key in ("mu", "survival"):
            assert assumed[key] == getattr(expected, key), (name, key)
            assert assumed["sources"][key] == f"assumed: {expected.sources[key]}"


@pytest.mark.parametrize(
    ("recipe", "overrides", "survival", "mu"),
    [
        ("qwen3-0.6b", [], 86.5 / 256, 6.84),
        ("qwen3-4b", ["model.path=/weights/Qwen3-4B-Base"], 124.9 / 256, 5.6744),
        ("fifo-qwen3-0.6b", [], 1.0, 6.84),
        ("fifo-qwen3-0.6b", ["replay.drop_zero_variance=true"], 86.5 / 256, 6.84),
        ("qwen3-0.6b", ["model.path=Qwen/Qwen2.5-7B"], 112.7 / 256, 5.28),
        ("qwen3-0.6b", ["model.path=someone/else"], 112.7 / 256, 5.28),
    ],
)
def test_assumptions_by_model_name(recipe, overrides, survival, mu):
    resolved = load_recipe(recipe, overrides)
    assert assumed_survival(resolved.model.path, resolved.replay.drop_zero_variance)[
        0
    ] == pytest.approx(survival)
    assert assumed_cost_ratio(resolved.model.path)[0] == pytest.approx(mu, abs=1e-4)
    assert ("another model" in assumed_cost_ratio(resolved.model.path)[1]) == (
        "else" in resolved.model.path
    )


def test_the_screen_has_the_verdict_first_and_the_settings(capsys):
    run(mu=5.28, rho=0.1, growth=0.2)
    text = capsys.readouterr().out
    assert text.startswith(
        "replay is predicted not to pay: the best FIFO buffer needs 1.54 times the compute"
    )
    assert "--set replay.capacity_rollouts=1092 --set replay.ratio=3.97" in text


def test_a_growth_of_few_ages_or_of_none_decides_nothing(runs, capsys):
    measured = estimate_from_run(open_source(runs["ours"]))
    rows = by_hand.rows_of(runs["ours"] / "draws")
    drawn = sum(row["age_steps"] > 0 and bool(row["tokens"]) for row in rows)
    assert measured.growth_known and measured.growth_draws == drawn >= 200
    assert not replace(measured, growth_draws=199).growth_known
    assert not replace(measured, growth_points=measured.growth_points[:2]).growth_known
    document = plan_json(capsys, recipe="fifo-qwen3-0.6b")
    verdict = document["designs"]["this_recipe"]["verdict"]
    assert verdict["low"] < 1 and verdict["answer"] == "undecided"
    assert document["verdict"].startswith("the prediction is undecided, because the growth")
    assert document["verdict"].endswith(
        f", {verdict['low']:.2f} to {verdict['high']:.2f} if one assumption changes"
    )


def test_where_training_is_dear_no_growth_makes_the_best_fifo_buffer_pay(capsys):
    """μ = 0.5, ρ = 0.1, no growth: at most 5 % above (√2 + √0.1)² of (1 + 2)."""
    document = plan_json(capsys, mu=0.5)
    low = document["designs"]["best_FIFO"]["verdict"]["low"]
    limit = (math.sqrt(2) + math.sqrt(0.1)) ** 2 / 3
    assert low == pytest.approx(1.05 * limit, rel=1e-3)
    assert document["verdict"].startswith("replay is predicted not to pay: the best FIFO buffer")


def test_estimates_recover_the_parameters_of_a_synthetic_run(runs, capsys):
    document = plan_json(capsys, from_run=str(runs["ours"]))
    assumptions = document["assumptions"]
    assert assumptions["mu"] == pytest.approx(4.0)  # 6 s to generate one, 1.5 s to train on one
    generated = kept = 0
    for path in sorted((runs["ours"] / "rollouts").glob("*.parquet")):
        flags = pq.read_table(path).column("kept").to_pylist()
        generated += len(flags)
        kept += sum(flags)
    assert assumptions["survival"] == pytest.approx(kept / generated)
    growth = assumptions["growth_parameters"]
    assert growth["scale"] == pytest.approx(VARIANCE_AT_AGE_ONE, rel=1e-6)
    assert growth["exponent"] == pytest.approx(VARIANCE_EXPONENT, rel=1e-6)
    sources = assumptions["sources"]
    assert sources["mu"] == sources["survival"] == "measured in the run"
    assert sources["rho"].startswith("assumed")


@pytest.mark.parametrize("preset", ["ours", "fifo", "uniform"])
def test_mu_is_measured_with_every_preset(runs, capsys, preset):
    # FIFO trains on its draw alone, the pool on part of the survivors.
    document = plan_json(capsys, from_run=str(runs[preset]))
    assert document["assumptions"]["mu"] == pytest.approx(4.0)
    assert document["assumptions"]["sources"]["mu"] == "measured in the run"


def test_mu_is_a_ratio_of_totals_and_includes_steps_without_training():
    """20 generated in 40 s, 10 trained in 5 s: 2 s / 0.5 s = 4."""
    lines = [
        {"cost/generation_seconds": 15.0, "cost/training_seconds": 5.0, "cost/mu": 3.0,
         "cost/generated_rollouts": 10, "cost/trained_rollouts": 10},
        {"cost/generation_seconds": 25.0, "cost/training_seconds": 0.0, "cost/mu": None,
         "cost/generated_rollouts": 10, "cost/trained_rollouts": 0},
    ]  # fmt: skip
    assert measured_mu(lines) == pytest.approx(4.0)
    without = [{k: v for k, v in line.items() if k != "cost/trained_rollouts"} for line in lines]
    assert measured_mu(without) is None  # survivors and draws together are not what trained
    assert measured_mu([]) is None


def test_growth_is_fitted_to_noisy_points_and_none_without_growth():
    points = [(age, 0.01 * age**1.3 * wobble, 100.0) for age, wobble in ((1, 1.1), (2, 0.9))]
    points += [(age, 0.01 * age**1.3, 1e6) for age in (4, 8)]
    fit = fit_growth(points)
    assert fit.exponent == pytest.approx(1.3, abs=1e-3)
    assert fit_growth([(1, -1e-4, 10.0), (2, 0.0, 10.0)]) is None
    assert fit_growth([(3, 0.06, 10.0)]) == RatioGrowth(pytest.approx(0.02), 1.0)


def test_the_fit_of_the_growth_weighs_each_age_by_its_tokens():
    """By hand: through (log2 age, log2 value) = (0, 0), (1, 1) and (2, 1) with weights 1, 1 and 2
    the slope is 1.25 / 2.75."""
    fit = fit_growth([(1, 1.0, 1.0), (2, 2.0, 1.0), (4, 2.0, 2.0)])
    assert fit.exponent == pytest.approx(5 / 11)


def test_what_a_measurement_of_the_growth_leaves_open(capsys):
    points = [(age, 0.01 * age**1.5, 100.0) for age in (1, 2, 3)]
    fits = alternative_growths(points)
    assert [fit.exponent for fit in fits] == pytest.approx([1.5, 1.5, 1.5, 1.0, 2.0])
    # e.g. b = 1: the mean of log(0.01·s^0.5) over the three ages
    logs = [math.log(0.01 * age**0.5) for age in (1, 2, 3)]
    assert fits[3].scale == pytest.approx(math.exp(sum(logs) / 3))
    noisy = [(1, 0.001, 10.0), (2, 0.05, 10.0), (3, 0.08, 10.0)]
    assert fit_growth(noisy).exponent == 2.0, "not s^4"
    cost, growth = partial(objective, 4.0, 4.0), RatioGrowth(0.01, 1.5)
    plain, wide = (
        judge(cost, 5.28, 0.1, growth, others) for others in ((), (RatioGrowth(0.3, 1.5),))
    )
    assert (wide.ratio, wide.low) == (plain.ratio, plain.low) and wide.high > 1.5 * plain.high


def test_a_run_s_rollouts_per_step_are_counted_not_taken_from_its_recipe(runs, tmp_path, capsys):
    # 8 prompts of 4 in the log; its recipe.yaml was edited afterwards.
    copy = shutil.copytree(runs["ours"], tmp_path / "run")
    edited = synthetic_recipe("ours").model_dump(mode="json")
    edited["sampling"]["prompts_per_step"] = 16
    (copy / "recipe.yaml").write_text(recipe_to_yaml(resolve_recipe([edited])))
    assert plan_json(capsys, from_run=str(copy))["assumptions"]["rollouts_per_step"] == 32


def test_contradictory_and_missing_options_are_refused(tmp_path, runs):
    for options in (
        {"recipe": "tiny", "from_run": str(runs["ours"])},
        {},
        {"mu": 5.28, "overrides": ("replay.ratio=1",)},
    ):
        with pytest.raises(UsageError):
            run(**options)
    with pytest.raises(SnapshotError):
        run(from_run=str(tmp_path))


@pytest.mark.parametrize("words", [("--mu", "0"), ("--rho", "1.1"), ("--growth", "-0.2")])
def test_values_out_of_range_are_refused_by_name(words):
    done = CliRunner().invoke(app, ["plan", "--mu", "5.28", *words])
    assert done.exit_code == 2 and f"'{words[0]}'" in done.output
