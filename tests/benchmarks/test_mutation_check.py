"""The lists of the mutation check: bugs that a default test must find, mutants that are no bugs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from mutation_parts.equivalent import EQUIVALENT
from mutation_parts.known import KNOWN
from mutation_parts.mutants import mutants_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("known", KNOWN, ids=[known.name for known in KNOWN])
def test_a_known_bug_can_be_planted(known):
    """A change of the code that it plants must bring the list up to date."""
    assert (ROOT / known.path).read_text().count(known.old) == 1


@pytest.mark.parametrize("known", KNOWN, ids=[known.name for known in KNOWN])
def test_a_known_bug_names_a_default_test(known):
    """Not one that was renamed, or marked slow."""
    file, _, name = known.test.partition("::")
    statements = ast.parse((ROOT / file).read_text()).body
    (test,) = (each for each in statements if getattr(each, "name", "") == name.partition("[")[0])
    of_file = "".join(ast.unparse(each) for each in statements if isinstance(each, ast.Assign))
    assert "pytest.mark.slow" not in [*map(ast.unparse, test.decorator_list)]
    assert "pytestmark" not in of_file or "pytest.mark.slow" not in of_file


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
