"""`grpo-replay eval`: one model on benchmarks, or two evaluation files against each other."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_replay.errors import EvaluationFileError, OutputDirectoryError, UsageError
from grpo_replay.evaluation.comparison import compare, differences
from grpo_replay.evaluation.model_source import ModelSource, find_model
from grpo_replay.evaluation.report import EvaluationReport, read_report, samples_path
from grpo_replay.evaluation.tables import (
    COMPARISON_LEGEND,
    LEGEND,
    comparison_table,
    markdown,
    terminal_tables,
)
from grpo_replay.ranks import prepare_rank, rank_environment
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
    num_processes: int | None = None
    overrides: Sequence[str] = ()
    as_json: bool = False


def run(options: EvalOptions) -> int:
    """Evaluate, write the report and its companions, print the table; returns the exit code."""
    source = find_model(options.ckpt)
    recipe = resolve_evaluation(options, source)
    output = Path(options.output) if options.output else DEFAULT_FOLDER / f"{source.name}.json"
    _check_output(output)
    environment = rank_environment()
    if not environment.is_launched and (options.num_processes or 1) > 1:
        from grpo_replay.launch import launch_ranks

        return launch_ranks(
            sys.argv[1:], options.num_processes, None, recipe.engine.threads_per_process
        )
    prepare_rank(environment)
    if source.notice and environment.rank == 0:
        print(source.notice, file=sys.stderr)
    report = _evaluate(recipe, source, output, environment.world_size)
    if environment.rank == 0:
        report.write(output)
        output.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
        _print_report(report, output, options.as_json)
    return 0


def run_comparison(path_a: str, path_b: str, as_json: bool = False) -> None:
    """Print how the second evaluation differs from the first, with a paired test."""
    a, b = read_report(Path(path_a)), read_report(Path(path_b))
    results = compare(path_a, a, path_b, b)
    if as_json:
        document = {
            "a": {"file": path_a, "model": a.model},
            "b": {"file": path_b, "model": b.model},
            "benchmarks": {name: asdict(r) for name, r in results.items() if name != "mean"},
            "mean": asdict(results["mean"]),
            "differences": differences(a, b),
        }
        print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = Console(highlight=False, markup=False)
    console.print(f"A  {path_a}\nB  {path_b}", soft_wrap=True)
    console.print(comparison_table(results))
    console.print(COMPARISON_LEGEND)
    for sentence in differences(a, b):
        console.print(sentence)


def resolve_evaluation(options: EvalOptions, source: ModelSource) -> Recipe:
    """The recipe an evaluation runs under: --recipe, else the run's own, else the paper's settings
    (for `builtin:tiny`, the tiny recipe); then --set; then the other options.

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
    path = None
    if options.recipe is not None:
        path = find_recipe(options.recipe)
    elif source.recipe is not None:
        path = source.recipe
    elif source.path == "builtin:tiny":
        path = find_recipe("tiny")
    if path is None:
        return "the default recipe", {"eval": {"benchmarks": ["paper"]}}
    layer = read_recipe_layer(path)
    layer.setdefault("name", path.stem)
    if options.recipe is None and isinstance(layer.get("model"), dict):
        layer["model"].pop("tokenizer", None)  # a checkpoint brings its own
    return str(path), layer


def _option_layer(options: EvalOptions) -> dict[str, Any]:
    evaluation = {
        "benchmarks": list(options.benchmarks) or None,
        "samples": options.k,
        "data_folder": options.data_folder,
        "greedy": options.greedy,
    }
    layer: dict[str, Any] = {"eval": {k: v for k, v in evaluation.items() if v is not None}}
    if options.backend is not None:
        layer["sampling"] = {"backend": options.backend}
    return layer


def _check_output(output: Path) -> None:
    if output.suffix != ".json":
        raise UsageError(
            f"--output {output}: name a .json file; the per-sample rows (.parquet) and the page "
            "(.md) go beside it"
        )
    if output.is_dir():
        raise OutputDirectoryError(f"--output {output} is a folder: name a .json file")
    if output.is_file():
        try:
            read_report(output, with_samples=False)
        except EvaluationFileError as error:
            raise OutputDirectoryError(
                f"--output {output} exists and is no evaluation file: choose another name, or "
                f"remove it ({error})"
            ) from error


def _evaluate(
    recipe: Recipe, source: ModelSource, output: Path, world_size: int
) -> EvaluationReport:
    if recipe.engine.threads_per_process is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(recipe.engine.threads_per_process))
    from grpo_replay.evaluation.progress import open_progress
    from grpo_replay.quiet import quiet_libraries, warnings_on_stderr

    with open_progress() as on_progress, quiet_libraries(), ExitStack() as stack:
        stack.enter_context(warnings_on_stderr())
        from grpo_replay.evaluation.session import evaluate_model

        return evaluate_model(recipe, source, _generations(output), world_size, on_progress, stack)


def _generations(output: Path) -> Path:
    return output.with_suffix(".generations")


def _print_report(report: EvaluationReport, output: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = Console(highlight=False, markup=False)
    for table in terminal_tables(report):
        console.print(table)
    console.print(LEGEND)
    for name, result in report.sampled.benchmarks.items():
        if result.unparsable_answers:
            bad = ", ".join(result.unparsable_answers)
            console.print(f"{name}: the reference answers of {bad} cannot be parsed")
    console.print(
        f"written: {output}, {samples_path(output).name}, {output.stem}.md", soft_wrap=True
    )
