"""The page in Chromium: it filters, sorts and opens, and shows hostile completions as text."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser, opened_browser
from commands import run_inspect as run
from small_runs.synthetic import SyntheticRun, synthetic_recipe

import grpo_replay

TOKENIZER = Path(grpo_replay.__file__).parent / "tiny" / "base" / "tokenizer.json"
HOSTILE = (
    "<script>document.title = 'run'</script>",
    "</textarea></script><img src=x onerror=\"document.title = 'run'\"><b>",
    "right \u202eto left\u2066 \x1b[31m",
    "m" * 1_000_000,
)
NAME = "<i>name</i>"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page of 192 rollouts with hostile completions, one kind for each member of a group."""
    folder = tmp_path_factory.mktemp("hostile") / NAME.replace("/", "_")
    writer = SyntheticRun(folder, synthetic_recipe("ours"))
    group = writer.group
    writer.group = lambda *given: [
        replace(each, completion_text=text, prompt_id=f"{NAME}{each.prompt_id}")
        for each, text in zip(group(*given), HOSTILE, strict=True)
    ]
    writer.write(6)
    shutil.copy(TOKENIZER, folder)
    run(str(folder), plot=str(folder.parent / "page.html"))
    return folder.parent / "page.html"


@pytest.fixture(scope="module")
def chromium():
    with opened_browser() as browser:
        yield browser


@pytest.fixture
def opened(page, chromium) -> Browser:
    chromium.open(page.as_uri())
    return chromium


def count(browser: Browser, selector: str) -> int:
    return browser.value(f"document.querySelectorAll({json.dumps(selector)}).length")


def text(browser: Browser, selector: str) -> str:
    return browser.value(f"document.querySelector({json.dumps(selector)}).textContent")


def test_it_opens_without_a_complaint_and_fits_1280_pixels(opened):
    assert count(opened, "figure svg") == 6 and count(opened, "#matching tr") == 192
    assert opened.value("document.documentElement.scrollWidth <= innerWidth")
    assert opened.value("document.querySelector('aside').hidden")
    assert opened.complaints == []


def test_filters_narrow_and_clear(opened):
    opened.type("input[name=text]", "ONERROR")
    opened.wait_for("document.querySelectorAll('#matching tr').length === 48")
    assert text(opened, "#found") == "48 of 192"
    opened.type("input[name=from]", "6")
    opened.wait_for("document.querySelectorAll('#matching tr').length === 8")
    opened.click("button[type=reset]")
    opened.wait_for("document.querySelectorAll('#matching tr').length === 192")
    choose = "document.forms[0].state.value = 'replayed'; document.forms[0].oninput()"
    opened.value(f"{choose}, 0")
    drawn = opened.value("data.rollouts.filter((each) => each.draws > 0).length")
    assert 0 < count(opened, "#matching tr") == drawn < 192
    assert opened.complaints == []


def test_a_click_on_a_heading_sorts_and_a_second_one_turns_the_order(opened):
    column = "[...document.querySelectorAll('#matching td:first-child')].map((td) => +td.innerText)"
    opened.click("#rollouts th:first-child button")
    assert opened.value(column) == list(range(191, -1, -1))
    opened.click("#rollouts th:first-child button")
    assert opened.value(column) == list(range(192))
    opened.click("#rollouts th:nth-child(7) button")  # advantage: undefined ones last, both ways
    for _ in range(2):
        assert text(opened, "#matching tr:last-child td:nth-child(7)") == "–"
        opened.click("#rollouts th:nth-child(7) button")
    assert opened.complaints == []


@pytest.mark.parametrize("member", range(4))
def test_a_click_shows_a_hostile_completion_as_text(opened, member):
    opened.type("input[name=text]", HOSTILE[member][:30])
    opened.wait_for("document.querySelectorAll('#matching tr').length === 48")
    opened.click("#matching tr:nth-child(3) td:nth-child(4)")
    opened.wait_for("!document.querySelector('aside').hidden")
    rollout = opened.value("opened().id")
    assert text(opened, "#name") == f"Rollout {rollout}" and rollout % 4 == member
    shown = text(opened, "#completion")
    if member == 2:
        assert shown == "right ⟨U+202E⟩to left⟨U+2066⟩ ⟨U+001B⟩[31m"
    else:
        assert HOSTILE[member].startswith(shown) and len(shown) >= min(len(HOSTILE[member]), 10**5)
        left_out = len(HOSTILE[member]) - len(shown)
        assert (f"and {left_out:,} more characters" in text(opened, "#cut")) == (left_out > 0)
    assert NAME in text(opened, "#prompt-id")
    assert count(opened, "#members tr") == 4 and count(opened, "#members tr.open") == 1
    assert opened.value("document.title").endswith("synthetic-ours · step 6")
    assert count(opened, "script") == 2 and count(opened, "img, i, b") == 0
    assert opened.value("document.documentElement.scrollWidth <= innerWidth")
    assert opened.value("part('completion').scrollWidth <= part('completion').clientWidth")
    opened.click("#close")
    opened.wait_for("document.querySelector('aside').hidden")
    assert opened.complaints == []


def test_tokens_are_coloured_by_log_prob_and_special_ones_are_framed(opened):
    opened.click("#matching tr:first-child a")
    opened.wait_for("!document.querySelector('aside').hidden")
    uses = opened.value("opened().uses.length")
    assert count(opened, "#uses tr") == uses > 1
    opened.click("#as-tokens")
    assert count(opened, "#completion span") == opened.value("opened().token_ids.length")
    assert "".join(
        opened.value("[...document.querySelectorAll('#completion span')].map((e) => e.innerText)")
    ) == opened.value("opened().token_ids.map((id) => data.pieces[id]).join('')")
    alphas = opened.value(
        "[...document.querySelectorAll('#completion span')].map((each) => "
        "+(getComputedStyle(each).backgroundColor.match(/[\\d.]+/g)[3] ?? 1))"
    )
    logprobs = opened.value("opened().logprobs")
    assert alphas == pytest.approx([0.8 * min(1, -each / 5) for each in logprobs], abs=0.01)
    assert opened.value("document.querySelectorAll('#completion .special').length") == opened.value(
        "opened().token_ids.filter((id) => id <= 2).length"
    )
    assert opened.complaints == []
