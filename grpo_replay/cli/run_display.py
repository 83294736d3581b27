"""A run in the terminal: a progress line, its evaluations and samples, and tables at the end."""

import shlex
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from grpo_replay.recipe import Recipe
from grpo_replay.stop import StopToken
from grpo_replay.terminal.console import GuardedStream, guarded_stderr, open_console
from grpo_replay.terminal.quiet import without_secrets
from grpo_replay.terminal.text_table import TextTable
from grpo_replay.training import Observer
from grpo_replay.training.shadow import describe_replay
from grpo_replay.types import HIGH_CLIP_FRACTION

if TYPE_CHECKING:
    from grpo_replay.evaluation.evaluation_report import EvaluationReport
    from grpo_replay.storage.checkpoint import RunState
    from grpo_replay.training import Notice
    from grpo_replay.training.run import RunResult

PLAIN_LINES = 20
"""Number of progress lines of a run when stderr is not a terminal."""

REWARD_STEPS = 20
"""Number of steps in the displayed mean reward: a single step's reward is noisy."""


class RunDisplay(Observer):
    """Prints progress to stderr and the result to stdout."""

    def __init__(self, console: Console) -> None:
        """Makes the progress line; as a context, the display shows it if stderr is a terminal."""
        self._console = console
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._line = ""
        self._steps = 0
        self._rewards: deque[float] = deque(maxlen=REWARD_STEPS)
        self._held_out = ""
        self._tokens_per_second: float | None = None

    def __enter__(self) -> "RunDisplay":
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._screen, console=self._console, transient=True)
            self._live.start()
        return self

    def _screen(self) -> Group:
        """The bar above the last step: next to each other they need more than 80 columns."""
        return Group(self._progress, Text(self._line))

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_status(self, text: str) -> None:
        if self._live is None:
            self._console.print(text, soft_wrap=True)
        else:
            self._line = text

    def on_start(
        self, recipe: Recipe, run_dir: Path, state: "RunState", notices: "Sequence[Notice]"
    ) -> None:
        """Prints what starts, and the notices of the opening; starts the progress line."""
        self._steps = recipe.run.steps
        self._console.print(describe_run(recipe, run_dir, state.step), soft_wrap=True)
        for notice in notices:
            self.on_notice(notice.text)
        self._line = ""
        self._progress.update(
            self._task, description="step", total=self._steps, completed=state.step
        )

    def on_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._console.print(samples_table(step, rows))

    def on_notice(self, text: str) -> None:
        self._console.print(f"note: {without_secrets(text)}", soft_wrap=True)

    def on_evaluation(self, step: int, report: "EvaluationReport") -> None:
        """Prints the mean accuracy, which the progress line shows from now on."""
        self._line = ""
        mean = report.accuracies()["mean"]
        self._held_out = f"held-out {100 * mean:.1f} % after step {step}"
        greedy = report.greedy_accuracies()
        greedy_part = f", greedy {100 * greedy['mean']:.1f} %" if greedy else ""
        from grpo_replay.evaluation.evaluation_tables import interval, percent

        bounds = interval(report.sampled.mean.avg_at_k_interval, percent)
        self._console.print(
            f"step {step}: held-out accuracy {100 * mean:.1f} % {bounds}{greedy_part}",
            soft_wrap=True,
        )
        if missing := report.missing_verdicts():
            self.on_notice(missing)

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Updates the progress line; off a terminal prints about `PLAIN_LINES` lines per run."""
        speed = metrics["cost/generated_tokens"] / max(metrics["step_time"], 1e-9)
        average = self._tokens_per_second
        self._tokens_per_second = speed if average is None else 0.9 * average + 0.1 * speed
        self._line = line = self._describe_step(metrics)
        self._progress.update(self._task, completed=metrics["step"])
        step = metrics["step"]
        due = step in (1, self._steps) or step % max(1, self._steps // PLAIN_LINES) == 0
        if self._live is None and due:
            self._console.print(f"step {step}/{self._steps}  {line}", soft_wrap=True)

    def _describe_step(self, metrics: Mapping[str, Any]) -> str:
        """Describes a step in a line: mean reward of the last steps, missing rewards, held-out
        accuracy, fresh and replayed rollouts, age, speed; what is unknown is left out."""
        reward = metrics["reward"]  # None in an asynchronous step in which nothing arrived
        self._rewards.extend([] if reward is None else [reward])
        parts = []
        if count := len(self._rewards):
            over = f" over {count} steps" if count > 1 else ""
            parts.append(f"reward {sum(self._rewards) / count:+.2f}{over}")
        if metrics["reward/missing_fraction"]:
            parts.append(f"no reward {100 * metrics['reward/missing_fraction']:.1f} %")
        if self._held_out:
            parts.append(self._held_out)
        fresh, replayed = metrics["fresh/rollouts"], metrics["replay/rollouts"]
        has_rows = reward is None or fresh or replayed
        reason = "" if has_rows else " (no group with signal)"
        verb = "would replay" if "shadow/rare_success_fraction" in metrics else "replayed"
        parts.append(f"fresh {fresh} {verb} {replayed}{reason}")
        if metrics["replay/age_mean"] is not None:
            parts.append(f"age {metrics['replay/age_mean']:.1f}")
        if "async/trainer_idle" in metrics:
            parts += asynchronous_parts(metrics)
        parts.append(f"{self._tokens_per_second:,.0f} tok/s")
        return " · ".join(parts)

    def conclude(self, result: "RunResult") -> None:
        """Prints the result to stdout, or that the run was interrupted to stderr."""
        if result.interrupted:
            self._console.print(describe_stop(result), soft_wrap=True)
            return
        assert result.summary is not None
        print_result(
            result.run_dir,
            result.summary,
            # A failed print of the summary is no failure of the run, which is finished and on disk.
            open_console(file=cast(TextIO, GuardedStream(sys.stdout, may_fail=True))),
        )


def print_result(run_dir: Path, summary: Mapping[str, Any], out: Console) -> None:
    """Print the accuracies and the totals of a run."""
    if summary["base"] or summary["final"]:
        result_table(summary).print(out)
    out.print(describe_end(run_dir, summary), soft_wrap=True)


def describe_stop(result: "RunResult") -> str:
    """Returns the state that an interrupted run saved, and the command that continues it."""
    saved = f"after step {result.step}, with a checkpoint"
    if result.step == 0:
        saved = "before the end of step 1: there is nothing to save yet"
    resume = f"grpo-replay train --resume --output-dir {shlex.quote(str(result.run_dir))}"
    return f"interrupted {saved}. Continue with: {resume}"


def samples_table(step: int, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Make a table of prompts, completions and rewards; long texts are cut in the middle."""
    header = ("rollout", "reward", "verdict", "prompt", "completion")
    table = Table(*header, title=f"samples of step {step}", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(
            str(row["rollout_id"]),
            "none" if row["reward"] is None else f"{row['reward']:+.2f}",
            row["verdict"],
            Text(shortened(row["prompt"])),
            Text(shortened(row["completion"])),
        )
    return table


SHOWN_CHARACTERS = 300


def shortened(text: str) -> str:
    """Returns the text as a line without control characters; beyond `SHOWN_CHARACTERS` cut."""
    line = "".join(c if c.isprintable() else " " for c in text)
    half = SHOWN_CHARACTERS // 2
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:half]} … {line[-half:]}"


