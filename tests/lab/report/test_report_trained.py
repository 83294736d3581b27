"""A report on trained runs: every number is that of the independent script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
SMALL = (
    *("run.steps=4", "sampling.prompts_per_step=4", "replay.warmup_steps=1", "eval.every_steps=1"),
    *("eval.max_problems=8", "eval.samples=2", "eval.greedy=true", "tracking.report_to=[]"),
)
FIFO = [  # a draw for each update
    *("replay.preset=fifo", "replay.warmup_steps=0", "replay.ratio=2"), "batch.updates_per_step=2",
]  # fmt: skip
ARMS = {"grpo": ["replay.preset=grpo"], "ours": [], "fifo": FIFO}


def command(*words: str) -> subprocess.CompletedProcess:
    whole = [sys.executable, "-m", "grpo_replay", *words]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_report_of_trained_runs_is_recomputed_from_their_files(tmp_path):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    document = {"name": "s", "recipe": "tiny", "set": list(SMALL), "arms": ARMS, "seeds": [1]}
    (sweep / "sweep.yaml").write_text(yaml.safe_dump(document))
    for arm, overrides in ARMS.items():
        words = [f"--set={word}" for word in (*SMALL, *overrides, "run.seed=1")]
        command("train", "tiny", *words, "--output-dir", str(sweep / arm / "seed-1"))
    file = tmp_path / "report.json"
    output = tmp_path / "tables"
    words = ["report", str(sweep), "--reach", "38", "--output", str(output), "--json"]
    file.write_text(command(*words).stdout)
    arms = {arm["name"]: arm for arm in json.loads(file.read_text())["arms"]}
    reached = [name for name, arm in arms.items() if arm["reach"][0]["break_even"]]
    assert (output / "figures" / "cost_by_mu.svg").exists() == bool(reached)
    assert not reached or arms["grpo"]["reach"][0]["reached"] == 1
    assert {name: arm["seeds"] for name, arm in arms.items()} == {name: [1] for name in ARMS}
    assert set(arms["ours"]["equal_cost"]) == {"compute_measured", "generated_tokens", "seconds"}
    script = str(ROOT / "benchmarks" / "recompute_report.py")
    done = subprocess.run(
        [sys.executable, script, str(file), str(sweep)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "3 runs compared, 0 differ" in done.stdout
