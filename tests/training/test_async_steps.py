"""Pieces of an asynchronous step by hand: shares of time, undrawn evictions, what is waited for."""

from types import SimpleNamespace

import numpy as np
import pytest
from buffer_makers import make_rollout, replay_settings
from collected import group
from small_runs.asynchronous import BUFFER_ONLY, async_recipe
from small_runs.trained import small_recipe

from grpo_replay.collection.arrivals import Arrivals
from grpo_replay.collection.intake import arrival_rules
from grpo_replay.collection.messages import Report
from grpo_replay.distributed.comm import Comm
from grpo_replay.recipe import Recipe, resolve_recipe
from grpo_replay.replay import ReplayBuffer
from grpo_replay.sampling.server.rolling import RollingServerSampler
from grpo_replay.storage.checkpoint import RunState, checkpoint_name
from grpo_replay.training.async_record import (
    SamplerShare,
    SamplerTimes,
    UndrawnEvictions,
    count_async_step,
)
from grpo_replay.training.async_trainer import AsyncTrainer
from grpo_replay.training.run import Run
from grpo_replay.types import ComposedBatch, Draw


def test_shares_of_the_servers_time_are_differences_of_two_reports():
    """Two servers, two ranks. First step: 20 s of servers, 5 idle and 3 paused. Second: 10 more,
    4 idle and 1 paused."""
    times = SamplerTimes(resolve_recipe([]), ranks=2)
    assert times.step(Report(idle_seconds=5.0, server_seconds=20.0), 3.0) == SamplerShare(6.0, 0.4)
    assert times.step(Report(idle_seconds=9.0, server_seconds=30.0), 4.0) == SamplerShare(2.5, 0.5)


def test_another_collector_counts_from_zero_and_pauses_go_on():
    times = SamplerTimes(resolve_recipe([]), ranks=1)
    times.step(Report(idle_seconds=5.0, server_seconds=20.0), 3.0)
    found = times.step(Report(idle_seconds=1.0, server_seconds=8.0), 4.0)
    assert found == SamplerShare(6.0, 0.25)


def test_without_a_server_in_use_there_is_no_share_and_no_more_than_all_is_idle():
    times = SamplerTimes(resolve_recipe([]), ranks=1)
    assert times.step(Report(), 0.0) == SamplerShare(0.0, None)
    assert times.step(Report(idle_seconds=4.0, server_seconds=5.0), 9.0) == SamplerShare(0.0, 1.0)
    assert times.step(Report(idle_seconds=4.0, server_seconds=5.0), 9.0) == SamplerShare(0.0, None)


@pytest.mark.parametrize(("enabled", "expected"), [(True, 2), (False, 0)])
def test_undrawn_evictions_by_hand(enabled, expected):
    """Stored 0 to 3, of which 0 was drawn before; 4 and 5 are fresh. The step draws 1 and 4. Then
    0 to 4 leave: 2 and 3 were never drawn; a run that stores nothing counts nothing."""
    buffer = ReplayBuffer(replay_settings(enabled=enabled, capacity_rollouts=4), 2)
    fresh = [make_rollout(i, birth_step=9) for i in (4, 5)]
    buffer.insert([make_rollout(i) for i in range(4)], 2, np.array([1, 0, 0, 0]))
    undrawn = UndrawnEvictions()
    undrawn.begin(buffer, fresh)
    drawn = (make_rollout(1), fresh[0])
    draw = Draw(drawn, np.ones(2), np.array([8, 0]), 2.0, 0.0)
    buffer.insert([fresh[1], *(make_rollout(i, birth_step=9) for i in (6, 7, 8))], 9)
    batch = ComposedBatch(drawn, np.ones(2, bool), draw.ages, draw)
    assert undrawn.end(buffer, batch) == expected


class Waiting:
    """An intake whose waits end at once, and are looked at afterwards."""

    def __init__(self, recipe: Recipe) -> None:
        self.arrivals = Arrivals(arrival_rules(recipe))

    def wait(self, is_ready, stop_requested, look, what, version) -> bool:
        self.is_ready, self.what = is_ready, what
        return True


def waiting_trainer(recipe: Recipe) -> tuple[AsyncTrainer, Waiting]:
    intake = Waiting(recipe)
    parts = SimpleNamespace(
        recipe=recipe, comm=Comm(), buffer=ReplayBuffer(recipe.replay, recipe.sampling.group_size),
        sampler=object.__new__(RollingServerSampler),
    )  # fmt: skip
    return AsyncTrainer(parts, RunState(step=2), intake), intake


