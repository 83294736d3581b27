"""Temporary folders of killed processes are removed by the next process that makes one."""

import subprocess
import sys
from pathlib import Path

from outside_ranks import environment

from grpo_replay.distributed.held_folder import HeldFolder

HOLD = """
import sys, time
from pathlib import Path
from grpo_replay.distributed.held_folder import HeldFolder
held = HeldFolder("x-", Path(sys.argv[1]))
(held.path / "content").touch()
print("held", flush=True)
time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_of_a_killed_process_goes_with_the_next_and_not_before(tmp_path):
    (tmp_path / "x-mine").mkdir()  # no lock: not ours
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    other = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    first = HeldFolder("x-", tmp_path)
    assert len(names(tmp_path)) == 3 and first.path.stat().st_mode & 0o777 == 0o700
    other.kill()
    other.wait()
    second = HeldFolder("x-", tmp_path)
    assert names(tmp_path) == sorted(["x-mine", first.path.name, second.path.name])
    first.release()
    second.release()
    second.release()
    assert names(tmp_path) == ["x-mine"]
