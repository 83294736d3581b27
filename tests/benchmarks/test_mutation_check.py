"""The mutation check: its mutants, and the known bugs that the default tests must find."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from runpy import run_path

import pytest
from mutation_parts.covering import FileCover, chosen_tests
from mutation_parts.equivalent import EQUIVALENT
from mutation_parts.hosting import changed_functions
from mutation_parts.known import KNOWN
from mutation_parts.mutants import Mutant, mutants_of
from mutation_parts.results import Results

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
    assert all(mutant.in_function for mutant in mutants)


WHOLE = """LIMIT = 3
class Box:
    size: int = 4
    def grown(self, by=1):
        return [x + by for x in (self.size, LIMIT)]
    def other(self):
        return self.size
"""


def test_a_mutant_within_a_function_changes_that_function_alone(tmp_path):
    """The lines after a change may be others: what is on them is the same."""
    (tmp_path / "box.py").write_text(WHOLE)
    mutants = mutants_of(tmp_path, "box.py")
    assert [mutant.lines[0] for mutant in mutants if not mutant.in_function] == [1, 3, 4]
    within = [mutant for mutant in mutants if mutant.in_function]
    assert len(within) == 3  # two returns and a sum
    for mutant in within:
        name = "Box.grown" if mutant.lines[0] == 5 else "Box.other"
        changed = changed_functions(WHOLE, mutant.source, "box.py")
        assert [place for place, _ in changed] == [name]
    later = WHOLE.replace("    def grown", "\n    def grown")
    assert changed_functions(WHOLE, later, "box.py") == {}


def mutant_at(line: int) -> Mutant:
    return Mutant("grpo_replay/replay/box.py", (line,), "a", f"b{line}", "", True)


def test_the_quickest_tests_that_run_a_mutant_come_first_as_far_as_there_is_time():
    line = "grpo_replay/replay/box.py:5"
    covers = [
        FileCover(
            "tests/replay/test_long.py", by_test={"long": {line}, "short": {line}, "bad": {line}},
            setup_seconds={"long": 2.0, "short": 0.0}, test_seconds={"long": 3.0, "short": 0.5},
            failed=["bad"],
        ),
        FileCover("tests/replay/test_other.py", by_test={"elsewhere": set()}),
        FileCover(
            "tests/replay/test_made.py", by_file={line}, by_test={"user": set()},
            test_seconds={"user": 1.5},
        ),
    ]  # fmt: skip
    assert chosen_tests(mutant_at(5), covers) == (["short", "user", "long"], 2.5 + 1.5 + 5.0, True)
    assert chosen_tests(mutant_at(5), covers, 4.0) == (["short", "user"], 2.5 + 1.5, False)
    assert chosen_tests(mutant_at(5), covers, 0.1) == (["short"], 2.5, False)
    assert chosen_tests(mutant_at(6), covers) == ([], 0.0, True)


def test_results_go_on_where_they_stopped_unless_the_sources_are_others(tmp_path):
    (tmp_path / "grpo_replay").mkdir()
    path, source = tmp_path / "results.jsonl", tmp_path / "grpo_replay" / "box.py"
    source.write_text("1")
    results = Results(path, tmp_path)
    results.note(mutant_at(1), "survived", quick=None)
    results.note(mutant_at(1), "killed", quick=None)
    results.note(mutant_at(2), "undecided", quick=5.0)
    results = Results(path, tmp_path)
    assert [results.outcome(mutant_at(line)) for line in (1, 2, 3)] == ["killed", "undecided", None]
    assert [results.is_settled(mutant_at(line), None) for line in (1, 2, 3)] == [True, False, False]
    assert results.is_settled(mutant_at(2), 5.0) and not results.is_settled(mutant_at(2), 6.0)
    source.write_text("2")
    assert not Results(path, tmp_path).is_settled(mutant_at(1), None)


@pytest.mark.parametrize("known", KNOWN, ids=[known.name for known in KNOWN])
def test_a_known_bug_can_be_planted(known):
    """A change of the code that it plants must bring the list up to date."""
    assert (ROOT / known.path).read_text().count(known.old) == 1


def test_every_known_bug_names_a_default_test():
    """Not one that was renamed, or marked slow."""
    for file in {known.test.partition("::")[0] for known in KNOWN}:
        module = run_path(str(ROOT / file))
        for known in KNOWN:
            named, _, name = known.test.partition("::")
            if named == file:
                function, _, case = name.partition("[")
                assert not is_slow(module[function], case.rstrip("]")), known.test


def is_slow(function: Callable, case: str) -> bool:
    """Whether the test is marked so, or its case, whose name is the values of its parameters."""
    marks = getattr(function, "pytestmark", [])
    cases = [case for mark in marks if mark.name == "parametrize" for case in mark.args[1]]
    slow = {
        "-".join(map(str, each.values)): any(mark.name == "slow" for mark in each.marks)
        for each in cases
        if hasattr(each, "marks")
    }
    return any(mark.name == "slow" for mark in marks) or slow.get(case, False)


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
