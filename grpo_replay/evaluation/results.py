"""The numbers of an evaluation report. Their bounds are checked when a file is read."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Length = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bound = Annotated[float, Field(allow_inf_nan=False)]
Interval = tuple[Bound, Bound]


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """One benchmark of n problems with k samples each. Accuracies and rates are fractions.

    Intervals are 95 % intervals over problems, of tokens by the bootstrap; the standard error is
    that of the mean over problems (all None if n = 1). Lengths are completion tokens; those of
    correct and of incorrect completions are pooled over samples (None if there are none).
    `unparsable_answers` has the ids of problems whose reference answer math-verify could not parse.
    """

    n: Count
    k: Count
    avg_at_k: Fraction
    avg_at_k_stderr: Length | None
    avg_at_k_interval: Interval | None
    pass_at_k: Fraction
    pass_at_k_interval: Interval | None
    pass_at_j: dict[str, Fraction]
    mean_tokens: Length
    mean_tokens_interval: Interval | None
    mean_tokens_correct: Length | None
    mean_tokens_incorrect: Length | None
    truncation_rate: Fraction
    unparsed_rate: Fraction
    verdicts: dict[str, Whole]
    unparsable_answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeanResult:
    """The unweighted mean over benchmarks.

    Lengths of correct and of incorrect completions are pooled over all samples. `pass_at_j` ends at
    the smallest k; `pass_at_k` averages each benchmark's pass@k at its own k.
    """

    benchmarks: tuple[str, ...]
    avg_at_k: Fraction
    avg_at_k_stderr: Length | None
    avg_at_k_interval: Interval | None
    pass_at_k: Fraction
    pass_at_k_interval: Interval | None
    pass_at_j: dict[str, Fraction]
    mean_tokens: Length
    mean_tokens_interval: Interval | None
    mean_tokens_correct: Length | None
    mean_tokens_incorrect: Length | None
    truncation_rate: Fraction
    unparsed_rate: Fraction


@dataclass(frozen=True, slots=True)
class Results:
    """All benchmarks, either sampled or greedy, and their mean."""

    benchmarks: dict[str, BenchmarkResult]
    mean: MeanResult

    def accuracies(self) -> dict[str, float]:
        """avg@k of every benchmark, and `mean`."""
        each = {name: result.avg_at_k for name, result in self.benchmarks.items()}
        return {**each, "mean": self.mean.avg_at_k}

    def standard_errors(self) -> dict[str, float | None]:
        """Standard errors of `accuracies`."""
        each = {name: result.avg_at_k_stderr for name, result in self.benchmarks.items()}
        return {**each, "mean": self.mean.avg_at_k_stderr}


@dataclass(frozen=True, slots=True)
class OtherGrading:
    """The completions of a report, graded by a verifier other than its own.

    `gained` counts, by benchmark, the sampled (not greedy) completions that only this verifier
    accepts, and `lost` those that only the report's own accepts. `versions` are those of the
    grading packages.
    """

    sampled: Results
    greedy: Results | None
    gained: dict[str, Whole]
    lost: dict[str, Whole]
    versions: dict[str, str]
