"""A reward from a judge, a model behind an OpenAI-compatible endpoint. Copy this file, change it.

    vllm serve Qwen/Qwen3-4B --port 8000                       # or any other endpoint
    export JUDGE_URL=http://127.0.0.1:8000/v1 JUDGE_MODEL=Qwen/Qwen3-4B

In the recipe:

    reward:
      function: judge_reward.py:judged
      time_limit_seconds: 70        # for a completion; above ATTEMPTS times TIMEOUT_SECONDS
      max_failed_share: 0.5         # above this share without a verdict, the run stops

The completions of a prompt are judged at once. A judge that is late or fails ATTEMPTS times (an
error, whose reason the screen shows), or answers neither yes nor no, gives no verdict: the
completion has no reward, and leaves its group.
"""

import asyncio
import os
import re

import aiohttp

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("JUDGE_MODEL", "")
HEADERS = {"Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', 'none')}"}
CONCURRENCY = 16
"""Requests under way, for each of `reward.workers`."""
TIMEOUT_SECONDS = 20.0
ATTEMPTS = 3
PAUSE_SECONDS = 0.5
"""Before the second attempt; doubled before each further one."""

QUESTION = """Problem:
{problem}

Reference answer: {answer}

Solution to judge:
{completion}

Is the final answer of the solution the reference answer? Reply with one word, yes or no."""

_open: dict[str, aiohttp.ClientSession | asyncio.Semaphore] = {}


async def judged(completion: str, answer: str, messages: list, truncated: bool) -> float | None:
    if truncated:
        return -1.0
    problem = messages[-1]["content"]
    question = QUESTION.format(problem=problem, answer=answer, completion=completion)
    reply = await ask(question)
    words = re.findall(r"\b(yes|no)\b", reply.lower())
    return None if not words else 1.0 if words[-1] == "yes" else -1.0


async def ask(question: str) -> str:
    """The judge's reply. Raises ConnectionError if there is none after all attempts."""
    reason = ""
    if not _open:  # a worker has one event loop for the whole run
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        _open["session"] = aiohttp.ClientSession(timeout=timeout, headers=HEADERS)
        _open["places"] = asyncio.Semaphore(CONCURRENCY)
    asked = [{"role": "user", "content": question}]
    body = {"model": MODEL, "messages": asked, "max_tokens": 512, "temperature": 0}
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            async with _open["places"], _open["session"].post(
                f"{URL}/chat/completions", json=body
            ) as response:  # fmt: skip
                response.raise_for_status()
                return (await response.json())["choices"][0]["message"]["content"]
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error).partition(", url=")[0] or type(error).__name__
            print(f"judge, attempt {attempt + 1} of {ATTEMPTS}: {reason}")  # goes to log/
    raise ConnectionError(f"no answer of {URL} in {ATTEMPTS} attempts: {reason}")
