"""Loading without garbage collection."""

import gc
import subprocess
import sys

import pytest

from grpo_replay.terminal.loading import loading_libraries


def test_nothing_is_collected_while_libraries_load_and_collection_goes_on_after():
    with loading_libraries():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), loading_libraries():
        raise ImportError("no such library")
    assert gc.isenabled()


def test_what_was_loaded_is_left_out_of_collections_until_the_end():
    code = (
        "import atexit, gc; from grpo_replay.terminal.loading import loading_libraries\n"
        "atexit.register(lambda: print('at exit', gc.get_freeze_count()))\n"
        "with loading_libraries(): import decimal\n"
        "print(gc.get_freeze_count() > 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True", "at exit 0"]
