"""The real trainer, fresh-anchored composition: what is trained on, stored, drawn and frozen.

Whole runs on the shipped tiny model; everything is recomputed from their files, or seen through
a spy that changes nothing.
"""

import json
import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_engine import plain_logprobs
from core_run import GROUP, PROMPTS, FinishedRun, run_small, same_files, same_weights

from grpo_replay.backends.deepspeed_engine import DeepSpeedEngine
from grpo_replay.backends.hf_sampler import HfSampler
from grpo_replay.backends.models import load_policy
from grpo_replay.backends.policy_module import PolicyModule
from grpo_replay.batch import TrainRow
from grpo_replay.display import Display
from grpo_replay.errors import LogprobGapError
from grpo_replay.recipe import load_recipe, shipped_recipes_folder
from grpo_replay.run import run_training
from grpo_replay.tiny.problems import train_problems
from grpo_replay.verify import verify_run

MAX_AGE, WARMUP = 3, 2  # of the small recipe


def steps_of(run: FinishedRun) -> range:
    return range(1, len(run.metrics) + 1)


def row_of(record: dict) -> TrainRow:
    """A logged rollout as a row for `plain_logprobs`."""
    zeros = np.zeros(len(record["completion_token_ids"]), np.float32)
    return TrainRow(
        np.array(record["prompt_token_ids"], np.int32),
        np.array(record["completion_token_ids"], np.int32),
        zeros,
        zeros,
    )


def policy_at(run: FinishedRun, step: int) -> torch.nn.Module:
    """The policy after `step`, from its checkpoint; the base model for 0."""
    model = load_policy(run.recipe.model, 0)
    if step > 0:
        missing, unexpected = model.load_state_dict(run.weights(step), strict=False)
        assert not unexpected and missing == ["lm_head.weight"]  # tied
    return model


# --- what is drawn ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ours_run", "one_update_run"])
def test_ages_at_use_never_exceed_the_maximum_and_reach_it(name, request):
    """Ages count training steps, whatever the number of mini-batches in a step."""
    run = request.getfixturevalue(name)
    ages = []
    for draw in run.all_draws:
        birth = run.all_rollouts[draw["rollout_id"]]["birth_step"]
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


def test_dropped_groups_are_neither_drawn_nor_stored(ours_run):
    dropped = {i for i, row in ours_run.all_rollouts.items() if not row["kept"]}
    assert len(dropped) > 50
    assert not dropped & {draw["rollout_id"] for draw in ours_run.all_draws}
    for step in (3, 6, 9, 12):
        stored = {r.rollout_id for r in ours_run.snapshot(step).state["rollouts"]}
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
            stored = [r.rollout_id for r in ours_run.snapshot(step).state["rollouts"]]
            assert stored == expected
    assert sum(line["buffer/evicted"] for line in ours_run.metrics) > 50


# --- what is trained on ----------------------------------------------------------------------


