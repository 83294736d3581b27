"""Evaluation of a model on benchmarks, during training and from the command line.

    plan = plan_evaluation(tokenizer, recipe)
    report = evaluate(sampler, tokenizer, plan, comm, scorer)
    report.write(Path("eval.json"))                     # and eval.parquet, one row per sample

All benchmarks, sampled and greedy, go to the sampler in one call. Problem i is sampled (or read
from the cache) and graded by rank i modulo the number of ranks; rank 0 gathers the rows and
summarises them. A completion depends only on its problem, its sample number and the model, so the
report does not depend on the number of ranks.
"""

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_replay.distributed.comm import Comm
from grpo_replay.evaluation.benchmarks import EvaluationPlan, PlannedSample
from grpo_replay.evaluation.cache import GenerationWriter, read_generations, request_digest
from grpo_replay.evaluation.evaluation_report import (
    SAMPLE_SCHEMA,
    VERIFIER_PACKAGES,
    EvaluationReport,
    merge,
)
from grpo_replay.evaluation.statistics import summarise_both
from grpo_replay.prompts.prompt_set import prompt_messages
from grpo_replay.prompts.sources import ChatMessage
from grpo_replay.recipe import BUILTIN_VERIFIERS
from grpo_replay.rewards.scorer import GradingRequest, RewardScorer
from grpo_replay.sampling.sampler_protocol import Sampler, completions_of
from grpo_replay.stop import StopToken
from grpo_replay.storage.run_directory import installed_versions
from grpo_replay.types import Verdict
from grpo_replay.version import __version__

OnProgress = Callable[[int, int, int], object]
"""Gets the completions of this rank that are graded, all of them, and those found correct."""

PROGRESS_SECONDS = 0.2
"""Shortest time between two progress reports."""


def evaluate(
    sampler: Sampler,
    tokenizer: Any,
    plan: EvaluationPlan,
    comm: Comm,
    scorer: RewardScorer,
    *,
    model: Mapping[str, Any] | None = None,
    generations_folder: Path | None = None,
    on_progress: OnProgress | None = None,
    stop: StopToken | None = None,
) -> EvaluationReport | None:
    """The report of the sampler's model on rank 0; None elsewhere, and if `stop` is requested.

    `scorer` must grade with `plan.settings.reward` and have nothing pending. `model` is copied into
    the report. `generations_folder` caches the completions of this model. `stop` is asked
    between completions, and a request to any rank ends it on all. Collective: all ranks call it.
    """
    # By problem, so that all samples of a prompt share one sampler's prefix cache.
    ranks = [each.request.key.prompt_index % comm.world_size for each in plan.samples]
    mine = [index for index, rank in enumerate(ranks) if rank == comm.rank]
    grading = _Grading(plan, scorer, len(mine), on_progress)
    missing = _recall(grading, mine, generations_folder) if generations_folder else mine
    stop = stop or StopToken()
    _generate(grading, sampler, missing, generations_folder, stop)
    grading.wait(stop)
    if any(comm.all_gather(stop.requested)):
        return None
    table, unparsable = grading.finish()
    tables = comm.gather(table)
    unparsable_by_rank = comm.all_gather(sorted(unparsable))
    if tables is None:
        return None
    samples = merge(tables, [benchmark.name for benchmark in plan.benchmarks])
    sampled, greedy = summarise_both(samples, set().union(*unparsable_by_rank))
    stops = tokenizer.convert_ids_to_tokens(list(sampler.stop_token_ids))
    settings = plan.document | {"stop_tokens": [str(each) for each in stops]}
    for digest in scorer.sources().values():  # of a function of the user
        settings["reward_sha256"] = digest
    packages = ["torch", "transformers", *VERIFIER_PACKAGES, *plan.packages]
    versions = {"grpo-replay": __version__, "python": platform.python_version()}
    versions |= installed_versions(packages)
    return EvaluationReport(dict(model or {}), settings, versions, sampled, greedy, samples)


