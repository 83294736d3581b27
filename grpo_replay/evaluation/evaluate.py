"""Evaluation: problems in, a report out; the same code while training and from the command line.

    plan = plan_evaluation(tokenizer, recipe)
    report = evaluate(sampler, tokenizer, plan, comm, scorer)
    report.write(Path("eval.json"))                     # and eval.parquet, one row per sample

All benchmarks, sampled and greedy, go to the sampler in one call; every rank samples (or recalls)
and grades the problems whose number is its rank modulo the ranks; rank 0 gathers and summarises.
What a completion is depends on its problem, its sample number and the model alone, and so does the
report.
"""

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpo_replay import __version__
from grpo_replay.distributed.comm import Comm
from grpo_replay.evaluation.aggregate import summarise_both
from grpo_replay.evaluation.cache import (
    Generation,
    GenerationWriter,
    read_generations,
    request_digest,
)
from grpo_replay.evaluation.report import EvaluationReport
from grpo_replay.evaluation.samples import SAMPLE_SCHEMA, merge, to_bytes
from grpo_replay.evaluation.sampling_plan import EvaluationPlan, PlannedSample, plan_evaluation
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.sampling.protocol import Sampler
from grpo_replay.storage.versions import VLLM_PACKAGES, installed_versions
from grpo_replay.types import Verdict

__all__ = ["EvaluationPlan", "Progress", "evaluate", "plan_evaluation"]

VERSIONED_PACKAGES = ("torch", "transformers", "math-verify", "latex2sympy2_extended", "sympy")

PROGRESS_SECONDS = 0.2
"""Shortest time between two progress reports."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank's evaluation is; `statuses` counts the verdicts that have arrived."""

    total: int
    statuses: Counter[str]

    @property
    def done(self) -> int:
        """Completions that are sampled and graded."""
        return self.statuses.total()

    @property
    def accuracy(self) -> float | None:
        """Of what is done; None if nothing is."""
        return self.statuses["correct"] / self.done if self.done else None


