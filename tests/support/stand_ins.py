"""Stand-ins for what tests may not download: the five benchmarks of the paper."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SIZES = {"math500": 500, "aime25": 30, "aime26": 30, "hmmt_feb25": 30, "hmmt_feb26": 33}


def write_benchmarks(folder: Path) -> Path:
    """One file per benchmark in its own schema; the AIME sets as Parquet with int64 answers, the
    others as JSONL."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        rows = [_row(name, number) for number in range(1, size + 1)]
        if name.startswith("aime"):
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        else:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def _row(name: str, number: int) -> dict[str, object]:
    problem = f"What is ${number} + {number}$?"
    if name == "math500":
        return {
            **{"problem": problem, "solution": "", "answer": str(2 * number)},
            **{"subject": "Algebra", "level": 1, "unique_id": f"test/algebra/{number}.json"},
        }
    if name.startswith("aime"):
        return {"problem_idx": number, "problem": problem, "answer": 2 * number}
    row = {"problem_idx": number, "problem": problem, "answer": f"\\frac{{{4 * number}}}{{2}}"}
    return {**row, "problem_type": ["Algebra"]}
