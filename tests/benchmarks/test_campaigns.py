"""Short forms of the campaigns, and that each of their judgements can fail."""

import json

import hostile_completions
import kills
import pytest


@pytest.mark.parametrize(
    "verifier, count",
    [
        ("minerva", 240),
        pytest.param("math_verify", 12, marks=pytest.mark.slow),
        pytest.param("boxed", 60, marks=pytest.mark.slow),
    ],
)
def test_hostile_completions_neither_crash_nor_delay_the_verifiers(verifier, count):
    found = hostile_completions.campaign(verifier, count, seed=1, workers=2, limit=5.0)
    assert found["hostile"] == count and found["ordinary"] == count // 3
    assert len(found["kinds"]) == 13  # twelve and the ordinary ones
    assert hostile_completions.is_well(found, workers=2, limit=5.0), found


def test_a_campaign_of_hostile_completions_can_fail():
    well = {
        "hostile": 12, "timeouts": 1, "ordinary_wrong": 0, "without_verdict": 0, "seconds": 3.0
    }  # fmt: skip
    assert hostile_completions.is_well(well, 2, 5.0)
    for bad in ({"ordinary_wrong": 1}, {"without_verdict": 1}, {"seconds": 1000.0}):
        assert not hostile_completions.is_well({**well, **bad}, 2, 5.0)


def test_what_a_killed_run_lost_or_changed_is_found(tmp_path):
    for name in ("draws", "rollouts"):
        (tmp_path / name).mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "step_time": 3.0}\n')
    (tmp_path / "summary.json").write_text('{"steps": 1, "wall_seconds": 2.0}')
    expected = kills.facts(tmp_path)
    changed = json.loads('{"step": 1, "loss": 0.5000001, "step_time": 9.0}')
    assert kills.differences(expected, expected) == []
    left = {**expected, "an older checkpoint": 1}
    assert kills.differences(left, expected) == ["an older checkpoint"]
    assert kills.differences(expected, left) == ["an older checkpoint"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**changed, "loss": 0.5}) + "\n")
    assert kills.differences(kills.facts(tmp_path), expected) == []  # the clock alone
    (tmp_path / "metrics.jsonl").write_text(json.dumps(changed) + "\n")
    assert kills.differences(kills.facts(tmp_path), expected) == ["metrics 0"]
    (tmp_path / "metrics.jsonl").write_text("")
    assert kills.differences(kills.facts(tmp_path), expected) == ["metrics 0"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind, count", [("synchronous", 3), ("an inner rank", 3)])
def test_a_run_killed_between_its_files_is_the_run_that_was_never_killed(kind, count, tmp_path):
    rows = kills.campaign(kind, count, tmp_path, seed=3, results=tmp_path / "kills.jsonl")
    assert len(rows) == count and all(row["survived"] for row in rows), rows
    assert len((tmp_path / "kills.jsonl").read_text().splitlines()) == count