class Spy:
    """Records the rows of every optimizer update, and passes them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.updates: list[list[TrainRow]] = []
        original = DeepSpeedEngine.update

        def update(engine, rows):
            self.updates.append(list(rows))
            return original(engine, rows)

        monkeypatch.setattr(DeepSpeedEngine, "update", update)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_a_step_trains_on_every_fresh_survivor_and_on_the_draw_with_frozen_values(
    tmp_path, processes, monkeypatch, aggregation
):
    """Advantages are those of birth, not renormalised over the mixed batch; the denominator is
    taken after composing, without dropped rows."""
    spy = Spy(monkeypatch)
    run = run_small(tmp_path / "run", loss={"aggregation": aggregation}, run={"steps": 8})
    updates = iter(spy.updates)
    replayed = 0
    for step in steps_of(run):
        trained = [run.all_rollouts[row["rollout_id"]] for row in run.draws(step)]
        replayed += len(trained)
        trained += run.survivors(step)
        parts = [next(updates) for _ in range(run.metrics[step - 1]["updates"])]
        assert abs(len(parts[0]) - len(parts[-1])) <= 1 if parts else not trained
        rows = [row for part in parts for row in part]
        assert Counter(map(_frozen_row, rows)) == Counter(map(_frozen_record, trained))
        for part in parts:
            lengths = [len(row.completion_token_ids) for row in part]
            expected = {
                "token_mean": [1 / sum(lengths)] * len(part),
                "sequence_mean": [1 / (len(part) * tokens) for tokens in lengths],
                "constant": [1 / (len(part) * 16)] * len(part),
            }[aggregation]
            assert [row.token_weight for row in part] == pytest.approx(expected, rel=1e-12)
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


# --- ratios and behaviour log-probs ----------------------------------------------------------


def test_behaviour_log_probs_are_those_of_the_policy_that_sampled(one_update_run):
    run = one_update_run
    for step in (1, 5, 12):
        model = policy_at(run, step - 1)
        for row in run.survivors(step):
            assert row["policy_version"] == row["policy_version_end"] == step - 1
            with torch.no_grad():
                expected = plain_logprobs(model, row_of(row))[0].numpy()
            assert np.abs(np.array(row["behavior_logprobs"]) - expected).max() < 2e-5
            assert np.abs(np.array(row["sampler_logprobs"]) - expected).max() < 2e-5


def test_the_ratio_of_a_fresh_rollout_before_any_update_is_one(one_update_run):
    checked = 0
    for step in steps_of(one_update_run):
        for row in one_update_run.survivors(step):
            assert abs(row["ratio_max"] - 1) < 2e-5
            assert abs(row["ratio_mean"] - 1) < 2e-5
            assert row["clip_fraction"] == 0
            checked += 1
    assert checked > 50


def test_with_one_mini_batch_the_replayed_ratio_is_policy_over_birth_policy(one_update_run):
    """The trap: `log_prob.detach()` as the old log-prob, or one recomputed at replay, gives 1."""
    run, differ = one_update_run, 0
    for step in steps_of(run):
        if not run.draws(step):
            continue
        model = policy_at(run, step - 1)
        for draw in run.draws(step):
            born = run.all_rollouts[draw["rollout_id"]]
            with torch.no_grad():
                now = plain_logprobs(model, row_of(born))[0].double().numpy()
            log_ratios = now - np.array(born["behavior_logprobs"], np.float64)
            assert draw["log_ratio_mean"] == pytest.approx(log_ratios.mean(), abs=2e-5)
            assert draw["log_ratio_var"] == pytest.approx(log_ratios.var(), rel=1e-3, abs=1e-6)
            assert draw["ratio_max"] == pytest.approx(np.exp(log_ratios).max(), rel=1e-4)
            k3 = np.exp(log_ratios) - 1 - log_ratios
            assert draw["approx_kl"] == pytest.approx(k3.mean(), rel=1e-3, abs=1e-6)
            differ += np.abs(log_ratios).max() > 1e-2
    assert differ > 20


def test_with_two_mini_batches_the_replayed_ratio_differs_from_one(ours_run):
    moved = [abs(draw["log_ratio_mean"]) for draw in ours_run.all_draws]
    assert np.median(moved) > 1e-3
    assert sum(draw["clip_fraction"] > 0 for draw in ours_run.all_draws) > 5


def test_stored_rollouts_never_change(ours_run):
    """Behaviour log-probs, advantages, tokens: bit for bit those of birth, in every snapshot."""
    older = 0
    for step in (3, 6, 9, 12):
        for stored in ours_run.snapshot(step).state["rollouts"]:
            born = ours_run.all_rollouts[stored.rollout_id]
            older += stored.birth_step < step
            behavior = np.array(born["behavior_logprobs"], np.float32)
            assert stored.behavior_logprobs.tobytes() == behavior.tobytes()
            sampler = np.array(born["sampler_logprobs"], np.float32)
            assert stored.sampler_logprobs.tobytes() == sampler.tobytes()
            assert stored.completion_token_ids.tolist() == born["completion_token_ids"]
            for name in ("advantage", "reward", "group_reward_mean", "group_reward_std",
                         "birth_step", "policy_version", "group_correct", "prompt_id"):  # fmt: skip
                assert getattr(stored, name) == born[name]
    assert older > 20


def test_only_survivors_are_put_through_the_policy_for_behaviour_log_probs(
    tmp_path, processes, monkeypatch
):
    """Once, at birth: at replay nothing but the update's own forward sees a rollout."""
    forwards = []
    original = DeepSpeedEngine.logprobs

    def logprobs(engine, rows):
        forwards.append({_key(row) for row in rows})
        return original(engine, rows)

    monkeypatch.setattr(DeepSpeedEngine, "logprobs", logprobs)
    run = run_small(tmp_path / "run", run={"steps": 6})
    assert len(forwards) == 6
    for step, seen in enumerate(forwards, start=1):
        assert seen == {_key(row_of(row)) for row in run.rollouts(step)}  # < 64: all of them


