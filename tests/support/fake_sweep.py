"""A sweep of fake runs, for tests about processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from grpo_replay.storage.atomic import write_text_whole

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "sweep_program.py"

SWEEP = """
name: fake
recipe: tiny
set: [run.steps=25]
arms: {grpo: [replay.preset=grpo], ours: [replay.preset=ours]}
seeds: [5, 6]
"""


class Sweep:
    """A sweep in a folder of its own, run by a process of its own."""

    def __init__(self, folder: Path, text: str = SWEEP, **behaviour: dict) -> None:
        self.folder, self.out, self.file = folder, folder / "out", folder / "sweep.yaml"
        self.file.write_text(text)
        self.behave(behaviour)

    def behave(self, behaviour: dict) -> None:
        write_text_whole(self.folder / "behaviour.json", json.dumps(behaviour))

    def start(self, jobs: int | None = 2, *options: str) -> subprocess.Popen[str]:
        paths = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), "sweep", str(self.file), "--output-dir", str(self.out),
             *(["--jobs", str(jobs)] if jobs else []), *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip

    def run(self, jobs: int | None = 2, *options: str) -> tuple[int, str]:
        process = self.start(jobs, *options)
        _, err = process.communicate(timeout=120)
        return process.returncode, err

    def steps(self, cell: str) -> list[int]:
        lines = (self.out / cell / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def commands(self, cell: str) -> list[str]:
        lines = (self.out / "log" / f"{cell}.log").read_text().splitlines()
        return [line for line in lines if line.startswith("# process")]

    def wait_for_steps(self, *cells: str) -> None:
        wait_until(lambda: all((self.out / c / "metrics.jsonl").exists() for c in cells))

    def cell_processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if str(self.out) in words_of(p)
                and "fake_trainer" in words_of(p)]  # fmt: skip


def words_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


CELLS = ("grpo/seed-5", "ours/seed-5", "grpo/seed-6", "ours/seed-6")
