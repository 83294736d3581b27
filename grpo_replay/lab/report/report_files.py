"""Views of the document of `measure`: verdict, table, facts and warnings, the same in the terminal,
Markdown and HTML; and the files of a report."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_replay.errors import OutputDirectoryError
from grpo_replay.evaluation.evaluation_tables import interval, percent
from grpo_replay.lab.report.collect import Experiment
from grpo_replay.lab.report.costs import usable_axes
from grpo_replay.lab.report.measure import Document, shown_target, shown_title
from grpo_replay.lab.report.report_figures import Figure, drawn, report_figures
from grpo_replay.lab.report.two_level import FEWEST_SEEDS
from grpo_replay.storage.atomic import json_values, named_if_unwritable, write_text_whole
from grpo_replay.terminal.html_page import render_page
from grpo_replay.terminal.plot_style import save_figure, svg_element, svg_text
from grpo_replay.terminal.text_table import TextTable

JSON_FILE = "report.json"
MISSING = "–"


def verdict(document: Document) -> str:
    """Say in a sentence: are arms ahead of the baseline, at equal rollouts and equal cost, and how
    many seeds would decide? An arm is ahead or behind if 0 is outside its difference's interval."""
    compared = [arm for arm in document["arms"] if arm["difference"] is not None]
    if not compared:
        return f"nothing to compare: no other arm has a seed of {document['baseline']}"
    if len(compared) == 1:
        return _verdict_on(compared[0], document)
    sentences = []
    for condition, difference_of in (
        (_equal_final(document), _final_difference), (_equal_cost(document), _cost_difference)
    ):  # fmt: skip
        names_by_standing: dict[str, list[str]] = {}
        for arm in compared:
            if difference := difference_of(arm, document):
                names_by_standing.setdefault(_standing(difference), []).append(arm["name"])
        listed = (f"{', '.join(names)} {word}" for word, names in sorted(names_by_standing.items()))
        sentences += [f"{condition}: {', '.join(listed)}"] if names_by_standing else []
    fewest = min(len(arm["seeds"]) for arm in compared)
    few = f"; fewer than {FEWEST_SEEDS} seeds cannot tell" if fewest < FEWEST_SEEDS else ""
    return f"against {document['baseline']}, {'; '.join(sentences)}{few}"


def _verdict_on(arm: Document, document: Document) -> str:
    """Returns the verdict on one arm, such as `undecided: ours against grpo, 2 seeds, +1.0 points
    at equal rollouts, -0.5 at equal compute; about 9 seeds would tell`."""
    final, at_cost = _final_difference(arm, document), _cost_difference(arm, document)
    word, numbers = _standing(final), f"{_with_interval(final)} points {_equal_final(document)}"
    if at_cost is not None:
        numbers += f", {_with_interval(at_cost)} {_equal_cost(document)}"
        if _standing(at_cost) != word:
            word = f"{word} {_equal_final(document)}, {_standing(at_cost)} {_equal_cost(document)}"
    count = len(final["seeds"])
    seeds = f"{count} {'seed' if count == 1 else 'seeds'}"
    subject = f"{arm['name']} against {document['baseline']}, {seeds}"
    return f"{word}: {subject}, {numbers}{_more_seeds(final)}"


def _more_seeds(final: Document) -> str:
    """Returns the end of a verdict that is undecided: how many seeds would tell."""
    needed = final["seeds_to_tell"]
    if _standing(final) != "undecided":
        return ""
    if needed is None:
        return "; one seed says nothing of others"
    if math.isinf(needed):
        return "; more seeds alone would not tell"
    return f"; about {needed} seeds would tell"


def _with_interval(difference: Document) -> str:
    parts = [f"{100 * difference['mean']:+.1f}"]
    if difference["interval"] is not None:
        bounds = (100 * bound for bound in difference["interval"])
        parts.append("[{:+.1f}, {:+.1f}]".format(*bounds))
    return " ".join(parts)


def _standing(difference: Document) -> str:
    low, high = difference["interval"] or (0, 0)
    return "ahead" if low > 0 else "behind" if high < 0 else "undecided"


def _equal_final(document: Document) -> str:
    return "at equal rollouts" if document["equal_rollouts"] else "after the last step"


def _main_cost(document: Document) -> str:
    return "compute" if document["main_axis"].startswith("compute") else "tokens"


def _equal_cost(document: Document) -> str:
    return f"at equal {_main_cost(document)}"


def _final_difference(arm: Document, document: Document) -> Any:
    return arm["difference"] and arm["difference"][document["shown"]["benchmark"]]


