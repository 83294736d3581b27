"""Write the parts of README.md, docs/tiny.md and docs/planning.md that quote docs/results.yaml.

    python docs/make_results.py

A part stands between `<!-- results: NAME -->` and `<!-- end -->`. A test fails when a page is not
what this writes.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from grpo_replay.cli.plan_command import DEFAULT_GROWTH, DEFAULT_RHO
from grpo_replay.lab.dry_run.estimates import expected_of
from grpo_replay.lab.planning.design import PlanInputs, make_plan
from grpo_replay.lab.planning.theory import (
    Growth,
    PowerGrowth,
    RatioGrowth,
    Verdict,
    objective,
)
from grpo_replay.recipe import load_recipe

DOCS = Path(__file__).resolve().parent
PAGES = (DOCS.parent / "README.md", DOCS / "tiny.md", DOCS / "planning.md")
_PART = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def results() -> dict[str, Any]:
    return yaml.safe_load((DOCS / "results.yaml").read_text())


def with_results(page: str) -> str:
    """The text of a page with its marked parts written anew."""
    parts = {"does-replay-pay": does_replay_pay, "tiny-long": tiny_long, "verdicts": verdicts}
    return _PART.sub(lambda found: found[1] + parts[found[2]]() + found[3], page)


def difference(each: dict[str, Any]) -> str:
    """For example `+0.8 [-0.0, +1.5], 7 of 8`."""
    bounds = f"[{each['low']:+.1f}, {each['high']:+.1f}]"
    return f"{each['mean']:+.1f} {bounds}, {each['ahead']} of {each['seeds']}"


def does_replay_pay() -> str:
    found = results()
    main, long, clock = found["tiny-main"], found["tiny-long"], found["async"]
    measured = next(iter(long["compute"].values()))
    fifo, once = clock["fifo_to_use_once"], clock["use_once_to_sync"]
    less = round(100 * (1 - long["steps"]["fifo"]))
    return f"""\
| task | cost of generating / training a rollout (μ) | held-out accuracy, `ours` − `grpo` | `fifo` − `grpo` |
|---|---|---|---|
| `tiny`, rates tuned per method | {main["mu"]:.1f} | {difference(main["difference"]["ours"])} | – |
| `tiny-long`, one rate | {long["mu"]} | {difference(long["difference"]["ours"])} | \
{difference(long["difference"]["fifo"])} |

Points with 95 % intervals over seeds and problems, and the seeds that are ahead. To the same {long["reach"]:.0f} % on
`tiny-long`, `ours` needs {measured["ours"]} times the compute of `grpo` at the measured μ and `fifo` {measured["fifo"]} \
times (it generates
{less} % less, and trains on each rollout nearly four times). By the clock, with a vLLM server and a trainer on a core
each (μ {clock["mu"]}), an asynchronous `fifo` run needs {fifo["ratio"]} times the seconds of an asynchronous `grpo` run \
to 70 %, and
that {once["ratio"]} times those of a synchronous one: medians of five seeds; those of `fifo` range from {fifo["low"]} to
{fifo["high"]} ([docs/async.md](docs/async.md)). A real
model was trained with one seed only, which decides nothing ([docs/performance.md](docs/performance.md#measured-on-one-h100)).
"""  # noqa: E501


def tiny_long() -> str:
    found = results()["tiny-long"]
    lines = ["| relative to GRPO | ours | fifo |", "|---|---|---|"]
    rows = {"final accuracy, points, 95 %, seeds ahead": found["difference"]}
    lines += [f"| {name} | {difference(row['ours'])} | {difference(row['fifo'])} |"
              for name, row in rows.items()]  # fmt: skip
    costs = {f"steps to {found['reach']} %": found["steps"]}
    costs |= {f"compute to {found['reach']} %, μ = {mu}": row
              for mu, row in found["compute"].items()}  # fmt: skip
    lines += [f"| {name} | {row['ours']} × | {row['fifo']} × |" for name, row in costs.items()]
    return "\n".join(lines) + "\n"


def cases() -> list[tuple[str, str, float, tuple[float, ...], dict[str, tuple[Verdict, float]]]]:
    """(sweep, arm, μ, measured ratios, `judged_recipe` by growth) of every measured compute."""
    found = []
    for sweep, part in results().items():
        for mu, arms in part.get("compute", {}).items():
            for arm, measured in arms.items():
                ratios = tuple(measured) if isinstance(measured, list) else (measured,)
                words = tuple(part["overrides"][arm])
                growths = {
                    "assumed": PowerGrowth(DEFAULT_GROWTH),
                    "measured": RatioGrowth(*part["growth"][arm]),
                }
                judged = {name: judged_recipe(part["recipe"], words, mu, each)
                          for name, each in growths.items()}  # fmt: skip
                found.append((sweep, arm, mu, ratios, judged))
    return found


def judged_recipe(
    name: str, overrides: tuple[str, ...], mu: float, growth: Growth
) -> tuple[Verdict, float]:
    """The verdict that `plan` gives on a recipe with this μ and growth; and its J(x, y)/J(1, 1), as
    if both were drawn with replacement from uniform ages."""
    recipe = load_recipe(name, overrides)
    expected = expected_of(recipe.model, recipe.prompts, recipe.sampling, recipe.replay)
    inputs = PlanInputs(
        mu=mu, rho=DEFAULT_RHO, growth=growth, survival=expected.survival,
        rollouts_per_step=recipe.rollouts_per_step, completion_tokens=expected.completion_tokens,
        prompt_tokens=expected.prompt_tokens, sources={},
    )  # fmt: skip
    plan = make_plan(inputs, recipe.replay)
    assert plan.current is not None and plan.current_verdict is not None
    terms = inputs.effective_mu, inputs.rho, growth
    drawn_alike = objective(plan.current.x, plan.current.y, *terms) / objective(1.0, 1.0, *terms)
    return plan.current_verdict, drawn_alike


def verdicts() -> str:
    lines = [
        "| sweep | arm | μ | measured | J(x, y)/J(1, 1), a = 0.2 | by the theory, a = 0.2 | "
        "with the growth of a run |",
        "|---|---|---|---|---|---|---|",
    ]
    for sweep, arm, mu, ratios, judged in cases():
        cells = [f"{each.ratio:.2f} ({each.low:.2f} to {each.high:.2f}): {each.answer}"
                 for each, _ in judged.values()]  # fmt: skip
        cells.insert(0, f"{judged['assumed'][1]:.2f}")
        measured = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| `{sweep}` | {arm} | {mu} | {measured} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_results(path.read_text()))
