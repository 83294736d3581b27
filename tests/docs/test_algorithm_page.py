"""docs/algorithm.md names functions, recipe keys and tests that exist."""

import ast
import importlib
import re
from pathlib import Path

from grpo_replay.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "algorithm.md").read_text()


def is_recipe_key(name: str) -> bool:
    fields = Recipe.model_fields
    *sections, leaf = name.split(".")
    for section in sections:
        if section not in fields:
            return False
        kind = fields[section].annotation
        fields = getattr(kind, "model_fields", {})
    return leaf in fields


def is_code(name: str) -> bool:
    """Whether `grpo_replay.<name>` is a module, or something in one."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["grpo_replay", *parts[:split]]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def test_every_function_and_recipe_key_named_exists():
    names = set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", PAGE))
    missing = [name for name in names if not is_code(name) and not is_recipe_key(name)]
    assert missing == []
    assert sum(is_code(name) for name in names) > 25
    assert sum(is_recipe_key(name) for name in names) > 8


def test_every_test_named_exists():
    ids = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE))
    for path, name in ids:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path}::{name}"
    assert len(ids) > 50
    assert PAGE.count("::test_") == len(re.findall(r"`tests/[\w/]+\.py::\w+`", PAGE))


def test_every_trap_has_a_test_of_the_real_trainer():
    rows = PAGE.split("## 7. Traps")[1].split("\n| ")[2:]
    assert len(rows) >= 12
    for row in rows:
        assert "`tests/training/test_trainer" in row, row


def test_the_numbers_of_combinations_are_those_of_the_tests():
    counts = re.search(
        r"ten steps \((\d+)\), and so does every preset \((\d+)\) and every option \((\d+)\)", PAGE
    )
    source = (ROOT / "tests/training/test_combinations.py").read_text()
    refused = re.search(r"refused with a reason \((\d+)\)", PAGE)[1]
    assert f"({', '.join([*counts.groups(), refused])})" in source
