"""What a PATH names, and an error that names the file where it is invalid."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run_inspect as run

from grpo_replay.errors import RecipeError, SnapshotError, UsageError
from grpo_replay.lab.inspection.source import open_source


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of a run, which a test may damage."""
    return shutil.copytree(runs["ours"], tmp_path / "run")


def buffer_of(run_folder, step=24):
    return run_folder / "checkpoints" / f"step_{step:06d}" / "buffer.parquet"


def refused(path, match: str, **options) -> None:
    with pytest.raises(SnapshotError, match=match) as error:
        run(str(path), **options)
    assert error.value.exit_code == 3


def test_a_path_that_is_no_run_checkpoint_or_buffer_is_refused(copy, tmp_path):
    refused(tmp_path / "missing", "missing does not exist")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "neither a run directory with a finished step")
    refused(copy / "rollouts" / "step_000003.parquet", "a rollouts file, where a buffer file")
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "foreign.parquet")
    refused(tmp_path / "foreign.parquet", "not written by grpo-replay")


@pytest.mark.parametrize("share", [0, 0.6])
def test_a_broken_parquet_file_is_named(copy, share):
    whole = buffer_of(copy).read_bytes()
    buffer_of(copy).write_bytes(whole[: int(len(whole) * share)])
    for place in (buffer_of(copy), buffer_of(copy).parent, copy):
        refused(place, "buffer.parquet")


def test_an_incomplete_checkpoint_is_no_buffer_of_its_run(copy):
    (copy / "checkpoints" / "step_000024" / "manifest.json").unlink()
    assert open_source(copy).snapshot is None  # the run is rebuilt from its log


def test_a_run_in_trl_has_its_buffers_in_checkpoints_named_by_updates(copy):
    (copy / "checkpoint-48").mkdir()
    buffer_of(copy).rename(copy / "checkpoint-48" / "buffer.parquet")
    shutil.rmtree(copy / "checkpoints")
    source = open_source(copy)
    assert source.snapshot == copy / "checkpoint-48" / "buffer.parquet"
    assert open_source(copy / "checkpoint-48").step == 24


def test_a_step_that_the_source_does_not_have_is_refused(copy):
    refused(copy, "no step 99; the run has steps 1 to 24", step=99)
    refused(buffer_of(copy, 12), "--step 3 needs a run", step=3)


def test_a_line_of_metrics_or_a_recipe_that_cannot_be_read_is_named(copy):
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], "{not json", *lines[5:]]) + "\n")
    refused(copy, r"metrics.jsonl:5")
    path.write_text("\n".join(lines) + "\n")
    (copy / "recipe.yaml").write_text("nonsense: 1\n")
    with pytest.raises(RecipeError, match=r"recipe.*'nonsense'"):
        run(str(copy))


def test_a_run_without_logs_has_the_steps_of_its_checkpoints(copy):
    shutil.rmtree(copy / "rollouts")
    shutil.rmtree(copy / "checkpoints" / "step_000012")
    refused(copy, "no rollouts/ to rebuild the buffer from", step=12)
    run(str(copy), as_json=True)


def test_another_schema_version_is_refused(copy):
    table = pq.read_table(buffer_of(copy))
    marks = {**table.schema.metadata, b"grpo_replay.schema_version": b"2"}
    pq.write_table(table.replace_schema_metadata(marks), buffer_of(copy))
    refused(buffer_of(copy), "schema version 2")


def test_options_that_cannot_be_combined_or_written_are_refused(runs):
    for options in (
        {"verify": True, "what_if": ["ratio=1"]},
        {"verify": True, "step": 3},
        {"plot": "figure.txt"},
        {"panel": "clip"},
        {"plot": "page.html", "panel": "clip"},
        {"plot": "/nowhere/figure.png"},
    ):
        with pytest.raises(UsageError):
            run(str(runs["ours"]), **options)


def test_verify_passes_for_a_run_and_fails_for_changed_draws(copy, capsys):
    assert run(str(copy), verify=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    path = copy / "draws" / "step_000020.parquet"
    table = pq.read_table(path)
    ages = pa.array([age + 1 for age in table.column("age_steps").to_pylist()], pa.int64())
    index = table.schema.get_field_index("age_steps")
    pq.write_table(table.set_column(index, table.schema.field(index), ages), path)
    assert run(str(copy), verify=True, as_json=True) == 3
    document = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in document["checks"] if not c["passed"]] == ["ages", "metrics"]