def evaluate(
    sampler: Sampler,
    tokenizer: Any,
    plan: EvaluationPlan,
    comm: Comm,
    scorer: RewardScorer,
    *,
    model: Mapping[str, Any] | None = None,
    generations_folder: Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> EvaluationReport | None:
    """The report of the sampler's model on rank 0, None elsewhere.

    `scorer` must grade with `plan.settings.reward` and have nothing under way. `model` goes into
    the report. With `generations_folder`, which belongs to this model, completions are kept there
    and found there. Collective: all ranks call it.
    """
    mine = [i for i, each in enumerate(plan.samples) if _rank_of(each, comm) == comm.rank]
    work = _Work(plan, tokenizer, scorer, len(mine), on_progress)
    missing = _recall(work, mine, generations_folder) if generations_folder else mine
    _generate(work, sampler, missing, generations_folder, comm)
    table, unparsable = work.finish()
    payloads = comm.gather(to_bytes(table))
    unparsable_by_rank = comm.all_gather_json(sorted(unparsable))
    if payloads is None:
        return None
    samples = merge(payloads, [benchmark.name for benchmark in plan.benchmarks])
    bad_answers = {answer for answers in unparsable_by_rank for answer in answers}
    settings = plan.document | {"stop_tokens": _stop_tokens(sampler, tokenizer)}
    return _report(plan, settings, samples, bad_answers, dict(model or {}))


@dataclass(frozen=True, slots=True)
class _Taken:
    """A completion that is being graded: what its row needs. Token ids would be most of memory."""

    text: str
    tokens: int
    finish_reason: str


class _Work:
    """One rank's completions: decoded and handed to the scorer as they come."""

    def __init__(
        self,
        plan: EvaluationPlan,
        tokenizer: Any,
        scorer: RewardScorer,
        total: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.plan = plan
        self._total = total
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._on_progress = on_progress
        self._taken: dict[int, _Taken] = {}
        self._last_told = 0.0

    def take(self, index: int, generation: Generation) -> None:
        """Have the completion of `plan.samples[index]` graded."""
        text = self._tokenizer.decode(generation.token_ids.tolist(), skip_special_tokens=True)
        self._taken[index] = _Taken(text, len(generation.token_ids), generation.finish_reason)
        self._scorer.submit(index, text, self.plan.samples[index].problem.answer)
        self._tell()

    def finish(self) -> tuple[pa.Table, set[str]]:
        """The rows of what was taken, and the reference answers that could not be parsed."""
        while not self._scorer.wait(PROGRESS_SECONDS):
            self._tell()
        self._tell(last=True)
        verdicts = self._scorer.results()
        rows = [self._row(index, verdict) for index, verdict in verdicts.items()]
        return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA), self._scorer.unparsable_answers

    def _row(self, index: int, verdict: Verdict) -> dict[str, Any]:
        planned, taken = self.plan.samples[index], self._taken[index]
        return {
            "benchmark": planned.benchmark,
            "problem_index": planned.problem_index,
            "problem_id": planned.problem.problem_id,
            "greedy": planned.greedy,
            "sample": planned.sample,
            "seed": planned.request.seed,
            "answer": planned.problem.answer,
            # Arrow strings are UTF-8: half a surrogate pair from a byte-level decoder is not.
            "completion_text": taken.text.encode("utf-8", "replace").decode("utf-8"),
            "tokens": taken.tokens,
            "finish_reason": taken.finish_reason,
            "verdict": verdict.status,
            "correct": verdict.status == "correct",
        }

    def _tell(self, last: bool = False) -> None:
        if self._on_progress is None:
            return
        now = time.monotonic()
        if last or now - self._last_told > PROGRESS_SECONDS:
            self._last_told = now
            self._on_progress(Progress(self._total, self._scorer.statuses()))


def _recall(work: _Work, mine: Sequence[int], folder: Path) -> list[int]:
    """Takes what an earlier evaluation left in `folder` of the planned samples `mine`; returns the
    others."""
    digests = {index: request_digest(work.plan.samples[index].request) for index in mine}
    remembered = read_generations(folder, digests.values())
    for index, digest in digests.items():
        if digest in remembered:
            work.take(index, remembered[digest])
    return [index for index, digest in digests.items() if digest not in remembered]


def _generate(
    work: _Work, sampler: Sampler, missing: Sequence[int], folder: Path | None, comm: Comm
) -> None:
    by_key = {work.plan.samples[index].request.key: index for index in missing}
    requests = [work.plan.samples[index].request for index in missing]
    with ExitStack() as stack:
        writer = stack.enter_context(GenerationWriter(folder)) if folder else None
        finished = sampler.generate(requests)
        for completion in comm.position.each("completion", finished, len(requests)):
            index = by_key[completion.key]
            generation = Generation(completion.token_ids, completion.finish_reason)
            if writer is not None:
                writer.add(request_digest(work.plan.samples[index].request), generation)
            work.take(index, generation)


def _rank_of(planned: PlannedSample, comm: Comm) -> int:
    # By problem, so that the samples of one prompt share its prefix in one sampler.
    return planned.request.key.prompt_index % comm.world_size


def _report(
    plan: EvaluationPlan,
    settings: dict[str, Any],
    samples: pa.Table,
    bad_answers: set[str],
    model: dict[str, Any],
) -> EvaluationReport:
    sampled, greedy = summarise_both(samples, plan.settings.bootstrap_samples, bad_answers)
    return EvaluationReport(model, settings, _versions(plan), sampled, greedy, samples)


def _stop_tokens(sampler: Sampler, tokenizer: Any) -> list[str]:
    return [str(each) for each in tokenizer.convert_ids_to_tokens(list(sampler.stop_token_ids))]


def _versions(plan: EvaluationPlan) -> dict[str, str]:
    packages = [*VERSIONED_PACKAGES]
    if plan.document["backend"] != "hf":
        packages += VLLM_PACKAGES  # neither, perhaps, where only a remote server has it
    own = {"grpo-replay": __version__, "python": platform.python_version()}
    return own | installed_versions(packages)