def _cost_difference(arm: Document, document: Document) -> Any:
    at = arm["equal_cost"].get(document["main_axis"])
    return at and at["difference"][document["shown"]["benchmark"]]


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the report's table: its cell for an arm, and the sentence that explains it."""

    cell: Callable[[Document], str]
    legend: str = ""


def report_table(document: Document) -> TextTable:
    """Make the report's table, a row per arm; columns empty for all arms are left out."""
    points = "Differences are in points, paired."
    columns = {
        "seeds": _Column(seeds_of),
        "final, %": _Column(
            lambda arm: _final_cell(arm, document),
            f"Final: {shown_title(document)}, after the last step.",
        ),
        _difference_heading(document, _equal_final(document)): _Column(
            lambda arm: _points_cell(_final_difference(arm, document)), points
        ),
        _difference_heading(document, _equal_cost(document)): _Column(
            lambda arm: _points_cell(_cost_difference(arm, document)), points
        ),
        f"{_main_cost(document)} to\n{percent(shown_target(document) or 0.0)} %": _Column(
            lambda arm: _reach_cell(arm, document), _reach_legend(document)
        ),
        f"pays at μ{_measured_mu(document)}": _Column(
            _break_even_cell, _break_even_legend(document)
        ),
    }
    cells = {
        header: [column.cell(arm) for arm in document["arms"]] for header, column in columns.items()
    }
    shown = {header: values for header, values in cells.items() if set(values) - {MISSING}}
    legend = [columns[header].legend for header in shown if columns[header].legend]
    if any("[" in cell for column in shown.values() for cell in column):
        legend.append(
            f"In brackets: 95 % intervals over seeds and problems, from {FEWEST_SEEDS} seeds on."
        )
    names = [arm["name"] for arm in document["arms"]]
    rows = list(zip(names, *shown.values()))
    return TextTable(("arm", *shown), rows, legend=" ".join(dict.fromkeys(legend)))


def _difference_heading(document: Document, condition: str) -> str:
    """Returns the heading of a column of differences, on two lines."""
    word, rest = condition.split(" ", 1)
    return f"− {document['baseline']} {word}\n{rest}"


def _measured_mu(document: Document) -> str:
    """Returns the measured μ, to compare a threshold with; empty if there is none."""
    mu = document["mu"]["measured"]
    return "" if mu is None else f"\n(here {mu:.2g})"


def _reach_legend(document: Document) -> str:
    axis, baseline = document["axes"][document["main_axis"]], document["baseline"]
    return (
        f"Cost: {axis}; ×: to {baseline} at the same seeds, (n) if only n of both reached it; ∞: "
        "not reached."
    )


def _break_even_legend(document: Document) -> str:
    return (
        f"Pays at μ: where that accuracy costs less than with {document['baseline']}, if "
        "generating a rollout costs μ times what training on it does."
    )


def seeds_of(arm: Document) -> str:
    """`8`, or `7 of 8` if seeds are missing."""
    known, missing = len(arm["seeds"]), len(arm["missing"])
    return f"{known} of {known + missing}" if missing else str(known)


def _final_cell(arm: Document, document: Document) -> str:
    if arm["final"] is None:
        return MISSING
    final = arm["final"][document["shown"]["benchmark"]]
    bounds = "" if final["interval"] is None else f"\n{interval(final['interval'], percent)}"
    return percent(final["mean"]) + bounds


def _points_cell(difference: Document | None) -> str:
    return MISSING if difference is None else _with_interval(difference).replace(" [", "\n[")


def _reach_cell(arm: Document, document: Document) -> str:
    if not arm["reach"]:
        return MISSING
    cost = arm["reach"][-1]["costs"][document["main_axis"]]
    if cost["ratio"] is None or arm["name"] == document["baseline"]:
        return amount(cost["median"])
    return f"× {cost['ratio']:.2f}{_seed_mark(cost['ratio_seeds'], arm)}\n{amount(cost['median'])}"


def _seed_mark(seeds: int, arm: Document) -> str:
    """Returns the number of seeds in brackets, unless the arm has no others."""
    return "" if seeds == len(arm["seeds"]) else f" ({seeds})"


def amount(value: float) -> str:
    """Format a cost in at most six characters: 12.3k, 1.5M, ∞."""
    if math.isinf(value):
        return "∞"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if float(f"{value:.3g}") >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _break_even_cell(arm: Document) -> str:
    even = arm["reach"][-1]["break_even"] if arm["reach"] else None
    return MISSING if even is None else pays_at(even, _seed_mark(even["seeds"], arm))


def pays_at(even: Document, mark: str = "") -> str:
    """`above 3.1`, `below 3.1`, `always` or `never`, and the interval on a second line."""
    mu = "" if even["mu"] is None else f" {even['mu']:.2g}"
    bounds = "[{:.2g}, {:.2g}]".format(*even["interval"]) if even["interval"] else ""
    return f"{even['pays']}{mu}{mark}\n{bounds}".strip().replace("inf", "∞")


