"""The synchronous source: completions dealt to ranks and gathered, and a sampler that lags."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_runs.trained import small_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.replay.rollouts import group_requests
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.training import synchronous
from grpo_replay.training.synchronous import (
    SynchronousSource,
    gather_graded,
    share_of_rank,
)
from grpo_replay.types import Completion, Graded, Prompt, RequestKey, Verdict


@pytest.mark.parametrize(
    ("prompts", "ranks", "sizes"),
    [(1, 4, [2, 2, 2, 2]), (1, 3, [2, 3, 3]), (3, 2, [12, 12]), (1, 16, None)],
)
def test_every_completion_is_sampled_once_and_ranks_differ_by_at_most_one(prompts, ranks, sizes):
    """Groups of 8: with one prompt a step every rank samples, not the first alone."""
    recipe = small_recipe(sampling={"group_size": 8})
    prompt = Prompt("p", "", np.zeros(1, np.int32), "", {})
    requests = group_requests(
        dict.fromkeys(range(prompts), prompt), 1, recipe.sampling, recipe.run.seed
    )
    shares = [share_of_rank(requests, rank, ranks) for rank in range(ranks)]
    assert [request for share in shares for request in share] == requests
    found = [len(share) for share in shares]
    assert found == sizes or (sizes is None and sorted(found) == [0] * 8 + [1] * 8)


class OtherRank(Comm):
    """Rank 0 of two, which receives the payload of the other from a list."""

    def __init__(self, rank: int, sent: list[bytes]) -> None:
        super().__init__(rank, 2)
        self.sent = sent

    def gather(self, payload: bytes) -> list[bytes] | None:
        self.sent.append(payload)
        return self.sent[::-1] if self.is_main else None


def graded(index: int, reward: float | None) -> Graded:
    ids, logprobs = np.array([3, index], np.int32), np.array([-0.1, -np.pi], np.float32)
    mask, extras = np.array([True, index > 0]), {"experts": np.arange(6.0).reshape(2, 3)}
    completion = Completion(
        RequestKey(2, 1, index), ids, logprobs, "length", 4, 5,
        mask if index else None, extras if index else {},
    )  # fmt: skip
    came = Verdict(reward, "scored", (reward, 1 / 3)) if reward is not None else None
    return Graded(completion, "a \N{SNOWMAN}", came or Verdict(None, "none", ()))


@pytest.mark.parametrize("reward", [0.1 + 0.2, None])
def test_what_was_sampled_elsewhere_arrives_bit_for_bit(reward):
    """Rewards are float64 until the group's statistics are known; some do not come."""
    here, there = graded(0, 1.0), graded(1, reward)
    sent: list[bytes] = []
    assert gather_graded(OtherRank(1, sent), {there.completion.key: there}) == {}
    found = gather_graded(OtherRank(0, sent), {here.completion.key: here})
    assert list(found) == [here.completion.key, there.completion.key]
    for one, other in zip(found.values(), (here, there), strict=True):
        assert (one.text, one.verdict) == (other.text, other.verdict)
        for name in ("key", "finish_reason", "policy_version", "policy_version_end"):
            assert getattr(one.completion, name) == getattr(other.completion, name)
        pairs = [(one.completion.extras[name], array)
                 for name, array in other.completion.extras.items()]  # fmt: skip
        for found_array, array in pairs:
            np.testing.assert_array_equal(found_array, array, strict=True)
        for name in ("token_ids", "sampler_logprobs", "completion_mask"):
            np.testing.assert_array_equal(
                getattr(one.completion, name), getattr(other.completion, name), strict=True
            )


LAGGING = {"run": {"sync_every_steps": 2}, "loss": {"behavior_logprobs": "sampler"}}


def opened(folder, sampler: object, version: int, **sections) -> SynchronousSource:
    """Resumed from a checkpoint of this policy version."""
    parts = SimpleNamespace(
        recipe=small_recipe(**sections),
        comm=Comm(),
        engine="engine",
        sampler=sampler,
        tokenizer=None,
    )
    return SynchronousSource.open(parts, RunState(policy_version=version), folder)


def test_a_lagging_sampler_gets_the_weights_it_had_at_the_checkpoint(tmp_path, monkeypatch):
    """And the next checkpoint has them, too."""
    monkeypatch.setattr(synchronous, "read_pushed_weights", lambda _: ({"w": torch.ones(1)}, 3))
    monkeypatch.setattr(synchronous, "sync_weights", lambda *_: pytest.fail("it got the policy"))
    loaded = []
    sampler = SimpleNamespace(load_weights=lambda tensors, v: loaded.append((dict(tensors), v)))
    source = opened(tmp_path, sampler, 4, **LAGGING)
    assert loaded == [({"w": torch.ones(1)}, 3)]
    monkeypatch.undo()
    source.save(tmp_path)
    assert synchronous.read_pushed_weights(tmp_path)[1] == 3


def test_a_sampler_of_adapters_gets_the_policy_where_it_had_merged_weights(tmp_path, monkeypatch):
    """`sampling.lora` was changed at the resume."""
    pushed = []
    monkeypatch.setattr(synchronous, "read_pushed_weights", lambda _: ({"w": torch.ones(1)}, 3))
    monkeypatch.setattr(synchronous, "sync_weights", lambda *words: pushed.append(words[2]))
    opened(tmp_path, "sampler", 4, model={"lora": {"r": 2}}, **LAGGING)
    assert pushed == [4]
    monkeypatch.setattr(synchronous, "read_pushed_weights", lambda _: ({}, 0))
    opened(tmp_path, "sampler", 1, model={"lora": {"r": 2}}, **LAGGING)
    assert pushed == [4], "it was opened with version 0, which it still has"


@pytest.mark.parametrize("survive, sleeps", [(True, 1), (False, 0)])
def test_a_sampler_rests_as_soon_as_no_group_is_missing(monkeypatch, survive, sleeps):
    """With two refills. The last refill puts the sampler to sleep itself."""
    recipe = small_recipe(sampling={"max_refills": 2, "prompts_per_step": 2})
    sampled, slept = [], []

    def sample(self, step, taken, missing, is_last):
        sampled.append((taken, missing, is_last))
        return [SimpleNamespace(group_id=taken + i, kept=survive) for i in range(missing)]

    monkeypatch.setattr(SynchronousSource, "_sample_prompts", sample)
    monkeypatch.setattr(SynchronousSource, "_sleep", lambda self: slept.append(True))
    monkeypatch.setattr(synchronous, "StepRollouts", SimpleNamespace)
    monkeypatch.setattr(synchronous, "gap_sample", lambda *_, **__: None)
    parts = SimpleNamespace(
        recipe=recipe,
        comm=Comm(),
        clock=SimpleNamespace(seconds={"generation": 0.0}),
        tokenizer=None,
    )
    source = SynchronousSource(parts, RunState())
    taken, count = source.take(1), 2 if survive else 6
    assert len(slept) == sleeps and len(taken.generated) == count
    assert (taken.prompts, taken.groups) == (count, count)
    assert taken.nominal_rollouts == count * recipe.sampling.group_size
    assert sampled == ([(0, 2, False)] if survive else [(0, 2, False), (2, 2, False), (4, 2, True)])


def test_a_sampler_in_step_gets_the_policy_and_needs_no_copy(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(synchronous, "read_pushed_weights", lambda _: pytest.fail("no lag"))
    monkeypatch.setattr(synchronous, "sync_weights", lambda *words: pushed.append(words))
    source = opened(tmp_path, "sampler", 4)
    (words,) = pushed
    assert words[:3] == ("engine", "sampler", 4)
    source.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
