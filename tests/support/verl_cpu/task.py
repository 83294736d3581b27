"""The tiny task for verl: its problems as Parquet, its reward, a tool."""

from pathlib import Path
from typing import Any


def write_problems(folder: Path) -> None:
    """train.parquet and val.parquet."""
    import pandas as pd

    from grpo_replay.tiny import problems

    held_out = [
        row for name in problems.BENCHMARKS for row in problems.benchmark_problems(name)[:4]
    ]
    for name, rows in (("train", problems.train_problems(0)), ("val", held_out)):
        table = [
            {
                "data_source": row["benchmark"],
                "prompt": [{"role": "user", "content": row["problem"]}],
                "reward_model": {"style": "rule", "ground_truth": row["answer"]},
                "extra_info": {"index": i},
            }
            for i, row in enumerate(rows)
        ]
        pd.DataFrame(table).to_parquet(folder / f"{name}.parquet")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """1 for a box with the right answer, else 0."""
    return float(f"boxed{{{ground_truth}}}" in solution_str)


def no_score(*_: Any, **__: Any) -> float:
    """Equal rewards: no group has a signal."""
    return 0.0
