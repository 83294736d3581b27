"""Neither a terminal that is not UTF-8 nor a closed stream changes a result, and a full disk is no
traceback."""

import json
import subprocess
import sys

import pytest
from slow_tests import slow_except

from grpo_replay.cli import run_display
from grpo_replay.cli.run_display import RunDisplay
from grpo_replay.terminal.console import open_console
from grpo_replay.training.run import RunResult

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


@pytest.mark.parametrize(
    "streams",
    slow_except(
        [">&-", "<&- >&- 2>&-", "2>/dev/full"],
        [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"],
    ),
)
def test_streams_that_are_closed_or_full_change_no_exit_code(streams):
    """Services start programs without standard streams."""
    assert shell(f"{TABLE} {streams}").returncode == 0
    assert shell(f"{PROGRAM} plan {streams}").returncode == 2


@pytest.mark.parametrize("words", slow_except(["plan --help"], ["--version", "plan --help"]))
def test_a_full_disk_under_the_help_is_no_traceback(words):
    done = shell(f"{PROGRAM} {words} >/dev/full")
    assert done.returncode == 3
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_no_file_of_a_command_gets_the_number_of_a_closed_stream():
    program = (
        "from grpo_replay.terminal.console import prepare_streams; prepare_streams(); "
        "import os, sys; numbers = [os.open('/etc/hostname', 0), sys.stdout.fileno()]; "
        "print('lost'); os.write(9, repr(numbers).encode())"
    )
    done = shell(f'{sys.executable} -c "{program}" 9>&1 >&- 2>&-')
    assert done.stdout.endswith(", 1]") and int(done.stdout[1:].split(",")[0]) > 2, done


def test_a_finished_run_is_finished_also_if_its_summary_cannot_be_printed(monkeypatch, tmp_path):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(run_display, "describe_end", lambda *_: "the end")
        RunDisplay(open_console(stderr=True)).conclude(
            RunResult(tmp_path, 3, False, {"base": {}, "final": {}})
        )
        full.flush()


def test_a_working_directory_that_was_removed_is_named(tmp_path):
    folder = tmp_path / "gone"
    gone = f"mkdir {folder} && cd {folder} && rmdir {folder} && "
    assert shell(f"{gone}{TABLE}").returncode == 0  # it needs none
    done = shell(f"{gone}{PROGRAM} train tiny --dry-run")
    assert done.returncode == 3
    assert done.stderr.startswith("error: the working directory was removed"), done.stderr
    code = (
        "from grpo_replay.recipe.layers import short_path; "
        "from grpo_replay.named_functions import load_function, source_text; "
        "print(short_path('/a/b'), load_function('json:dumps')(1), source_text('no_such:f') == '')"
    )
    done = shell(f'{gone}{sys.executable} -c "{code}"')
    assert done.stdout == "/a/b 1 True\n", done.stderr
