"""A run that is asked to stop saves first, whatever asks; what it did not wait for is made up."""

import errno
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from small_runs.experiments import Size, evaluation
from small_runs.trained import FinishedRun, small_recipe
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.cli.train_command import RunDisplay, describe_stop, result_table
from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import Interruption
from grpo_replay.distributed.launch import _conclude
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.storage.checkpoint import (
    MODEL_CARD,
    RunState,
    find_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)
from grpo_replay.terminal.console import GuardedStream
from grpo_replay.training import Observer, run_evaluation
from grpo_replay.training.run import RunResult, run_training
from grpo_replay.training.run_evaluation import NOT_EVALUATED, RunEvaluation
from grpo_replay.training.trainer import Trainer

PLAIN = {"replay": {"preset": "grpo"}, "run": {"steps": 4}}
EVALUATED = {
    **PLAIN,
    "eval": {"benchmarks": ["tiny_add"], "max_problems": 4, "samples": 1, "every_steps": 2,
             "reward": "minerva", "temperature": 1.0},
}  # fmt: skip


def train(path: Path, observer: Observer | None = None, resume=False, **sections) -> RunResult:
    return run_training(small_recipe(**sections), path, resume, observer or Observer())


class After(Observer):
    """Does something once, after a step."""

    def __init__(self, step: int, action) -> None:
        self._step, self._action = step, action

    def on_step(self, metrics) -> None:
        if metrics["step"] == self._step:
            self._action()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_a_request_to_save_and_stop(tmp_path, processes, caplog, number):
    with caplog.at_level(logging.WARNING, "grpo_replay.training.run"):
        result = train(tmp_path / "run", After(1, lambda: os.kill(os.getpid(), number)), **PLAIN)
    # The record of step 1 comes after the question whether to stop: step 2 is the last.
    assert (result.interrupted, result.step) == (True, 2)
    assert find_checkpoint(tmp_path / "run" / "checkpoints").name == "step_000002"
    (line,) = [each.message for each in caplog.records if "stopping" in each.message]
    assert number.name in line


def test_ctrl_c_is_answered_at_once_and_a_second_one_stops(capfd):
    interruption = Interruption()
    with interruption.caught():
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.requested
        assert "stopping after this step, with a checkpoint; Ctrl-C again" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interruption = Interruption()
        with interruption.caught():
            os.kill(os.getpid(), signal.SIGHUP)
        assert not interruption.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_output_is_a_request_to_save_and_stop(tmp_path, processes, caplog):
    """What `grpo-replay train … 2>&1 | head -2` does: the reader goes after two lines."""
    reading, writing = os.pipe()
    stream = GuardedStream(os.fdopen(writing, "w", buffering=1))
    display = RunDisplay(Console(file=stream), stream)
    os.close(reading)
    with caplog.at_level(logging.WARNING, "grpo_replay.training.run"), display:
        result = train(tmp_path / "run", display, **PLAIN)
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
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted\n")


def test_other_errors_of_the_output_are_not_swallowed():
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        GuardedStream(Full()).write("line\n")


def test_an_interrupted_run_names_the_command_that_continues_it():
    text = describe_stop(RunResult(Path("runs/my run"), 7, True, None))
    assert "after step 7" in text
    assert text.endswith("grpo-replay train --resume --output-dir 'runs/my run'")
    assert "nothing to save" in describe_stop(RunResult(Path("runs/x"), 0, True, None))


def test_a_rank_that_the_agent_stopped_while_it_ended_does_not_hide_the_interruption():
    assert _conclude({0: 130, 1: -signal.SIGTERM}, [], interrupted=False) == 130