class _Grading:
    """Decodes one rank's completions and submits them to the scorer as they arrive."""

    def __init__(
        self,
        plan: EvaluationPlan,
        scorer: RewardScorer,
        total: int,
        on_progress: OnProgress | None,
    ) -> None:
        self.plan = plan
        self._total = total
        self._scorer = scorer
        self._on_progress = on_progress
        self._is_builtin = plan.settings.reward in BUILTIN_VERIFIERS
        self._decoded: dict[int, dict[str, Any]] = {}  # columns of rows, without token ids
        self._last_report = 0.0
        self._sizes = Counter(map(_group_of, plan.samples))

    def submit(self, index: int, token_ids: np.ndarray, finish_reason: str) -> None:
        """Grade the completion of `plan.samples[index]`; returns at once."""
        text = self.plan.text.decode(token_ids.tolist())
        self._decoded[index] = {
            # A byte-level decoder may emit lone surrogates, which are not valid UTF-8 for Arrow.
            "completion_text": text.encode("utf-8", "replace").decode("utf-8"),
            "tokens": len(token_ids),
            "finish_reason": finish_reason,
        }
        planned = self.plan.samples[index]
        problem, messages = planned.problem, list[ChatMessage]()
        if not self._is_builtin:
            messages = prompt_messages(self.plan.prompts, problem.problem)
        group = _group_of(planned)
        request = GradingRequest(
            text, problem.answer, problem.row, token_ids.tolist(),
            truncated=finish_reason == "length", prompt=planned.prompt, messages=messages,
            group=group, group_size=self._sizes[group],
        )  # fmt: skip
        self._scorer.submit(index, request)
        self._report_progress()

    def wait(self, stop: StopToken) -> None:
        """Wait until everything submitted is graded, or until asked to stop."""
        while not (self._scorer.wait(PROGRESS_SECONDS) or stop.requested):
            self._report_progress()

    def finish(self) -> tuple[pa.Table, set[str]]:
        """The rows of all submitted completions, and the reference answers that do not parse."""
        self._report_progress(last=True)
        verdicts = self._scorer.results()
        rows = [self._row(index, verdicts[index]) for index in self._decoded]
        return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA), self._scorer.unparsable_answers

    def _row(self, index: int, verdict: Verdict) -> dict[str, Any]:
        planned = self.plan.samples[index]
        return {
            **self._decoded[index],
            "benchmark": planned.benchmark,
            "problem_index": planned.problem_index,
            "problem_id": planned.problem.problem_id,
            "greedy": planned.greedy,
            "sample": planned.sample,
            "seed": planned.request.seed,
            "answer": planned.problem.answer,
            "verdict": verdict.status,
            "correct": verdict.status == "correct",
            "score": None if self._is_builtin else verdict.reward,
        }

    def _report_progress(self, last: bool = False) -> None:
        if self._on_progress is None:
            return
        now = time.monotonic()
        if last or now - self._last_report > PROGRESS_SECONDS:
            self._last_report = now
            found = self._scorer.statuses()
            self._on_progress(found.total(), self._total, found["correct"])


def _group_of(planned: PlannedSample) -> str:
    """The group of a completion for the reward function. The greedy one has its own, so that
    `eval.greedy` does not change the rewards of the sampled ones."""
    number = str(planned.request.key.prompt_index)
    return f"{number} greedy" if planned.greedy else number


def _recall(grading: _Grading, mine: Sequence[int], folder: Path) -> list[int]:
    """Submit the planned samples `mine` that are cached in `folder`; returns the others."""
    digests = {index: request_digest(grading.plan.samples[index].request) for index in mine}
    cached = read_generations(folder, digests.values())
    for index, digest in digests.items():
        if digest in cached:
            grading.submit(index, *cached[digest])
    return [index for index, digest in digests.items() if digest not in cached]


def _generate(
    grading: _Grading,
    sampler: Sampler,
    missing: Sequence[int],
    folder: Path | None,
    stop: StopToken,
) -> None:
    """Sample what is missing, add it to the cache, and submit it, until asked to stop."""
    by_key = {grading.plan.samples[index].request.key: index for index in missing}
    requests = [grading.plan.samples[index].request for index in missing]
    keeping: AbstractContextManager[Any] = nullcontext()
    if folder is not None:
        keeping = GenerationWriter(folder)
    with keeping as writer:
        for completion in completions_of(sampler, requests):
            index = by_key[completion.key]
            if writer is not None:
                writer.add(grading.plan.samples[index].request, completion)
            grading.submit(index, completion.token_ids, completion.finish_reason)
            if stop.requested:
                break
