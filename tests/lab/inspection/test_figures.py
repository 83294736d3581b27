"""Figures and the HTML page: complete, self-contained, without console errors in a browser."""

import html
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from commands import run_inspect as run
from slow_tests import slow_except
from small_runs.synthetic import PRESETS, write_synthetic_run

from grpo_replay.lab.inspection.buffer_figures import panels_of, render_page
from grpo_replay.lab.inspection.compute import summarise
from grpo_replay.lab.inspection.rows import sample_rollouts
from grpo_replay.lab.inspection.source import open_source


@pytest.mark.parametrize("preset", slow_except(["ours"], PRESETS))
def test_png_is_one_column_wide_at_300_dpi(runs, tmp_path, preset, capsys):
    path = tmp_path / "figure.png"
    run(str(runs[preset]), plot=str(path))
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(data[16:20], "big") == 990  # 3.3 inches
    captured = capsys.readouterr()
    assert captured.out == "" and "wrote" in captured.err


@pytest.mark.slow
def test_svg_has_live_text_with_units(runs, tmp_path):
    path = tmp_path / "figure.svg"
    run(str(runs["ours"]), plot=str(path))
    text = path.read_text()
    ElementTree.fromstring(text)
    for label in (
        "age (training steps)",
        "rollouts (%)",
        "clipped tokens (%)",
        "KL (nats per token)",
    ):
        assert label in text
    run(str(runs["ours"]), plot=str(tmp_path / "again.svg"))
    assert (tmp_path / "again.svg").read_text() == text  # no dates, no random ids


def test_only_panels_with_data_are_drawn(runs):
    ours = summarise(open_source(runs["ours"]))
    assert len(panels_of(ours)) == 9
    assert list(panels_of(summarise(open_source(runs["grpo"])))) == [
        "Uses of a rollout", "Clip fraction over training", "Reward over training",
    ]  # fmt: skip


def test_every_figure_names_the_run_and_the_step(runs, tmp_path):
    path = tmp_path / "figure.svg"
    run(str(runs["ours"]), plot=str(path))
    assert "synthetic-ours · ours · step 24" in path.read_text()
    assert "synthetic-ours · ours · step 24" in render_page(summarise(open_source(runs["ours"])))


def test_the_name_of_a_run_is_not_read_as_a_formula(runs, tmp_path):
    folder = tmp_path / "a$x_$b"
    shutil.copytree(runs["ours"], folder)
    run(str(folder), plot=str(tmp_path / "figure.svg"))
    assert "a$x_$b" in (tmp_path / "figure.svg").read_text()


@pytest.mark.slow
def test_equal_runs_give_equal_pdfs(runs, tmp_path):
    for name in ("one.pdf", "other.pdf"):
        run(str(runs["ours"]), plot=str(tmp_path / name))
    one = (tmp_path / "one.pdf").read_bytes()
    assert one.startswith(b"%PDF") and one == (tmp_path / "other.pdf").read_bytes()


@pytest.mark.parametrize("preset", ["ours", "uniform", "group_std"])
def test_a_healthy_buffer_stays_on_the_line_of_its_limit(runs, preset):
    inspection = summarise(open_source(runs[preset]))
    stored, limits = dict(inspection.trends["buffer/rollouts"]), dict(inspection.occupancy.limits)
    assert len(limits) == 24 and {step: limits[step] for step in stored} == stored


def test_the_page_shows_rollouts_of_the_last_step_as_text(runs, tmp_path):
    path = tmp_path / "page.html"
    run(str(runs["ours"]), plot=str(path))
    page = path.read_text()
    rows = sample_rollouts(open_source(runs["ours"]))
    assert page.count("<details>") == len(rows) == 6
    assert len({row["rollout_id"] for row in rows}) == 6
    for row in rows:
        assert f"rollout {row['rollout_id']} ·" in page
        assert html.escape(row["completion_text"]) in page


def test_the_page_has_the_numbers_of_every_table(runs):
    inspection = summarise(open_source(runs["ours"]))
    root = ElementTree.fromstring(
        "<page>"
        + "".join(re.findall(r"<table>.*?</table>", render_page(inspection), re.S))
        + "</page>"
    )
    tables = [[[cell.text or "" for cell in row] for row in table.iter("tr")] for table in root]
    populations, by_age, trends = tables
    assert [row[:2] for row in populations[1:]] == [
        [rows.name, f"{rows.rollouts:,}"] for rows in inspection.populations
    ]
    assert populations[1][4] == "–"  # dropped groups: undefined among all generated rollouts
    assert [row[1] for row in by_age[1:]] == [f"{row.uses:,}" for row in inspection.by_age.values()]
    assert [row[0] for row in by_age[1:]] == ["fresh", "1", "2", "3", "4", "5"]
    assert len(trends) == 1 + len(inspection.trends)
    for table in tables:
        assert {len(row) for row in table} == {len(table[0])}


def test_the_page_loads_no_external_resource(runs):
    page = render_page(summarise(open_source(runs["ours"])))
    assert page.count("<svg") == 9
    # XML namespace names are not loaded.
    links = re.findall(r'(?:src|href|xlink:href)\s*=\s*"([^"#][^"]*)"', page)
    assert set(links) <= {"data:,"}
    assert "<script" not in page and "@import" not in page
    assert "default-src 'none'" in page


def test_ids_of_figures_are_unique_in_the_page(runs):
    page = render_page(summarise(open_source(runs["ours"])))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) > 100
    assert len(ids) == len(set(ids))
    referenced = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert referenced <= set(ids)


def test_text_from_a_run_is_escaped(tmp_path):
    made = write_synthetic_run(tmp_path / "<script>alert(1)</script>", "ours", steps=6)
    page = render_page(summarise(open_source(made.folder)))
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--enable-logging=stderr",
    "--window-size=1300,1800",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
]


def browse(page: Path, what: str) -> tuple[str, list[str]]:
    """The output of the browser, and its errors: console errors and hosts it loaded from."""
    log = page.parent / "net.json"
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [BROWSER, *FLAGS, profile, f"--log-net-log={log}", what, page.as_uri()]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    errors = [line for line in seen.stderr.splitlines() if "CONSOLE" in line]
    hosts = re.findall(r'"url":"https?://([^/"]+)', log.read_text())
    # The browser itself contacts its vendor for updates.
    foreign = {host for host in hosts if not re.search(r"\b(google|googleapis|gvt1)\.com", host)}
    return seen.stdout, [*errors, *sorted(foreign)]


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize("preset", PRESETS)
def test_the_page_opens_in_a_browser_without_errors_or_network(runs, tmp_path, preset):
    page = tmp_path / "page.html"
    run(str(runs[preset]), plot=str(page))
    document, wrong = browse(page, "--dump-dom")
    assert wrong == []
    assert f"synthetic-{preset}" in document and "</footer>" in document
    assert document.count("<svg") == len(panels_of(summarise(open_source(runs[preset]))))
    shot = tmp_path / "shot.png"
    browse(page, f"--screenshot={shot}")
    assert shot.stat().st_size > 10_000


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize(
    "body",
    [
        "<script>console.error('broken')</script>",
        "<img src='https://example.org/picture.png'>",
        "<link rel='stylesheet' href='https://example.org/style.css'>",
    ],
)
def test_the_browser_check_finds_errors_and_external_loads(tmp_path, body):
    page = tmp_path / "bad.html"
    page.write_text(f"<!DOCTYPE html><title>bad</title>{body}")
    assert browse(page, "--dump-dom")[1] != []
