"""`grpo-replay eval`: evaluate a model on benchmarks, regrade an evaluation, or compare two."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_replay.cli.compare import run_comparison
from grpo_replay.cli.eval_display import print_report
from grpo_replay.cli.regrade import run_regrading
from grpo_replay.distributed.environment import prepare_rank, rank_environment
from grpo_replay.distributed.interruption import sigterm_interrupts
from grpo_replay.errors import OutputDirectoryError, UsageError
from grpo_replay.evaluation.benchmarks import find_benchmarks, local_file
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.model_source import ModelSource, find_model, used_revision
from grpo_replay.evaluation.output_files import check_output, generations_parent, write_output
from grpo_replay.recipe import (
    BUILTIN_VERIFIERS,
    Recipe,
    find_recipe,
    parse_overrides,
    read_recipe_layer,
    recipe_source,
    resolve_recipe,
)
from grpo_replay.tiny.tasks import TASKS

DEFAULT_FOLDER = Path("evaluations")

_EVALUATION_OPTIONS = {
    "ckpt": "--ckpt",
    "recipe": "--recipe",
    "benchmarks": "--benchmark",
    "k": "--k",
    "backend": "--backend",
    "data_folder": "--data-folder",
    "greedy": "--greedy",
    "num_processes": "--num-processes",
    "overrides": "--set",
    "push_to_hub": "--push-to-hub",
    "public": "--public",
}
"""Options without effect on `--compare` and `--regrade`, by field of `EvalOptions`."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The command line. None and empty values leave the recipe's value unchanged."""

    ckpt: str | None = None
    recipe: str | None = None
    benchmarks: Sequence[str] = ()
    k: int | None = None
    output: str | None = None
    backend: str | None = None
    data_folder: str | None = None
    greedy: bool | None = None
    grade_with: Sequence[str] = ()
    num_processes: int | None = None
    overrides: Sequence[str] = ()
    regrade: str | None = None
    compare: tuple[str, str] | None = None
    as_json: bool = False
    push_to_hub: str | None = None
    public: bool = False


def run(options: EvalOptions) -> int:
    """Evaluate, regrade or compare, as the options say; returns the exit code.

    Raises UsageError for options that would have no effect.
    """
    if options.compare is not None:
        _check_comparison(options)
        verifier = options.grade_with[0] if options.grade_with else None
        run_comparison(*options.compare, as_json=options.as_json, verifier=verifier)
        return 0
    if options.regrade is not None:
        _check_regrading(options)
        run_regrading(options.regrade, options.grade_with, options.output, options.as_json)
        return 0
    if options.ckpt is None:
        raise UsageError(
            "eval needs --ckpt DIR|HF_ID, --regrade A.json --grade-with VERIFIER, or --compare "
            "A.json B.json"
        )
    return _run_evaluation(options, find_model(options.ckpt))


def evaluate_in_process(options: EvalOptions) -> EvaluationReport:
    """Evaluate on one rank and write the output, without printing."""
    assert options.ckpt is not None and options.output is not None
    source, output = find_model(options.ckpt), Path(options.output)
    recipe = resolve_evaluation(options, source)
    check_output(output)
    prepare_rank(rank_environment())
    report = _evaluate(recipe, source, output, world_size=1)
    assert report is not None
    write_output(report, output)
    return report


def _given(options: EvalOptions) -> list[str]:
    values = {name: getattr(options, field) for field, name in _EVALUATION_OPTIONS.items()}
    return [name for name, value in values.items() if value not in (None, (), [], False)]


def _check_comparison(options: EvalOptions) -> None:
    also = [("--output", options.output), ("--regrade", options.regrade)]
    if ignored := [*_given(options), *(name for name, value in also if value)]:
        raise UsageError(
            f"--compare reads two reports and changes neither: {', '.join(ignored)} would have no "
            "effect; leave them out"
        )
    if len(options.grade_with) > 1:
        raise UsageError(
            f"--compare takes one --grade-with, found {', '.join(options.grade_with)}: name the "
            "verifier whose verdicts to compare"
        )


def _check_regrading(options: EvalOptions) -> None:
    if ignored := _given(options):
        raise UsageError(
            f"--regrade samples nothing: {', '.join(ignored)} would have no effect; it takes "
            "--grade-with and --output"
        )
    if not options.grade_with:
        raise UsageError("--regrade needs --grade-with VERIFIER: " + ", ".join(BUILTIN_VERIFIERS))


def _run_evaluation(options: EvalOptions, source: ModelSource) -> int:
    """Evaluate, write the report and its companion files, and print the tables."""
    recipe = resolve_evaluation(options, source)
    output = Path(options.output) if options.output else DEFAULT_FOLDER / f"{source.name}.json"
    earlier = check_output(output)
    if earlier is not None and options.output is None:
        _refuse_to_replace(output, earlier, source, recipe)
    environment = rank_environment()
    _check_push(options, source, environment.rank)
    if not environment.is_launched and (options.num_processes or 1) > 1:
        from grpo_replay.distributed.launch import launch_ranks

        return launch_ranks(
            sys.argv[1:], options.num_processes, None, recipe.engine.threads_per_process
        )
    prepare_rank(environment)
    if environment.rank == 0:
        for notice in _notices(options, source, recipe):
            print(notice, file=sys.stderr)
    # A launcher also sends SIGTERM, to end the other ranks after a failure; it reports the failure.
    with nullcontext() if environment.is_launched else sigterm_interrupts():
        report = _evaluate(recipe, source, output, environment.world_size)
    if report is not None:
        write_output(report, output)
        print_report(report, output, options.as_json)
        if options.push_to_hub is not None:
            from grpo_replay.cli.eval_push import push_evaluated

            to = (options.push_to_hub, options.public)
            push_evaluated(source, report, output, *to, options.as_json)
    return 0