def _key(row: TrainRow) -> bytes:
    return row.prompt_token_ids.tobytes() + row.completion_token_ids.tobytes()


def nudged(monkeypatch: pytest.MonkeyPatch, nats: float) -> None:
    """Make the sampler report log-probs that are off by `nats`."""
    original = HfSampler.generate

    def generate(sampler, requests):
        for completion in original(sampler, requests):
            completion.sampler_logprobs[:] += np.float32(nats)
            yield completion

    monkeypatch.setattr(HfSampler, "generate", generate)


def test_sampler_log_probs_play_no_part_in_a_loss_anchored_at_the_trainers(
    tmp_path, processes, monkeypatch
):
    """No truncated importance weight on top of the behaviour-anchored ratio."""
    plain = run_small(tmp_path / "plain", run={"steps": 5})
    nudged(monkeypatch, 0.05)
    shifted = run_small(tmp_path / "shifted", run={"steps": 5})
    for a, b in zip(plain.timeless_metrics, shifted.timeless_metrics, strict=True):
        gaps = {name for name in a if a[name] != b[name]}
        assert gaps == {"sampler/logprob_gap_mean", "sampler/logprob_gap_max"}
        assert b["sampler/logprob_gap_mean"] == pytest.approx(0.05, abs=1e-4)
    one, other = plain.weights(), shifted.weights()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_sampler_log_probs_are_the_behaviour_if_the_recipe_says_so(
    tmp_path, processes, monkeypatch
):
    nudged(monkeypatch, 0.05)
    run = run_small(
        tmp_path / "run",
        loss={"behavior_logprobs": "sampler"},
        batch={"updates_per_step": 1},
        run={"steps": 5},
    )
    for step in steps_of(run):
        for row in run.survivors(step):
            assert row["behavior_logprobs"] == row["sampler_logprobs"]
            assert row["log_ratio_mean"] == pytest.approx(-0.05, abs=1e-4)


@pytest.mark.parametrize("temperature, limit", [(2.0, 0.1), (0.6, 0.01)])
def test_a_sampler_at_another_temperature_than_the_trainer_is_refused(
    tmp_path, processes, monkeypatch, temperature, limit
):
    """Log-probs of raw logits against those of the distribution sampled from."""
    sections = {
        "sampling": {"temperature": temperature, "logprob_gap_limit": limit},
        "run": {"steps": 4},
    }
    run = run_small(tmp_path / "right", **sections)
    assert max(line["sampler/logprob_gap_max"] for line in run.metrics) < 1e-4

    def wrap(engine, model):
        return PolicyModule(model, 1.0, engine._recipe.engine.logprob_chunk_tokens)

    monkeypatch.setattr(DeepSpeedEngine, "_wrap", wrap)
    with pytest.raises(LogprobGapError, match="The sampler is not the policy"):
        run_small(tmp_path / "wrong", **sections)


def test_a_sampler_that_misses_an_update_is_refused(tmp_path, processes, monkeypatch):
    monkeypatch.setattr(
        "grpo_replay.trainer.sync_weights",
        lambda engine, sampler, version, bucket_mib: setattr(sampler, "policy_version", version),
    )
    with pytest.raises(LogprobGapError, match="weight sync"):
        run_small(tmp_path / "run", optimizer={"learning_rate": 3e-2})


