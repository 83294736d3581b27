"""The mutation check: its mutants, and the known bugs that the default tests must find."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from mutation_parts.equivalent import EQUIVALENT
from mutation_parts.known import KNOWN
from mutation_parts.mutants import mutants_of

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""Text."""
def half(x: int | None, items):
    """No mutant here: 1 < 2."""
    if not items or x < -1:
        raise ValueError(f"{x + 1}")
    total = min(len(items[:x]), 3) if x == 2 else 0
    total += 1
    items.clear()
    return total / 2
'''


def test_mutants_are_one_change_each_and_leave_types_and_messages_alone(tmp_path):
    (tmp_path / "half.py").write_text(SOURCE)
    mutants = mutants_of(tmp_path, "half.py")
    assert len({mutant.source for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        ast.parse(mutant.source)
        assert mutant.old != mutant.new and mutant.old in " ".join(SOURCE.split())
    assert Counter(mutant.lines[0] for mutant in mutants) == {
        4: 6,  # or, not, two for <, the minus, the 1
        6: 6,  # min, the slice, 3, ==, 2, 0
        7: 2,  # the statement, the 1
        8: 1,
        9: 3,  # return, /, 2
    }


@pytest.mark.parametrize("known", KNOWN, ids=[known.name for known in KNOWN])
def test_a_known_bug_can_be_planted_and_names_a_test(known):
    """A change of the code that it plants must bring the list up to date."""
    assert (ROOT / known.path).read_text().count(known.old) == 1
    file, name = known.test.split("::")
    assert f"def {name.split('[')[0]}(" in (ROOT / file).read_text()


@pytest.mark.slow
def test_every_known_bug_is_found_by_the_default_test_that_it_names(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "mutation_check.py"), "--known"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert f"{len(KNOWN)} known mutants, 0 missed" in done.stdout


def test_mutants_that_change_nothing_still_occur_and_have_a_reason():
    for path, old, new, reason in EQUIVALENT:
        assert (old, new) in {(each.old, each.new) for each in mutants_of(ROOT, path)}, old
        assert reason
