"""A reward that takes as long as a sandbox that runs an agent's work would: it waits, and costs no
compute. Longer work takes longer, and a failure twice as long as a success of the same length."""

import asyncio
import math
import zlib
from statistics import NormalDist

from grpo_replay.tiny.text_problems import last_number

TYPICAL_SECONDS, TYPICAL_CHARACTERS = 1.5, 200
FAILED_FACTOR, SPREAD, LONGEST_SECONDS = 2.0, 0.5, 20.0


async def passed(completion: str, answer: str, prompt: str) -> float:
    """1 for the right answer, else 0, after `seconds_of`."""
    score = last_number(completion, answer)
    await asyncio.sleep(seconds_of(prompt + completion, score == 1))
    return score


def seconds_of(work: str, succeeded: bool) -> float:
    """Log-normal with the spread 0.5 around 1.5 s for 200 characters of a success, in proportion to
    the length; at most 20 s. The same work always takes equally long."""
    share = (zlib.crc32(work.encode()) + 0.5) / 2**32
    typical = TYPICAL_SECONDS * len(work) / TYPICAL_CHARACTERS * (1 if succeeded else FAILED_FACTOR)
    return min(typical * math.exp(SPREAD * NormalDist().inv_cdf(share)), LONGEST_SECONDS)
