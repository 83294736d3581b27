"""Every number of the screen, compared with plain loops over the Parquet rows."""

import json
import os
from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path

import by_hand
import pytest
from small_runs.synthetic import PRESETS, write_synthetic_run
from test_what_if import two_groups

from grpo_replay import ReplayConfig
from grpo_replay.lab.inspection.buffer_summary import Inspection
from grpo_replay.lab.inspection.compute import (
    _occupancy,
    summarise,
)
from grpo_replay.lab.inspection.source import open_source

LAST = 24
REPLAYING = ["ours", "uniform", "group_std", "fifo"]


@cache
def inspect(run: Path, **options) -> Inspection:
    """The summary of a run that nothing changes."""
    return summarise(open_source(run, **options))


def same_content(first: Inspection, second: Inspection) -> bool:
    def content(seen: Inspection) -> dict:
        values = asdict(seen)
        return {name: value for name, value in values.items() if name not in ("path", "rebuilt")}

    return content(first) == content(second)


@pytest.mark.parametrize("preset", PRESETS)
def test_staleness_counts_rows_by_age(runs, preset):
    seen = inspect(runs[preset])
    stored = Counter(LAST - row["birth_step"] for row in by_hand.stored_rows(runs[preset], LAST))
    replayed = Counter(row["age_steps"] for row in by_hand.replayed_rows(runs[preset], preset))
    assert {row.age: row.stored for row in seen.staleness if row.stored} == stored
    assert {row.age: row.replayed for row in seen.staleness if row.replayed} == replayed
    assert [row.age for row in seen.staleness] == list(range(len(seen.staleness)))
    assert seen.replayed_rollouts == replayed.total()
    assert (replayed.total() > 0) == (preset != "grpo")


@pytest.mark.parametrize("preset", PRESETS)
def test_occupancy_counts_groups_tokens_and_survivors(runs, preset):
    seen = inspect(runs[preset]).occupancy
    stored = by_hand.stored_rows(runs[preset], LAST)
    assert seen.stored_rollouts == len(stored)
    assert seen.stored_groups == len({row["group_id"] for row in stored})
    assert seen.stored_tokens == sum(len(row["completion_token_ids"]) for row in stored)
    window = {"fifo": LAST, "grpo": 10}.get(preset, 5)
    recent = [
        row
        for row in by_hand.rows_of(runs[preset] / "rollouts")
        if row["kept"] and row["birth_step"] > LAST - window
    ]
    assert seen.survivors_per_step == pytest.approx(len(recent) / window)
    if preset in ("ours", "uniform", "group_std"):
        assert seen.expected_rollouts == pytest.approx(len(recent)) == seen.stored_rollouts
    elif preset == "fifo":
        assert seen.expected_rollouts == 96
    else:
        assert seen.expected_rollouts is None


def test_early_in_a_run_survivors_are_a_mean_over_the_steps_that_there_are():
    """Two survivors in two steps, of an age limit of ten."""
    log = two_groups()
    found = _occupancy(log, log, ReplayConfig.of("ours", max_age_steps=10), 2)
    assert found.survivors_per_step == 1.0


@pytest.mark.parametrize("preset", REPLAYING)
def test_steps_since_last_use_follow_paper_b(runs, preset):
    seen = inspect(runs[preset])
    draws = by_hand.rows_of(runs[preset] / "draws")
    rollouts = by_hand.rows_of(runs[preset] / "rollouts")
    births = {row["rollout_id"]: row["birth_step"] for row in rollouts if row["kept"]}
    warmup = seen.settings["warmup_steps"]
    fresh = {i for i, birth in births.items() if preset == "ours" or birth <= warmup}
    new, gaps = by_hand.last_use_counts(draws, fresh, births)
    assert seen.last_use.new == new
    assert seen.last_use.gaps == dict(gaps)
    assert new + gaps.total() == len(draws)
    assert (new == 0) == (preset == "ours")


def test_the_gap_of_a_second_draw_in_one_batch_is_zero(tmp_path):
    run = write_synthetic_run(tmp_path / "run", "fifo", steps=8, with_replacement=True, ratio=3.0)
    seen = summarise(open_source(run.folder))
    draws = by_hand.rows_of(run.folder / "draws")
    twice = sum(
        count - 1 for count in Counter((r["step"], r["rollout_id"]) for r in draws).values()
    )
    assert twice > 0
    assert seen.last_use.gaps[0] == twice


