"""AES, the accuracy-efficiency score of a model against a reference (paper A, section 5).

    AES = ΔL + β·ΔAcc     ΔL = (L_ref - L) / L_ref     ΔAcc = (Acc - Acc_ref) / Acc_ref

L is the mean response length in tokens; β is `gain` (3) if ΔAcc ≥ 0, else `loss` (5). Other papers
use other constants, so the constants are always printed. Each call has one reference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_replay.errors import UsageError
from grpo_replay.evaluation.comparison import pairs_of
from grpo_replay.evaluation.evaluation_report import EvaluationReport, refuse_incomparable
from grpo_replay.evaluation.statistics import Interval, difference_interval

GAIN, LOSS = 3.0, 5.0


@dataclass(frozen=True, slots=True)
class Point:
    """The mean accuracy and mean tokens of a model; all points must share one accuracy unit."""

    name: str
    accuracy: float
    tokens: float


@dataclass(frozen=True, slots=True)
class AesScore:
    """ΔL, ΔAcc and AES of a candidate.

    Intervals are 95 % intervals over problems; None without per-sample data, or for one problem.
    """

    name: str
    accuracy: float
    tokens: float
    delta_length: float
    delta_accuracy: float
    aes: float
    delta_length_interval: Interval | None = None
    delta_accuracy_interval: Interval | None = None
    aes_interval: Interval | None = None


def accuracy_efficiency_score(
    accuracy: float,
    tokens: float,
    reference_accuracy: float,
    reference_tokens: float,
    gain: float = GAIN,
    loss: float = LOSS,
) -> tuple[float, float, float]:
    """Compute (ΔL, ΔAcc, AES) of mean accuracies in one unit, and mean tokens. Raises
    ZeroDivisionError for a reference of accuracy or length 0.

    Example: paper A's 4B base (17.36 %, 2452 tokens) against its GRPO run (26.71 %, 7576 tokens)
    has ΔL = (2452 - 7576)/2452 = -2.090, ΔAcc = 0.539 and AES = -2.090 + 3·0.539 = -0.474.
    """
    delta_length = (reference_tokens - tokens) / reference_tokens
    delta_accuracy = (accuracy - reference_accuracy) / reference_accuracy
    weight = gain if delta_accuracy >= 0 else loss
    return delta_length, delta_accuracy, delta_length + weight * delta_accuracy


def score_points(
    reference: Point, candidates: Sequence[Point], gain: float = GAIN, loss: float = LOSS
) -> list[AesScore]:
    """AES of plain numbers. Raises UsageError for a reference of accuracy or length 0."""
    return [_score(reference, candidate, gain, loss) for candidate in candidates]


def score_reports(
    reference: tuple[str, EvaluationReport],
    candidates: Sequence[tuple[str, EvaluationReport]],
    gain: float = GAIN,
    loss: float = LOSS,
) -> list[AesScore]:
    """Compute the accuracy-efficiency score (AES) of (name, report) pairs against the reference,
    with intervals where both have per-sample rows.

    Raises EvaluationFileError unless all evaluate the same benchmarks under the same settings, and
    UsageError for a reference of accuracy or length 0.
    """
    for candidate in candidates:
        refuse_incomparable(*reference, *candidate)
    return [_score_report(reference, candidate, gain, loss) for candidate in candidates]


def point_of(name: str, report: EvaluationReport) -> Point:
    """Accuracy in percent and tokens: unweighted means over the report's benchmarks."""
    return Point(name, 100 * report.sampled.mean.avg_at_k, report.sampled.mean.mean_tokens)


def _score(reference: Point, candidate: Point, gain: float, loss: float) -> AesScore:
    """Scores a candidate, without intervals. Raises UsageError for a reference with a 0."""
    measured = (candidate.accuracy, candidate.tokens)
    reference_values = (reference.accuracy, reference.tokens)
    if not all(reference_values):
        raise UsageError(
            f"the reference {reference.name!r} has accuracy {reference.accuracy:g} and "
            f"{reference.tokens:g} tokens, and AES divides by them: choose one where neither is 0"
        )
    scores = accuracy_efficiency_score(*measured, *reference_values, gain, loss)
    return AesScore(candidate.name, *measured, *scores)


def _score_report(
    reference: tuple[str, EvaluationReport],
    candidate: tuple[str, EvaluationReport],
    gain: float,
    loss: float,
) -> AesScore:
    """Scores two reports, with intervals of the three ratios. These are linearised around the
    means: a ratio r = x/y varies as (x_p - r·y_p) / y does over problems p."""
    plain = _score(point_of(*reference), point_of(*candidate), gain, loss)
    reference_mean = reference[1].sampled.mean
    if reference[1].samples is None or candidate[1].samples is None:
        return plain
    length_ratio, accuracy_ratio = 1 - plain.delta_length, 1 + plain.delta_accuracy
    weight = gain if plain.delta_accuracy >= 0 else loss
    lengths, accuracies, scores = [], [], []
    for pair in pairs_of(reference[1], candidate[1]):
        tokens_N = length_ratio * pair.a.tokens_N - pair.b.tokens_N
        tokens_N = tokens_N / reference_mean.mean_tokens
        accuracy_N = pair.b.accuracy_N - accuracy_ratio * pair.a.accuracy_N
        accuracy_N = accuracy_N / reference_mean.avg_at_k
        lengths.append(plain.delta_length + tokens_N)
        accuracies.append(plain.delta_accuracy + accuracy_N)
        scores.append(plain.aes + tokens_N + weight * accuracy_N)
    return replace(
        plain,
        delta_length_interval=difference_interval(lengths, bound=math.inf),
        delta_accuracy_interval=difference_interval(accuracies, bound=math.inf),
        aes_interval=difference_interval(scores, bound=math.inf),
    )
