"""`grpo-replay inspect-buffer`: show the content and history of a replay buffer."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from grpo_replay.cli.foreign_code import code_of, consider_code
from grpo_replay.cli.options import InspectOptions
from grpo_replay.errors import (
    CheckpointError,
    DatasetError,
    OutputDirectoryError,
    SnapshotError,
    UsageError,
    first_line,
)
from grpo_replay.lab.inspection import views
from grpo_replay.lab.inspection.buffer_summary import Inspection
from grpo_replay.lab.inspection.compute import summarise
from grpo_replay.lab.inspection.rebuild import what_if
from grpo_replay.lab.inspection.rows import Filter, RowSource, export_rows, iter_rows, open_rows
from grpo_replay.lab.inspection.source import Source, open_source
from grpo_replay.lab.inspection.views import LIST_ROWS, read_life, warn_of_gaps
from grpo_replay.storage.atomic import json_values, named_if_unwritable
from grpo_replay.storage.checkpoint import RunState, checkpoint_name, newest_state
from grpo_replay.storage.rollout_log import STEP_FOLDERS
from grpo_replay.terminal.console import open_console, print_json
from grpo_replay.terminal.plot_style import FIGURE_FORMATS, check_plot_path


def run(options: InspectOptions) -> int:
    """Print the requested output; returns the exit status (3 if a verification failed).

    Raises UsageError for options that cannot be combined, SnapshotError for invalid files.
    """
    _check_options(options)
    source = open_source(options.path, options.step)
    _consider_code(source, options)
    console, as_json = open_console(markup=True), options.as_json
    if options.verify:
        return _verify(source, console, as_json, options.with_model)
    if options.what_if or options.show is not None or options.where or options.export:
        warn_of_gaps(source)
    if options.what_if:
        _answer(what_if(source, options.what_if), views.print_what_if, console, as_json)
    elif options.show is not None:
        _answer(read_life(source, options.show), views.print_life, console, as_json)
    elif options.where is not None or options.export is not None:
        rows = open_rows(source)
        chosen = rows, None if options.where is None else Filter(options.where, rows.schema)
        if options.export is not None:
            _refuse_own_folders(source.run_dir, Path(options.export))
            _export(chosen, Path(options.export), console, as_json)
        else:
            _list(source, chosen, options, console)
    else:
        _screen(source, options.plot, console, as_json)
    return 0


def _check_options(options: InspectOptions) -> None:
    asked = {
        "--show": options.show is not None,
        "--where or --export": options.where is not None or options.export is not None,
        "--verify": options.verify,
        "--what-if": bool(options.what_if),
        "--plot": options.plot is not None,
    }
    used = [name for name, given in asked.items() if given]
    if len(used) > 1:
        raise UsageError(f"{' and '.join(used)} cannot be combined; use one at a time")
    if options.plot is not None:
        check_plot_path(Path(options.plot), (*FIGURE_FORMATS, ".html"))
    if options.text or options.limit != LIST_ROWS:
        if options.where is None:
            raise UsageError("--limit and --text choose what --where lists; add --where EXPR")
        if options.export is not None:
            raise UsageError("--export writes all that match; leave out --limit and --text")
    if options.verify and options.step is not None:
        raise UsageError("--verify reads the whole run; leave out --step")
    if options.with_model and not options.verify:
        raise UsageError("--with-model recomputes what --verify can check with weights: add it")


def _consider_code(source: Source, options: InspectOptions) -> None:
    """Name the code of the run that an inspection runs, or with --no-code refuse any."""
    if source.recipes is None:
        return
    sections = ("replay", "advantage", *(("model", "loss") if options.with_model else ()))
    found = (each for recipe in source.recipes.recipes for each in code_of(recipe, sections))
    code = list(dict.fromkeys(found))
    consider_code(code, f"the run in {source.run_dir}", options.no_code, announce=True)


def _print_json(document: Any) -> None:
    print_json(json_values(document))


def _screen(source: Source, plot: str | None, console: Console, as_json: bool) -> None:
    inspection = summarise(source)
    if plot is not None:
        _plot(inspection, Path(plot))
    if as_json:
        _print_json(views.inspection_document(inspection))
    elif plot is None:
        from grpo_replay.lab.inspection.buffer_panels import print_inspection

        print_inspection(inspection, console)


def _plot(inspection: Inspection, path: Path) -> None:
    with named_if_unwritable(path):
        if path.suffix.lower() == ".html":
            from grpo_replay.lab.inspection.buffer_panels import write_page

            write_page(inspection, path)
        else:
            from grpo_replay.lab.inspection.buffer_figures import plot_inspection

            plot_inspection(inspection, path)
    open_console(stderr=True).print(f"wrote {path}", soft_wrap=True)


def _answer(
    found: Any, show: Callable[[Any, Console], None], console: Console, as_json: bool
) -> None:
    """Print a dataclass as JSON, or as `show` does."""
    if as_json:
        _print_json(asdict(found))
    else:
        show(found, console)


def _refuse_own_folders(run_dir: Path | None, target: Path) -> None:
    """Raises OutputDirectoryError for a file among those of the run, which would be read as one."""
    own = [] if run_dir is None else [run_dir / name for name in (*STEP_FOLDERS, "checkpoints")]
    for folder in own:
        if target.resolve().is_relative_to(folder.resolve()):
            raise OutputDirectoryError(
                f"--export {target}: {folder} holds the run's own files; choose another folder"
            )


def _export(
    chosen: tuple[RowSource, Filter | None], path: Path, console: Console, as_json: bool
) -> None:
    with named_if_unwritable(path):
        count = export_rows(*chosen, path)
    if as_json:
        _print_json({"exported": count, "file": str(path)})
    else:
        console.print(f"wrote {count:,} rollouts to {escape(str(path))}", soft_wrap=True)


def _list(
    source: Source,
    chosen: tuple[RowSource, Filter | None],
    options: InspectOptions,
    console: Console,
) -> None:
    names = (*views.LISTED, "completion_text") if options.text else views.LISTED
    if options.text and "completion_text" not in chosen[0].schema.names:
        raise UsageError("--text needs a run directory: a snapshot holds no texts")
    columns = [name for name in names if name in chosen[0].schema.names]
    listed, total = _matches(*chosen, columns, options.limit)
    if options.text:
        _add_problems(listed, source)
    if options.as_json:
        _print_json({"matches": total, "rollouts": listed})
    else:
        views.print_list(listed, total, console)


def _add_problems(rows: Sequence[dict[str, Any]], source: Source) -> None:
    """Set `problem` and `answer` of each row: None, and a notice, if the prompts cannot be read now
    or are others than at its step."""
    from grpo_replay.prompts.prompt_set import KnownProblems, read_problems

    recipe, known, reason = source.recipe, KnownProblems({}, ""), None
    state = RunState()
    try:
        if recipe is not None:
            known = read_problems(recipe.prompts, recipe.run.seed)
        if source.run_dir is not None:
            state = newest_state(source.run_dir / "checkpoints")
    except (CheckpointError, DatasetError, ImportError) as error:
        known, reason = KnownProblems({}, ""), first_line(error)
    unrecorded = changed = 0
    for row in rows:
        found = known.by_id.get(row["prompt_id"])
        then = state.prompts_at(row["birth_step"])
        unrecorded += found is not None and then is None
        if found is not None and then not in (None, known.sha256):
            found, changed = None, changed + 1
        row["problem"], row["answer"] = found or (None, None)
    if changed:
        reason = f"prompts.source has changed since the steps of {changed} of {len(rows)} rollouts"
    if reason is not None:
        print(f"the problems are not shown: {reason}", file=sys.stderr)
    if unrecorded:
        print(
            "problems and answers are those that prompts.source has now: no checkpoint records "
            "what it had then",
            file=sys.stderr,
        )


def _matches(
    rows: RowSource, chosen: Filter | None, columns: Sequence[str], limit: int
) -> tuple[list[dict[str, Any]], int]:
    """The first matching rows, and the number of all matching rows."""
    listed: list[dict[str, Any]] = []
    total = 0
    for table in iter_rows(rows, columns, chosen):
        listed.extend(table.slice(0, limit - len(listed)).to_pylist())
        total += table.num_rows
    return listed, total


def _verify(source: Source, console: Console, as_json: bool, with_model: bool) -> int:
    from grpo_replay.lab.verification.verify import verify_run

    if source.run_dir is None:
        raise SnapshotError(
            f"{source.path}: --verify recomputes a run from its rollout log; give a run directory"
        )
    report = verify_run(source.run_dir, _policies(source) if with_model else None)
    if as_json:
        _print_json(report.to_json())
    else:
        views.print_verification(report, console)
    return 0 if report.passed else SnapshotError.exit_code


def _policies(source: Source) -> Callable[[int], Any]:
    """Opens the policy after a step of the run; of step 0 the model that it began with."""
    from grpo_replay.terminal.quiet import quiet_libraries

    with quiet_libraries():
        from grpo_replay.engine.models import PlainPolicy

    def open_policy(step: int) -> PlainPolicy:
        assert source.run_dir and source.recipes, "the verification has read them"
        recipe, checkpoint = source.recipes.at(max(step, 1)), checkpoint_name(step)
        folder = source.run_dir / "checkpoints" / checkpoint / "model" if step else None
        return PlainPolicy(recipe.model, recipe.run.seed, folder)

    return open_policy
