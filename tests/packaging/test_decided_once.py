"""Composition, mode and backend are compared where they are decided, and nowhere else: other code
asks the section or the sampler what it needs to know."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_replay"
HOMES = {
    "composition": ("replay/", "recipe/"),
    "mode": ("training/", "recipe/"),
    "backend": ("sampling/", "recipe/"),
}


def compares(line: str, key: str) -> bool:
    """Whether a line of code compares this key with a value (not whether it is given at all)."""
    after = rf"\.{key}\b\s*(==|!=|in\b|not in\b|is\b(?! (not )?None))"
    return bool(re.search(rf"{after}|(==|!=)\s*[\w.]*\.{key}\b|match .*\.{key}\b", line))


@pytest.mark.parametrize("key", HOMES)
def test_nothing_else_branches_on_it(key):
    found = [
        f"{path.relative_to(PACKAGE)}:{number} {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not str(path.relative_to(PACKAGE)).startswith(HOMES[key])
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if compares(line, key)
    ]
    assert found == []


def test_a_comparison_is_found():
    for line in (
        'if a.mode == "sync":',
        'x = s.mode in ("a",)',
        'if "a" != r.run.mode:',
        "match s.mode:",
    ):
        assert compares(line, "mode")
    assert not compares("if options.backend is not None:", "backend")
