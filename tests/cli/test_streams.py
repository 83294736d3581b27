"""A terminal that is not UTF-8 changes no result of a command, and a full disk is no traceback."""

import json
import subprocess
import sys

PROGRAM = f"{sys.executable} -m grpo_replay"
TABLE = f"{PROGRAM} aes --reference 1,2 --candidate é=1,2"


def shell(line, **options):
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, **options)


def test_a_full_disk_has_the_exit_code_of_data():
    done = shell(f"{TABLE} >/dev/full")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_characters_that_stdout_lacks_are_replaced_and_in_json_escaped():
    done = shell(f"LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {TABLE}")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"PYTHONIOENCODING=ascii {TABLE} --json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u00e9" in done.stdout and json.loads(done.stdout)
