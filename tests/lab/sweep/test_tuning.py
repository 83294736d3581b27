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


def scores(*by_seed, key=RATE, values=("0.0001", "0.0002", "0.0004")):
    """Accuracies on seeds 1 and 2, value by value."""
    return {
        (f"{key}={value}",): dict(zip((1, 2), each, strict=True))
        for value, each in zip(values, by_seed, strict=True)
    }


def write_summary(run: Path, final: dict) -> None:
    summary = {"steps": 30, "wall_seconds": 1, "final": final}
    (run / "summary.json").write_text(json.dumps(summary))


def test_the_best_mean_over_seeds_is_chosen_and_not_the_best_run():
    chosen, told = choose("a", scores((0.5, 0.5), (0.6, 0.5), (0.9, 0.1)))
    assert chosen == (f"{RATE}=0.0002",) and len(told) == 1


def test_a_tie_takes_the_first_and_is_told():
    chosen, told = choose("a", scores((0.1, 0.2), (0.6, 0.5), (0.5, 0.6)))
    assert chosen == (f"{RATE}=0.0002",) and "learning_rate=0.0004 tied with it" in told[1]


def test_a_choice_at_the_edge_of_the_grid_is_told():
    _, told = choose("a", scores((0.1, 0.2), (0.2, 0.2), (0.5, 0.6)))
    assert f"{RATE}=0.0004 is at the edge" in told[1]
    words = scores((0.1, 0.2), (0.5, 0.5), key="loss.aggregation", values=("token", "sequence"))
    assert len(choose("a", words)[1]) == 1


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
    for name, final in zip(names, [0.1, 0.4, 0.2, None], strict=True):
        (out / name).mkdir(parents=True, exist_ok=True)
        write_summary(out / name, {"mean": final})
    command, lacking = printed()[:2]
    assert "out/a/seed-3" in command and f"{RATE}=0.0002" in command
    assert lacking.startswith("# b/seed-3 cannot start") and "has no final.mean" in lacking
    chosen = json.loads((out / "chosen.json").read_text())["arms"]
    assert chosen.keys() == {"a"} and chosen["a"]["set"] == [f"{RATE}=0.0002"]
