"""The options of every command: one class per command, whose docstring is its help and whose fields
are its arguments and options. Imports nothing heavy, so that `--help` and completion answer at
once.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from grpo_replay.shipped_recipes import shipped_recipes, shipped_sweeps

_RECIPES, _SWEEPS = ", ".join(shipped_recipes()), ", ".join(shipped_sweeps())


def argument(help: str, default: Any = None, **kind: Any) -> Any:
    """Returns a field that is an argument of the command line."""
    return field(default=default, metadata={"typer": typer.Argument(help=help, **kind)})


def option(help: str, *names: str, default: Any = None, **kind: Any) -> Any:
    """A field that is an option of the command line; `names` and `kind` are those of Typer."""
    return field(default=default, metadata={"typer": typer.Option(*names, help=help, **kind)})


def flag(help: str, name: str) -> Any:
    """Returns a field that is true if its option is given."""
    return option(help, name, default=False)


def many(help: str, *names: str, **kind: Any) -> Any:
    """Returns a field for an option that may be repeated."""
    return option(help, *names, default=(), **kind)


def recipe_changes() -> Any:
    return many("Override a recipe value. May be repeated.", "--set", metavar="KEY=VALUE")


def code_refused() -> Any:
    return flag("Refuse functions and model code that the recipe names; --set may.", "--no-code")


def json_wanted() -> Any:
    return flag("Print one JSON document to stdout.", "--json")


def as_command(name: str, options: type, run: Callable[[Any], int]) -> Callable[..., None]:
    """Make a function for Typer with these options as parameters. It calls `run` with an object of
    the class `options`, and exits with the code that `run` returns."""

    def command(**values: Any) -> None:
        chosen = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in values.items()
            if value is not None
        }
        raise typer.Exit(run(options(**chosen)))

    hints = get_type_hints(options)
    parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_typer_default(option.default),
            annotation=Annotated[_typer_type(hints[option.name]), option.metadata["typer"]],
        )
        for option in fields(options)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__, command.__doc__ = name, options.__doc__
    return command


def _typer_default(default: Any) -> Any:
    if default is MISSING:
        return inspect.Parameter.empty
    return None if default == () else default


def _typer_type(kind: Any) -> Any:
    """Returns the type of an option for Typer, which calls one that may be repeated a list."""
    if get_origin(kind) is tuple and get_args(kind)[-1] is ...:
        return list[get_args(kind)[0]] | None  # type: ignore[misc]
    return kind


def _complete_recipe(incomplete: str) -> list[str]:
    """Shipped recipes with this prefix. If there are none, the shell completes files."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def _complete_sweep(incomplete: str) -> list[str]:
    return [name for name in shipped_sweeps() if name.startswith(incomplete)]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Train a model as a recipe specifies."""

    recipe: str | None = argument(
        f"Recipe file, or the name of a shipped recipe: {_RECIPES}. With --resume the run's own if "
        "left out.",
        autocompletion=_complete_recipe,
    )
    overrides: tuple[str, ...] = recipe_changes()
    output_dir: str | None = option("Run directory. Default: runs/RECIPE-TIMESTAMP.")
    resume: bool = flag(
        "Continue the run in --output-dir with its own recipe; --set changes it.", "--resume"
    )
    no_code: bool = code_refused()
    num_processes: int | None = option("Ranks per node. Overrides engine.num_processes.", min=1)
    dry_run: bool = flag(
        "Would it start? Memory, disk, tokens. Starts nothing.",
        "--dry-run",
    )
    sample: int | None = option(
        "With --dry-run: sample this many groups of the first step: success, signal, lengths, "
        "seconds a step. Loads the model.",
        min=1,
    )
    gpu_memory_gib: float | None = option("With --dry-run: memory of each GPU, in GiB.", min=1)
    nodes: int | None = option("With --dry-run: number of such nodes.", min=1)
    as_json: bool = json_wanted()


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Evaluate a checkpoint on benchmarks, or compare two evaluations."""

    ckpt: str | None = option(
        "Checkpoint, run directory, model folder or Hugging Face id.", metavar="DIR|HF_ID"
    )
    recipe: str | None = option(
        "Recipe to evaluate under. Default: the run's own.", autocompletion=_complete_recipe
    )
    benchmarks: tuple[str, ...] = many(
        "math500, aime25, aime26, hmmt_feb25 or hmmt_feb26; a group: paper, paper_b, tiny or "
        "tiny_long; or a file or folder as for prompts.source. May be repeated.",
        "--benchmark",
        metavar="NAME",
    )
    k: int | None = option("Completions per problem.", "--k", min=1)
    output: str | None = option("Report file. Default: evaluations/NAME.json.", metavar="FILE")
    backend: str | None = option("Sampler backend.", metavar="hf|vllm|vllm_server")
    data_folder: str | None = option("Folder of benchmark files to read instead of the hub.")
    greedy: bool | None = option("Also evaluate greedily, or not.", "--greedy/--no-greedy")
    num_processes: int | None = option("Ranks on this node.", min=1)
    overrides: tuple[str, ...] = recipe_changes()
    compare: tuple[str, str] | None = option(
        "Compare two reports with a paired test.", metavar="A.json B.json"
    )
    no_code: bool = code_refused()
    as_json: bool = json_wanted()


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """Show the content and the history of a replay buffer."""

    path: str = argument("Run directory, checkpoint or buffer.parquet.", default=MISSING)
    step: int | None = option("Training step to show. Default: the last.", min=0)
    plot: str | None = option("Write a figure: .png, .svg, .pdf or .html.", metavar="FILE")
    panel: str | None = option(
        "With --plot: draw one panel: staleness, uses, last-use, clip, kl or stored.",
        metavar="NAME",
    )
    show: int | None = option("Show one rollout and its history.", metavar="ROLLOUT_ID")
    verify: bool = flag("Read every file of the run, and recompute what can be.", "--verify")
    with_model: bool = flag(
        "With --verify: also recompute behaviour log-probs from the weights of each checkpoint.",
        "--with-model",
    )
    what_if: tuple[str, ...] = many(
        "Simulate another setting of the replay section on the run's rollouts. May be repeated.",
        metavar="KEY=VALUE",
    )
    no_code: bool = code_refused()
    as_json: bool = json_wanted()


