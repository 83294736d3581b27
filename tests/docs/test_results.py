"""One file of measured results: the pages quote it, and the planner's verdicts have its signs."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _maker():
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "docs/make_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = _maker()


@pytest.mark.parametrize("page", MAKER.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_parts_that_the_results_give(page):
    text = page.read_text()
    assert MAKER.with_results(text) == text, "run python docs/make_results.py"


def test_the_written_parts_have_all_their_numbers():
    numbers = 0
    for page in MAKER.PAGES:
        parts = re.findall(r"<!-- results: [\w-]+ -->\n(.*?)<!-- end -->", page.read_text(), re.S)
        numbers += sum(len(re.findall(r"\d+\.\d+", part)) for part in parts)
    assert numbers == 421


def test_the_other_pages_quote_the_results():
    """Differences and costs as docs/tiny.md, docs/report.md and docs/async.md print them."""
    pages = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("tiny", "report", "async")}
    found, checked = MAKER.results(), 0
    for sweep in ("tiny-main", "tiny-long"):
        for arm, each in found[sweep]["difference"].items():
            mean, bounds, ahead = re.match(r"(\S+) (\[.*\]), (.*)", MAKER.difference(each)).groups()
            words = " .*".join(map(re.escape, (f"{each['seeds']} {mean}", f"{bounds} {ahead} ")))
            row = rf"^ {arm} +{words}"
            assert re.search(row, pages["tiny"], re.MULTILINE), (sweep, arm)
            checked += 5
    for ratio in found["tiny-example"]["compute"][0.863]["ours"]:
        assert re.search(rf" ours  4 of 4 .* {ratio:.2f} \(4\)\n", pages["report"])
        checked += 1
    for each in (found["async"]["fifo_to_use_once"], found["async"]["use_once_to_sync"]):
        words = f"{each['ratio']:.2f} ({each['low']:.2f} to {each['high']:.2f})"
        assert words in pages["async"]
        checked += 3
    assert checked == 6 * 5 + 3 + 2 * 3


def test_no_verdict_has_the_wrong_sign_for_a_measured_sweep():
    """A verdict may be undecided, but never cheaper for what was measured dearer, or dearer for
    what was measured cheaper; and the default assumptions decide something."""
    checked, decided = 0, 0
    for sweep, arm, mu, ratios, judged in MAKER.cases():
        for growth, (verdict, _) in judged.items():
            for ratio in ratios:
                signs = ("undecided", "cheaper" if ratio < 1 else "dearer")
                assert verdict.answer in signs, (sweep, arm, mu, growth, ratio, verdict)
                checked += 1
                decided += verdict.answer != "undecided"
    assert (checked, decided) == (18, 9)
