"""Which default tests run which lines: computed once, then the choice of tests for a mutant."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mutation_parts.lines import LINES_VARIABLE, LineRecorder
from mutation_parts.mutants import Mutant
from mutation_parts.running import Task

PYTEST = ["-n", "0", "-q", "-p", "no:cacheprovider", "--durations=0", "--no-header", "--tb=line"]
LENGTHS = (0.1, 0.5, 2.0, 8.0)
"""Bounds, in seconds, between quick tests and long ones."""
RECORDING_SECONDS = 1200
"""Time limit of a test file while its lines are recorded."""


@dataclass
class FileCover:
    """The lines that the tests of a file run, as "path:line". `by_file` are those of its fixtures,
    its imports and the processes it starts, which count for all of its tests. `fingerprints` are
    those of the test file and of each source that it runs. In a source that is another now
    (`changed`), each test that ran a line of it counts as running all of it."""

    path: str
    fingerprints: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    by_file: set[str] = field(default_factory=set)
    by_test: dict[str, set[str]] = field(default_factory=dict)
    setup_seconds: dict[str, float] = field(default_factory=dict)
    test_seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def sources(self) -> set[str]:
        lines = self.by_file.union(*self.by_test.values())
        return {line.rpartition(":")[0] for line in lines}

    def chosen(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """Tests that run a line of the mutant, and those whose fixtures do."""
        keys = {f"{mutant.path}:{line}" for line in mutant.lines}
        if mutant.path in self.changed:
            prefix = f"{mutant.path}:"
            ran = self.by_file.union(*self.by_test.values())
            keys = {line for line in ran if line.startswith(prefix)}
        direct = [test for test, lines in self.by_test.items() if lines & keys]
        others = [test for test in self.by_test if test not in direct]
        return direct, others if self.by_file & keys else []

    def groups(self, mutant: Mutant) -> Iterator[tuple[float, float, dict[str, float]]]:
        """Tests of a like length, with the seconds of each; before them their rank, and what it
        takes to begin with them: the fixtures of the file, taken for its longest setup. Tests whose
        fixtures run the mutant wait twice as long as those that run it themselves; those of the
        file that is named after the mutant's come early."""
        named = Path(mutant.path).stem in Path(self.path).stem
        fixtures = max(self.setup_seconds.values(), default=0.0)
        for weight, tests in zip((1.0, 2.0), self.chosen(mutant)):
            weight /= 3.0 if named else 1.0
            by_length: dict[int, dict[str, float]] = {}
            for test in tests:
                setup = self.setup_seconds.get(test, 0.0)
                seconds = self.test_seconds.get(test, 0.0) + (setup if setup < fixtures else 0.0)
                length = sum(seconds > limit for limit in LENGTHS)
                if test not in self.failed:
                    by_length.setdefault(length, {})[test] = seconds
            for group in by_length.values():
                yield weight * (fixtures + sum(group.values())), fixtures, group


class _Recording:
    """A pytest plugin that fills a FileCover."""

    def __init__(self, cover: FileCover, recorder: LineRecorder, root: Path) -> None:
        self.cover, self._recorder, self._prefix = cover, recorder, f"{root}{os.sep}"

    def _taken(self) -> set[str]:
        return {f"{path.removeprefix(self._prefix)}:{n}" for path, n in self._recorder.take()}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.cover.by_file |= self._taken()
        try:
            return (yield)
        finally:
            self.cover.by_test[item.nodeid] = self._taken()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self.cover.setup_seconds[report.nodeid] = report.duration
        elif report.when == "call":
            self.cover.test_seconds[report.nodeid] = report.duration
        if report.failed and report.nodeid not in self.cover.failed:
            self.cover.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.cover.by_file |= self._taken()


