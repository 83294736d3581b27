"""What is in the working folder stands for no module of Python or of a library, and its files are
still found as reward functions."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shadowing import write_shadowing_files

import grpo_replay
from grpo_replay.distributed.environment import import_path
from grpo_replay.named_functions import has_module, load_function, source_text
from grpo_replay.recipe import RewardSection, TrackingSection
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.storage.tracking import missing_trackers

SHORT = [
    f"--set={each}"
    for each in (
        "run.steps=1", "replay.preset=grpo", "sampling.prompts_per_step=4", "eval.benchmarks=[]",
        "tracking.report_to=[]", "reward.function=own_reward:score",
    )
]  # fmt: skip
REWARD = """
import beside


def score(completion):
    import random, secrets, types

    return float(beside.ONE)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder: a reward function, and files of the names of other modules."""
    folder = write_shadowing_files(tmp_path / "work")
    (folder / "own_reward.py").write_text(REWARD)
    (folder / "beside.py").write_text("ONE = 1")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


@pytest.mark.slow
def test_two_ranks_start_in_such_a_folder_and_find_its_reward_function(folder):
    command = [str(Path(sys.executable).with_name("grpo-replay")), "train", "tiny"]
    words = ["--num-processes", "2", "--output-dir", "out", *SHORT]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (line,) = (folder / "out/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["reward"] == 1.0


def test_as_a_module_the_package_leaves_such_files_alone(folder):
    (folder / "types.py").unlink()  # Python itself imports it before any program runs
    words = ["aes", "--reference", "1,2", "--candidate", "a=1,2", "--json"]
    command = [sys.executable, "-m", "grpo_replay", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("place", ["own_reward:score", "own_reward.py:score"])
def test_a_reward_function_imports_its_neighbours_and_pythons_own_modules(folder, place):
    with RewardScorer.open(RewardSection(function=place, workers=1)) as scorer:
        (verdict,) = scorer.score([("a completion", "1", {})])
    assert verdict.reward == 1.0, verdict


def test_a_file_of_the_name_of_a_module_does_not_take_its_place(folder):
    for name in ("colorsys", "pandas"):
        (folder / f"{name}.py").write_text("def f():\n    return 'of the user'\n")
        assert load_function(f"{folder / name}.py:f")() == "of the user"
        assert "of the user" in source_text(f"{folder / name}.py:f")
        found = importlib.util.find_spec(name)
        assert found is not None and not str(found.origin).startswith(str(folder))


def test_the_working_folder_comes_last_and_may_be_gone(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", str(folder), "/lib"])
    assert import_path() == {"PYTHONPATH": f"/lib:{folder}"}
    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert import_path() == {"PYTHONPATH": f"{folder}:/lib"}


def test_every_python_that_the_package_starts_leaves_such_files_alone():
    package = Path(grpo_replay.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    assert sum('"-m"' in text for text in texts) == 1  # in PYTHON_MODULE
    starting = [text for text in texts if "*PYTHON_MODULE" in text]
    assert len(starting) == 5  # ranks, verifiers, collector, cells, servers
    assert all("import_path()" in text for text in starting)


def test_an_empty_folder_of_the_name_of_a_package_is_not_the_package(folder, monkeypatch):
    """wandb leaves a folder `wandb/` where it ran."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    names = [name for name in ("wandb", "trackio", "vllm", "no_such") if not has_module(name)]
    assert "no_such" in names
    for name in names:
        (folder / name).mkdir()
        assert importlib.util.find_spec(name) is not None  # what Python takes for a package
        assert not has_module(name)
    assert has_module("numpy") and has_module("json")


def test_a_tracker_of_which_only_a_folder_is_there_is_named_before_the_run(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    for name in ("wandb", "trackio"):
        if not has_module(name):
            (folder / name).mkdir()
            (found,) = missing_trackers(TrackingSection(report_to=[name]))
            assert f"pip install 'grpo-replay[{name}]'" in found
