"""Asynchronous runs in which something fails: servers, collectors, rewards, the trainer."""

import os
import signal

import pytest
from fake_policy_server import FakePolicyServer
from small_runs.asynchronous import (
    async_recipe,
    collector_pids,
    same_weights_as_journal,
    train_async_run,
    written_steps,
)

from grpo_replay.collection.journal import read_journal
from grpo_replay.collection.messages import Group
from grpo_replay.errors import LogprobGapError, RewardError, ServersLost
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.training import asynchronous

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Stopped(Exception):
    """Stands for a kill: the run is left where it is."""


def crash() -> None:
    raise Stopped


def test_a_run_that_crashes_and_is_resumed_is_the_run_of_its_journal(
    fake_server, tmp_path, processes
):
    """The checkpoint is of step 4: step 5 is repeated from the journal."""
    recipe = async_recipe([fake_server.url], {"checkpoint": {"every_steps": 2}})
    with pytest.raises(Stopped):
        train_async_run(recipe, tmp_path / "run", after={5: crash})
    before = list(read_journal(tmp_path / "run/journal"))
    run = train_async_run(recipe, tmp_path / "run", resume=True)
    assert list(read_journal(tmp_path / "run/journal"))[: len(before)] == before
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert same_weights_as_journal(run, tmp_path / "again")
    repeated = [line["step"] for line in run.metrics if line["cost/generation_seconds"] is None]
    assert repeated == [5]  # what it cost to generate is unknown, not nothing
    groups = [r.position for r in read_journal(run.path / "journal") if isinstance(r, Group)]
    assert len(groups) == len(set(groups))
    assert verify_run(run.path).passed


def test_a_killed_collector_is_replaced_and_what_it_held_is_lost(fake_server, tmp_path, processes):
    def kill() -> None:
        for pid in collector_pids():
            os.kill(pid, signal.SIGKILL)

    run = train_async_run(async_recipe([fake_server.url]), tmp_path / "run", after={2: kill})
    assert len(run.metrics) == 6
    assert verify_run(run.path).passed
    assert same_weights_as_journal(run, tmp_path / "again")
    assert collector_pids() == []


def test_a_server_that_dies_and_comes_back_gets_the_newest_weights(
    fake_server, tmp_path, processes
):
    """The run goes on with the other one; nothing is lost."""
    second = FakePolicyServer(seconds=0.03)
    port = int(second.url.rsplit(":", 1)[1])
    returned: list[FakePolicyServer] = []

    def come_back() -> None:
        returned.append(FakePolicyServer(port, seconds=0.03))

    recipe = async_recipe([fake_server.url, second.url], {"run": {"steps": 8}})
    try:
        run = train_async_run(recipe, tmp_path / "run", after={2: second.stop, 4: come_back})
    finally:
        for each in returned:
            each.stop()
    assert len(run.metrics) == 8
    assert run.metrics[-1]["ledger/lost_rollouts"] == 0
    assert returned[0].loaded[0] == "version-5"
    assert returned[0].served > 0
    assert verify_run(run.path).passed
    assert same_weights_as_journal(run, tmp_path / "again")


def test_the_last_server_that_is_lost_ends_the_run_with_a_checkpoint(tmp_path, processes):
    """NeMo-RL#2694: neither side waits for the other without a limit."""
    lonely = FakePolicyServer(seconds=0.03)
    recipe = async_recipe([lonely.url], {"checkpoint": {"every_steps": 6}})
    with pytest.raises(ServersLost, match=lonely.url):
        train_async_run(recipe, tmp_path / "run", after={2: lonely.stop})
    assert collector_pids() == []
    done = written_steps(tmp_path / "run")
    assert 2 <= done < 6
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step_*")
    assert checkpoint.name == f"step_{done:06d}"
    again = FakePolicyServer(int(lonely.url.rsplit(":", 1)[1]), seconds=0.03)
    try:
        run = train_async_run(recipe, tmp_path / "run", resume=True)
    finally:
        again.stop()
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert verify_run(run.path).passed
    assert same_weights_as_journal(run, tmp_path / "again")


def test_rewards_that_do_not_come_leave_the_ledger_balanced_and_train_nothing(
    fake_server, tmp_path, processes
):
    reward = {"function": "collected_rewards:even_unless_it_fails", "max_failed_share": 0.9}
    sections = {"reward": reward, "run": {"steps": 4}}
    run = train_async_run(async_recipe([fake_server.url], sections), tmp_path / "run")
    missing = [row for row in run.all_rollouts.values() if row["reward"] is None]
    assert len(missing) > 10 and not any(row["kept"] for row in missing)
    assert run.metrics[-1]["ledger/no_reward_rollouts"] == len(missing)
    assert not {row["rollout_id"] for row in missing} & {row["rollout_id"] for row in run.all_draws}
    report = verify_run(run.path)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert same_weights_as_journal(run, tmp_path / "again")


def test_a_run_whose_judge_was_down_goes_on_when_it_is_up(
    fake_server, tmp_path, processes, monkeypatch
):
    """The groups of the step that stopped it are in the journal, and are repeated."""
    down = tmp_path / "down"
    monkeypatch.setenv("JUDGE_IS_DOWN", str(down))
    reward = {"function": "collected_rewards:even_while_the_judge_is_up", "max_failed_share": 0.5}
    recipe = async_recipe([fake_server.url], {"reward": reward})
    with pytest.raises(RewardError, match="failed on"):
        train_async_run(recipe, tmp_path / "run", after={2: down.touch})
    down.unlink()
    run = train_async_run(recipe, tmp_path / "run", resume=True)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert any(row["reward"] is None for row in run.all_rollouts.values())
    assert verify_run(run.path).passed
    assert same_weights_as_journal(run, tmp_path / "again")


def test_servers_that_run_ahead_are_probed(fake_server, tmp_path, processes, monkeypatch):
    """As if no group were of the newest weights alone. The server is no policy: its log-probs are
    random."""
    monkeypatch.setattr(asynchronous, "sampled_only_by", lambda rollouts, version: [])
    recipe = async_recipe([fake_server.url], {"sampling": {"logprob_gap_limit": 1e-3}})
    with pytest.raises(LogprobGapError, match=r"^step 1, "):
        train_async_run(recipe, tmp_path / "run")
    with pytest.raises(LogprobGapError, match=r"^step 2, "):  # the journal has the first
        train_async_run(recipe, tmp_path / "run", resume=True)


def test_a_probe_is_only_measured(fake_server, tmp_path, processes, monkeypatch):
    monkeypatch.setattr(asynchronous, "sampled_only_by", lambda rollouts, version: [])
    run = train_async_run(async_recipe([fake_server.url]), tmp_path / "run")
    measured = [line["step"] for line in run.metrics if line["sampler/logprob_gap_mean"]]
    assert measured == [1, 1 + asynchronous.UNCHECKED_STEPS]
    assert verify_run(run.path).passed
    assert same_weights_as_journal(run, tmp_path / "again")
