"""An export has the rows and values of the source, in formats that other tools read."""

import json
import shutil

import by_hand
import pyarrow.parquet as pq
import pytest
from commands import run_inspect as run

from grpo_replay.errors import OutputDirectoryError, SnapshotError, UsageError


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
