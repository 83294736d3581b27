"""The toy form of the benchmark of one collector: what it counts is there."""

import argparse

import async_collection
import pytest

from grpo_replay.collection.journal import read_journal
from grpo_replay.collection.messages import Group


@pytest.mark.slow
def test_two_servers_are_collected_from_graded_and_journalled(tmp_path, capsys):
    options = argparse.Namespace(
        tokens=80, in_flight=8, rate=160.0, seconds=3.0, verifiers=1, tokenizer="builtin:bytes"
    )
    found = async_collection.measure(options, 2, tmp_path)
    groups = [each for each in read_journal(tmp_path / "journal") if isinstance(each, Group)]
    rows = [row for group in groups for row in group.rows]
    assert found["rollouts"] > 0 and found["tokens"] > 20 * found["rollouts"]
    assert found["taken_in_all"] <= len(rows)
    assert len({row.text for row in rows}) == len(rows), "every completion is another text"
    assert all("boxed" in row.text for row in rows)
    assert {row.verdict for row in rows} <= {"correct", "incorrect"}
    assert len({row.tokens for row in rows}) > 4, "of different lengths"
    assert all(seconds > 0 for seconds in found["cpu"].values())
    async_collection.show(2, options, found)
    assert capsys.readouterr().out.startswith("| 2 | 2,560 | ")
