"""The choice of tuned values from the summaries of finished runs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.errors import OutputDirectoryError
from grpo_replay.lab.sweep.cells import CellState
from grpo_replay.lab.sweep.grid import expand
from grpo_replay.lab.sweep.sweep_file import SweepFile, TuneSection, read_choices
from grpo_replay.lab.sweep.sweep_run import choose, record_choice

RATE = "optimizer.learning_rate"


@pytest.fixture
def tuned(tmp_path):
    """Writes summaries, value by value and seed by seed; returns the comparison."""

    def write(scores, **grid):
        tune = TuneSection(seeds=[1, 2], grid=grid or {RATE: [1e-4, 2e-4, 4e-4]})
        file = SweepFile(name="s", recipe="tiny", arms={"a": []}, seeds=[3], tune=tune)
        (comparison,) = expand(file, Path("s.yaml"), tmp_path)
        for cells, by_seed in zip(comparison.arms[0].tuning.values(), scores, strict=True):
            for cell, final in zip(cells, by_seed, strict=True):
                cell.folder.mkdir(parents=True, exist_ok=True)
                write_summary(cell.folder, final)
        return comparison

    return write


def write_summary(run: Path, final: dict) -> None:
    summary = {"steps": 30, "wall_seconds": 1, "final": final}
    (run / "summary.json").write_text(json.dumps(summary))


def chosen(comparison):
    return choose(comparison.arms[0], comparison.file.tune)


def mean(*values):
    return [{"mean": value} for value in values]


def test_the_best_mean_over_seeds_is_chosen_and_not_the_best_run(tuned):
    choice = chosen(tuned([mean(0.5, 0.5), mean(0.6, 0.5), mean(0.9, 0.1)]))
    assert choice.overrides == (f"{RATE}=0.0002",) and choice.tied == choice.at_edge == ()


def test_a_tie_takes_the_first_and_is_told(tuned):
    choice = chosen(tuned([mean(0.1, 0.2), mean(0.6, 0.5), mean(0.5, 0.6)]))
    assert choice.overrides == (f"{RATE}=0.0002",) and choice.tied == ("learning_rate=0.0004",)


def test_a_choice_at_the_edge_of_the_grid_is_told(tuned):
    choice = chosen(tuned([mean(0.1, 0.2), mean(0.2, 0.2), mean(0.5, 0.6)]))
    assert choice.at_edge == (RATE,)
    words = chosen(tuned([mean(0.1, 0.2), mean(0.5, 0.5)], **{"loss.aggregation": [
        "token_mean", "sequence_mean"]}))  # fmt: skip
    assert words.at_edge == ()


def test_a_run_without_an_accuracy_is_named(tuned):
    comparison = tuned([mean(0.5, 0.5), mean(0.6, None), mean(0.9, 0.1)])
    with pytest.raises(OutputDirectoryError, match=r"learning_rate=0\.0002/seed-2/summ.* has no"):
        chosen(comparison)


def test_a_later_choice_replaces_an_earlier_one(tuned):
    """Unless a cell was started with the earlier one, which `state_of` refuses."""
    comparison = tuned([mean(0.5, 0.5), mean(0.6, 0.5), mean(0.1, 0.1)])
    record_choice(comparison, chosen(comparison))
    other = chosen(tuned([mean(0.5, 0.5), mean(0.1, 0.5), mean(0.9, 0.1)]))
    record_choice(comparison, other)
    assert read_choices(comparison.root)["arms"]["a"]["set"] == [f"{RATE}=0.0001"]


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