# --- metrics against files -------------------------------------------------------------------


def token_mean(rows: list[dict], name: str) -> float | None:
    tokens = sum(row["tokens"] for row in rows)
    return sum(row[name] * row["tokens"] for row in rows) / tokens if tokens else None


@pytest.mark.parametrize("name", ["ours_run", "pool_run", "fifo_run"])
def test_metrics_by_side_and_by_age_are_those_of_the_files(name, request):
    run = request.getfixturevalue(name)
    fifo = name == "fifo_run"
    by_age = 0
    for step in steps_of(run):
        line = run.metrics[step - 1]
        draws = run.draws(step)
        replayed = [row for row in draws if row["age_steps"] > 0 or fifo]
        fresh = [row for row in draws if row["age_steps"] == 0 and not fifo]
        if not fresh and not fifo:
            fresh = [row for row in run.survivors(step) if row["tokens"] is not None]
        for side, rows in (("fresh", fresh), ("replay", replayed)):
            for quantity in ("clip_fraction", "ratio_mean", "approx_kl"):
                expected = token_mean(rows, quantity)
                assert line[f"{side}/{quantity}"] == (
                    None if expected is None else pytest.approx(expected, rel=1e-9)
                )
            assert line[f"{side}/ratio_max"] == max((r["ratio_max"] for r in rows), default=None)
        assert line["entropy"] == pytest.approx(token_mean(fresh + replayed, "entropy"), rel=1e-9) \
            if fresh + replayed else line["entropy"] is None  # fmt: skip
        assert line["replay/rollouts"] == len(replayed)
        ages = [row["age_steps"] for row in replayed]
        assert line["replay/age_max"] == max(ages, default=None)
        assert line["replay/age_mean"] == (pytest.approx(np.mean(ages)) if ages else None)
        for low, high, label in [(0, 0, "0"), (1, 1, "1"), (2, 2, "2"), (3, 4, "3-4"),
                                 (5, 8, "5-8"), (9, 16, "9-16")]:  # fmt: skip
            members = [row for row in replayed if low <= row["age_steps"] <= high]
            for quantity in ("clip_fraction", "ratio_mean", "approx_kl"):
                key = f"replay/age_{label}/{quantity}"
                assert (key in line) == bool(members)
                if members:
                    by_age += 1
                    assert line[key] == pytest.approx(token_mean(members, quantity), rel=1e-9)
    assert by_age > 30


def test_the_loss_of_a_first_update_is_minus_the_mean_advantage(one_update_run):
    """With every ratio 1 and nothing replayed, the token mean of -ρA."""
    for step in range(1, WARMUP + 1):
        rows = one_update_run.survivors(step)
        tokens = sum(row["tokens"] for row in rows)
        expected = -sum(row["advantage"] * row["tokens"] for row in rows) / tokens
        assert one_update_run.metrics[step - 1]["loss"] == pytest.approx(expected, abs=2e-5)


# --- steps without survivors -----------------------------------------------------------------


def hopeless_after(tmp_path: Path, steps_of_hope: int) -> dict[str, Any]:
    """Prompts in file order whose answers become impossible after so many steps."""
    problems = train_problems()[::7][:100]
    for i, problem in enumerate(problems):
        if i >= steps_of_hope * PROMPTS:
            problem["answer"] = "never"
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return {"source": str(path), "shuffle": False}


