"""Paper B's cost table: γ by the number of machines that generate (W) and that train (T).

γ = (1 + W/T)/(1 + μ), per rollout trained on, relative to no buffer. There is no correction for
dropped groups, because the paper drops none.
"""

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_replay.lab.planning.theory import balanced_replay_ratio
from grpo_replay.replay.relative_cost import relative_compute


@dataclass(frozen=True, slots=True)
class Split:
    """One division of the machines. `x` is the horizon N·y/B of a FIFO buffer with capacity N, in
    updates of B rollouts; None for other buffers."""

    workers: int
    trainers: int
    replay_ratio: float  # y, in balance
    gamma: float
    x: float | None


def split_machines(
    mu: float, workers: int, trainers: int, capacity: int | None = None, batch: float | None = None
) -> Split:
    """Replay ratio, γ and horizon of (W, T)."""
    y = balanced_replay_ratio(mu, workers, trainers)
    x = None if capacity is None or batch is None else capacity * y / batch
    return Split(workers, trainers, y, relative_compute(y, mu), x)


def all_splits(
    mu: float, machines: int, capacity: int | None = None, batch: float | None = None
) -> list[Split]:
    """Every (W, T) with W + T machines, most workers first."""
    return [
        split_machines(mu, machines - trainers, trainers, capacity, batch)
        for trainers in range(1, machines)
    ]


def split_document(mu: float, source: str, requested: Split, splits: list[Split]) -> dict[str, Any]:
    """The table as JSON values. `x` and `y` are those of the requested split."""
    return {
        "x": requested.x,
        "y": requested.replay_ratio,
        "gamma": requested.gamma,
        "workers": requested.workers,
        "trainers": requested.trainers,
        "mu": mu,
        "mu_source": source,
        "formula": "gamma = (1 + W/T)/(1 + mu), y = mu*T/W, x = N*y/B",
        "splits": [asdict(split) for split in splits],
    }


def print_splits(
    mu: float, source: str, requested: Split, splits: list[Split], console: Console
) -> None:
    console.print(
        f"[bold]({requested.workers}, {requested.trainers}): each rollout is used y = "
        f"{requested.replay_ratio:.3g} times, γ = {requested.gamma:.3f} of the compute without a "
        "buffer[/bold]"
    )
    console.print(f"  μ = {mu:.4g} ({escape(source)}); γ = (1 + W/T)/(1 + μ), y = μ·T/W")
    if requested.gamma > 1:
        console.print(
            "  [yellow]![/yellow] γ > 1: with y < 1, more rollouts are generated than trained on, "
            "which costs more than no buffer"
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("W", "T", "W/T", "y", "γ", "compute saved", "x, updates"):
        table.add_column(name, justify="right")
    for each in splits:
        table.add_row(
            str(each.workers), str(each.trainers), f"{each.workers / each.trainers:.3f}",
            f"{each.replay_ratio:.3f}", f"{each.gamma:.3f}", f"{1 - each.gamma:.1%}",
            "–" if each.x is None else f"{each.x:.3g}",
            style="green" if each == requested else "",
        )  # fmt: skip
    console.print(table)
