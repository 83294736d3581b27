"""Docs that cannot rot: references are generated, and every link in them leads somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def _reference_maker():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs/make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recipe_reference_is_what_the_schema_says():
    assert (ROOT / "docs/recipe.md").read_text() == _reference_maker().recipe_reference()


def test_the_command_reference_is_what_the_command_line_says():
    assert (ROOT / "docs/cli.md").read_text() == _reference_maker().cli_reference()


def test_the_notebook_is_the_guide():
    assert (ROOT / "docs/guide.ipynb").read_text() == _reference_maker().guide_notebook()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    for link in links:
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_pages_checked_are_those_of_the_index():
    index = (ROOT / "docs/index.md").read_text()
    named = set(re.findall(r"\((\w[\w-]*\.md)\)", index))
    there = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert named == there
    assert len(named) >= 10


def test_every_key_of_the_recipe_has_a_meaning():
    maker = _reference_maker()
    rows = [line for line in maker.recipe_reference().splitlines() if line.startswith("| `")]
    keys = [row for row in rows if row.count(" | ") == 3]
    assert len(keys) > 80
    for row in keys:
        assert row.rstrip(" |").split(" | ")[-1].strip(), row
