"""Reward functions of a user, good and bad, for `module:function` tests."""

import asyncio
import os
import subprocess
import time
from pathlib import Path

LOOP: asyncio.AbstractEventLoop | None = None


def half_for_hint(completion: str, answer: str, row: dict) -> float:
    print("what a reward prints must not reach the trainer")
    return 0.5 if row["hint"] in completion else -0.25


def no_sum(completion: str, answer: str, row: dict) -> float:
    assert "+" in row["problem"]
    return 0.0


def misbehave(completion: str, answer: str, row: dict) -> float:
    if completion == "raise":
        raise ValueError("no such answer")
    if completion == "nan":
        return float("nan")
    if completion == "die":
        os._exit(3)
    if completion == "hang":
        time.sleep(3600)
    if completion == "grow":
        bytearray(4 << 30)
    return float(len(completion))


def none_if_asked(completion: str, answer: str, row: dict) -> float | None:
    return None if completion == "none" else 0.5


async def awaited(completion: str, prompt: str, step: int | None, truncated: bool) -> float:
    """The step, negative if truncated. Fails on a loop other than that of the first call."""
    global LOOP
    await asyncio.sleep(0)
    LOOP = LOOP or asyncio.get_running_loop()
    assert LOOP is asyncio.get_running_loop() and (completion, prompt) == ("c", "p=")
    if step is None:
        raise ValueError("takes no evaluation")
    return float(-step if truncated else step)


def only_even(completion: str, answer: str, row: dict) -> float:
    if int(answer) % 2:
        raise ValueError("odd")
    return 1.0


def prints(completion: str, answer: str, row: dict) -> float:
    """Prints the completion as often as the answer says."""
    for _ in range(int(answer)):
        print(completion)
    return 1.0


def tells_secrets(completion: str, answer: str, row: dict) -> float:
    """Prints secrets of the environment, and raises an error with one, now and then."""
    print("key", os.environ["HF_TOKEN"], "http://me:pa55-w0rd@10.0.0.1/", flush=True)
    if answer == "5":
        raise ValueError(os.environ["OTHER_API_KEY"])
    return float(len(completion))


def slow(completion: str, answer: str, row: dict) -> float:
    time.sleep(float(completion))
    return 1.0


def quarter(completion: str, answer: str, row: dict) -> float:
    return 0.25


class Count:
    seen = 0

    @classmethod
    def calls(cls, completion: str, answer: str, row: dict) -> float:
        cls.seen += 1
        return float(cls.seen)


def die_unless_first(completion: str, answer: str, row: dict) -> float:
    """Fails for what the worker did before, not for the completion."""
    Count.seen += 1
    if Count.seen > 1:
        os._exit(3)
    return 1.0


def start_a_program(completion: str, answer: str, row: dict) -> float:
    """Writes the number of a process that sleeps, in a session of its own if the row says so, into
    the file `answer`; then hangs or dies."""
    process = subprocess.Popen(["sleep", "1000"])
    Path(answer).write_text(str(process.pid))
    return misbehave(completion, answer, row)


def above_the_mean(completions: list[str], answers: list[str]) -> list[float]:
    """Compares the completions of a prompt. Crashes if one says so."""
    if "die" in completions:
        os._exit(3)
    lengths = [len(text) for text in completions]
    return [length - sum(lengths) / len(lengths) for length in lengths]
