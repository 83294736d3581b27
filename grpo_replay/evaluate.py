"""Evaluation: problems in, a report out; the same code while training and from the command line.

    plan = plan_evaluation(tokenizer, recipe)
    report = evaluate(sampler, tokenizer, plan, comm, scorer)
    report.write(Path("eval.json"))                     # and eval.parquet, one row per sample

All benchmarks, sampled and greedy, go to the sampler in one call; every rank samples and grades the
problems whose number is its rank modulo the ranks; rank 0 gathers and summarises. What a completion
is depends on its problem, its sample number and the model alone, and so does the report.
"""

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from grpo_replay import __version__
from grpo_replay.distributed import Comm
from grpo_replay.evaluation.cache import (
    Generation,
    GenerationWriter,
    read_generations,
    request_digest,
)
from grpo_replay.evaluation.plan import EvaluationPlan, PlannedSample, plan_evaluation
from grpo_replay.evaluation.report import EvaluationReport
from grpo_replay.evaluation.results import Results
from grpo_replay.evaluation.samples import SAMPLE_SCHEMA, merge, to_bytes
from grpo_replay.evaluation.summarise import summarise
from grpo_replay.recipe import RewardSection
from grpo_replay.rewards import RewardScorer
from grpo_replay.sampler import Sampler
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
    scorer: RewardScorer | None = None,
    *,
    model: Mapping[str, Any] | None = None,
    generations_folder: Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> EvaluationReport:
    """The report of the sampler's model, on every rank; per-sample rows on rank 0 alone.

    `scorer` must grade with `plan.settings.reward` and have nothing under way; without one, one
    is opened. `model` goes into the report. With `generations_folder`, which belongs to this
    model, completions are kept there and found there. Collective: all ranks call it.
    """
    with ExitStack() as stack:
        if scorer is None:
            section = RewardSection(function=plan.settings.reward)
            scorer = stack.enter_context(RewardScorer.open(section))
        work = _Work(plan, tokenizer, scorer, on_progress)
        missing = _recall(work, comm, generations_folder)
        mine = [i for i in missing if _rank_of(plan.samples[i], comm) == comm.rank]
        _generate(work, sampler, mine, generations_folder, f"rank{comm.rank:04d}")
        table, unparsable = work.finish()
    payloads = comm.gather(to_bytes(table))
    unparsable_by_rank = comm.all_gather_json(sorted(unparsable))
    report = None
    if comm.is_main:
        assert payloads is not None
        samples = merge(payloads, [benchmark.name for benchmark in plan.benchmarks])
        bad_answers = {answer for answers in unparsable_by_rank for answer in answers}
        report = _report(plan, samples, bad_answers, dict(model or {}))
    document = comm.broadcast_json(report.to_json() if report else None)
    return report if report else EvaluationReport.from_json(document)


class _Work:
    """One rank's completions: decoded and handed to the scorer as they come."""

    def __init__(
        self,
        plan: EvaluationPlan,
        tokenizer: Any,
        scorer: RewardScorer,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.plan = plan
        self.total = 0
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._on_progress = on_progress
        self._texts: dict[int, str] = {}
        self._generations: dict[int, Generation] = {}
        self._last_told = 0.0

    def take(self, index: int, generation: Generation) -> None:
        """Have the completion of `plan.samples[index]` graded."""
        text = self._tokenizer.decode(generation.token_ids.tolist(), skip_special_tokens=True)
        self._texts[index] = text
        self._generations[index] = generation
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
        planned, generation = self.plan.samples[index], self._generations[index]
        return {
            "benchmark": planned.benchmark,
            "problem_index": planned.problem_index,
            "problem_id": planned.problem.problem_id,
            "greedy": planned.greedy,
            "sample": planned.sample,
            "seed": planned.request.seed,
            "answer": planned.problem.answer,
            # Arrow strings are UTF-8: half a surrogate pair from a byte-level decoder is not.
            "completion_text": self._texts[index].encode("utf-8", "replace").decode("utf-8"),
            "tokens": len(generation.token_ids),
            "finish_reason": generation.finish_reason,
            "verdict": verdict.status,
            "correct": verdict.status == "correct",
        }

    def _tell(self, last: bool = False) -> None:
        if self._on_progress is None:
            return
        now = time.monotonic()
        if last or now - self._last_told > PROGRESS_SECONDS:
            self._last_told = now
            self._on_progress(Progress(self.total, self._scorer.statuses()))


def _recall(work: _Work, comm: Comm, folder: Path | None) -> list[int]:
    """Numbers of the planned samples that no earlier evaluation left in `folder`, on every rank;
    rank 0 takes the others."""
    remembered: dict[str, Generation] = {}
    digests: list[str] = []
    if comm.is_main and folder is not None:
        digests = [request_digest(planned.request) for planned in work.plan.samples]
        remembered = read_generations(folder, digests)
    missing = [
        index
        for index in range(len(work.plan.samples))
        if not digests or digests[index] not in remembered
    ]
    missing = comm.broadcast_json(missing)
    mine = sum(_rank_of(work.plan.samples[i], comm) == comm.rank for i in missing)
    work.total = mine + (len(work.plan.samples) - len(missing) if comm.is_main else 0)
    if remembered:
        for index, digest in enumerate(digests):
            if digest in remembered:
                work.take(index, remembered[digest])
    return missing


def _generate(
    work: _Work, sampler: Sampler, mine: Sequence[int], folder: Path | None, name: str
) -> None:
    by_key = {work.plan.samples[index].request.key: index for index in mine}
    requests = [work.plan.samples[index].request for index in mine]
    with ExitStack() as stack:
        writer = stack.enter_context(GenerationWriter(folder, name)) if folder else None
        for completion in sampler.generate(requests):
            index = by_key[completion.key]
            generation = Generation(completion.token_ids, completion.finish_reason)
            if writer is not None:
                writer.add(request_digest(work.plan.samples[index].request), generation)
            work.take(index, generation)


def _rank_of(planned: PlannedSample, comm: Comm) -> int:
    # By problem, so that the samples of one prompt share its prefix in one sampler.
    return planned.request.key.prompt_index % comm.world_size


def _report(
    plan: EvaluationPlan, samples: pa.Table, bad_answers: set[str], model: dict[str, Any]
) -> EvaluationReport:
    unparsable: dict[str, list[str]] = {}
    for planned in plan.samples:
        ids = unparsable.setdefault(planned.benchmark, [])
        if planned.problem.answer in bad_answers and planned.problem.problem_id not in ids[-1:]:
            ids.append(planned.problem.problem_id)

    def results(greedy: bool) -> Results:
        chosen = samples.filter(pc.equal(samples["greedy"], greedy))
        return summarise(chosen, plan.settings.bootstrap_samples, unparsable)

    greedy = results(greedy=True) if plan.settings.greedy else None
    report = EvaluationReport(model, plan.document, _versions(plan), results(greedy=False), greedy)
    return replace(report, samples=samples)


def _versions(plan: EvaluationPlan) -> dict[str, str]:
    packages = [*VERSIONED_PACKAGES]
    if plan.document["backend"] != "hf":
        packages.append("vllm")
    found = {"grpo-replay": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # such as vllm where only a remote server has it
            continue
    return found
