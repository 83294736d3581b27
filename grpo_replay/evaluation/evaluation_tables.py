"""Evaluation results as terminal tables."""

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from grpo_replay.evaluation.comparison import PairedResult
from grpo_replay.evaluation.evaluation_report import EvaluationReport, temperatures_used
from grpo_replay.evaluation.statistics import BenchmarkResult, Interval, Numbers
from grpo_replay.terminal.console import plain_table

Row = Sequence[str]
LEGEND = (
    "avg@k, pass@k and rates in %; 95 %: intervals over problems; tokens: mean completion length; "
    "cut: reached the length limit; none: no answer could be parsed; score: the mean that a "
    "function of the user gave."
)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def tokens(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def interval(bounds: Interval | None, written: Callable[[float], str]) -> str:
    return "–" if bounds is None else f"[{written(bounds[0])}, {written(bounds[1])}]"


def p_value(value: float) -> str:
    return "<.001" if value < 0.001 else f"{value:.3f}"


def heading(report: EvaluationReport) -> str:
    """One line on the model and how it was sampled."""
    model, settings = report.model, report.settings
    words = [str(model.get("name", "a model"))]
    temperatures = temperatures_used(settings, report.sampled.benchmarks)
    if "sha256" in model:
        words.append(f"sha256 {model['sha256'][:12]}…")
    words += [
        f"{model['dtype']} on {settings['backend']}" if "dtype" in model else settings["backend"],
        f"T {' and '.join(f'{each:g}' for each in temperatures)}, top-p {settings['top_p']:g}",
        f"at most {settings['max_completion_length']:,} tokens",
        f"ends at {' or '.join(settings['stop_tokens'])}",
        f"graded by {report.verifier.rpartition('/')[2]}",
    ]
    return " · ".join(words)


def terminal_tables(report: EvaluationReport) -> list[Table]:
    """Accuracy and length; each fits in 80 columns."""
    return [
        plain_table("accuracy", *_accuracy_rows(report)),
        plain_table("length", *_length_rows(report)),
    ]


def comparison_table(results: Mapping[str, PairedResult]) -> Table:
    """B against A: differences with 95 % intervals, and p-values."""
    header = ("benchmark", "A", "B", "B-A", "95 %", "p", "tokens", "95 %")
    rows = [
        (
            name,
            percent(result.accuracy_a),
            percent(result.accuracy_b),
            f"{100 * result.difference:+.1f}",
            interval(result.difference_interval, percent),
            p_value(result.p_value),
            f"{result.tokens_difference:+,.1f}",
            interval(result.tokens_difference_interval, "{:+,.1f}".format),
        )
        for name, result in results.items()
    ]
    return plain_table("B against A, paired over problems", header, rows)


COMPARISON_LEGEND = (
    "accuracies and differences in %, with 95 % intervals over problems; p: two-sided, from "
    "sign flips over problems; tokens: B minus A."
)


def _titled(report: EvaluationReport) -> list[tuple[str, str, Numbers]]:
    """(name, title, result) of every benchmark and of the mean."""
    described = report.settings["benchmarks"]
    each = [
        (name, described.get(name, {}).get("title", name), result)
        for name, result in report.sampled.benchmarks.items()
    ]
    return [*each, ("mean", "mean", report.sampled.mean)]


def _accuracy_rows(report: EvaluationReport) -> tuple[Row, list[Row]]:
    header = ("benchmark", "n", "k", "avg@k", "95 %", "pass@k", "95 %")
    greedy = report.greedy_accuracies()
    has_score = report.sampled.mean.mean_score is not None
    rows: list[Row] = [
        (
            title,
            *((str(r.n), str(r.k)) if isinstance(r, BenchmarkResult) else ("", "")),
            *(percent(r.avg_at_k), interval(r.avg_at_k_interval, percent)),
            *(percent(r.pass_at_k), interval(r.pass_at_k_interval, percent)),
            *((percent(greedy[name]),) if greedy else ()),
            *(("–" if r.mean_score is None else f"{r.mean_score:.3f}",) if has_score else ()),
        )
        for name, title, r in _titled(report)
    ]
    beside = (*(("greedy",) if greedy else ()), *(("score",) if has_score else ()))
    return (*header, *beside), rows


def _length_rows(report: EvaluationReport) -> tuple[Row, list[Row]]:
    header = ("benchmark", "tokens", "95 %", "cut", "none")
    rows: list[Row] = [
        (
            title,
            tokens(r.mean_tokens),
            interval(r.mean_tokens_interval, tokens),
            *(percent(r.truncation_rate), percent(r.unparsed_rate)),
        )
        for _, title, r in _titled(report)
    ]
    return header, rows


def markdown_table(header: Row, rows: Sequence[Row]) -> list[str]:
    """The lines of a table: first column left-aligned, others right-aligned."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return [line(header), line(["---", *["---:"] * (len(header) - 1)]), *map(line, rows)]
