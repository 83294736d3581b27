"""`grpo-replay eval`: evaluate a model on benchmarks, or compare two evaluations."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from grpo_replay.cli.foreign_code import announce_or_refuse_code, code_of
from grpo_replay.cli.options import EvalOptions
from grpo_replay.distributed.environment import prepare_rank, rank_environment, refuse_other_count
from grpo_replay.errors import OutputDirectoryError, UsageError
from grpo_replay.evaluation.comparison import compare, notices_of_prompts
from grpo_replay.evaluation.evaluate import OnProgress
from grpo_replay.evaluation.evaluation_report import (
    EvaluationReport,
    check_output,
    generations_parent,
    read_report,
    samples_path,
)
from grpo_replay.evaluation.evaluation_tables import (
    accuracy_table,
    comparison_table,
    heading,
    length_table,
)
from grpo_replay.evaluation.session import (
    ModelSource,
    evaluate_model,
    find_model,
    recipe_path,
    resolve_evaluation,
)
from grpo_replay.recipe import Recipe
from grpo_replay.stop import StopToken
from grpo_replay.terminal.console import open_console, print_json
from grpo_replay.terminal.quiet import warnings_on_stderr

DEFAULT_FOLDER = Path("evaluations")
PLAIN_LINES = 10
"""Number of progress lines of an evaluation when stderr is not a terminal."""


def run(options: EvalOptions) -> int:
    """Evaluate or compare, as the options say; returns the exit code.

    Raises UsageError for options that would have no effect.
    """
    if options.compare is not None:
        allowed = EvalOptions(compare=options.compare, as_json=options.as_json)
        if options != allowed:
            raise UsageError("--compare reads two reports: leave out all other options but --json")
        return _compare(*options.compare, options.as_json)
    if options.ckpt is None:
        raise UsageError("eval needs --ckpt DIR|HF_ID, or --compare A.json B.json")
    return _evaluate(options, find_model(options.ckpt))


def resolved(options: EvalOptions, source: ModelSource) -> Recipe:
    """Resolve the recipe of an evaluation of `source` with these options."""
    eval_keys = {
        "benchmarks": list(options.benchmarks) or None,
        "samples": options.k,
        "data_folder": options.data_folder,
        "greedy": options.greedy,
    }
    choices = {"eval": {key: value for key, value in eval_keys.items() if value is not None}}
    if options.backend is not None:
        choices["sampling"] = {"backend": options.backend}
    return resolve_evaluation(source, options.recipe, options.overrides, choices)


def _evaluate(options: EvalOptions, source: ModelSource) -> int:
    """Evaluate, write the report and its per-sample rows, and print the tables; returns the exit
    code. With several `--num-processes` it launches ranks that do so. An existing report is
    replaced only if `--output` names it."""
    recipe = resolved(options, source)
    _announce_or_refuse_code(recipe, options, source)
    output = Path(options.output) if options.output else DEFAULT_FOLDER / f"{source.name}.json"
    if options.output is None and output.exists():
        raise OutputDirectoryError(
            f"{output} is there already: choose another file with --output, or replace it with "
            f"--output {output}"
        )
    check_output(output)
    environment = rank_environment()
    refuse_other_count(environment, options.num_processes, "--num-processes")
    if not environment.is_launched and options.num_processes and options.num_processes > 1:
        from grpo_replay.distributed.launch import launch_ranks

        return launch_ranks(sys.argv[1:], options.num_processes, recipe.engine.threads_per_process)
    prepare_rank(environment)
    if environment.rank == 0:
        for notice in _notices(options, source, recipe):
            print(notice, file=sys.stderr)
    ranks = environment.world_size
    label = "evaluating" if ranks == 1 else f"evaluating (rank 0 of {ranks})"
    with (
        StopToken().on_signals(),
        _progress(label, environment.rank == 0) as on_progress,
        warnings_on_stderr(),
    ):
        report = evaluate_model(recipe, source, generations_parent(output), ranks, on_progress)
    if report is not None:
        report.write(output)
        print_report(report, output, options.as_json)
    return 0


def _announce_or_refuse_code(recipe: Recipe, options: EvalOptions, source: ModelSource) -> None:
    """Announce the code that a run's own recipe names; with --no-code refuse that of any recipe."""
    overrides = [*options.overrides]
    if options.backend is not None:
        overrides.append(f"sampling.backend={options.backend}")
    code = code_of(recipe, ("model", "sampling", "reward", "eval"), overrides)
    is_own = options.recipe is None
    origin = f"the recipe of {source.path}" if is_own else f"recipe {options.recipe}"
    announces = is_own and rank_environment().rank == 0
    announce_or_refuse_code(code, origin, options.no_code, announces)


