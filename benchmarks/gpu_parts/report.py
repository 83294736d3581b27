"""All parts in one JSON file and one Markdown file."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_parts.record import write_json

TRAINING_TABLE = "packs"  # the table of parts 9 to 11, shown once for all models


def read_results(output: Path) -> list[dict[str, Any]]:
    """What the folder holds, by part; parts of other runs of the command included."""
    return [json.loads(path.read_text()) for path in sorted(output.glob("part_[0-9][0-9].json"))]


def write_report(output: Path) -> None:
    """report.json and report.md, from every part_NN.json in the folder."""
    results = read_results(output)
    write_json(output / "report.json", results)
    (output / "report.md").write_text(to_markdown(results))


def to_markdown(results: Sequence[dict[str, Any]]) -> str:
    blocks = ["# On a GPU", summary(results)]
    training = [row for result in results for row in result["tables"].get(TRAINING_TABLE, ())]
    if training:
        blocks += ["## Training step", table(training)]
    for result in results:
        blocks += [f"## {result['part']}. {result['title']}", *_details(result)]
    return "\n\n".join(blocks) + "\n"


def summary(results: Sequence[dict[str, Any]]) -> str:
    """One line for each part."""
    rows = [
        {
            "part": result["part"], "what": result["title"], "size": result["size"],
            "status": result["status"], "seconds": result.get("seconds"),
            "checks": _checks_held(result), "lines on stdout": result.get("stdout_lines"),
            "why": result["reason"] or "",
        }
        for result in results
    ]  # fmt: skip
    return table(rows)


def _checks_held(result: dict[str, Any]) -> str:
    checks = result["checks"]
    return f"{sum(check['holds'] for check in checks)} of {len(checks)}" if checks else ""


def _details(result: dict[str, Any]) -> Iterable[str]:
    if result["reason"]:
        yield f"{result['status']}: {result['reason']}"
    if result["checks"]:
        yield table([
            {"check": c["claim"], "holds": "yes" if c["holds"] else "**no**", "found": c["found"]}
            for c in result["checks"]
        ])  # fmt: skip
    if result["figures"]:
        yield table([{"figure": k, "value": v} for k, v in result["figures"].items()])
    for name, rows in result["tables"].items():
        if name != TRAINING_TABLE:
            yield f"{name}:"
            yield table(rows)
    for note in result["notes"]:
        yield f"Note: {note}"
    if "traceback" in result:
        yield f"```\n{result['traceback']}\n```"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; columns in the order in which the rows bring them."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """Four significant digits, thousands separated; one line that no table breaks on."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()).replace("|", "\\|")
