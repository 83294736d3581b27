"""A run that is asked to stop saves first, whatever asks; what it did not wait for is made up."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from small_runs.trained import FinishedRun, Listener, small_recipe
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.cli.run_display import RunDisplay
from grpo_replay.distributed.failures import PeerFailure
from grpo_replay.errors import ServersLost
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.stop import StopToken
from grpo_replay.storage.checkpoint import (
    RunState,
    find_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from grpo_replay.terminal.console import GuardedStream
from grpo_replay.training import Observer, run_evaluation
from grpo_replay.training.run import Run, RunResult, run_training

PLAIN = {"replay": {"preset": "grpo"}, "run": {"steps": 4}}
EVALUATED = {
    **PLAIN,
    "eval": {"benchmarks": ["tiny_add"], "max_problems": 4, "samples": 1, "every_steps": 2,
             "reward": "minerva", "temperature": 1.0},
}  # fmt: skip


def train(
    path: Path, observer: Observer | None = None, resume=False, stop=None, **sections
) -> RunResult:
    given = small_recipe(**sections), path, resume, observer or Observer()
    return run_training(*given, stop=stop)


def test_a_signal_is_a_request_to_save_and_stop(tmp_path, processes, caplog):
    with caplog.at_level(logging.WARNING, "grpo_replay.training.run"):
        ask = Listener({1: lambda: os.kill(os.getpid(), signal.SIGTERM)})
        result = train(tmp_path / "run", ask, **PLAIN)
    # The record of step 1 comes after the question whether to stop: step 2 is the last.
    assert (result.interrupted, result.step) == (True, 2)
    assert find_checkpoint(tmp_path / "run" / "checkpoints").name == "step_000002"
    (line,) = [each.message for each in caplog.records if "stopping" in each.message]
    assert "SIGTERM" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_each_signal_is_heard_and_a_second_ctrl_c_stops(number, capfd):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("these tests run under nohup")
    stop = StopToken()
    stop.can_save = True
    with stop.on_signals():
        os.kill(os.getpid(), number)
        assert stop.requested and stop.reason == number.name
        assert ("Ctrl-C again" in capfd.readouterr().err) == (number == signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopToken()
        with stop.on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_output_is_a_request_to_save_and_stop(tmp_path, processes, caplog):
    """What `grpo-replay train … 2>&1 | head -2` does: the reader goes after two lines."""
    reading, writing = os.pipe()
    stream, stop = GuardedStream(os.fdopen(writing, "w", buffering=1)), StopToken()
    stream.on_lost = lambda: stop.request("its closed output")
    display = RunDisplay(Console(file=stream))
    os.close(reading)
    with caplog.at_level(logging.WARNING, "grpo_replay.training.run"), display:
        result = train(tmp_path / "run", display, stop=stop, **PLAIN)
        display.conclude(result)
    assert (result.interrupted, result.step) == (True, 1)
    assert find_checkpoint(tmp_path / "run" / "checkpoints").name == "step_000001"
    assert "its closed output" in caplog.text
    stream.flush()  # as Python does when it ends
    stream.close()


def test_sigterm_before_there_is_a_run_interrupts(tmp_path, monkeypatch):
    def told_to_stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr("grpo_replay.training.run.run_training", told_to_stop)
    words = ["train", "tiny", "--output-dir", str(tmp_path / "run")]
    assert CliRunner().invoke(app, words).exit_code == 130


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_hears_what_ended_the_source_of_rank_0(rank):
    """The others would report an interruption, and wait for rank 0 in vain."""
    lost = ["no server is left", 4]
    run = SimpleNamespace(
        stop=StopToken(), state=RunState(), recipe=small_recipe(), _evaluate_pending=lambda: False,
        comm=SimpleNamespace(
            rank=rank, all_gather=lambda mine: [mine, None] if rank == 0 else [lost, mine]
        ),
    )  # fmt: skip
    if rank == 0:
        run.stop.end(ServersLost("no server is left"))
    with pytest.raises(PeerFailure if rank else ServersLost, match="no server is left") as heard:
        Run.train(run)
    assert heard.value.exit_code == 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory, processes) -> FinishedRun:
    """Evaluated at the start, after step 2 and at the end, and never stopped."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert not train(path, **EVALUATED).interrupted
    return FinishedRun(path, None)


def stop_during_the_evaluation(monkeypatch, at_step: int) -> None:
    evaluate = run_evaluation.evaluate

    def stopped(*arguments, model, **options):
        if model["step"] == at_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments, model=model, **options)

    monkeypatch.setattr(run_evaluation, "evaluate", stopped)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 2])
def test_a_stop_does_not_wait_for_an_evaluation_and_the_resume_makes_it_up(
    whole, tmp_path, monkeypatch, step
):
    stop_during_the_evaluation(monkeypatch, step)
    result = train(tmp_path / "run", **EVALUATED)
    assert (result.interrupted, result.step) == (True, step)
    assert not (tmp_path / "run" / "eval" / f"step_{step:06d}.json").exists()
    found = find_checkpoint(tmp_path / "run" / "checkpoints")
    assert found.name == f"step_{step:06d}" if step else found is None
    monkeypatch.undo()

    result = train(tmp_path / "run", resume=True, **EVALUATED)
    assert not result.interrupted and result.summary["base"] and result.summary["final"]
    resumed = FinishedRun(tmp_path / "run", None)
    assert resumed.timeless_metrics == whole.timeless_metrics
    assert [list(line) for line in resumed.metrics] == [list(line) for line in whole.metrics]
    assert "eval/mean" in resumed.metrics[1] and "eval/mean" in resumed.metrics[3]
    checkpoints = list_checkpoints(resumed.path / "checkpoints")
    assert len(checkpoints) == (2 if step == 2 else 1)
    for each in checkpoints:
        verify_checkpoint(each)
        assert "| mean |" in (each / "model" / "README.md").read_text()
    for each in (0, 2, 4):
        ours, theirs = (
            json.loads((run.path / f"eval/step_{each:06d}.json").read_text())["benchmarks"]
            for run in (resumed, whole)
        )
        assert ours == theirs


def test_the_base_stays_in_the_summary_when_the_evaluation_was_changed(whole, tmp_path):
    path = shutil.copytree(whole.path, tmp_path / "run", symlinks=True)
    changed = {**EVALUATED, "run": {"steps": 5}}
    changed["eval"] = {**EVALUATED["eval"], "temperature": 0.5}
    summary = train(path, resume=True, **changed).summary
    assert summary["base"]["mean"] is not None and summary["comparable"] is False
    before = json.loads((whole.path / "summary.json").read_text())
    assert before["comparable"] is True and before["base"] == summary["base"]


@pytest.mark.slow
def test_the_command_itself_saves_exits_130_and_goes_on(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "grpo_replay", "train", "tiny", "--output-dir", str(run)]
    short = ["run.steps=400", "replay.preset=grpo", "eval.benchmarks=[]", "tracking.report_to=[]"]
    for word in short:
        command += ["--set", word]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "--resume" in printed
    step = json.loads((run / "checkpoints/latest/state.json").read_text())["step"]
    assert 0 < step == len(metrics.read_text().splitlines()) < 400
    command = [
        *(sys.executable, "-m", "grpo_replay", "train", "--resume"),
        *("--output-dir", str(run), "--set", f"run.steps={step + 5}"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    report = verify_run(run)
    assert report.passed and report.steps == step + 5
