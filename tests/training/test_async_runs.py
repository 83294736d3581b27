"""A whole asynchronous run with a fake policy server: real trainer, collector process and journal.
`fresh_anchored`; one slow test has `buffer_only`. Faults: test_async_faults."""

import json
import shutil
from dataclasses import replace

import pytest
from fake_policy_server import FakePolicyServer
from small_runs.asynchronous import (
    BUFFER_ONLY,
    async_recipe,
    collector_pids,
    replay_run,
    same_weights_as_journal,
    train_async_run,
)
from small_runs.trained import GROUP, PROMPTS, FinishedRun, same_weights

from grpo_replay.collection.journal import read_journal
from grpo_replay.collection.link import Link
from grpo_replay.collection.messages import Cancel, Command, Group, Step
from grpo_replay.errors import RecipeError
from grpo_replay.lab.inspection.compute import outcomes_by_age
from grpo_replay.lab.inspection.rebuild import stored_after
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.planning.estimate import measured_mu
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import resolve_recipe
from grpo_replay.training.asynchronous import UNCHECKED_STEPS

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cancelled() -> list[int]:
    """`older_than` of what the run `anchored` had cancelled."""
    return []


@pytest.fixture(scope="module")
def anchored(fake_server, tmp_path_factory, processes, cancelled) -> FinishedRun:
    """Paper A's batches; ends with a checkpoint."""
    send = Link.send

    def spy(link: Link, command: Command) -> None:
        if isinstance(command, Cancel):
            cancelled.append(command.older_than)
        send(link, command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "send", spy)
        return train_async_run(
            async_recipe([fake_server.url]), tmp_path_factory.mktemp("anchored") / "run"
        )


def test_fresh_anchored_trains_on_the_groups_of_its_step_and_a_draw(anchored):
    assert [line["step"] for line in anchored.metrics] == [1, 2, 3, 4, 5, 6]
    for line in anchored.metrics:
        rows = anchored.rollouts(line["step"])
        assert len(rows) == PROMPTS * GROUP
        assert line["fresh/rollouts"] == sum(row["kept"] for row in rows)
        assert line["replay/rollouts"] == len(anchored.draws(line["step"]))
    assert sum(line["replay/rollouts"] for line in anchored.metrics) > 0


def test_ages_follow_the_oldest_version_of_a_group_and_stay_within_the_bound(anchored):
    """max_ahead_steps 1: a group is started at most two steps before its own. One that takes longer
    than the others arrives later, on a busy machine many; the age limit decides whether it is
    kept."""
    ages, limit = [], anchored.recipe.replay.max_age_steps
    for line in anchored.metrics:
        rows = anchored.rollouts(line["step"])
        for group in {row["group_id"] for row in rows}:
            members = [row for row in rows if row["group_id"] == group]
            oldest = min(row["policy_version"] for row in members)
            assert {row["birth_step"] for row in members} == {oldest + 1}
            ages.append(line["step"] - oldest - 1)
            assert ages[-1] <= limit or not any(row["kept"] for row in members)
    assert min(ages) >= 0 and sum(age <= 3 for age in ages) > 0.5 * len(ages)


def test_the_gap_is_measured_where_the_present_policy_sampled(anchored):
    """Or on a probe. The fake server invents its log-probs, so the gap is far from 0."""
    unmeasured = UNCHECKED_STEPS - 1
    for step, line in enumerate(anchored.metrics, start=1):
        versions = [(r["policy_version"], r["policy_version_end"]) for r in anchored.rollouts(step)]
        unmeasured = 0 if (step - 1, step - 1) in versions else unmeasured + 1
        gap = line["sampler/logprob_gap_mean"]
        assert gap > 0 if unmeasured in (0, UNCHECKED_STEPS) else gap is None
        unmeasured %= UNCHECKED_STEPS
    assert anchored.metrics[0]["sampler/logprob_gap_mean"] > 0


@pytest.mark.parametrize(("servers", "gpus"), [({"launch": 2}, 3), ({"urls": ["http://a:1"]}, 1)])
def test_a_server_elsewhere_counts_as_one_gpu(servers, gpus):
    sampling = {"servers": servers, "vllm": {"tensor_parallel_size": 3}}
    assert resolve_recipe([{"sampling": sampling}]).sampling.gpus_per_server == gpus


def test_groups_too_old_for_the_next_step_are_cancelled(anchored, cancelled):
    """After v steps the next is v + 1, and with an age limit of a it trains on version v - a and
    newer ones: before the first step, and after every step but the last."""
    limit = anchored.recipe.replay.max_age_steps
    assert cancelled == [steps - limit for steps in range(len(anchored.metrics))]


def test_behaviour_logprobs_are_the_samplers_and_never_recomputed(anchored):
    """SkyRL#1315: recomputed by the current policy, they would switch the clip off."""
    for row in anchored.survivors(5):
        assert (
            row["behavior_logprobs"]
            == row["sampler_logprobs"]
            == [-0.5] * len(row["completion_token_ids"])
        )
    assert any(abs(line["fresh/ratio_mean"] - 1) > 1e-3 for line in anchored.metrics)


