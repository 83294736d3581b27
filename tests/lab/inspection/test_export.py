"""An export has the rows and values of the source, in formats that other tools read."""

import json
import shutil
from typing import ClassVar

import by_hand
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run_inspect as run

from grpo_replay.errors import OutputDirectoryError, SnapshotError, UsageError
from grpo_replay.lab.inspection.rows import _write_jsonl


def test_parquet_has_every_rollout_of_the_run(runs, tmp_path, capsys):
    target = tmp_path / "all.parquet"
    run(str(runs["ours"]), export=str(target))
    exported = pq.read_table(target).to_pylist()
    original = by_hand.rows_of(runs["ours"] / "rollouts")
    assert "768 rollouts" in capsys.readouterr().out
    assert len(exported) == len(original) == 768
    for row, source in zip(exported, original, strict=True):
        assert {name: row[name] for name in source} == source
    assert sum(row["stored"] for row in exported) == len(by_hand.stored_rows(runs["ours"], 24))


def test_jsonl_has_the_rollouts_that_pass_the_filter(runs, tmp_path, capsys):
    target = tmp_path / "some.jsonl"
    run(str(runs["ours"]), where="kept and reward = 1", export=str(target), as_json=True)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    original = by_hand.rows_of(runs["ours"] / "rollouts")
    expected = [row["rollout_id"] for row in original if row["kept"] and row["reward"] == 1]
    assert [line["rollout_id"] for line in lines] == expected
    assert json.loads(capsys.readouterr().out)["exported"] == len(expected)
    assert lines[0]["completion_token_ids"] == original[expected[0]]["completion_token_ids"]


def test_an_export_of_a_checkpoint_opens_as_a_dataset(runs, tmp_path):
    datasets = pytest.importorskip("datasets")
    target = tmp_path / "stored.parquet"
    run(str(runs["ours"] / "checkpoints" / "step_000024"), export=str(target))
    cache = str(tmp_path / "cache")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(target), split="train", cache_dir=cache
    )
    stored = by_hand.stored_rows(runs["ours"], 24)
    assert loaded["rollout_id"][:] == [row["rollout_id"] for row in stored]
    assert loaded[0]["behavior_logprobs"] == pytest.approx(stored[0]["behavior_logprobs"])


def test_an_empty_selection_is_a_file_without_rows(runs, tmp_path):
    target = tmp_path / "none.parquet"
    run(str(runs["ours"]), where="reward > 5", export=str(target))
    assert pq.read_table(target).num_rows == 0
    assert "advantage" in pq.read_schema(target).names


def test_export_refuses_to_overwrite_and_names_the_extensions(runs, tmp_path):
    taken = tmp_path / "taken.parquet"
    taken.write_text("mine")
    with pytest.raises(OutputDirectoryError, match="already exists"):
        run(str(runs["ours"]), export=str(taken))
    assert taken.read_text() == "mine"
    with pytest.raises(UsageError, match=r"\.parquet or \.jsonl"):
        run(str(runs["ours"]), export=str(tmp_path / "rollouts.csv"))
    with pytest.raises(OutputDirectoryError, match="does not exist"):
        run(str(runs["ours"]), export=str(tmp_path / "missing" / "a.jsonl"))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_masks_and_extras_are_exported_and_null_where_a_file_has_none(runs, tmp_path, kind):
    copy = shutil.copytree(runs["ours"], tmp_path / "run")
    path = copy / "rollouts/step_000002.parquet"
    table = pq.read_table(path)
    masks = [[True] * len(ids) for ids in table["completion_token_ids"].to_pylist()]
    table = table.append_column("completion_mask", pa.array(masks))
    values = pa.array([[1.5, float("nan")]] * len(table))
    pq.write_table(table.append_column("extra_value", values), path)
    target = tmp_path / f"all.{kind}"
    run(str(copy), export=str(target))
    if kind == "parquet":
        rows = pq.read_table(target).to_pylist()
    else:
        rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(rows) == 768
    assert [row["completion_mask"] for row in rows[32:64]] == masks
    assert {row["extra_value"][0] for row in rows[32:64]} == {1.5}
    others = [*rows[:32], *rows[64:]]
    assert all(row["completion_mask"] is None is row["extra_value"] for row in others)


def test_extras_of_one_name_and_several_types_are_refused(runs, tmp_path):
    copy = shutil.copytree(runs["ours"], tmp_path / "run")
    for step, value in ((1, [1.5]), (2, ["text"])):
        path = copy / f"rollouts/step_{step:06d}.parquet"
        table = pq.read_table(path)
        pq.write_table(table.append_column("extra_x", pa.array([value] * len(table))), path)
    with pytest.raises(SnapshotError, match="extras of one name and several types"):
        run(str(copy), export=str(tmp_path / "all.jsonl"))


class Rows:
    """A table that notes how many of its rows become Python objects at once."""

    at_once: ClassVar[list[int]] = []

    def __init__(self, rows):
        self.rows, self.num_rows = rows, len(rows)

    def slice(self, start, count):
        return Rows(self.rows[start : start + count])

    def to_pylist(self):
        Rows.at_once.append(self.num_rows)
        return self.rows


def test_few_rows_at_a_time_become_json(tmp_path):
    rows = [{"rollout_id": i} for i in range(300)]
    assert _write_jsonl(tmp_path / "x.jsonl", iter([Rows(rows)])) == 300
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert max(Rows.at_once) <= 64


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"where": "reward > 0", "export": "x.jsonl", "limit": 3}, "leave out --limit and --text"),
        ({"where": "reward > 0", "export": "x.jsonl", "text": True}, "leave out --limit"),
        ({"verify": True, "step": 3}, "--verify reads the whole run; leave out --step"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(runs, options, says):
    with pytest.raises(UsageError, match=says):
        run(str(runs["ours"]), **options)


def test_an_export_that_fails_leaves_nothing_behind(runs, tmp_path):
    broken = tmp_path / "run"
    shutil.copytree(runs["ours"], broken)
    victim = broken / "rollouts" / "step_000020.parquet"
    damaged = bytearray(victim.read_bytes())
    damaged[100:160] = b"\x00" * 60
    victim.write_bytes(damaged)
    with pytest.raises(SnapshotError, match="step_000020"):
        run(str(broken), export=str(tmp_path / "out.jsonl"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
