"""The Python API: recipe → train → evaluate → inspect → report, in this process. See docs/api.md.

The functions print nothing but, on a terminal, a bar while many files are read. Each corresponds to
a command, takes its options as Python values, and raises the errors of `grpo_replay.errors` that
the command would print.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_replay.errors import UsageError
from grpo_replay.named_functions import is_import_path
from grpo_replay.recipe import Recipe, parse_overrides, resolve_recipe
from grpo_replay.recipe import load_recipe as load_recipe_file

if TYPE_CHECKING:
    from grpo_replay.evaluation.evaluation_report import EvaluationReport
    from grpo_replay.lab.inspection.buffer_summary import Inspection
    from grpo_replay.training.run import RunResult

__all__ = ["Recipe", "evaluate", "inspect", "load_recipe", "report", "train"]

AnyRecipe = Recipe | str | Path
Overrides = Sequence[str] | Mapping[str, Any]
"""`{"run.steps": 6}`, or the words of `--set`: `["run.steps=6"]`."""

logging.getLogger("grpo_replay").addHandler(logging.NullHandler())


def load_recipe(recipe: AnyRecipe, overrides: Overrides = ()) -> Recipe:
    """Load a recipe from a file or a shipped name, or take one; applies overrides."""
    if isinstance(recipe, Recipe):
        changes = parse_overrides(_words(overrides))
        return _with_changes(recipe, changes) if changes else recipe
    return load_recipe_file(str(recipe), _words(overrides))


def train(
    recipe: AnyRecipe | None,
    output_dir: str | Path,
    resume: bool = False,
    *,
    overrides: Overrides = (),
    prompts: Iterable[Mapping[str, Any]] | None = None,
    reward: str | Callable[..., Any] | None = None,
    on_step: Callable[[Mapping[str, Any]], object] | None = None,
    on_evaluation: Callable[[int, "EvaluationReport"], object] | None = None,
) -> "RunResult":
    """Train in this process, on one rank. The result has the run directory and the summary.

    `prompts` are rows (a list of dicts, a `datasets.Dataset`). They are written to
    `<output_dir>.prompts.jsonl`, so that the run can be resumed. `reward` is a function that can be
    imported, in any form of docs/rewards.md. `on_step` is called with the metrics of each step,
    `on_evaluation` with a step and its report. `resume` continues the run in `output_dir` with its
    own recipe, which only `overrides` and `reward` change; `recipe` is then None or that recipe.

    Ctrl-C ends the run after the current step, with a checkpoint. Raises UsageError for a recipe
    of several ranks, and for a function that cannot be imported.
    """
    path = Path(output_dir)
    if resume and prompts is not None:
        raise UsageError(
            "prompts with resume=True: a resumed run keeps its prompts; leave them out"
        )
    resolved = _recipe_of_run(recipe, path, resume, overrides, reward is not None)
    from grpo_replay.distributed.environment import prepare_rank, rank_environment
    from grpo_replay.storage.run_directory import RunDirectory
    from grpo_replay.terminal.quiet import quiet_libraries

    if not resume:
        RunDirectory(path).refuse_occupied()
    changes: dict[str, Any] = {}
    if reward is not None:
        changes["reward"] = {"function": _import_path_of(reward)}
    if prompts is not None:
        changes["prompts"] = _write_prompts(prompts, path, resolved.prompts.id_field)
    prepare_rank(rank_environment())
    with quiet_libraries():
        from grpo_replay.training.run import run_training

        observer = _observer(on_step, on_evaluation)
        return run_training(_with_changes(resolved, changes), path, resume, observer)


def evaluate(
    model: str | Path,
    output: str | Path,
    recipe: AnyRecipe | None = None,
    benchmarks: Sequence[str] = (),
    samples: int | None = None,
    overrides: Overrides = (),
    reward: str | Callable[..., Any] | None = None,
) -> "EvaluationReport":
    """Evaluate a checkpoint, a run, a model folder or a Hugging Face id, and write the report to
    `output`. Defaults are those of `grpo-replay eval`; `reward` is a function as in `train`."""
    from grpo_replay.distributed.environment import prepare_rank, rank_environment
    from grpo_replay.evaluation.evaluation_report import check_output, generations_parent
    from grpo_replay.evaluation.session import evaluate_model, find_model, resolve_evaluation

    source, file = find_model(str(model)), Path(output)
    eval_keys = {
        "benchmarks": list(benchmarks) or None,
        "samples": samples,
        "reward": None if reward is None else _import_path_of(reward),
    }
    choices = {"eval": {name: value for name, value in eval_keys.items() if value is not None}}
    recipe_or_name = recipe if recipe is None or isinstance(recipe, Recipe) else str(recipe)
    resolved = resolve_evaluation(source, recipe_or_name, _words(overrides), choices)
    check_output(file)
    prepare_rank(rank_environment())
    report = evaluate_model(resolved, source, generations_parent(file), world_size=1)
    assert report is not None  # this is rank 0
    report.write(file)
    return report


def inspect(path: str | Path, step: int | None = None) -> "Inspection":
    """Summarise content and history of the buffer of a run, checkpoint or snapshot."""
    from grpo_replay.lab.inspection.compute import summarise
    from grpo_replay.lab.inspection.source import open_source

    return summarise(open_source(str(path), step))


def report(
    paths: str | Path | Sequence[str | Path],
    baseline: str | None = None,
    output: str | Path | None = None,
) -> dict[str, Any]:
    """Compare runs and sweeps; returns the document of `grpo-replay report --json`
    (docs/report.md). With `output`, also write pages, tables and figures to that folder."""
    from grpo_replay.lab.report.collect import collect
    from grpo_replay.lab.report.measure import measure
    from grpo_replay.lab.report.report_files import as_json, refuse_other_files, write_report

    several = [paths] if isinstance(paths, str | Path) else paths
    if output is not None:
        refuse_other_files(Path(output))
    experiment = collect([str(path) for path in several], baseline)
    document = measure(experiment)
    if output is not None:
        write_report(experiment, document, Path(output))
    return as_json(document)


def _words(overrides: Overrides) -> list[str]:
    """Overrides as words of `--set`. Raises UsageError for a value that a recipe cannot hold."""
    if isinstance(overrides, Mapping):
        return [f"{key}={_json_value(key, value)}" for key, value in overrides.items()]
    return list(overrides)


def _json_value(key: str, value: Any) -> str:
    """Returns the value as JSON, with a path as text and a numpy scalar as a number."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError):
        raise UsageError(
            f"override {key}: {value!r} is a {type(value).__name__}: give text, a number, a bool, "
            "None, a path, or lists and mappings of these"
        ) from None


