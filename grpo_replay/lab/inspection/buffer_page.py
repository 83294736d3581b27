"""The inspection as one self-contained HTML page: inline figures, no script, no network.

The layout is the Jinja2 template `buffer_page.html`. It escapes every text that comes from the run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_replay.lab.inspection.buffer_figures import panel_svg, panels_of, title_of
from grpo_replay.lab.inspection.buffer_panels import TREND_LABELS, describe_settings
from grpo_replay.lab.inspection.buffer_summary import Inspection, first_and_last, plural
from grpo_replay.storage.atomic import write_text_whole
from grpo_replay.terminal.bars import sparkline
from grpo_replay.terminal.pages import page_environment

_CAPTIONS = {
    "Staleness": "Age of the stored rollouts, and age at use of all replayed rollouts.",
    "|Advantage|": "All survivors of the run, and those that were replayed.",
    "Uses of a rollout": "How often each survivor of the run was trained on, gone ones included.",
    "Steps since last use": "At every draw, the training steps since the rollout was last used.",
    "Clip fraction by age": "Share of tokens whose gradient was removed by clipping.",
    "Policy shift by age": "KL divergence from the policy that sampled the rollout.",
    "Occupancy over training": "Rollouts stored, and the most that capacity and age limit allowed.",
    "Clip fraction over training": "A rising curve means that the policy moves away from stored "
    "rollouts faster than before.",
    "Reward over training": "Mean reward of the rollouts generated in each step.",
    "Entropy over training": "Entropy of the next-token distribution on trained tokens. A sudden "
    "fall is a collapse.",
}


def write_page(inspection: Inspection, samples: Sequence[Mapping[str, Any]], path: Path) -> None:
    write_text_whole(path, render_page(inspection, samples))


def render_page(inspection: Inspection, samples: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page as HTML. `samples` are rollouts of the last step (`rows.sample_rollouts`)."""
    environment = page_environment("lab/inspection")
    environment.filters["number"] = _number
    return environment.get_template("buffer_page.html").render(
        inspection=inspection,
        samples=samples,
        title=title_of(inspection),
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
            (
                TREND_LABELS[name],
                *first_and_last(points),
                max(value for _, value in points),
                sparkline([value for _, value in points], 40),
            )
            for name, points in inspection.trends.items()
        ],
    )


def _number(value: float | None, format_spec: str) -> str:
    return "–" if value is None else format(value, format_spec)