def fingerprint(root: Path, files: Iterable[str]) -> str:
    """Changes with any of the files, and if one is gone."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update((root / path).read_bytes() if (root / path).exists() else b"gone")
    return total.hexdigest()


def is_recorded(root: Path, test_file: str, output: Path) -> bool:
    """Whether the tests of a file were traced as they are now."""
    if not (output / f"{test_file.replace('/', '.')}.cover.json").exists():
        return False
    [cover] = read_covers(root, output, [test_file])
    return test_file not in cover.changed


def record_task(test_file: str, output: Path) -> Task:
    """Run a test file and write its FileCover into the folder `output`."""
    name = test_file.replace("/", ".")

    def work(copy: Path) -> int:
        by_processes = output / f"{name}.lines"
        by_processes.unlink(missing_ok=True)
        os.environ[LINES_VARIABLE] = str(by_processes)
        recorder = LineRecorder(copy / "grpo_replay")
        cover = FileCover(test_file)
        recorder.start()
        base = ["--basetemp", str(output / f"{name}.tmp"), "--timeout=900"]
        pytest.main([*PYTEST, *base, test_file], plugins=[_Recording(cover, recorder, copy)])
        if by_processes.exists():
            lines = by_processes.read_text().splitlines()
            cover.by_file |= {line.removeprefix(f"{copy}{os.sep}") for line in lines}
        ran = {test_file, *cover.sources()}
        cover.fingerprints = {path: fingerprint(copy, [path]) for path in ran}
        (output / f"{name}.cover.json").write_text(json.dumps(vars(cover), default=sorted))
        return 0

    return Task(test_file, work, RECORDING_SECONDS, output / f"{name}.log")


def read_covers(root: Path, output: Path, test_files: Iterable[str]) -> list[FileCover]:
    covers = []
    for test_file in test_files:
        path = output / f"{test_file.replace('/', '.')}.cover.json"
        facts: dict[str, Any] = json.loads(path.read_text())
        cover = FileCover(**facts)
        cover.changed = {
            each for each, was in cover.fingerprints.items() if fingerprint(root, [each]) != was
        }
        cover.by_file = set(facts["by_file"])
        cover.by_test = {test: set(lines) for test, lines in facts["by_test"].items()}
        covers.append(cover)
    return covers


class _Chosen:
    """A pytest plugin that keeps the chosen tests, in the order in which they were chosen; a file
    stands for all of its tests."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if self._place_of(item) is not None]
        items[:] = sorted(kept, key=self._place_of)

    def _place_of(self, item: pytest.Item) -> int | None:
        return self._place.get(item.nodeid, self._place.get(item.nodeid.split("::")[0]))


def chosen_tests(
    mutant: Mutant, covers: Sequence[FileCover], most_seconds: float = math.inf
) -> tuple[list[str], float, bool]:
    """Tests that can notice a mutant, in at most so many seconds (at least one test), the quickest
    first; their seconds; and whether they are all. Tests that fail without a mutant are left
    out."""
    groups = sorted(
        (group for cover in covers for group in cover.groups(mutant)), key=lambda group: group[0]
    )
    tests: list[str] = []
    total = 0.0
    for _, fixtures, group in groups:
        begin = fixtures
        for test, seconds in group.items():
            if tests and total + begin + seconds > most_seconds:
                return tests, total, False
            tests.append(test)
            total, begin = total + begin + seconds, 0.0
    return tests, total, True


def named_tests(tests: Sequence[str], log: Path) -> Callable[[Path], int]:
    """Runs tests by their ids, until one fails."""

    def work(copy: Path) -> int:
        return int(pytest.main([*PYTEST, "--basetemp", str(log.with_suffix(".tmp")), "-x", *tests]))

    return work


def mutant_task(mutant: Mutant, tests: Sequence[str], limit_seconds: float, log: Path) -> Task:
    """Run the tests on the mutant until one fails. The exit code is 0 if it survives."""

    def work(copy: Path) -> int:
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        base = ["--basetemp", str(log.with_suffix(".tmp"))]
        return int(pytest.main([*PYTEST, *base, "-x", *files], plugins=[_Chosen(tests)]))

    return Task(str(mutant), work, limit_seconds, log, (mutant.path, mutant.source))
