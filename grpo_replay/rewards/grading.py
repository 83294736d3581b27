"""`grpo_replay.grade`: grades one completion against its reference answer, for other programs."""

import atexit
import threading
from functools import cache

from grpo_replay.errors import UsageError
from grpo_replay.named_functions import has_module
from grpo_replay.recipe import BUILTIN_VERIFIERS, RewardSection
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.types import Verdict

_LOCK = threading.Lock()


def grade(completion: str, answer: str, verifier: str = "boxed") -> Verdict:
    """Grade a completion with a built-in verifier: `status` is "correct", "incorrect", "unparsable"
    (no answer found), or "timeout", "memory" or "crash"; `reward` is 1 if correct, else -1.

    Does not load torch. Grades in a worker process, which the first call starts, so that no
    completion can crash or block the caller. Threads may call it. Raises UsageError for an unknown
    verifier, or if it needs math-verify, which is not installed.
    """
    if verifier not in BUILTIN_VERIFIERS:
        raise UsageError(f"verifier {verifier!r}: use {', '.join(BUILTIN_VERIFIERS)}")
    if verifier != "minerva" and not has_module("math_verify"):
        raise UsageError(
            f"verifier {verifier} needs math-verify, which is not installed: "
            "pip install 'grpo-replay[grade]', or verifier minerva"
        )
    with _LOCK:
        return _scorer(verifier).score([(completion, answer, None)])[0]


@cache
def _scorer(verifier: str) -> RewardScorer:
    scorer = RewardScorer.open(RewardSection(function=verifier, workers=1))
    atexit.register(scorer.close)
    return scorer
