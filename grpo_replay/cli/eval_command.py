"""`grpo-replay eval`: evaluate a model on benchmarks, regrade an evaluation, or compare two."""

import sys
from contextlib import nullcontext
from pathlib import Path

from grpo_replay.cli.compare import run_comparison
from grpo_replay.cli.eval_display import print_report
from grpo_replay.cli.regrade import run_regrading
from grpo_replay.distributed.environment import prepare_rank, rank_environment
from grpo_replay.distributed.interruption import sigterm_interrupts
from grpo_replay.errors import OutputDirectoryError, UsageError
from grpo_replay.evaluation.benchmarks import find_benchmarks, local_file
from grpo_replay.evaluation.evaluation_recipe import (
    EvalOptions,
    evaluate_on_rank,
    recipe_path,
    resolve_evaluation,
)
from grpo_replay.evaluation.evaluation_report import EvaluationReport
from grpo_replay.evaluation.model_source import ModelSource, find_model, used_revision
from grpo_replay.evaluation.output_files import check_output, write_output
from grpo_replay.recipe import (
    BUILTIN_VERIFIERS,
    Recipe,
)

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
        report = evaluate_on_rank(recipe, source, output, environment.world_size)
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


def _notices(options: EvalOptions, source: ModelSource, recipe: Recipe) -> list[str]:
    """Sentences on the defaults chosen for the user."""
    notices = [source.notice] if source.notice else []
    if recipe_path(options, source) is None:
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
