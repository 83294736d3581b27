"""The screen and the JSON document."""

import io
import json
from dataclasses import replace

import pytest
from commands import run_inspect as run
from rich.console import Console
from small_runs.synthetic import SyntheticRun, synthetic_recipe, write_synthetic_run
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.lab.inspection.buffer_panels import print_inspection
from grpo_replay.lab.inspection.compute import summarise
from grpo_replay.lab.inspection.source import open_source


def screen(path, width: int = 118, step: int | None = None) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_inspection(summarise(open_source(path, step)), console)
    return console.export_text()


@pytest.mark.parametrize("preset", ["ours", "fifo"])
def test_json_has_the_keys_that_tools_rely_on(runs, preset, capsys):
    run(str(runs[preset]), as_json=True)
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["step"] == 24
    assert document["capacity_rollouts"] == (96 if preset == "fifo" else 5000)
    assert document["stored_rollouts"] == sum(row["stored"] for row in document["staleness"])
    assert "NaN" not in captured.out and "Infinity" not in captured.out


@pytest.mark.parametrize("preset", ["ours", "fifo"])
def test_every_line_fits_a_narrow_terminal(runs, preset):
    text = screen(runs[preset], 80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text


def test_the_screen_shows_occupancy_and_ages(runs):
    text = screen(runs["ours"])
    for number in (
        "92 rollouts",
        "100.0% of 92 kept in 5 steps",
        "mean 2.1 stored, mean 2.9 replayed",
    ):
        assert number in text


def test_a_snapshot_alone_does_not_know_the_replays_by_age(runs):
    assert "replays" in screen(runs["ours"])
    alone = screen(runs["ours"] / "checkpoints/step_000024/buffer.parquet")
    assert "stored now" in alone and "replays" not in alone


def test_the_limit_of_the_occupancy_is_that_of_the_step(runs):
    assert "kept in 3 steps" in screen(runs["ours"], step=3)
    assert "kept in 5 steps" in screen(runs["ours"], step=5)


def test_text_of_a_rollout_is_shown_and_not_sent_to_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    writer = SyntheticRun(tmp_path, synthetic_recipe("ours"))
    group = writer.group

    def hostile(*args):
        red = "\x1b[31m[/bold] [red]"
        return [replace(each, completion_text=red, prompt_id=red) for each in group(*args)]

    writer.group = hostile
    writer.write(5)
    done = CliRunner().invoke(app, ["inspect-buffer", str(tmp_path), "--show", "0"])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout and "␛[31m[/bold] [red]" in done.stdout


def test_runs_without_replay_or_survivors_have_a_screen_and_markup_in_a_name_is_text(
    runs, tmp_path
):
    text = screen(runs["grpo"])
    assert "occupancy" not in text and "populations" in text
    early = write_synthetic_run(tmp_path / "[bold]run", "ours", steps=2)
    assert "[bold]run" in screen(early.folder)
