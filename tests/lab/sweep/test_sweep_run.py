"""Cells as processes: started, followed, stopped, killed and continued. The trainer is a stand-in
that writes a run's files in milliseconds; `test_real_sweep.py` has the real one."""

import json
import os
import signal
import sys
from contextlib import ExitStack

import pytest
from fake_sweep import CELLS, SWEEP, Sweep, wait_until, words_of

from grpo_replay.lab.sweep.cell_processes import Launcher
from grpo_replay.lab.sweep.cells import CellState, locked_log, note_start
from grpo_replay.lab.sweep.grid import expand
from grpo_replay.lab.sweep.sweep_file import SweepFile
from grpo_replay.lab.sweep.sweep_run import Observer, Status, StopRequests, SweepRun

GRID = "{optimizer.learning_rate: [5.0e-5, 1.0e-4, 2.0e-4]}"
TUNED = f"{SWEEP}tune: {{seeds: [1], grid: {GRID}}}"


def test_cells_run_in_turn_finished_ones_are_skipped_and_one_bad_does_not_stop_the_rest(tmp_path):
    sweep = Sweep(tmp_path, **{"ours/seed-5": {"fail": "the first line of a message"}})
    code, err = sweep.run(jobs=2)
    assert code == 3, err
    assert "failed: ours/seed-5: the first line of a message (see " in err
    assert "a line before it" not in err and "more lines" not in err
    for cell in ("grpo/seed-5", "grpo/seed-6", "ours/seed-6"):
        assert sweep.steps(cell) == list(range(1, 26))
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert (sweep.out / "grpo/seed-5.threads").read_text() == f"{threads} {threads}"

    sweep.behave({})
    code, err = sweep.run()
    assert code == 0, err
    assert [len(sweep.commands(cell)) for cell in CELLS] == [1, 2, 1, 1]
    assert "train --resume" in sweep.commands("ours/seed-5")[1]
    assert sweep.steps("ours/seed-5") == list(range(1, 26))


@pytest.mark.slow
def test_tuning_chooses_per_arm_and_the_comparison_uses_the_choice(tmp_path):
    failing = {"tune/ours/learning_rate=0.0001/seed-1": {"fail": "no such file"}}
    sweep = Sweep(tmp_path, TUNED, **failing)
    code, err = sweep.run()
    assert code == 3
    assert "failed: tune/ours/learning_rate=0.0001/seed-1: no such file" in err
    assert "blocked: ours/seed-5: its tuning is incomplete" in err
    assert not (sweep.out / "ours").exists()
    # 1e-4 and 2e-4 both reach 0.5: the first is taken, and the tie is told.
    assert (
        "grpo: tuning chose learning_rate=0.0001 by final.mean (learning_rate=5e-05 0.4000" in err
    )
    assert "grpo: learning_rate=0.0002 tied with learning_rate=0.0001" in err
    recipe = (sweep.out / "grpo/seed-5/recipe.yaml").read_text()
    assert "learning_rate: 0.0001" in recipe

    sweep.behave({})
    assert sweep.run()[0] == 0
    chosen = json.loads((sweep.out / "chosen.json").read_text())
    assert chosen["seeds"] == [1]
    ours = chosen["arms"]["ours"]
    assert ours["set"] == ["optimizer.learning_rate=0.0001"]
    assert ours["tied"] == ["learning_rate=0.0002"] and ours["at_edge"] == []
    assert [each["mean"] for each in ours["candidates"]] == [0.4, 0.5, 0.5]

    path = sweep.out / "tune/ours/learning_rate=5e-05/seed-1/summary.json"
    path.write_text(path.read_text().replace("0.4", "0.9"))
    code, err = sweep.run()
    assert code == 3
    assert "another recipe: optimizer.learning_rate 0.0001, now 5e-05" in err
    assert json.loads((sweep.out / "chosen.json").read_text()) == chosen


