"""Bad input at the command line: one clear message on stderr, the right exit code, no traceback."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app

ROOT = Path(__file__).resolve().parents[2]


def call(*arguments):
    return CliRunner().invoke(app, [str(word) for word in arguments])


def refused(result, code, *words):
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert sum(line.startswith("error: ") for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


@pytest.mark.parametrize(
    "line, code, word",
    [
        ("train tinny", 2, "did you mean 'tiny'?"),
        ("train tiny --set replay.rato=1", 2, "unknown key 'replay.rato' (did you mean 'ratio'?)"),
        ("train tiny --set run.steps=many", 2, "run.steps: Input should be a valid integer"),
        ("train tiny --set prompts.user_template=Solve", 2, "it must contain {problem}"),
        ("train tiny --set replay.capacity_rollouts=10", 2, "128"),
        ("train tiny --set run.steps=10", 2, "warmup_steps 20"),
        ("train tiny --set name=../../evil", 2, "without slashes"),
        ("train tiny --resume", 2, "--output-dir"),
        ("train", 2, "RECIPE"),
        ("train tiny --json", 2, "--dry-run"),
        ("train tiny --gpu-memory-gib 80", 2, "--dry-run"),
        ("eval", 2, "--ckpt"),
        ("eval --ckpt builtin:tiny --set model.path=other", 2, "--ckpt"),
        ("aes --reference 0,100 --candidate ours=30,90", 2, "0"),
        ("aes --reference 20,100 --candidate 30,90", 2, "expected NAME=ACC,TOKENS"),
        ("aes --reference none.json a.json", 3, "none.json"),
        ("plan", 2, "--mu"),
        ("plan --from-run gone", 3, "gone does not exist"),
        ("inspect-buffer gone", 3, "gone does not exist"),
        ("inspect-buffer RUM", 3, "(did you mean 'ours'?)"),
        ("eval --ckpt RUM", 3, "(did you mean 'ours'?)"),
        ("eval --compare gone.json gone.json", 3, "gone.json does not exist"),
        ("inspect-buffer RUN --step 99", 3, "no step 99; the run has steps 1 to 24"),
        ("inspect-buffer RUN --what-if run.steps=3", 2, "unknown key 'replay.run'"),
        ("report RUM", 3, "(did you mean 'ours'?)"),
    ],
)
def test_what_a_command_cannot_use_is_refused_in_one_line(
    line, code, word, runs, tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    places = {"RUN": runs["ours"], "RUM": runs["ours"].with_name("oursi")}
    words = [places.get(word, word) for word in line.split()]
    refused(call(*words), code, word)
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_a_recipe_beside_the_one_that_was_named_is_offered(tmp_path, monkeypatch):
    (tmp_path / "my-task.yaml").touch()
    monkeypatch.chdir(tmp_path)
    refused(call("train", "my_task.yaml"), 2, "(did you mean 'my-task.yaml'?)")


SWEEP = "name: s\nrecipe: tiny\narms:\n  a: []\n  b: [replay.ratio=1]\nseeds: [1]\n"


@pytest.mark.parametrize(
    "command, text, words",
    [
        ("train", "replay:\n  max_age: 5\n", ("'replay.max_age'", "'max_age_steps'")),
        ("train", "run:\n  steps: 5\n bad: [\n", ("f.yaml:3: not valid YAML",)),
        ("train", "run:\n  steps: 5\n  steps: 50\n", ("f.yaml:3", "'steps' is written twice")),
        ("sweep", SWEEP.replace("ratio", "ratoi"), ("arm b", "'replay.ratoi'", "'ratio'")),
        ("sweep", SWEEP + "tune: {seeds: [2], grid: {}}\n", ("tune.grid", "at least 1 item")),
    ],
)
def test_a_file_that_a_person_mistyped(command, text, words, tmp_path):
    (tmp_path / "f.yaml").write_text(text)
    refused(call(command, tmp_path / "f.yaml"), 2, *words)


def test_resuming_needs_a_run_or_the_recipe_of_one_that_never_began(tmp_path):
    unborn = tmp_path / "unborn"
    unborn.mkdir()
    (unborn / ".lock").touch()
    refused(call("train", "--resume", "--output-dir", unborn), 3, "RECIPE")
    for place in (tmp_path, tmp_path / "typo"):
        refused(call("train", "tiny", "--resume", "--output-dir", place), 3, "holds no run")
    checkpoint = tmp_path / "r/checkpoints/latest"
    words = (f"it is a checkpoint of the run {tmp_path / 'r'}",)
    refused(call("train", "tiny", "--resume", "--output-dir", checkpoint), 3, *words)


def test_a_file_that_is_no_parquet_file_is_not_called_damaged(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: tiny\n")
    refused(call("inspect-buffer", tmp_path / "recipe.yaml"), 3, "Parquet file, expected a buffer")


@pytest.mark.parametrize(
    "name, words", [("recipe.yaml", ("another run", "--resume")), ("thesis.tex", ("other files",))]
)
def test_a_folder_that_holds_something_else_is_refused(tmp_path, name, words):
    (tmp_path / name).write_text("name: other\n")
    refused(call("train", "tiny", "--output-dir", tmp_path), 3, *words)


def raising(monkeypatch, error: Exception):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("grpo_replay.cli.plan_command.run", fails)
    return call("plan")


def test_a_disk_that_is_full_is_not_our_bug(monkeypatch):
    full = OSError(28, "No space left on device", "somewhere/metrics.jsonl")
    refused(raising(monkeypatch, full), 3, "somewhere/metrics.jsonl", "No space left")


@pytest.mark.parametrize("module, extra", [("torch", "train"), ("zmq", "train"), ("peft", "lora")])
def test_a_module_of_an_extra_that_is_not_installed(monkeypatch, module, extra):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = extras["dependencies"] + [
        f"{line}; extra == '{name}'"
        for name, group in extras["optional-dependencies"].items()
        for line in group
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: lines)
    missing = ModuleNotFoundError(f"No module named '{module}.sub'", name=f"{module}.sub")
    refused(raising(monkeypatch, missing), 2, module, f"pip install 'grpo-replay[{extra}]'")


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'numpyy'", name="numpyy"),
        ConnectionRefusedError(111, "Connection refused"),
        BrokenPipeError(32, "Broken pipe"),
    ],
)
def test_other_errors_have_their_own_exit_code_and_name(monkeypatch, error):
    found = raising(monkeypatch, error)
    assert found.exit_code == 1 and type(error).__name__ in found.stderr


def test_an_error_in_code_that_is_no_part_of_the_package_names_its_line(monkeypatch):
    def fails(*_, **__):
        return {}["oops"]

    monkeypatch.setattr("grpo_replay.cli.plan_command.run", fails)
    found = call("plan")
    assert found.exit_code == 1 and "Traceback" in found.stderr
    line = fails.__code__.co_firstlineno + 1
    assert f"KeyError in {__file__} line {line}, fails" in found.stderr.splitlines()[-1]


def test_compiled_code_of_a_library_is_not_called_code_of_the_user(monkeypatch):
    def fails():
        exec(compile("raise TypeError", "pyarrow/error.pxi", "exec"))

    monkeypatch.setattr("grpo_replay.cli.plan_command.run", lambda _: fails())
    assert f"TypeError in {__file__}" in call("plan").stderr.splitlines()[-1]


def test_an_error_of_the_package_itself_is_our_bug(monkeypatch):
    monkeypatch.setattr("grpo_replay.cli.plan_command.run", int)  # raises TypeError
    found = call("plan")
    assert found.exit_code == 1
    assert "a bug in grpo-replay" in found.stderr.splitlines()[-1]


def test_output_that_nobody_reads_is_no_error():
    words = ["aes", "--reference", "1,2", "--candidate", "a=1,2"]
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "grpo_replay", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
