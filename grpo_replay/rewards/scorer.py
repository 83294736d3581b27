"""The reward scorer: grades completions in worker processes while sampling goes on.

    with RewardScorer.open(recipe.reward) as scorer:      # workers start in the background
        for completion in sampler.generate(requests):
            scorer.submit(completion.key, GradingRequest(text, answer, row))
        verdicts = scorer.results()                       # key -> Verdict, in submission order

If a function of the user raises, returns None, exceeds the time or memory limit or crashes its
worker, there is no reward. A completion that makes a built-in verifier fail gets the incorrect
reward. The status of the verdict names the cause. With several functions, a failure of one is a
failure of the verdict.
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

    The other fields are only for functions of the user: the dataset's `row`, whether the completion
    was `truncated` at the length limit, its `completion_ids`, the rendered `prompt`, its
    `messages`, the training `step` (None in evaluations), and the name of the `group` of
    `group_size` completions of the prompt.
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
    def for_prompt(
        cls, prompt: Prompt, text: str, completion_ids: Sequence[int], **fields: Any
    ) -> "GradingRequest":
        """Returns the request for a completion to `prompt`, with further `fields`."""
        graded = text, prompt.answer, prompt.row, completion_ids
        return cls(*graded, prompt=prompt.text, messages=prompt.messages, **fields)


@dataclass(slots=True, eq=False)
class _Submission:
    """A submitted completion: its reference answer, and the `answers` once they arrive."""

    gold: str
    answers: list[dict[str, Any]] | None = None


_Member = tuple[Any, _Submission, bytes]
"""The key of a submitted completion, its submission, and its JSON for the worker."""


class RewardScorer:
    """Scores completions with the recipe's reward functions. Use it from one thread only."""

    def __init__(self, section: RewardSection, as_verdicts: bool = False) -> None:
        """Starts the pool of workers; use `open`. `as_verdicts` grades scores as correct or not."""
        names = [weighted.function for weighted in section.functions]
        functions = [n if n in BUILTIN_VERIFIERS else VERIFIERS.import_path(n) for n in names]
        self.unparsable_answers: set[str] = set()
        """Reference answers so far that math-verify could not parse."""
        self.first_error: str | None = None
        """The first exception of a reward function, with the line that raised it."""
        self._section, self._as_verdicts = section, as_verdicts
        self._weights = [weighted.weight for weighted in section.functions]
        self._is_user_function = [function not in BUILTIN_VERIFIERS for function in functions]
        self._builtin = not any(self._is_user_function)
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._submitted: list[tuple[Hashable, _Submission]] = []
        self._pending = 0
        self._groups: dict[str, list[_Member]] = {}  # incomplete groups
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
        """Open a scorer whose workers start in the background. With `as_verdicts`, a user's score
        is "correct" from `section.correct` on, else "incorrect", instead of "scored".

        A function that cannot be loaded raises RecipeError from the first `results` or `score`.
        """
        return cls(section, as_verdicts)

    def submit(self, key: Hashable, request: GradingRequest) -> None:
        """Queue one completion for grading, without waiting for its verdict. With a function of the
        user and a group of several, first waits until a worker is ready.

        If a function needs a whole group, completions are queued when all of the group are
        submitted, in the order of their keys. Raises DatasetError if JSON cannot express the row.
        """
        waits_for_group = request.group_size > 1 and not self._builtin and self._needs_whole_group()
        with self._changed:
            graded = _Submission(request.answer)
            member = (key, graded, self._body(request))
            self._pending += 1
            if waits_for_group:
                self._groups.setdefault(request.group, []).append(member)
                self._put_group_if_complete(request.group, request.group_size)
            else:
                self._put([member])
            self._submitted.append((key, graded))

    def _needs_whole_group(self) -> bool:
        self._pool.wait_ready()
        return self._pool.needs_whole_group

    def _put(self, members: Sequence[_Member]) -> None:
        ordered = sorted(members, key=itemgetter(0))  # not in the order in which they finished
        submissions = [submission for _, submission, _ in ordered]
        body = b"[" + b",".join(body for *_, body in ordered) + b"]"
        affinity = zlib.crc32(submissions[0].gold.encode("utf-8", "surrogatepass"))
        self._pool.put((submissions, body), affinity)

    def _put_group_if_complete(self, group: str, size: int) -> None:
        if len(self._groups.get(group, ())) >= size:
            self._put(self._groups.pop(group))

    def put_incomplete(self, group: str | None = None) -> None:
        """Grade the submitted completions of an incomplete group, or of all such groups if None:
        the others will not be submitted."""
        with self._changed:
            for name in list(self._groups) if group is None else [group]:
                self._put_group_if_complete(name, size=1)

    def statuses(self) -> Counter[str]:
        """Counts the verdicts by status that have arrived since the last `results`."""
        with self._changed:
            arrived = [graded.answers for _, graded in self._submitted if graded.answers]
        return Counter(self._status(answers) for answers in arrived)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`. Returns True if all submissions are graded, or grading failed."""
        self.put_incomplete()
        with self._changed:
            return self._changed.wait_for(self._is_finished, timeout=seconds)

    def _is_finished(self) -> bool:
        return self._failure is not None or self._pending == 0

    def results(self) -> dict[Hashable, Verdict]:
        """Wait for all verdicts since the last call, and return them in submission order.

        Raises RecipeError if the reward function cannot be loaded.
        """
        self.put_incomplete()
        with self._changed:
            self._changed.wait_for(self._is_finished)
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
        """SHA-256 of the source file of each function of the user, as loaded by a worker. Waits
        until a worker is ready. Raises RecipeError if a function cannot be loaded."""
        if self._builtin:
            return {}
        self.wait_ready()
        return self._pool.sources

    def take_graded(self) -> dict[Hashable, Verdict]:
        """Return the verdicts that have arrived, each only once, without waiting for others.

        Raises RecipeError if the reward function cannot be loaded.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            arrived = [(key, graded) for key, graded in self._submitted if graded.answers]
            if arrived:
                self._submitted = [entry for entry in self._submitted if not entry[1].answers]
        return {key: self._verdict(graded) for key, graded in arrived}

    def score(self, items: Sequence[tuple[str, str, Mapping[str, Any] | None]]) -> list[Verdict]:
        """Grade (completion, answer, row) items; returns verdicts in order."""
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
        """Encodes a request as JSON for a worker; built-in verifiers get text and answer alone."""
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

    def _verdict(self, graded: _Submission) -> Verdict:
        """Makes the verdict of all functions' answers: the reward is their weighted sum, missing if
        a user's function failed, and that of an incorrect answer if a built-in one failed."""
        answers = graded.answers
        assert answers is not None
        if answers[0].get("gold_parsed") is False:
            self.unparsable_answers.add(graded.gold)
        section, status = self._section, self._status(answers)
        scores: tuple[float, ...]
        if self._user_failure(answers):
            return Verdict(None, status, ())
        if status in FAILED:
            scores = (section.incorrect, *(0.0 for _ in section.functions[1:]))
        else:
            scores = tuple(map(self._score, answers))
        weighted = (weight * score for weight, score in zip(self._weights, scores, strict=True))
        return Verdict(sum(weighted), status, scores)

    def _user_failure(self, answers: Sequence[dict[str, Any]]) -> str | None:
        """Return the status of the first user's function that failed; None if none did."""
        pairs = zip(answers, self._is_user_function)  # after a failure answers are missing
        statuses = (answer["status"] for answer, is_user_function in pairs if is_user_function)
        failed = (status for status in statuses if status in FAILED)
        return next(failed, "none" if answers[0]["status"] == "none" else None)

    def _status(self, answers: Sequence[dict[str, Any]]) -> str:
        statuses = [answer["status"] for answer in answers]
        failed = (status for status in statuses if status in FAILED)
        return self._user_failure(answers) or next(failed, statuses[0])

    def _score(self, answer: dict[str, Any]) -> float:
        if "reward" in answer:
            return answer["reward"]
        return self._section.correct if answer["status"] == "correct" else self._section.incorrect

    def _accept(self, submissions: list[_Submission], answers: Answers) -> None:
        by_completion = zip(*answers, strict=True)
        for submission, own_answers in zip(submissions, by_completion, strict=True):
            self._accept_one(submission, [dict(answer) for answer in own_answers])

    def _accept_one(self, graded: _Submission, answers: list[dict[str, Any]]) -> None:
        """Stores the functions' answers to one completion, and wakes a waiting `results`. For
        evaluations a score becomes "correct" from `reward.correct` on. Called by the pool's
        threads. The first error of a run is logged as a warning."""
        first = answers[0]
        if self._as_verdicts and first["status"] == "scored":
            is_correct = first["reward"] >= self._section.correct
            first["status"] = "correct" if is_correct else "incorrect"
        errors = [without_secrets(answer["error"]) for answer in answers if "error" in answer]
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
        return ", ".join(repr(weighted.function) for weighted in self._section.functions)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()


def _plain(value: Any) -> Any:
    """Convert a value for JSON: dataset rows may have numpy scalars, arrays and dates. JSON's
    escapes preserve NULs and lone surrogates."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__} cannot be sent to a verifier worker")