@pytest.mark.parametrize("preset", PRESETS)
def test_populations_are_counted_by_rollout_and_by_use(runs, preset):
    generated = by_hand.rows_of(runs[preset] / "rollouts")
    row_of = {row["rollout_id"]: row for row in generated}
    expected = {
        "generated": generated,
        "kept": [row for row in generated if row["kept"]],
        "stored": [row_of[r["rollout_id"]] for r in by_hand.stored_rows(runs[preset], LAST)],
        "replayed": [
            row_of[row["rollout_id"]] for row in by_hand.replayed_rows(runs[preset], preset)
        ],
    }
    seen = {population.name: population for population in inspect(runs[preset]).populations}
    assert list(seen) == [name for name, rows in expected.items() if rows]
    for name, population in seen.items():
        rows = expected[name]
        lengths = [len(row["completion_token_ids"]) for row in rows]
        prompts = Counter(row["prompt_id"] for row in rows)
        assert population.rollouts == len(rows)
        assert population.prompts == len(prompts)
        share = max(prompts.values()) / len(rows)
        assert population.largest_prompt_share == pytest.approx(share)
        assert population.tokens_mean == pytest.approx(sum(lengths) / len(lengths))
        truncated = sum(row["finish_reason"] == "length" for row in rows)
        assert population.truncated_share == pytest.approx(truncated / len(rows))
        if name == "generated" and preset != "fifo":  # FIFO drops nothing
            assert population.positive_share is None
        else:
            better = sum(row["advantage"] > 0 for row in rows)
            assert population.positive_share == pytest.approx(better / len(rows))
            mass = sum(abs(row["advantage"]) for row in rows)
            assert population.abs_advantage_mean == pytest.approx(mass / len(rows))


@pytest.mark.parametrize("preset", PRESETS)
def test_outcomes_by_age_are_token_means(runs, preset):
    expected = by_hand.outcomes(
        by_hand.rows_of(runs[preset] / "rollouts"), by_hand.rows_of(runs[preset] / "draws")
    )
    seen = inspect(runs[preset]).by_age
    assert seen.keys() == expected.keys()
    for age, row in seen.items():
        for name, value in expected[age].items():
            assert getattr(row, name) == pytest.approx(value), (age, name)


def test_trends_are_the_logged_metrics(runs):
    lines = [json.loads(line) for line in (runs["ours"] / "metrics.jsonl").read_text().splitlines()]
    seen = inspect(runs["ours"])
    for name, points in seen.trends.items():
        assert list(points) == [
            (line["step"], line[name]) for line in lines if line.get(name) is not None
        ]
    assert len(seen.trends["replay/clip_fraction"]) == LAST - 3  # warm-up replays nothing


@pytest.mark.parametrize(
    ("preset", "replay"), [("ours", {}), ("group_std", {}), ("fifo", {"positive_fraction": 0.5})]
)
def test_a_buffer_rebuilt_from_the_log_equals_the_saved_one(tmp_path, preset, replay):
    run = write_synthetic_run(tmp_path / "run", preset, **replay)
    saved = summarise(open_source(run.folder))
    os.rename(run.folder / "checkpoints", tmp_path / "elsewhere")
    rebuilt = summarise(open_source(run.folder))
    assert rebuilt.rebuilt and not saved.rebuilt
    assert same_content(rebuilt, saved)


def test_a_snapshot_can_be_inspected_without_its_run(runs, tmp_path):
    source = runs["ours"] / "checkpoints" / "step_000024" / "buffer.parquet"
    lonely = tmp_path / "saved.parquet"
    lonely.write_bytes(source.read_bytes())
    seen = inspect(lonely)
    assert seen.step == LAST
    run = inspect(runs["ours"])
    assert [row.stored for row in seen.staleness] == [row.stored for row in run.staleness][:-1]
    assert seen.settings["capacity_rollouts"] == 5000
    assert [population.name for population in seen.populations] == ["stored"]
    assert seen.trends == {} and seen.by_age == {} and seen.last_use is None


def test_a_run_in_progress_is_shown_up_to_its_last_complete_line(tmp_path):
    run = write_synthetic_run(tmp_path / "run", "ours", steps=10)
    path = run.folder / "metrics.jsonl"
    text = path.read_text()
    path.write_text(text[:-30])  # the last line is being written
    seen = summarise(open_source(run.folder))
    assert seen.step == 9 and seen.rebuilt
    assert seen.trends["buffer/rollouts"][-1][0] == 9
    assert seen.occupancy.stored_rollouts == int(seen.trends["buffer/rollouts"][-1][1])


@pytest.mark.parametrize("preset", PRESETS)
def test_uses_over_the_run_count_every_survivor_gone_ones_included(runs, preset):
    rows = [row for row in by_hand.rows_of(runs[preset] / "rollouts") if row["kept"]]
    uses = Counter({row["rollout_id"]: 0 for row in rows})
    for draw in by_hand.rows_of(runs[preset] / "draws"):
        uses[draw["rollout_id"]] += 1
    warmup = inspect(runs[preset]).settings["warmup_steps"]
    for row in rows:
        uses[row["rollout_id"]] += preset in ("ours", "grpo") or row["birth_step"] <= warmup
    seen = inspect(runs[preset])
    expected = Counter(uses.values())
    assert seen.uses_over_run == expected
    assert len(rows) > seen.occupancy.stored_rollouts
