"""Benchmarks by name, the reading of their problems (only the tiny ones are shipped), and the plan
of an evaluation: one generation request for every completion."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from grpo_replay.errors import DatasetError, RecipeError, did_you_mean
from grpo_replay.prompts.prompt_set import prompt_messages, read_source, render_prompt
from grpo_replay.prompts.sources import ProblemStatement, statement_text
from grpo_replay.recipe import (
    BUILTIN_VERIFIERS,
    EvalSection,
    PromptsSection,
    Recipe,
    RewardSection,
)
from grpo_replay.recipe.input_sections import GYM, DatasetOptions
from grpo_replay.recipe.layers import DATA_SUFFIXES
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.rewards.trial import TRIED_ROWS, Sample, try_rewards
from grpo_replay.sampling.completion_text import CompletionText
from grpo_replay.tiny import TASKS, benchmark_problems
from grpo_replay.types import GenerationRequest, Prompt, RequestKey, Row, completion_seed

WAVE_SAMPLES = 8
"""Samples per problem in one wave; each wave uses the next seed (paper A)."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set of problems with verifiable answers, and its source.

    `source` is a hub dataset, a file or folder of the user, or "builtin". `samples` is k, the
    completions per problem; `problems` is the size of the published set. `temperature` overrides
    the recipe's. `file_stem` names the file in `eval.data_folder`; the default is `name`. `own` has
    the settings for reading a file or folder of the user; None for other sources.
    """

    name: str
    title: str
    source: str
    samples: int
    id_field: str | None = None
    split: str = "train"
    problems: int | None = None
    temperature: float | None = None
    file_stem: str | None = None
    own: PromptsSection | None = None

    @property
    def is_made_here(self) -> bool:
        """True if its problems are shipped or generated, not read from a file or the hub."""
        return self.source == "builtin" or self.source.startswith(GYM)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a benchmark, within which `problem_id` is unique. `row` has all fields of the
    problem, for verifiers of the user."""

    problem_id: str
    problem: ProblemStatement
    answer: str
    row: Row = field(default_factory=dict, compare=False)

    @property
    def text(self) -> str:
        """The problem, or the content of its messages."""
        return statement_text(self.problem)


def _math_arena(name: str, title: str, dataset: str, problems: int) -> Benchmark:
    return Benchmark(
        name, title, f"MathArena/{dataset}", 16, id_field="problem_idx", problems=problems
    )


_PAPER = (
    Benchmark(
        *("math500", "MATH-500", "HuggingFaceH4/MATH-500", 8),
        id_field="unique_id",
        split="test",
        problems=500,
    ),
    _math_arena("aime25", "AIME25", "aime_2025", 30),
    _math_arena("aime26", "AIME26", "aime_2026", 30),
    _math_arena("hmmt_feb25", "HMMT-F25", "hmmt_feb_2025", 30),
    _math_arena("hmmt_feb26", "HMMT-F26", "hmmt_feb_2026", 33),
)


def _paper_b(name: str, title: str, source: str, split: str, **fields: Any) -> Sequence[Benchmark]:
    """Makes paper B's two benchmarks of a problem set: pass@1 at T = 0.1, pass@k at T = 1."""
    settings = (("pass1", "T 0.1", 1, 0.1), ("passk", "T 1", 16, 1.0))
    return [
        Benchmark(
            f"{name}_{suffix}", f"{title}, {label}", source, samples, split=split, problems=500,
            temperature=temperature, **fields,
        )
        for suffix, label, samples, temperature in settings
    ]  # fmt: skip


_PAPER_B = (
    *_paper_b(
        *("math", "MATH", "HuggingFaceH4/MATH-500", "test"),
        id_field="unique_id",
        file_stem="math500",
    ),
    # The dataset has a single split; paper B's recipes train on the other rows.
    *_paper_b(
        *("openr1", "OpenR1", "open-r1/OpenR1-Math-220k", "train[-500:]"),
        id_field="uuid",
        file_stem="openr1",
    ),
)
_TINY = tuple(
    Benchmark(name, name, "builtin", 4, id_field="problem_id")
    for task in TASKS.values()
    for name in task.benchmarks
)

BENCHMARKS: Mapping[str, Benchmark] = {b.name: b for b in (*_PAPER, *_PAPER_B, *_TINY)}
GROUPS: Mapping[str, tuple[str, ...]] = {
    "paper": tuple(b.name for b in _PAPER),
    "paper_b": tuple(b.name for b in _PAPER_B),
    **{name.replace("-", "_"): task.benchmarks for name, task in TASKS.items()},
}


