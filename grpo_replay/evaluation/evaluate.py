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
from grpo_replay.sampling.sampler_protocol import Sampler, checked_completions
from grpo_replay.stop import StopToken
from grpo_replay.storage.run_directory import installed_versions
from grpo_replay.types import Verdict
from grpo_replay.version import __version__

OnProgress = Callable[[int, int, int], object]
"""Called with three counts of this rank's completions: graded, all, and correct."""

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
    """Evaluate a sampler's model. Returns the report; None off rank 0 or if `stop` is requested.

    `scorer` must grade with `plan.settings.reward` and have nothing pending. `model` is copied into
    the report. `generations_folder` caches the completions of this model. `stop` is checked between
    completions; a request to one rank ends the evaluation on all. Collective: all ranks call it.
    """
    # Ranks are chosen by problem, so that all samples of a prompt share one sampler's prefix cache.
    ranks = [sample.request.key.prompt_index % comm.world_size for sample in plan.samples]
    own_samples = [index for index, rank in enumerate(ranks) if rank == comm.rank]
    grading = _Grading(plan, scorer, len(own_samples), on_progress)
    missing = own_samples
    if generations_folder:
        missing = _submit_cached(grading, own_samples, generations_folder)
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
    settings = plan.document | {"stop_tokens": [str(token) for token in stops]}
    for digest in scorer.sources().values():  # of the user's reward function, if any
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
        """`total` is the number of completions of this rank, for progress reports."""
        self.plan = plan
        self._total = total
        self._scorer = scorer
        self._on_progress = on_progress
        self._is_builtin = plan.settings.reward in BUILTIN_VERIFIERS
        self._decoded: dict[int, dict[str, Any]] = {}  # columns by index, without token ids
        self._last_report = 0.0
        self._sizes = Counter(map(_group_name, plan.samples))

    def submit(self, index: int, token_ids: np.ndarray, finish_reason: str) -> None:
        """Submit the completion of `plan.samples[index]` for grading; returns at once."""
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
        group = _group_name(planned)
        request = GradingRequest(
            text, problem.answer, problem.row, token_ids.tolist(),
            truncated=finish_reason == "length", prompt=planned.prompt, messages=messages,
            group=group, group_size=self._sizes[group],
        )  # fmt: skip
        self._scorer.submit(index, request)
        self._report_progress()

    def wait(self, stop: StopToken) -> None:
        """Wait until everything submitted is graded, or a stop is requested."""
        while not (self._scorer.wait(PROGRESS_SECONDS) or stop.requested):
            self._report_progress()

    def finish(self) -> tuple[pa.Table, set[str]]:
        """The rows of all submitted completions, and the reference answers that do not parse."""
        self._report_progress(last=True)
        verdicts = self._scorer.results()
        rows = [self._row(index, verdicts[index]) for index in self._decoded]
        return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA), self._scorer.unparsable_answers

    def _row(self, index: int, verdict: Verdict) -> dict[str, Any]:
        """Returns the row of a graded completion for the report's Parquet file."""
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
        """Calls `on_progress`, at most every `PROGRESS_SECONDS` unless it is the `last` time."""
        if self._on_progress is None:
            return
        now = time.monotonic()
        if last or now - self._last_report > PROGRESS_SECONDS:
            self._last_report = now
            statuses = self._scorer.statuses()
            self._on_progress(statuses.total(), self._total, statuses["correct"])


def _group_name(planned: PlannedSample) -> str:
    """Returns the group of a completion, for the reward function. The greedy completion is a group
    of its own, so that `eval.greedy` does not change the rewards of sampled ones."""
    number = str(planned.request.key.prompt_index)
    return f"{number} greedy" if planned.greedy else number


def _submit_cached(grading: _Grading, indices: Sequence[int], folder: Path) -> list[int]:
    """Submit the planned samples that are cached in `folder`; returns the indices of the others."""
    digests = {index: request_digest(grading.plan.samples[index].request) for index in indices}
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
    """Sample the missing completions, cache and submit them, until a stop is requested."""
    by_key = {grading.plan.samples[index].request.key: index for index in missing}
    requests = [grading.plan.samples[index].request for index in missing]
    cache: AbstractContextManager[Any] = nullcontext()
    if folder is not None:
        cache = GenerationWriter(folder)
    with cache as writer:
        for completion in checked_completions(sampler, requests):
            index = by_key[completion.key]
            if writer is not None:
                writer.add(grading.plan.samples[index].request, completion)
            grading.submit(index, completion.token_ids, completion.finish_reason)
            if stop.requested:
                break