def test_steps_without_survivors_train_nothing_but_count_evict_and_log(tmp_path, processes):
    run = run_small(
        tmp_path / "run",
        prompts=hopeless_after(tmp_path, 4),
        run={"steps": 9},
        checkpoint={"every_steps": 1, "keep": 100},
    )
    assert [line["step"] for line in run.metrics] == list(range(1, 10))
    sizes = [line["buffer/rollouts"] for line in run.metrics]
    assert sizes[3] > 0
    for step in range(5, 10):
        line = run.metrics[step - 1]
        assert line["fresh/rollouts"] == line["replay/rollouts"] == line["updates"] == 0
        assert line["frac_reward_zero_std"] == 1
        for name in ("loss", "grad_norm", "entropy", "fresh/ratio_mean", "replay/ratio",
                     "replay/age_mean", "replay/ess", "cost/mu", "cost/gamma"):  # fmt: skip
            assert line[name] is None, name
        assert line["cost/trained_tokens"] == 0
        assert run.draws(step) == []
        assert len(run.rollouts(step)) == GROUP * PROMPTS
        assert same_weights(run.weights(step), run.weights(4))
        assert line["sampler/policy_version"] == step - 1
        expected = sum(len(run.survivors(birth)) for birth in range(max(1, step - 2), step + 1))
        assert sizes[step - 1] == expected
    assert sizes[-1] == 0
    assert sum(line["buffer/evicted"] for line in run.metrics[4:]) == sizes[3]
    assert not same_weights(run.weights(3), run.weights(4))


def test_a_run_that_never_has_a_survivor_finishes(tmp_path, processes):
    run = run_small(
        tmp_path / "run",
        reward={"function": "core_rewards:always_wrong"},
        run={"steps": 4},
        checkpoint={"every_steps": 1, "keep": 100},
    )
    assert [line["fresh/rollouts"] for line in run.metrics] == [0] * 4
    assert [line["reward"] for line in run.metrics] == [-1.0] * 4
    assert same_weights(run.weights(1), run.weights(4))


# --- the default recipe ----------------------------------------------------------------------


def test_the_default_recipe_replays_once_its_warm_up_is_over(tmp_path, processes):
    """Replay settings as shipped; only sizes that have nothing to do with replay are reduced."""
    recipe = load_recipe(
        "tiny",
        [
            "run.steps=23", "sampling.prompts_per_step=6", "eval.benchmarks=[]",
            "tracking.report_to=[]", "reward.function=minerva", "engine.zero_stage=0",
        ],
    )  # fmt: skip
    run_training(recipe, tmp_path / "run", False, Display())
    run = FinishedRun(tmp_path / "run", recipe)
    replayed = [line["replay/rollouts"] for line in run.metrics]
    assert replayed[:20] == [0] * 20
    for step in (21, 22, 23):
        assert replayed[step - 1] == round(0.5 * run.metrics[step - 1]["fresh/rollouts"]) > 0
    assert run.metrics[-1]["replay/age_max"] > 1


def test_every_shipped_recipe_replays_unless_it_is_plain_grpo():
    names = sorted(path.stem for path in shipped_recipes_folder().glob("*.yaml"))
    assert len(names) >= 4 and "tiny" in names
    for name in names:
        recipe = load_recipe(name)
        assert recipe.replays == (recipe.replay.preset != "grpo"), name
        assert recipe.replay.warmup_steps < recipe.run.steps, name


# --- pool and buffer-only --------------------------------------------------------------------


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
    for step in steps_of(run):
        order += [row["rollout_id"] for row in run.survivors(step)]
        newest = order[-30:]
        draws = run.draws(step)
        assert len(draws) == min(round(0.75 * GROUP * PROMPTS), len(newest))
        assert {draw["rollout_id"] for draw in draws} <= set(newest)
        assert len({draw["rollout_id"] for draw in draws}) == len(draws)
        for draw in draws:
            assert draw["probability"] == pytest.approx(1 / len(newest), rel=1e-12)
        ages.update(draw["age_steps"] for draw in draws)
        line = run.metrics[step - 1]
        assert line["buffer/rollouts"] == len(newest)
        assert line["replay/rollouts"] == len(draws)
        assert line["fresh/ratio_mean"] is None
        if step % 4 == 0:
            stored = [r.rollout_id for r in run.snapshot(step).state["rollouts"]]
            assert stored == newest
    assert ages[0] > 10  # age 0 is allowed
    assert max(ages) >= 3
    assert len(order) > 30


