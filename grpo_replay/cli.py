"""The command line: parse, call, and the one place where errors become messages and exit codes.

Nothing heavy is imported before a command runs, so that `--help` and completion answer at once.
"""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from grpo_replay.errors import INTERRUPTED


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
        str | None, typer.Option(help="Directory of the run; runs/RECIPE-TIMESTAMP if not given.")
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


@app.command("eval")
def evaluate(
    ckpt: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|HF_ID", help="Checkpoint, run directory, model folder or hub id."
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe to evaluate under; the run's own if not given.")
    ] = None,
    benchmarks: Annotated[
        list[str] | None,
        typer.Option(
            "--benchmark",
            metavar="NAME",
            help="math500, aime25, aime26, hmmt_feb25, hmmt_feb26; the groups paper and tiny; or "
            "a JSONL or Parquet file. May be repeated.",
        ),
    ] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Completions per problem.")] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Report; evaluations/NAME.json if not given.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="hf|vllm|vllm_server", help="Sampler.")
    ] = None,
    data_folder: Annotated[
        str | None, typer.Option(help="Folder of benchmark files, read instead of the hub.")
    ] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--no-greedy", help="Evaluate greedily as well, or not.")
    ] = None,
    grade_with: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERIFIER",
            help="Another verifier of the same completions, reported beside eval.reward; may be "
            "repeated. With --compare: the one whose verdicts are compared.",
        ),
    ] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="Ranks on this node.")] = None,
    overrides: Overrides = None,
    regrade: Annotated[
        str | None,
        typer.Option(
            metavar="A.json",
            help="Add the verdicts of --grade-with to this report without sampling, instead.",
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A.json B.json", help="Paired test of two reports, instead."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint on benchmarks, regrade an evaluation, or compare two."""
    from grpo_replay.commands import eval as command
    from grpo_replay.errors import UsageError

    others = {
        "--ckpt": ckpt, "--recipe": recipe, "--benchmark": benchmarks, "--k": k,
        "--backend": backend, "--data-folder": data_folder, "--greedy": greedy,
        "--num-processes": num_processes, "--set": overrides,
    }  # fmt: skip
    given = [name for name, value in others.items() if value not in (None, [])]
    if compare is not None:
        command.refuse_with_comparison(given, output, regrade, grade_with or ())
        verifier = grade_with[0] if grade_with else None
        command.run_comparison(*compare, as_json=as_json, verifier=verifier)
        return
    if regrade is not None:
        from grpo_replay.commands.regrade import refuse_with_regrading, run_regrading

        refuse_with_regrading(given, grade_with or ())
        run_regrading(regrade, grade_with or (), output, as_json=as_json)
        return
    if ckpt is None:
        raise UsageError(
            "eval needs --ckpt DIR|HF_ID, --regrade A.json --grade-with VERIFIER, or --compare "
            "A.json B.json"
        )
    options = command.EvalOptions(
        ckpt=ckpt,
        recipe=recipe,
        benchmarks=tuple(benchmarks or ()),
        k=k,
        output=output,
        backend=backend,
        data_folder=data_folder,
        greedy=greedy,
        grade_with=tuple(grade_with or ()),
        num_processes=num_processes,
        overrides=tuple(overrides or ()),
        as_json=as_json,
    )
    raise typer.Exit(command.run(options))


@app.command("inspect-buffer")
def inspect_buffer(
    path: Annotated[str, typer.Argument(help="Run directory, checkpoint or buffer.parquet.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="As of this training step; the last if not given.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a figure: .png, .svg or .html.")
    ] = None,
    show: Annotated[
        int | None, typer.Option(metavar="ROLLOUT_ID", help="One rollout and its life.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="EXPR", help="List rollouts that match, such as 'reward > 0 and age_steps > 3'."
        ),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the rollouts: .parquet, .jsonl or a folder."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Recompute a run from its files alone.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Replay the run's rollouts through other settings."),
    ] = None,
    as_json: Json = False,
) -> None:
    """See what a replay buffer holds, and what it did."""
    from grpo_replay.commands.inspect_buffer import run

    code = run(
        path, step, as_json=as_json, plot=plot, show=show, where=where, export=export,
        verify=verify, changes=what_if or (),
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def aes(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[CANDIDATE.json]...", help="Evaluations.")
    ] = None,
    reference: Annotated[
        str, typer.Option(metavar="EVAL.json|ACC,TOKENS", help="What to compare with.")
    ] = ...,
    candidates: Annotated[
        list[str] | None,
        typer.Option("--candidate", metavar="NAME=ACC,TOKENS", help="Numbers instead of files."),
    ] = None,
    gain: Annotated[float, typer.Option(help="Weight of an accuracy gain.")] = 3.0,
    loss: Annotated[float, typer.Option(help="Weight of an accuracy loss.")] = 5.0,
    grade_with: Annotated[
        str | None,
        typer.Option(metavar="VERIFIER", help="Whose verdicts to take; eval.reward's by default."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Accuracy-efficiency score of candidates against one reference."""
    from grpo_replay.commands.aes import run

    run(
        reference, files or (), candidates or (), gain=gain, loss=loss, verifier=grade_with,
        as_json=as_json,
    )  # fmt: skip


@app.command()
def plan(
    recipe: Annotated[str | None, typer.Argument(help="A recipe to plan for.")] = None,
    from_run: Annotated[
        str | None, typer.Option(metavar="DIR", help="Estimate from a finished run.")
    ] = None,
    mu: Annotated[
        float | None, typer.Option(help="Cost of generating one rollout / of training on it.")
    ] = None,
    rho: Annotated[float | None, typer.Option(help="Sample coupling, 0 to 1.")] = None,
    growth: Annotated[
        float | None, typer.Option(help="a of the staleness law σ = (age/τ)^a.")
    ] = None,
    survival: Annotated[
        float | None, typer.Option(help="Share of rollouts that survive the zero-variance filter.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="W: machines that generate; needs --trainers.")
    ] = None,
    trainers: Annotated[
        int | None, typer.Option(min=1, help="T: machines that train; prints γ for each (W, T).")
    ] = None,
    generated: Annotated[
        int | None, typer.Option(min=1, help="K_gen: rollouts that the W machines generated.")
    ] = None,
    trained: Annotated[
        int | None, typer.Option(min=1, help="K_train: rollouts that the T machines trained on.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write J over (x, y) as PNG or SVG.")
    ] = None,
    curves: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Only write x*, y* and J over μ, a and ρ as PNG or SVG."),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Choose buffer size and replay ratio by paper B's theory."""
    from grpo_replay.commands.plan import run, run_curves, run_machines

    if curves is not None:
        run_curves(curves, {
            "RECIPE": recipe, "--from-run": from_run, "--set": overrides, "--mu": mu, "--rho": rho,
            "--growth": growth, "--survival": survival, "--workers": workers, "--plot": plot,
        })  # fmt: skip
        return
    if any(each is not None for each in (workers, trainers, generated, trained)):
        run_machines(
            recipe, from_run, tuple(overrides or ()), workers=workers, trainers=trainers,
            generated=generated, trained=trained, mu=mu, as_json=as_json,
            ignored={"rho": rho, "growth": growth, "survival": survival, "plot": plot},
        )  # fmt: skip
        return
    run(
        recipe, from_run, tuple(overrides or ()), mu=mu, rho=rho, growth=growth,
        survival=survival, plot=plot, as_json=as_json,
    )  # fmt: skip


def main() -> None:
    """The console script. Exit codes: 0 done, 1 unexpected, 2 usage or recipe, 3 data, 4 stopped
    for safety, 130 interrupted."""
    from grpo_replay.distributed.failures import exit_as_rank

    exit_as_rank(app)


def _report(error: Exception) -> int:
    """Print an error once over all ranks; returns the exit code."""
    from grpo_replay.distributed.failures import is_lost_peer, lost_contact, report_failure
    from grpo_replay.errors import GrpoReplayError

    _log(error)
    if is_lost_peer(error):
        error = lost_contact(error)
    known = isinstance(error, GrpoReplayError)
    code = error.exit_code if known else 1
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
