"""Evaluation files that are damaged, changed or mixed up are refused; errors name the place."""

import json

import numpy as np
import pyarrow as pa
import pytest

from grpo_replay.errors import EvaluationFileError
from grpo_replay.evaluation.comparison import compare
from grpo_replay.evaluation.evaluation_report import (
    SAMPLE_SCHEMA,
    EvaluationReport,
    read_report,
    samples_path,
)
from grpo_replay.evaluation.statistics import summarise

COLUMNS = {
    "seed": 0, "answer": "", "completion_text": "", "finish_reason": "stop", "verdict": "incorrect",
}  # fmt: skip


def make_report(seed=0, k=3, digest="d", version="0.9.0"):
    rng = np.random.default_rng(seed)
    rows = [
        {
            **COLUMNS,
            **{"benchmark": name, "problem_index": index, "problem_id": str(index)},
            **{"sample": sample, "greedy": False, "tokens": int(rng.integers(5, 50))},
            "correct": bool(rng.random() < 0.6),
        }
        for name in ("a", "b")
        for index in range(6)
        for sample in range(k)
    ]
    table = pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)
    described = {name: {"problems_sha256": digest} for name in ("a", "b")}
    settings = {
        **{"benchmarks": described, "backend": "hf", "top_p": 1.0},
        **{"temperature": 1.0, "max_completion_length": 60, "reward": "math_verify"},
        "stop_tokens": ["<eos>"],
    }
    results = summarise(table, {})
    return EvaluationReport({}, settings, {"math-verify": version}, results, samples=table)


@pytest.fixture
def path(tmp_path):
    make_report().write(tmp_path / "e.json")
    return tmp_path / "e.json"


def changed(document, place, value):
    *parents, leaf = place.split(".")
    node = document
    for parent in parents:
        node = node[parent]
    if value is KeyError:
        del node[leaf]
    else:
        node[leaf] = value


@pytest.mark.parametrize(
    ("place", "value"), [("benchmarks.a.avg_at_k", "high"), ("mean.mean_tokens", KeyError)]
)
def test_an_invalid_value_is_named(path, place, value):
    document = json.loads(path.read_text())
    changed(document, place, value)
    path.write_text(json.dumps(document))
    with pytest.raises(EvaluationFileError, match=f"(?s)e.json.*{place.rpartition('.')[2]}"):
        read_report(path)


def test_an_evaluation_that_is_replaced_never_has_the_rows_of_another(path, monkeypatch):
    """Killed between the two files, it leaves the new rows alone."""

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo_replay.evaluation.evaluation_report.write_text_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        make_report(seed=1).write(path)
    assert not path.exists() and samples_path(path).exists()


def test_the_same_ids_with_other_problems_cannot_be_compared():
    with pytest.raises(EvaluationFileError, match=r"a has other problems or answers in A"):
        compare("A", make_report(), "B", make_report(digest="e"))