def _with_changes(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    if not changes:
        return recipe
    return resolve_recipe([recipe.model_dump(mode="json"), dict(changes)], (recipe.name, "changes"))


def _recipe_of_run(
    recipe: AnyRecipe | None, path: Path, resume: bool, overrides: Overrides, has_reward: bool
) -> Recipe:
    """Returns the recipe to train with: on a resume the run's own, with `overrides`. Raises
    UsageError for several ranks, a new run without a recipe, or a resume with one that differs."""
    from grpo_replay.storage.run_directory import RunDirectory, refuse_missing
    from grpo_replay.storage.stored_recipe import recipe_to_resume, refuse_other_recipe_file

    loaded = None if recipe is None else load_recipe(recipe, overrides)
    if resume and not (loaded and RunDirectory(path).holds_only_opening_files):
        refuse_missing(path)
        resolved = recipe_to_resume(path, None, _words(overrides))  # `recipe` is compared below
        if loaded is not None:
            may_differ = {"reward.function"} if has_reward else set()
            if resolved.prompts.source == str(_prompts_file(path)):
                may_differ |= {"prompts.source", "prompts.id_field"}
            name = recipe if isinstance(recipe, str) else "the recipe given"
            refuse_other_recipe_file(loaded, resolved, name, path, may_differ)
    elif loaded is not None:
        resolved = loaded
    else:
        raise UsageError("train() needs a recipe; only resume=True continues a run with its own")
    if resolved.engine.num_processes > 1:
        raise UsageError(
            f"engine.num_processes {resolved.engine.num_processes}: train() is one process; use "
            "grpo-replay train, or launch this program with torchrun"
        )
    return resolved


def _import_path_of(function: str | Callable[..., Any]) -> str:
    """Returns the path by which verifier processes import a function; that of `__main__` names its
    file. Raises UsageError if they cannot: a lambda, a notebook, a program without a guard."""
    if isinstance(function, str):
        return function
    module, name = str(function.__module__), getattr(function, "__qualname__", "")
    loaded = sys.modules.get(module)
    source = Path(getattr(loaded, "__file__", None) or "")
    if "." not in module and source.is_file() and not hasattr(loaded, "__path__"):
        # A program can be imported if it trains only below a check of __name__.
        text = source.read_text(encoding="utf-8")
        is_guarded = re.search(r"^if\s+__name__\s*==", text, re.MULTILINE) is not None
        module = str(source.resolve()) if is_guarded or module != "__main__" else module
    import_path = f"{module}:{name}"
    if module == "__main__" or not is_import_path(import_path):
        raise UsageError(
            f"reward {name or function!r}: verifier processes import it by its name, so it must "
            "stand at the top of a module or a .py file (not in a notebook, a lambda or another "
            'function; in a program, train below `if __name__ == "__main__":`); or name it: '
            'reward="file.py:function"'
        )
    return import_path


def _write_prompts(
    rows: Iterable[Mapping[str, Any]], run_dir: Path, id_field: str | None
) -> dict[str, Any]:
    """Write rows as JSON lines next to a run directory; returns the `prompts` settings for the
    file, with `id_field` if its rows have that. Raises UsageError for values that JSON lacks."""
    from grpo_replay.prompts.sources import decoded_value
    from grpo_replay.storage.atomic import named_if_unwritable, write_text_whole

    features = getattr(rows, "features", None)  # of a `datasets.Dataset`
    try:
        converted = [decoded_value(dict(row), features) for row in rows]
        lines = [json.dumps(row, default=_plain) for row in converted]
    except (TypeError, ValueError) as error:
        raise UsageError(
            "prompts: expected rows that map names to texts, numbers and lists of them, such as "
            f"frame.to_dict('records'): {error}"
        ) from error
    path = _prompts_file(run_dir)
    with named_if_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_whole(path, "".join(f"{line}\n" for line in lines))
    has_ids = bool(converted) and id_field in converted[0]
    return {"source": str(path), "id_field": id_field if has_ids else None}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"neither text nor a number: {value!r}")


def _prompts_file(run_dir: Path) -> Path:
    return run_dir.absolute().with_name(f"{run_dir.name}.prompts.jsonl")


def _observer(
    on_step: Callable[[Mapping[str, Any]], object] | None,
    on_evaluation: Callable[[int, "EvaluationReport"], object] | None,
) -> Any:
    """Makes an observer of a run that calls the given functions."""
    from grpo_replay.training import Observer

    observer: Any = Observer()
    if on_step is not None:
        observer.on_step = on_step
    if on_evaluation is not None:
        observer.on_evaluation = on_evaluation
    return observer
