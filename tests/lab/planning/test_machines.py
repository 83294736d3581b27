"""`plan --workers W --trainers T`, and what a recipe without a run is assumed to cost."""

import json

import pytest
from commands import run_plan as run

from grpo_replay.errors import UsageError
from grpo_replay.lab.dry_run.estimates import assumed_cost_ratio, assumed_survival
from grpo_replay.recipe import load_recipe
from grpo_replay.replay.compose import relative_compute


def machines(capsys, **options):
    run(**options, as_json=True)
    return json.loads(capsys.readouterr().out)


BY_HAND = {  # (1 + W/T)/(1 + μ)
    (7.0, 7, 1): 1.0, (7.0, 6, 2): 0.5, (7.0, 4, 4): 0.25, (3.0, 5, 3): 2 / 3,
    (5.28, 5, 3): 0.42463, (6.84, 6, 2): 0.51020,
}  # fmt: skip


@pytest.mark.parametrize(("mu", "workers", "trainers"), BY_HAND)
def test_gamma_and_replay_ratio_by_hand(capsys, mu, workers, trainers):
    document = machines(capsys, workers=workers, trainers=trainers, mu=mu)
    assert document["gamma"] == pytest.approx(BY_HAND[mu, workers, trainers], abs=1e-5)
    assert document["y"] == pytest.approx(mu * trainers / workers)
    # The same γ as that of the deterministic form, B + μR over B + μB.
    y = document["y"]
    assert document["gamma"] == pytest.approx((1 + mu / y) / (1 + mu))
    assert relative_compute(y, mu) == pytest.approx(document["gamma"])


def test_every_way_to_share_eight_machines_is_listed_with_the_one_asked_for(capsys):
    document = machines(capsys, workers=5, trainers=3, mu=5.28)
    pairs = [(each["workers"], each["trainers"]) for each in document["splits"]]
    assert pairs == [(7, 1), (6, 2), (5, 3), (4, 4), (3, 5), (2, 6), (1, 7)]
    assert document["splits"][2]["gamma"] == document["gamma"]
    gammas = [each["gamma"] for each in document["splits"]]
    assert gammas == sorted(gammas, reverse=True)  # fewer workers generate less


def test_the_horizon_of_a_fifo_recipe_is_in_updates(capsys):
    document = machines(capsys, recipe="fifo-qwen3-0.6b", workers=5, trainers=3)
    assert document["mu"] == 6.84  # of the recipe's own model
    assert document["x"] == pytest.approx(84 / (60 / document["y"]))  # N over R an update
    assert machines(capsys, recipe="qwen3-1.7b", workers=5, trainers=3)["x"] is None


def test_a_recipe_is_planned_with_the_survival_and_the_cost_of_its_own_model(capsys):
    run(recipe="qwen3-1.7b", as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["current"]["stored_rollouts"] == pytest.approx(1127)  # as its header says
    assert document["assumptions"]["survival"] == pytest.approx(112.7 / 256)
    assert "Qwen3-1.7B-Base, 112.7 of 256" in document["assumptions"]["sources"]["survival"]
    assert 5.28 < document["assumptions"]["mu"] < 6.84
    assert "between paper B's" in document["assumptions"]["sources"]["mu"]


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


def test_options_that_do_not_fit_together_are_refused():
    with pytest.raises(UsageError, match="--workers and --trainers"):
        run(workers=5, trainers=None)
    with pytest.raises(UsageError, match=r"--rho 0\.1"):
        run(workers=5, trainers=3, rho=0.1)
    with pytest.raises(UsageError, match=r"--survival 0\.5: replay\.drop_zero_variance is false"):
        run(recipe="fifo-qwen3-0.6b", survival=0.5)