def _check_push(options: EvalOptions, source: ModelSource, rank: int) -> None:
    if options.push_to_hub is None:
        if options.public:
            raise UsageError("--public needs --push-to-hub")
    elif rank == 0:
        from grpo_replay.evaluation.hub_push import check_push

        check_push(options.push_to_hub, source)


def resolve_evaluation(options: EvalOptions, source: ModelSource) -> Recipe:
    """The recipe of an evaluation.

    It starts from --recipe, else the run's own recipe, else the recipe of a builtin tiny model,
    else paper A's benchmarks with its settings for 0.6B and 1.7B. --set and then the other options
    override it. Raises RecipeError, and UsageError if no benchmark is named.
    """
    place, layer = _recipe_layer(options, source)
    overrides = parse_overrides(options.overrides)
    if "path" in overrides.get("model", {}):
        raise UsageError("--set model.path: eval takes the model from --ckpt")
    layers = [layer, overrides, _option_layer(options)]
    recipe = resolve_recipe(layers, (place, "--set", "the options of eval"))
    if not recipe.eval.benchmarks:
        raise UsageError(
            f"{place} names no benchmarks to evaluate: add --benchmark, such as --benchmark paper, "
            "--benchmark math500, or --benchmark my.jsonl"
        )
    # The evaluated weights are always loaded, even if training started from random ones.
    own = {"path": source.path, "random_init": False, "config_overrides": {}}
    longest = recipe.eval.max_completion_length or recipe.sampling.max_completion_length
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=own),
            "sampling": recipe.sampling.model_copy(update={"max_completion_length": longest}),
        }
    )


def _recipe_layer(options: EvalOptions, source: ModelSource) -> tuple[str, dict[str, Any]]:
    path = _recipe_path(options, source)
    if path is None:
        return "the default recipe", {"eval": {"benchmarks": ["paper"]}}
    layer = read_recipe_layer(path)
    layer.setdefault("name", path.stem)
    if options.recipe is None and isinstance(layer.get("model"), dict):
        layer["model"].pop("tokenizer", None)  # a checkpoint has its own
    return recipe_source(path), layer


def _recipe_path(options: EvalOptions, source: ModelSource) -> Path | None:
    if options.recipe is not None:
        return find_recipe(options.recipe)
    name = source.path.removeprefix("builtin:")
    return find_recipe(name) if source.path != name and name in TASKS else source.recipe


def _option_layer(options: EvalOptions) -> dict[str, Any]:
    evaluation = {
        "benchmarks": list(options.benchmarks) or None,
        "samples": options.k,
        "data_folder": options.data_folder,
        "greedy": options.greedy,
        "other_rewards": list(options.grade_with) or None,
    }
    layer: dict[str, Any] = {"eval": {k: v for k, v in evaluation.items() if v is not None}}
    if options.backend is not None:
        layer["sampling"] = {"backend": options.backend}
    return layer


def _notices(options: EvalOptions, source: ModelSource, recipe: Recipe) -> list[str]:
    """Sentences on the defaults chosen for the user."""
    notices = [source.notice] if source.notice else []
    if _recipe_path(options, source) is None:
        settings, longest = recipe.eval, recipe.sampling.max_completion_length
        notices.append(
            f"no recipe: T {settings.temperature:g}, top-p {settings.top_p:g}, at most {longest:,} "
            f"tokens, {recipe.sampled_dtype} on {recipe.sampling.backend}; change them with "
            "--recipe or --set (paper A evaluates 4B with 16,384 tokens: --recipe qwen3-4b)"
        )
    return notices


def _refuse_to_replace(
    output: Path, earlier: EvaluationReport, source: ModelSource, recipe: Recipe
) -> None:
    """Raises OutputDirectoryError if the default output file holds a different evaluation."""
    files = {each.name: local_file(each, recipe.eval) for each in find_benchmarks(recipe.eval)}
    now = (
        *(source.path, used_revision(recipe.model.revision, source.path)),
        {name: None if file is None else str(file) for name, file in files.items()},
    )
    described = earlier.settings["benchmarks"]
    before = (
        *(earlier.model.get("path"), earlier.model.get("revision")),
        {name: described.get(name, {}).get("file") for name in earlier.sampled.benchmarks},
    )
    if before != now:
        raise OutputDirectoryError(
            f"{output} is the evaluation of {before[0]}"
            + (f" at revision {before[1]}" if before[1] else "")
            + f" on {', '.join(file or name for name, file in before[2].items())}: choose another "
            f"file with --output, or replace it with --output {output}"
        )


def _evaluate(
    recipe: Recipe, source: ModelSource, output: Path, world_size: int
) -> EvaluationReport | None:
    if recipe.engine.threads_per_process is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(recipe.engine.threads_per_process))
    from grpo_replay.evaluation.evaluation_progress import open_progress
    from grpo_replay.terminal.quiet import quiet_libraries, warnings_on_stderr

    with open_progress(world_size) as on_progress, quiet_libraries(), ExitStack() as stack:
        stack.enter_context(warnings_on_stderr())
        from grpo_replay.evaluation.session import evaluate_model

        generations = generations_parent(output)
        return evaluate_model(recipe, source, generations, world_size, on_progress, stack)
