"""docs/replay_in_async_trl.py: TRL's planner, collator, loss and optimizer, on the tiny model, with
stand-ins for GPU, server and worker process (tests/support/async_trl.py)."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")

from async_trl import make
from slow_tests import slow_except
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl_runs import weights_of

from grpo_replay import ReplayBuffer, ReplayConfig
from grpo_replay.errors import SnapshotError, UsageError

EXAMPLE = Path(__file__).parents[2] / "docs" / "replay_in_async_trl.py"
sys.path.insert(0, str(EXAMPLE.parent))
from replay_in_async_trl import ReplayAsyncGRPOTrainer  # noqa: E402

SETTINGS = {"warmup_steps": 2, "max_age_steps": 5, "ratio": 1.0}


class Watched(ReplayAsyncGRPOTrainer):
    """Keeps, for each step, what the buffer returned, and the log-probs that TRL got of it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.trained, self.versions = [], [], {}
        step = self.replay_buffer.step

        def hear(*args, **kwargs):
            self.batches.append(step(*args, **kwargs))
            return self.batches[-1]

        self.replay_buffer.step = hear

    def training_step(self, *args, **kwargs):
        self.versions.setdefault(self.state.global_step + 1, self.model_version)
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.trained.append(inputs["old_log_probs"][inputs["token_index"] >= 0].tolist())
        return super().compute_loss(model, inputs, *args, **kwargs)


