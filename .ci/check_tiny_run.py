"""Whether a `train tiny` run did what the README promises. Usage: check_tiny_run.py RUN_DIR"""

import json
import sys
from pathlib import Path

import yaml


def main() -> None:
    run = Path(sys.argv[1])
    summary = json.loads((run / "summary.json").read_text())
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())["replay"]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    replaying = [row for row in metrics if row["step"] > recipe["warmup_steps"]]
    gain = summary["final"]["mean"] - summary["base"]["mean"]
    greedy_gain = summary["final_greedy"]["mean"] - summary["base_greedy"]["mean"]
    clipped = sum(row["replay/clip_fraction"] for row in replaying) / len(replaying)
    print(
        f"T=1 {gain:+.3f}, greedy {greedy_gain:+.3f}, {clipped:.2%} of replayed tokens clipped, "
        f"{summary['wall_seconds']:.0f} s"
    )
    assert len(metrics) == summary["steps"] > recipe["warmup_steps"]
    assert gain >= 0.15, "held-out accuracy rose by less than 15 points at T=1"
    assert greedy_gain >= 0.05, "held-out accuracy rose by less than 5 points greedily"
    assert clipped < 0.02, "2 % of the replayed tokens or more are clipped: not healthy"
    assert all(row["replay/rollouts"] > 0 for row in replaying), "a step did not replay"
    oldest = max(row["replay/age_max"] for row in replaying)
    assert oldest <= recipe["max_age_steps"], f"a rollout of age {oldest} was replayed"


main()
