"""Cells as processes: started, followed, stopped and continued. The trainer is a stand-in that ends
at once; `test_real_sweep.py` has the real one."""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.lab.sweep import cell_processes as processes
from grpo_replay.lab.sweep import sweep_run
from grpo_replay.recipe import load_recipe
from grpo_replay.storage.run_directory import RunDirectory

SWEEP = """
name: s
recipe: tiny
set: [run.steps=25]
arms: {grpo: [replay.preset=grpo], ours: [replay.preset=ours]}
seeds: [5, 6]
"""


class Trainer:
    """The process of a cell. It writes a run's recipe and, unless it is to fail, its summary. Those
    that run on get SIGTERM sent to this process once, and end two polls after their own signal."""

    better: str | None = None  # what the names of better cells hold
    fails: tuple[str, ...] = ()
    runs_on: tuple[str, ...] = ()
    started: "list[Trainer]" = []  # noqa: RUF012
    is_asked = False
    pid, polls = 1, 0

    def __init__(self, words, env, stderr, **_) -> None:
        self.words, self.env, self.code, self.signals = words, env, 0, []
        self.log = Path(stderr.name)
        self.name = env["WANDB_NAME"].removeprefix("out/")
        self.started.append(self)
        run = RunDirectory(Path(words[words.index("--output-dir") + 1]))
        if "--resume" not in words:
            overrides = [after for word, after in itertools.pairwise(words) if word == "--set"]
            run.create(load_recipe("tiny", overrides))
        if self.name in self.fails:
            self.code = 3
        elif self.name in self.runs_on:
            self.code = None
        else:
            mean = 0.9 if self.better and self.better in self.name else 0.5
            summary = {"steps": 25, "wall_seconds": 1, "final": {"mean": mean}}
            run.summary_path.write_text(json.dumps(summary))

    def poll(self) -> int | None:
        if self.code is None and not Trainer.is_asked:
            Trainer.is_asked = True
            os.kill(os.getpid(), signal.SIGTERM)
        if len(self.signals) and self.code is None:
            self.polls += 1
            self.code = 130 if self.polls > 2 else None
        if self.code == 3:
            with self.log.open("a") as log:
                log.write("a line before it\nerror: the first line of a message\nmore lines\n")
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs the sweep."""
    (tmp_path / "s.yaml").write_text(SWEEP)
    monkeypatch.setattr(processes.subprocess, "Popen", Trainer)
    monkeypatch.setattr(sweep_run, "POLL_SECONDS", 0.0)
    Trainer.fails, Trainer.runs_on, Trainer.started, Trainer.is_asked = (), (), [], False
    Trainer.better = None
    words = ["sweep", str(tmp_path / "s.yaml"), "--output-dir", str(tmp_path / "out")]
    return lambda *options: CliRunner().invoke(app, [*words, "--jobs", "2", *options])


def test_cells_run_in_turn_finished_ones_are_skipped_and_one_bad_does_not_stop_the_rest(sweep):
    Trainer.fails = ("ours/seed-5",)
    first = sweep()
    assert first.exit_code == 3
    assert "failed: ours/seed-5: the first line of a message (see " in first.stderr
    order = [trainer.name for trainer in Trainer.started]
    assert order == ["grpo/seed-5", "ours/seed-5", "grpo/seed-6", "ours/seed-6"]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert {trainer.env["OMP_NUM_THREADS"] for trainer in Trainer.started} == {threads}

    Trainer.fails = ()
    assert sweep().exit_code == 0
    (again,) = Trainer.started[4:]
    assert again.name == "ours/seed-5" and "--resume" in again.words
    assert again.words[:5] == [sys.executable, "-P", "-m", processes.ENTRY, str(os.getpid())]
    assert "4 of 4 cells are done already" in sweep().stderr


def test_sigterm_stops_the_cells_once_and_the_same_command_continues(sweep):
    Trainer.runs_on = ("grpo/seed-5", "ours/seed-5")
    first = sweep()
    assert first.exit_code == 130 and "4 cells: 2 interrupted, 2 waiting" in first.stdout
    assert [trainer.signals for trainer in Trainer.started] == [[signal.SIGTERM]] * 2
    Trainer.runs_on = ()
    assert sweep().exit_code == 0
    resumed = [trainer.name for trainer in Trainer.started if "--resume" in trainer.words]
    assert resumed == ["grpo/seed-5", "ours/seed-5"] and len(Trainer.started) == 6


TUNED = """
name: s
recipe: tiny
set: [run.steps=25]
arms: {grpo: [replay.preset=grpo], ours: [replay.preset=ours]}
tune: {seeds: [1], grid: {optimizer.learning_rate: [2.0e-4]}}
seeds: [5]
"""


def test_a_wider_grid_that_chooses_anew_fails_its_arm_alone_and_keeps_the_choice_of_its_runs(
    sweep, tmp_path, monkeypatch
):
    file, out = tmp_path / "s.yaml", tmp_path / "out"
    file.write_text(TUNED.replace("ours: [replay.preset=ours]", "").replace(", }", "}"))
    assert sweep().exit_code == 0
    chosen = json.loads((out / "chosen.json").read_text())["arms"]["grpo"]
    file.write_text(TUNED.replace("2.0e-4", "2.0e-4, 1.0e-4"))
    Trainer.better = "learning_rate=0.0001"
    wider = sweep()
    assert wider.exit_code == 3
    assert "failed: grpo/seed-5: tuning chose learning_rate=0.0001, but " in wider.stderr
    assert "out/grpo/seed-5 is a run of another recipe: optimizer.learning_rate" in wider.stderr
    assert "5 done, 1 failed" in wider.stdout or "1 failed, 5 done" in wider.stdout
    arms = json.loads((out / "chosen.json").read_text())["arms"]
    assert arms["grpo"] == chosen and arms["ours"]["set"] == ["optimizer.learning_rate=0.0001"]
    printed = sweep("--print")
    assert printed.exit_code == 0 and "failed: grpo/seed-5" in printed.stderr


def test_a_sweep_that_is_refused_leaves_its_folder_as_it_was(sweep, tmp_path):
    assert sweep().exit_code == 0
    before = (tmp_path / "out/sweep.yaml").read_bytes()
    (tmp_path / "s.yaml").write_text(SWEEP.replace("preset=ours", "ratio=0.5"))
    refused = sweep("--print")
    assert refused.exit_code == 3 and "run of another recipe: replay.ratio" in refused.stderr
    assert (tmp_path / "out/sweep.yaml").read_bytes() == before
