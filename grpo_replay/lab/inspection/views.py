"""The other outputs of inspect-buffer: --what-if, --show and --verify."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.inspection.rebuild import REPEATS, WhatIf, stored_after
from grpo_replay.lab.inspection.rollout_columns import OUTCOMES
from grpo_replay.lab.inspection.source import Source
from grpo_replay.lab.inspection.token_text import open_decoder
from grpo_replay.storage.rollout_log import read_draw_table, read_rollout_table
from grpo_replay.terminal.console import printable
from grpo_replay.terminal.text_table import TextTable

_MEMBER = ("rollout_id", "reward", "advantage", "verdict")


@dataclass(frozen=True, slots=True)
class Life:
    """Everything that the files record about one rollout."""

    rollout: Mapping[str, Any]  # its row; token ids are lists
    prompt_text: str | None  # with special tokens; None without a tokenizer
    written_text: str | None  # the completion, likewise
    no_text: str  # why there is no tokenizer; else empty
    group: tuple[Mapping[str, Any], ...]  # all members, including this rollout
    uses: tuple[Mapping[str, Any], ...]  # step, age, probability of a draw (None: fresh), outcome
    fate: str  # one sentence


def read_life(source: Source, rollout_id: int) -> Life:
    """Read a rollout's life up to the inspected step. Raises SnapshotError if it is not logged."""
    step, row, group = _find(source, rollout_id)
    uses = _draws(source, rollout_id)
    decoder = open_decoder(source.path)
    # With pool and FIFO, the use of a step that drew the rollout is in both logs.
    if row["tokens"] is not None and all(use["step"] != step for use in uses):
        fresh = {"step": step, "age_steps": step - row["birth_step"], "probability": None}
        uses.insert(0, fresh | {name: row[name] for name in OUTCOMES})
    return Life(
        rollout={name: value for name, value in row.items() if name not in OUTCOMES},
        prompt_text=decoder.text(row["prompt_token_ids"]),
        written_text=decoder.text(row["completion_token_ids"]),
        no_text=decoder.reason,
        group=tuple({name: member[name] for name in _MEMBER} for member in group),
        uses=tuple(uses),
        fate=_fate(source, row),
    )


