"""What a report says first, its table, facts and warnings, all of the document that `measure`
makes, the same in the terminal, Markdown and HTML; and the files of a report."""

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


def verdict(found: Document) -> str:
    """Whether the arms are ahead of the baseline, at equal rollouts and at equal cost, and how many
    seeds would tell. An arm is ahead or behind if the 95 % interval of its difference says so."""
    compared = [arm for arm in found["arms"] if arm["difference"] is not None]
    if not compared:
        return f"nothing to compare: no other arm has a seed of {found['baseline']}"
    if len(compared) == 1:
        return _verdict_on(compared[0], found)
    said = []
    for where, difference_of in (
        (_equal_final(found), _final_difference), (_equal_cost(found), _cost_difference)
    ):  # fmt: skip
        words: dict[str, list[str]] = {}
        for arm in compared:
            if each := difference_of(arm, found):
                words.setdefault(_word(each), []).append(arm["name"])
        listed = (f"{', '.join(names)} {word}" for word, names in sorted(words.items()))
        said += [f"{where}: {', '.join(listed)}"] if words else []
    fewest = min(len(arm["seeds"]) for arm in compared)
    few = f"; fewer than {FEWEST_SEEDS} seeds cannot tell" if fewest < FEWEST_SEEDS else ""
    return f"against {found['baseline']}, {'; '.join(said)}{few}"


def _verdict_on(arm: Document, found: Document) -> str:
    """For example `undecided: ours against grpo, 2 seeds, +1.0 points at equal rollouts, -0.5 at
    equal compute; about 9 seeds would tell`."""
    final, spent = _final_difference(arm, found), _cost_difference(arm, found)
    word, numbers = _word(final), f"{_with_interval(final)} points {_equal_final(found)}"
    if spent is not None:
        numbers += f", {_with_interval(spent)} {_equal_cost(found)}"
        if _word(spent) != word:
            word = f"{word} {_equal_final(found)}, {_word(spent)} {_equal_cost(found)}"
    count = len(final["seeds"])
    seeds = f"{count} {'seed' if count == 1 else 'seeds'}"
    whose = f"{arm['name']} against {found['baseline']}, {seeds}"
    return f"{word}: {whose}, {numbers}{_more_seeds(final)}"


def _more_seeds(final: Document) -> str:
    needed = final["seeds_to_tell"]
    if _word(final) != "undecided":
        return ""
    if needed is None:
        return "; one seed says nothing of others"
    if math.isinf(needed):
        return "; more seeds alone would not tell"
    return f"; about {needed} seeds would tell"


def _with_interval(each: Document) -> str:
    words = [f"{100 * each['mean']:+.1f}"]
    if each["interval"] is not None:
        words.append("[{:+.1f}, {:+.1f}]".format(*(100 * bound for bound in each["interval"])))
    return " ".join(words)


def _word(each: Document) -> str:
    low, high = each["interval"] or (0, 0)
    return "ahead" if low > 0 else "behind" if high < 0 else "undecided"


def _equal_final(found: Document) -> str:
    return "at equal rollouts" if found["equal_rollouts"] else "after the last step"


def _main_cost(found: Document) -> str:
    return "compute" if found["main_axis"].startswith("compute") else "tokens"


def _equal_cost(found: Document) -> str:
    return f"at equal {_main_cost(found)}"


def _final_difference(arm: Document, found: Document) -> Any:
    return arm["difference"] and arm["difference"][found["shown"]["benchmark"]]


def _cost_difference(arm: Document, found: Document) -> Any:
    at = arm["equal_cost"].get(found["main_axis"])
    return at and at["difference"][found["shown"]["benchmark"]]


@dataclass(frozen=True, slots=True)
class _Column:
    """The cell of an arm, and the sentence of the legend that explains the column."""

    cell: Callable[[Document], str]
    legend: str = ""


