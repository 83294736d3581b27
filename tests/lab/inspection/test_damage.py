"""A damaged run never looks healthy: a warning for what is missing, an error for what is wrong."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from slow_tests import slow_except
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.lab.inspection.compute import summarise
from grpo_replay.lab.inspection.source import open_source

HEALTHY = "nothing looks unhealthy"


@pytest.fixture
def copy(runs, tmp_path):
    return shutil.copytree(runs["ours"], tmp_path / "run")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def warned(copy, *words):
    shown = call("inspect-buffer", copy)
    assert shown.exit_code == 0, shown.stderr
    assert HEALTHY not in shown.stdout
    first = summarise(open_source(copy)).warnings[0]
    for word in words:
        assert word in first


def refused(copy, *words, command=("inspect-buffer",)):
    shown = call(*command, copy)
    assert shown.exit_code == 3, shown.stdout
    for word in words:
        assert word in shown.stderr


def test_a_whole_run_has_no_gaps(runs):
    from grpo_replay.lab.inspection.compute import find_gaps

    for preset in ("ours", "fifo", "grpo"):
        assert list(find_gaps(open_source(runs[preset]))) == []


@pytest.mark.parametrize("folder", slow_except(["rollouts"], ["rollouts", "draws"]))
def test_a_missing_file_is_a_warning(copy, folder):
    (copy / folder / "step_000012.parquet").unlink()
    warned(copy, f"{folder}/ lacks the file of step 12:")
    (copy / folder / "step_000010.parquet").unlink()
    warned(copy, f"{folder}/ lacks the file of step 10 and of 1 more steps")


@pytest.mark.parametrize(
    "command",
    [
        ("inspect-buffer", "--what-if", "ratio=1"),
        ("inspect-buffer", "--where", "reward = 1"),
        ("inspect-buffer", "--show", "3"),
        ("plan", "--from-run"),
    ],
)
def test_a_missing_file_is_a_warning_of_every_command_that_reads_it(copy, command):
    words = command if command[0] == "plan" else (command[0], copy, *command[1:])
    words = (*words, *([copy] if command[0] == "plan" else []))
    assert "warning" not in call(*words).stderr
    (copy / "draws/step_000012.parquet").unlink()
    shown = call(*words)
    assert shown.exit_code == 0
    assert shown.stderr.startswith("warning: draws/ lacks the file of step 12:")


@pytest.mark.parametrize(
    "command", [("inspect-buffer",), ("inspect-buffer", "--where", "reward = 1"), ("plan",)]
)
def test_metrics_that_end_before_the_other_files_are_a_warning(copy, command):
    """A run killed between its rollouts and its line has one file more; this is no damage."""
    file = copy / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    shutil.rmtree(copy / "checkpoints")
    file.write_text("".join(lines[:23]))
    assert not any("cut off" in each for each in summarise(open_source(copy)).warnings)
    file.write_text("".join(lines[:12]) + lines[12][:40])
    told = "metrics.jsonl ends with step 12, but there are files of step 23: it was cut off"
    if command == ("inspect-buffer",):
        warned(copy, told)
        assert open_source(copy).step == 12
        return
    words = (
        ("plan", "--from-run", copy) if command == ("plan",) else (command[0], copy, *command[1:])
    )
    assert told in call(*words).stderr


def test_a_checkpoint_after_the_last_line_is_a_warning(copy):
    for step in range(21, 25):
        (copy / f"rollouts/step_{step:06d}.parquet").unlink()
    file = copy / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:20]))
    warned(copy, "metrics.jsonl ends with step 20, but there are files of step 24")


def test_a_missing_recipe_is_a_warning(copy):
    (copy / "recipe.yaml").unlink()
    warned(copy, "has no recipe.yaml: what depends on the settings of replay is not shown")
    assert "has no recipe.yaml" in call("plan", "--from-run", copy).stderr


@pytest.mark.parametrize("kept", [0, 40])
def test_a_recipe_that_was_cut_off_is_refused(copy, kept):
    """Its missing sections are not taken as the defaults."""
    file = copy / "recipe.yaml"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:kept]))
    missing = "name, model, prompts" if kept == 0 else "tracking missing"
    refused(copy, "recipe.yaml", missing, "was cut off or emptied")
    assert call("plan", "--from-run", copy).exit_code == 3


def test_no_metrics_are_a_warning(copy):
    (copy / "metrics.jsonl").unlink()
    warned(copy, "metrics.jsonl does not have each of the 24 steps", "from step 1 on")


def test_a_doubled_line_of_metrics_is_a_warning(copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join([*lines[:5], *lines[4:]]))
    warned(copy, "metrics.jsonl does not have each of the 24 steps once", "from step 6 on")


@pytest.mark.parametrize("folder", ["rollouts", "draws"])
def test_swapped_files_are_refused(copy, folder):
    one, other = (copy / folder / f"step_0000{step}.parquet" for step in (12, 13))
    one.rename(copy / "aside")
    other.rename(one)
    (copy / "aside").rename(other)
    refused(copy, f"{folder}/step_000012.parquet holds rows of step 13")


def test_a_file_that_is_a_copy_of_another_is_refused(copy):
    shutil.copy(copy / "rollouts/step_000012.parquet", copy / "rollouts/step_000013.parquet")
    refused(copy, "rollouts: rollout ", "is in the files twice")


@pytest.mark.parametrize("name", ["rollouts/step_000012.parquet",
                                  "checkpoints/step_000024/buffer.parquet"])  # fmt: skip
def test_an_advantage_that_is_not_a_number_is_refused(copy, name):
    path = copy / name
    table = pq.read_table(path)
    values = table["advantage"].to_pylist()
    row = next(i for i, value in enumerate(values) if value is not None)
    values[row] = float("nan")
    index = table.column_names.index("advantage")
    changed = table.set_column(index, table.schema.field(index), pa.array(values, pa.float32()))
    pq.write_table(changed, path)
    refused(copy, path.name, f"advantage of rollout {table['rollout_id'][row]} is nan")


@pytest.mark.parametrize(
    ("name", "column", "value", "words"),
    [
        ("draws/step_000012.parquet", "rollout_id", None, "column rollout_id contains a null"),
        ("draws/step_000012.parquet", "age_steps", -3, "age -3, expected 0 or more"),
        ("rollouts/step_000012.parquet", "group_id", None, "column group_id contains a null"),
        ("checkpoints/step_000024/buffer.parquet", "times_used", None, "times_used contains a"),
    ],
)
def test_a_value_that_a_run_never_writes_is_refused(copy, name, column, value, words):
    table = pq.read_table(copy / name)
    index = table.column_names.index(column)
    field = table.schema.field(index)
    values = pa.array([value, *table[column].to_pylist()[1:]], field.type)
    pq.write_table(table.set_column(index, field, values), copy / name)
    refused(copy, name, words)


def test_metrics_that_are_a_folder_are_refused(copy):
    (copy / "metrics.jsonl").unlink()
    (copy / "metrics.jsonl").mkdir()
    refused(copy, "metrics.jsonl cannot be read")


def test_an_invalid_recipe_of_earlier_steps_is_refused(copy):
    (copy / "recipes").mkdir()
    (copy / "recipes/step_000003.yaml").write_text("replay: 5")
    shutil.copy(copy / "recipe.yaml", copy / "recipes/step_000006.yaml")
    refused(copy, "the recipe of the run is invalid", "step_000003.yaml")


def test_a_buffer_of_another_step_is_refused(copy):
    folder = copy / "checkpoints"
    shutil.copy(folder / "step_000012/buffer.parquet", folder / "step_000024/buffer.parquet")
    refused(copy, "is the buffer after step 12, in the checkpoint of step 24")


def test_a_plan_does_not_assume_a_mu_that_the_run_should_have(copy):
    (copy / "metrics.jsonl").unlink()
    refused(copy, "μ", "--mu", command=("plan", "--from-run"))
    assert call("plan", "--mu", "4", "--from-run", copy).exit_code == 0
