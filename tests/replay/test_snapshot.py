"""The buffer's file: what is written is read again bit for bit, and what was edited is refused."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from buffer_makers import (
    assert_same_rollouts,
    drawn_buffer,
    ids,
    make_group,
    make_rollout,
    replay_settings,
)

from grpo_replay.errors import SnapshotError
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.snapshot import (
    read_snapshot,
    restore_snapshot,
    write_snapshot,
)


def test_payload_of_is_for_a_buffer_of_handles_and_not_asked_for_rollouts(tmp_path):
    buffer = drawn_buffer(4)
    buffer.save(tmp_path / "buffer.parquet")
    loaded = ReplayBuffer.load(tmp_path / "buffer.parquet", payload_of="row {}".format)
    assert_same_rollouts(loaded.rollouts(), buffer.rollouts())


def test_a_file_of_any_name_is_read_again(tmp_path):
    buffer = drawn_buffer(4)
    buffer.save(tmp_path / "mine.buffer")
    assert_same_rollouts(ReplayBuffer.load(tmp_path / "mine.buffer").rollouts(), buffer.rollouts())


@pytest.mark.parametrize("rollouts", [0, 4, 40])
def test_snapshot_round_trip_is_exact(tmp_path, rollouts, monkeypatch):
    monkeypatch.setattr("grpo_replay.replay.snapshot._CHUNK_ROLLOUTS", 5)
    buffer = drawn_buffer(rollouts)
    path = tmp_path / "buffer.parquet"
    write_snapshot(path, buffer, step=10)
    restored = ReplayBuffer(buffer.settings, 4)
    restore_snapshot(path, restored)
    assert read_snapshot(path).step == 10
    before, after = buffer.get_state(), restored.get_state()
    assert_same_rollouts(buffer.rollouts(), restored.rollouts())
    for name in before.keys() - {"entries"}:
        one, other = np.asarray(before[name]), np.asarray(after[name])
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), name
    if rollouts == 40:
        assert buffer.column("times_used").sum() > 0
    again = tmp_path / "again.parquet"
    write_snapshot(again, restored, step=10)
    assert again.read_bytes() == path.read_bytes()
    assert pq.read_metadata(path).num_rows == len(buffer)
    snapshot = read_snapshot(path)
    assert snapshot.settings["capacity_rollouts"] == 30
    assert (snapshot.step, snapshot.group_size) == (10, 4)


def test_a_snapshot_has_null_for_rollouts_never_drawn(tmp_path):
    buffer = ReplayBuffer(replay_settings(), 2)
    buffer.insert(make_group(0, 0, 1, [1, -1, 1]), 1)
    drawn = ids(buffer.draw(1, 2, np.random.default_rng(0)).rollouts)[0]
    write_snapshot(tmp_path / "b.parquet", buffer, 2)
    last_used = pq.read_table(tmp_path / "b.parquet")["last_used_step"].to_pylist()
    assert last_used == [2 if i == drawn else None for i in range(3)]


def test_a_snapshot_names_its_version(tmp_path):
    """A change of it would refuse the checkpoints of earlier runs."""
    write_snapshot(tmp_path / "b.parquet", drawn_buffer(), 10)
    assert pq.read_schema(tmp_path / "b.parquet").metadata[b"grpo_replay.schema_version"] == b"1"


def test_masks_and_extra_arrays_stand_in_a_snapshot(tmp_path):
    mask, experts = np.array([True, False, True]), np.arange(6.0).reshape(3, 2)
    buffer = ReplayBuffer(replay_settings(), 2)
    rollouts = [
        replace(make_rollout(i), completion_mask=mask, extras={"experts": experts})
        for i in range(2)
    ]
    buffer.insert(rollouts, 1)
    write_snapshot(tmp_path / "b.parquet", buffer, 2)
    restored = ReplayBuffer(replay_settings(), 2)
    restore_snapshot(tmp_path / "b.parquet", restored)
    assert_same_rollouts(restored.rollouts(), buffer.rollouts())
    assert restored.rollouts()[0].completion_mask.tolist() == [True, False, True]
    np.testing.assert_array_equal(restored.rollouts()[1].extras["experts"], experts)


def test_a_snapshot_that_was_edited_is_refused(tmp_path):
    path = tmp_path / "buffer.parquet"
    write_snapshot(path, drawn_buffer(), 10)
    table = pq.read_table(path)
    index = table.column_names.index("advantage")
    edited = pa.array([0.5] * table.num_rows, pa.float32())
    pq.write_table(table.set_column(index, table.schema.field(index), edited), path)
    with pytest.raises(SnapshotError, match=r"buffer\.parquet"):
        restore_snapshot(path, ReplayBuffer(drawn_buffer().settings, 4))
