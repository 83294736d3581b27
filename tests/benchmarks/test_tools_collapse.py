"""What a run of the tools example ended as, and what its record says."""

import json

import pytest
from tools_collapse import outcome, row_of, seeds_of, summary


@pytest.mark.parametrize(
    "won, ended",
    [
        ([0.0] * 8 + [0.9] * 20, ""),  # the first steps do not count
        ([0.5] * 8 + [0.9] * 5 + [0.74] + [0.9] * 10, "dip"),
        ([0.5] * 8 + [0.9] * 5 + [0.75] + [0.9] * 10, ""),
        ([0.5] * 8 + [0.9] * 5 + [0.0] * 10, "collapse"),
        ([0.5] * 8 + [0.9] * 5 + [0.0] * 9, "dip"),
    ],
)
def test_a_collapse_has_no_won_game_in_ten_steps_and_a_dip_has_fewer_than_three_quarters(
    won, ended
):
    assert outcome(won) == ended


def test_a_row_is_of_the_steps_that_have_a_reward(tmp_path):
    log = tmp_path / "ours_0.001_6.jsonl"
    won = [0.5] * 8 + [0.9, 0.6] + [1.0] * 10
    lines = [line for share in won for line in ({"reward": share}, {"loss": 0.1})]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = row_of(log)
    assert (row["arm"], row["rate"], row["seed"], row["steps"]) == ("ours", "0.001", "6", "20")
    assert (row["last"], row["lowest"], row["dips"]) == ("1.0000", "0.6000", "1")
    assert row["outcome"] == "dip"


def test_seeds_are_one_or_a_range():
    assert list(seeds_of("3-5")) == [3, 4, 5] and list(seeds_of("7")) == [7]


def test_a_summary_counts_what_ended_unsteadily_and_tests_it_by_fisher():
    """Eight of ten against none of ten: the tables with these margins that are as unlikely have
    2 · C(10,8)·C(10,0)/C(20,8) = 2 · 45 / 125,970."""
    rows = [
        {"rate": "0.001", "arm": arm, "outcome": ended}
        for arm, outcomes in (("plain", [""] * 10), ("ours", ["dip"] * 7 + ["collapse"] + [""] * 2))
        for ended in outcomes
    ]
    alone = {"rate": "0.002", "arm": "ours", "outcome": "collapse"}
    *_, plain, ours, first = summary([*rows, alone]).splitlines()
    assert first == "| 0.002 | `ours` | 1 | 1 | 0 |  |"
    assert plain == "| 0.001 | `plain` | 10 | 0 | 0 |  |"
    assert ours == "| 0.001 | `ours` | 10 | 1 | 7 | plain 0.000714 |"