def _find(source: Source, rollout_id: int) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Finds the step that logged the rollout, its row, and the rows of its group."""
    for step, path in source.rollout_files:
        ids = read_rollout_table(path, ("rollout_id",))["rollout_id"].to_pylist()
        if rollout_id in ids:
            table = read_rollout_table(path)
            group = table["group_id"][ids.index(rollout_id)]
            members = table.filter(pc.equal(table["group_id"], group)).to_pylist()
            row = next(member for member in members if member["rollout_id"] == rollout_id)
            return step, row, members
    raise SnapshotError(
        f"{source.path}: no rollout {rollout_id} in rollouts/ up to step {source.step}; ids start "
        "at 0 and ascend in time"
    )


def _draws(source: Source, rollout_id: int) -> list[Mapping[str, Any]]:
    """Reads the draws of a rollout from all files of draws, in order of time."""
    names = ["step", "age_steps", "probability", *OUTCOMES]
    uses: list[Mapping[str, Any]] = []
    for _, path in source.draw_files:
        table = read_draw_table(path)
        is_own = pc.equal(table["rollout_id"], rollout_id)
        uses += table.filter(is_own).select(names).to_pylist()
    return uses


def _fate(source: Source, row: Mapping[str, Any]) -> str:
    """Says in a clause whether a rollout is stored after the inspected step, or why not."""
    recipe = source.recipe
    assert recipe is not None, "a run"
    if row["reward"] is None:
        return "never stored: its reward is missing"
    if not row["kept"] and not row["group_reward_std"]:
        return "never stored: the rewards of its group do not differ, so there is no signal"
    if not row["kept"]:
        return "never stored: truncated, too old, or sampled while the weights changed"
    if not recipe.replays:
        return "never stored: this run does not replay"
    stored = stored_after(source, recipe.replay, recipe.sampling.group_size)
    if row["rollout_id"] in stored.rollout_id:
        return f"still stored after step {source.step}"
    limit, birth = recipe.replay.max_age_steps, row["birth_step"]
    if limit is not None and source.step - birth >= limit:
        return f"evicted by max_age_steps {limit} at the end of step {birth + limit}, if not before"
    return "evicted by the capacity"


_STATISTICS: tuple[tuple[str, str, str], ...] = (
    ("replayed_rollouts", "rollouts replayed", ",.0f"),
    ("age_mean", "age at use in steps, mean", ".2f"),
    ("age_p95", "age in steps, 95th percentile", ".1f"),
    ("abs_advantage_mean", "mean |A| of replayed rollouts", ".3f"),
    ("positive_share", "replayed with A > 0", ".1%"),
    ("never_drawn_share", "kept, never drawn from the buffer", ".1%"),
    ("ess_mean", "effective sample size", ",.1f"),
    ("stored_mean", "rollouts stored, mean", ",.1f"),
    ("trained_tokens_per_generated", "tokens trained per generated", ".3f"),
)


def print_what_if(result: WhatIf, console: Console) -> None:
    """Print the changes, and a table of statistics: as logged, same and changed, simulated."""
    changes = ", ".join(f"{key} {old} → {new}" for key, (old, new) in result.changes.items())
    console.print(f"[bold]What if: {escape(changes) or 'nothing changed'}[/bold]")
    header = ("", "as logged", "same settings,\nsimulated", "changed,\nsimulated")
    exact = dict.fromkeys(result.logged, 0.0)
    columns = (
        (result.logged, exact),
        (result.same, result.same_error),
        (result.changed, result.changed_error),
    )
    rows = [
        (label, *(_cell(values[name], errors[name], format_spec) for values, errors in columns))
        for name, label, format_spec in _STATISTICS
    ]
    TextTable(header, rows).print(console)
    console.print(
        f"[dim]± is the standard deviation over {REPEATS} simulations with the rollouts of the "
        "log. A real run with these settings would train another policy and sample other "
        "rollouts: clip fraction, KL and accuracy need one.[/dim]"
    )


def _cell(value: float, error: float, format_spec: str) -> str:
    if math.isnan(value):
        return "–"
    # Deterministic statistics differ between simulations by rounding only.
    if error <= 1e-9 * abs(value):
        return format(value, format_spec)
    return f"{value:{format_spec}} ± {error:{format_spec}}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    text = "–" if value is None else printable(str(value))
    return text if len(text) <= 32 else f"{text[:31]}…"


_USE_COLUMNS = ("step", "age_steps", "probability", "clip_fraction", "log_ratio_mean", "approx_kl")


def print_life(life: Life, console: Console) -> None:
    """Print a rollout: numbers, texts, its group, its uses, and whether it is still stored."""
    row = life.rollout
    facts = [
        (name, _short(value))
        for name, value in row.items()
        if value is not None and not isinstance(value, list) and name != "completion_text"
    ]
    facts.append(("completion tokens", f"{len(row['completion_token_ids']):,}"))
    TextTable((), facts).print(console)
    prompt = life.prompt_text or f"{life.no_text}; token ids {row['prompt_token_ids']}"
    console.print(f"\n[bold]prompt[/bold]\n{escape(prompt)}")
    graded, written = row["completion_text"], life.written_text
    console.print(f"\n[bold]completion, as the reward saw it[/bold]\n{escape(graded)}\n")
    if written not in (None, graded):
        console.print(f"[bold]completion, as it was written[/bold]\n{escape(str(written))}\n")
    members = [[_short(value) for value in member.values()] for member in life.group]
    TextTable(_MEMBER, members, "group").print(console)
    uses = [[_short(use[name]) for name in _USE_COLUMNS] for use in life.uses]
    header = ("step", "age", "probability", "clipped", "log-ratio", "KL, nats")
    TextTable(header, uses, "uses; without a probability, as fresh").print(console)
    console.print(f"→ {life.fate}")


def print_verification(report: Any, console: Console) -> None:
    """Print one line per check of a `VerifyReport`, and the total."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "check", "compared", ""):
        table.add_column(name, justify="right" if name == "compared" else "left")
    for check in report.checks:
        mark = "[green]✓[/green]" if check.passed else "[red]✗[/red]"
        table.add_row(mark, check.name, f"{check.checked:,}", escape(check.detail))
    console.print(table)
    failed = sum(not check.passed for check in report.checks)
    if failed:
        console.print(f"[red]{failed} of {len(report.checks)} checks failed[/red]")
    else:
        console.print(f"[green]{report.steps} steps match the algorithm of the recipe[/green]")