@dataclass(frozen=True, slots=True)
class AesOptions:
    """Compute the accuracy-efficiency score of candidates against one reference."""

    reference: str = option(
        "Evaluation or numbers to score against.", default=MISSING, metavar="EVAL.json|ACC,TOKENS"
    )
    files: tuple[str, ...] = argument(
        "Evaluations to score.", default=(), metavar="[CANDIDATE.json]..."
    )
    candidates: tuple[str, ...] = many(
        "Numbers to score instead of files. May be repeated.",
        "--candidate",
        metavar="NAME=ACC,TOKENS",
    )
    gain: float = option("Weight of an accuracy gain.", default=3.0, min=0)
    loss: float = option("Weight of an accuracy loss.", default=5.0, min=0)
    as_json: bool = json_wanted()


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Compare many runs: accuracy, paired differences, costs, and above which μ replay pays."""

    paths: tuple[str, ...] = argument(
        "Runs, sweeps or folders of runs; NAME=PATH names their arm.",
        default=MISSING,
        metavar="[NAME=]PATH...",
    )
    baseline: str | None = option(
        "Arm that the others are compared with. Default: grpo, the only arm without replay, or the "
        "first.",
        metavar="ARM",
    )
    output: str | None = option(
        "Also write the report there: HTML, Markdown, JSON, and figures as PDF and SVG.",
        metavar="DIR",
    )
    reach: tuple[float, ...] = many(
        "Accuracy in % whose cost is reported. May be repeated. Default: 50, 75 and 90 % of the "
        "baseline's gain.",
        metavar="ACC",
        min=1,
        max=100,
    )
    mu: tuple[float, ...] = many(
        "μ of a compute axis, next to the measured one. May be repeated. Paper B's are 5.28 and "
        "6.84.",
        metavar="MU",
        min=0,
        max=1e9,
    )
    benchmark: str = option(
        "Benchmark of the table and curves. Default: the mean, or the first benchmark if they "
        "differ in samples or temperature (paper_b).",
        default="",
        metavar="NAME",
    )
    metric: Literal["avg@k", "pass@k"] = option(
        "Metric of the table and curves.", default="avg@k", metavar="avg@k|pass@k"
    )
    as_json: bool = json_wanted()


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Would replay pay? The buffer size and the replay ratio of paper B's theory."""

    recipe: str | None = argument("Recipe to plan for.", autocompletion=_complete_recipe)
    from_run: str | None = option("Estimate the parameters from a finished run.", metavar="DIR")
    mu: float | None = option(
        "μ: cost of generating one rollout / cost of training on it once.", min=1e-9, max=1e9
    )
    rho: float | None = option("ρ: coupling of the samples, 0 to 1.", min=0, max=1)
    growth: float | None = option("a: exponent of the staleness law σ = (age/τ)^a.", min=0, max=1e3)
    survival: float | None = option(
        "Fraction of rollouts that pass the zero-variance filter.", min=1e-3, max=1
    )
    overrides: tuple[str, ...] = recipe_changes()
    as_json: bool = json_wanted()


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Run a grid of arms and seeds; the same command continues it."""

    sweep: str = argument(
        f"Sweep file, or a shipped sweep: {_SWEEPS}.",
        default=MISSING,
        autocompletion=_complete_sweep,
    )
    jobs: int = option(
        "Cells that run at the same time, each with a share of the cores; GPUs by turns.",
        default=1,
        min=1,
    )
    only: str | None = option("Only this arm.", metavar="ARM")
    output_dir: str | None = option("Folder of the sweep. Default: runs/NAME.")
    print_commands: bool = flag("Print one shell command per unfinished cell.", "--print")
