"""The inspection as one self-contained HTML page: figures inline, no script, no network."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from grpo_replay.inspection.figures import panel_svg, panels_of
from grpo_replay.inspection.panels import TREND_LABELS, describe_settings
from grpo_replay.inspection.summary import Inspection

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: #fff; color: #1b1b1b;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .4rem; }
p.settings { color: #595959; margin: 0 0 1rem; }
.good { color: #00664b; }
ul.warnings { margin: 0 0 1rem; padding: .7rem 1rem .7rem 2rem; background: #fff4e5;
  border-left: 4px solid #D55E00; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .8rem;
  margin: 0 0 1.2rem; }
.facts div { border: 1px solid #e3e3e3; border-radius: 6px; padding: .6rem .8rem; }
.facts b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.facts span { color: #595959; font-size: .85rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(21rem, 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid #e3e3e3; border-radius: 6px; padding: .8rem; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: #595959; font-size: .85rem; margin-top: .4rem; }
section { margin-top: 1.4rem; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .8rem; border-bottom: 1px solid #ececec; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { color: #595959; font-weight: 600; }
footer { margin-top: 2rem; color: #6f6f6f; font-size: .85rem; }
"""

# Whatever a run's texts contain, the browser loads and runs nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_CAPTIONS = {
    "Staleness": "Age of what is stored now, and age at which rollouts were replayed over the run.",
    "|Advantage|": "All survivors of the run, and what was drawn of them.",
    "Reuse": "How often each stored rollout was drawn, and how long ago the use before was.",
    "Clip fraction by age": "Tokens whose gradient the clip removed: replay that teaches nothing.",
    "Policy shift by age": "How far the policy has moved from the one that sampled the rollout.",
    "Occupancy over training": "Rollouts stored, against the number that age allows.",
    "Clip fraction over training": "Rising means that the policy outruns its buffer.",
}


def write_page(seen: Inspection, path: Path) -> None:
    """Write the page."""
    path.write_text(render_page(seen), encoding="utf-8")


def render_page(seen: Inspection) -> str:
    """The page as HTML; every text from the run is escaped."""
    title = f"{seen.recipe_name or Path(seen.path).name} · step {seen.step}"
    figures = "\n".join(
        f"<figure><h2>{escape(name)}</h2>{panel_svg(seen, name, draw)}"
        f"<figcaption>{escape(_CAPTIONS[name])}</figcaption></figure>"
        for name, draw in panels_of(seen).items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)} · replay buffer</title>
<style>{_CSS}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="settings">{escape(describe_settings(seen))}<br>{escape(seen.path)}</p>
{_warnings(seen)}
{_facts(seen)}
<div class="panels">
{figures}
</div>
{_populations(seen)}
{_by_age(seen)}
{_trends(seen)}
<footer>grpo-replay inspect-buffer · ages are in training steps · how to read this:
docs/buffer.md</footer>
</body>
</html>
"""


def _warnings(seen: Inspection) -> str:
    if not seen.warnings:
        return '<p class="good">✓ nothing looks unhealthy</p>'
    items = "".join(f"<li>{escape(warning)}</li>" for warning in seen.warnings)
    return f'<ul class="warnings">{items}</ul>'


def _facts(seen: Inspection) -> str:
    occupancy, law = seen.occupancy, seen.draw_law
    facts = [(f"{occupancy.stored_rollouts:,}", "rollouts stored")]
    if occupancy.capacity_rollouts:
        share = occupancy.stored_rollouts / occupancy.capacity_rollouts
        facts.append((f"{share:.1%}", f"of capacity {occupancy.capacity_rollouts:,}"))
    if occupancy.expected_rollouts:
        share = occupancy.stored_rollouts / occupancy.expected_rollouts
        facts.append((f"{share:.0%}", f"of the expected {occupancy.expected_rollouts:,.0f}"))
    facts.append((f"{seen.replayed_rollouts:,}", "rollouts replayed so far"))
    if law.units:
        share = law.effective_sample_size / law.units
        facts.append((f"{share:.0%}", f"effective sample size of {law.units:,} units"))
    if seen.trained_tokens_per_generated is not None:
        facts.append((f"{seen.trained_tokens_per_generated:.2f}", "tokens trained per generated"))
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in facts
    )
    return f'<div class="facts">{cells}</div>'


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<section><h2>{escape(title)}</h2><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></section>"
    )


def _populations(seen: Inspection) -> str:
    heads = ["", "rollouts", "prompts", "largest prompt", "correct", "mean |A|", "tokens mean"]
    rows = [
        [
            p.name,
            f"{p.rollouts:,}",
            f"{p.prompts:,}",
            f"{p.largest_prompt_share:.1%}",
            "–" if p.correct_share is None else f"{p.correct_share:.1%}",
            "–" if p.abs_advantage_mean is None else f"{p.abs_advantage_mean:.3f}",
            f"{p.tokens_mean:,.1f}",
            f"{p.tokens_median:,.0f}",
            f"{p.tokens_p95:,.0f}",
            f"{p.truncated_share:.1%}",
        ]
        for p in seen.populations
    ]
    return _table("Who is in there", [*heads, "median", "95th percentile", "truncated"], rows)


def _by_age(seen: Inspection) -> str:
    rows = [
        [
            "fresh" if age == 0 else str(age),
            f"{row.uses:,}",
            f"{row.tokens:,}",
            f"{row.clip_fraction:.3%}",
            f"{row.ratio:.4f}",
            f"{row.approx_kl:.5f}",
        ]
        for age, row in seen.by_age.items()
    ]
    return _table(
        "Outcome by age at use",
        ["age, steps", "uses", "tokens", "clipped", "ratio (geometric mean)", "KL, nats"],
        rows,
    )


def _trends(seen: Inspection) -> str:
    rows = []
    for name, points in seen.trends.items():
        values = [value for _, value in points]
        part = max(1, len(values) // 8)
        first, last = sum(values[:part]) / part, sum(values[-part:]) / part
        rows.append([TREND_LABELS[name], f"{first:.4g}", f"{last:.4g}", f"{max(values):.4g}"])
    heads = ["", "first eighth", "last eighth", "largest"]
    return _table("Over training", heads, rows)
