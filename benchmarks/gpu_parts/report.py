"""All results of a folder as results.json and as report.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_parts.jobs import JOBS
from gpu_parts.record import write_json
from gpu_parts.runner import result_of

RATIOS = {"seconds of a step": "time", "most memory in use, GiB": "memory"}


def write_report(output: Path) -> None:
    results = [result for job in JOBS if (result := result_of(output, job.name))]
    write_json(output / "results.json", results)
    (output / "report.md").write_text(to_markdown(results))


def to_markdown(results: Sequence[Mapping[str, Any]]) -> str:
    columns = ("job", "title", "size", "status", "seconds", "cpu_seconds", "reason")
    lines = ["# benchmarks/gpu.py", ""]
    lines += _table([{name: each.get(name) for name in columns} for each in results])
    if ratios := peer_ratios(results):
        lines += ["", "## Ours as a share of TRL's, same card and batch", "", *_table(ratios)]
    for each in results:
        lines += ["", f"## {each['job']}: {each['title']}", ""]
        lines += [f"- {name}: {_shown(value)}" for name, value in each["figures"].items()]
        lines += [f"- {note}" for note in each["notes"]]
        for check in each["checks"]:
            word = "holds" if check["holds"] else "NOT SO"
            lines.append(f"- {word}: {check['claim']} ({_shown(check['found'])})")
        for name, rows in each["tables"].items():
            lines += ["", f"{name}:", "", *_table(rows)]
        if last := each.get("last_lines"):
            lines += ["", "```", last, "```"]
    return "\n".join(lines) + "\n"


def peer_ratios(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each task of part d that both have done."""
    figures = {each["job"]: each["figures"] for each in results}
    rows = []
    for name, mine in figures.items():
        theirs = figures.get(name.replace("-ours", "-trl"), {})
        if name.endswith("-ours") and all(mine.get(key) and theirs.get(key) for key in RATIOS):
            tokens = "completion tokens of a step"
            shares = {word: mine[key] / theirs[key] for key, word in RATIOS.items()}
            rows.append({"task": name, **shares, tokens: mine[tokens], "TRL's": theirs[tokens]})
    return rows


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (_shown(row.get(name)).replace("|", "\\|") for name in columns)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else " ".join(str(value).split())
