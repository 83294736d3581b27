"""The real trainer, fresh-anchored composition: what is trained on, stored and drawn.

Whole runs on the shipped tiny model; everything is recomputed from their files, or seen through
a spy that changes nothing.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from small_runs.trained import (
    GROUP,
    MAX_AGE,
    PROMPTS,
    WARMUP,
    FinishedRun,
    hopeless_after,
    row_of,
    same_weights,
    spied_updates,
    steps_of,
    train_small_run,
)

from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.recipe import load_recipe, shipped_recipes_folder
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.batch import TrainRow, mini_batch_indices
from grpo_replay.training.trainer import DRAW_STREAM, SPLIT_STREAM
from grpo_replay.types import stream

# --- what is drawn --------------------------------------------------------------------------------


def test_ages_at_use_never_exceed_the_maximum_and_reach_it(ours_run):
    """Ages count training steps, whatever the number of mini-batches in a step."""
    ages = []
    for draw in ours_run.all_draws:
        birth = ours_run.all_rollouts[draw["rollout_id"]]["birth_step"]
        assert draw["age_steps"] == draw["step"] - birth
        ages.append(draw["age_steps"])
    assert max(ages) == MAX_AGE
    assert len(ages) > 20


def test_nothing_is_drawn_in_its_birth_step(ours_run):
    ages = Counter(draw["age_steps"] for draw in ours_run.all_draws)
    assert min(ages) == 1
    assert set(ages) == {1, 2, 3}


def test_each_step_draws_r_times_its_survivors_after_the_warm_up(ours_run):
    drew = 0
    for step in steps_of(ours_run):
        expected = round(0.5 * len(ours_run.survivors(step))) if step > WARMUP else 0
        assert len(ours_run.draws(step)) == expected
        drew += expected > 0
    assert drew >= 8


def test_each_step_draws_with_a_random_stream_of_its_own(one_update_run):
    """The buffer of the checkpoint before, drawn from with the generator of the step."""
    run, drew = one_update_run, 0
    for step in range(WARMUP + 1, 13):
        buffer = ReplayBuffer(run.recipe.replay, GROUP)
        buffer.set_state(run.snapshot(step - 1).state)
        rng = stream(run.recipe.run.seed, step, DRAW_STREAM)
        expected = buffer.draw(len(run.draws(step)), step, rng).rollouts
        assert [row["rollout_id"] for row in run.draws(step)] == [r.rollout_id for r in expected]
        drew += len(expected)
    assert drew > 20


def test_the_purposes_of_random_streams_are_parts_of_the_seed():
    """With another number, the same seed would give another run."""
    assert (DRAW_STREAM, SPLIT_STREAM) == (1, 2)


def test_dropped_groups_are_neither_drawn_nor_stored(ours_run):
    dropped = {i for i, row in ours_run.all_rollouts.items() if not row["kept"]}
    assert len(dropped) > 50
    assert not dropped & {draw["rollout_id"] for draw in ours_run.all_draws}
    for step in (3, 6, 9, 12):
        stored = {r.rollout_id for r in ours_run.snapshot(step).rollouts}
        assert stored and not stored & dropped
    for i in dropped:
        row = ours_run.all_rollouts[i]
        assert row["tokens"] is None and row["advantage"] is None
        assert row["behavior_logprobs"] is None
        group = [r for r in ours_run.all_rollouts.values() if r["group_id"] == row["group_id"]]
        assert len({r["reward"] for r in group}) == 1


def test_the_buffer_holds_every_survivor_of_the_last_births_and_nothing_else(ours_run):
    """Evicted by age though never full; every group is stored whole, not only the first."""
    for step in steps_of(ours_run):
        alive = range(max(1, step - MAX_AGE + 1), step + 1)
        expected = [row["rollout_id"] for birth in alive for row in ours_run.survivors(birth)]
        assert ours_run.metrics[step - 1]["buffer/rollouts"] == len(expected)
        if step % 3 == 0:
            stored = [r.rollout_id for r in ours_run.snapshot(step).rollouts]
            assert stored == expected
    assert sum(line["buffer/evicted"] for line in ours_run.metrics) > 50


# --- what is trained on ---------------------------------------------------------------------------


class Spied(NamedTuple):
    """A run with the rows of its optimizer updates, and those put through the policy for their
    log-probs."""

    run: FinishedRun
    updates: list[list[TrainRow]]
    forwards: list[list[TrainRow]]


@pytest.fixture(scope="module")
def spied(tmp_path_factory, processes) -> Spied:
    forwards: list[list[TrainRow]] = []
    logprobs = DeepSpeedEngine.logprobs

    def spy_logprobs(engine, rows):
        forwards.append(list(rows))
        return logprobs(engine, rows)

    with spied_updates() as updates, pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedEngine, "logprobs", spy_logprobs)
        run = train_small_run(tmp_path_factory.mktemp("spied") / "run", run={"steps": 8})
    return Spied(run, updates, forwards)


def test_a_step_trains_on_every_fresh_survivor_and_on_the_draw_with_frozen_values(spied):
    """Advantages are those of birth, not renormalised over the mixed batch; the denominator is
    taken after composing, without dropped rows. Each step has a random split of its own."""
    run, updates = spied.run, iter(spied.updates)
    replayed = 0
    for step in steps_of(run):
        trained = [run.all_rollouts[row["rollout_id"]] for row in run.draws(step)]
        replayed += len(trained)
        batch_ids = [row["rollout_id"] for row in (*run.survivors(step), *trained)]
        trained += run.survivors(step)
        parts = [next(updates) for _ in range(run.metrics[step - 1]["updates"])]
        assert abs(len(parts[0]) - len(parts[-1])) <= 1 if parts else not trained
        rows = [row for part in parts for row in part]
        assert Counter(map(_frozen_row, rows)) == Counter(map(_frozen_record, trained))
        split = mini_batch_indices(
            len(batch_ids), run.recipe.batch, stream(run.recipe.run.seed, step, SPLIT_STREAM)
        )
        part_ids = [[row.rollout_id for row in part] for part in parts]
        assert part_ids == [[batch_ids[i] for i in part] for part in split]
        for part in parts:
            tokens = sum(len(row.completion_token_ids) for row in part)
            weights = [row.token_weight for row in part]
            assert weights == pytest.approx([1 / tokens] * len(part), rel=1e-12)
    assert next(updates, None) is None
    assert replayed > 10


def _frozen_row(row: TrainRow) -> tuple:
    return (
        row.prompt_token_ids.tobytes(),
        row.completion_token_ids.tobytes(),
        row.behavior_logprobs.tobytes(),
        row.coefficient,
    )


def _frozen_record(record: dict) -> tuple:
    return (
        np.array(record["prompt_token_ids"], np.int32).tobytes(),
        np.array(record["completion_token_ids"], np.int32).tobytes(),
        np.array(record["behavior_logprobs"], np.float32).tobytes(),
        record["advantage"],
    )


def test_behaviour_log_probs_are_computed_once_at_birth(spied):
    """At replay nothing but the update's own forward sees a rollout."""
    assert len(spied.forwards) == len(spied.run.metrics)
    for step, rows in enumerate(spied.forwards, start=1):
        born = {_tokens(row_of(row)) for row in spied.run.rollouts(step)}
        assert {_tokens(row) for row in rows} == born  # fewer than 64: all, dropped ones too


