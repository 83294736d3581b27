"""benchmarks/same_bits.py names what two runs differ in, and nothing else."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file
from same_bits_parts.compare import first_difference

ROLLOUTS = "run/rollouts/step_000002.parquet"
WEIGHTS = "run/checkpoints/step_000002/model/model.safetensors"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The same small run twice, but for the clock."""
    for side in "ab":
        for name in (ROLLOUTS, "run/rollouts/step_000001.parquet"):
            path = tmp_path / side / name
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [{"birth_step": 2, "advantage": value} for value in (0.5, float("nan"), None)]
            pq.write_table(pa.Table.from_pylist(rows), path)
        (tmp_path / side / WEIGHTS).parent.mkdir(parents=True)
        save_file({"head": np.ones(3, np.float32)}, tmp_path / side / WEIGHTS)
        lines = [{"step": step, "loss": 0.1 * step, "step_time": ord(side)} for step in (1, 2)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / side / "run/metrics.jsonl").write_text(text)
    return tmp_path / "a", tmp_path / "b"


def change(table: Path, row: int, value: float) -> None:
    rows = pq.read_table(table).to_pylist()
    rows[row]["advantage"] = value
    pq.write_table(pa.Table.from_pylist(rows), table)


def test_an_equal_pair_has_no_difference_whatever_the_clock_says(pair):
    assert first_difference(*pair) is None
    # Another layout of the same rows is no difference, either.
    folder = (pair[1] / ROLLOUTS).parent
    both = [pq.read_table(path) for path in sorted(folder.iterdir())]
    shutil.rmtree(folder)
    folder.mkdir()
    pq.write_table(pa.concat_tables(both), folder / "all.parquet")
    assert first_difference(*pair) is None


def test_a_value_that_changed_by_one_bit_is_named_with_its_place_and_both_values(pair):
    change(pair[1] / ROLLOUTS, 0, np.nextafter(0.5, 1))
    assert first_difference(*pair) == (
        "run/rollouts/*.parquet [row 3, step 2], advantage: 0.5 in A, 0.5000000000000001 in B"
    )
    weights = load_file(pair[1] / WEIGHTS)
    weights["head"][1] = np.nextafter(np.float32(1), np.float32(2))
    save_file(weights, pair[1] / WEIGHTS)
    assert first_difference(*pair).endswith("(and 1 more)")
    shutil.copy(pair[0] / ROLLOUTS, pair[1] / ROLLOUTS)
    assert "head, values [1]: 1.0 in A, 1.0000001" in first_difference(*pair)


def test_what_is_missing_is_named(pair):
    lines = (pair[1] / "run/metrics.jsonl").read_text().splitlines()
    (pair[1] / "run/metrics.jsonl").write_text(lines[0] + "\n")
    assert first_difference(*pair) == "run/metrics.jsonl: 2 in A, 1 in B"
    (pair[1] / "run/metrics.jsonl").write_text("\n".join(lines).replace('"loss"', '"other"'))
    assert first_difference(*pair) == "run/metrics.jsonl [row 0, step 1], loss: only in A"
    (pair[0] / "run/metrics.jsonl").unlink()
    assert first_difference(*pair) == "run/metrics.jsonl: only in B"
    for folder in pair:
        shutil.rmtree(folder / "run")
    assert first_difference(*pair) == "nothing to compare in either"


def test_a_column_that_one_commit_lacks_is_a_difference_unless_it_is_called_new(pair):
    path = pair[1] / ROLLOUTS
    table = pq.read_table(path)
    pq.write_table(table.append_column("confidence", pa.array([0.5] * len(table))), path)
    assert "confidence: only in B" in first_difference(*pair)
    assert first_difference(*pair, new=["confidence"]) is None
    change(path, 0, 0.75)
    assert "advantage: 0.5 in A, 0.75 in B" in first_difference(*pair, new=["confidence"])
