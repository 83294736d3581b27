"""The other outputs of inspect-buffer: JSON, and --what-if, --where, --show, --verify."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.inspection.buffer_summary import Inspection
from grpo_replay.lab.inspection.compute import OUTCOME_COLUMNS, find_gaps
from grpo_replay.lab.inspection.rebuild import Statistics, WhatIf, replay_storage, survivors_for
from grpo_replay.lab.inspection.rollout_columns import Kind, iter_columns, schema_of
from grpo_replay.lab.inspection.source import Source
from grpo_replay.replay import ReplayBuffer
from grpo_replay.storage.atomic import json_values
from grpo_replay.storage.recipe_history import RecipeHistory
from grpo_replay.terminal.console import plain_table, print_table, printable

_MEMBER = ("rollout_id", "completion_index", "reward", "advantage", "verdict")


@dataclass(frozen=True, slots=True)
class Life:
    """Everything the files record about one rollout."""

    rollout: Mapping[str, Any]  # its row; token ids are lists
    prompt_text: str | None  # None if no checkpoint has a tokenizer
    group: tuple[Mapping[str, Any], ...]  # all members, including this rollout
    logged_step: int | None  # the step that took it from the sampler; None in a snapshot
    fresh_outcome: Mapping[str, Any] | None  # None if that step did not train on it without a draw
    uses: tuple[Mapping[str, Any], ...]  # rows of draws/, with its step, age and outcome
    fate: str  # one sentence


def read_life(source: Source, rollout_id: int) -> Life:
    """The life of one rollout up to the inspected step.

    Raises SnapshotError if the rollout is in neither the rollout log nor the snapshot.
    """
    row, group, step = _find(source, rollout_id)
    uses = _uses(source, rollout_id)
    # With pool and FIFO, the use of a step that drew the rollout is in both logs.
    drawn = any(use["step"] == step for use in uses)
    trained_fresh = step is not None and row["tokens"] is not None and not drawn
    return Life(
        rollout={name: value for name, value in row.items() if name not in OUTCOME_COLUMNS},
        prompt_text=_prompt_text(source, row["prompt_token_ids"]),
        group=tuple({name: member[name] for name in _MEMBER} for member in group),
        logged_step=step,
        fresh_outcome={name: row[name] for name in OUTCOME_COLUMNS} if trained_fresh else None,
        uses=uses,
        fate=_fate(source, row, step),
    )


def _find(source: Source, rollout_id: int) -> tuple[dict, list[dict], int | None]:
    """The row of the rollout and the rows of its group, from the log or else the snapshot; and the
    step whose log has it."""
    files: list[tuple[Kind, Path, int | None]]
    files = [("rollouts", path, step) for step, path in source.rollout_files]
    if not files and source.snapshot is not None:
        files = [("buffer", source.snapshot, None)]
    id_bounds: list[int] = []  # smallest and largest id of every batch
    for kind, path, step in files:
        for batch in iter_columns(path, kind, ("rollout_id", "group_id")):
            ids = batch.column(0).to_numpy()
            if ids.size:
                id_bounds += [int(ids.min()), int(ids.max())]
            found = np.flatnonzero(ids == rollout_id)
            if found.size:
                group_id = batch.column(1)[int(found[0])].as_py()
                return *_rows(kind, path, rollout_id, group_id), step
    known = f"; ids run from {min(id_bounds)} to {max(id_bounds)}" if id_bounds else ""
    raise SnapshotError(f"{source.path}: no rollout {rollout_id} up to step {source.step}{known}")


def _rows(kind: Kind, path: Path, rollout_id: int, group_id: int) -> tuple[dict, list[dict]]:
    names = schema_of(kind).names
    members: list[dict] = []
    for batch in iter_columns(path, kind, names):
        members.extend(batch.filter(pc.equal(batch.column("group_id"), group_id)).to_pylist())
    return next(row for row in members if row["rollout_id"] == rollout_id), members


def _uses(source: Source, rollout_id: int) -> tuple[Mapping[str, Any], ...]:
    names = ("rollout_id", "step", "age_steps", "probability", *OUTCOME_COLUMNS)
    uses: list[Mapping[str, Any]] = []
    for _, path in source.draw_files:
        for batch in iter_columns(path, "draws", names):
            matching = batch.filter(pc.equal(batch.column(0), rollout_id))
            uses += matching.drop_columns("rollout_id").to_pylist()
    return tuple(uses)


def _fate(source: Source, row: Mapping[str, Any], step: int | None) -> str:
    history = source.recipes
    if row["reward"] is None:
        return "never stored: the reward function gave no reward, so it counts nowhere"
    if row["group_reward_std"] is None:
        return "never stored: fewer than two rewards of its group came, so there is no comparison"
    if not row["kept"] and row["group_reward_std"] > 0:
        masks = history is not None and step is not None and history.at(step).reward.mask_truncated
        if masks and row["finish_reason"] == "length":
            return "never stored: reward.mask_truncated leaves out what was cut off"
        return (
            "never stored: it was too old at its step, or the weights changed while it was sampled"
        )
    if not row["kept"]:
        return "never stored: all rewards of its group are equal, so there is no learning signal"
    if history is None or step is None:
        return "stored at the time of the snapshot"
    if not history.at(step).replays:
        return "never stored: this run does not replay"
    evicted = _eviction_step(source, history, row["rollout_id"], row["birth_step"], step)
    if evicted is None:
        return f"still stored after step {source.step}"
    age = evicted - row["birth_step"]
    limit = history.at(evicted).replay.max_age_steps
    reason = f"max_age_steps {limit}" if limit is not None and age >= limit else "the capacity"
    return f"evicted at the end of step {evicted}, at age {age}, by {reason}"


def _eviction_step(
    source: Source, history: RecipeHistory, rollout_id: int, birth_step: int, logged_step: int
) -> int | None:
    """The step at whose end the rollout was evicted; None if it is still stored. Each step has the
    settings of its own recipe."""
    settings = (recipe.replay for recipe in history.recipes)
    steps, log = survivors_for(source, birth_step, *settings)
    buffer = ReplayBuffer(history.at(steps[0]).replay, history.first.sampling.group_size)
    for step in replay_storage(buffer, log, steps, history):
        if step >= logged_step and not (buffer.column("rollout_id") == rollout_id).any():
            return step
    return None


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


LISTED = (
    "rollout_id",
    "prompt_id",
    "birth_step",
    "age_steps",
    "reward",
    "advantage",
    "completion_tokens",
    "verdict",
    "times_used",
    "stored",
)
TEXTS = ("completion_text", "problem", "answer")
LIST_ROWS = 20
FOLDED = 8
"""Minimum width to which prompt ids are folded on a narrow terminal."""

_STATISTICS: tuple[tuple[str, str, str], ...] = (
    ("replayed_rollouts", "rollouts replayed", ",.0f"),
    ("replayed_per_fresh", "replayed per survivor", ".3f"),
    ("age_mean", "age at use in steps, mean", ".2f"),
    ("age_p95", "age in steps, 95th percentile", ".1f"),
    ("abs_advantage_mean", "mean |A| of replayed rollouts", ".3f"),
    ("abs_advantage_share", "replayed share of total |A|", ".1%"),
    ("positive_share", "replayed with A > 0", ".1%"),
    ("never_drawn_share", "survivors never drawn", ".1%"),
    ("prompts_replayed", "prompts replayed", ",.0f"),
    ("ess_mean", "effective sample size", ",.1f"),
    ("entropy_mean", "entropy of the draw, nats", ".2f"),
    ("stored_mean", "rollouts stored, mean", ",.1f"),
    ("trained_tokens_per_generated", "tokens trained per generated", ".3f"),
)


def inspection_document(inspection: Inspection) -> dict[str, Any]:
    """The inspection as JSON values. The three keys that tools rely on come first."""
    document = json_values(dataclasses.asdict(inspection))
    first = {
        "step": inspection.step,
        "stored_rollouts": inspection.occupancy.stored_rollouts,
        "capacity_rollouts": inspection.settings["capacity_rollouts"],
    }
    k = inspection.updates_per_step
    document["by_age"] = [
        {"age_steps": age // k, **({"age_updates": age} if k > 1 else {}), **row}
        for age, row in document["by_age"].items()
    ]
    for row in document["staleness"]:
        if row["age_updates"] is None:
            del row["age_updates"]
    document["trends"] = {
        name: [{"step": step, "value": value} for step, value in points]
        for name, points in document["trends"].items()
    }
    return {**first, **document}


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


def print_list(rows: Sequence[Mapping[str, Any]], total: int, console: Console) -> None:
    """The first rows that pass a filter, and the number of all that do. Problems, answers and
    completions follow the table, because they may be long."""
    if rows:
        of_table = [{k: v for k, v in row.items() if k not in TEXTS} for row in rows]
        print_table(console, _list_table(of_table, console.width))
    for row in rows:
        if (completion := row.get("completion_text")) is None:
            continue
        asked = ""
        if row.get("problem") is not None:
            asked = f"{printable(row['problem'])}  answer {printable(row['answer'])}\n"
        console.print(
            Text.assemble((f"{row['rollout_id']}  ", "bold"), (asked, "dim"), printable(completion))
        )
    shown = f"; the first {len(rows)} are shown" if total > len(rows) else ""
    console.print(f"{total:,} rollouts match{shown}")


def _list_table(rows: Sequence[Mapping[str, Any]], room: int) -> Table:
    """The rows with two-line headers. Prompt ids are folded where `room` is narrow: 80 columns have
    room for `LISTED`."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    cells = [[_short(value) for value in row.values()] for row in rows]
    headers = [name.replace("_", "\n_", 1) for name in rows[0]]
    widths = {
        name: max(map(cell_len, (*header.split("\n"), *column)))
        for name, header, column in zip(rows[0], headers, zip(*cells, strict=True), strict=True)
    }
    if "prompt_id" in widths:
        others = sum(widths.values()) - widths["prompt_id"] + len(widths) - 1
        widths["prompt_id"] = min(widths["prompt_id"], max(FOLDED, room - others))
    for header, (name, width) in zip(headers, widths.items(), strict=True):
        side: JustifyMethod = "left" if name in ("prompt_id", "verdict") else "right"
        table.add_column(header, justify=side, overflow="fold", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    return table


def _short(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}"
    text = printable(str(value))
    return text if len(text) <= 32 else f"{text[:31]}…"


def print_life(life: Life, console: Console) -> None:
    rollout = life.rollout
    console.print(
        f"[bold]rollout {rollout['rollout_id']}[/bold] · {escape(rollout['prompt_id'])} · "
        f"born at step {rollout['birth_step']} under policy version {rollout['policy_version']}"
    )
    advantage = rollout["advantage"]
    scores = ", ".join(f"{score:g}" for score in rollout.get("reward_scores") or ())
    console.print(
        f"{escape(rollout['verdict'])} · reward "
        + ("none" if rollout["reward"] is None else f"{rollout['reward']:g}")
        + (f" (scores {scores})" if scores else "")
        + " · advantage "
        + ("none (dropped)" if advantage is None else f"{advantage:+.3f}")
        + f" · {len(rollout['completion_token_ids']):,} tokens, ended by "
        + escape(rollout["finish_reason"])
    )
    console.print("\n[bold]prompt[/bold]")
    if life.prompt_text is None:
        console.print(
            f"[dim]token ids (no tokenizer found)[/dim] {escape(str(rollout['prompt_token_ids']))}"
        )
    else:
        console.print(escape(life.prompt_text))
    console.print("\n[bold]completion[/bold]")
    text = rollout.get("completion_text")
    console.print(escape(text) if text is not None else "[dim]not stored in a snapshot[/dim]")
    counted = f"{rollout['group_correct']} of {len(life.group)} correct"
    if life.logged_step is None:
        counted = f"{rollout['group_correct']} correct, {len(life.group)} of all are stored"
    console.print(
        f"\n[bold]group {rollout['group_id']}[/bold]: {counted}, reward mean "
        f"{_short(rollout['group_reward_mean'])}, std {_short(rollout['group_reward_std'])}"
    )
    console.print(_group_table(life))
    times = "once" if len(life.uses) == 1 else f"{len(life.uses)} times"
    console.print(f"[bold]life[/bold]: drawn {times}")
    if life.uses or life.fresh_outcome is not None:
        console.print(_life_table(life))
    console.print(f"→ {escape(life.fate)}")


def _group_table(life: Life) -> Table:
    names = ("rollout_id", "reward", "advantage", "verdict")
    rows = [[_short(member[name]) for name in names] for member in life.group]
    for row, member in zip(rows, life.group, strict=True):
        row[0] += " *" if member["rollout_id"] == life.rollout["rollout_id"] else ""
    return plain_table("", names, rows)


def _life_table(life: Life) -> Table:
    header = ("step", "age", "probability", "clipped", "log-ratio", "KL, nats")
    rows = [
        (str(use["step"]), str(use["age_steps"]), f"{use['probability']:.2%}", *_outcome_cells(use))
        for use in life.uses
    ]
    if life.fresh_outcome is not None:
        fresh = (str(life.logged_step), "fresh", "–", *_outcome_cells(life.fresh_outcome))
        rows.insert(0, fresh)
    return plain_table("", header, rows)


def _outcome_cells(outcome: Mapping[str, Any]) -> tuple[str, str, str]:
    clip, mean, kl = (outcome[n] for n in ("clip_fraction", "log_ratio_mean", "approx_kl"))
    if mean is None:
        return "–", "–", "–"
    return f"{clip:.1%}", f"{mean:+.4f}", f"{kl:.5f}"


def print_verification(report: Any, console: Console) -> None:
    """One line per check of a `VerifyReport`."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "check", "compared", ""):
        table.add_column(name, justify="right" if name == "compared" else "left")
    for check in report.checks:
        mark = "[green]✓[/green]" if check.passed else "[red]✗[/red]"
        table.add_row(mark, check.name, f"{check.checked:,}", escape(check.detail))
    console.print(table)
    for each in report.unchecked:
        console.print(f"[dim]{escape(each)}[/dim]")
    failed = sum(not check.passed for check in report.checks)
    if failed:
        console.print(f"[red]{failed} of {len(report.checks)} checks failed[/red]")
    else:
        console.print(f"[green]{report.steps} steps match the algorithm of the recipe[/green]")
