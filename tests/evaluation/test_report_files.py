"""Evaluation files that are damaged, changed or mixed up are refused; errors name the place."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_replay.cli.app import app
from grpo_replay.errors import DatasetError, EvaluationFileError, RecipeError
from grpo_replay.evaluation.benchmarks import _digest, find_benchmarks, load_problems
from grpo_replay.evaluation.comparison import compare, differences
from grpo_replay.evaluation.evaluate import Progress
from grpo_replay.evaluation.evaluation_report import (
    SAMPLE_SCHEMA,
    EvaluationReport,
    check_output,
    read_report,
    samples_path,
)
from grpo_replay.evaluation.statistics import summarise
from grpo_replay.recipe import EvalSection

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
        **{"benchmarks": described, "bootstrap_samples": 50, "backend": "hf", "top_p": 1.0},
        **{"temperature": 1.0, "max_completion_length": 60, "reward": "math_verify"},
        "stop_tokens": ["<eos>"],
    }
    results = summarise(table, 50, {})
    return EvaluationReport({}, settings, {"math-verify": version}, results, samples=table)


@pytest.fixture
def path(tmp_path):
    make_report().write(tmp_path / "e.json")
    return tmp_path / "e.json"


def test_a_report_round_trips(path):
    found, made = read_report(path), make_report()
    assert (found.sampled, found.settings) == (made.sampled, made.settings)
    assert found.samples.equals(made.samples)


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
    ("place", "value", "message"),
    [
        ("mean.avg_at_k", None, r"mean.avg_at_k: .*found None"),
        ("mean.avg_at_k", float("nan"), r"mean.avg_at_k: .*finite"),
        ("mean.avg_at_k", -0.5, r"mean.avg_at_k: .*greater than or equal to 0"),
        ("mean.avg_at_k", 0.99, r"mean.avg_at_k 0.99 is not the mean"),
        ("mean.mean_tokens", 1.0, r"mean.mean_tokens 1.0 is not the mean"),
        ("mean.benchmarks", ["a"], r"mean.benchmarks are not"),
        ("benchmarks.a.avg_at_k", "high", r"benchmarks.a.avg_at_k: .*found 'high'"),
        ("benchmarks.a.n", 0, r"benchmarks.a.n: .*found 0"),
        ("benchmarks.a.avg_at_k_interval", [0.1], r"avg_at_k_interval"),
        ("benchmarks", [], r"benchmarks: .*found \[\]"),
        ("settings", [], r"found \[\]"),
        ("settings.bootstrap_samples", 0, r"bootstrap_samples: .*found 0"),
        ("settings.temperature", "high", r"temperature: .*found 'high'"),
        ("settings.benchmarks.a", KeyError, "does not describe every benchmark"),
        ("settings.benchmarks.a.problems_sha256", KeyError, "problems_sha256: .*required"),
        *(
            (f"settings.{key}", KeyError, f"{key}: .*required")
            for key in (
                "bootstrap_samples",
                "backend",
                "temperature",
                "top_p",
                "reward",
                "max_completion_length",
                "stop_tokens",
            )
        ),
        ("mean", KeyError, r"'mean'"),
        ("greedy", 3, r"valid dictionary, found 3"),
        ("versions", None, r"found None"),
    ],
)
def test_an_invalid_value_is_named(path, place, value, message):
    document = json.loads(path.read_text())
    changed(document, place, value)
    path.write_text(json.dumps(document))
    with pytest.raises(EvaluationFileError, match=rf"(?s)e.json: damaged.*{message}.*restore it"):
        read_report(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.slice(1), "same number of samples"),
        (lambda rows: rows.filter(pa.compute.field("benchmark") == "a"), "other benchmarks"),
        (lambda rows: make_report(seed=1).samples, "n, k and avg@k of [ab] are"),
        (lambda rows: make_report(k=2).samples, r"are \(\d+, 3, .* of its rows \(\d+, 2, "),
    ],
)
def test_rows_of_another_evaluation_are_refused(path, change, message):
    """As after a kill between the two files, or a copy of one of them."""
    rows = pq.read_table(samples_path(path))
    pq.write_table(change(rows), samples_path(path))
    with pytest.raises(EvaluationFileError, match=rf"e.parquet is not.*e.json: .*({message})"):
        read_report(path)
    assert read_report(path, with_samples=False).samples is None


def test_rows_of_another_version_are_distinguished_from_damage(path):
    rows = pq.read_table(samples_path(path))
    marks = {"grpo_replay_evaluation_samples": "1"}
    pq.write_table(rows.replace_schema_metadata(marks), samples_path(path))
    with pytest.raises(EvaluationFileError, match="of version 1, expected 2: evaluate again"):
        read_report(path)


def test_an_evaluation_may_replace_the_remains_of_a_killed_one(path):
    """The rows were written but not the report: the same command must continue."""
    make_report(seed=1).write(path.with_name("other.json"))
    samples_path(path.with_name("other.json")).replace(samples_path(path))
    with pytest.raises(EvaluationFileError):
        read_report(path)
    check_output(path)


def test_the_same_ids_with_other_problems_cannot_be_compared():
    with pytest.raises(EvaluationFileError, match=r"a has other problems or answers in A"):
        compare("A", make_report(), "B", make_report(digest="e"))


def test_a_comparison_notes_other_differences():
    assert differences(make_report(), make_report(seed=1)) == []
    found = differences(make_report(), make_report(k=2, version="0.8"))
    assert found[:2] == [
        f"{name}: 3 samples of each problem in A, 2 in B; lost and won count the first 2"
        for name in "ab"
    ]
    assert found[2:] == ["graded with math-verify 0.9.0 in A, 0.8 in B"]


def test_the_digest_covers_the_problems_and_not_the_file_name(tmp_path):

    def problems(name, *rows):
        file = tmp_path / name
        file.write_text(
            "".join(json.dumps(dict(zip(("problem", "answer"), r))) + "\n" for r in rows)
        )
        settings = EvalSection(benchmarks=[str(file)])
        return load_problems(find_benchmarks(settings)[0], settings)

    one = _digest(problems("a.jsonl", ("1+1", "2"), ("2+1", 3)))
    assert one == _digest(problems("b.jsonl", ("1+1", "2"), ("2+1", "3")))
    assert one != _digest(problems("c.jsonl", ("1+1", "2"), ("2+1", "4")))


def test_a_file_called_mean_is_refused():
    with pytest.raises(RecipeError, match=r"mean.jsonl would appear as .mean.*rename"):
        find_benchmarks(EvalSection(benchmarks=["some/mean.jsonl"]))


@pytest.mark.parametrize(("answer", "message"), [("\ud83d", "valid Unicode"), ([2], "in quotes")])
def test_an_invalid_answer_is_refused_with_its_line(tmp_path, answer, message):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"problem": "1+1", "answer": answer}) + "\n")
    settings = EvalSection(benchmarks=[str(file)])
    with pytest.raises(DatasetError, match=rf"mine.jsonl:1: field 'answer' .*{message}"):
        load_problems(find_benchmarks(settings)[0], settings)


def test_aes_refuses_numbers_that_overflow():
    from typer.testing import CliRunner

    for words, message in (
        (["--gain", "inf"], "--gain inf: expected a finite number"),
        (["--candidate", "b=100,2"], "AES that is not finite"),
    ):
        base = ["aes", "--reference", "1e-320,100", "--candidate", "a=1,2"]
        result = CliRunner().invoke(app, [*base, *words])
        assert result.exit_code == 2 and message in result.stderr, result.output


def test_progress_counts_graded_completions():
    from collections import Counter

    progress = Progress(10, Counter(correct=3, incorrect=1))
    assert (progress.done, progress.accuracy) == (4, 0.75)
    assert Progress(10, Counter()).accuracy is None