@pytest.mark.slow
def test_buffer_only_waits_for_no_group_and_draws_a_whole_batch_every_step(tmp_path, processes):
    """The trainer does not wait: here it is faster than the server, and trains on what is stored.
    The journal alone gives the same weights."""
    server = FakePolicyServer(seconds=1.5)
    tracking = {"report_to": ["tensorboard"]}
    sections = {"replay": BUFFER_ONLY, "tracking": tracking, "run": {"steps": 12}}
    run = train_async_run(async_recipe([server.url], sections), tmp_path / "run")
    server.stop()
    for line in run.metrics:
        assert line["replay/rollouts"] == len(run.draws(line["step"])) == PROMPTS * GROUP
        assert line["buffer/rollouts"] <= 60
    idle = [line for line in run.metrics if not run.rollouts(line["step"])]
    assert len(idle) > 2
    assert all(line["reward"] is None and line["fresh/rollouts"] == 0 for line in idle)
    assert verify_run(run.path).passed
    assert same_weights_as_journal(run, tmp_path / "again")


def test_every_update_pauses_loads_and_confirms(fake_server, anchored):
    """Each update: pause, the label that is no version, load, cache, label, resume."""
    start = fake_server.calls.index("pause")
    update = fake_server.calls[start : start + 6]
    assert update[0] == "pause" and update[2:4] == ["reload_weights", "reset_prefix_cache"]
    assert update[1].endswith("/updating") and update[4].endswith("/0") and update[5] == "resume"


def test_every_version_reaches_the_servers_but_the_last(anchored):
    """After step s the servers have version s; after the last step none is brought."""
    versions = [line["sampler/policy_version"] for line in anchored.metrics]
    assert versions == [1, 2, 3, 4, 5, 5]
    later = [row["policy_version"] for step in (4, 5, 6) for row in anchored.rollouts(step)]
    assert max(later) >= 2


@pytest.fixture(scope="module")
def again(anchored, tmp_path_factory) -> FinishedRun:
    """The run from its journal alone."""
    return replay_run(anchored, tmp_path_factory.mktemp("again") / "run")


def test_the_journal_alone_gives_the_same_weights_bit_for_bit(anchored, again):
    assert same_weights(anchored.weights(), again.weights())
    for step in range(1, 7):
        assert anchored.rollouts(step) == again.rollouts(step)
        assert anchored.draws(step) == again.draws(step)
    for line, other in zip(anchored.metrics, again.metrics, strict=True):
        same = {k for k in line if k.startswith("ledger/")} | {"loss", "grad_norm", "reward"}
        assert {k: line[k] for k in same} == {k: other[k] for k in same}
    assert measured_mu(anchored.metrics) > 0
    assert measured_mu(again.metrics) is None  # nothing was generated for it


@pytest.mark.parametrize(
    ("section", "key", "value"), [("replay", "max_age_steps", 5), ("reward", "correct", 0.5)]
)
def test_a_journal_is_repeated_and_goes_on_by_its_own_rules_and_rewards_alone(
    anchored, tmp_path, section, key, value
):
    change = {section: {key: value}}
    with pytest.raises(RecipeError, match=rf"{section}\.{key} {value}, was "):
        replay_run(anchored, tmp_path / "again", change)
    assert not (tmp_path / "again").exists()
    copy = tmp_path / "copy"
    shutil.copytree(anchored.path, copy, symlinks=True)
    before = sorted(copy.rglob("*.parquet"))
    longer = resolve_recipe(
        [anchored.recipe.model_dump(mode="json"), change, {"run": {"steps": 7}}]
    )
    with pytest.raises(RecipeError, match=rf"{section}\.{key} is .* and {value} is asked for"):
        train_async_run(longer, copy, resume=True)
    assert sorted(copy.rglob("*.parquet")) == before


def test_verify_recomputes_ages_versions_and_the_ledger(anchored):
    report = verify_run(anchored.path)
    assert report.passed, report.to_json()
    assert {check.name: check.checked for check in report.checks}["ledger"] >= 6 * 8


def test_inspection_rebuilds_the_buffer_although_rollouts_arrive_after_their_birth(anchored):
    """Without the checkpoint, from rollouts/: the same rollouts."""
    source = replace(open_source(anchored.path), snapshot=None)
    rebuilt = stored_after(source, anchored.recipe.replay, GROUP)
    state = anchored.snapshot(6).state
    assert rebuilt.rollout_id.tolist() == [each.rollout_id for each in state["entries"]]
    assert (rebuilt.logged_step > rebuilt.birth_step).any()


def test_inspection_counts_every_use_once_and_the_metrics_what_each_step_took(anchored):
    source = open_source(str(anchored.path), None)
    uses = sum(each.uses for each in outcomes_by_age(source).values())
    assert uses == sum(line["cost/trained_rollouts"] for line in anchored.metrics) > 0
    for line in anchored.metrics:
        assert line["cost/generated_rollouts"] == len(anchored.rollouts(line["step"]))


def test_verify_finds_a_ledger_that_does_not_balance(anchored, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(anchored.path, copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines[3]["ledger/lost_tokens"] += 1
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "ledger" in [check.name for check in verify_run(copy).checks if not check.passed]


def test_the_journal_records_what_each_step_saw(anchored):
    records = list(read_journal(anchored.path / "journal"))
    steps = [record for record in records if isinstance(record, Step)]
    assert [record.step for record in steps] == list(range(1, 7))
    for record in steps:
        assert record.arrivals == sum(
            isinstance(each, Group) for each in records[: records.index(record)]
        )


def test_a_run_ends_with_its_collector_and_leaves_no_process(anchored):
    assert collector_pids() == []
