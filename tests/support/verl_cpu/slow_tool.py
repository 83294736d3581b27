"""A tool for verl's tool loop, which loads this file by its path."""

import asyncio

from verl.tools.function_tool import function_tool

TOOL_SECONDS = 1.0


@function_tool
async def ask(answer: str) -> str:
    """Answer with another problem.

    Args:
        answer: What the model wrote.
    """
    await asyncio.sleep(TOOL_SECONDS)
    return "18+25"
