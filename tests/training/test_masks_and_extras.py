"""Completion masks and extra arrays: by hand, through the engine, and through the real trainer."""

from dataclasses import asdict, replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from buffer_makers import (
    assert_same_rollouts,
    check_valid,
    make_group,
    make_rollout,
    replay_settings,
)
from core_engine import (
    PlainTraining,
    engine_recipe,
    first_gradient,
    make_rows,
    open_engine,
    plain_loss,
    reference_statistics,
    relative,
    weighted,
)
from small_runs.trained import policy_at, row_of, train_small_run

from grpo_replay.engine.microbatches import micro_batch
from grpo_replay.engine.saved_policies import PlainPolicy
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import LossSection
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.batch import TrainRow, train_rows
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.storage.rollout_log import (
    read_rollout_table,
    rollouts_to_table,
    table_to_rollouts,
    write_rollouts,
)

# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_a_micro_batch_has_only_the_tokens_that_train(packing):
    """Prompts of 2 and 1 tokens; the second, third and last token of [5, 6, 7, 8, 9] train."""
    mask = np.array([False, True, True, False, True])
    tokens, logprobs = np.arange(5, 10, dtype=np.int32), np.arange(5, dtype=np.float32)
    one = TrainRow(np.array([1, 2], np.int32), tokens, logprobs, logprobs + 10,
                   sampler_weights=logprobs + 20, completion_mask=mask)  # fmt: skip
    other = TrainRow(np.array([3], np.int32), tokens[:2], logprobs[:2], logprobs[:2],
                     sampler_weights=logprobs[:2])  # fmt: skip
    found = micro_batch([0, 1], [one, other], [1, 1], packing)
    assert found.target_ids_C.tolist() == [6, 7, 9, 5, 6]
    assert found.row_of_C.tolist() == [0, 0, 0, 1, 1]
    assert found.positions_C.tolist() == [2, 3, 5, 7, 8]  # of the tokens before them
    assert found.behavior_logprobs_C.tolist() == [1, 2, 4, 0, 1]
    assert found.reference_logprobs_C.tolist() == [11, 12, 14, 0, 1]
    assert found.sampler_weights_C.tolist() == [21, 22, 24, 0, 1]
    assert found.input_ids_SL.size == (10 if packing else 14)  # masked tokens are read


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [1 / 4, 1 / 4]),
        ("sequence_mean", [1 / 2, 1 / 6]),
        ("constant", [1 / 20, 1 / 20]),
    ],
)
def test_the_normaliser_counts_tokens_that_train(aggregation, weights):
    """One of three tokens, and three of three: four in all."""
    one, other = (replace(make_rollout(i), completion_mask=None) for i in range(2))
    one = replace(one, completion_mask=np.array([False, True, False]))
    rows = train_rows([one, other], None, LossSection(aggregation=aggregation), 10)
    assert [row.token_weight for row in rows] == pytest.approx(weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_mask": np.array([True, False])}, r"bool \(2,\) with 1 tokens that train"),
        ({"completion_mask": np.zeros(3, bool)}, "with 0 tokens that train"),
        ({"extras": {"a": np.array(["x"])}}, "numpy array"),
        ({"behavior_logprobs": np.array([np.nan, -1, np.nan], np.float32),
          "completion_mask": np.array([False, True, True])}, "log-prob of token 2 is nan"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes, message):
    buffer = ReplayBuffer(replay_settings(), 4)
    with pytest.raises(ValueError, match=f"rollout 7: .*{message}"):
        buffer.insert([replace(make_rollout(7), **changes)], 1)


def test_a_masked_token_needs_no_log_prob():
    logprobs = np.array([np.nan, -1, 5], np.float32)
    mask = np.array([False, True, False])
    buffer = ReplayBuffer(replay_settings(), 4)
    buffer.insert([replace(make_rollout(7), behavior_logprobs=logprobs, completion_mask=mask)], 1)
    assert check_valid(buffer) == (True, "")
    (stored,) = buffer.rollouts()
    assert stored.trained_tokens == 1 and not stored.completion_mask.flags.writeable


def with_masks_and_extras():
    """Four rollouts of 1 to 4 tokens; some have a mask, some extras, of one and of three
    dimensions."""
    one, two, three, four = make_group(4, 1, 1, [1, -1, 0.1, -1])
    experts = np.arange(36, dtype=np.uint8).reshape(3, 3, 4)
    return [
        one,
        replace(two, completion_mask=np.array([True, False])),
        replace(three, extras={"experts": experts, "ratios": np.array([0.5], np.float16)}),
        replace(four, completion_mask=np.array([True, False] * 2), extras={"experts": experts[:0]}),
    ]


def test_files_have_masks_and_extras_and_only_where_there_are_some(tmp_path):
    rollouts = with_masks_and_extras()
    table = rollouts_to_table(rollouts)
    assert_same_rollouts(rollouts, table_to_rollouts(table))
    assert_same_rollouts(rollouts[1:3], table_to_rollouts(table.slice(1, 2)))
    write_rollouts(tmp_path / "some.parquet", rollouts, {})
    write_rollouts(tmp_path / "none.parquet", rollouts[:1], {})
    optional = {"completion_mask", "extra_experts", "extra_ratios"}
    whole = read_rollout_table(tmp_path / "some.parquet")
    assert_same_rollouts(rollouts, table_to_rollouts(whole))
    plain = read_rollout_table(tmp_path / "none.parquet")
    assert set(whole.column_names) - set(plain.column_names) == optional
    for name, expected in (
        ("some", [None, [True, False], None, [True, False] * 2]),
        ("none", [None]),
    ):
        found = read_rollout_table(tmp_path / f"{name}.parquet", ["completion_mask", "kept"])
        assert found["completion_mask"].to_pylist() == expected
        assert found.column_names == ["completion_mask", "kept"]


def test_a_buffer_saves_draws_and_restores_them(tmp_path):
    buffer = ReplayBuffer(replay_settings(), 4, seed=3)
    rollouts = with_masks_and_extras()
    buffer.step(rollouts)
    buffer.save(tmp_path / "buffer.parquet")
    loaded = ReplayBuffer.load(tmp_path / "buffer.parquet")
    assert_same_rollouts(rollouts, loaded.rollouts(), without=("completion_text",))
    names = pq.read_schema(tmp_path / "buffer.parquet").names
    assert names[-6:] == [
        *("priority", "times_used", "last_used_step"),
        *("completion_mask", "extra_experts", "extra_ratios"),
    ]
    fresh = make_group(8, 2, 2, [1, -1, 1, -1])
    drawn = [each.step(fresh).draw.rollouts for each in (buffer, loaded)]
    assert_same_rollouts(*drawn)
    assert any(rollout.completion_mask is not None for rollout in drawn[0])


def test_a_new_group_takes_them():
    buffer = ReplayBuffer(replay_settings(), 3)
    experts = np.zeros((2, 4), np.int8)
    found = buffer.new_group(
        prompt_id="p", prompt_token_ids=[1], completion_token_ids=[[1, 2], [3, 4], [5, 6]],
        behavior_logprobs=[[-1, -1]] * 3, rewards=[1.0, -1.0, 0.0],
        completion_mask=[[True, False], [False, False], [1, 1]], extras=[{"experts": experts}] * 3,
    )  # fmt: skip
    assert [each.completion_mask.tolist() for each in found] == [[True, False], [True, True]]
    assert [each.completion_index for each in found] == [0, 2]
    np.testing.assert_array_equal(found[1].extras["experts"], experts, strict=True)


# --- the engine -----------------------------------------------------------------------------------


def masked_rows(count):
    rng = np.random.default_rng(1)
    rows = [
        replace(row, completion_mask=rng.random(len(row.completion_token_ids)) < 0.4)
        for row in make_rows(count)
    ]
    rows[0] = replace(rows[0], completion_mask=None)
    rows[1] = replace(rows[1], completion_mask=np.zeros(len(rows[1].completion_token_ids), bool))
    return rows


def test_the_gradient_is_that_of_a_loss_over_the_tokens_that_train(processes):
    loss = {"aggregation": "sequence_mean", "beta": 0.1}
    rows = weighted(masked_rows(7), LossSection(**loss))
    plain = PlainTraining(engine_recipe(loss=loss))
    expected = plain.update(rows)
    with open_engine(processes, loss=loss, batch={"max_tokens_per_microbatch": 60}) as engine:
        result = engine.update(rows)
        gradient = first_gradient(engine)
    named = torch.cat([p.grad.flatten() for p in plain.model.parameters()])
    assert relative(gradient, named) < 5e-6
    assert (result.loss, result.grad_norm) == pytest.approx(expected, rel=1e-5)
    assert result.outcomes[1].tokens == 0
    for row, outcome in zip(rows, result.outcomes, strict=True):
        if len(row.trained_C):
            found = asdict(outcome)
            assert found == pytest.approx(reference_statistics(row), rel=5e-5, abs=1e-5)


# --- the real trainer -----------------------------------------------------------------------------


@pytest.fixture
def masked_run(monkeypatch, tmp_path):
    """A run whose sampler masks every second token, as if a tool had written it, and all of one
    completion; and gives extras."""
    generate = HfSampler.generate

    def with_tools(self, requests):
        for each in generate(self, requests):
            mask = np.arange(len(each.token_ids)) % 2 == 0
            if each.key.prompt_index == each.key.completion_index == 0:
                mask[:] = False
            logprobs = np.where(mask, each.sampler_logprobs, 7).astype(np.float32)
            yield replace(each, sampler_logprobs=logprobs, completion_mask=mask,
                          extras={"versions": np.full(3, each.policy_version)})  # fmt: skip

    monkeypatch.setattr(HfSampler, "generate", with_tools)
    sections = {
        "run": {"steps": 3}, "batch": {"updates_per_step": 1}, "replay": {"warmup_steps": 1},
        "checkpoint": {"every_steps": 1, "keep": 9},
    }  # fmt: skip
    return train_small_run(tmp_path / "run", **sections)


def test_masked_tokens_take_no_part_in_training(masked_run):
    run = masked_run
    everything = [row for step in range(1, 4) for row in run.rollouts(step)]
    for row in everything:
        assert row["extra_versions"] == [row["birth_step"] - 1] * 3
        assert row["kept"] <= any(row["completion_mask"])
        assert not row["kept"] or row["tokens"] == sum(row["completion_mask"])
    assert any(draw["tokens"] > 1 for draw in run.all_draws)
    trained = [row["tokens"] for row in run.survivors(1)]
    assert run.metrics[0]["cost/trained_tokens"] == sum(trained)
    assert run.metrics[0]["sampler/logprob_gap_max"] < 1e-4  # of tokens that were sampled

    # The first update, from its log and the base model: token mean over the tokens that train.
    model, rows = policy_at(run, 0), []
    for row in run.survivors(1):
        rows.append(
            replace(
                row_of(row), behavior_logprobs=np.array(row["behavior_logprobs"], np.float32),
                coefficient=row["advantage"], token_weight=1 / sum(trained),
                completion_mask=np.array(row["completion_mask"]),
            )
        )  # fmt: skip
    loss = plain_loss(model, rows, run.recipe.loss)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert run.metrics[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert run.metrics[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)

    def open_policy(step):
        folder = run.path / f"checkpoints/step_{step:06d}"
        return PlainPolicy(run.recipe, folder if step else None)

    report = verify_run(run.path, open_policy)
    assert report.passed, [check for check in report.checks if not check.passed]


def test_a_step_whose_masks_leave_no_token_is_one_without_survivors(monkeypatch, tmp_path):
    generate = HfSampler.generate

    def masked_in_step_2(self, requests):
        for each in generate(self, requests):
            mask = np.full(len(each.token_ids), each.key.step != 2)
            yield replace(each, completion_mask=mask)

    monkeypatch.setattr(HfSampler, "generate", masked_in_step_2)
    run = train_small_run(tmp_path / "run", run={"steps": 3}, replay={"warmup_steps": 1})
    first, second, third = run.metrics
    assert first["fresh/rollouts"] and third["fresh/rollouts"]
    assert (second["fresh/rollouts"], second["sampler/logprob_gap_mean"]) == (0, None)
    assert not any(row["kept"] for row in run.rollouts(2))
    assert verify_run(run.path).passed
