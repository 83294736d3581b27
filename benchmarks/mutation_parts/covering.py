"""Which default tests run which lines: computed once, then the choice of tests for a mutant."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from mutation_parts.lines import LINES_VARIABLE, LineRecorder
from mutation_parts.mutants import Mutant
from mutation_parts.running import Task

PYTEST = ["-n", "0", "-q", "-p", "no:cacheprovider", "--durations=0", "--no-header", "--tb=line"]
LENGTHS = (0.5, 2.0, 8.0)
"""Bounds, in seconds, between quick tests and long ones."""
RECORDING_SECONDS = 1200
"""Time limit of a test file while its lines are recorded."""


@dataclass
class FileCover:
    """The lines that the tests of a file run, as "path:line". `by_file` are those of its fixtures,
    its imports and the processes it starts, which count for all of its tests. `seconds` are those
    of each test, `fixtures` the longest setup. `fingerprints` are those of the test file and of
    each source that it runs. In a source that is another now (`changed`), each test that ran a line
    of it counts as running all of it. Tests that fail without a mutant are not there."""

    path: str
    fingerprints: dict[str, str] = field(default_factory=dict)
    by_file: set[str] = field(default_factory=set)
    by_test: dict[str, set[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    fixtures: float = 0.0
    changed: set[str] = field(default_factory=set)

    @property
    def all_lines(self) -> set[str]:
        return self.by_file.union(*self.by_test.values())

    def ranked(self, mutant: Mutant) -> Iterator[tuple[tuple[int, bool, str, float], str]]:
        """Each test that can notice the mutant, with its place among those of all files: quick
        tests first, then those that run it themselves rather than in a fixture; the tests of a file
        one after the other, since they share its fixtures."""
        keys = {f"{mutant.path}:{line}" for line in mutant.lines}
        if mutant.path in self.changed:
            keys = {line for line in self.all_lines if line.startswith(f"{mutant.path}:")}
        for test, lines in self.by_test.items():
            direct = bool(lines & keys)
            if direct or self.by_file & keys:
                length = sum(self.fixtures + self.seconds[test] > limit for limit in LENGTHS)
                yield (length, not direct, self.path, self.seconds[test]), test


class _Recording:
    """A pytest plugin that fills a FileCover."""

    def __init__(self, cover: FileCover, recorder: LineRecorder, root: Path) -> None:
        self._cover, self._recorder, self._prefix = cover, recorder, f"{root}{os.sep}"
        self._failed: set[str] = set()

    def _taken(self) -> set[str]:
        return {f"{path.removeprefix(self._prefix)}:{n}" for path, n in self._recorder.take()}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._cover.by_file |= self._taken()
        try:
            return (yield)
        finally:
            self._cover.by_test[item.nodeid] = self._taken()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._cover.fixtures = max(self._cover.fixtures, report.duration)
        elif report.when == "call":
            self._cover.seconds[report.nodeid] = report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._cover.by_file |= self._taken()
        for test in self._failed:
            self._cover.by_test.pop(test, None)


def fingerprint(root: Path, files: Iterable[str]) -> str:
    """Changes with any of the files, and if one is gone."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update((root / path).read_bytes() if (root / path).exists() else b"gone")
    return total.hexdigest()


def cover_path(output: Path, test_file: str) -> Path:
    return output / f"{test_file.replace('/', '.')}.cover.json"


def is_recorded(root: Path, test_file: str, output: Path) -> bool:
    """Whether the tests of a file were traced as they are now."""
    if not cover_path(output, test_file).exists():
        return False
    return test_file not in read_cover(root, output, test_file).changed


def record_task(test_file: str, output: Path) -> Task:
    """Run a test file and write its FileCover into the folder `output`."""
    path = cover_path(output, test_file)

    def work(copy: Path) -> int:
        by_processes = path.with_suffix(".lines")
        by_processes.unlink(missing_ok=True)
        os.environ[LINES_VARIABLE] = str(by_processes)
        recorder = LineRecorder(copy / "grpo_replay")
        cover = FileCover(test_file)
        recorder.start()
        base = ["--basetemp", str(path.with_suffix(".tmp")), "--timeout=900"]
        pytest.main([*PYTEST, *base, test_file], plugins=[_Recording(cover, recorder, copy)])
        if by_processes.exists():
            lines = by_processes.read_text().splitlines()
            cover.by_file |= {line.removeprefix(f"{copy}{os.sep}") for line in lines}
        ran = {test_file, *(line.rpartition(":")[0] for line in cover.all_lines)}
        cover.fingerprints = {each: fingerprint(copy, [each]) for each in ran}
        path.write_text(json.dumps(vars(cover), default=sorted))
        return 0

    return Task(test_file, work, RECORDING_SECONDS, path.with_suffix(".log"))


def read_cover(root: Path, output: Path, test_file: str) -> FileCover:
    facts: dict[str, Any] = json.loads(cover_path(output, test_file).read_text())
    cover = FileCover(**facts)
    cover.changed = {
        each for each, was in cover.fingerprints.items() if fingerprint(root, [each]) != was
    }
    cover.by_file = set(facts["by_file"])
    cover.by_test = {test: set(lines) for test, lines in facts["by_test"].items()}
    return cover


def chosen_tests(mutant: Mutant, covers: Iterable[FileCover]) -> tuple[list[list[str]], float]:
    """Tests that can notice a mutant, those of a like length together and the quickest first; and
    the seconds of all."""
    ranked, seconds = [], 0.0
    for cover in covers:
        found = list(cover.ranked(mutant))
        ranked += found
        seconds += sum(cover.seconds[test] for _, test in found) + cover.fixtures * bool(found)
    groups = groupby(sorted(ranked), key=lambda each: each[0][0])
    return [[test for _, test in group] for _, group in groups], seconds


class _Chosen:
    """A pytest plugin that keeps the chosen tests, in the order in which they were chosen."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(kept, key=lambda item: self._place[item.nodeid])


def named_tests(tests: Sequence[str], log: Path) -> Callable[[Path], int]:
    """Runs tests by their ids, until one fails."""

    def work(copy: Path) -> int:
        return int(pytest.main([*PYTEST, "--basetemp", str(log.with_suffix(".tmp")), "-x", *tests]))

    return work


def mutant_task(
    mutant: Mutant, groups: Sequence[Sequence[str]], limit_seconds: float, log: Path
) -> Task:
    """Run the groups of tests on the mutant until a test fails. The exit code is 0 if it survives;
    a test that the mutant takes away has not failed."""

    def work(copy: Path) -> int:
        base = ["--basetemp", str(log.with_suffix(".tmp")), "-x"]
        for tests in groups:
            files = dict.fromkeys(test.split("::")[0] for test in tests)
            code = pytest.main([*PYTEST, *base, *files], plugins=[_Chosen(tests)])
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                return int(code)
        return 0

    return Task(str(mutant), work, limit_seconds, log, (mutant.path, mutant.source))
