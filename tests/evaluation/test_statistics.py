"""avg@k, pass@j, intervals and the paired test: by hand, by enumeration, and against scipy."""

import math
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats
from share_bounds import share_bounds

from grpo_replay.errors import EvaluationFileError
from grpo_replay.evaluation.comparison import compare
from grpo_replay.evaluation.evaluation_report import SAMPLE_SCHEMA, EvaluationReport
from grpo_replay.evaluation.statistics import (
    accuracy_interval,
    difference_interval,
    pass_at_each,
    sign_flip_p_value,
    standard_error,
    summarise,
)

SETTINGS = {
    **{"benchmarks": {}, "backend": "hf", "reward": "math_verify"},
    **{"temperature": 1.0, "top_p": 1.0, "max_completion_length": 60, "stop_tokens": ["<eos>"]},
}


def samples(benchmarks: dict[str, list[list[int]]], tokens=lambda correct: 10, ids=str) -> pa.Table:
    """Rows of benchmarks given as lists of problems given as lists of 0 (wrong) and 1."""
    rows = [
        {
            **{"benchmark": name, "problem_index": index, "problem_id": ids(index)},
            **{"greedy": False, "sample": sample, "seed": 0, "answer": "", "completion_text": ""},
            **{"tokens": tokens(correct), "finish_reason": "stop" if correct else "length"},
            **{"verdict": "correct" if correct else "unparsable", "correct": bool(correct)},
        }
        for name, problems in benchmarks.items()
        for index, problem in enumerate(problems)
        for sample, correct in enumerate(problem)
    ]
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


def report(
    benchmarks: dict[str, list[list[int]]], settings=SETTINGS, **options
) -> EvaluationReport:
    rows = samples(benchmarks, **options)
    results = summarise(rows, ())
    name_of = options.get("ids", str)
    described = {
        name: {"problems_sha256": " ".join(map(name_of, range(len(problems))))}
        for name, problems in benchmarks.items()
    }
    settings = {**settings, "benchmarks": described | settings["benchmarks"]}
    return EvaluationReport({}, settings, {}, results, samples=rows)


def test_pass_at_j_is_the_fraction_of_draws_with_a_correct_sample():
    for n in range(1, 7):
        for c in range(n + 1):
            for j in range(1, n + 1):
                draws = list(combinations([1] * c + [0] * (n - c), j))
                found = pass_at_each(np.array([c]), n)[0, j - 1]
                assert found == pytest.approx(np.mean([any(d) for d in draws]))


def test_pass_at_j_by_hand():
    # 2 of 4 correct: a pair misses both in 1 of 6 ways; three cannot miss both.
    assert pass_at_each(np.array([2, 0]), 4).tolist() == [
        pytest.approx([1 / 2, 5 / 6, 1, 1]),
        [0, 0, 0, 0],
    ]
    for bad in (3, -1):
        with pytest.raises(ValueError, match="pass@j of"):
            pass_at_each(np.array([bad]), 2)


def test_undefined_is_none():
    found = report({"a": [[1, 1]]}).sampled
    assert found.benchmarks["a"].avg_at_k_stderr is None
    assert found.mean.avg_at_k_stderr is None
    assert standard_error(np.array([0.5])) is None


@pytest.mark.parametrize("mean", [0.01, 0.5])
def test_intervals_of_accuracies_have_at_least_their_nominal_coverage(mean):
    """30 problems of 16 samples, most hopeless or easy: a bootstrap holds 0.01 in 52 %."""
    rng = np.random.default_rng(0)
    chances = rng.beta(mean, 1 - mean, size=(400, 30))
    bounds = [accuracy_interval([each / 16]) for each in rng.binomial(16, chances)]
    assert all(0 <= low <= high <= 1 for low, high in bounds)
    assert np.mean([low <= mean <= high for low, high in bounds]) > 0.94


def test_the_paired_p_value_agrees_with_the_t_test_where_the_t_test_is_valid():
    rng = np.random.default_rng(3)
    shared = rng.beta(2, 2, size=200)
    a = rng.binomial(8, shared)
    b = rng.binomial(8, np.clip(shared + 0.02, 0, 1))
    as_samples = lambda counts: [[1] * c + [0] * (8 - c) for c in counts]  # noqa: E731
    found = compare("a", report({"x": as_samples(a)}), "b", report({"x": as_samples(b)}))["mean"]
    expected = stats.ttest_rel(b / 8, a / 8)
    assert found.difference == pytest.approx(np.mean(b - a) / 8)
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.02)
    low, high = expected.confidence_interval(0.95)
    assert found.difference_interval == pytest.approx((low, high), rel=1e-9)