@pytest.fixture(scope="module")
def whole(tmp_path_factory, processes) -> FinishedRun:
    """Evaluated at the start, after step 2 and at the end, and never stopped."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert not train(path, **EVALUATED).interrupted
    return FinishedRun(path, None)


def stop_before_an_evaluation(monkeypatch, at_step: int) -> None:
    step = Trainer.train_step

    def then_stop(self, *arguments):
        metrics = step(self, *arguments)
        if self.state.step == at_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics

    monkeypatch.setattr(Trainer, "train_step", then_stop)


def stop_during_an_evaluation(monkeypatch, at_step: int) -> None:
    evaluate = run_evaluation.evaluate

    def stopped(*arguments, model, **options):
        asked = []

        def after_one_completion():
            asked.append(1)
            if model["step"] == at_step and len(asked) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return options["should_stop"]()

        given = {**options, "should_stop": after_one_completion}
        return evaluate(*arguments, model=model, **given)

    monkeypatch.setattr(run_evaluation, "evaluate", stopped)


MOMENTS = {
    "before": (stop_before_an_evaluation, 2),
    "during": (stop_during_an_evaluation, 2),
    "during the last": (stop_during_an_evaluation, 4),
    "during the base model's": (stop_during_an_evaluation, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stop_does_not_wait_for_an_evaluation_and_the_resume_makes_it_up(
    whole, tmp_path, monkeypatch, moment
):
    stop, step = MOMENTS[moment]
    stop(monkeypatch, step)
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


def test_a_model_card_that_a_kill_left_without_the_evaluation_is_made_up(whole, tmp_path):
    path = shutil.copytree(whole.path, tmp_path / "run", symlinks=True)
    last = find_checkpoint(path / "checkpoints")
    (last / MODEL_CARD).write_text(f"# a card\n{NOT_EVALUATED}\n")
    train(path, resume=True, **EVALUATED)
    verify_checkpoint(last)
    assert "| mean |" in (last / MODEL_CARD).read_text()


def test_a_damaged_evaluation_is_left_out_and_stops_nothing(whole, tmp_path, caplog):
    path = shutil.copytree(whole.path, tmp_path / "run", symlinks=True)
    (path / "eval" / "step_000000.json").write_text("{")
    observer, told = Observer(), []
    observer.on_notice = told.append
    summary = train(path, observer, resume=True, **{**EVALUATED, "run": {"steps": 6}}).summary
    assert summary["base"] is None and summary["final"]["mean"] is not None
    (notice,) = [each for each in told if "left out of the summary" in each]
    assert "step_000000.json" in notice
    assert "left out of the summary" in caplog.text and "step_000000.json" in caplog.text
    assert find_checkpoint(path / "checkpoints").name == "step_000006"


def test_the_base_stays_in_the_summary_when_the_evaluation_was_changed(whole, tmp_path):
    path = shutil.copytree(whole.path, tmp_path / "run", symlinks=True)
    changed = {**EVALUATED, "run": {"steps": 5}}
    changed["eval"] = {**EVALUATED["eval"], "temperature": 0.5}
    summary = train(path, resume=True, **changed).summary
    assert summary["base"]["mean"] is not None and summary["comparable"] is False
    before = json.loads((whole.path / "summary.json").read_text())
    assert before["comparable"] is True and before["base"] == summary["base"]
    changes = (
        list(result_table(before).columns[3].cells),
        list(result_table(summary).columns[3].cells),
    )
    assert all(changes[0]) and not any(changes[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGHUP", "closed pipe"])
def test_the_command_itself_saves_and_exits_130(tmp_path, how):
    command = [
        sys.executable, "-m", "grpo_replay", "train", "tiny", "--output-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    for word in ("run.steps=400", "eval.benchmarks=[]", "tracking.report_to=[]"):
        command += ["--set", word]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    if how == "SIGHUP":
        reader = threading.Thread(target=process.stdout.read)
        reader.start()
        process.send_signal(signal.SIGHUP)
    else:
        process.stdout.close()
    assert process.wait(timeout=120) == 130
    state = json.loads((tmp_path / "run/checkpoints/latest/state.json").read_text())
    step = state["step"]
    assert 0 < step == len(metrics.read_text().splitlines()) < 400
    assert "stopping, asked by" in (tmp_path / "run/log/attempt_001.log").read_text()
    command = [
        *(sys.executable, "-m", "grpo_replay", "train", "--resume"),
        *("--output-dir", str(tmp_path / "run"), "--set", f"run.steps={step + 25}"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    report = verify_run(tmp_path / "run")
    assert report.passed and report.steps == step + 25
    assert [path.name for path in (tmp_path / "run/recipes").iterdir()] == [f"step_{step:06d}.yaml"]


def test_an_evaluation_that_is_there_is_read_without_its_completions(tmp_path):
    written = evaluation(0.5, Size(), np.random.default_rng(0))
    written.write(tmp_path / "eval" / "step_000003.json")
    (samples,) = (tmp_path / "eval").glob("*.parquet")
    samples.write_bytes(b"not read")
    run_dir = SimpleNamespace(path=tmp_path)
    parts = SimpleNamespace(recipe=small_recipe(), comm=Comm(), run_dir=run_dir)
    found = RunEvaluation(parts, RunState(), object(), Observer()).evaluate(3, lambda: False)
    assert found.sampled == written.sampled and found.samples is None
