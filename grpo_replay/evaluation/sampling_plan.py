"""The plan of an evaluation: one generation request for every completion."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from grpo_replay.evaluation.statistics import CONFIDENCE
from grpo_replay.prompts.prompt_set import render_prompt
from grpo_replay.recipe import BUILTIN_VERIFIERS, EvalSection, PromptsSection, Recipe
from grpo_replay.replay.seeding import completion_seed
from grpo_replay.types import GenerationRequest, RequestKey


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


def plan_evaluation(tokenizer: Any, recipe: Recipe) -> EvaluationPlan:
    """The plan of `recipe.eval`; the default completion length is that of training.

    Raises RecipeError for unknown benchmarks, and DatasetError for problems that cannot be read or
    whose prompt is too long.
    """
    settings = recipe.eval
    if settings.greedy and settings.temperature == 0:
        raise RecipeError(
            "eval.greedy with eval.temperature 0 evaluates greedily twice: set only one of them"
        )
    longest = settings.max_completion_length or recipe.sampling.max_completion_length
    samples: list[PlannedSample] = []
    benchmarks = find_benchmarks(settings)
    problems_of = {each.name: load_problems(each, settings) for each in benchmarks}
    first_prompt = 0
    for benchmark in benchmarks:
        problems = problems_of[benchmark.name]
        samples += _plan_benchmark(recipe, tokenizer, benchmark, problems, first_prompt, longest)
        first_prompt += len(problems)
    document = _settings_document(recipe, benchmarks, problems_of, longest)
    return EvaluationPlan(benchmarks, tuple(samples), settings, document)


def _plan_benchmark(
    recipe: Recipe,
    tokenizer: Any,
    benchmark: Benchmark,
    problems: Sequence[Problem],
    first_prompt: int,
    longest: int,
) -> Iterable[PlannedSample]:
    """The samples of one benchmark; its prompts are numbered from `first_prompt`."""
    for index, problem in enumerate(problems):
        prompt = _prompt_tokens(recipe.prompts, tokenizer, benchmark, problem)
        for each in _sample_settings(benchmark, recipe.eval):
            key = RequestKey(0, first_prompt + index, each.sample + each.greedy * (1 << 30))
            seed = each.seed(benchmark.name, index)
            request = GenerationRequest(key, prompt, seed, longest, each.temperature, each.top_p)
            yield PlannedSample(benchmark.name, index, problem, each.sample, each.greedy, request)


@dataclass(frozen=True, slots=True)
class _SampleSettings:
    """The sampling settings of one sample number, for every problem of a benchmark."""

    sample: int
    greedy: bool
    base_seed: int
    temperature: float
    top_p: float

    def seed(self, benchmark: str, problem_index: int) -> int:
        """The seed; it depends on the benchmark, so that errors of benchmarks are independent."""
        key = RequestKey(crc32(benchmark.encode()), problem_index, self.sample)
        return completion_seed(self.base_seed, key)


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
    recipe: Recipe,
    benchmarks: Sequence[Benchmark],
    problems_of: Mapping[str, Sequence[Problem]],
    longest: int,
) -> dict[str, Any]:
    prompts, settings = recipe.prompts, recipe.eval

    def described(benchmark: Benchmark) -> dict[str, Any]:
        seeds = {x.base_seed for x in _sample_settings(benchmark, settings) if not x.greedy}
        file = local_file(benchmark, settings)
        return {
            "title": benchmark.title,
            "source": benchmark.source,
            "split": benchmark.split,
            "file": None if file is None else str(file),
            "problems_sha256": _digest(problems_of[benchmark.name]),
            "seeds": sorted(seeds),
            **({} if benchmark.temperature is None else {"temperature": benchmark.temperature}),
        }

    return {
        "benchmarks": {benchmark.name: described(benchmark) for benchmark in benchmarks},
        "max_problems": settings.max_problems,
        "backend": recipe.sampling.backend,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_completion_length": longest,
        "samples_per_wave": WAVE_SAMPLES,
        "template": prompts.template,
        "system_prompt": prompts.system_prompt if prompts.template == "chat" else None,
        "user_template": prompts.user_template,
        "reward": settings.reward,
        **_settings_off_by_default(recipe),
        "bootstrap_samples": settings.bootstrap_samples,
        "confidence": CONFIDENCE,
    }


def _settings_off_by_default(recipe: Recipe) -> dict[str, Any]:
    """Settings that only some evaluations have."""
    settings: dict[str, Any] = {}
    if recipe.eval.reward not in BUILTIN_VERIFIERS:
        settings["correct_score"] = recipe.reward.correct
    if recipe.prompts.template == "chat" and recipe.prompts.chat_template_kwargs:
        settings["chat_template_kwargs"] = recipe.prompts.chat_template_kwargs
    return settings


def _digest(problems: Sequence[Problem]) -> str:
    """The SHA-256 over ids, problems and answers, independent of file names."""
    rows = [[each.problem_id, each.problem, each.answer] for each in problems]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
