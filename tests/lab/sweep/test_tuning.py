"""The choice of tuned values from the summaries of finished runs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.lab.sweep.cells import CellState
from grpo_replay.lab.sweep.sweep_file import read_choices
from grpo_replay.lab.sweep.sweep_run import choose, record_choice

RATE = "optimizer.learning_rate"


def scores(*by_seed):
    """Accuracies on seeds 1 and 2, of three learning rates."""
    return {
        (f"{RATE}={value}",): dict(zip((1, 2), each, strict=True))
        for value, each in zip(("0.0001", "0.0002", "0.0004"), by_seed, strict=True)
    }


def write_summary(run: Path, final: dict) -> None:
    summary = {"steps": 30, "wall_seconds": 1, "final": final}
    (run / "summary.json").write_text(json.dumps(summary))


def test_the_best_mean_over_seeds_is_chosen_and_not_the_best_run():
    assert choose(scores((0.5, 0.5), (0.6, 0.5), (0.9, 0.1))) == (f"{RATE}=0.0002",)


def test_a_tie_takes_the_first():
    assert choose(scores((0.1, 0.2), (0.6, 0.5), (0.5, 0.6))) == (f"{RATE}=0.0002",)


def test_a_later_choice_replaces_that_of_its_arm(tmp_path):
    table = scores((0.5, 0.5), (0.6, 0.5), (0.1, 0.1))
    for arm, value in (("a", "0.0001"), ("b", "0.0001"), ("a", "0.0002")):
        record_choice(tmp_path, arm, (f"{RATE}={value}",), table)
    found = {arm: each["set"] for arm, each in read_choices(tmp_path).items()}
    assert found == {"a": [f"{RATE}=0.0002"], "b": [f"{RATE}=0.0001"]}
    assert read_choices(tmp_path)["a"]["candidates"][1]["mean"] == pytest.approx(0.55)


SWEEP = """
name: s
recipe: tiny
set: [eval.greedy=true]
arms: {a: [], b: [replay.preset=grpo]}
tune: {seeds: [1], grid: {optimizer.learning_rate: [1.0e-4, 2.0e-4]}}
seeds: [3]
"""


def test_printed_commands_continue_a_sweep_through_its_choices(tmp_path, monkeypatch):
    """What a queue's jobs leave in the folder, and what the same line prints next."""
    (tmp_path / "s.yaml").write_text(SWEEP)
    out = tmp_path / "out"
    words = ["sweep", str(tmp_path / "s.yaml"), "--print", "--output-dir", str(out)]

    def printed():
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()

    first = printed()
    assert [line.split()[1] for line in first[:4]] == ["train"] * 4 and "2 cells wait" in first[4]
    names = [f"tune/{arm}/learning_rate={rate}/seed-1" for arm in "ab" for rate in (1e-4, 2e-4)]
    assert all(name in line for name, line in zip(names, first, strict=False))

    monkeypatch.setattr(
        "grpo_replay.lab.sweep.sweep_run.state_of",
        lambda cell: CellState.DONE if "tune" in cell.folder.parts else CellState.NEW,
    )
    for name, final in zip(names, [0.1, 0.4, 0.2, 0.1], strict=True):
        (out / name).mkdir(parents=True, exist_ok=True)
        write_summary(out / name, {"mean": final})
    of_a, of_b = printed()
    assert "out/a/seed-3" in of_a and f"{RATE}=0.0002" in of_a
    assert "out/b/seed-3" in of_b and f"{RATE}=0.0001" in of_b
    chosen = json.loads((out / "chosen.json").read_text())["arms"]
    assert {arm: each["set"] for arm, each in chosen.items()} == {
        "a": [f"{RATE}=0.0002"], "b": [f"{RATE}=0.0001"],
    }  # fmt: skip
