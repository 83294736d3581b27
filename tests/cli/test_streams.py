"""Streams that are closed, full or not UTF-8 change no result of a command and no exit code."""

import json
import subprocess
import sys

import pytest

from grpo_replay.cli.app import main

PROGRAM = f"{sys.executable} -m grpo_replay"
TABLE = f"{PROGRAM} aes --reference 1,2 --candidate é=1,2"


def shell(line, **options):
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, **options)


@pytest.mark.parametrize(
    ("line", "code"), [(f"{TABLE} <&- >&- 2>&-", 0), (f"{TABLE} >/dev/full", 3)]
)
def test_the_exit_code_is_that_of_the_command(line, code):
    done = shell(line)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_characters_that_stdout_lacks_are_replaced_and_in_json_escaped():
    done = shell(f"LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {TABLE}")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"PYTHONIOENCODING=ascii {TABLE} --json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u00e9" in done.stdout and json.loads(done.stdout)


def test_ctrl_c_while_the_command_loads_is_an_interruption(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo_replay.terminal.console.prepare_streams", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow
def test_a_run_whose_stderr_is_full_and_stdout_closed_trains_to_its_end(tmp_path):
    settings = "--set run.steps=1 --set replay.preset=grpo --set eval.benchmarks=[]"
    line = f"PYTHONIOENCODING=ascii {PROGRAM} train tiny {settings}"
    done = shell(f"{line} --output-dir {tmp_path / 'run'} >&- 2>/dev/full")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
