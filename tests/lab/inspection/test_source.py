"""An invalid PATH raises an error that names the file."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run_inspect as run

from grpo_replay.errors import SnapshotError, UsageError
from grpo_replay.lab.inspection.source import open_source


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of a run, which a test may damage."""
    return shutil.copytree(runs["ours"], tmp_path / "run")


def refused(path, match: str, **options) -> None:
    with pytest.raises(SnapshotError, match=match) as error:
        run(str(path), **options)
    assert error.value.exit_code == 3


def test_a_missing_path(tmp_path):
    refused(tmp_path / "missing", "no such file or directory. Give a run directory")


def test_a_folder_that_is_not_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path, "neither a run directory .* nor a checkpoint")


def test_an_empty_file(tmp_path):
    (tmp_path / "buffer.parquet").touch()
    refused(tmp_path / "buffer.parquet", "is empty")


def test_a_text_file(tmp_path):
    (tmp_path / "buffer.parquet").write_text("this is not Parquet at all")
    refused(tmp_path / "buffer.parquet", "not a readable Parquet file")


def test_a_foreign_parquet_file(tmp_path):
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "foreign.parquet")
    refused(tmp_path / "foreign.parquet", "not written by grpo-replay")


def test_a_file_of_another_kind(copy):
    refused(copy / "rollouts" / "step_000003.parquet", "a rollouts file, where a buffer file")
    refused(copy / "draws" / "step_000003.parquet", "a draws file, where a buffer file")


@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_a_truncated_snapshot(copy, share):
    path = copy / "checkpoints" / "step_000024" / "buffer.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    for place in (path, path.parent, copy):
        refused(place, "buffer.parquet.*truncated or damaged")


def test_a_damaged_page(copy):
    path = copy / "draws" / "step_000015.parquet"
    damaged = bytearray(path.read_bytes())
    damaged[40:90] = bytes(50)
    path.write_bytes(damaged)
    refused(copy, "step_000015.parquet")


def test_an_incomplete_checkpoint_is_no_buffer_of_its_run(copy):
    (copy / "checkpoints" / "step_000024" / "manifest.json").unlink()
    assert open_source(copy).snapshot is None  # the run is rebuilt from its log


def test_a_snapshot_in_the_folder_of_another_step_is_refused(copy):
    older, newest = (copy / "checkpoints" / f"step_{n:06d}" / "buffer.parquet" for n in (12, 24))
    shutil.copy(older, newest)
    for place in (newest, newest.parent, copy):
        refused(place, "the buffer after step 12, in the checkpoint of step 24: it was swapped")


@pytest.mark.parametrize("preset", ["ours", "grpo"])
def test_the_step_of_a_checkpoint_with_another_name_is_that_of_its_files(runs, tmp_path, preset):
    moved = shutil.copytree(runs[preset] / "checkpoints" / "step_000012", tmp_path / "best")
    assert open_source(moved).step == 12


def test_an_unknown_step(copy):
    refused(copy, "no step 99; the run has steps 1 to 24", step=99)
    refused(copy / "checkpoints" / "step_000012", "--step 13 needs a run", step=13)
    refused(copy / "checkpoints/step_000012/buffer.parquet", "--step 3 needs a run", step=3)


def test_an_invalid_line_of_metrics(copy):
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = "{not json"
    path.write_text("\n".join(lines) + "\n")
    refused(copy, r"metrics.jsonl:5: not a line of metrics")


def test_an_invalid_recipe(copy):
    (copy / "recipe.yaml").write_text("nonsense: 1\n")
    refused(copy, "the recipe of the run is invalid: .*unknown key 'nonsense'")


def test_a_run_without_a_finished_step(tmp_path):
    (tmp_path / "rollouts").mkdir()
    refused(tmp_path, "has not finished a step yet")


def test_a_run_without_logs_and_checkpoint(copy):
    shutil.rmtree(copy / "rollouts")
    shutil.rmtree(copy / "checkpoints" / "step_000012")
    refused(copy, "no rollouts/ to rebuild the buffer from", step=12)
    run(str(copy), as_json=True)


def test_a_newer_schema_is_refused(copy):
    path = copy / "checkpoints" / "step_000024" / "buffer.parquet"
    table = pq.read_table(path)
    marks = {**table.schema.metadata, b"grpo_replay.schema_version": b"2"}
    pq.write_table(table.replace_schema_metadata(marks), path)
    refused(path, "schema version 2 is newer")


def test_options_that_cannot_be_combined(runs):
    for options in (
        {"show": 1, "where": "kept"},
        {"verify": True, "what_if": ["ratio=1"]},
        {"plot": "a.png", "export": "b.jsonl"},
    ):
        with pytest.raises(UsageError, match="cannot be combined; use one at a time"):
            run(str(runs["ours"]), **options)
    with pytest.raises(UsageError, match=r"must end in \.png, \.svg, \.pdf, \.html"):
        run(str(runs["ours"]), plot="figure.txt")
    with pytest.raises(UsageError, match="create it first"):
        run(str(runs["ours"]), plot="/nowhere/figure.png")


def test_verify_needs_a_run(copy, tmp_path):
    lonely = tmp_path / "lonely.parquet"
    lonely.write_bytes((copy / "checkpoints/step_000024/buffer.parquet").read_bytes())
    refused(lonely, "give a run directory", verify=True)


def test_verify_passes_for_a_run_and_fails_for_changed_draws(copy, capsys):
    assert run(str(copy), verify=True) == 0
    assert "steps match the algorithm of the recipe" in capsys.readouterr().out
    path = copy / "draws" / "step_000020.parquet"
    table = pq.read_table(path)
    ages = pa.array([age + 1 for age in table.column("age_steps").to_pylist()], pa.int64())
    index = table.schema.get_field_index("age_steps")
    pq.write_table(table.set_column(index, table.schema.field(index), ages), path)
    assert run(str(copy), verify=True, as_json=True) == 3
    document = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in document["checks"] if not c["passed"]] == ["ages", "metrics"]