def test_buffer_only_still_draws_when_a_step_has_no_survivors(tmp_path, processes):
    run = run_small(
        tmp_path / "run",
        prompts=hopeless_after(tmp_path, 3),
        replay={
            "preset": "fifo", "ratio": 0.5, "capacity_rollouts": 24,
            "max_age_steps": None, "warmup_steps": 0,
        },
        run={"steps": 6},
    )  # fmt: skip
    for step in (4, 5, 6):
        line = run.metrics[step - 1]
        assert line["fresh/rollouts"] == 0
        assert line["replay/ratio"] is None
        assert line["replay/rollouts"] == len(run.draws(step)) == 12
        assert line["updates"] == 2 and line["loss"] is not None
        assert min(draw["age_steps"] for draw in run.draws(step)) >= step - 3


@pytest.mark.parametrize("name", ["ours_run", "one_update_run", "pool_run", "fifo_run"])
def test_an_independent_recomputation_accepts_the_run(name, request):
    report = verify_run(request.getfixturevalue(name).path)
    assert report.passed, report


# --- capacity --------------------------------------------------------------------------------


def test_a_capacity_that_binds_is_first_in_first_out_and_warns_once(tmp_path, processes, caplog):
    with caplog.at_level(logging.WARNING, logger="grpo_replay.trainer"):
        run = run_small(
            tmp_path / "run",
            replay={"capacity_rollouts": 24, "max_age_steps": 10},
            run={"steps": 8},
            checkpoint={"every_steps": 2, "keep": 100},
        )
    warned = [r.message for r in caplog.records if "replay.capacity_rollouts 24 binds" in r.message]
    assert len(warned) == 1
    order: list[int] = []
    for step in steps_of(run):
        order += [row["rollout_id"] for row in run.survivors(step)]
        assert run.metrics[step - 1]["buffer/rollouts"] == min(len(order), 24)
        if step % 2 == 0:
            stored = [r.rollout_id for r in run.snapshot(step).state["rollouts"]]
            assert stored == order[-24:]
    assert len(order) > 30


def test_a_positive_bias_buffer_keeps_correct_rollouts_longer(tmp_path, processes):
    run = run_small(
        tmp_path / "run",
        replay={
            "preset": "fifo", "ratio": 0.5, "capacity_rollouts": 30, "positive_fraction": 0.5,
            "max_age_steps": None, "warmup_steps": 0,
        },
        run={"steps": 10},
        checkpoint={"every_steps": 5, "keep": 100},
    )  # fmt: skip
    stored = run.snapshot(10).state["rollouts"]
    survivors = [row for step in steps_of(run) for row in run.survivors(step)]
    newest = {row["rollout_id"] for row in survivors[-15:]}
    outside = [r for r in stored if r.rollout_id not in newest]
    assert len(stored) == 30 and len(outside) == 15
    assert all(r.advantage > 0 for r in outside)
    correct = [row["rollout_id"] for row in survivors[:-15] if row["advantage"] > 0]
    assert [r.rollout_id for r in outside] == correct[-15:]
    assert verify_run(run.path).passed


# --- off is off ------------------------------------------------------------------------------


@pytest.mark.parametrize("composition", ["fresh_anchored", "pool"])
def test_ratio_zero_is_the_grpo_preset_bit_for_bit(tmp_path, processes, composition):
    plain = run_small(tmp_path / "grpo", replay={"preset": "grpo"}, run={"steps": 6})
    off = run_small(
        tmp_path / "off", replay={"ratio": 0, "composition": composition}, run={"steps": 6}
    )
    loud = run_small(
        tmp_path / "loud",
        replay={"preset": "grpo", "ratio": 3, "max_age_steps": 7, "with_replacement": True},
        run={"steps": 6},
    )
    for other in (off, loud):
        assert other.timeless_metrics == plain.timeless_metrics
        assert same_weights(other.weights(), plain.weights())
        assert same_files(plain.path, other.path, "rollouts") == 6
        assert list((other.path / "draws").glob("*.parquet")) == []
    assert plain.metrics[-1]["buffer/rollouts"] == 0
    assert not same_weights(plain.weights(), policy_at(plain, 0).state_dict())


def test_during_the_warm_up_replay_is_plain_grpo_bit_for_bit(tmp_path, processes, ours_run):
    plain = run_small(
        tmp_path / "grpo",
        replay={"preset": "grpo"},
        run={"steps": 12},
    )
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
