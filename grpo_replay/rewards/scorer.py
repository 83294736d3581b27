"""The reward scorer: grades completions in worker processes while sampling goes on.

    with RewardScorer.open(recipe.reward) as scorer:      # workers start in the background
        for completion in sampler.generate(requests):
            scorer.submit(completion.key, GradingRequest(text, answer, row))
        verdicts = scorer.results()                       # key -> Verdict, in submission order

A function of the user that raises, returns None, exceeds the time or memory limit or crashes its
worker gives no reward; a completion that makes a built-in verifier fail earns the incorrect reward.
The status of the verdict names the cause. With several functions, the failure of one is that of the
verdict.
"""

import json
import logging
import threading
import zlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from grpo_replay.errors import DatasetError
from grpo_replay.recipe import BUILTIN_VERIFIERS, RewardSection
from grpo_replay.recipe.open_lists import VERIFIERS
from grpo_replay.rewards.pool import Answers, VerifierPool
from grpo_replay.terminal.quiet import without_secrets
from grpo_replay.types import FAILED, Prompt, Verdict

MEMORY_LIMIT_MIB = 2048
"""Maximum memory growth of a worker process."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GradingRequest:
    """A completion to grade against the reference `answer`.

    Only functions of the user receive the rest: the dataset's `row`, whether the completion was
    `truncated` at the length limit, its `completion_ids`, the rendered `prompt`, its `messages`,
    the training `step` (None in evaluations), and the `group`, which is that of the other
    completions of the prompt, `group_size` in all.
    """

    text: str
    answer: str
    row: Mapping[str, Any] | None = None
    completion_ids: Sequence[int] = ()
    truncated: bool = False
    prompt: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    step: int | None = None
    group: str = ""
    group_size: int = 1

    @classmethod
    def of(
        cls, prompt: Prompt, text: str, completion_ids: Sequence[int], **others: Any
    ) -> "GradingRequest":
        """Of a completion to `prompt`; `others` are fields."""
        known = prompt.answer, prompt.row, completion_ids
        return cls(text, *known, prompt=prompt.text, messages=prompt.messages, **others)


@dataclass(slots=True, eq=False)
class _Graded:
    """One submitted pair; `answers` are those of the functions, None until they arrive."""

    gold: str
    answers: list[dict[str, Any]] | None = None


_Member = tuple[Any, _Graded, bytes]
"""The key of a submitted completion, its entry, and what its worker gets."""


class RewardScorer:
    """Scores completions with the recipe's reward functions. Use it from one thread only."""

    def __init__(self, section: RewardSection, as_verdicts: bool = False) -> None:
        names = [each.function for each in section.functions]
        functions = [n if n in BUILTIN_VERIFIERS else VERIFIERS.place(n) for n in names]
        self.unparsable_answers: set[str] = set()
        """Reference answers seen so far that math-verify could not parse."""
        self.first_error: str | None = None
        """The first exception of a reward function, and where it was raised."""
        self._section, self._as_verdicts = section, as_verdicts
        self._weights = [each.weight for each in section.functions]
        self._own = [function not in BUILTIN_VERIFIERS for function in functions]
        self._builtin = not any(self._own)
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._submitted: list[tuple[Hashable, _Graded]] = []
        self._pending = 0
        self._groups: dict[str, list[_Member]] = {}  # that are not complete
        self._pool = VerifierPool(
            functions,
            section.workers,
            section.time_limit_seconds,
            MEMORY_LIMIT_MIB,
            self._accept,
            self._fail,
        )

    @classmethod
    def open(cls, section: RewardSection, as_verdicts: bool = False) -> "RewardScorer":
        """A scorer whose workers start in the background. With `as_verdicts`, a function of the
        user gives "correct" from `section.correct` on and "incorrect" below, instead of "scored".

        A function that cannot be loaded raises RecipeError from the first `results` or `score`.
        """
        return cls(section, as_verdicts)

    def submit(self, key: Hashable, request: GradingRequest) -> None:
        """Queue one completion for grading, and return without its verdict. With a function of the
        user and a group of several it first waits until a worker is ready.

        If a function takes a group together, its completions wait until all are submitted, and come
        in the order of their keys. Raises DatasetError if the row holds what JSON cannot.
        """
        together = request.group_size > 1 and not self._builtin and self._takes_many()
        with self._changed:
            graded = _Graded(request.answer)
            member = (key, graded, self._body(request))
            self._pending += 1
            if together:
                self._groups.setdefault(request.group, []).append(member)
                self._put_group(request.group, request.group_size)
            else:
                self._put([member])
            self._submitted.append((key, graded))

    def _takes_many(self) -> bool:
        self._pool.wait_ready()
        return self._pool.takes_many

    def _put(self, members: Sequence[_Member]) -> None:
        ordered = sorted(members, key=itemgetter(0))  # not as they finished
        graded = [each for _, each, _ in ordered]
        body = b"[" + b",".join(body for *_, body in ordered) + b"]"
        affinity = zlib.crc32(graded[0].gold.encode("utf-8", "surrogatepass"))
        self._pool.put((graded, body), affinity)

    def _put_group(self, group: str, least: int) -> None:
        if len(self._groups.get(group, ())) >= least:
            self._put(self._groups.pop(group))

    def put_incomplete(self, group: str | None = None) -> None:
        """Grade what waits for completions of its group that will not come; of all groups if
        None."""
        with self._changed:
            for each in list(self._groups) if group is None else [group]:
                self._put_group(each, least=1)

    def statuses(self) -> Counter[str]:
        """The number of verdicts of each status that have arrived since the last `results`."""
        with self._changed:
            arrived = [graded.answers for _, graded in self._submitted if graded.answers]
        return Counter(self._status(answers) for answers in arrived)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; True once everything submitted is graded or grading failed."""
        self.put_incomplete()
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout=seconds)

    def _is_settled(self) -> bool:
        return self._failure is not None or self._pending == 0

    def results(self) -> dict[Hashable, Verdict]:
        """Wait for all verdicts since the last call and return them in submission order.

        Raises RecipeError if the reward function cannot be loaded.
        """
        self.put_incomplete()
        with self._changed:
            self._changed.wait_for(self._is_settled)
            if self._failure is not None:
                raise self._failure
            submitted, self._submitted = self._submitted, []
        verdicts = {key: self._verdict(graded) for key, graded in submitted}
        if len(verdicts) != len(submitted):
            raise ValueError("two completions were submitted for grading under one key")
        return verdicts

    def wait_ready(self) -> None:
        """Wait until a worker is ready. Raises RecipeError if a function cannot be loaded."""
        self._pool.wait_ready()
        if self._failure is not None:
            raise self._failure

    def sources(self) -> dict[str, str]:
        """SHA-256 of the source file of each function of the user, as its worker loaded it. Waits
        for one. Raises RecipeError if a function cannot be loaded."""
        if not self._builtin:
            self.wait_ready()
        return self._pool.sources if not self._builtin else {}

    def take_graded(self) -> dict[Hashable, Verdict]:
        """The verdicts that have arrived, without waiting for the others; each is returned once.

        Raises RecipeError if the reward function cannot be loaded.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            arrived = [(key, graded) for key, graded in self._submitted if graded.answers]
            if arrived:
                self._submitted = [each for each in self._submitted if not each[1].answers]
        return {key: self._verdict(graded) for key, graded in arrived}

    def score(self, items: Sequence[tuple[str, str, Mapping[str, Any] | None]]) -> list[Verdict]:
        """Verdicts of (completion, answer, row) items, in order."""
        for index, item in enumerate(items):
            self.submit(index, GradingRequest(*item))
        return list(self.results().values())

    def close(self) -> None:
        """Kill the workers. May be called twice."""
        self._pool.close()

    def __enter__(self) -> "RewardScorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _body(self, request: GradingRequest) -> bytes:
        task: dict[str, Any] = {"text": request.text, "answer": request.answer}
        row = request.row or {}
        if not self._builtin:
            names = ("completion_ids", "truncated", "prompt", "messages", "step", "group")
            task |= {"row": dict(row)} | {name: getattr(request, name) for name in names}
        try:
            return json.dumps(task, default=_plain).encode("ascii")
        except (TypeError, ValueError) as error:
            raise DatasetError(
                f"a row cannot be passed to reward.function {self._names()}: {error}; "
                f"its fields are {', '.join(map(str, row))}: remove the field that is not "
                "text, a number, a list or a mapping"
            ) from error

    def _verdict(self, graded: _Graded) -> Verdict:
        answers = graded.answers
        assert answers is not None
        if answers[0].get("gold_parsed") is False:
            self.unparsable_answers.add(graded.gold)
        section, status = self._section, self._status(answers)
        scores: tuple[float, ...]
        if self._own_failure(answers):
            return Verdict(None, status, ())
        if status in FAILED:
            scores = (section.incorrect, *(0.0 for _ in section.functions[1:]))
        else:
            scores = tuple(map(self._score, answers))
        weighted = (weight * score for weight, score in zip(self._weights, scores, strict=True))
        return Verdict(sum(weighted), status, scores)

    def _own_failure(self, answers: Sequence[dict[str, Any]]) -> str | None:
        """The status of the first function of the user that failed, or "none" if nothing was
        graded; None if neither."""
        pairs = zip(answers, self._own)  # a failure may have ended the answers
        failed = (each["status"] for each, own in pairs if own and each["status"] in FAILED)
        return next(failed, "none" if answers[0]["status"] == "none" else None)

    def _status(self, answers: Sequence[dict[str, Any]]) -> str:
        statuses = [each["status"] for each in answers]
        failed = (status for status in statuses if status in FAILED)
        return self._own_failure(answers) or next(failed, statuses[0])

    def _score(self, answer: dict[str, Any]) -> float:
        if "reward" in answer:
            return answer["reward"]
        return self._section.correct if answer["status"] == "correct" else self._section.incorrect

    def _accept(self, members: list[_Graded], answers: Answers) -> None:
        for graded, of_completion in zip(members, zip(*answers, strict=True), strict=True):
            self._accept_one(graded, [dict(each) for each in of_completion])

    def _accept_one(self, graded: _Graded, answers: list[dict[str, Any]]) -> None:
        first = answers[0]
        if self._as_verdicts and first["status"] == "scored":
            is_correct = first["reward"] >= self._section.correct
            first["status"] = "correct" if is_correct else "incorrect"
        errors = [without_secrets(each["error"]) for each in answers if "error" in each]
        with self._changed:
            graded.answers = answers
            self._pending -= 1
            self._changed.notify_all()
            is_first = bool(errors) and self.first_error is None
            self.first_error = self.first_error or next(iter(errors), None)
        if is_first:
            logger.warning(
                "reward function %s failed on a completion (reported once per run): %s",
                *(self._names(), errors[0]),
            )

    def _names(self) -> str:
        return ", ".join(repr(each.function) for each in self._section.functions)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()


def _plain(value: Any) -> Any:
    """JSON escapes preserve NULs and lone surrogates. Dataset rows may also contain numpy scalars,
    arrays and dates."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__} cannot be sent to a verifier worker")
