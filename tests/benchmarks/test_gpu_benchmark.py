"""benchmarks/gpu.py: no job takes the others down, time is kept, MFU is computed rightly. The jobs
themselves are rehearsed by `python benchmarks/gpu.py --output FOLDER --toy`."""

import contextlib
import json
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gpu
import psutil
from gpu_parts import report, runner
from gpu_parts.devices import training_flops
from gpu_parts.jobs import JOBS, Job
from gpu_parts.record import Record
from gpu_parts.sizes import TOY
from gpu_parts.study import cells_of
from gpu_parts.whole_steps import SPARE_SECONDS, Steps

from grpo_replay.lab.dry_run.memory import ModelShape
from grpo_replay.lab.sweep.sweep_file import find_sweep
from grpo_replay.recipe import load_recipe

BEGINS = """
import os, subprocess, sys, time, pathlib, gpu_parts.record
record = gpu_parts.record.Record(pathlib.Path(sys.argv[1]), "x", "a job", "toy")
record.figure("found", 3)
"""


def run_script(monkeypatch, folder: Path, script: str, seconds=60.0, left=90.0) -> dict:
    """The result of a job that notes one figure and then does what the script says."""
    (folder / "jobs").mkdir(exist_ok=True)
    command = [sys.executable, "-c", BEGINS + script, str(folder)]
    monkeypatch.setattr(runner, "command_of", lambda *_: command)
    options = gpu.parse_options(["--output", str(folder), "--toy"])
    return runner.run_job(Job("x", "a job", "", seconds, 1.0), options, time.monotonic() + left)


def test_a_job_keeps_what_it_had_found_however_it_ends(tmp_path, monkeypatch):
    result = run_script(monkeypatch, tmp_path, "record.finish('ok')")
    assert (result["status"], result["figures"]) == ("ok", {"found": 3})
    crash = "record.finish('ok'); print('last', 'words', flush=True); os.kill(os.getpid(), 11)"
    result = run_script(monkeypatch, tmp_path, crash)
    assert (result["status"], result["reason"]) == ("failed", "it ended with -11")
    assert result["last_lines"].endswith("last words") and result["figures"] == {"found": 3}


def test_the_runs_of_a_study_are_those_of_its_sweep_each_with_a_port_of_its_own(tmp_path):
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").touch()
    context = SimpleNamespace(work=tmp_path, study=find_sweep("smollm2-async"))
    cells = cells_of(context)
    assert [cell["name"] for cell in cells][:4] == [
        "grpo-seed-42", "ours-seed-42", "fifo-seed-42", "grpo-seed-43",
    ]  # fmt: skip
    ports = {load_recipe(cell["recipe"], cell["set"]).sampling.servers.base_port for cell in cells}
    assert len(ports) == len(cells) == 15


def test_a_job_that_hangs_is_ended_with_all_its_processes(tmp_path, monkeypatch):
    script = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
record.figure("child", child.pid)
time.sleep(600)
"""
    result = run_script(monkeypatch, tmp_path, script, seconds=2.0)
    assert (result["status"], result["reason"]) == ("failed", "no end after 2 s")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(result["figures"]["child"]).wait(10)  # raises if it lives on
    result = run_script(monkeypatch, tmp_path, script, left=2.0)
    assert result["status"] == "cut", "the limit was that of the whole command"
    assert run_script(monkeypatch, tmp_path, script, left=0.5)["status"] == "left out"


def test_a_call_waits_for_the_kit_and_takes_up_what_is_not_done(tmp_path, monkeypatch, capsys):
    ran, missing = [], {"b-vllm": ["vllm"]}
    kit, site = tmp_path / "kit", tmp_path / "unpacked" / "site"
    kit.mkdir()
    (kit / "unpack.sh").write_text(f"echo {site}\n")
    (kit / "kit.sha256").write_text("0  3-smollm2.aa\n")
    with zipfile.ZipFile(kit / "beside-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("beside.py", "")

    def run_job(job, options, deadline):
        ran.append(job.name)
        record = Record(options.output, job.name, job.title, "toy")
        record.row("steps", {"step": 1, "seconds": 2.5})
        record.finish("cut" if ran[-1] == "c-train" and ran.count("c-train") == 1 else "ok")
        return record.result

    monkeypatch.setattr(gpu, "run_job", run_job)
    monkeypatch.setattr(gpu, "missing", lambda job, wheels: missing.get(job.name, []))
    options = gpu.parse_options(["--output", str(tmp_path / "found"), "--kit", str(kit)])
    assert gpu.run_all(options, time.monotonic() + 900) == 0
    assert ran == ["a-machine"] and "b-vllm waits for vllm" in capsys.readouterr().out
    assert (site / "beside.py").exists()
    assert options.site == [str(site)] and options.wheels == site.parent / "kit"
    missing.clear()
    for _ in range(2):
        gpu.run_all(options, time.monotonic() + 900)
    assert ran == [*(job.name for job in JOBS), "c-train"]
    assert "step 1: 2.50 s" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "found" / "results.json").read_text())) == len(JOBS)


def test_every_job_leads_to_a_function():
    assert all(callable(job.load()) for job in JOBS)


def test_the_report_has_our_share_of_the_peer_s_step(tmp_path):
    (tmp_path / "jobs").mkdir()
    for name, found in (("d-smollm2-ours", 0.5), ("d-smollm2-trl", 2.0)):
        record = Record(tmp_path, name, "a | step", "full")
        for figure in (*report.RATIOS, "completion tokens of a step"):
            record.figure(figure, found)
    for name, found in (("d-0.6b-ours", 1.0), ("d-0.6b-trl", None)):
        record = Record(tmp_path, name, "too few steps", "full")
        record.figure("seconds of a step", found)
    report.write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| d-smollm2-ours | 0.25 | 0.25 | 0.5 | 2 |" in text and "a \\| step" in text


def test_a_run_ends_before_a_step_that_would_not(tmp_path):
    (tmp_path / "jobs").mkdir()
    left, record = [100.0], Record(tmp_path, "x", "a job", "toy")
    context = SimpleNamespace(size=TOY, record=record, seconds_left=lambda: left[0])
    steps = Steps(context)
    left[0] = SPARE_SECONDS + 2
    steps._last -= 60
    assert steps.end(10), "the first step has the start in it"
    assert steps.end(10)
    steps._last -= 5
    assert not steps.end(10)
    assert [round(row["seconds"]) for row in record.rows("steps")] == [60, 0, 5]


def test_the_operations_of_a_training_step_by_hand():
    shape = ModelShape(
        parameters=1_000 + 10 * 20, tied_head=True, layers=3, hidden=10,
        vocabulary=20, kv_elements_per_token=0, attention_width=16, max_positions=None,
    )  # fmt: skip
    flops = training_flops(shape, [4, 6], completion_tokens=7)
    assert flops == 6 * 1_000 * 10 + 6 * 200 * 7 + 6 * 3 * 16 * (16 + 36)
