"""Signals to an asynchronous run and to its servers: what is killed leaves nothing behind, what is
resumed is the run that its journal describes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_policy_server import FakePolicyServer
from server_helpers import wait_for
from small_runs.asynchronous import async_recipe, replay_run, written_steps
from small_runs.trained import FinishedRun, same_weights

from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import recipe_to_yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SUPPORT = Path(__file__).parents[1] / "support"
SECTIONS = {"checkpoint": {"every_steps": 3, "keep": 3}, "run": {"steps": 12}}


@pytest.fixture
def server() -> Iterator[FakePolicyServer]:
    fake = FakePolicyServer(seconds=0.05)
    yield fake
    fake.stop()


def start(folder: Path, urls: list[str], **sections) -> subprocess.Popen:
    words = ["-m", "small_runs.asynchronous", str(folder)]
    settings = json.dumps({"urls": urls, **SECTIONS, **sections})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "output").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *words, settings], cwd=SUPPORT, stdout=output, stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])},
        )  # fmt: skip


def family(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def all_gone(members: list[psutil.Process], seconds: float) -> bool:
    return wait_for(lambda: not any(each.is_running() for each in members), seconds)


def finished(folder: Path, server: FakePolicyServer) -> FinishedRun:
    return FinishedRun(folder, async_recipe([server.url], SECTIONS))


def test_a_run_killed_twice_is_the_run_of_its_journal(server, tmp_path, processes):
    chance = random.Random(1)
    folder = tmp_path / "run"
    for _ in range(2):
        run = start(folder, [server.url])
        goal = written_steps(folder) + chance.randint(1, 3)
        assert wait_for(lambda goal=goal: written_steps(folder) >= goal, 200)
        time.sleep(chance.uniform(0, 0.5))
        members = family(run)
        run.kill()
        run.wait()
        assert all_gone(members, 60), "the collector or a verifier outlived its trainer"
    run = start(folder, [server.url])
    assert run.wait(300) == 0, (tmp_path / "output").read_text()[-3000:]
    done = finished(folder, server)
    assert [line["step"] for line in done.metrics] == list(range(1, 13))
    assert verify_run(folder).passed
    assert same_weights(done.weights(), replay_run(done, tmp_path / "again").weights())


def test_sigterm_in_a_wait_ends_it_with_a_checkpoint_and_no_process(server, tmp_path, processes):
    folder = tmp_path / "run"
    run = start(folder, [server.url])
    assert wait_for(lambda: written_steps(folder) >= 2, 200)
    server.seconds = 60.0  # the next step waits for completions
    time.sleep(2)
    step, members = written_steps(folder), family(run)
    run.send_signal(signal.SIGTERM)
    assert run.wait(40) == 0
    assert all_gone(members, 60)
    assert (folder / f"checkpoints/step_{step:06d}").is_dir()
    assert not (folder / "summary.json").exists()
    server.seconds = 0.05
    assert start(folder, [server.url]).wait(300) == 0
    done = finished(folder, server)
    assert verify_run(folder).passed
    assert same_weights(done.weights(), replay_run(done, tmp_path / "again").weights())


def test_two_trainer_ranks_train_and_repeat_the_same_run(server, tmp_path):
    """Rank 0 alone talks to the collector; the other takes part in updates and weight gathers."""
    sections = {"engine": {"num_processes": 2, "zero_stage": 3}, "run": {"steps": 5}}
    recipe = async_recipe([server.url], sections)
    collection = {"replay_journal": str(tmp_path / "run")}
    again = async_recipe([server.url], sections, {"sampling": {"collection": collection}})
    for name, each in (("run", recipe), ("again", again)):
        (tmp_path / f"{name}.yaml").write_text(recipe_to_yaml(each))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "grpo_replay", "train", str(tmp_path / f"{name}.yaml")),
                *("--output-dir", str(tmp_path / name)),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    first, second = FinishedRun(tmp_path / "run", recipe), FinishedRun(tmp_path / "again", again)
    assert len(first.metrics) == 5
    assert verify_run(first.path).passed
    assert same_weights(first.weights(), second.weights())