def asynchronous_parts(metrics: Mapping[str, Any]) -> list[str]:
    """Describe idle shares of trainer and sampler, and the mean age of the trained rollouts."""
    idle, age = metrics["async/sampler_idle"], metrics["async/age_mean"]
    return [
        f"trainer idle {100 * metrics['async/trainer_idle']:.0f} %",
        "sampler idle -" if idle is None else f"sampler idle {100 * idle:.0f} %",
        "trained age -" if age is None else f"trained age {age:.1f}",
    ]


def describe_run(recipe: Recipe, run_dir: Path, step: int) -> str:
    """Describe, in two lines, the run that is about to start or resume after `step`."""
    replay = recipe.replay
    described = "no replay"
    if recipe.replays:
        limit = "none" if replay.max_age_steps is None else f"{replay.max_age_steps} steps"
        described = (
            f"{replay.unit} replay by {replay.priority}, {replay.composition}, "
            f"ratio {replay.ratio:g}, age limit {limit}"
            + (", in shadow: trains as grpo" if replay.shadow else "")
        )
    start = f"resuming after step {step}" if step else f"{recipe.run.steps} steps"
    return (
        f"{recipe.name}: {recipe.model.path}, {start} of {recipe.sampling.prompts_per_step} × "
        f"{recipe.sampling.group_size} rollouts, preset {replay.preset} ({described})\n"
        f"run directory: {run_dir}"
    )


