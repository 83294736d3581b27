"""Prints a plan, or γ by workers and trainers, on the terminal, or converts it to a JSON document.

Paper B's cost table: γ = (1 + W/T)/(1 + μ), per rollout trained on, relative to no buffer, by the
machines that generate (W) and that train (T). There is no correction for dropped groups, because
the paper drops none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_replay.lab.planning.design import Design, Plan, replay_settings
from grpo_replay.recipe import Machines
from grpo_replay.storage.atomic import json_values

THEORY_MEANS = (
    "J is the compute to a given bound on the mean squared gradient; it does not predict accuracy. "
    "In brackets: over single changes of an assumption."
)
THEORY_ASSUMES = (
    "draws are uniform over the buffer (prioritised draws use fewer rollouts more often)",
    "the variance of a sample's gradient depends on its age alone",
    "compute is generation plus training, without weight sync and evaluation",
)


def print_plan(plan: Plan, console: Console) -> None:
    best = plan.recommended
    console.print(f"[bold]The best FIFO buffer {plan.verdict.describe()}[/bold]", soft_wrap=True)
    if plan.current_verdict is not None:
        console.print(f"[bold]This recipe {plan.current_verdict.describe()}[/bold]", soft_wrap=True)
    console.print(f"  {THEORY_MEANS}", soft_wrap=True)
    console.print(
        f"  FIFO: keep rollouts for x = {best.x:.3g} {plan.inputs.unit} and train on each y = "
        f"{best.y:.3g} times"
    )
    if plan.optimum.kind == "interior":
        console.print(f"  optimum of J: x* = {plan.optimum.x:.4g}, y* = {plan.optimum.y:.4g}")
    settings = replay_settings(plan.inputs, best.x, best.y)
    words = " ".join(f"--set replay.{key}={_setting(value)}" for key, value in settings.items())
    console.print(f"  {words}", soft_wrap=True)
    for note in plan.notes:
        console.print(f"  [yellow]![/yellow] {escape(note)}")
    console.print("\n[bold]Designs[/bold]")
    console.print(_design_table(plan))
    console.print("[bold]Assumptions[/bold]")
    assumed = Table.grid(padding=(0, 2))
    assumed.add_column(no_wrap=True)
    assumed.add_column(no_wrap=True)
    for name, value in _assumed(plan).items():
        assumed.add_row(f"  {name}", value, escape(plan.inputs.sources.get(name, "")))
    console.print(assumed)
    for sentence in THEORY_ASSUMES:
        console.print(f"  [dim]· {sentence}[/dim]")


def _assumed(plan: Plan) -> dict[str, str]:
    inputs = plan.inputs
    return {
        "mu": f"{inputs.mu:.3g}",
        "rho": f"{inputs.rho:.3g}",
        "growth": inputs.growth.describe(),
        "survival": f"{inputs.survival:.3g} of rollouts kept",
        "rollouts_per_step": f"R = {inputs.rollouts_per_step:,}",
        "completion_tokens": f"{inputs.completion_tokens:,.0f} a rollout",
        "prompt_tokens": f"{inputs.prompt_tokens:,.0f} a rollout",
    }


def _setting(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.2f}" if isinstance(value, float) else str(value)


_ROWS: tuple[tuple[str, Callable[[Design], str]], ...] = (
    ("staleness horizon x, {unit}", lambda d: f"{d.x:.3g}"),
    ("replay ratio y, uses per rollout", lambda d: f"{d.y:.3g}"),
    ("rollouts stored", lambda d: f"{d.stored_rollouts:,.0f}"),
    ("trained per step, rollouts", lambda d: f"{d.trained_rollouts_per_step:,.0f}"),
    ("generated per step, tokens", lambda d: f"{d.generated_tokens_per_step:,.0f}"),
    ("trained per step, tokens", lambda d: f"{d.trained_tokens_per_step:,.0f}"),
    ("memory of the buffer", lambda d: _bytes(d.memory_bytes)),
    ("compute per trained rollout γ", lambda d: f"{d.gamma:.2f}"),
    ("generators per trainer W/T", lambda d: f"{d.inference_per_trainer:.2f}"),
    ("share of a batch at age 0", lambda d: f"{d.age_zero_share:.0%}"),
    ("J, relative to no replay", lambda d: f"{d.objective:.2f}".replace("inf", "∞")),
)


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def _design_table(plan: Plan) -> Table:
    columns = [("no replay", plan.no_replay), ("best FIFO", plan.recommended)]
    if plan.current:
        columns.insert(1, ("this recipe", plan.current))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name, _ in columns:
        table.add_column(name, justify="right", style="green" if name == "best FIFO" else "")
    for label, cell in _ROWS:
        cells = [cell(design) for _, design in columns]
        table.add_row(label.format(unit=plan.inputs.unit), *cells)
    return table


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values, null for what is not finite. `x` and `y` are those of the optimum of
    a FIFO buffer; `recommended` is that buffer, always finite."""
    has_optimum = plan.optimum.kind != "fresh_only"
    inputs = plan.inputs
    document = {
        "x": plan.optimum.x if has_optimum else None,
        "y": plan.optimum.y if has_optimum else None,
        "kind": plan.optimum.kind,
        "recommended": asdict(plan.recommended),
        "verdict": asdict(plan.verdict),
        "replay_settings": {
            "fifo": replay_settings(inputs, plan.recommended.x, plan.recommended.y)
        },
        "current": asdict(plan.current) if plan.current else None,
        "current_verdict": asdict(plan.current_verdict) if plan.current_verdict else None,
        "no_replay": asdict(plan.no_replay),
        "assumptions": {
            "mu": inputs.mu,
            "mu_per_survivor": inputs.effective_mu,
            "rho": inputs.rho,
            "growth": inputs.growth.describe(),
            "growth_parameters": asdict(inputs.growth),
            "survival": inputs.survival,
            "rollouts_per_step": inputs.rollouts_per_step,
            "completion_tokens": inputs.completion_tokens,
            "prompt_tokens": inputs.prompt_tokens,
            "sources": inputs.sources,
        },
        "notes": list(plan.notes),
    }
    return json_values(document)


