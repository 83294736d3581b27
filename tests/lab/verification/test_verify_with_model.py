"""What a verification finds in a run of the real trainer, with its tokenizer and its weights."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from edited_columns import edit
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.cli.inspect_command import _policies
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.verification.verify import verify_run

CHECKPOINTS = (5, 8, 12)


@pytest.fixture
def run(one_update_run, tmp_path) -> Path:
    """One update per step, with the checkpoints of steps 5, 8 and 12: the steps after the first two
    are checked."""
    path = Path(shutil.copytree(one_update_run.path, tmp_path / "run", symlinks=True))
    for folder in (path / "checkpoints").glob("step_*"):
        if int(folder.name[5:]) not in CHECKPOINTS:
            shutil.rmtree(folder)
    return path


def failed(run: Path, with_model: bool = True) -> set[str]:
    report = verify_run(run, _policies(open_source(run)) if with_model else None)
    return {check.name for check in report.checks if not check.passed}


def kept_row(path: Path) -> int:
    return pq.read_table(path)["kept"].to_pylist().index(True)


def test_a_run_of_the_real_trainer_passes_with_its_weights(run):
    done = CliRunner().invoke(
        app, ["inspect-buffer", str(run), "--verify", "--with-model", "--json"]
    )
    assert done.exit_code == 0, done.stdout
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["behaviour log-probs"]["checked"] > 20


CHANGES = {
    "replay/draw_entropy": 1.0,
    "replay/positive_fraction": 1.0,
    "replay/age_1/clip_fraction": 1.0,
    "replay/age_9-16/approx_kl": 0.1,
    "verdict/timeout": 7,
    "updates": None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_or_missing_metric_is_named(run, name):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    line = json.loads(lines[9])
    if CHANGES[name] is None:
        del line[name]
    else:
        line[name] = line.get(name, 0.0) + CHANGES[name]
    lines[9] = json.dumps(line)
    path.write_text("\n".join(lines) + "\n")
    (check,) = (check for check in verify_run(run).checks if check.name == "metrics")
    assert not check.passed
    assert f"step 10: {name}" in check.detail


def test_log_probs_that_the_weights_did_not_give_are_named(run):
    path = run / "rollouts" / "step_000009.parquet"
    edit(path, "behavior_logprobs", lambda v: [v[0] - 0.01, *v[1:]], kept_row(path))
    assert "behaviour log-probs" in failed(run)
    assert "behaviour log-probs" not in failed(run, with_model=False)


def test_weights_of_another_step_are_named(run):
    folder = run / "checkpoints"
    shutil.copy(
        folder / "step_000005/model/model.safetensors",
        folder / "step_000008/model/model.safetensors",
    )
    assert failed(run) == {"behaviour log-probs", "checkpoints"}
