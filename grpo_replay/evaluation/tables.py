"""Evaluation results as text: a terminal table and Markdown, with the same columns."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from grpo_replay.evaluation.comparison import PairedResult
from grpo_replay.evaluation.report import (
    BenchmarkResult,
    EvaluationReport,
    Interval,
    MeanResult,
    Results,
)

Row = Sequence[str]
LEGEND = (
    "avg@k and pass@k in %, with the 95 % bootstrap interval over problems; mean completion "
    "tokens overall, of correct and of wrong answers; cut: truncated, none: no answer found, in %."
)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def percent_interval(bounds: Interval) -> str:
    return f"[{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def tokens(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def terminal_tables(report: EvaluationReport) -> list[Table]:
    """The table of results, and that of pass@j if there is more than one sample."""
    tables = [_table("", _header(report), _rows(report))]
    if any(result.k > 1 for result in report.sampled.benchmarks.values()):
        header, rows = _pass_rows(report.sampled)
        tables.append(_table("pass@j, %", header, rows))
    return tables


def comparison_table(results: Mapping[str, PairedResult]) -> Table:
    """B against A: differences in points with 95 % intervals, p-values, and what flipped."""
    header = ("benchmark", "A", "B", "B - A", "95 %", "p", "tokens", "better", "worse")
    rows = [
        (
            name,
            percent(result.accuracy_a),
            percent(result.accuracy_b),
            f"{100 * result.difference:+.1f}",
            percent_interval(result.difference_interval),
            f"{result.p_value:.3f}",
            f"{result.tokens_difference:+,.1f}",
            f"{result.problems_better}",
            f"{result.problems_worse}",
            f"{result.correct_to_wrong}",
            f"{result.wrong_to_correct}",
        )
        for name, result in results.items()
    ]
    title = "paired over problems; accuracies and differences in %"
    return _table(title, (*header, "right→wrong", "wrong→right"), rows)


def markdown(report: EvaluationReport) -> str:
    """The report as a Markdown page."""
    settings, model = report.settings, report.model
    lines = [
        f"# Evaluation of {model.get('name', 'a model')}",
        "",
        *_markdown_table(_header(report), _rows(report)),
        "",
        LEGEND,
        "",
        "## pass@j, %",
        "",
        *_markdown_table(*_pass_rows(report.sampled)),
        "",
        "## Settings",
        "",
        *(f"- {key}: `{value}`" for key, value in settings.items() if key != "benchmarks"),
        *(
            f"- {name}: {each['source']}, split {each['split']}, seeds {each['seeds']}"
            for name, each in settings["benchmarks"].items()
        ),
        *(f"- model {key}: `{value}`" for key, value in model.items()),
        *(f"- {package} {number}" for package, number in report.versions.items()),
        *_unparsable(report.sampled),
    ]
    return "\n".join(lines) + "\n"


def _unparsable(results: Results) -> list[str]:
    return [
        f"- {name}: math-verify cannot parse the reference answer of {', '.join(bad)}"
        for name, result in results.benchmarks.items()
        if (bad := result.unparsable_answers)
    ]


def _header(report: EvaluationReport) -> Row:
    header = ("benchmark", "n", "k", "avg@k", "95 %", "pass@k", "tokens", "correct", "wrong")
    return (*header, "cut", "none", *(("greedy",) if report.greedy else ()))


def _rows(report: EvaluationReport) -> list[Row]:
    rows = []
    for name, result in report.sampled.benchmarks.items():
        title = report.settings["benchmarks"].get(name, {}).get("title", name)
        greedy = report.greedy.benchmarks[name] if report.greedy else None
        rows.append((title, str(result.n), str(result.k), *_numbers(result), *_greedy(greedy)))
    greedy_mean = report.greedy.mean if report.greedy else None
    mean = ("mean", "", "", *_numbers(report.sampled.mean), *_greedy(greedy_mean))
    return [*rows, mean]


def _numbers(result: BenchmarkResult | MeanResult) -> Row:
    return (
        percent(result.avg_at_k),
        percent_interval(result.avg_at_k_interval),
        percent(result.pass_at_k),
        tokens(result.mean_tokens),
        tokens(result.mean_tokens_correct),
        tokens(result.mean_tokens_incorrect),
        percent(result.truncation_rate),
        percent(result.unparsed_rate),
    )


def _greedy(result: BenchmarkResult | MeanResult | None) -> Row:
    return () if result is None else (percent(result.avg_at_k),)


def _pass_rows(results: Results) -> tuple[Row, list[Row]]:
    largest = max(result.k for result in results.benchmarks.values())
    shown = [j for j in range(1, largest + 1) if j & (j - 1) == 0 or j == largest]
    value: Callable[[BenchmarkResult, int], str] = lambda result, j: percent(  # noqa: E731
        result.pass_at_j.get(str(j))
    )
    rows = [
        (name, *(value(result, j) for j in shown)) for name, result in results.benchmarks.items()
    ]
    return ("benchmark", *(f"j={j}" for j in shown)), rows


def _table(title: str, header: Row, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(header):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == "mean" else None)
    return table


def _markdown_table(header: Row, rows: Sequence[Row]) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return f"| {' | '.join(cells)} |"

    return [line(header), line(["---", *["---:"] * (len(header) - 1)]), *map(line, rows)]