def splits(
    mu: float, machines: int, capacity: int | None = None, batch: float | None = None
) -> list[dict[str, Any]]:
    """Every (W, T) with W + T machines, most workers first: in balance the replay ratio y, γ, and
    x, the horizon N·y/B of a FIFO buffer with capacity N, in updates of B rollouts; None for
    others."""
    found = []
    for trainers in range(1, machines):
        each = Machines(workers=machines - trainers, trainers=trainers, mu=mu)
        x = None if capacity is None or batch is None else capacity * each.ratio / batch
        found.append(
            {
                "workers": each.workers, "trainers": trainers, "replay_ratio": each.ratio,
                "gamma": each.gamma, "x": x,
            }
        )  # fmt: skip
    return found


def split_document(
    mu: float, source: str, asked: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The table as JSON values. `x` and `y` are those of the split that was asked for."""
    return {
        "x": asked["x"],
        "y": asked["replay_ratio"],
        "gamma": asked["gamma"],
        "workers": asked["workers"],
        "trainers": asked["trainers"],
        "mu": mu,
        "mu_source": source,
        "formula": "gamma = (1 + W/T)/(1 + mu), y = mu*T/W, x = N*y/B",
        "splits": list(rows),
    }


def print_splits(
    mu: float, source: str, asked: Mapping[str, Any], rows: Sequence[Mapping[str, Any]],
    console: Console,
) -> None:  # fmt: skip
    console.print(
        f"[bold]({asked['workers']}, {asked['trainers']}): each rollout is used y = "
        f"{asked['replay_ratio']:.3g} times, γ = {asked['gamma']:.3f} of the compute without a "
        "buffer[/bold]"
    )
    console.print(f"  μ = {mu:.4g} ({escape(source)}); γ = (1 + W/T)/(1 + μ), y = μ·T/W")
    if asked["gamma"] > 1:
        console.print(
            "  [yellow]![/yellow] γ > 1: with y < 1, more rollouts are generated than trained on, "
            "which costs more than no buffer"
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("W", "T", "W/T", "y", "γ", "compute saved", "x, updates"):
        table.add_column(name, justify="right")
    for each in rows:
        workers, trainers, gamma = each["workers"], each["trainers"], each["gamma"]
        table.add_row(
            str(workers), str(trainers), f"{workers / trainers:.3f}",
            f"{each['replay_ratio']:.3f}", f"{gamma:.3f}", f"{1 - gamma:.1%}",
            "–" if each["x"] is None else f"{each['x']:.3g}",
            style="green" if each == asked else "",
        )  # fmt: skip
    console.print(table)
