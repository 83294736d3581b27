"""Figures: complete, the same twice, only of what has data."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_inspect as run

from grpo_replay.errors import UsageError
from grpo_replay.lab.inspection.buffer_figures import caption_of, panels_of
from grpo_replay.lab.inspection.compute import summarise
from grpo_replay.lab.inspection.source import open_source


@pytest.fixture(scope="module")
def drawn(runs, tmp_path_factory) -> Path:
    """A figure of all panels."""
    path = tmp_path_factory.mktemp("figures") / "one.svg"
    run(str(runs["ours"]), plot=str(path))
    return path


def test_a_figure_has_live_text_with_units(drawn):
    text = drawn.read_text()
    ElementTree.fromstring(text)
    for label in ("age (training steps)", "clipped tokens (%)", "KL (nats per token)",
                  "stored now", "all replays"):  # fmt: skip
        assert label in text


def width(picture: Path) -> float:
    """Inches at 300 dpi."""
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(data[16:20], "big") / 300


def test_a_figure_is_the_same_twice_and_has_two_columns_or_one_panel(runs, drawn, tmp_path):
    for name in ("again.svg", "figure.png"):
        run(str(runs["ours"]), plot=str(tmp_path / name))
    assert (tmp_path / "again.svg").read_text() == drawn.read_text()
    assert width(tmp_path / "figure.png") == pytest.approx(6.8)
    run(str(runs["ours"]), plot=str(tmp_path / "kl.png"), panel="kl")
    assert width(tmp_path / "kl.png") == pytest.approx(3.3)
    with pytest.raises(UsageError, match="choose one of staleness, uses"):
        run(str(runs["ours"]), plot=str(tmp_path / "kl.png"), panel="nonsense")


def test_only_panels_with_data_are_drawn(runs):
    names = [*panels_of(summarise(open_source(runs["ours"])))]
    assert names == ["staleness", "uses", "last-use", "clip", "kl", "stored"]
    assert list(panels_of(summarise(open_source(runs["grpo"])))) == ["uses"]


def test_in_shadow_a_caption_says_that_nothing_drawn_was_trained_on(runs):
    seen = summarise(open_source(runs["ours"]))
    in_shadow = replace(seen, settings={**seen.settings, "shadow": True})
    assert "trained on each kept rollout" in caption_of("uses", seen)
    assert "Nothing drawn was trained on" in caption_of("uses", in_shadow)
    assert caption_of("kl", in_shadow) == caption_of("kl", seen)