def _tokens(row: TrainRow) -> bytes:
    return row.prompt_token_ids.tobytes() + row.completion_token_ids.tobytes()


def test_every_fresh_survivor_has_an_outcome_and_the_ledger_counts_its_tokens(ours_run):
    for step in steps_of(ours_run):
        line = ours_run.metrics[step - 1]
        for row in ours_run.survivors(step):
            assert row["tokens"] == len(row["completion_token_ids"])
        fresh = sum(row["tokens"] for row in ours_run.survivors(step))
        replayed = sum(row["tokens"] for row in ours_run.draws(step))
        generated = sum(len(row["completion_token_ids"]) for row in ours_run.rollouts(step))
        assert line["cost/trained_tokens"] == fresh + replayed
        assert line["cost/generated_tokens"] == generated
        assert line["fresh/rollouts"] == len(ours_run.survivors(step))
        assert len(ours_run.rollouts(step)) == GROUP * PROMPTS


# --- steps without survivors ----------------------------------------------------------------------


def test_steps_without_survivors_train_nothing_but_count_evict_and_log(tmp_path, processes):
    run = train_small_run(
        tmp_path / "run",
        prompts=hopeless_after(tmp_path, 3),
        run={"steps": 6},
        checkpoint={"every_steps": 1, "keep": 100},
    )
    assert [line["step"] for line in run.metrics] == list(range(1, 7))
    sizes = [line["buffer/rollouts"] for line in run.metrics]
    assert sizes[2] > 0
    for step in range(4, 7):
        line = run.metrics[step - 1]
        assert line["fresh/rollouts"] == line["replay/rollouts"] == line["updates"] == 0
        assert line["frac_reward_zero_std"] == 1
        for name in ("loss", "grad_norm", "entropy", "fresh/ratio_mean", "replay/ratio",
                     "replay/age_mean", "replay/ess", "cost/mu", "cost/gamma"):  # fmt: skip
            assert line[name] is None, name
        assert line["cost/trained_tokens"] == 0
        assert run.draws(step) == []
        assert len(run.rollouts(step)) == GROUP * PROMPTS
        assert same_weights(run.weights(step), run.weights(3))
        assert line["sampler/policy_version"] == step - 1
        expected = sum(len(run.survivors(birth)) for birth in range(max(1, step - 2), step + 1))
        assert sizes[step - 1] == expected
    assert sizes[-1] == 0
    assert sum(line["buffer/evicted"] for line in run.metrics[3:]) == sizes[2]
    assert not same_weights(run.weights(2), run.weights(3))


# --- the default recipe ---------------------------------------------------------------------------


def test_every_shipped_recipe_replays_unless_it_is_plain_grpo():
    names = sorted(path.stem for path in shipped_recipes_folder().glob("*.yaml"))
    assert len(names) >= 4 and "tiny" in names
    for name in names:
        recipe = load_recipe(name)
        assert recipe.replays == (recipe.replay.preset != "grpo"), name
        assert recipe.replay.warmup_steps < recipe.run.steps, name