@pytest.mark.slow
def test_sigterm_stops_the_cells_once_and_the_same_command_continues(tmp_path):
    held = {cell: {"hold": True} for cell in CELLS}
    sweep = Sweep(tmp_path, **held)
    process = sweep.start(jobs=2)
    sweep.wait_for_steps("grpo/seed-5", "ours/seed-5")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted grpo/seed-5" in err and "the same command continues" in err
    assert sweep.cell_processes() == []
    assert not (sweep.out / "grpo/seed-6").exists()
    assert len(sweep.steps("grpo/seed-5")) < 25
    sweep.behave({})
    assert sweep.run()[0] == 0
    assert all(sweep.steps(cell) == list(range(1, 26)) for cell in CELLS)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_sweep_leaves_no_cell_behind_and_the_next_waits_for_those_that_linger(tmp_path):
    held = {cell: {"hold": True} for cell in CELLS}
    deaf = {"grpo/seed-5": {"deaf": True}}
    sweep = Sweep(tmp_path, **held | deaf)
    process = sweep.start(jobs=2)
    sweep.wait_for_steps("grpo/seed-5", "ours/seed-5")
    process.kill()
    process.communicate()
    wait_until(lambda: len(sweep.cell_processes()) == 1)  # told by the kernel; one lingers
    (lingering,) = sweep.cell_processes()
    sweep.behave(deaf)
    process = sweep.start(jobs=2)
    told = sweep.wait_for_line(process, "note: waiting for grpo/seed-5")
    assert told.endswith(f"process {lingering.pid}, left by an earlier sweep")
    assert len(sweep.commands("grpo/seed-5")) == 1
    sweep.behave({})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert all(sweep.steps(cell) == list(range(1, 26)) for cell in CELLS)
    first, second = sweep.commands("grpo/seed-5")
    assert f"process {lingering.pid}:" in first and "train --resume" in second


@pytest.mark.slow
def test_a_cell_that_is_killed_fails_and_is_resumed_by_the_next_sweep(tmp_path):
    sweep = Sweep(tmp_path, **{"ours/seed-5": {"hold": True}})
    process = sweep.start(jobs=2)
    sweep.wait_for_steps("ours/seed-5")
    (victim,) = (p for p in sweep.cell_processes() if "ours/seed-5" in words_of(p))
    victim.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "failed: ours/seed-5: killed by signal 9" in err
    sweep.behave({})
    assert sweep.run()[0] == 0
    assert sweep.steps("ours/seed-5") == list(range(1, 26))


class Notices(Observer):
    def __init__(self):
        self.told = []

    def on_notice(self, text):
        self.told.append(text)


@pytest.mark.parametrize("stops", [False, True])
def test_a_cell_of_an_earlier_sweep_is_waited_for_until_it_ends_or_the_user_stops(
    tmp_path, monkeypatch, stops
):
    sweep = SweepFile(name="s", recipe="tiny", arms={"a": [], "b": ["replay.ratio=1"]}, seeds=[3])
    comparisons = expand(sweep, tmp_path / "s.yaml", tmp_path)
    left = comparisons[0].arms[0].comparison[0]
    run = SweepRun(comparisons, Launcher(2), Notices(), StopRequests())
    with ExitStack() as earlier:
        note_start(earlier.enter_context(locked_log(left)), 123, left, CellState.NEW)

        def sleep(seconds):
            run.stops.count += stops
            if not stops:
                earlier.close()

        monkeypatch.setattr("grpo_replay.lab.sweep.sweep_run.time.sleep", sleep)
        run.prepare()
        assert run.observer.told == ["waiting for a/seed-3, process 123, left by an earlier sweep"]
        if stops:
            assert run.run() == 130
        else:
            assert [entry.status for entry in run.entries] == [Status.WAITING] * 2


@pytest.mark.slow
def test_two_sweeps_never_work_in_one_folder(tmp_path):
    sweep = Sweep(tmp_path, **{cell: {"hold": True} for cell in CELLS})
    process = sweep.start(jobs=1)
    sweep.wait_for_steps("grpo/seed-5")
    code, err = sweep.run()
    assert code == 3 and f"is in use by process {process.pid}" in err
    process.terminate()
    process.communicate(timeout=60)
    assert [len(sweep.commands("grpo/seed-5"))] == [1]
