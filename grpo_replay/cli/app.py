"""The command line. Each command is a class of options in `cli.options` and a module here with
`run(options)`, which is imported when the command runs.

`cli.error_boundary`, imported at the first error, turns errors into messages and exit codes.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from grpo_replay.cli import options
from grpo_replay.errors import INTERRUPTED
from grpo_replay.version import __version__


class CommandGroup(TyperGroup):
    """A Typer group that reports every error of its commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the options of the group, with False for a missing flag instead of None: to
        convert anything but a bool Typer imports pydantic, which would slow down every help."""
        params = super().get_params(ctx)
        for parameter in params:
            if getattr(parameter, "is_flag", False) and parameter.default is None:
                parameter.default = False
        return params

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; its error becomes a message and an exit code, but for wrong options."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":
                print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
        except Exception as error:
            if isinstance(error, typer.Exit):  # the exit code of a command
                raise
            if type(error).__module__.startswith(("typer.", "click.")):  # a wrong option
                raise
            from grpo_replay.cli.error_boundary import exit_code_of

            sys.exit(exit_code_of(error))


app = typer.Typer(
    name="grpo-replay",
    cls=CommandGroup,
    help="GRPO post-training with rollout replay.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = {
    "train": options.TrainOptions,
    "eval": options.EvalOptions,
    "inspect-buffer": options.InspectOptions,
    "aes": options.AesOptions,
    "report": options.ReportOptions,
    "plan": options.PlanOptions,
    "sweep": options.SweepOptions,
}


def _runner(name: str) -> Callable[[Any], int]:
    def run(options: Any) -> int:
        return import_module(f"grpo_replay.cli.{name.partition('-')[0]}_command").run(options)

    return run


for _name, _options in COMMANDS.items():
    app.command(_name)(options.as_command(_name, _options, _runner(_name)))


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"grpo-replay {__version__}")
        raise typer.Exit()


@app.callback()
def _main_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """GRPO post-training with rollout replay."""


def main() -> None:
    """Run the console script. Exit codes: 0 done, 1 unexpected, 2 usage or recipe, 3 data, 4
    stopped for safety, 130 interrupted."""
    from grpo_replay.terminal.console import prepare_streams

    prepare_streams()
    from grpo_replay.distributed.failures import exit_as_rank

    # A notebook's kernel sets its own backend, which may not be installed here.
    os.environ.pop("MPLBACKEND", None)
    exit_as_rank(_run_app)


def _run_app() -> None:
    """Run the command line; reports a failed write also of help and version, as on a full disk."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        from grpo_replay.cli.error_boundary import exit_code_of
        from grpo_replay.terminal.console import redirect_to_devnull

        code = exit_code_of(error)
        redirect_to_devnull(sys.stdout)
        sys.exit(code)


if __name__ == "__main__":
    main()
