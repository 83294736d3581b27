import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from buffer_makers import ARRAYS, assert_same_rollouts, drawn_buffer, make_group, make_rollout

from grpo_replay.errors import OutputDirectoryError, SnapshotError
from grpo_replay.replay.insertion import entries_of
from grpo_replay.replay.snapshot import (
    SNAPSHOT_SCHEMA,
    read_snapshot,
    write_snapshot,
)
from grpo_replay.storage import rollout_log
from grpo_replay.storage.rollout_log import (
    DRAW_SCHEMA,
    ROLLOUT_FILE_SCHEMA,
    read_draw_table,
    read_rollout_table,
    rollouts_to_table,
    step_path,
    table_to_rollouts,
    write_draws,
    write_rollouts,
)
from grpo_replay.types import Draw, RolloutOutcome

OUTCOME = RolloutOutcome(3, 0.25, -0.125, 0.5, 0.0625, 1.5, 3.0, 2.0, 0.75)


def some_rollouts():
    kept = make_group(0, 0, 5, [1.0, -1.0, 0.1, 1.0])
    dropped = make_group(4, 1, 5, [1.0, 1.0, 1.0, 1.0])
    empty = dataclasses.replace(
        make_rollout(8, birth_step=5, tokens=0), completion_text='naïve ∑ \n\t\x00 "quotes"'
    )
    return [*kept, *dropped, empty]


def test_columns_are_the_documented_ones():
    documented = [
        *("rollout_id", "group_id", "prompt_id", "completion_index", "birth_step"),
        *("policy_version", "prompt_token_ids", "completion_token_ids", "completion_text"),
        *("behavior_logprobs", "sampler_logprobs", "reward", "advantage", "group_reward_mean"),
        *("group_reward_std", "group_correct", "finish_reason", "verdict"),
        *("policy_version_end", "kept", "reward_scores"),
    ]
    outcome = ["tokens", "clip_fraction", "log_ratio_mean", "log_ratio_var", "approx_kl"]
    assert ROLLOUT_FILE_SCHEMA.names[:26] == documented + outcome
    assert ROLLOUT_FILE_SCHEMA.names[-1] == "behavior_logprob_mean"
    assert DRAW_SCHEMA.names[:9] == ["step", "rollout_id", "age_steps", "probability", *outcome]
    for name in ("completion_text", "reward_scores"):
        documented.remove(name)
    assert SNAPSHOT_SCHEMA.names == [*documented, "priority", "times_used", "last_used_step"]


def test_a_table_gives_the_rollouts_back_exactly():
    rollouts = some_rollouts()
    back = table_to_rollouts(rollouts_to_table(rollouts))
    assert_same_rollouts(rollouts, back)
    assert back[4].advantage is None and back[4].behavior_logprobs is None
    assert back[8].behavior_logprobs.shape == (0,)
    assert table_to_rollouts(rollouts_to_table([])) == []


def test_slices_and_chunks_of_tables_are_read_into_arrays_of_their_own(tmp_path):
    rollouts = some_rollouts()
    rollouts[0] = dataclasses.replace(
        rollouts[0], completion_mask=np.ones(len(rollouts[0].completion_token_ids), bool)
    )
    table = rollouts_to_table(rollouts)
    assert_same_rollouts(rollouts[3:7], table_to_rollouts(table.slice(3, 4)))
    found = table_to_rollouts(pa.concat_tables([table.slice(0, 2), table.slice(2)]))
    assert_same_rollouts(rollouts, found)
    for name in ARRAYS:
        assert getattr(found[0], name).base is None
        assert not getattr(found[0], name).flags.writeable


@pytest.mark.parametrize("field", ["reward", "advantage", "group_reward_mean", "group_reward_std"])
def test_a_number_that_is_not_finite_and_exact_in_float32_is_refused(field):
    for value in (0.1, float("nan"), -float("inf"), 1e300):
        with pytest.raises(ValueError, match=field):
            rollouts_to_table([dataclasses.replace(make_rollout(0), **{field: value})])


def test_arrays_of_another_type_are_refused():
    wrong = dataclasses.replace(make_rollout(0), sampler_logprobs=np.zeros(3))
    with pytest.raises(ValueError, match="float32"):
        rollouts_to_table([wrong])


