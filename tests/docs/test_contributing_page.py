"""CONTRIBUTING.md: its first tests pass, and its table of tests/support names what is there."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = (
    (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Write your first test")[1]
)
SECTION = SECTION.split("\n## ")[0]


@pytest.mark.slow
def test_the_first_tests_pass_as_printed(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    tests = [name for name in names if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        of_trainer = "tmp_path" in names[name].__code__.co_varnames
        names[name](*([tmp_path] if of_trainer else []))


def test_the_table_of_support_modules_names_what_is_there():
    rows = [line for line in SECTION.splitlines() if line.startswith("| `")]
    patterns = re.findall(r"`([\w*]+)`", " ".join(row.split("|")[1] for row in rows))
    there = {path.stem for path in (ROOT / "tests" / "support").iterdir()}
    assert len(patterns) > 10
    assert [each for each in patterns if not any(fnmatch(name, each) for name in there)] == []
