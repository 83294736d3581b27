"""The command line: options, their help texts, and the function that runs each command.

Heavy libraries are imported when a command runs, so that `--help` and completion answer at once.
Errors become messages and exit codes in `cli.error_boundary`.
"""

from typing import Annotated

import typer

from grpo_replay import __version__
from grpo_replay.cli.error_boundary import CommandGroup
from grpo_replay.shipped_recipes import shipped_recipes, shipped_sweeps

app = typer.Typer(
    name="grpo-replay",
    cls=CommandGroup,
    help="GRPO post-training with rollout replay.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SHIPPED = ", ".join(shipped_recipes())
SHIPPED_SWEEPS = ", ".join(shipped_sweeps())


def _complete_recipe(incomplete: str) -> list[str]:
    """Shipped recipes that begin so. If there are none, the shell completes files."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def _complete_sweep(incomplete: str) -> list[str]:
    """Shipped sweeps that begin so. If there are none, the shell completes files."""
    return [name for name in shipped_sweeps() if name.startswith(incomplete)]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"grpo-replay {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """GRPO post-training with rollout replay."""


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe value. May be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]


@app.command()
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help=f"Recipe file, or the name of a shipped recipe: {SHIPPED}. With --resume the "
            "run's own if left out.",
            autocompletion=_complete_recipe,
        ),
    ] = None,
    overrides: Overrides = None,
    output_dir: Annotated[
        str | None, typer.Option(help="Run directory. Default: runs/RECIPE-TIMESTAMP.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in --output-dir with its own recipe; --set changes it.",
        ),
    ] = False,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node. Overrides engine.num_processes.")
    ] = None,
    hostfile: Annotated[
        str | None, typer.Option(help="DeepSpeed hostfile, for a run on several nodes.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Estimate memory, disk, tokens and hours without starting anything."
        ),
    ] = False,
    gpu_memory_gib: Annotated[
        float | None, typer.Option(min=1, help="With --dry-run: memory of each GPU, in GiB.")
    ] = None,
    from_run: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="With --dry-run: lengths, survival, μ and speed of this run."
        ),
    ] = None,
    generated_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            min=1e-3, help="With --dry-run: completion tokens that a GPU generates in a second."
        ),
    ] = None,
    trained_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            min=1e-3, help="With --dry-run: completion tokens that a GPU trains on in a second."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model as a recipe specifies."""
    from grpo_replay.cli.train_command import run

    code = run(
        recipe, overrides or (), output_dir=output_dir, resume=resume, num_processes=num_processes,
        hostfile=hostfile, dry_run=dry_run, as_json=as_json, gpu_memory_gib=gpu_memory_gib,
        from_run=from_run, generated_tokens_per_second=generated_tokens_per_second,
        trained_tokens_per_second=trained_tokens_per_second,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command("eval")
def evaluate(
    ckpt: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|HF_ID", help="Checkpoint, run directory, model folder or Hugging Face id."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe to evaluate under. Default: the run's own.",
            autocompletion=_complete_recipe,
        ),
    ] = None,
    benchmarks: Annotated[
        list[str] | None,
        typer.Option(
            "--benchmark",
            metavar="NAME",
            help="math500, aime25, aime26, hmmt_feb25 or hmmt_feb26; a group: paper, paper_b, tiny "
            "or tiny_long; or a JSONL or Parquet file. May be repeated.",
        ),
    ] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Completions per problem.")] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Report file. Default: evaluations/NAME.json."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="hf|vllm|vllm_server", help="Sampler backend.")
    ] = None,
    data_folder: Annotated[
        str | None, typer.Option(help="Folder of benchmark files to read instead of the hub.")
    ] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--no-greedy", help="Also evaluate greedily, or not.")
    ] = None,
    grade_with: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERIFIER",
            help="Additional verifier, reported next to eval.reward. May be repeated. With "
            "--compare: the verifier whose verdicts are compared.",
        ),
    ] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="Ranks on this node.")] = None,
    overrides: Overrides = None,
    regrade: Annotated[
        str | None,
        typer.Option(
            metavar="A.json",
            help="Add the verdicts of --grade-with to this report, without sampling.",
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A.json B.json", help="Compare two reports with a paired test."),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Push the evaluated model to this repository of the Hugging Face hub, with a card "
            "of the results. With HF_HUB_OFFLINE=1, only list what would be pushed.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push-to-hub: a public repository, not private.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint on benchmarks, regrade an evaluation, or compare two evaluations."""
    from grpo_replay.cli.eval_command import run
    from grpo_replay.evaluation.evaluation_recipe import EvalOptions

    options = EvalOptions(
        ckpt, recipe=recipe, benchmarks=benchmarks or (), k=k, output=output, backend=backend,
        data_folder=data_folder, greedy=greedy, grade_with=grade_with or (),
        num_processes=num_processes, overrides=overrides or (), regrade=regrade, compare=compare,
        as_json=as_json, push_to_hub=push_to_hub, public=public,
    )  # fmt: skip
    raise typer.Exit(run(options))


@app.command("inspect-buffer")
def inspect_buffer(
    path: Annotated[str, typer.Argument(help="Run directory, checkpoint or buffer.parquet.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Training step to show. Default: the last.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a figure: .png, .svg, .pdf or .html.")
    ] = None,
    show: Annotated[
        int | None, typer.Option(metavar="ROLLOUT_ID", help="Show one rollout and its history.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="EXPR", help="List the matching rollouts: 'reward > 0 and age_steps > 3'."
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="With --where: the number of rollouts to list.")
    ] = 20,
    text: Annotated[
        bool, typer.Option("--text", help="With --where: list the completions as well.")
    ] = False,
    export: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Export the rollouts to .parquet, .jsonl or a folder."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify the run by recomputing it from its files.")
    ] = False,
    with_model: Annotated[
        bool,
        typer.Option(
            "--with-model",
            help="With --verify: also recompute log-probs, outcomes and the loss of a sample of "
            "rows from the weights of each checkpoint.",
        ),
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Simulate another setting of the replay section on the run's rollouts. May be "
            "repeated.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the content and the history of a replay buffer."""
    from grpo_replay.cli.inspect_command import run

    code = run(
        path, step, as_json=as_json, plot=plot, show=show, where=where, limit=limit, text=text,
        export=export, verify=verify, changes=what_if or (), with_model=with_model,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def aes(
    reference: Annotated[
        str,
        typer.Option(
            metavar="EVAL.json|ACC,TOKENS", help="Evaluation or numbers to score against."
        ),
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CANDIDATE.json]...", help="Evaluations to score."),
    ] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            metavar="NAME=ACC,TOKENS",
            help="Numbers to score instead of files. May be repeated.",
        ),
    ] = None,
    gain: Annotated[float, typer.Option(help="Weight of an accuracy gain.")] = 3.0,
    loss: Annotated[float, typer.Option(help="Weight of an accuracy loss.")] = 5.0,
    grade_with: Annotated[
        str | None,
        typer.Option(
            metavar="VERIFIER", help="Verifier whose verdicts are used. Default: eval.reward."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute the accuracy-efficiency score of candidates against one reference."""
    from grpo_replay.cli.aes_command import run

    run(
        reference, files or (), candidates or (), gain=gain, loss=loss, verifier=grade_with,
        as_json=as_json,
    )  # fmt: skip


@app.command()
def report(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Runs, sweeps, folders of runs, or evaluation files."
        ),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="ARM",
            help="Arm that the others are compared with. Default: grpo, the only arm without "
            "replay, or the first.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Also write the report there: HTML, Markdown, LaTeX, CSV, Parquet, PNG and SVG.",
        ),
    ] = None,
    reach: Annotated[
        list[float] | None,
        typer.Option(
            metavar="ACC",
            help="Accuracy in % whose cost is reported. May be repeated. Default: 50, 75 and 90 % "
            "of the baseline's gain.",
        ),
    ] = None,
    mu: Annotated[
        list[float] | None,
        typer.Option(
            metavar="MU",
            help="μ of the compute axes, next to the measured one. May be repeated. Default: 5.28 "
            "and 6.84 (paper B).",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare many runs: accuracy, paired differences, AES, lengths, clipping and costs."""
    from grpo_replay.cli.report_command import run

    run(paths, baseline, output, reach or (), mu or (), as_json=as_json)


@app.command()
def plan(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe to plan for.", autocompletion=_complete_recipe)
    ] = None,
    from_run: Annotated[
        str | None, typer.Option(metavar="DIR", help="Estimate the parameters from a finished run.")
    ] = None,
    mu: Annotated[
        float | None,
        typer.Option(help="μ: cost of generating one rollout / cost of training on it once."),
    ] = None,
    rho: Annotated[float | None, typer.Option(help="ρ: coupling of the samples, 0 to 1.")] = None,
    growth: Annotated[
        float | None, typer.Option(help="a: exponent of the staleness law σ = (age/τ)^a.")
    ] = None,
    survival: Annotated[
        float | None, typer.Option(help="Fraction of rollouts that pass the zero-variance filter.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="W: machines that generate. Requires --trainers.")
    ] = None,
    trainers: Annotated[
        int | None,
        typer.Option(min=1, help="T: machines that train. Prints γ for every split of W + T."),
    ] = None,
    generated: Annotated[
        int | None, typer.Option(min=1, help="K_gen: rollouts generated by the W machines.")
    ] = None,
    trained: Annotated[
        int | None, typer.Option(min=1, help="K_train: rollouts trained on by the T machines.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write J over (x, y) as PNG or SVG.")
    ] = None,
    curves: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write only x*, y* and J over μ, a and ρ as PNG or SVG."),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Choose the buffer size and the replay ratio from paper B's theory."""
    from grpo_replay.cli.plan_command import PlanOptions, run_command

    run_command(
        PlanOptions(
            recipe, from_run, overrides=tuple(overrides or ()), mu=mu, rho=rho, growth=growth,
            survival=survival, workers=workers, trainers=trainers, generated=generated,
            trained=trained, plot=plot, curves=curves, as_json=as_json,
        )
    )  # fmt: skip


@app.command()
def sweep(
    sweep: Annotated[
        str,
        typer.Argument(
            help=f"Sweep file, or a shipped sweep: {SHIPPED_SWEEPS}.",
            autocompletion=_complete_sweep,
        ),
    ],
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Cells that run at the same time. Default: 1; with slurm, all."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this arm: ARM, RECIPE or RECIPE/ARM."),
    ] = None,
    output_dir: Annotated[
        str | None, typer.Option(help="Folder of the sweep. Default: runs/NAME.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Estimate cells, tokens and memory without starting any."),
    ] = False,
    print_commands: Annotated[
        bool, typer.Option("--print", help="Print one shell command per unfinished cell.")
    ] = False,
    executor: Annotated[
        str, typer.Option(metavar="local|submitit-local|slurm", help="What runs the cells.")
    ] = "local",
    executor_options: Annotated[
        list[str] | None,
        typer.Option(
            "--executor-option",
            metavar="KEY=VALUE",
            help="Parameter of submitit's executor, such as time=600. May be repeated.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a grid of arms and seeds; the same command continues it."""
    from grpo_replay.cli.sweep_command import SweepOptions, run

    options = SweepOptions(
        sweep, jobs=jobs, only=only, output_dir=output_dir, dry_run=dry_run,
        print_commands=print_commands, as_json=as_json, executor=executor,
        executor_options=tuple(executor_options or ()),
    )  # fmt: skip
    raise typer.Exit(run(options))


def main() -> None:
    """The console script. Exit codes: 0 done, 1 unexpected, 2 usage or recipe, 3 data, 4 stopped
    for safety, 130 interrupted."""
    from grpo_replay.distributed.failures import exit_as_rank

    exit_as_rank(app)


if __name__ == "__main__":
    main()