def replaying(folder, kind=ReplayAsyncGRPOTrainer, settings=None, **changes):
    replay = ReplayConfig.of("ours", **{**SETTINGS, **({} if settings is None else settings)})
    return make(folder, kind, replay=replay, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer = replaying(tmp_path_factory.mktemp("async"), Watched, max_steps=8)
    trainer.train()
    return trainer


def test_the_example_has_at_most_two_hundred_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 200


def test_without_replay_it_is_trls_trainer_bit_for_bit(tmp_path):
    steps = {"max_steps": 3}
    plain = make(tmp_path / "plain", AsyncGRPOTrainer, **steps)
    off = ReplayConfig.of("grpo")
    none = make(tmp_path / "none", ReplayAsyncGRPOTrainer, replay=off, **steps)
    for trainer in (plain, none):
        trainer.train()
    assert weights_of(plain) == weights_of(none)


@pytest.mark.parametrize("accumulated", slow_except([1], [1, 2]))
def test_fresh_rollouts_through_the_buffer_train_as_in_trl(tmp_path, accumulated):
    """Groups without a signal are kept, as TRL has them; rows are in another order."""
    changes = {"max_steps": 3, "gradient_accumulation_steps": accumulated}
    plain = make(tmp_path / "plain", AsyncGRPOTrainer, **changes)
    settings = {"warmup_steps": 9, "drop_zero_variance": False}
    fresh = replaying(tmp_path / "fresh", settings=settings, **changes)
    for trainer in (plain, fresh):
        trainer.train()
    losses, norms = (
        [[line[name] for line in trainer.state.log_history[:3]] for trainer in (plain, fresh)]
        for name in ("loss", "grad_norm")
    )
    # With two micro-batches TRL divides by the tokens of each, and rows are in others.
    within = {"rel": 1e-4, "abs": 1e-6} if accumulated == 1 else {"rel": 0.25, "abs": 0.02}
    assert losses[0] == pytest.approx(losses[1], **within)
    assert norms[0] == pytest.approx(norms[1], **within)
    rewards = [[line["reward"] for line in each.state.log_history[:3]] for each in (plain, fresh)]
    assert np.mean(rewards[0]) == pytest.approx(np.mean(rewards[1]), abs=0.3)


def test_every_rollout_that_the_buffer_returns_is_trained_on_with_its_log_probs_of_birth(whole):
    assert any(batch.replayed.any() for batch in whole.batches)
    assert len(whole.trained) == 8 <= len(whole.batches)
    for batch, trained in zip(whole.batches, whole.trained, strict=False):
        expected = [float(x) for rollout in batch.rollouts for x in rollout.behavior_logprobs]
        assert sorted(trained) == sorted(expected) or (not expected and len(trained) == 1)


def test_a_rollout_is_born_in_the_step_whose_policy_sampled_it(whole):
    """The worker samples when TRL plans, one step before it trains."""
    births = {rollout.birth_step for batch in whole.batches[1:] for rollout in batch.rollouts}
    assert births == set(range(1, len(whole.batches)))
    for step, batch in enumerate(whole.batches[1:], start=2):
        assert {rollout.birth_step for rollout in batch.rollouts} <= set(range(1, step))
    assert whole.versions == {step: step for step in range(1, 9)}


def test_groups_count_once_when_they_are_fresh(whole):
    """For the end of an epoch and for TRL's position in a resumed run."""
    assert whole._trained_groups == set(range(4 * len(whole.batches)))


@pytest.mark.parametrize("every", slow_except([2], [1, 2]))
def test_what_waited_is_older_by_the_policies_that_it_waited_for(tmp_path, every):
    trainer = replaying(
        tmp_path, Watched, late=1, max_steps=6, weight_sync_steps=every, problems=8,
        settings={"max_age_steps": 9},
    )  # fmt: skip
    trainer.train()
    for step, batch in enumerate(trainer.batches, start=1):
        fresh = zip(batch.rollouts, batch.replayed, strict=True)
        births = {rollout.birth_step for rollout, replayed in fresh if not replayed}
        # Planned a step ahead, by the policy before that of then: the first step of that one.
        sampled = max(0, max(0, step - 2) // every - 1)
        assert births <= {sampled * every + 1}


def test_rows_that_replay_draws_as_queries_are_whole_groups(tmp_path):
    trainer = replaying(
        tmp_path, Watched, settings={"unit": "query", "priority": "group_std"}, max_steps=4
    )
    trainer.train()
    for batch in trainer.batches:
        drawn = [entry.group_id for entry in batch.draw.entries]
        assert all(drawn.count(group) == 8 for group in drawn)
    assert any(batch.replayed.any() for batch in trainer.batches)


def test_a_checkpoint_has_the_buffer_before_the_step_that_is_planned(tmp_path):
    trainer = replaying(tmp_path, max_steps=4, save_strategy="steps", save_steps=3)
    trainer.train()
    saved = ReplayBuffer.load(tmp_path / "checkpoint-3" / "buffer.parquet")
    assert saved.last_step == 3
    trainer = replaying(tmp_path, max_steps=5)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trainer.state.global_step == 5
    assert 5 <= trainer.replay_buffer.last_step <= 6
    other = replaying(tmp_path, settings={"ratio": 0.5}, max_steps=5)
    with pytest.raises(SnapshotError, match=r"replay.ratio is 1.0 in the file"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("age, every", [(2, 1), (4, 2)])
def test_an_age_limit_that_is_not_above_the_staleness_is_refused(tmp_path, age, every):
    with pytest.raises(UsageError, match=rf"max_age_steps {age}: rollouts are up to {age} steps"):
        replaying(tmp_path, settings={"max_age_steps": age}, weight_sync_steps=every)
    replaying(tmp_path, settings={"max_age_steps": age + 1}, weight_sync_steps=every)


def rows_of(group_id, prompts):
    """As TRL plans them, one for each of the prompts, which are a token."""
    metrics = {"model_version": 0, "reward": 1.0}
    return [
        {"group_id": group_id, "input_ids": np.array([prompt, 5]), "advantage": 0.5,
         "completion_mask": np.array([0, 1]), "old_log_probs": np.array([0.0, -0.5]),
         "metrics": metrics}
        for prompt in prompts
    ]  # fmt: skip


def test_conversations_that_fork_and_groups_of_several_prompts_are_refused(tmp_path):
    trainer = replaying(tmp_path)
    with pytest.raises(UsageError, match="several prompts"):
        trainer.compose(rows_of(0, range(8)))
    trainer = replaying(tmp_path)
    with pytest.raises(UsageError, match="more rows than num_generations 8: it forked"):
        trainer.compose(rows_of(0, [7] * 9))
    trainer = replaying(tmp_path)
    trainer.compose(rows_of(0, [7] * 8))
    with pytest.raises(UsageError, match="more rows than num_generations 8: it forked"):
        trainer.compose(rows_of(0, [7]))  # after its group was taken