def result_table(summary: Mapping[str, Any]) -> TextTable:
    """Make a table of the accuracies of base and trained model, with standard errors; without their
    difference if the two evaluations had other settings."""
    is_comparable = summary["comparable"] is not False
    caveat = "" if is_comparable else " (evaluated under other settings before and after)"
    title = f"held-out accuracy, % ± standard error{caveat}"
    base, final = summary["base"] or {}, summary["final"] or {}
    rows = []
    for name in final or base:
        has_change = is_comparable and base and final
        change = f"{100 * (final[name] - base[name]):+.1f}" if has_change else ""
        cells = (
            _with_error(base.get(name), (summary["base_stderr"] or {}).get(name)),
            _with_error(final.get(name), (summary["final_stderr"] or {}).get(name)),
        )
        rows.append((name, *cells, change))
    return TextTable(("benchmark", "base", "trained", "change"), rows[:-1], title, totals=rows[-1:])


def _with_error(value: float | None, error: float | None) -> str:
    """Returns an accuracy in %, with its standard error. An error of 0 is left out: an accuracy is
    not exact because, for example, all problems were solved."""
    if value is None:
        return ""
    return f"{100 * value:.1f}" + (f" ± {100 * error:.1f}" if error else "")


def describe_end(run_dir: Path, summary: Mapping[str, Any]) -> str:
    """Describe the totals of a run, what replay cost, and the commands to continue with."""
    missing = summary["means"]["reward/missing_fraction"]
    clipped = summary["means"]["replay/clip_fraction"] or 0.0
    file = "" if summary["final"] else " --benchmark NAME_OR_FILE"
    run, plots = (shlex.quote(str(run_dir / part)) for part in ("", "tensorboard"))
    return (
        f"{summary['steps']} steps in {summary['wall_seconds']:.0f} s; "
        f"{summary['generated_tokens']:,} tokens generated, {summary['trained_tokens']:,} trained, "
        f"{summary['replayed_rollouts']:,} rollouts replayed"
        + (f"; the reward of {100 * missing:.1f} % of the rollouts is missing" if missing else "")
        + ("" if summary["trained_tokens"] else "\nnothing was trained: the weights are unchanged")
        + "".join(f"\n{line}" for line in describe_replay(summary["replay"]))
        + (f"\n{_clipping_advice(clipped)}" if clipped > HIGH_CLIP_FRACTION else "")
        + "\n\n"
        "next:\n"
        f"  grpo-replay inspect-buffer {run}\n"
        f"  grpo-replay eval --ckpt {run}{file}\n"
        f"  grpo-replay plan --from-run {run}\n"
        + (f"  tensorboard --logdir {plots}" if (run_dir / "tensorboard").is_dir() else "")
    ).rstrip()


def _clipping_advice(clipped: float) -> str:
    """Returns advice for a run whose replayed tokens are often clipped: the bias of replay is
    O(S·η) at staleness S and learning rate η (arXiv 2607.01083)."""
    return (
        f"{100 * clipped:.1f} % of the replayed tokens were clipped: the bias of replay grows with "
        "staleness times rate; lower optimizer.learning_rate or replay.max_age_steps "
        "(inspect-buffer has the share by age)"
    )


@contextmanager
def open_display(is_main: bool, stop: StopToken) -> Iterator[Observer]:
    """Open the display of this rank, which shows nothing off rank 0. If the reader of its output
    closes it, a stop is requested."""
    if not is_main:
        yield Observer()
        return
    with guarded_stderr() as stream:
        stream.on_lost = lambda: stop.request("its closed output")
        with RunDisplay(open_console(file=cast(TextIO, stream))) as display:
            yield display
