"""The other outputs of inspect-buffer: --what-if, --show and --verify."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.inspection.compute import find_gaps
from grpo_replay.lab.inspection.rebuild import Statistics, WhatIf, stored_after
from grpo_replay.lab.inspection.rollout_columns import (
    OUTCOME_COLUMNS,
    Kind,
    iter_columns,
    schema_of,
)
from grpo_replay.lab.inspection.source import Source
from grpo_replay.terminal.console import plain_table, print_table, printable


@dataclass(frozen=True, slots=True)
class Life:
    """Everything the files record about one rollout."""

    rollout: Mapping[str, Any]  # its row; token ids are lists
    prompt_text: str | None  # None if no checkpoint has a tokenizer
    group: tuple[Mapping[str, Any], ...]  # all members, including this rollout
    uses: tuple[Mapping[str, Any], ...]  # step, age, probability of a draw (None: fresh), outcome
    fate: str  # one sentence


def read_life(source: Source, rollout_id: int) -> Life:
    """The life of one rollout up to the inspected step.

    Raises SnapshotError if the rollout is in neither the rollout log nor the snapshot.
    """
    row, group, step = _find(source, rollout_id)
    uses = _draws(source, rollout_id)
    # With pool and FIFO, the use of a step that drew the rollout is in both logs.
    if step is not None and row["tokens"] is not None and all(use["step"] != step for use in uses):
        fresh = {"step": step, "age_steps": step - row["birth_step"], "probability": None}
        uses.insert(0, fresh | {name: row[name] for name in OUTCOME_COLUMNS})
    return Life(
        rollout={name: value for name, value in row.items() if name not in OUTCOME_COLUMNS},
        prompt_text=_prompt_text(source, row["prompt_token_ids"]),
        group=tuple({name: member[name] for name in _MEMBER} for member in group),
        uses=tuple(uses),
        fate=_fate(source, row, step),
    )


_MEMBER = ("rollout_id", "reward", "advantage", "verdict")


def _find(source: Source, rollout_id: int) -> tuple[dict, list[dict], int | None]:
    """The row of the rollout and the rows of its group, from the log or else the snapshot; and the
    step whose log has it."""
    files: list[tuple[Kind, Path, int | None]]
    files = [("rollouts", path, step) for step, path in source.rollout_files]
    if not files and source.snapshot is not None:
        files = [("buffer", source.snapshot, None)]
    for kind, path, step in files:
        for batch in iter_columns(path, kind, ("rollout_id", "group_id")):
            found = np.flatnonzero(batch.column(0).to_numpy() == rollout_id)
            if found.size:
                members = _members(kind, path, batch.column(1)[int(found[0])])
                row = next(each for each in members if each["rollout_id"] == rollout_id)
                return row, members, step
    raise SnapshotError(
        f"{source.path}: no rollout {rollout_id} up to step {source.step}; ids start at 0 and "
        "ascend in time"
    )


def _members(kind: Kind, path: Path, group_id: pa.Scalar) -> list[dict]:
    batches = iter_columns(path, kind, schema_of(kind).names)
    found = (batch.filter(pc.equal(batch.column("group_id"), group_id)) for batch in batches)
    return [row for batch in found for row in batch.to_pylist()]


def _draws(source: Source, rollout_id: int) -> list[Mapping[str, Any]]:
    names = ("rollout_id", "step", "age_steps", "probability", *OUTCOME_COLUMNS)
    uses: list[Mapping[str, Any]] = []
    for _, path in source.draw_files:
        for batch in iter_columns(path, "draws", names):
            matching = batch.filter(pc.equal(batch.column(0), rollout_id))
            uses += matching.drop_columns("rollout_id").to_pylist()
    return uses


def _fate(source: Source, row: Mapping[str, Any], step: int | None) -> str:
    history = source.recipes
    if row["reward"] is None:
        return "never stored: the reward function gave no reward, so it counts nowhere"
    if row["group_reward_std"] is None:
        return "never stored: fewer than two rewards of its group came, so there is no comparison"
    if not row["kept"] and row["group_reward_std"] == 0:
        return "never stored: all rewards of its group are equal, so there is no learning signal"
    if not row["kept"]:
        return (
            "never stored: it was cut off and reward.mask_truncated leaves it out, it was too old "
            "at its step, or the weights changed while it was sampled"
        )
    if history is None or step is None:
        return "stored at the time of the snapshot"
    recipe = history.at(source.step)
    if not recipe.replays:
        return "never stored: this run does not replay"
    stored, _ = stored_after(source, recipe.replay, recipe.sampling.group_size)
    if row["rollout_id"] in stored.rollout_id:
        return f"still stored after step {source.step}"
    limit, birth = recipe.replay.max_age_steps, row["birth_step"]
    if limit is not None and source.step - birth >= limit:
        return f"evicted by max_age_steps {limit} at the end of step {birth + limit}, if not before"
    return "evicted by the capacity"


def _prompt_text(source: Source, token_ids: list[int]) -> str | None:
    """The prompt, decoded with the tokenizer of the newest checkpoint."""
    if source.run_dir is None:
        return None
    found = sorted(source.run_dir.glob("checkpoints/step_*/model/tokenizer.json"))
    if not found:
        return None
    # Imported here: only `--show` needs it. It loads in milliseconds, unlike transformers.
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(found[-1])).decode(token_ids, skip_special_tokens=False)


_STATISTICS: tuple[tuple[str, str, str], ...] = (
    ("replayed_rollouts", "rollouts replayed", ",.0f"),
    ("age_mean", "age at use in steps, mean", ".2f"),
    ("age_p95", "age in steps, 95th percentile", ".1f"),
    ("abs_advantage_mean", "mean |A| of replayed rollouts", ".3f"),
    ("positive_share", "replayed with A > 0", ".1%"),
    ("never_drawn_share", "survivors never drawn", ".1%"),
    ("ess_mean", "effective sample size", ",.1f"),
    ("stored_mean", "rollouts stored, mean", ",.1f"),
    ("trained_tokens_per_generated", "tokens trained per generated", ".3f"),
)


def warn_of_gaps(source: Source) -> None:
    """Name on stderr what is missing, where the numbers shown have no place for it."""
    for warning in find_gaps(source):
        print(f"warning: {warning}", file=sys.stderr)


def print_what_if(result: WhatIf, console: Console) -> None:
    changes = ", ".join(f"{key} {old} → {new}" for key, (old, new) in result.changes.items())
    console.print(f"[bold]What if: {escape(changes) or 'nothing changed'}[/bold]")
    header = ("", "as logged", "same settings,\nsimulated", "changed,\nsimulated")
    rows = [
        (
            label,
            _cell(result.logged, {}, name, format_spec),
            _cell(result.same, result.same_error, name, format_spec),
            _cell(result.changed, result.changed_error, name, format_spec),
        )
        for name, label, format_spec in _STATISTICS
    ]
    print_table(console, plain_table("", header, rows))
    console.print("[dim]± is the standard deviation over five simulations[/dim]")
    console.print(f"[yellow]Limits.[/yellow] {result.cannot_know}")


def _cell(values: Statistics, errors: Statistics, name: str, format_spec: str) -> str:
    value, error = values[name], errors.get(name)
    if value is None:
        return "–"
    # Deterministic statistics differ between simulations by rounding only.
    if error is None or error <= 1e-9 * abs(value):
        return format(value, format_spec)
    return f"{value:{format_spec}} ± {error:{format_spec}}"


def _short(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}"
    text = printable(str(value))
    return text if len(text) <= 32 else f"{text[:31]}…"


_SHOWN = ("prompt_id", "birth_step", "policy_version", "verdict", "reward", "reward_scores",
          "advantage", "finish_reason", "group_id", "group_reward_mean", "group_reward_std",
          "group_correct")  # fmt: skip


def print_life(life: Life, console: Console) -> None:
    row = life.rollout
    facts = [(name, _short(row[name])) for name in _SHOWN if row.get(name) not in (None, [])]
    facts.append(("completion_tokens", f"{len(row['completion_token_ids']):,}"))
    print_table(console, plain_table("", ("rollout", str(row["rollout_id"])), facts))
    prompt = life.prompt_text or f"no tokenizer found; token ids {row['prompt_token_ids']}"
    console.print(f"\n[bold]prompt[/bold]\n{escape(prompt)}")
    completion = row.get("completion_text", "not stored in a snapshot")
    console.print(f"\n[bold]completion[/bold]\n{escape(completion)}\n")
    members = [[_short(value) for value in member.values()] for member in life.group]
    print_table(console, plain_table("group", _MEMBER, members))
    header = ("step", "age", "probability", "clipped", "log-ratio", "KL, nats")
    uses = [
        [_short(use[name]) for name in ("step", "age_steps", "probability", *_OF_A_USE)]
        for use in life.uses
    ]
    print_table(console, plain_table("uses; without a probability, as fresh", header, uses))
    console.print(f"→ {escape(life.fate)}")


_OF_A_USE = ("clip_fraction", "log_ratio_mean", "approx_kl")


def print_verification(report: Any, console: Console) -> None:
    """One line per check of a `VerifyReport`."""
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