def _notices(options: EvalOptions, source: ModelSource, recipe: Recipe) -> list[str]:
    """Returns sentences about defaults that were chosen for the user."""
    notices = [source.notice] if source.notice else []
    if recipe_path(source, options.recipe) is None:
        settings, longest = recipe.eval, recipe.sampling.max_completion_length
        notices.append(
            f"no recipe: T {settings.temperature:g}, top-p {settings.top_p:g}, at most {longest:,} "
            f"tokens, {recipe.sampled_dtype} on {recipe.sampling.backend}, graded by "
            f"{settings.reward}; change them with --recipe or --set (paper A evaluates 4B with "
            "16,384 tokens: --recipe qwen3-4b)"
        )
    return notices


@contextmanager
def _progress(label: str, is_main: bool) -> Iterator[OnProgress]:
    """Shows an evaluation's progress on stderr: a bar on a terminal, else about `PLAIN_LINES`
    lines. Yields the function to call with the numbers of graded, all and correct completions of
    rank 0. Every rank enters; only rank 0 (`is_main`) shows and calls."""
    console, shown = open_console(stderr=True), 0
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(
        TextColumn(label), *columns, TextColumn("{task.description}"),
        console=console, disable=not (is_main and console.is_terminal),
    )  # fmt: skip
    task = bar.add_task("", total=None)

    def show(done: int, total: int, correct: int) -> None:
        nonlocal shown
        accuracy = f"{100 * correct / done:.1f} % of the completions correct so far" if done else ""
        bar.update(task, total=total, completed=done, description=accuracy)
        if bar.disable and done * PLAIN_LINES >= (shown + 1) * total:
            shown = done * PLAIN_LINES // total
            console.print(f"{label} {done}/{total} {accuracy}")

    with bar:
        yield show


def print_report(report: EvaluationReport, output: Path, as_json: bool) -> None:
    """Print the tables, or the JSON document, to stdout."""
    if as_json:
        print_json(report.to_json())
        return
    console = open_console()
    console.print(heading(report), soft_wrap=True)
    for table in (accuracy_table(report), length_table(report)):
        table.print(console)
    for name, result in report.sampled.benchmarks.items():
        if result.unparsable_answers:
            ids = ", ".join(result.unparsable_answers)
            console.print(f"{name}: the reference answers of {ids} cannot be parsed")
    if missing := report.missing_verdicts():
        console.print(missing, soft_wrap=True)
    console.print(f"written: {output}, {samples_path(output).name}", soft_wrap=True)


def _compare(path_a: str, path_b: str, as_json: bool) -> int:
    """Print how evaluation B differs from A, with a paired test, as a table or JSON."""
    a, b = (read_report(Path(path)) for path in (path_a, path_b))
    results = compare(path_a, a, path_b, b)
    for notice in notices_of_prompts(a, b):
        print(notice, file=sys.stderr)
    if as_json:
        document = {
            "a": {"file": path_a, "model": a.model},
            "b": {"file": path_b, "model": b.model},
            "benchmarks": {name: asdict(r) for name, r in results.items() if name != "mean"},
            "mean": asdict(results["mean"]),
            "graded_by": a.settings.get("reward"),
        }
        print_json(document)
        return 0
    console = open_console()
    for name, path, report in (("A", path_a, a), ("B", path_b, b)):
        console.print(f"{name}  {path}: {heading(report)}", soft_wrap=True)
    comparison_table(results).print(console)
    return 0
