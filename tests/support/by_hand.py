"""The numbers of an inspection, computed again with plain loops over the Parquet rows."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq


def rows_of(folder: Path) -> list[dict]:
    """All rows of all files of a folder, in step order."""
    rows = []
    for path in sorted(folder.glob("*.parquet")):
        rows.extend(pq.read_table(path).to_pylist())
    return rows


def rows_of_step(folder: Path, step: int) -> list[dict]:
    return pq.read_table(folder / f"step_{step:06d}.parquet").to_pylist()


def replayed_rows(run: Path, preset: str) -> list[dict]:
    """Draws of stored rollouts; the naive baselines' pool holds fresh ones too, at age 0."""
    draws = rows_of(run / "draws")
    pool = preset in ("uniform", "group_std")
    return [row for row in draws if row["age_steps"] > 0 or not pool]


def stored_rows(run: Path, step: int) -> list[dict]:
    return pq.read_table(run / "checkpoints" / f"step_{step:06d}" / "buffer.parquet").to_pylist()


def last_use_counts(
    draws: list[dict], trained_at_birth: set[int], births: dict[int, int]
) -> tuple[int, Counter]:
    """First uses, and gaps between uses, walking through the draws in order."""
    last: dict[int, int] = {rollout_id: births[rollout_id] for rollout_id in trained_at_birth}
    new, gaps = 0, Counter()
    for row in draws:
        rollout_id = row["rollout_id"]
        if rollout_id in last:
            gaps[row["step"] - last[rollout_id]] += 1
        else:
            new += 1
        last[rollout_id] = row["step"]
    return new, gaps


def outcomes(rollouts: list[dict], draws: list[dict]) -> dict[int, dict[str, float]]:
    """Token-weighted means by age: draws at their age, fresh rollouts at 0, none twice."""
    at_birth = {(row["step"], row["rollout_id"]) for row in draws if row["age_steps"] == 0}
    sums: dict[int, Counter] = {}
    fresh = [(0, row) for row in rollouts if (row["birth_step"], row["rollout_id"]) not in at_birth]
    for age, row in [*fresh, *((row["age_steps"], row) for row in draws)]:
        if row["tokens"]:
            total = sums.setdefault(age, Counter())
            total["uses"] += 1
            total["tokens"] += row["tokens"]
            names = ("clip_fraction", "log_ratio_mean", "approx_kl")
            for name in (*names, "ratio_mean", "ratio_squared_mean"):
                total[name] += row["tokens"] * row[name]
            total["log_ratio_square"] += row["tokens"] * (
                row["log_ratio_var"] + row["log_ratio_mean"] ** 2
            )
    found = {
        age: {
            name: value if name in ("uses", "tokens") else value / total["tokens"]
            for name, value in total.items()
        }
        for age, total in sums.items()
    }
    for of_age in found.values():
        mean, squared = (of_age.pop(name) for name in ("ratio_mean", "ratio_squared_mean"))
        of_age["ratio_ess"] = mean**2 / squared
    return found
