"""Streams that are closed, full or not UTF-8 change no result of a command and no exit code."""

import json
import subprocess
import sys

import pytest
from slow_tests import slow_except

from grpo_replay.cli.app import main

PROGRAM = f"{sys.executable} -m grpo_replay"
TABLE = f"{PROGRAM} aes --reference 1,2 --candidate é=1,2"
FAILS = f"{PROGRAM} inspect-buffer nosuch"


def shell(line, **options):
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, **options)


CASES = [
    (f"{TABLE} >&-", 0),
    (f"{TABLE} 2>&-", 0),
    (f"{TABLE} <&- >&- 2>&-", 0),
    (f"{FAILS} 2>&-", 3),
    (f"{FAILS} 2>/dev/full", 3),
    (f"{PROGRAM} nosuch 2>/dev/full", 2),
    (f"{TABLE} >/dev/full", 3),
]
QUICK = [CASES[2], CASES[4], CASES[6]]


@pytest.mark.parametrize(("line", "code"), slow_except(QUICK, CASES))
def test_the_exit_code_is_that_of_the_command(line, code):
    done = shell(line)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "error" not in done.stdout
    assert ("é" in done.stdout) == (line == f"{TABLE} 2>&-")


@pytest.mark.parametrize(
    "variables", ["PYTHONIOENCODING=ascii", "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"]
)
def test_characters_that_stdout_lacks_are_replaced_and_in_json_escaped(variables):
    done = shell(f"{variables} {TABLE}")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"{variables} {PROGRAM} plan tiny --json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u03c3" in done.stdout and json.loads(done.stdout)


def test_ctrl_c_while_the_command_loads_is_an_interruption(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo_replay.terminal.console.prepare_streams", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&-", "2>&-", "2>/dev/full", "| cat"])
def test_a_run_trains_to_its_end(tmp_path, streams):
    settings = "--set run.steps=1 --set replay.preset=grpo --set eval.benchmarks=[]"
    line = f"set -o pipefail; PYTHONIOENCODING=ascii {PROGRAM} train tiny {settings}"
    done = shell(f"{line} --output-dir {tmp_path / 'run'} {streams}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
