"""The command line: parse, call, and the one place where errors become messages and exit codes.

Nothing heavy is imported before a command runs, so that `--help` and completion answer at once.
"""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

INTERRUPTED = 130


class CommandGroup(TyperGroup):
    """The error boundary: every error of a command passes here, once."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            raise  # the reader of our output left: Typer ends quietly
        except Exception as error:
            if type(error).__module__.startswith(("typer.", "click.")):
                raise  # a wrong option, or the exit code of a command
            sys.exit(_report(error))


app = typer.Typer(
    name="grpo-replay",
    cls=CommandGroup,
    help="GRPO post-training that reuses its rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe value; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")],
    overrides: Overrides = None,
    output_dir: Annotated[
        str | None, typer.Option(help="Directory of the run [default: runs/RECIPE-TIMESTAMP].")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --output-dir.")
    ] = False,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node; overrides engine.num_processes.")
    ] = None,
    hostfile: Annotated[
        str | None, typer.Option(help="DeepSpeed hostfile, to run on several nodes.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take, and launch nothing.")
    ] = False,
    gpu_memory_gib: Annotated[
        float | None, typer.Option(min=1, help="With --dry-run: memory of the GPUs to plan for.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Post-train a model as a recipe says."""
    from grpo_replay.commands.train import run

    code = run(
        recipe,
        overrides or (),
        output_dir=output_dir,
        resume=resume,
        num_processes=num_processes,
        hostfile=hostfile,
        dry_run=dry_run,
        as_json=as_json,
        gpu_memory_gib=gpu_memory_gib,
    )
    raise typer.Exit(code)


@app.callback()
def _top() -> None:
    pass


def main() -> None:
    """The console script. Exit codes: 0 done, 1 unexpected, 2 usage or recipe, 3 data, 4 stopped
    for safety, 130 interrupted."""
    app()


def _report(error: Exception) -> int:
    """Print an error once over all ranks; returns the exit code."""
    from grpo_replay.errors import GrpoReplayError
    from grpo_replay.rank_failures import report_failure

    known = isinstance(error, GrpoReplayError)
    code = error.exit_code if known else 1
    _log(error)
    if not report_failure(error, code):
        return code
    if known:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"error: {error}{notes}", file=sys.stderr)
        return code
    import traceback

    traceback.print_exception(error)
    print("This is a bug in grpo-replay: please report it with the lines above.", file=sys.stderr)
    return code


def _log(error: Exception) -> None:
    """Keep the traceback in the run's log, if one is open."""
    import logging

    if any(isinstance(handler, logging.FileHandler) for handler in logging.root.handlers):
        logging.getLogger("grpo_replay").error("the command failed", exc_info=error)


if __name__ == "__main__":
    main()