@pytest.mark.parametrize(
    ("changes", "fill"),
    [({}, 20), ({"ratio": 0.5}, 10), ({"ratio": 2.0, "capacity_rollouts": 24}, 24)],
)
def test_buffer_only_waits_until_the_buffer_can_give_one_batch(changes, fill):
    """A batch of 5 prompts times 4 at most, or as much as the buffer can hold. Groups without a
    signal count, because the preset stores them."""
    recipe = async_recipe(
        ["http://127.0.0.1:1"],
        {"sampling": {"prompts_per_step": 5, "group_size": 4}, "replay": BUFFER_ONLY | changes},
    )
    trainer, intake = waiting_trainer(recipe)
    trainer.buffer.insert([make_rollout(i) for i in range(2)], 1)
    assert trainer._wait(3, lambda: False)
    assert intake.what.startswith(f"the {fill} stored rollouts of one batch, of which the buffer")
    arrived = 2
    for index in range(6):
        assert intake.is_ready() == (arrived >= fill)
        intake.arrivals.take_in(group((0, index), rewards=(1.0, 1.0, -1.0, 1.0)))
        arrived += 4
    assert intake.is_ready()


def test_fresh_anchored_waits_for_the_groups_of_its_step_that_are_young_enough():
    recipe = async_recipe(
        ["http://127.0.0.1:1"],
        {"sampling": {"prompts_per_step": 2}, "replay": {"max_age_steps": 1, "warmup_steps": 1}},
    )
    trainer, intake = waiting_trainer(recipe)
    for index, version in enumerate([0, 1, 2]):
        assert trainer._wait(3, lambda: False)
        assert not intake.is_ready()
        intake.arrivals.take_in(group((0, index), version))
    assert intake.is_ready()
    assert intake.what.startswith("the 2 groups of step 3, of which 1 had arrived")


def test_a_stop_while_a_step_waits_saves_the_step_before_it_once(tmp_path):
    saved = []
    run = object.__new__(Run)
    run.recipe, run.state, run.comm = small_recipe(), RunState(step=3), Comm()
    run.run_dir = SimpleNamespace(checkpoints=tmp_path)
    run.trainer = SimpleNamespace(await_step=lambda stop_requested: False)
    run._checkpoint = lambda: saved.append(run.state.step)
    assert run._step() is False and saved == [3]
    (tmp_path / checkpoint_name(3)).mkdir()
    assert run._step() is False and saved == [3]
    run.state.step = 0
    assert run._step() is False and saved == [3]


@pytest.mark.parametrize(("held", "pushed"), [(1, [2]), (2, [])])
def test_servers_that_hold_another_version_get_the_policy_before_the_first_step(held, pushed):
    """As after a resume; a rank without an intake takes its part in the gather."""
    trainer, _ = waiting_trainer(async_recipe(["http://127.0.0.1:1"]))
    trainer.parts.sampler, trainer.intake = SimpleNamespace(policy_version=held), None
    trainer.state.policy_version, found = 2, []
    trainer._push = found.append
    trainer._go_live()
    assert found == pushed


@pytest.mark.parametrize("is_main", [True, False])
def test_counters_of_a_step_by_hand(is_main):
    """Two rollouts of 3 tokens arrived, each after a prompt of 2; the batch replays one of 4."""
    _, intake = waiting_trainer(async_recipe(["http://127.0.0.1:1"]))
    intake.recipe = async_recipe(["http://127.0.0.1:1"], {"sampling": {"group_size": 4}})
    intake.arrivals.take_in(group((0, 0)))
    drawn = (make_rollout(7, tokens=4),)
    draw = Draw(drawn, np.ones(1), np.array([2]), 1.0, 0.0)
    batch = ComposedBatch(drawn, np.ones(1, bool), draw.ages, draw)
    taken = SimpleNamespace(generated=[make_rollout(0), make_rollout(1)])
    state = RunState(step=4)
    count_async_step(state, intake if is_main else None, taken, batch)
    assert (state.step, state.replayed_rollouts) == (5, 1)
    assert (state.generated_tokens, state.trained_tokens, state.processed_tokens) == (6, 4, 10)
    found = (state.prompt_cursor, state.next_group_id, state.next_rollout_id)
    assert found == ((1, 1, 4) if is_main else (0, 0, 0))