def report_table(found: Document) -> TextTable:
    """One row for each arm. A column without a value is left out, and so is its legend."""
    points = "Differences are in points, paired."
    columns = {
        "seeds": _Column(seeds_of),
        "final, %": _Column(
            lambda arm: _final_cell(arm, found),
            f"Final: {shown_title(found)}, after the last step.",
        ),
        _ahead(found, _equal_final(found)): _Column(
            lambda arm: _points_cell(_final_difference(arm, found)), points
        ),
        _ahead(found, _equal_cost(found)): _Column(
            lambda arm: _points_cell(_cost_difference(arm, found)), points
        ),
        f"{_main_cost(found)} to\n{percent(shown_target(found) or 0.0)} %": _Column(
            lambda arm: _reach_cell(arm, found), _reach_legend(found)
        ),
        f"pays at μ{_here(found)}": _Column(_break_even_cell, _break_even_legend(found)),
    }
    cells = {header: [each.cell(arm) for arm in found["arms"]] for header, each in columns.items()}
    shown = {header: each for header, each in cells.items() if set(each) - {MISSING}}
    legend = [columns[header].legend for header in shown if columns[header].legend]
    if any("[" in cell for column in shown.values() for cell in column):
        legend.append(
            f"In brackets: 95 % intervals over seeds and problems, from {FEWEST_SEEDS} seeds on."
        )
    names = [arm["name"] for arm in found["arms"]]
    rows = list(zip(names, *shown.values()))
    return TextTable(("arm", *shown), rows, legend=" ".join(dict.fromkeys(legend)))


def _ahead(found: Document, where: str) -> str:
    """The heading of a difference, on two lines."""
    word, rest = where.split(" ", 1)
    return f"− {found['baseline']} {word}\n{rest}"


def _here(found: Document) -> str:
    """The μ of the runs, beside which a threshold is read."""
    mu = found["mu"]["measured"]
    return "" if mu is None else f"\n(here {mu:.2g})"


def _reach_legend(found: Document) -> str:
    return (
        f"Cost: {found['axes'][found['main_axis']]}; ×: to {found['baseline']} at the same seeds, "
        "(n) if only n of both reached it; ∞: not reached."
    )


def _break_even_legend(found: Document) -> str:
    return (
        f"Pays at μ: where that accuracy costs less than with {found['baseline']}, if generating a "
        "rollout costs μ times what training on it does."
    )


def seeds_of(arm: Document) -> str:
    """`8`, or `7 of 8` if seeds are missing."""
    known, missing = len(arm["seeds"]), len(arm["missing"])
    return f"{known} of {known + missing}" if missing else str(known)


def _final_cell(arm: Document, found: Document) -> str:
    if arm["final"] is None:
        return MISSING
    each = arm["final"][found["shown"]["benchmark"]]
    bounds = "" if each["interval"] is None else f"\n{interval(each['interval'], percent)}"
    return percent(each["mean"]) + bounds


def _points_cell(each: Document | None) -> str:
    return MISSING if each is None else _with_interval(each).replace(" [", "\n[")


def _reach_cell(arm: Document, found: Document) -> str:
    if not arm["reach"]:
        return MISSING
    cost = arm["reach"][-1]["costs"][found["main_axis"]]
    if cost["ratio"] is None or arm["name"] == found["baseline"]:
        return amount(cost["median"])
    return f"× {cost['ratio']:.2f}{_of(cost['ratio_seeds'], arm)}\n{amount(cost['median'])}"


def _of(seeds: int, arm: Document) -> str:
    """A mark if not every seed has the number."""
    return "" if seeds == len(arm["seeds"]) else f" ({seeds})"


def amount(value: float) -> str:
    """A cost in at most six characters."""
    if math.isinf(value):
        return "∞"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if float(f"{value:.3g}") >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _break_even_cell(arm: Document) -> str:
    each = arm["reach"][-1]["break_even"] if arm["reach"] else None
    return MISSING if each is None else pays_at(each, _of(each["seeds"], arm))


