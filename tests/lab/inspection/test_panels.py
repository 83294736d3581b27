"""The screen and the JSON document."""

import io
import json
import re
from dataclasses import asdict, replace

import pytest
from commands import run_inspect as run
from rich.console import Console
from small_runs.synthetic import SyntheticRun, synthetic_recipe, write_synthetic_run
from typer.testing import CliRunner

from grpo_replay.cli.app import app
from grpo_replay.lab.inspection.buffer_panels import print_inspection
from grpo_replay.lab.inspection.buffer_summary import StalenessRow
from grpo_replay.lab.inspection.buffer_tables import age_bins, trends_of
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


@pytest.mark.parametrize("width", [80, 97, 116, 120, 200])
@pytest.mark.parametrize("preset", ["ours", "fifo"])
def test_every_line_fits_the_terminal_and_panels_are_as_wide_as_it_is(runs, preset, width):
    text = screen(runs[preset], width)
    widest = max(len(line) for line in text.splitlines() if "─" in line)
    assert widest == min(width, 120)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text


def test_the_screen_shows_occupancy_and_ages(runs):
    text = " ".join(screen(runs["ours"]).split())
    for number in (
        "rollouts stored 92",
        "of 92 kept in 5 steps 100.0% ██████████",
        "mean 2.1 stored, mean 2.9 replayed",
    ):
        assert number in text


def test_the_screen_begins_with_bars_of_the_staleness(runs):
    lines = screen(runs["ours"], 80).splitlines()
    first = next(number for number, line in enumerate(lines) if "╭" in line)
    assert lines[first].startswith("╭─ staleness: age in steps, mean 2.1 stored, mean 2.9 replayed")
    document = asdict(summarise(open_source(runs["ours"])))
    for line, row in zip(lines[first + 2 :], document["staleness"], strict=False):
        counts = [row[name] for name in ("stored", "replayed") if row[name]]
        assert line.split()[1] == str(row["age"])
        assert len(re.findall(r"[▏▎▍▌▋▊▉█]+", line)) == len(counts)
    total = sum(row["stored"] for row in document["staleness"])
    newest = document["staleness"][0]["stored"]
    longest = max(row["stored"] for row in document["staleness"])
    assert f"{newest}" in lines[first + 2] and f"{newest / total:.0%}" in lines[first + 2]
    cells = [line.count("█") for line in lines[first + 2 : first + 7]]
    assert cells[0] == pytest.approx(newest / longest * 22, abs=1)


def test_many_ages_are_counted_in_bins():
    rows = [StalenessRow(age, stored=age, replayed=1) for age in range(30)]
    bins = age_bins(rows)
    assert [each.label for each in bins] == [f"{start}–{start + 2}" for start in range(0, 30, 3)]
    assert [each.stored for each in bins] == [3 * start + 3 for start in range(0, 30, 3)]
    assert [each.label for each in age_bins(rows[:12])] == [str(age) for age in range(12)]
    assert [each.label for each in age_bins(rows[:13])][-2:] == ["10–11", "12"]


def test_the_legend_explains_only_what_is_shown(runs):
    whole = screen(runs["ours"])
    for words in (
        "replayed: of the whole run",
        "ESS: effective",
        "age 0: fresh",
        "age 5: the last",
    ):
        assert words in whole
    alone = screen(runs["ours"] / "checkpoints/step_000024/buffer.parquet")
    assert "age 5: the last draw" in alone
    fifo, plain = screen(runs["fifo"]), screen(runs["grpo"])
    assert "the last draw" not in fifo
    for text, words in ((alone, ("replayed:", "ESS:", "age 0:")), (plain, ("replayed:", "ESS:"))):
        assert not [each for each in words if each in text]


def test_a_snapshot_alone_does_not_know_the_replays_by_age(runs):
    assert "replayed" in screen(runs["ours"])
    alone = screen(runs["ours"] / "checkpoints/step_000024/buffer.parquet")
    assert "stored now" in alone and "replayed" not in alone


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


def test_a_metric_without_a_value_in_the_last_eighth_shows_its_last_one_and_the_step(runs):
    """As in shadow, where only probes measure clipping: 24 steps, of which the last is 22 to 24."""
    seen = summarise(open_source(runs["ours"]))
    points = {
        "replay/approx_kl": ((10, 0.25), (20, 0.5)),
        "buffer/rollouts": ((22, 8.0), (24, 6.0)),
    }
    probed = replace(seen, trends=points)
    assert [trend.last for trend in trends_of(probed)] == ["0.5 (step 20)", "7"]
    console = Console(width=80, record=True, file=io.StringIO())
    print_inspection(probed, console)
    assert max(map(len, console.export_text().splitlines())) == 80