def find_benchmarks(
    settings: EvalSection, prompts: PromptsSection | None = None
) -> tuple[Benchmark, ...]:
    """Find the distinct benchmarks named by `settings.benchmarks`, in order, with groups expanded.
    A file of the user is read with the field names of `prompts`.

    Raises RecipeError for an unknown name, and for two different sources under one name.
    """
    by_name: dict[str, Benchmark] = {}
    for word in settings.benchmarks:
        for benchmark in _named(word, prompts or PromptsSection()):
            first = by_name.setdefault(benchmark.name, benchmark)
            if first != benchmark:
                raise RecipeError(
                    f"eval.benchmarks: {first.source} and {benchmark.source} are both called "
                    f"{benchmark.name!r} in the report: rename one of the files"
                )
    return tuple(by_name.values())


def load_problems(benchmark: Benchmark, settings: EvalSection) -> tuple[Problem, ...]:
    """Load the problems of a benchmark, in order, at most `eval.max_problems`; warns if the
    published set has another size. Raises DatasetError as `read_source` does."""
    if benchmark.source == "builtin":
        rows: Sequence[Row] = benchmark_problems(benchmark.name)
        problems = [Problem(r["problem_id"], r["problem"], r["answer"], r) for r in rows]
    else:
        read = read_source(_as_prompts(benchmark, settings), seed=None, any_columns=True)
        rows = list(map(read.rows.row, range(len(read.rows))))
        problems = list(map(Problem, read.ids, read.problems, read.answers, rows))
    if settings.max_problems is None and benchmark.problems not in (None, len(problems)):
        logger.warning(
            "benchmark %r has %d problems here, but the published one has %d: the numbers are not "
            "comparable with published ones", benchmark.name, len(problems), benchmark.problems,
        )  # fmt: skip
    return tuple(problems[: settings.max_problems])


def _as_prompts(benchmark: Benchmark, settings: EvalSection) -> PromptsSection:
    """Returns the `prompts` section that reads the problems of a benchmark."""
    if benchmark.own is not None:
        return benchmark.own
    file, id_field = local_file(benchmark, settings), benchmark.id_field
    if file is not None:
        return PromptsSection(source=str(file), id_field=id_field)
    options = DatasetOptions(split=benchmark.split)
    return PromptsSection(source=benchmark.source, id_field=id_field, dataset_options=options)


def _named(word: str, prompts: PromptsSection) -> Sequence[Benchmark]:
    """Returns the benchmarks that an element of `eval.benchmarks` names: a group, a benchmark, a
    family of reasoning-gym, or a file or folder of the user. Raises RecipeError for others."""
    if word in GROUPS:
        return [BENCHMARKS[name] for name in GROUPS[word]]
    if word in BENCHMARKS:
        return [BENCHMARKS[word]]
    if word.startswith(GYM):
        matching = [s.dataset_options for s in prompts.sources if s.source == word]
        options = matching[0] if matching else DatasetOptions()
        own = prompts.model_copy(update={"source": word, "dataset_options": options})
        return [Benchmark(word.removeprefix(GYM), word, word, WAVE_SAMPLES, own=own)]
    path = Path(word).expanduser()
    is_folder = "/" in word and path.is_dir()
    if is_folder or word.endswith(DATA_SUFFIXES):
        name = path.name if is_folder else path.stem
        own = prompts.model_copy(
            update={"source": word, "dataset_options": _options(path, prompts)}
        )
        return [Benchmark(name, name, word, WAVE_SAMPLES, own=own)]
    known = dict.fromkeys([*GROUPS, *BENCHMARKS])
    raise RecipeError(
        f"eval.benchmarks: no benchmark {word!r}{did_you_mean(word, known)}; use one of "
        f"{', '.join(known)}, or a file (.jsonl, .csv, .parquet, …), a folder of save_to_disk "
        "(./NAME), or reasoning_gym:NAME"
    )


def _options(path: Path, prompts: PromptsSection) -> DatasetOptions:
    """The options of the first training source with the same file extension, but for the split."""
    for source in prompts.sources:
        if path.suffix and Path(str(source.source)).suffix == path.suffix:
            return source.dataset_options.model_copy(update={"split": "train"})
    return DatasetOptions()


