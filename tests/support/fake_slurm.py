"""Slurm's commands on one machine, for submitit: `install(folder)` makes sbatch, srun, sacct,
scancel and scontrol there. Jobs run at once; a job is its batch script and what that starts."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")


def install(folder: Path) -> None:
    """Write the commands to a folder, which is then put on PATH."""
    folder.mkdir(parents=True)
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        path.chmod(0o755)


def jobs_folder() -> Path:
    return Path(os.environ["FAKE_SLURM"])


def launch(number: str) -> None:
    script = jobs_folder() / f"{number}.sh"
    environment = os.environ | {
        "SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        ["bash", str(script)], env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    (jobs_folder() / f"{number}.json").write_text(json.dumps(process.pid))


def sbatch(words: list[str]) -> None:
    number = str(1000 + len(list(jobs_folder().glob("*.sh"))))
    (jobs_folder() / f"{number}.sh").write_text(Path(words[0]).read_text())
    launch(number)
    print(f"Submitted batch job {number}")


def srun(words: list[str]) -> None:
    files = {}
    while words[0].startswith("--"):
        option = words.pop(0)
        if option in ("--output", "--error"):
            files[option] = words.pop(0).replace("%j", os.environ["SLURM_JOB_ID"])
    place = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_ID": "0"}
    with (
        open(files["--output"].replace("%t", "0"), "a") as out,
        open(files["--error"].replace("%t", "0"), "a") as err,
    ):
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.execvpe(words[0], words, os.environ | place)


def is_alive(number: str) -> bool:
    pid = json.loads((jobs_folder() / f"{number}.json").read_text())
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def sacct(words: list[str]) -> None:
    print("JobID|State|NodeList")
    for number in [after for word, after in itertools.pairwise(words) if word == "-j"]:
        print(f"{number}|{'RUNNING' if is_alive(number) else 'COMPLETED'}|here")


def scancel(words: list[str]) -> None:
    (number,) = [word for word in words if re.fullmatch(r"\d+", word)]
    os.killpg(json.loads((jobs_folder() / f"{number}.json").read_text()), signal.SIGKILL)


def scontrol(words: list[str]) -> None:
    assert words[0] == "requeue", shlex.join(words)
    launch(words[1])


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])