def test_a_file_of_rollouts_has_them_all_and_the_statistics_of_those_trained_on(tmp_path):
    path = step_path(tmp_path, 12)
    assert path.name == "step_000012.parquet"
    rollouts = some_rollouts()
    undefined = dataclasses.replace(OUTCOME, tokens=0, clip_fraction=float("nan"))
    write_rollouts(path, rollouts, {0: OUTCOME, 8: undefined})
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    table = read_rollout_table(path)
    assert_same_rollouts(rollouts, table_to_rollouts(table))
    rows, names = table.to_pylist(), dataclasses.asdict(OUTCOME)
    assert {name: rows[0][name] for name in names} == names
    assert rows[1]["tokens"] is None and rows[4]["approx_kl"] is None
    assert rows[8]["tokens"] == 0 and rows[8]["clip_fraction"] is None


def test_a_file_of_draws_has_the_draw_in_its_order(tmp_path):
    path = step_path(tmp_path, 7)
    rollouts = make_group(0, 0, 5, [1.0, -1.0])
    drawn = tuple(entries_of([rollouts[1], rollouts[0], rollouts[1]]))
    draw = Draw(drawn, np.array([0.75, 0.25, 0.75]), np.array([2, 2, 2]), 1.6, 0.56)
    write_draws(path, 7, draw, [OUTCOME] * 3)
    table = read_draw_table(path)
    assert table["rollout_id"].to_pylist() == [1, 0, 1]
    assert table["probability"].to_pylist() == [0.75, 0.25, 0.75]
    assert table["age_steps"].to_pylist() == [2, 2, 2]
    assert table["step"].to_pylist() == [7, 7, 7]
    assert table["approx_kl"].to_pylist() == [0.0625] * 3
    write_draws(path, 7, Draw.empty(), [])
    assert read_draw_table(path).num_rows == 0
    with pytest.raises(ValueError, match="2 outcomes for 3"):
        write_draws(path, 7, draw, [OUTCOME] * 2)


DRAW = Draw(
    tuple(entries_of(some_rollouts()[:2])), np.array([0.5, 0.5]), np.array([2, 2]), 2.0, 0.7
)
READERS = {
    "rollouts": (read_rollout_table, lambda path: write_rollouts(path, some_rollouts(), {})),
    "draws": (read_draw_table, lambda path: write_draws(path, 7, DRAW, [OUTCOME] * 2)),
    "buffer": (read_snapshot, lambda path: write_snapshot(path, drawn_buffer(), 10)),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_is_missing_broken_newer_or_of_another_kind_is_named(
    kind, tmp_path, monkeypatch
):
    reader, writer = READERS[kind]
    path = tmp_path / "f.parquet"

    def is_refused(*values):
        with pytest.raises(SnapshotError, match=r"f\.parquet") as seen:
            reader(path)
        assert all(value in str(seen.value) for value in values)

    is_refused(kind)  # missing
    writer(path)
    path.write_bytes(path.read_bytes()[:-20])
    is_refused()
    pq.write_table(pa.table({"x": [1, 2]}), path)
    is_refused(kind)
    other = {"rollouts": "draws", "draws": "buffer", "buffer": "rollouts"}[kind]
    READERS[other][1](path)
    is_refused(kind, other)
    monkeypatch.setattr(rollout_log, "ROLLOUT_LOG_VERSION", 2)
    monkeypatch.setattr("grpo_replay.replay.snapshot.SNAPSHOT_VERSION", 2)
    writer(path)
    monkeypatch.undo()
    is_refused("2", "1")


def test_a_write_that_fails_or_meets_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f.parquet"
    write_rollouts(path, some_rollouts(), {})
    before = path.read_bytes()
    with pytest.raises((pa.ArrowInvalid, OverflowError)):
        write_rollouts(path, some_rollouts(), {0: dataclasses.replace(OUTCOME, tokens=2**40)})

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", no_space)
    with pytest.raises(OutputDirectoryError, match=r"f\.parquet.*No space"):
        write_rollouts(path, some_rollouts()[:4], {})
    assert path.read_bytes() == before