def pays_at(even: Document, mark: str = "") -> str:
    """`above 3.1`, `below 3.1`, `always` or `never`, and the interval on a line of its own."""
    mu = "" if even["mu"] is None else f" {even['mu']:.2g}"
    bounds = "[{:.2g}, {:.2g}]".format(*even["interval"]) if even["interval"] else ""
    return f"{even['pays']}{mu}{mark}\n{bounds}".strip().replace("inf", "∞")


def facts_of(found: Document) -> list[str]:
    """Baseline, benchmarks, verifier, μ and what tuning chose, one fact each."""
    facts = [
        f"baseline {found['baseline']}",
        f"benchmarks {', '.join(found['benchmarks'].values())}",
        f"graded by {found['graded_by']}",
    ]
    if found["mu"]["measured"] is not None:
        facts.append(
            f"μ, generating a rollout over training on it once, {found['mu']['measured']:.3g} in "
            "the median of the finished runs"
        )
    tuned = [f"{arm['name']} {arm['tuned']}" for arm in found["arms"] if arm["tuned"]]
    return [*facts, *([f"tuned on other seeds: {'; '.join(tuned)}"] if tuned else [])]


def warnings_of(found: Document) -> list[str]:
    """Missing seeds with their reasons, seeds that are not paired, and other notes."""
    missing: dict[tuple[str, str], list[str]] = {}
    for arm in found["arms"]:
        for each in arm["missing"]:
            missing.setdefault((arm["name"], each["reason"]), []).append(str(each["seed"]))
    warnings = [
        f"missing: {name}, {_seeds(seeds)}: {reason}" for (name, reason), seeds in missing.items()
    ]
    for arm in found["arms"]:
        paired = arm["difference"]["mean"]["seeds"] if arm["difference"] else arm["seeds"]
        if lone := [str(seed) for seed in arm["seeds"] if seed not in paired]:
            warnings.append(f"{arm['name']}: {found['baseline']} lacks {_seeds(lone)}")
    return [*warnings, *found["notes"]]


def _seeds(seeds: Sequence[str]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(seeds)}"


def as_json(found: Document) -> Document:
    """The document of `--json`: the verdict and the numbers, null for what is not finite."""
    return {"verdict": verdict(found), **json_values(found)}


def markdown(found: Document, figures: Sequence[Figure]) -> str:
    """The report as a Markdown page."""
    table = report_table(found)
    lines = [f"# {found['name']}", "", f"**{verdict(found)}**", ""]
    lines += [f"- {fact}" for fact in (*facts_of(found), *warnings_of(found))]
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


def write_report(experiment: Experiment, found: Document, folder: Path) -> None:
    """Write all forms of the report. Raises OutputDirectoryError."""
    refuse_other_files(folder)
    figures = report_figures(experiment, found, usable_axes(experiment.runs, found["mu"]["given"]))
    with named_if_unwritable(folder):
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        text = json.dumps(as_json(found), indent=2, ensure_ascii=False, allow_nan=False)
        write_text_whole(folder / JSON_FILE, text + "\n")
        svgs = _write_figures(figures, folder / "figures")
        write_text_whole(folder / "report.md", markdown(found, figures))
        write_text_whole(folder / "report.html", page_text(found, figures, svgs))


def _write_figures(figures: Sequence[Figure], folder: Path) -> dict[str, str]:
    """Write every figure as PDF and SVG, and remove those of an earlier report; returns the SVG
    elements by name."""
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


def page_text(found: Document, figures: Sequence[Figure], svgs: Mapping[str, str]) -> str:
    """The report as one self-contained HTML page: inline figures, no script, no network.
    `svgs` has the SVG element of each figure by its name. Every text is escaped."""
    return render_page(
        "lab/report/report_page.html",
        found=found,
        verdict=verdict(found),
        table=report_table(found),
        figures=[
            {"title": figure.title, "svg": svgs[figure.name], "caption": figure.caption}
            for figure in figures
        ],
        facts=facts_of(found),
        warnings=warnings_of(found),
    )
