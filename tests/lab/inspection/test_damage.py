"""A run that lacks a part never looks healthy, and a file that cannot be the run's is refused."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.lab.inspection.compute import find_gaps, summarise
from grpo_replay.lab.inspection.source import open_source


@pytest.fixture
def copy(runs, tmp_path):
    return shutil.copytree(runs["ours"], tmp_path / "run")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def gaps(copy) -> list[str]:
    return list(find_gaps(open_source(copy)))


def test_a_whole_run_has_no_gaps(runs):
    for preset in ("ours", "fifo", "grpo"):
        assert gaps(runs[preset]) == []


def test_a_missing_file_is_the_first_warning_of_the_screen_and_of_other_commands(copy):
    assert "warning" not in call("inspect-buffer", copy, "--show", 3).stderr
    (copy / "draws/step_000012.parquet").unlink()
    assert "draws/" in summarise(open_source(copy)).warnings[0]
    for words in (
        ("inspect-buffer", copy, "--what-if", "ratio=1"),
        ("inspect-buffer", copy, "--show", 3),
        ("plan", "--from-run", copy),
    ):
        shown = call(*words)
        assert shown.exit_code == 0
        assert shown.stderr.startswith("warning: draws/ lacks the file of step 12:")
    (copy / "draws/step_000010.parquet").unlink()
    (said,) = gaps(copy)
    assert "step 10" in said and "1 more" in said


def test_metrics_that_lack_steps_are_a_gap(copy):
    """A run killed between its rollouts and its line has one file more; this is no damage."""
    file = copy / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:5], *lines[4:]]))
    assert any("from step 6 on" in each for each in gaps(copy))
    shutil.rmtree(copy / "checkpoints")
    file.write_text("".join(lines[:23]))
    assert gaps(copy) == []
    file.write_text("".join(lines[:12]) + lines[12][:40])
    assert open_source(copy).step == 12
    assert any("ends with step 12" in each and "step 23" in each for each in gaps(copy))
    file.unlink()
    assert any("metrics.jsonl" in each for each in gaps(copy))


def test_a_run_without_recipe_is_shown_with_a_warning(copy):
    (copy / "recipe.yaml").unlink()
    assert any("recipe.yaml" in each for each in summarise(open_source(copy)).warnings)


def test_swapped_files_are_refused(copy):
    one, other = (copy / f"draws/step_0000{step}.parquet" for step in (12, 13))
    one.rename(copy / "aside")
    other.rename(one)
    (copy / "aside").rename(other)
    shown = call("inspect-buffer", copy)
    assert shown.exit_code == 3 and "draws/step_000012.parquet" in shown.stderr


def test_an_advantage_that_is_not_a_number_is_refused(copy):
    path = copy / "checkpoints/step_000024/buffer.parquet"
    table = pq.read_table(path)
    values = table["advantage"].to_pylist()
    index = table.column_names.index("advantage")
    changed = pa.array([float("nan"), *values[1:]], pa.float32())
    pq.write_table(table.set_column(index, table.schema.field(index), changed), path)
    shown = call("inspect-buffer", copy)
    assert shown.exit_code == 3
    assert f"advantage of rollout {table['rollout_id'][0]} is nan" in shown.stderr


def test_a_plan_does_not_assume_a_mu_that_the_run_should_have(copy):
    (copy / "metrics.jsonl").unlink()
    refused = call("plan", "--from-run", copy)
    assert refused.exit_code == 3 and "--mu" in refused.stderr
    assert call("plan", "--mu", "4", "--from-run", copy).exit_code == 0
