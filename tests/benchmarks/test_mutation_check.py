"""The mutation check: its mutants, and the known bugs that the default tests must find."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path
from runpy import run_path

import pytest
from mutation_parts.covering import (
    FileCover,
    chosen_tests,
    mutant_task,
    read_cover,
    record_task,
)
from mutation_parts.equivalent import EQUIVALENT
from mutation_parts.known import KNOWN
from mutation_parts.mutants import Mutant, mutants_of
from mutation_parts.results import Results
from mutation_parts.running import make_copies, run_tasks

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


def mutant_at(line: int) -> Mutant:
    return Mutant("grpo_replay/replay/box.py", (line,), "a", f"b{line}", "")


def test_the_quickest_tests_that_run_a_mutant_come_first():
    line, elsewhere = "grpo_replay/replay/box.py:5", "grpo_replay/replay/box.py:7"
    covers = [
        FileCover(
            "tests/replay/test_long.py", by_test={"long": {line}, "short": {line}},
            fixtures=0.3, seconds={"long": 3.0, "short": 0.1},
        ),
        FileCover(
            "tests/other/test_other.py", by_test={"other": {elsewhere}}, seconds={"other": 1.0}
        ),
        FileCover(
            "tests/replay/test_made.py", by_file={line}, by_test={"user": set()},
            fixtures=1.5, seconds={"user": 0.1},
        ),
    ]  # fmt: skip
    assert chosen_tests(mutant_at(5), covers) == ([["short"], ["user"], ["long"]], 3.1 + 0.3 + 1.6)
    assert chosen_tests(mutant_at(6), covers) == ([], 0.0)
    covers[1].changed = {"grpo_replay/replay/box.py"}  # lines have moved: any of them counts
    assert chosen_tests(mutant_at(6), covers) == ([["other"]], 1.0)


BOX_PATH = "grpo_replay/replay/mutated_box.py"
BOX = "def half(x):\n    return x / 2\n"
TESTS = """
import sys
import pytest
sys.path.insert(0, "grpo_replay/replay")
from mutated_box import half
def test_of_nothing(): half(2)
@pytest.mark.parametrize("x", [half(2), half(4)])
def test_with_names_from_the_package(x): assert x
def test_that_fails_anyway(): assert half(2) == 3
def test_of_half(): assert half(2) == 1
"""


def test_a_mutant_is_killed_by_a_test_that_fails_on_it_alone(tmp_path):
    """Not by one that always fails, nor by one that is no longer collected under its name."""
    root, output = tmp_path / "root", tmp_path / "output"
    for path, text in {BOX_PATH: BOX, "tests/replay/test_box.py": TESTS}.items():
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(text)
    output.mkdir()
    copies, file = make_copies(root, output, 1), "tests/replay/test_box.py"
    assert [each.code for each in run_tasks([record_task(file, output)], copies)] == [0]
    cover = read_cover(root, output, file)
    mutant = mutants_of(root, BOX_PATH)[-1]
    assert mutant.new == "return x / (3)"
    groups, _ = chosen_tests(mutant, [cover])
    tests = {test.partition("::")[2] for group in groups for test in group}
    renamed = {f"test_with_names_from_the_package[{x}]" for x in (1.0, 2.0)}
    assert tests == {"test_of_nothing", "test_of_half", *renamed}
    for chosen, code in (({"test_of_half"}, 1), ({"test_of_nothing"}, 0), (renamed, 0)):
        task = mutant_task(mutant, [[f"{file}::{test}" for test in chosen]], 60, output / "log")
        assert [each.code for each in run_tasks([task], copies)] == [code]


def test_results_go_on_where_they_stopped_unless_the_sources_are_others(tmp_path):
    for folder in ("grpo_replay", "tests/replay", "tests/other"):
        (tmp_path / folder).mkdir(parents=True)
    path, source = tmp_path / "results.jsonl", tmp_path / "grpo_replay" / "box.py"
    source.write_text("1")
    (tmp_path / "tests/other/test_box.py").write_text("1")
    results = Results(path, tmp_path)
    results.note(mutant_at(1), "tests/replay", "survived")
    results.note(mutant_at(2), "tests/replay", "killed", seconds=1.0)
    results = Results(path, tmp_path)
    found = [results.outcome(mutant_at(line), "tests/replay") for line in (1, 2, 3)]
    assert found == ["survived", "killed", None]
    assert results.outcome(mutant_at(1), "tests") is None, "tests of other folders were not tried"
    source.write_text("2")
    assert Results(path, tmp_path).outcome(mutant_at(1), "tests/replay") is None


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
                marks = getattr(module[name.partition("[")[0]], "pytestmark", [])
                assert "slow" not in {mark.name for mark in marks}, known.test


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