def facts_of(document: Document) -> list[str]:
    """List facts of the comparison: baseline, benchmarks, verifier, μ and tuned values."""
    facts = [
        f"baseline {document['baseline']}",
        f"benchmarks {', '.join(document['benchmarks'].values())}",
        f"graded by {document['graded_by']}",
    ]
    if (mu := document["mu"]["measured"]) is not None:
        facts.append(
            f"μ, generating a rollout over training on it once, {mu:.3g} in the median of the "
            "finished runs"
        )
    tuned = [f"{arm['name']} {arm['tuned']}" for arm in document["arms"] if arm["tuned"]]
    return [*facts, *([f"tuned on other seeds: {'; '.join(tuned)}"] if tuned else [])]


def warnings_of(document: Document) -> list[str]:
    """List missing seeds with their reasons, seeds that are not paired, and other notes."""
    missing: dict[tuple[str, str], list[str]] = {}
    for arm in document["arms"]:
        for cell in arm["missing"]:
            missing.setdefault((arm["name"], cell["reason"]), []).append(str(cell["seed"]))
    warnings = [
        f"missing: {name}, {_seeds(seeds)}: {reason}" for (name, reason), seeds in missing.items()
    ]
    for arm in document["arms"]:
        paired = arm["difference"]["mean"]["seeds"] if arm["difference"] else arm["seeds"]
        if unpaired := [str(seed) for seed in arm["seeds"] if seed not in paired]:
            warnings.append(f"{arm['name']}: {document['baseline']} lacks {_seeds(unpaired)}")
    return [*warnings, *document["notes"]]


def _seeds(seeds: Sequence[str]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)}"


def as_json(document: Document) -> Document:
    """The document of `--json`: the verdict and the numbers, with null for infinity and NaN."""
    return {"verdict": verdict(document), **json_values(document)}


def markdown(document: Document, figures: Sequence[Figure]) -> str:
    """Render a `document` of `measure` as Markdown with links to the figures in figures/."""
    table = report_table(document)
    lines = [f"# {document['name']}", "", f"**{verdict(document)}**", ""]
    lines += [f"- {fact}" for fact in (*facts_of(document), *warnings_of(document))]
    lines += ["", *table.markdown(), "", table.legend, ""]
    for figure in figures:
        lines += [f"![{figure.title}](figures/{figure.name}.svg)", "", figure.caption, ""]
    return "\n".join(lines)


def refuse_other_files(folder: Path) -> None:
    """Raises OutputDirectoryError if the folder holds anything but an earlier report."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / JSON_FILE).exists():
        raise OutputDirectoryError(
            f"--output {folder} already holds other files: choose another folder"
        )


def write_report(experiment: Experiment, document: Document, folder: Path) -> None:
    """Write all forms of the report. Raises OutputDirectoryError."""
    refuse_other_files(folder)
    figures = report_figures(
        experiment, document, usable_axes(experiment.runs, document["mu"]["given"])
    )
    with named_if_unwritable(folder):
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        text = json.dumps(as_json(document), indent=2, ensure_ascii=False, allow_nan=False)
        write_text_whole(folder / JSON_FILE, text + "\n")
        svgs = _write_figures(figures, folder / "figures")
        write_text_whole(folder / "report.md", markdown(document, figures))
        write_text_whole(folder / "report.html", page_text(document, figures, svgs))


def _write_figures(figures: Sequence[Figure], folder: Path) -> dict[str, str]:
    """Write figures as PDF and SVG, and remove earlier ones; returns SVG elements by name."""
    for earlier in (*folder.glob("*.pdf"), *folder.glob("*.svg")):
        earlier.unlink()
    svgs = {}
    for figure in figures:
        with drawn(figure) as canvas:
            save_figure(canvas, folder / f"{figure.name}.pdf")
            svg = svg_text(canvas, figure.title)
        write_text_whole(folder / f"{figure.name}.svg", svg)
        svgs[figure.name] = svg_element(svg, figure.name)
    return svgs


def page_text(document: Document, figures: Sequence[Figure], svgs: Mapping[str, str]) -> str:
    """Render the report as one self-contained HTML page: inline figures, no script, no network.
    `svgs` has the SVG element of each figure by its name. Every text is escaped."""
    return render_page(
        "lab/report/report_page.html",
        document=document,
        verdict=verdict(document),
        table=report_table(document),
        figures=[
            {"title": figure.title, "svg": svgs[figure.name], "caption": figure.caption}
            for figure in figures
        ],
        facts=facts_of(document),
        warnings=warnings_of(document),
    )
