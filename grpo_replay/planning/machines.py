"""Paper B's cost table: γ by how many machines generate (W) and how many train (T).

γ = (1 + W/T)/(1 + μ), per rollout trained on, relative to no buffer. No survivors are corrected
for: the paper drops no groups.
"""

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from grpo_replay.planning.theory import balanced_replay_ratio, relative_compute


@dataclass(frozen=True, slots=True)
class Split:
    """One way to share the machines out. `x` is the horizon of `capacity` at this y, in updates of
    `batch` rollouts: N·y/B; None without a buffer to speak of."""

    workers: int
    trainers: int
    replay_ratio: float  # y, in balance
    gamma: float
    x: float | None


def split_machines(
    mu: float, workers: int, trainers: int, capacity: int | None = None, batch: float | None = None
) -> Split:
    """(W, T) as replay ratio, γ and horizon."""
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


def split_document(mu: float, source: str, asked: Split, splits: list[Split]) -> dict[str, Any]:
    """The table as JSON values; `x` and `y` are those of the split asked for."""
    return {
        "x": asked.x,
        "y": asked.replay_ratio,
        "gamma": asked.gamma,
        "workers": asked.workers,
        "trainers": asked.trainers,
        "mu": mu,
        "mu_source": source,
        "formula": "gamma = (1 + W/T)/(1 + mu), y = mu*T/W, x = N*y/B",
        "splits": [asdict(split) for split in splits],
    }


def print_splits(
    mu: float, source: str, asked: Split, splits: list[Split], console: Console
) -> None:
    console.print(
        f"[bold]({asked.workers}, {asked.trainers}): each rollout is used y = "
        f"{asked.replay_ratio:.3g} times, γ = {asked.gamma:.3f} of the compute without a buffer"
        "[/bold]"
    )
    console.print(f"  μ = {mu:.4g} ({source}); γ = (1 + W/T)/(1 + μ), y = μ·T/W")
    if asked.gamma > 1:
        console.print(
            "  [yellow]![/yellow] γ > 1: y < 1, so more is generated than trained on; without a "
            "buffer the trainers would wait for less"
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("W", "T", "W/T", "y", "γ", "compute saved", "x, updates"):
        table.add_column(name, justify="right")
    for each in splits:
        table.add_row(
            str(each.workers), str(each.trainers), f"{each.workers / each.trainers:.3f}",
            f"{each.replay_ratio:.3f}", f"{each.gamma:.3f}", f"{1 - each.gamma:.1%}",
            "–" if each.x is None else f"{each.x:.3g}",
            style="green" if each == asked else "",
        )  # fmt: skip
    console.print(table)
