"""The plan of an evaluation: one generation request for every completion."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.evaluation.benchmarks import (
    WAVE_SAMPLES,
    Benchmark,
    Problem,
    find_benchmarks,
    load_problems,
    local_file,
)
from grpo_replay.evaluation.statistics import BOOTSTRAP_SAMPLES, CONFIDENCE
from grpo_replay.prompts.prompt_set import prompt_messages, render_prompt
from grpo_replay.recipe import (
    BUILTIN_VERIFIERS,
    EvalSection,
    PromptsSection,
    Recipe,
    RewardSection,
    SamplingSection,
)
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.rewards.trial import TRIED_ROWS, Sample, try_rewards
from grpo_replay.types import GenerationRequest, Prompt, RequestKey, completion_seed


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """One completion of an evaluation that is to be sampled."""

    benchmark: str
    problem_index: int
    problem: Problem
    sample: int
    greedy: bool
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """All completions of an evaluation. One plan serves every evaluation of a run."""

    benchmarks: tuple[Benchmark, ...]
    samples: tuple[PlannedSample, ...]
    settings: EvalSection
    document: dict[str, Any]  # the report's `settings`
    with_vllm: bool
    prompts: PromptsSection = field(default_factory=PromptsSection)

    @property
    def problem_texts(self) -> set[tuple[str, str]]:
        """(benchmark, text) of every problem."""
        return {(each.benchmark, each.problem.text) for each in self.samples}

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return max((len(each.request.prompt_token_ids) for each in self.samples), default=0)


def plan_evaluation(
    tokenizer: Any,
    settings: EvalSection,
    prompts: PromptsSection,
    sampling: SamplingSection,
    correct_score: float = 1.0,
) -> EvaluationPlan:
    """The plan of an evaluation; the default completion length is that of training, and
    `correct_score` is the reward that a function of the user gives to a correct completion.

    Raises RecipeError for unknown benchmarks, and DatasetError for problems that cannot be read or
    whose prompt is too long.
    """
    if settings.greedy and settings.temperature == 0:
        raise RecipeError(
            "eval.greedy with eval.temperature 0 evaluates greedily twice: set only one of them"
        )
    longest = settings.max_completion_length or sampling.max_completion_length
    samples: list[PlannedSample] = []
    benchmarks = find_benchmarks(settings, prompts)
    problems_of = {each.name: load_problems(each, settings) for each in benchmarks}
    first_prompt = 0
    for benchmark in benchmarks:
        each_sample = list(_sample_settings(benchmark, settings))
        for index, problem in enumerate(problems_of[benchmark.name]):
            prompt = _prompt_tokens(prompts, tokenizer, benchmark, problem)
            number = first_prompt + index
            for each in each_sample:
                request = each.request(benchmark.name, index, number, prompt, longest)
                samples.append(
                    PlannedSample(benchmark.name, index, problem, each.sample, each.greedy, request)
                )
        first_prompt += len(problems_of[benchmark.name])
    document = _settings_document(settings, prompts, benchmarks, problems_of)
    document |= {"backend": sampling.backend, "max_completion_length": longest}
    if settings.verifier not in BUILTIN_VERIFIERS:
        document["correct_score"] = correct_score
    with_vllm = sampling.vllm_in_ranks or sampling.over_http
    return EvaluationPlan(benchmarks, tuple(samples), settings, document, with_vllm, prompts)


def plan_that_fits(tokenizer: Any, recipe: Recipe) -> EvaluationPlan:
    """The plan of `recipe.eval`. As `plan_evaluation`, and raises RecipeError if the model has no
    room for a prompt and its longest completion."""
    from grpo_replay.sampling.sampler_protocol import check_evaluation_room

    plan = plan_evaluation(
        tokenizer, recipe.eval, recipe.prompts, recipe.sampling, recipe.reward.correct
    )
    check_evaluation_room(
        recipe.sampling, recipe.model, recipe.longest_sequence, plan.longest_prompt, recipe.eval
    )
    return plan


def try_verifier(limits: RewardSection, plan: EvaluationPlan) -> list[str]:
    """Notices about the verifier of a plan, tried on a few problems with these limits; nothing for
    a built-in one, of which a report names the answers that it cannot read. Raises RecipeError if
    the function fails on every problem."""
    verifier = plan.settings.verifier
    if verifier in BUILTIN_VERIFIERS:
        return []
    planned = {each.problem.problem_id: each for each in plan.samples}
    tried = [_as_prompt(plan.prompts, each) for each in list(planned.values())[:TRIED_ROWS]]
    sample = Sample(tried, len(planned), "eval.benchmarks")
    section = limits.alone(verifier).model_copy(update={"workers": 1})
    with RewardScorer.open(section, as_verdicts=True) as scorer:
        return try_rewards(section, scorer, sample)


def _as_prompt(prompts: PromptsSection, planned: PlannedSample) -> Prompt:
    problem = planned.problem
    return Prompt(
        problem.problem_id, problem.text, planned.request.prompt_token_ids, problem.answer,
        problem.row, prompt_messages(prompts, problem.problem),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _SampleSettings:
    """The sampling settings of one sample number, for every problem of a benchmark."""

    sample: int
    greedy: bool
    base_seed: int
    temperature: float
    top_p: float

    def request(
        self, benchmark: str, problem_index: int, prompt_number: int, prompt: Any, longest: int
    ) -> GenerationRequest:
        """The seed depends on the benchmark, so that errors of benchmarks are independent."""
        of_seed = RequestKey(crc32(benchmark.encode()), problem_index, self.sample)
        seed = completion_seed(self.base_seed, of_seed)
        key = RequestKey(0, prompt_number, self.sample + self.greedy * (1 << 30))
        return GenerationRequest(key, prompt, seed, longest, self.temperature, self.top_p)


def _sample_settings(benchmark: Benchmark, settings: EvalSection) -> Iterable[_SampleSettings]:
    temperature = settings.temperature if benchmark.temperature is None else benchmark.temperature
    own = 1 if temperature == 0 else benchmark.samples
    for sample in range(settings.samples or own):
        wave = settings.seed + sample // WAVE_SAMPLES
        yield _SampleSettings(sample, False, wave, temperature, settings.top_p)
    if settings.greedy:
        yield _SampleSettings(0, True, settings.seed, 0.0, 1.0)


def _prompt_tokens(
    prompts: PromptsSection, tokenizer: Any, benchmark: Benchmark, problem: Problem
) -> Any:
    _, token_ids = render_prompt(prompts, tokenizer, problem.problem)
    if len(token_ids) > prompts.max_prompt_length:
        raise DatasetError(
            f"benchmark {benchmark.name!r}, problem {problem.problem_id!r}: its prompt has "
            f"{len(token_ids)} tokens, more than prompts.max_prompt_length "
            f"{prompts.max_prompt_length}; evaluations drop no problems: raise that limit"
        )
    return token_ids


def _settings_document(
    settings: EvalSection,
    prompts: PromptsSection,
    benchmarks: Sequence[Benchmark],
    problems_of: Mapping[str, Sequence[Problem]],
) -> dict[str, Any]:
    in_chat = prompts.in_chat
    document = {
        "benchmarks": {
            benchmark.name: _described(benchmark, settings, problems_of[benchmark.name])
            for benchmark in benchmarks
        },
        "max_problems": settings.max_problems,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "samples_per_wave": WAVE_SAMPLES,
        "template": "chat" if in_chat else "plain",
        "system_prompt": prompts.system_prompt if in_chat else None,
        "user_template": prompts.user_template,
        "reward": settings.verifier,
        "bootstrap_samples": BOOTSTRAP_SAMPLES,
        "confidence": CONFIDENCE,
    }
    if in_chat and prompts.chat_template_kwargs:
        document["chat_template_kwargs"] = prompts.chat_template_kwargs
    return document


def _described(
    benchmark: Benchmark, settings: EvalSection, problems: Sequence[Problem]
) -> dict[str, Any]:
    file = local_file(benchmark, settings)
    seeds = {each.base_seed for each in _sample_settings(benchmark, settings) if not each.greedy}
    described: dict[str, Any] = {
        "title": benchmark.title,
        "source": benchmark.source,
        "split": benchmark.split,
        "file": None if file is None else str(file),
        "problems_sha256": _digest(problems),
        "seeds": sorted(seeds),
    }
    if benchmark.temperature is not None:
        described["temperature"] = benchmark.temperature
    return described


def _digest(problems: Sequence[Problem]) -> str:
    """The SHA-256 over ids, problems and answers, independent of file names."""
    rows = [[each.problem_id, each.problem, each.answer] for each in problems]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