def local_file(benchmark: Benchmark, settings: EvalSection) -> Path | None:
    """Return the file or folder that a benchmark is read from; None for the hub and built-in ones.

    Raises DatasetError if the data folder does not contain it.
    """
    if benchmark.is_made_here:
        return None
    if benchmark.own is not None:
        return Path(benchmark.source)
    if settings.data_folder is None:
        return None
    folder, stem = Path(settings.data_folder), benchmark.file_stem or benchmark.name
    for path in (folder / f"{stem}.jsonl", folder / f"{stem}.parquet"):
        if path.is_file():
            return path
    columns = ", ".join(filter(None, [benchmark.id_field, "problem", "answer"]))
    raise DatasetError(
        f"eval.data_folder {folder}: no {stem}.jsonl or {stem}.parquet in it. Put the "
        f"rows of the split {benchmark.split!r} of dataset {benchmark.source} there, with the "
        f"columns {columns} (hf download --repo-type dataset {benchmark.source} --local-dir DIR)"
    )


def read_from_hub(settings: EvalSection, prompts: PromptsSection) -> list[str]:
    """Name the benchmarks read from the hub. Raises as `find_benchmarks` and `local_file` do."""
    benchmarks = find_benchmarks(settings, prompts)
    return [b.name for b in benchmarks if not b.is_made_here and local_file(b, settings) is None]


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """One completion to sample for an evaluation; `prompt` is the rendered text."""

    benchmark: str
    problem_index: int
    problem: Problem
    prompt: str
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
    packages: tuple[str, ...]  # of the sampler
    text: CompletionText
    prompts: PromptsSection

    @property
    def problem_texts(self) -> set[tuple[str, str]]:
        """(benchmark, text) of every problem."""
        return {(sample.benchmark, sample.problem.text) for sample in self.samples}

    @property
    def longest_prompt(self) -> int:
        """The length of the longest prompt, in tokens."""
        return max((len(sample.request.prompt_token_ids) for sample in self.samples), default=0)


def plan_evaluation(tokenizer: Any, recipe: Recipe) -> EvaluationPlan:
    """Plan the evaluation of `recipe.eval`; the default completion length is that of training.

    Raises RecipeError for unknown benchmarks, or if a prompt with its longest completion exceeds
    the model's context, DatasetError for problems that cannot be read or have too long a prompt.
    """
    from grpo_replay.sampling.sampler_protocol import check_room

    settings, prompts, sampling = recipe.eval, recipe.prompts, recipe.sampling
    if settings.greedy and settings.temperature == 0:
        raise RecipeError(
            "eval.greedy with eval.temperature 0 evaluates greedily twice: set only one of them"
        )
    longest = settings.max_completion_length or sampling.max_completion_length
    samples: list[PlannedSample] = []
    benchmarks = find_benchmarks(settings, prompts)
    problems_of = {bench.name: load_problems(bench, settings) for bench in benchmarks}
    first_prompt = 0
    for benchmark in benchmarks:
        plans = list(_sampling_plans(benchmark, settings))
        for index, problem in enumerate(problems_of[benchmark.name]):
            prompt, token_ids = _render(prompts, tokenizer, benchmark, problem)
            for planned in plans:
                # The seed depends on the benchmark: errors of benchmarks are independent.
                seed_key = RequestKey(crc32(benchmark.name.encode()), index, planned.sample)
                number = planned.sample + planned.greedy * (1 << 30)
                request = GenerationRequest(
                    RequestKey(0, first_prompt + index, number),
                    token_ids,
                    completion_seed(planned.base_seed, seed_key),
                    longest,
                    *(planned.temperature, planned.top_p),
                )
                number_and_kind = (planned.sample, planned.greedy)
                samples.append(
                    PlannedSample(benchmark.name, index, problem, prompt, *number_and_kind, request)
                )
        first_prompt += len(problems_of[benchmark.name])
    document = _settings_document(settings, prompts, benchmarks, problems_of)
    for name, description in document["benchmarks"].items():
        prompt_of = {s.problem_index: s.prompt for s in samples if s.benchmark == name}
        description["prompts_sha256"] = _digest(list(prompt_of.values()))
    document |= {"backend": sampling.backend, "max_completion_length": longest}
    if settings.reward not in BUILTIN_VERIFIERS:
        document["correct_score"] = recipe.reward.correct
    text = CompletionText.from_recipe(recipe, tokenizer)
    if text.kept:
        document["special_tokens"] = "keep"
    packages = sampling.facts.packages
    plan = EvaluationPlan(benchmarks, tuple(samples), settings, document, packages, text, prompts)
    check_room(recipe, plan.longest_prompt, evaluates=True)
    return plan


