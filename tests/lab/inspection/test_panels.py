"""The screen and the JSON document."""

import io
import json
import re
from dataclasses import replace

import pytest
from commands import run_inspect as run
from rich.console import Console
from small_runs.synthetic import SyntheticRun, synthetic_recipe, write_synthetic_run
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.cli.train_command import print_staleness
from grpo_replay.lab.inspection.buffer_panels import merge_rows, print_inspection
from grpo_replay.lab.inspection.compute import summarise
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.terminal.console import bar, sparkline, tracked


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
    for number in ("92 rollouts", "100.0% of τ_max·B' ≈ 92", "mean 2.1 stored, 2.9 at use"):
        assert number in text


@pytest.mark.parametrize("preset", ["ours", "grpo"])
def test_the_end_of_train_shows_the_ages_that_inspect_buffer_shows(runs, preset):
    ended = Console(width=60, record=True, file=io.StringIO())
    print_staleness(runs[preset], 24, synthetic_recipe(preset), ended)
    text = ended.export_text()
    assert text == "" or text.splitlines()[0] in screen(runs[preset], 60)
    assert ("at use" in text) == (preset != "grpo")


def test_the_limit_of_the_occupancy_is_that_of_the_step(runs):
    assert "100.0% of 3·B' ≈" in screen(runs["ours"], step=3)
    assert "100.0% of τ_max·B' ≈" in screen(runs["ours"], step=5)


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


@pytest.mark.parametrize(
    "value, expected", [(0, ""), (8, "████"), (4, "██"), (3, "█▌"), (0.001, "▏"), (99, "████")]
)
def test_bars_are_in_eighths_and_show_every_positive_count(value, expected):
    assert bar(value, 8, 4) == expected


def test_sparklines_rise_with_the_values():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0] * 4, 8) == "▄▄▄▄"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([], 8) == ""


def test_progress_is_shown_only_for_slow_operations(monkeypatch, capsys):
    assert list(tracked([1, 2, 3], "reading")) == [1, 2, 3]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("grpo_replay.terminal.console.DELAY_SECONDS", -1.0)
    assert list(tracked([1, 2, 3], "reading")) == [1, 2, 3]
    captured = capsys.readouterr()
    assert captured.err == "reading: 3 in total\n" and captured.out == ""


def test_merged_rows_keep_the_totals():
    rows = [(age, age + 1, 2 * age) for age in range(61)]
    merged = merge_rows(rows, 12)
    assert len(merged) <= 12
    assert merged[0][0] == "0–5" and merged[-1][0] == "60"
    assert sum(row[1] for row in merged) == sum(row[1] for row in rows)
    assert sum(row[2] for row in merged) == sum(row[2] for row in rows)


@pytest.mark.parametrize(
    ("ages", "shown"),
    [
        ((0, 3, 9), [3, 9]),
        (range(61), [5, 11, 16, 22, 27, 33, 38, 44, 49, 55, 60]),
    ],
)
def test_ages_that_a_table_leaves_out_are_counted(runs, ages, shown):
    """At most twelve, evenly spaced, with the first, which is fresh, and the last."""
    inspection = summarise(open_source(runs["ours"]))
    row = next(iter(inspection.by_age.values()))
    console = Console(width=80, record=True, file=io.StringIO())
    print_inspection(replace(inspection, by_age=dict.fromkeys(ages, row)), console)
    _, table = console.export_text().split("KL by age at use")
    table = table.split("over training")[0]
    assert [int(age) for age in re.findall(r"^│ +(\d+) +\d", table, re.M)] == shown
    assert "fresh" in table
    assert ("12 of 61 ages; --json has all" in table) is (len(ages) == 61)
