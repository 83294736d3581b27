"""The reward scorer: grades completions in worker processes while sampling goes on.

    with RewardScorer.open(recipe.reward) as scorer:      # workers start in the background
        for completion in sampler.generate(requests):
            scorer.submit(completion.key, text, answer, row)
        verdicts = scorer.results()                       # key -> Verdict, in submission order

A completion whose grading exceeds the time or memory limit, or crashes its worker, earns the
incorrect reward; the status of the verdict names the cause. Built-in verifiers grade equal
(completion, answer) pairs once.
"""

import hashlib
import logging
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.recipe import BUILTIN_VERIFIERS, RewardSection
from grpo_replay.rewards import wire
from grpo_replay.rewards.pool import VerifierPool
from grpo_replay.types import Verdict

CACHED_ANSWERS = 200_000
"""Maximum number of cached verdicts, by digest of (completion, answer): about 60 MB when full."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Graded:
    """One submitted pair; `answer` is the worker's message, None until it arrives."""

    gold: str
    answer: dict[str, Any] | None = None


class RewardScorer:
    """Scores completions with one reward function. Use it from one thread only."""

    def __init__(self, section: RewardSection) -> None:
        _check_function(section.function)
        self.unparsable_answers: set[str] = set()
        """Reference answers seen so far that math-verify could not parse."""
        self._section = section
        self._builtin = section.function in BUILTIN_VERIFIERS
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._submitted: list[tuple[Hashable, _Graded]] = []
        self._pending = 0
        self._cache: OrderedDict[bytes, _Graded] = OrderedDict()
        self._warned = False
        self._pool = VerifierPool(
            section.function,
            section.workers,
            section.time_limit_seconds,
            section.memory_limit_mib,
            self._accept,
            self._fail,
        )

    @classmethod
    def open(cls, section: RewardSection) -> "RewardScorer":
        """A scorer whose workers start in the background.

        Raises RecipeError for an invalid name. A module or function that cannot be imported raises
        RecipeError from the first `results` or `score`.
        """
        return cls(section)

    def submit(
        self, key: Hashable, completion: str, answer: str, row: Mapping[str, Any] | None = None
    ) -> None:
        """Queue one completion for grading and return at once.

        Only `module:function` receives `row`. Raises DatasetError if it contains a value that JSON
        cannot represent.
        """
        digest = _digest(completion, answer) if self._builtin else None
        with self._changed:
            graded = self._recall(digest)
            if graded is None:
                graded = _Graded(answer)
                body = self._body(completion, answer, row)
                if digest is not None:
                    self._remember(digest, graded)
                self._pending += 1
                self._pool.put((graded, body), zlib.crc32(answer.encode("utf-8", "surrogatepass")))
            self._submitted.append((key, graded))

    def statuses(self) -> Counter[str]:
        """The number of verdicts of each status that have arrived since the last `results`."""
        with self._changed:
            arrived = [graded.answer for _, graded in self._submitted if graded.answer]
        return Counter(answer["status"] for answer in arrived)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; True once everything submitted is graded or grading failed."""
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout=seconds)

    def _is_settled(self) -> bool:
        return self._failure is not None or self._pending == 0

    def results(self) -> dict[Hashable, Verdict]:
        """Wait for all verdicts since the last call and return them in submission order.

        Raises RecipeError if the reward function cannot be loaded.
        """
        with self._changed:
            self._changed.wait_for(self._is_settled)
            if self._failure is not None:
                raise self._failure
            submitted, self._submitted = self._submitted, []
        verdicts = {key: self._verdict(graded) for key, graded in submitted}
        if len(verdicts) != len(submitted):
            raise ValueError("two completions were submitted for grading under one key")
        return verdicts

    def score(self, items: Sequence[tuple[str, str, Mapping[str, Any] | None]]) -> list[Verdict]:
        """Verdicts of (completion, answer, row) items, in order."""
        for index, (completion, answer, row) in enumerate(items):
            self.submit(index, completion, answer, row)
        return list(self.results().values())

    def close(self) -> None:
        """Kill the workers. May be called twice."""
        self._pool.close()

    def __enter__(self) -> "RewardScorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _body(self, completion: str, answer: str, row: Mapping[str, Any] | None) -> bytes:
        task: dict[str, Any] = {"text": completion, "answer": answer}
        if not self._builtin:
            task["row"] = dict(row or {})
        try:
            return wire.to_json(task)
        except (TypeError, ValueError) as error:
            raise DatasetError(
                f"a row cannot be passed to reward.function {self._section.function!r}: {error}; "
                f"its fields are {', '.join(map(str, row or {}))}: remove the field that is not "
                "text, a number, a list or a mapping"
            ) from error

    def _recall(self, digest: bytes | None) -> _Graded | None:
        """The cached entry, marked as the most recently used; None if there is none."""
        if digest is None or digest not in self._cache:
            return None
        self._cache.move_to_end(digest)
        return self._cache[digest]

    def _remember(self, digest: bytes, graded: _Graded) -> None:
        self._cache[digest] = graded
        if len(self._cache) > CACHED_ANSWERS:
            self._cache.popitem(last=False)

    def _verdict(self, graded: _Graded) -> Verdict:
        answer = graded.answer
        assert answer is not None
        if answer.get("gold_parsed") is False:
            self.unparsable_answers.add(graded.gold)
        status = answer["status"]
        if status == "scored":
            return Verdict(answer["reward"], status)
        correct = status == "correct"
        return Verdict(self._section.correct if correct else self._section.incorrect, status)

    def _accept(self, graded: _Graded, answer: dict[str, Any]) -> None:
        with self._changed:
            graded.answer = answer
            self._pending -= 1
            self._changed.notify_all()
            first_error = "error" in answer and not self._warned
            self._warned |= first_error
        if first_error:
            logger.warning(
                "reward.function %r failed on a completion, which earns the incorrect reward and "
                "status 'crash' (reported once per run): %s",
                self._section.function,
                answer["error"],
            )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()


def _check_function(function: str) -> None:
    module, separator, name = function.partition(":")
    names = [*module.split("."), *name.split(".")]
    if function in BUILTIN_VERIFIERS or (separator and all(map(str.isidentifier, names))):
        return
    raise RecipeError(
        f"reward.function {function!r} is not a verifier: use {', '.join(BUILTIN_VERIFIERS)}, "
        "or module:function, such as my_rewards:score"
    )


def _digest(completion: str, answer: str) -> bytes:
    # The length distinguishes ("ab", "c") from ("a", "bc"); surrogatepass, because samplers may
    # emit invalid Unicode.
    text = f"{len(answer)}:{answer}{completion}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