def try_verifier(limits: RewardSection, plan: EvaluationPlan) -> list[str]:
    """Try the user's verifier of a plan on a few problems with these `limits`; returns notices. A
    built-in verifier is not tried: the report names the answers that it cannot read. Raises
    RecipeError if the function fails on every problem."""
    verifier = plan.settings.reward
    if verifier in BUILTIN_VERIFIERS:
        return []
    planned = {(sample.benchmark, sample.problem_index): sample for sample in plan.samples}
    tried = [
        Prompt(
            sample.problem.problem_id,
            sample.prompt,
            sample.request.prompt_token_ids,
            sample.problem.answer,
            sample.problem.row,
            prompt_messages(plan.prompts, sample.problem.problem),
        )
        for sample in list(planned.values())[:TRIED_ROWS]
    ]
    tried_sample = Sample(tried, len(planned), "eval.benchmarks", plan.text.encode)
    section = limits.with_single_function(verifier).model_copy(update={"workers": 1})
    with RewardScorer.open(section, as_verdicts=True) as scorer:
        return try_rewards(section, scorer, tried_sample, step=None)


class SamplingPlan(NamedTuple):
    """The sampling settings of one sample number, for all problems of a benchmark."""

    sample: int
    greedy: bool
    base_seed: int
    temperature: float
    top_p: float


def _sampling_plans(benchmark: Benchmark, settings: EvalSection) -> Iterable[SamplingPlan]:
    """Yields the settings of each of a problem's k samples (1 at temperature 0), whose seed grows
    by 1 every `WAVE_SAMPLES`, and of the greedy one if `eval.greedy`."""
    temperature = settings.temperature if benchmark.temperature is None else benchmark.temperature
    default = 1 if temperature == 0 else benchmark.samples
    for sample in range(settings.samples or default):
        wave = settings.seed + sample // WAVE_SAMPLES
        yield SamplingPlan(sample, False, wave, temperature, settings.top_p)
    if settings.greedy:
        yield SamplingPlan(0, True, settings.seed, 0.0, 1.0)


def _render(
    prompts: PromptsSection, tokenizer: Any, benchmark: Benchmark, problem: Problem
) -> tuple[str, Any]:
    """Renders a problem to text and token ids. Raises DatasetError for too long a prompt."""
    text, token_ids = render_prompt(prompts, tokenizer, problem.problem)
    if len(token_ids) > prompts.max_prompt_length:
        raise DatasetError(
            f"benchmark {benchmark.name!r}, problem {problem.problem_id!r}: its prompt has "
            f"{len(token_ids)} tokens, more than prompts.max_prompt_length "
            f"{prompts.max_prompt_length}; evaluations drop no problems: raise that limit"
        )
    return text, token_ids


def _settings_document(
    settings: EvalSection,
    prompts: PromptsSection,
    benchmarks: Sequence[Benchmark],
    problems_of: Mapping[str, Sequence[Problem]],
) -> dict[str, Any]:
    """Returns the report's `settings`: all that decides what is sampled and how it is graded."""
    in_chat = prompts.in_chat
    shares_temperature = any(benchmark.temperature is None for benchmark in benchmarks)
    document = {
        "benchmarks": {
            benchmark.name: _describe_benchmark(benchmark, settings, problems_of[benchmark.name])
            for benchmark in benchmarks
        },
        "max_problems": settings.max_problems,
        # None if every benchmark describes its own: nothing was sampled at this one.
        "temperature": settings.temperature if shares_temperature else None,
        "top_p": settings.top_p,
        "samples_per_wave": WAVE_SAMPLES,
        "template": "chat" if in_chat else "plain",
        "system_prompt": prompts.system_prompt if in_chat else None,
        "user_template": prompts.user_template,
        "reward": settings.reward,
    }
    if in_chat and prompts.chat_template_kwargs:
        document["chat_template_kwargs"] = prompts.chat_template_kwargs
    return document


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _describe_benchmark(
    benchmark: Benchmark, settings: EvalSection, problems: Sequence[Problem]
) -> dict[str, Any]:
    """Returns a benchmark's part of the report's `settings`, with a digest of its problems."""
    file = local_file(benchmark, settings)
    seeds = {p.base_seed for p in _sampling_plans(benchmark, settings) if not p.greedy}
    rows = [[problem.problem_id, problem.problem, problem.answer] for problem in problems]
    description: dict[str, Any] = {
        "title": benchmark.title,
        "source": benchmark.source,
        "split": benchmark.split,
        "file": None if file is None else str(file),
        "problems_sha256": _digest(rows),
        "seeds": sorted(seeds),
    }
    if benchmark.temperature is not None:
        description["temperature"] = benchmark.temperature
    return description