def test_the_interval_of_a_mean_over_benchmarks_has_welch_s_degrees_of_freedom():
    """Satterthwaite's for two independent means are those of Welch's test, whose interval is of the
    difference of the two: twice that of their mean, if the sign of one is turned."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.1, 0.2, 6), rng.normal(0.2, 0.5, 11)
    low, high = stats.ttest_ind(x, -y, equal_var=False).confidence_interval(0.95)
    assert difference_interval([x, y]) == pytest.approx((low / 2, high / 2), rel=1e-9)
    assert difference_interval([4 * x - 9.0], bound=np.inf)[1] < -1  # tokens, not accuracies
    assert difference_interval([x, y[:1]]) is None


@pytest.mark.parametrize("problems", [5])
def test_intervals_of_differences_have_their_nominal_coverage(problems):
    """Of B - A = 0.1 on every problem; a bootstrap over five problems holds it in 82 %."""
    rng = np.random.default_rng(problems)
    held = 0
    for _ in range(1000):
        chances = rng.beta(2, 2, size=problems) * 0.9
        a, b = (rng.binomial(8, chances + shift) / 8 for shift in (0, 0.1))
        low, high = difference_interval([b - a])
        held += low <= 0.1 <= high
    assert 930 < held < 975


def test_equal_problems_leave_an_interval_of_the_rule_of_three():
    """200 problems without a difference, and two more at -1 and 1: a variance of 2/201, over 202
    problems; ± 1.4 points. That no problem in 200 differs excludes 3/200."""
    half = stats.t.ppf(0.975, 201) * np.sqrt(2 / 201 / 202)
    assert difference_interval([np.zeros(200)]) == pytest.approx((-half, half))
    assert 0.0138 < half < 3 / 200
    assert difference_interval([np.full(4, 7.0)], bound=np.inf) == (7, 7)  # tokens


def test_a_benchmark_without_a_difference_is_not_known_exactly_in_the_mean_either():
    """Of 30 zeros with -1 and 1 the mean has the variance 2/31/32, next to which that of 500
    differences of ±0.1 hardly counts: half of t·√(2/31/32)."""
    many, none = np.tile([0.1, -0.1], 250), np.zeros(30)
    low, high = difference_interval([many, none])
    alone = difference_interval([none])[1]
    assert alone == pytest.approx(stats.t.ppf(0.975, 31) * math.sqrt(2 / 31 / 32))
    assert high == -low == pytest.approx(alone / 2, rel=0.02)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([1.0], 1.0),  # one problem says nothing: + and - are as large
        ([0.5, 0.5, 0.5], 2 / 8),
        ([1.0, -0.5], 4 / 4),
        ([0.25] * 8 + [0.0] * 22, 2 / 2**8),  # problems that are equal change nothing
        ([3.0, 1.0, -1.0], 6 / 8),  # at least 3/3: 5, 3 and 3, and their mirror images
    ],
)
def test_sign_flips_by_hand(differences, expected):
    found = sign_flip_p_value([np.array(differences)], 256, np.random.default_rng(0))
    assert found == pytest.approx(expected)


def test_random_sign_flips_count_the_observed_one():
    """Forty equal differences: of 99 random flips none is as large, so p is (1 + 0) / (1 + 99)."""
    assert sign_flip_p_value([np.ones(40)], 99, np.random.default_rng(0)) == 1 / 100
    equal = np.array([1, 1, 1, 2, 2, 2]) / 3 - np.array([0, 0, 0, 1, 1, 1])  # adds up to -2e-16
    assert sign_flip_p_value([equal], 256, np.random.default_rng(0)) == 1.0


def test_sign_flips_of_the_mean_weight_benchmarks_equally():
    """Means 1 of one problem and 1/4, 1/4 of two: shares 1, 1/8, 1/8 (times 1/2). Of the eight
    signings only +++ and --- reach 5/4."""
    differences = [np.array([1.0]), np.array([0.25, 0.25])]
    assert sign_flip_p_value(differences, 100, np.random.default_rng(0)) == 2 / 8
    # Means 1 and -1 add up to 0, which all signings reach. Of four problems that count alike, one
    # gained and three lost, ten of sixteen would.
    differences = [np.array([1.0]), np.array([-1.0, -1.0, -1.0])]
    assert sign_flip_p_value(differences, 100, np.random.default_rng(0)) == 1.0


@pytest.mark.parametrize(("problems", "samples"), [(30, 16)])
def test_p_values_between_equal_models_are_rarely_small(problems, samples):
    """Few problems of very different difficulty, as in AIME: at most 5 % below 0.05."""
    rng = np.random.default_rng(7)
    p = []
    for _ in range(400):
        difficulty = rng.beta(0.4, 1.2, size=problems)
        a, b = (rng.binomial(samples, difficulty) / samples for _ in range(2))
        p.append(sign_flip_p_value([b - a], 400, rng))
    small = np.mean(np.array(p) < 0.05)
    assert small < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)
    assert small > 0.01


def test_none_of_thirty_problems_solved_leaves_a_tenth_possible():
    """31 zeros and a one: mean 1/32, of variance 1/32². A bootstrap has [0, 0]."""
    high = (1 + stats.t.ppf(0.975, 31)) / 32  # 9.5 %
    assert accuracy_interval([np.zeros(30)]) == pytest.approx((0, high))
    assert accuracy_interval([np.ones(30)]) == pytest.approx((1 - high, 1))
    assert accuracy_interval([np.zeros(30), np.ones(9)]) == pytest.approx(
        share_bounds([[0] * 30, [1] * 9])
    )


@pytest.mark.parametrize("solved", [0.0, 1.0])
def test_the_interval_of_an_accuracy_has_the_accuracy_in_it(solved):
    """Five benchmarks of four problems, all solved or none: of 20 problems five more are lost and
    five won, so that the mean with them, and the interval around it, is away from the end."""
    low, high = accuracy_interval([np.full(4, solved)] * 5)
    lower, upper = share_bounds([[solved] * 4] * 5)
    assert lower > 0.0 if solved == 0.0 else upper < 1.0  # without the accuracy itself
    assert (low, high) == pytest.approx((min(lower, solved), max(upper, solved)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (report({"y": [[1], [0]]}), "means over different benchmarks"),
        (
            report({"x": [[1], [0]]}, ids=lambda i: f"p{i}"),
            "x has other problems or answers in a",
        ),
        (
            report({"x": [[1], [0]]}, {**SETTINGS, "temperature": 0.6}),
            "temperature {'x': 1.0}, but b {'x': 0.6}",
        ),
    ],
)
def test_incomparable_evaluations_are_refused(other, message):
    with pytest.raises(EvaluationFileError, match=message):
        compare("a", report({"x": [[1], [0]]}), "b", other)
