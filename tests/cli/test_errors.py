"""Bad input at the command line: one clear message on stderr, the right exit code, no traceback."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--set", "run.steps=2", "--set", "replay.warmup_steps=0", "--set", "eval.benchmarks=[]"]


def call(*arguments):
    return CliRunner().invoke(app, [str(word) for word in arguments])


def refused(result, code, *words):
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert sum(line.startswith("error: ") for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def problem_file(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train_on(path, tmp_path):
    return call(
        "train", "tiny", *TINY, "--output-dir", tmp_path / "run",
        "--set", f"prompts.source={path}", "--set", "prompts.id_field=null",
    )  # fmt: skip


def test_a_missing_recipe():
    refused(call("train", "nosuch.yaml"), 2, "no recipe 'nosuch.yaml'", "tiny")


def test_an_unknown_key_in_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("replay:\n  max_age: 5\n")
    refused(call("train", path), 2, "replay.max_age", "did you mean 'max_age_steps'")


def test_a_bad_key_in_set():
    refused(call("train", "tiny", "--set", "replay.rato=1"), 2, "replay.rato")


def test_a_value_out_of_range():
    refused(call("train", "tiny", "--set", "optimizer.learning_rate=0"), 2, "learning_rate")


def test_a_contradiction():
    result = call("train", "tiny", "--set", "replay.capacity_rollouts=10")
    refused(result, 2, "capacity_rollouts 10", "128")


def test_a_warm_up_longer_than_the_run():
    refused(call("train", "tiny", "--set", "run.steps=10"), 2, "warmup_steps 20", "run.steps 10")


def test_a_missing_dataset_file(tmp_path):
    refused(train_on(tmp_path / "none.jsonl", tmp_path), 3, "none.jsonl")


def test_a_row_without_the_answer(tmp_path):
    rows = [{"problem": "1+1", "answer": "2"}, {"problem": "1+2"}]
    path = problem_file(tmp_path / "rows.jsonl", *rows)
    refused(train_on(path, tmp_path), 3, "rows.jsonl:2", "answer")


def test_an_empty_prompt_set(tmp_path):
    refused(train_on(problem_file(tmp_path / "empty.jsonl"), tmp_path), 3, "empty.jsonl")


def test_prompts_that_are_all_too_long(tmp_path):
    path = problem_file(tmp_path / "long.jsonl", {"problem": "1+" * 40 + "1", "answer": "41"})
    refused(train_on(path, tmp_path), 3, "max_prompt_length")


def test_an_output_directory_that_holds_another_run(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: other\n")
    refused(call("train", "tiny", "--output-dir", tmp_path), 3, "another run", "--resume")


def test_an_output_directory_that_holds_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    refused(call("train", "tiny", "--output-dir", tmp_path), 3, "other files")


def test_resuming_without_a_directory():
    refused(call("train", "tiny", "--resume"), 2, "--resume needs --output-dir")


def test_resuming_where_there_is_no_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    for place in (tmp_path, tmp_path / "typo"):
        refused(call("train", "tiny", "--resume", "--output-dir", place), 3, "holds no run")


def test_resuming_a_run_that_died_before_it_stored_its_recipe_needs_the_recipe(tmp_path):
    (tmp_path / ".lock").touch()
    refused(call("train", "--resume", "--output-dir", tmp_path), 3, "name RECIPE")


def test_training_without_a_recipe():
    refused(call("train"), 2, "needs a RECIPE", "--resume")


def test_an_output_directory_that_is_not_a_folder():
    refused(call("train", "tiny", "--output-dir", "/dev/null"), 3, "/dev/null", "not a directory")


def test_a_disk_that_is_full_is_not_our_bug(monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device", "somewhere/metrics.jsonl")

    monkeypatch.setattr("grpo_replay.cli.plan_command.run", refuse)
    refused(call("plan"), 3, "somewhere/metrics.jsonl", "No space left", "free space")


def test_json_without_a_dry_run():
    refused(call("train", "tiny", "--json"), 2, "--dry-run")


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it were not
    words = ["--output-dir", tmp_path / "run", "--set", "tracking.report_to=[trackio]"]
    refused(call("train", "tiny", *words), 2, "'trackio'", "pip install 'grpo-replay[trackio]'")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "module, extra",
    [("torch", "train"), ("math_verify", "train"), ("zmq", "train"), ("peft", "lora")],
)
def test_a_module_of_an_extra_that_is_not_installed(monkeypatch, module, extra):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = extras["dependencies"] + [
        f"{line}; extra == '{name}'"
        for name, group in extras["optional-dependencies"].items()
        for line in group
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: lines)

    def lacking(*_, **__):
        raise ModuleNotFoundError(f"No module named '{module}.sub'", name=f"{module}.sub")

    monkeypatch.setattr("grpo_replay.cli.plan_command.run", lacking)
    result = call("plan")
    refused(result, 2, f"needs {module}, which is not", f"pip install 'grpo-replay[{extra}]'")


def test_a_module_of_no_extra_is_our_bug(monkeypatch):
    def lacking(*_, **__):
        raise ModuleNotFoundError("No module named 'numpyy'", name="numpyy")

    monkeypatch.setattr("grpo_replay.cli.plan_command.run", lacking)
    assert call("plan").exit_code == 1


def test_an_error_in_code_that_is_no_part_of_the_package_names_its_line(monkeypatch):
    def fails(*_, **__):
        return {}["oops"]

    monkeypatch.setattr("grpo_replay.cli.plan_command.run", fails)
    found = call("plan")
    assert found.exit_code == 1 and "Traceback" in found.stderr
    line = fails.__code__.co_firstlineno + 1
    place = f"error: KeyError in {__file__} line {line}, fails, which is no part of grpo-replay"
    assert found.stderr.splitlines()[-1] == place


def test_an_error_of_the_package_itself_is_our_bug(monkeypatch):
    monkeypatch.setattr("grpo_replay.cli.plan_command.run", int)  # raises TypeError
    found = call("plan")
    assert found.exit_code == 1
    assert found.stderr.endswith("a bug in grpo-replay: please report it with the lines above.\n")


def test_gpu_memory_without_a_dry_run():
    refused(call("train", "tiny", "--gpu-memory-gib", "80"), 2, "--gpu-memory-gib", "--dry-run")


def test_an_output_directory_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    result = call("train", "tiny", *TINY, "--output-dir", tmp_path / "file" / "run")
    refused(result, 3, "cannot be written", "file/run")


def test_a_connection_error_of_a_single_process_is_not_a_lost_rank(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("grpo_replay.cli.plan_command.run", refuse)
    result = call("plan")
    assert result.exit_code == 1
    assert "ConnectionRefusedError" in result.stderr and "lost contact" not in result.stderr


def test_evaluating_another_model_than_the_checkpoint():
    result = call("eval", "--ckpt", "builtin:tiny", "--set", "model.path=other")
    refused(result, 2, "model.path", "--ckpt")


def test_an_unknown_model(tmp_path):
    result = call("train", "tiny", *TINY, "--output-dir", tmp_path / "run",
                  "--set", f"model.path={tmp_path}/nowhere")  # fmt: skip
    refused(result, 3, "nowhere")


def test_evaluating_a_folder_without_a_checkpoint(tmp_path):
    refused(call("eval", "--ckpt", tmp_path, "--benchmark", "tiny"), 3, str(tmp_path))


def test_evaluating_an_unknown_benchmark(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(call("eval", "--ckpt", "builtin:tiny", "--benchmark", "nosuch"), 2, "nosuch", "math500")
    assert not list(tmp_path.iterdir())


def test_eval_without_a_checkpoint():
    refused(call("eval"), 2, "--ckpt", "--compare")


@pytest.mark.parametrize("content", [b"", b"PAR1 is how it starts", b"PAR1" + bytes(64) + b"PAR1"])
def test_inspecting_a_file_that_is_not_a_snapshot(tmp_path, content):
    path = tmp_path / "buffer.parquet"
    path.write_bytes(content)
    refused(call("inspect-buffer", path), 3, "buffer.parquet")


def test_inspecting_a_folder_that_is_not_a_run(tmp_path):
    refused(call("inspect-buffer", tmp_path), 3, str(tmp_path))


def test_inspecting_a_missing_path(tmp_path):
    refused(call("inspect-buffer", tmp_path / "gone"), 3, "gone")


@pytest.mark.parametrize("reference", ["0,100", "20,0"])
def test_aes_with_a_zero_reference(reference):
    refused(call("aes", "--reference", reference, "--candidate", "ours=30,90"), 2, "0")


def test_aes_of_a_missing_file(tmp_path):
    refused(call("aes", "--reference", tmp_path / "none.json", tmp_path / "a.json"), 3, "none.json")


def test_a_plan_without_inputs():
    refused(call("plan"), 2, "--mu")


@pytest.mark.parametrize(
    "option, words",
    [
        ("--lr", "lr is optimizer.learning_rate here: --set optimizer.learning_rate=VALUE"),
        ("--num-generations", "--set sampling.group_size=VALUE"),
        ("--replay.ratio", "--set replay.ratio=VALUE"),
        ("--config", "The recipe is an argument without a name"),
    ],
)
def test_an_option_of_another_trainer_is_answered_with_ours(option, words):
    done = CliRunner().invoke(app, ["train", "tiny", option, "1"], env={"COLUMNS": "300"})
    assert done.exit_code == 2 and words in " ".join(done.output.split())


def test_wrong_options_are_usage_errors():
    assert call("train").exit_code == 2
    assert call("train", "tiny", "--nosuch").exit_code == 2
    assert call("nosuch").exit_code == 2


def ended_unread(*words):
    """Exit code and stderr of a command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys; from grpo_replay.cli.app import main; sys.argv = {['x', *words]!r}; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_output_that_nobody_reads_is_no_error(form):
    words = ["aes", "--reference", "1,2", "--candidate", "a=1,2", *form]
    assert ended_unread(*words) == (0, "")


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch):
    def refuse(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("grpo_replay.cli.plan_command.run", refuse)
    result = call("plan")
    assert result.exit_code == 1 and "BrokenPipeError" in result.stderr
