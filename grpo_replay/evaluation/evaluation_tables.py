"""Evaluation results as tables; each fits in 80 columns."""

from collections.abc import Callable, Mapping

from grpo_replay.evaluation.comparison import PairedResult
from grpo_replay.evaluation.evaluation_report import EvaluationReport, temperatures_used
from grpo_replay.evaluation.statistics import BenchmarkResult, Interval, Numbers
from grpo_replay.terminal.text_table import TextTable


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def tokens(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def interval(bounds: Interval | None, write: Callable[[float], str]) -> str:
    return "–" if bounds is None else f"[{write(bounds[0])}, {write(bounds[1])}]"


def p_value(value: float) -> str:
    return "<.001" if value < 0.001 else f"{value:.3f}"


def heading(report: EvaluationReport) -> str:
    """Return one line on the model, and how it was sampled and graded."""
    model, settings = report.model, report.settings
    words = [str(model.get("name", "a model"))]
    temperatures = temperatures_used(settings, report.sampled.benchmarks)
    if "sha256" in model:
        words.append(f"sha256 {model['sha256'][:12]}…")
    words += [
        f"{model['dtype']} on {settings['backend']}" if "dtype" in model else settings["backend"],
        f"T {' and '.join(f'{t:g}' for t in temperatures)}, top-p {settings['top_p']:g}",
        f"at most {settings['max_completion_length']:,} tokens",
        f"ends at {' or '.join(settings['stop_tokens'])}",
        f"graded by {report.verifier.rpartition('/')[2]}",
    ]
    return " · ".join(words)


def comparison_table(results: Mapping[str, PairedResult]) -> TextTable:
    """Make the table of B against A: differences with 95 % intervals, and p-values."""
    header = ("benchmark", "A", "B", "B-A", "95 %", "p", "tokens", "95 %")
    *rows, mean = [
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
    title = "B against A, paired over problems"
    legend = (
        "accuracies and differences in %, with 95 % intervals over problems; p: two-sided, from "
        "sign flips over problems; tokens: B minus A."
    )
    return TextTable(header, rows, title, legend, totals=[mean])


def _titled(report: EvaluationReport) -> list[tuple[str, str, Numbers]]:
    """Returns (name, title, result) of every benchmark, and last of the mean."""
    described = report.settings["benchmarks"]
    benchmarks = [
        (name, described.get(name, {}).get("title", name), result)
        for name, result in report.sampled.benchmarks.items()
    ]
    return [*benchmarks, ("mean", "mean", report.sampled.mean)]


def accuracy_table(report: EvaluationReport) -> TextTable:
    """Make the table of avg@k and pass@k, with greedy accuracy and mean score if there are any."""
    header = ("benchmark", "n", "k", "avg@k", "95 %", "pass@k", "95 %")
    greedy = report.greedy_accuracies()
    has_score = report.sampled.mean.mean_score is not None
    *rows, mean = [
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
    optional = (*(("greedy",) if greedy else ()), *(("score",) if has_score else ()))
    score = "; score: the mean that a function of the user gave" if has_score else ""
    legend = f"in %; 95 %: intervals over problems{score}"
    return TextTable((*header, *optional), rows, "accuracy", legend, totals=[mean])


def length_table(report: EvaluationReport) -> TextTable:
    """Make the table of completion lengths, truncated and unparsed completions."""
    *rows, mean = [
        (
            title,
            tokens(r.mean_tokens),
            interval(r.mean_tokens_interval, tokens),
            *(percent(r.truncation_rate), percent(r.unparsed_rate)),
        )
        for _, title, r in _titled(report)
    ]
    header = ("benchmark", "tokens", "95 %", "cut", "none")
    legend = (
        "tokens: mean completion length, 95 % intervals over problems; cut: % that reached the "
        "length limit; none: % without an answer that could be parsed"
    )
    return TextTable(header, rows, "length", legend, totals=[mean])
