"""The benchmarks by name, how their problems are read (only the tiny ones are shipped), and the
plan of an evaluation on them: one generation request for every completion."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from grpo_replay.errors import DatasetError, RecipeError, did_you_mean
from grpo_replay.prompts.prompt_set import prompt_messages, render_prompt
from grpo_replay.prompts.sources import (
    ANSWER_FIELDS,
    NO_OPTIONS,
    PROBLEM_FIELDS,
    ProblemRows,
    ProblemStatement,
    column_of,
    is_local_source,
    known_field,
    problems_and_answers,
    read_hub_rows,
    read_local_rows,
    statement_text,
    unique_ids,
)
from grpo_replay.recipe import (
    BUILTIN_VERIFIERS,
    EvalSection,
    PromptsSection,
    Recipe,
    RewardSection,
    SamplingSection,
)
from grpo_replay.recipe.layers import DATA_SUFFIXES
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.rewards.trial import TRIED_ROWS, Sample, try_rewards
from grpo_replay.tiny import TASKS, benchmark_problems
from grpo_replay.types import GenerationRequest, Prompt, RequestKey, Row, completion_seed

WAVE_SAMPLES = 8
"""Samples per problem in one wave; each wave uses the next seed (paper A)."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set of problems with verifiable answers, and its source.

    `source` is a hub dataset, a file or folder of the user, or "builtin". `samples` is k, the
    completions per problem; `problems` is the size of the published set. A `temperature` here
    overrides the recipe's. The name of its file in `eval.data_folder` is `file_stem` if given, else
    the benchmark's name. `options` are those of reading a file or folder of the user; None for
    others.
    """

    name: str
    title: str
    source: str
    samples: int
    problem_field: str = "problem"
    answer_field: str = "answer"
    id_field: str | None = None
    split: str = "train"
    problems: int | None = None
    temperature: float | None = None
    file_stem: str | None = None
    options: Mapping[str, Any] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a benchmark; `problem_id` is unique within it. `row` has all its fields, for
    verifiers of the user."""

    problem_id: str
    problem: ProblemStatement
    answer: str
    row: Row = field(default_factory=dict, compare=False)

    @property
    def text(self) -> str:
        """The problem, or the content of its last message."""
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
    """One set under both settings of paper B: pass@1 at T = 0.1 and pass@k at T = 1."""
    settings = (("pass1", "T 0.1", 1, 0.1), ("passk", "T 1", 16, 1.0))
    return [
        Benchmark(
            f"{name}_{suffix}", f"{title}, {words}", source, samples, split=split, problems=500,
            temperature=temperature, **fields,
        )
        for suffix, words, samples, temperature in settings
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
    """The distinct benchmarks named by `settings.benchmarks`, in order, with groups expanded. A
    file has the fields of `prompts` where it has these columns.

    Raises RecipeError for an unknown name, and for two different sources under one name.
    """
    found: dict[str, Benchmark] = {}
    for word in settings.benchmarks:
        for benchmark in _named(word, prompts or PromptsSection()):
            known = found.setdefault(benchmark.name, benchmark)
            if known != benchmark:
                raise RecipeError(
                    f"eval.benchmarks: {known.source} and {benchmark.source} are both called "
                    f"{benchmark.name!r} in the report: rename one of the files"
                )
    return tuple(found.values())


def load_problems(benchmark: Benchmark, settings: EvalSection) -> tuple[Problem, ...]:
    """The problems of a benchmark, in the order of its source.

    Raises DatasetError if it cannot be read or is empty, if a field is missing, if an answer is
    neither text nor a number, or if an id occurs twice.
    """
    rows = _open(benchmark, settings)
    if len(rows) == 0:
        raise DatasetError(f"benchmark {benchmark.name!r}: {benchmark.source} has no problems")
    if by_recipe := benchmark.options is not None:
        benchmark = _with_columns_of(rows, benchmark)
    columns = benchmark.problem_field, benchmark.answer_field
    problems, answers = problems_and_answers(rows, *columns, by_recipe)
    ids = unique_ids(rows, benchmark.id_field)
    if settings.max_problems is None and benchmark.problems not in (None, len(rows)):
        logger.warning(
            "benchmark %r has %d problems here, but the published one has %d: the numbers are not "
            "comparable with published ones", benchmark.name, len(rows), benchmark.problems,
        )  # fmt: skip
    return tuple(map(Problem, ids, problems, answers, map(rows.row, range(len(rows)))))


def _with_columns_of(rows: ProblemRows, benchmark: Benchmark) -> Benchmark:
    """A file without the columns of the training prompts has those of `PROBLEM_FIELDS` and
    `ANSWER_FIELDS`, and no id."""
    id_field = benchmark.id_field
    has_id = id_field is not None and column_of(id_field, rows.names) in rows.names
    return replace(
        benchmark,
        problem_field=known_field(benchmark.problem_field, PROBLEM_FIELDS, rows.names),
        answer_field=known_field(benchmark.answer_field, ANSWER_FIELDS, rows.names),
        id_field=id_field if has_id else None,
    )


def _named(word: str, prompts: PromptsSection) -> Sequence[Benchmark]:
    if word in GROUPS:
        return [BENCHMARKS[name] for name in GROUPS[word]]
    if word in BENCHMARKS:
        return [BENCHMARKS[word]]
    path = Path(word).expanduser()
    is_folder = "/" in word and path.is_dir()
    if is_folder or word.endswith(DATA_SUFFIXES):
        name = path.name if is_folder else path.stem
        if name == "mean":
            raise RecipeError(
                f"eval.benchmarks: {word} would appear as 'mean' in the report, the name of the "
                "mean over all benchmarks: rename it"
            )
        fields = (prompts.problem_field, prompts.answer_field, prompts.id_field)
        options = _reading_options(path, prompts)
        return [Benchmark(name, name, word, WAVE_SAMPLES, *fields, options=options)]
    known = dict.fromkeys([*GROUPS, *BENCHMARKS])
    raise RecipeError(
        f"eval.benchmarks: no benchmark {word!r}{did_you_mean(word, known)}; use one of "
        f"{', '.join(known)}, or a file (.jsonl, .csv, .parquet, …), or a folder of save_to_disk "
        "(./NAME)"
    )


def _reading_options(path: Path, prompts: PromptsSection) -> Mapping[str, Any]:
    """The options with which the training prompts of the same kind are read, but for the split."""
    for each in prompts.sources:
        source = Path(str(each.source)).expanduser()
        if is_local_source(str(each.source)) and source.suffix == path.suffix:
            given = each.dataset_options.model_dump()
            of_hub = ("name", "revision", "split")
            return {**NO_OPTIONS, **{k: v for k, v in given.items() if k not in of_hub}}
    return NO_OPTIONS


def _open(benchmark: Benchmark, settings: EvalSection) -> ProblemRows:
    limit = settings.max_problems
    if benchmark.source == "builtin":
        return ProblemRows(benchmark_problems(benchmark.name)[:limit], benchmark.name)
    if (file := local_file(benchmark, settings)) is not None:
        options = benchmark.options or NO_OPTIONS
        return read_local_rows(str(file), limit, options)
    try:
        return read_hub_rows(benchmark.source, limit, options={"split": benchmark.split})
    except DatasetError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise DatasetError(
            f"benchmark {benchmark.name!r} cannot be read from the hub: {reason}. "
            + _what_to_download(benchmark)
        ) from error


def local_file(benchmark: Benchmark, settings: EvalSection) -> Path | None:
    """The file or folder that a benchmark is read from; None if it comes from the hub or is built
    in.

    Raises DatasetError if the data folder does not contain it.
    """
    if benchmark.source == "builtin":
        return None
    if benchmark.options is not None:
        return Path(benchmark.source)
    if settings.data_folder is None:
        return None
    folder = Path(settings.data_folder)
    stem = benchmark.file_stem or benchmark.name
    candidates = [folder / f"{stem}{suffix}" for suffix in (".jsonl", ".parquet")]
    for path in candidates:
        if path.is_file():
            return path
    raise DatasetError(
        f"eval.data_folder {folder}: no {candidates[0].name} or {candidates[1].name} in it. "
        + _what_to_download(benchmark)
    )


def read_from_hub(settings: EvalSection, prompts: PromptsSection) -> list[str]:
    """The benchmarks that are read from the hub. Raises as `find_benchmarks` and `local_file`."""
    found = find_benchmarks(settings, prompts)
    return [e.name for e in found if e.source != "builtin" and local_file(e, settings) is None]


def _what_to_download(benchmark: Benchmark) -> str:
    fields = [benchmark.id_field, benchmark.problem_field, benchmark.answer_field]
    stem = benchmark.file_stem or benchmark.name
    return (
        f"Download dataset {benchmark.source} on a machine with access (hf download --repo-type "
        f"dataset {benchmark.source} --local-dir DIR), put the rows of its split "
        f"{benchmark.split!r} into {stem}.jsonl or {stem}.parquet with the "
        f"fields {', '.join(field for field in fields if field)}, and set eval.data_folder "
        "(--data-folder) to the folder of that file"
    )


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
    if settings.reward not in BUILTIN_VERIFIERS:
        document["correct_score"] = correct_score
    with_vllm = sampling.vllm_in_ranks or sampling.over_http
    return EvaluationPlan(benchmarks, tuple(samples), settings, document, with_vllm, prompts)


def plan_that_fits(tokenizer: Any, recipe: Recipe) -> EvaluationPlan:
    """The plan of `recipe.eval`. As `plan_evaluation`, and raises RecipeError if the model has no
    room for a prompt and its longest completion."""
    from grpo_replay.sampling.sampler_protocol import check_room

    plan = plan_evaluation(
        tokenizer, recipe.eval, recipe.prompts, recipe.sampling, recipe.reward.correct
    )
    check_room(recipe, plan.longest_prompt, evaluates=True)
    return plan


def try_verifier(limits: RewardSection, plan: EvaluationPlan) -> list[str]:
    """Notices about the verifier of a plan, tried on a few problems with these limits; nothing for
    a built-in one, of which a report names the answers that it cannot read. Raises RecipeError if
    the function fails on every problem."""
    verifier = plan.settings.reward
    if verifier in BUILTIN_VERIFIERS:
        return []
    planned = {each.problem.problem_id: each for each in plan.samples}
    tried = [_as_prompt(plan.prompts, each) for each in list(planned.values())[:TRIED_ROWS]]
    sample = Sample(tried, len(planned), "eval.benchmarks")
    section = limits.alone(verifier).model_copy(update={"workers": 1})
    with RewardScorer.open(section, as_verdicts=True) as scorer:
        return try_rewards(section, scorer, sample, step=None)


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
    shares_temperature = any(benchmark.temperature is None for benchmark in benchmarks)
    document = {
        "benchmarks": {
            benchmark.name: _described(benchmark, settings, problems_of[benchmark.name])
            for benchmark in benchmarks
        },
        "max_problems": settings.max_problems,
        # None if each benchmark has its own, in its description: nothing was sampled at this one.
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
