"""A run that someone else made may name code: it is named before it runs, and `--no-code` refuses
it. The code leaves a mark when it runs."""

import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.cli.foreign_code import code_of
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.stored_recipe import write_recipe

PLANTED = """
from pathlib import Path
Path(__file__).with_name("mark").touch()

def priority(columns):
    return columns["advantage"] ** 2
priority.columns = ("advantage",)

def reward(completion, answer, row):
    return 1.0
"""


@pytest.fixture
def foreign(runs, tmp_path) -> Path:
    """A copy of a run whose recipe names a file beside it."""
    return planted_in(runs["ours"], tmp_path)


def planted_in(run: Path, folder: Path) -> Path:
    copy, planted = folder / "run", folder / "planted.py"
    shutil.copytree(run, copy, symlinks=True)
    planted.write_text(PLANTED)
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text())
    recipe["replay"]["priority"] = f"{planted}:priority"
    recipe["reward"]["function"] = f"{planted}:reward"
    (copy / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return copy


def invoke(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def commands(run: Path) -> dict[str, tuple[object, ...]]:
    return {
        "train": ("train", "--resume", "--output-dir", run),
        "dry run": ("train", "--resume", "--output-dir", run, "--dry-run"),
        "inspect": ("inspect-buffer", run),
        "verify": ("inspect-buffer", run, "--verify"),
        "what if": ("inspect-buffer", run, "--what-if", "replay.ratio=0.5"),
    }


def test_no_code_refuses_the_code_of_a_run_before_it_runs(foreign):
    for words in commands(foreign).values():
        done = invoke(*words, "--no-code")
        assert done.exit_code == 2, done.output
        assert "--no-code" in done.stderr and "planted.py" in done.stderr
        assert not (foreign.parent / "mark").exists()


@pytest.mark.parametrize("name", ["inspect", "dry run"])
def test_the_code_of_a_run_is_named_before_it_runs(foreign, name):
    done = invoke(*commands(foreign)[name])
    named = f"brings code that will run: reward.function {foreign.parent}/planted.py:reward"
    expected = named if name == "dry run" else f"replay.priority {foreign.parent}/planted.py"
    assert expected in done.stderr


def test_what_the_command_line_names_is_the_users_own(foreign):
    run = ("train", "--resume", "--dry-run", "--no-code", "--output-dir", foreign)
    own = f"{foreign.parent}/planted.py"
    chosen = ("--set", "replay.priority=uniform", "--set", f"reward.function={own}:reward")
    assert "--no-code" not in invoke(*run, *chosen).stderr
    assert "replay.priority" in invoke(*run, *chosen[2:]).stderr


@pytest.mark.slow
def test_an_evaluation_refuses_the_code_of_the_run(ours_run, tmp_path):
    run = planted_in(ours_run.path, tmp_path)
    words = ("eval", "--ckpt", run, "--benchmark", "tiny_add", "--output", tmp_path / "out.json")
    done = invoke(*words, "--no-code")
    assert done.exit_code == 2 and f"reward.function {tmp_path}/planted.py" in done.stderr
    assert not (tmp_path / "mark").exists()


def test_every_kind_of_code_is_found(tmp_path):
    changes = {
        "model.trust_remote_code": "true",
        "sampling.backend": "mine:Sampler",
        "reward.function": "os:system",
        "advantage.estimator": "mine:f",
        "replay.priority": "mine:f",
        "loss.kind": "mine:f",
        "eval.reward": "mine.py:f",
        "sampling.vllm.worker_extension_cls": "evil.Worker",
    }
    words = [f"{key}={value}" for key, value in changes.items()]
    found = code_of(load_recipe("tiny", words))
    assert {line.partition(" ")[0] for line in found} == set(changes)
    assert len(found) == len(changes)
    assert code_of(load_recipe("tiny", words), overrides=words) == []
    assert code_of(load_recipe("tiny")) == []
    path = tmp_path / "theirs.yaml"
    write_recipe(path, load_recipe("tiny", ["loss.kind=mine:f"]))
    done = invoke("train", path, "--dry-run", "--no-code")
    assert done.exit_code == 2 and "loss.kind mine:f" in done.stderr
