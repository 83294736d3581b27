"""`grpo-replay eval`: one model on benchmarks, or two evaluation files against each other."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_replay.distributed.environment import prepare_rank, rank_environment
from grpo_replay.distributed.interruption import sigterm_interrupts
from grpo_replay.errors import OutputDirectoryError, UsageError
from grpo_replay.evaluation.benchmarks import find_benchmarks, local_file
from grpo_replay.evaluation.comparison import compare, differences
from grpo_replay.evaluation.model_source import ModelSource, find_model, used_revision
from grpo_replay.evaluation.output import (
    check_output,
    generations_parent,
    page_path,
    write_output,
)
from grpo_replay.evaluation.report import (
    EvaluationReport,
    read_report_graded_by,
    samples_path,
)
from grpo_replay.evaluation.tables import (
    COMPARISON_LEGEND,
    comparison_table,
    heading,
    legend,
    length_table,
    print_table,
    terminal_tables,
)
from grpo_replay.recipe import (
    Recipe,
    find_recipe,
    parse_overrides,
    read_recipe_layer,
    resolve_recipe,
)

DEFAULT_FOLDER = Path("evaluations")


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What the command line said; None and empty leave the recipe's value."""

    ckpt: str
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
    as_json: bool = False


def run(options: EvalOptions) -> int:
    """Evaluate, write the report and its companions, print the table; returns the exit code."""
    source = find_model(options.ckpt)
    recipe = resolve_evaluation(options, source)
    output = Path(options.output) if options.output else DEFAULT_FOLDER / f"{source.name}.json"
    earlier = check_output(output)
    if earlier is not None and options.output is None:
        _refuse_to_replace(output, earlier, source, recipe)
    environment = rank_environment()
    if not environment.is_launched and (options.num_processes or 1) > 1:
        from grpo_replay.distributed.launch import launch_ranks

        return launch_ranks(
            sys.argv[1:], options.num_processes, None, recipe.engine.threads_per_process
        )
    prepare_rank(environment)
    if environment.rank == 0:
        for notice in _notices(options, source, recipe):
            print(notice, file=sys.stderr)
    # A launcher that ends its other ranks after a failure sends SIGTERM too, and reports it itself.
    with nullcontext() if environment.is_launched else sigterm_interrupts():
        report = _evaluate(recipe, source, output, environment.world_size)
    if report is not None:
        write_output(report, output)
        print_report(report, output, options.as_json)
    return 0


def refuse_with_comparison(
    given: Sequence[str], output: str | None, regrade: str | None, verifiers: Sequence[str]
) -> None:
    """Raises UsageError for options that `--compare` would ignore."""
    also = [name for name, value in (("--output", output), ("--regrade", regrade)) if value]
    if ignored := [*given, *also]:
        raise UsageError(
            f"--compare reads two reports as they are: {', '.join(ignored)} would change nothing"
        )
    if len(verifiers) > 1:
        raise UsageError("--compare takes one --grade-with: the verdicts to compare")


def run_comparison(
    path_a: str, path_b: str, as_json: bool = False, verifier: str | None = None
) -> None:
    """Print how the second evaluation differs from the first, with a paired test; both graded by
    `verifier`, or by their own."""
    a, b = (read_report_graded_by(Path(path), verifier) for path in (path_a, path_b))
    results = compare(path_a, a, path_b, b)
    if as_json:
        document = {
            "a": {"file": path_a, "model": a.model},
            "b": {"file": path_b, "model": b.model},
            "benchmarks": {name: asdict(r) for name, r in results.items() if name != "mean"},
            "mean": asdict(results["mean"]),
            "graded_by": a.settings.get("reward"),
            "differences": differences(a, b),
        }
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = Console(highlight=False, markup=False)
    console.print(f"A  {path_a}\nB  {path_b}", soft_wrap=True)
    print_table(console, comparison_table(results))
    print_table(console, length_table(results))
    console.print(COMPARISON_LEGEND)
    for sentence in differences(a, b):
        console.print(sentence)


def resolve_evaluation(options: EvalOptions, source: ModelSource) -> Recipe:
    """The recipe an evaluation runs under: --recipe, else the run's own, else paper A's benchmarks
    with its settings for 0.6B and 1.7B (for `builtin:tiny`, the tiny recipe); then --set; then the
    other options.

    Raises RecipeError, and UsageError if nothing names a benchmark.
    """
    place, layer = _recipe_layer(options, source)
    overrides = parse_overrides(options.overrides)
    if "path" in overrides.get("model", {}):
        raise UsageError("--set model.path: eval takes the model from --ckpt")
    recipe = resolve_recipe([layer, overrides, _option_layer(options)], place)
    if not recipe.eval.benchmarks:
        raise UsageError(
            f"{place} names no benchmarks to evaluate: add --benchmark, such as --benchmark paper, "
            "--benchmark math500, or --benchmark my.jsonl"
        )
    # What was trained or downloaded is never initialised at random.
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
        layer["model"].pop("tokenizer", None)  # a checkpoint brings its own
    return str(path), layer


def _recipe_path(options: EvalOptions, source: ModelSource) -> Path | None:
    if options.recipe is not None:
        return find_recipe(options.recipe)
    return find_recipe("tiny") if source.path == "builtin:tiny" else source.recipe


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
    """What was chosen for the user, in sentences."""
    notices = [source.notice] if source.notice else []
    if _recipe_path(options, source) is None:
        settings, longest = recipe.eval, recipe.sampling.max_completion_length
        notices.append(
            f"no recipe: T {settings.temperature:g}, top-p {settings.top_p:g}, at most {longest:,} "
            f"tokens, {recipe.sampled_dtype} on {recipe.sampling.backend}; --recipe or --set "
            "chooses others (paper A evaluates 4B with 16,384 tokens: --recipe qwen3-4b)"
        )
    return notices


def _refuse_to_replace(
    output: Path, earlier: EvaluationReport, source: ModelSource, recipe: Recipe
) -> None:
    """Nobody named the file, so it must not take the place of something else."""
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
            + f" on {', '.join(file or name for name, file in before[2].items())}: name another "
            "file with --output, or that one to replace it"
        )


def _evaluate(
    recipe: Recipe, source: ModelSource, output: Path, world_size: int
) -> EvaluationReport | None:
    if recipe.engine.threads_per_process is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(recipe.engine.threads_per_process))
    from grpo_replay.evaluation.progress import open_progress
    from grpo_replay.terminal.quiet import quiet_libraries, warnings_on_stderr

    with open_progress(world_size) as on_progress, quiet_libraries(), ExitStack() as stack:
        stack.enter_context(warnings_on_stderr())
        from grpo_replay.evaluation.session import evaluate_model

        generations = generations_parent(output)
        return evaluate_model(recipe, source, generations, world_size, on_progress, stack)


def print_report(report: EvaluationReport, output: Path, as_json: bool) -> None:
    """The tables, or the JSON document, on stdout."""
    if as_json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = Console(highlight=False, markup=False)
    console.print(heading(report), soft_wrap=True)
    for table in terminal_tables(report):
        print_table(console, table)
    console.print(legend(report))
    for name, result in report.sampled.benchmarks.items():
        if result.unparsable_answers:
            bad = ", ".join(result.unparsable_answers)
            console.print(f"{name}: the reference answers of {bad} cannot be parsed")
    console.print(
        f"written: {output}, {samples_path(output).name}, {page_path(output).name}", soft_wrap=True
    )
