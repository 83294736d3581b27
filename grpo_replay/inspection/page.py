"""The inspection as one self-contained HTML page: inline figures, no script, no network.

The layout is the Jinja2 template `page.html`. It escapes every text that comes from the run.
"""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo_replay.inspection.figures import panel_svg, panels_of
from grpo_replay.inspection.panels import TREND_LABELS, describe_settings
from grpo_replay.inspection.summary import Inspection, first_and_last, plural

_CAPTIONS = {
    "Staleness": "Age of the stored rollouts, and age at use of all replayed rollouts.",
    "|Advantage|": "All survivors of the run, and those that were replayed.",
    "Reuse": "Draws per stored rollout, and training steps since the previous use.",
    "Clip fraction by age": "Share of tokens whose gradient was removed by clipping.",
    "Policy shift by age": "KL divergence from the policy that sampled the rollout.",
    "Occupancy over training": "Rollouts stored, and the number expected from the age limit.",
    "Clip fraction over training": "A rising curve means that the policy moves away from stored "
    "rollouts faster than before.",
}


def write_page(inspection: Inspection, path: Path) -> None:
    path.write_text(render_page(inspection), encoding="utf-8")


def render_page(inspection: Inspection) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader("grpo_replay", "inspection"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    return environment.get_template("page.html").render(
        inspection=inspection,
        title=f"{inspection.recipe_name or Path(inspection.path).name} · step {inspection.step}",
        settings=describe_settings(inspection),
        units=plural(inspection.draw_law.unit),
        figures=[
            {
                "title": title,
                "svg": panel_svg(inspection, title, draw),
                "caption": _CAPTIONS[title],
            }
            for title, draw in panels_of(inspection).items()
        ],
        trends=[
            (TREND_LABELS[name], *first_and_last(points), max(value for _, value in points))
            for name, points in inspection.trends.items()
        ],
    )


def _number(value: float | None, format_spec: str) -> str:
    return "–" if value is None else format(value, format_spec)
