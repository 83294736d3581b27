"""The collector's process: what ends it."""

import asyncio

import pytest

from grpo_replay.collection.collector_process import _until_the_first_ends


def test_an_error_in_any_task_ends_all_and_reaches_the_caller():
    """Otherwise a collector that reads no more commands would go on with its heartbeat."""
    cancelled = []

    async def run() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append("run")

    async def take_commands() -> None:
        await asyncio.sleep(0)
        raise ValueError("a prompt that is not there")

    with pytest.raises(ValueError, match="a prompt that is not there"):
        asyncio.run(_until_the_first_ends(run(), take_commands()))
    assert cancelled == ["run"]


def test_the_end_of_one_task_ends_the_others():
    async def until_the_parent_is_gone() -> None:
        await asyncio.sleep(0)

    asyncio.run(
        asyncio.wait_for(_until_the_first_ends(asyncio.sleep(60), until_the_parent_is_gone()), 5)
    )
