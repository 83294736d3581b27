"""`grpo-replay inspect-buffer`: show the content and history of a replay buffer."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_replay.cli.foreign_code import announce_or_refuse_code, code_of
from grpo_replay.cli.options import InspectOptions
from grpo_replay.errors import SnapshotError, UsageError
from grpo_replay.lab.inspection import views
from grpo_replay.lab.inspection.buffer_summary import Inspection
from grpo_replay.lab.inspection.compute import Records, read_records, summarise
from grpo_replay.lab.inspection.rebuild import what_if
from grpo_replay.lab.inspection.source import Source, open_source
from grpo_replay.lab.inspection.views import read_life
from grpo_replay.storage.atomic import json_values, named_if_unwritable
from grpo_replay.storage.checkpoint import checkpoint_name
from grpo_replay.terminal.console import open_console, print_json
from grpo_replay.terminal.plot_style import FIGURE_FORMATS, check_plot_path


def run(options: InspectOptions) -> int:
    """Print the requested output; returns the exit status (3 if a verification failed).

    Raises UsageError for options that cannot be combined, SnapshotError for invalid files.
    """
    _check_options(options)
    source = open_source(options.path, options.step)
    _announce_or_refuse_code(source, options)
    console, as_json = open_console(markup=True), options.as_json
    if options.verify:
        return _verify(source, console, as_json, options.with_model)
    if options.what_if:
        _print(what_if(source, options.what_if), views.print_what_if, console, as_json)
    elif options.show is not None:
        _print(read_life(source, options.show), views.print_life, console, as_json)
    else:
        _screen(source, options, console)
    return 0


def _check_options(options: InspectOptions) -> None:
    """Raises UsageError for options that cannot be combined or would have no effect."""
    views_given = {
        "--show": options.show is not None,
        "--verify": options.verify,
        "--what-if": bool(options.what_if),
        "--plot": options.plot is not None,
    }
    used = [name for name, is_given in views_given.items() if is_given]
    if len(used) > 1:
        raise UsageError(f"{' and '.join(used)} cannot be combined; use one at a time")
    if options.plot is not None:
        check_plot_path(Path(options.plot), (*FIGURE_FORMATS, ".html"))
    if options.panel is not None and not (options.plot or "").lower().endswith(FIGURE_FORMATS):
        raise UsageError("--panel draws one panel of a figure: add --plot FILE.png, .svg or .pdf")
    if options.verify and options.step is not None:
        raise UsageError("--verify reads the whole run; leave out --step")
    if options.with_model and not options.verify:
        raise UsageError("--with-model extends --verify by checks that need weights: add --verify")


def _announce_or_refuse_code(source: Source, options: InspectOptions) -> None:
    """Announce the run's code that an inspection calls, or refuse it with --no-code."""
    if source.recipe is None:
        return
    sections = ("replay", "advantage", *(("model", "loss") if options.with_model else ()))
    code = code_of(source.recipe, sections)
    announce_or_refuse_code(code, f"the run in {source.path}", options.no_code, announce=True)


def _print_json(document: Any) -> None:
    print_json(json_values(document))


def _screen(source: Source, options: InspectOptions, console: Console) -> None:
    """Prints the inspection, as panels or JSON; with --plot writes a figure or page instead."""
    records = read_records(source)
    inspection = summarise(source, records)
    if options.plot is not None:
        _plot(source, records, inspection, options)
    if options.as_json:
        # The keys that tools rely on come first.
        first = {
            "step": inspection.step,
            "stored_rollouts": inspection.occupancy.stored_rollouts,
            "capacity_rollouts": inspection.settings["capacity_rollouts"],
        }
        _print_json({**first, **asdict(inspection)})
    elif options.plot is None:
        from grpo_replay.lab.inspection.buffer_panels import print_inspection

        print_inspection(inspection, console)


def _plot(
    source: Source, records: Records, inspection: Inspection, options: InspectOptions
) -> None:
    """Writes the page for a name ending in .html, else the figure of --panel or of all panels."""
    assert options.plot is not None
    path = Path(options.plot)
    with named_if_unwritable(path):
        if path.suffix.lower() == ".html":
            from grpo_replay.lab.inspection.buffer_page import make_page, write_page

            write_page(make_page(source, records, inspection), path)
        else:
            from grpo_replay.lab.inspection.buffer_figures import plot_inspection

            plot_inspection(inspection, path, options.panel)
    open_console(stderr=True).print(f"wrote {path}", soft_wrap=True)


def _print(
    result: Any, show: Callable[[Any, Console], None], console: Console, as_json: bool
) -> None:
    """Print a dataclass as JSON, or by `show`."""
    if as_json:
        _print_json(asdict(result))
    else:
        show(result, console)


def _verify(source: Source, console: Console, as_json: bool, with_model: bool) -> int:
    """Verifies a run and prints the report; returns 3 if a check failed."""
    from grpo_replay.lab.verification.verify import verify_run

    if source.recipe is None:
        raise SnapshotError(
            f"{source.path}: --verify recomputes a run from its rollout log; give a run directory"
        )
    report = verify_run(source.path, _policies(source) if with_model else None)
    if as_json:
        _print_json(report.to_json())
    else:
        views.print_verification(report, console)
    return 0 if report.passed else SnapshotError.exit_code


def _policies(source: Source) -> Callable[[int], Any]:
    """Returns a function that opens the policy after a step; after step 0, the initial model."""
    from grpo_replay.terminal.quiet import quiet_libraries

    with quiet_libraries():
        from grpo_replay.engine.saved_policies import PlainPolicy

    def open_policy(step: int) -> PlainPolicy:
        assert source.recipe, "the verification needs it"
        checkpoint = source.path / "checkpoints" / checkpoint_name(step) if step else None
        return PlainPolicy(source.recipe, checkpoint)

    return open_policy
