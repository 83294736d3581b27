"""Cells as processes: started, followed, stopped, killed and continued. The trainer is a stand-in
that writes a run's files in milliseconds; `test_real_sweep.py` has the real one."""

import os
import signal

import pytest
from fake_sweep import CELLS, Sweep


def test_cells_run_in_turn_finished_ones_are_skipped_and_one_bad_does_not_stop_the_rest(tmp_path):
    sweep = Sweep(tmp_path, **{"ours/seed-5": {"fail": "the first line of a message"}})
    code, err = sweep.run(jobs=2)
    assert code == 3, err
    assert "failed: ours/seed-5: the first line of a message (see " in err
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
def test_sigterm_stops_the_cells_once_and_the_same_command_continues(tmp_path):
    held = {cell: {"hold": True} for cell in CELLS}
    sweep = Sweep(tmp_path, **held)
    process = sweep.start(jobs=2)
    sweep.wait_for_steps("grpo/seed-5", "ours/seed-5")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert sweep.cell_processes() == []
    assert not (sweep.out / "grpo/seed-6").exists()
    assert len(sweep.steps("grpo/seed-5")) < 25
    sweep.behave({})
    assert sweep.run()[0] == 0
    assert all(sweep.steps(cell) == list(range(1, 26)) for cell in CELLS)
