"""The real trainer: pool, buffer-only, and replay that is off."""

import math
from collections import Counter

import pytest
from small_runs.trained import (
    GROUP,
    MAX_AGE,
    PROMPTS,
    WARMUP,
    FinishedRun,
    hopeless_after,
    policy_at,
    same_files,
    same_weights,
    steps_of,
    train_small_run,
)

from grpo_replay.lab.verification.verify import verify_run

# --- pool and buffer-only -------------------------------------------------------------------------


def test_pool_draws_the_whole_batch_from_fresh_and_stored_under_one_law(pool_run):
    run, ages = pool_run, Counter()
    untrained = 0
    for step in steps_of(run):
        survivors, draws = run.survivors(step), run.draws(step)
        if step <= WARMUP:
            assert draws == [] and all(row["tokens"] is not None for row in survivors)
            continue
        stored = sum(len(run.survivors(b)) for b in range(max(1, step - MAX_AGE), step))
        asked = round(1.5 * len(survivors))
        assert len(draws) == min(asked, len(survivors) + stored)
        drawn = {draw["rollout_id"]: draw for draw in draws}
        assert len(drawn) == len(draws)
        for row in survivors:
            if row["rollout_id"] in drawn:
                assert drawn[row["rollout_id"]]["age_steps"] == 0
                assert row["tokens"] == drawn[row["rollout_id"]]["tokens"]
                assert row["log_ratio_mean"] == drawn[row["rollout_id"]]["log_ratio_mean"]
            else:
                untrained += 1
                assert row["tokens"] is None
        ages.update(draw["age_steps"] for draw in draws)
        line = run.metrics[step - 1]
        assert line["fresh/rollouts"] == len(survivors)
        assert line["replay/rollouts"] == sum(draw["age_steps"] > 0 for draw in draws)
        # First-draw probabilities over the whole pool: |A|^0.5 of fresh and stored alike.
        pool = [r for b in range(max(1, step - MAX_AGE), step + 1) for r in run.survivors(b)]
        weights = {r["rollout_id"]: (abs(r["advantage"]) + 1e-6) ** 0.5 for r in pool}
        for draw in draws:
            expected = weights[draw["rollout_id"]] / math.fsum(weights.values())
            assert draw["probability"] == pytest.approx(expected, rel=1e-9)
    assert set(ages) == {0, 1, 2, 3}
    assert untrained > 5  # fresh survivors are not anchored here


def test_buffer_only_inserts_before_it_draws_from_the_newest_n(fifo_run):
    run, ages = fifo_run, Counter()
    order: list[int] = []
    repeats = 0
    for step in steps_of(run):
        order += [row["rollout_id"] for row in run.rollouts(step)]
        newest = order[-30:]
        draws = run.draws(step)
        assert len(draws) == min(round(0.75 * GROUP * PROMPTS), len(newest))
        assert {draw["rollout_id"] for draw in draws} <= set(newest)
        repeats += len(draws) - len({draw["rollout_id"] for draw in draws})
        for draw in draws:
            assert draw["probability"] == pytest.approx(1 / len(newest), rel=1e-12)
        ages.update(draw["age_steps"] for draw in draws)
        line = run.metrics[step - 1]
        assert line["buffer/rollouts"] == len(newest)
        assert line["replay/rollouts"] == len(draws)
        assert line["fresh/ratio_mean"] is None
        if step % 4 == 0:
            stored = [r.rollout_id for r in run.snapshot(step).rollouts]
            assert stored == newest
    assert ages[0] > 10  # age 0 is allowed
    assert max(ages) == 1  # 30 rollouts of 24 a step
    assert repeats > 10  # draws are with replacement


def test_buffer_only_still_draws_when_a_step_has_no_survivors(tmp_path, processes):
    run = train_small_run(
        tmp_path / "run",
        prompts=hopeless_after(tmp_path, 2),
        replay={
            "preset": "fifo", "ratio": 0.5, "capacity_rollouts": 24, "drop_zero_variance": True,
            "with_replacement": False, "max_age_steps": None, "warmup_steps": 0,
        },
        run={"steps": 4},
    )  # fmt: skip
    for step in (3, 4):
        line = run.metrics[step - 1]
        assert line["fresh/rollouts"] == 0
        assert line["replay/ratio"] is None
        assert line["replay/rollouts"] == len(run.draws(step)) == 12
        assert line["updates"] == 2 and line["loss"] is not None
        assert min(draw["age_steps"] for draw in run.draws(step)) >= step - 2


@pytest.mark.parametrize("name", ["ours_run", "pool_run", "fifo_run"])
def test_an_independent_recomputation_accepts_the_run(name, request):
    report = verify_run(request.getfixturevalue(name).path)
    assert report.passed, report


# --- off is off -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory, processes) -> FinishedRun:
    """Five steps of plain GRPO: with replay, two of warm-up and three that draw."""
    folder = tmp_path_factory.mktemp("grpo") / "run"
    return train_small_run(folder, replay={"preset": "grpo"}, run={"steps": 5})


@pytest.mark.parametrize(
    "replay",
    [
        {"ratio": 0, "composition": "fresh_anchored"},
        pytest.param({"ratio": 0, "composition": "pool"}, marks=pytest.mark.slow),
        pytest.param(
            {"preset": "grpo", "ratio": 3, "max_age_steps": 7, "with_replacement": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fresh_anchored", "pool", "preset"],
)
def test_ratio_zero_is_the_grpo_preset_bit_for_bit(plain, tmp_path, replay):
    off = train_small_run(tmp_path / "off", replay=replay, run={"steps": 5})
    assert off.timeless_metrics == plain.timeless_metrics
    assert same_weights(off.weights(), plain.weights())
    assert same_files(plain.path, off.path, "rollouts") == 5
    assert list((off.path / "draws").glob("*.parquet")) == []
    assert plain.metrics[-1]["buffer/rollouts"] == 0
    assert not same_weights(plain.weights(), policy_at(plain, 0).state_dict())


def test_during_the_warm_up_replay_is_plain_grpo_bit_for_bit(plain, ours_run):
    for a, b in zip(plain.timeless_metrics[:WARMUP], ours_run.timeless_metrics, strict=False):
        assert {k: v for k, v in a.items() if not k.startswith("buffer/")} == {
            k: v for k, v in b.items() if not k.startswith("buffer/")
        }
    # The first step that draws has the same rollouts, and another update.
    drew = next(i for i, line in enumerate(ours_run.metrics) if line["replay/rollouts"])
    assert drew >= WARMUP
    a, b = plain.timeless_metrics[drew], ours_run.timeless_metrics[drew]
    assert a["reward"] == b["reward"]
    assert a["grad_norm"] != b["grad_norm"]
