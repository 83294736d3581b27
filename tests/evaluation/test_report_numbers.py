"""Every number of a report, a comparison and AES, worked by hand for two benchmarks that differ in
problems, samples and lengths; and where each number is shown."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from io import StringIO
from math import sqrt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pytest import approx
from rich.console import Console
from scipy import stats
from share_bounds import share_bounds

from grpo_replay.cli.aes_command import print_scores
from grpo_replay.errors import EvaluationFileError, UsageError
from grpo_replay.evaluation.aes import point_of, score_reports
from grpo_replay.evaluation.comparison import compare
from grpo_replay.evaluation.evaluation_report import SAMPLE_SCHEMA, EvaluationReport
from grpo_replay.evaluation.evaluation_tables import (
    accuracy_table,
    comparison_table,
    length_table,
)
from grpo_replay.evaluation.statistics import summarise_both
from grpo_replay.terminal.text_table import TextTable

# A word is one completion: verdict, tokens, and ! if it reached the length limit.
VERDICTS = {"c": "correct", "i": "incorrect", "u": "unparsable", "t": "timeout"}
Words = dict[str, Sequence[str]]
A: Words = {
    "alpha": ("c10 c20 t30 u60!", "i20 i60! u60! u60!"),
    "beta": ("c30 c50 i10", "c20 i10 u30", "i60! i60! t45"),
}
A_GREEDY: Words = {"alpha": ("c10", "c20"), "beta": ("i60!", "c30", "i40")}
B: Words = {
    "alpha": ("c4 i12 c24 c40", "c30 i50 u60 c60!"),
    "beta": ("i10 c30", "i22 c60!", "c35 c35"),
}
# Of each problem: accuracy and tokens in A, accuracy and tokens in B.
PAIRS = {
    "alpha": [(2 / 4, 30, 3 / 4, 20), (0 / 4, 50, 2 / 4, 50)],
    "beta": [(2 / 3, 30, 1 / 2, 20), (1 / 3, 20, 1 / 2, 41), (0 / 3, 55, 2 / 2, 35)],
}
SETTINGS: dict[str, Any] = {
    "benchmarks": {
        name: {
            **{"title": name.title(), "file": None, "source": "builtin", "split": "train"},
            **{"problems_sha256": 64 * "0", "seeds": [42]},
        }
        for name in (*A, "x", "y")
    },
    **{"temperature": 0.6, "top_p": 0.8, "max_completion_length": 60, "max_problems": None},
    **{"reward": "math_verify", "template": "chat", "system_prompt": None, "user_template": "{x}"},
    **{"backend": "hf", "stop_tokens": ["<eos>"]},
}


def table(words: Words, greedy: bool = False, unparsable: Sequence[str] = ()) -> pa.Table:
    rows = [
        {
            **{"benchmark": name, "problem_index": index, "problem_id": str(index)},
            **{"greedy": greedy, "sample": sample, "seed": 0, "completion_text": ""},
            **{"answer": "bad" if name == "beta" and str(index) in unparsable else ""},
            **{"tokens": int(word[1:].rstrip("!")), "verdict": VERDICTS[word[0]]},
            **{"finish_reason": "length" if word.endswith("!") else "stop"},
            **{"correct": word[0] == "c"},
        }
        for name, problems in words.items()
        for index, problem in enumerate(problems)
        for sample, word in enumerate(problem.split())
    ]
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


def report(
    words: Words, greedy_words: Words | None = None, version: str = "0.9.0", unparsable: str = ""
) -> EvaluationReport:
    own = table(words, unparsable=unparsable.split())
    rows = pa.concat_tables([own, table(greedy_words or {}, greedy=True)])
    versions = {"math-verify": version}
    return EvaluationReport({}, SETTINGS, versions, *summarise_both(rows, ["bad"]), rows)


@pytest.fixture(scope="module")
def a() -> EvaluationReport:
    return report(A, A_GREEDY, unparsable="1 2")


@pytest.fixture(scope="module")
def b() -> EvaluationReport:
    return report(B, version="0.8.0")


def by_t(benchmarks: Iterable[list[float]], bound: float = 1.0, least: float = -np.inf) -> Any:
    """mean ± t·√V of the mean over benchmarks, by the textbook: V the sum of s²/n over b²."""
    each = [(np.mean(d), np.var(d, ddof=1) / len(d), len(d) - 1) for d in benchmarks]
    count = len(each)
    variance = sum(v for _, v, _ in each) / count**2
    freedom = variance**2 / sum((v / count**2) ** 2 / f for _, v, f in each)
    mean, half = np.mean([m for m, _, _ in each]), stats.t.ppf(0.975, freedom) * sqrt(variance)
    return approx((max(-bound, least, mean - half), min(bound, mean + half)))


def assert_is(found: Any, **expected: Any) -> None:
    """Every field except the p-value, which other tests check."""
    assert {field.name for field in fields(found)} - {"p_value"} == set(expected)
    for name, value in expected.items():
        assert getattr(found, name) == (approx(value) if type(value) is float else value), name


def printed(found: TextTable) -> list[str]:
    """The lines of a table on a terminal, each run of spaces as one."""
    console = Console(width=120, file=StringIO())
    found.print(console)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_every_number_of_the_first_benchmark(a):
    assert_is(
        a.sampled.benchmarks["alpha"],
        n=2, k=4,
        avg_at_k=1 / 4, avg_at_k_interval=approx(share_bounds([[1 / 2, 0]])),
        avg_at_k_stderr=1 / 4,  # 1/2 and 0: half their distance
        pass_at_k=1 / 2, pass_at_k_interval=approx(share_bounds([[1, 0]])),
        # 2 of 4 correct: 1/2; 1 - 1/6; 1; 1. None of 4: 0.
        pass_at_j=approx({"1": 1 / 4, "2": 5 / 12, "3": 1 / 2, "4": 1 / 2}),
        mean_tokens=40.0, mean_tokens_interval=by_t([[30, 50]], np.inf, least=0),
        truncation_rate=4 / 8, unparsed_rate=3 / 8, mean_score=None,
        verdicts={"correct": 2, "incorrect": 2, "timeout": 1, "unparsable": 3},
        unparsable_answers=(),
    )  # fmt: skip


def test_every_number_of_the_second_benchmark(a):
    assert_is(
        a.sampled.benchmarks["beta"],
        n=3, k=3,
        avg_at_k=1 / 3, avg_at_k_interval=approx(share_bounds([[2 / 3, 1 / 3, 0]])),
        avg_at_k_stderr=1 / 3 / sqrt(3),  # 2/3, 1/3 and 0: variance (1/9 + 0 + 1/9) / 2
        pass_at_k=2 / 3, pass_at_k_interval=approx(share_bounds([[1, 1, 0]])),
        # 2 of 3 correct: 2/3, 1, 1. 1 of 3: 1/3, 2/3, 1. None: 0.
        pass_at_j=approx({"1": 1 / 3, "2": 5 / 9, "3": 2 / 3}),
        mean_tokens=35.0, mean_tokens_interval=by_t([[30, 20, 55]], np.inf, least=0),
        truncation_rate=2 / 9, unparsed_rate=1 / 9, mean_score=None,
        verdicts={"correct": 3, "incorrect": 4, "timeout": 1, "unparsable": 1},
        unparsable_answers=("1", "2"),
    )  # fmt: skip


def test_every_number_of_the_mean(a):
    assert_is(
        a.sampled.mean,
        benchmarks=("alpha", "beta"),
        avg_at_k=7 / 24, avg_at_k_interval=approx(share_bounds([[1 / 2, 0], [2 / 3, 1 / 3, 0]])),
        avg_at_k_stderr=sqrt(1 / 16 + 1 / 27) / 2,
        pass_at_k=7 / 12, pass_at_k_interval=approx(share_bounds([[1, 0], [1, 1, 0]])),
        pass_at_j=approx({"1": 7 / 24, "2": (5 / 12 + 5 / 9) / 2, "3": 7 / 12}),
        mean_tokens=(40 + 35) / 2,
        mean_tokens_interval=by_t([[30, 50], [30, 20, 55]], np.inf, least=0),
        truncation_rate=(1 / 2 + 2 / 9) / 2, unparsed_rate=(3 / 8 + 1 / 9) / 2, mean_score=None,
    )  # fmt: skip
    assert a.greedy_accuracies() == approx({"alpha": 1, "beta": 1 / 3, "mean": 2 / 3})


def test_the_mean_score_of_a_function_of_the_user(a):
    """Of eight, one of which has no score, because its function failed."""
    scores = pa.array([1, 1, 0.5, 0, None, 0, 0, 0.5] + [1] * 9, pa.float64())
    rows = table(A).set_column(SAMPLE_SCHEMA.names.index("score"), "score", scores)
    found, _ = summarise_both(rows, [])
    assert found.benchmarks["alpha"].mean_score == 3 / 8
    assert found.mean.mean_score == (3 / 8 + 1) / 2
    accuracy = accuracy_table(replace(a, sampled=found))
    (mean,) = (line for line in printed(accuracy) if line.startswith("mean "))
    assert mean.endswith(" 0.688")


def test_every_number_of_a_comparison(a, b):
    found = compare("A", a, "B", b)
    assert list(found) == ["alpha", "beta", "mean"]
    accuracy = {"alpha": [1 / 4, 1 / 2], "beta": [-1 / 6, 1 / 6, 1]}  # B - A of each problem
    tokens = {"alpha": [-10, 0], "beta": [-10, 21, -20]}
    assert_is(
        found["alpha"],
        accuracy_a=1 / 4, accuracy_b=5 / 8,
        difference=3 / 8, difference_interval=by_t([accuracy["alpha"]]),
        tokens_difference=-5.0, tokens_difference_interval=by_t([tokens["alpha"]], np.inf),
    )  # fmt: skip
    assert_is(
        found["beta"],
        accuracy_a=1 / 3, accuracy_b=2 / 3,
        difference=1 / 3, difference_interval=by_t([accuracy["beta"]]),
        tokens_difference=-3.0, tokens_difference_interval=by_t([tokens["beta"]], np.inf),
    )  # fmt: skip
    assert_is(
        found["mean"],
        accuracy_a=7 / 24, accuracy_b=31 / 48,
        difference=17 / 48, difference_interval=by_t(accuracy.values()),
        tokens_difference=-4.0, tokens_difference_interval=by_t(tokens.values(), np.inf),
    )  # fmt: skip


def test_the_mean_has_its_own_p_value():
    """The first benchmark is the same in both, and the second is all wrong in one."""
    one, other = ({"x": ["c1"] * 8, "y": [word] * 8} for word in ("i1", "c1"))
    found = compare("A", report(one), "B", report(other))
    assert found["mean"].p_value < 0.05 < found["x"].p_value


@pytest.mark.parametrize(
    ("key", "other"),
    [
        *(("temperature", 1.0), ("max_completion_length", 61), ("max_problems", 2)),
        *(("reward", "minerva"), ("user_template", "{x}=")),
    ],
)
def test_every_setting_that_affects_a_number_must_agree(a, key, other):
    changed = replace(a, settings={**SETTINGS, key: other})
    ours = SETTINGS[key]
    if key == "temperature":
        ours, other = (dict.fromkeys(A, each) for each in (ours, other))
    message = re.escape(f"A has {key} {ours!r}, but B {other!r}")
    with pytest.raises(EvaluationFileError, match=message):
        compare("A", a, "B", changed)
    with pytest.raises(EvaluationFileError, match=message):
        score_reports(("A", a), [("B", changed)])


def test_aes_and_its_intervals(a, b, capsys):
    """Each interval is by t over problems, of the ratio's derivative by what the problem has."""
    right_a, tokens_a, right_b, tokens_b = 7 / 24, 37.5, 31 / 48, 33.5
    length, accuracy = -4 / 33.5, -17 / 31  # 14/48 against 31/48
    of_length, of_accuracy, of_score = [], [], []
    for problems in PAIRS.values():
        columns = [
            (
                length - (t - tokens_a) / tokens_b + tokens_a * (t_b - tokens_b) / tokens_b**2,
                accuracy + (x - right_a) / right_b - right_a * (x_b - right_b) / right_b**2,
            )
            for x, t, x_b, t_b in problems
        ]
        of_length.append([each for each, _ in columns])
        of_accuracy.append([each for _, each in columns])
        of_score.append([one + 5 * other for one, other in columns])
    (found,) = score_reports(("B", b), [("A", a)])
    assert_is(
        found,
        name="A", accuracy=100 * 7 / 24, tokens=37.5,
        delta_length=length, delta_accuracy=accuracy, aes=length + 5 * accuracy,
        delta_length_interval=by_t(of_length, np.inf),
        delta_accuracy_interval=by_t(of_accuracy, np.inf),
        aes_interval=by_t(of_score, np.inf),
    )  # fmt: skip
    print_scores(point_of("B", b), [found], 3, 5, Console(width=120))
    assert "A 29.17 37.5 -0.119 -0.548 -2.861" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("word", "message"), [("i5", "accuracy 0"), ("c0", "0 tokens")])
def test_a_reference_of_zero_is_refused(word, message):
    zero = report({"x": [word, word]})
    with pytest.raises(UsageError, match=message):
        score_reports(("A", zero), [("B", zero)])


def test_the_numbers_are_on_the_terminal(a, b):
    lines = [line for found in (accuracy_table(a), length_table(a)) for line in printed(found)]
    assert "mean 29.2 [1.4, 76.1] 58.3 [9.4, 100.0] 66.7" in lines
    assert "mean 37.5 [13.2, 61.8] 36.1 24.3" in lines
    found = replace(compare("A", a, "B", b)["alpha"], p_value=0.125)
    lines = printed(comparison_table({"alpha": found}))
    assert "alpha 25.0 62.5 +37.5 [-100.0, 100.0] 0.125 -5.0 [-68.5, +58.5]" in lines
