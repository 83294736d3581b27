"""Which default tests run which lines: computed once, then the choice of tests for a mutant."""

import hashlib
import json
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
RECORDING_SECONDS = 1200
"""Time limit of a test file while its lines are recorded."""


@dataclass
class FileCover:
    """The lines that the tests of a file run, as "path:line". `by_file` are those of its fixtures,
    its imports and the processes it starts, which count for all of its tests. `fingerprint` is that
    of the sources which it is true of."""

    path: str
    fingerprint: str = ""
    seconds: float = 0.0
    by_file: set[str] = field(default_factory=set)
    by_test: dict[str, set[str]] = field(default_factory=dict)
    test_seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def chosen(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """Tests that run a line of the mutant, and those whose fixtures do."""
        keys = {f"{mutant.path}:{line}" for line in mutant.lines}
        direct = [test for test, lines in self.by_test.items() if lines & keys]
        others = (
            [test for test in self.by_test if test not in direct] if self.by_file & keys else []
        )
        return direct, others


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
        self.cover.seconds += report.duration
        if report.when == "call":
            self.cover.test_seconds[report.nodeid] = report.duration
        if report.failed and report.nodeid not in self.cover.failed:
            self.cover.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.cover.by_file |= self._taken()


def fingerprint(root: Path, test_file: str) -> str:
    """Changes with the test file and with any file of the package."""
    total = hashlib.sha256((root / test_file).read_bytes())
    for path in sorted((root / "grpo_replay").rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()


def is_recorded(root: Path, test_file: str, output: Path) -> bool:
    path = output / f"{test_file.replace('/', '.')}.json"
    return path.exists() and json.loads(path.read_text()).get("fingerprint") == fingerprint(
        root, test_file
    )


def record_task(test_file: str, output: Path) -> Task:
    """Run a test file and write its FileCover into the folder `output`."""
    name = test_file.replace("/", ".")

    def work(copy: Path) -> int:
        by_processes = output / f"{name}.lines"
        by_processes.unlink(missing_ok=True)
        os.environ[LINES_VARIABLE] = str(by_processes)
        recorder = LineRecorder(copy / "grpo_replay")
        cover = FileCover(test_file, fingerprint(copy, test_file))
        recorder.start()
        base = ["--basetemp", str(output / f"{name}.tmp"), "--timeout=900"]
        pytest.main([*PYTEST, *base, test_file], plugins=[_Recording(cover, recorder, copy)])
        if by_processes.exists():
            lines = by_processes.read_text().splitlines()
            cover.by_file |= {line.removeprefix(f"{copy}{os.sep}") for line in lines}
        (output / f"{name}.json").write_text(json.dumps(vars(cover), default=sorted))
        return 0

    return Task(test_file, work, RECORDING_SECONDS, output / f"{name}.log")


def read_covers(output: Path, test_files: Iterable[str]) -> list[FileCover]:
    covers = []
    for test_file in test_files:
        path = output / f"{test_file.replace('/', '.')}.json"
        facts: dict[str, Any] = json.loads(path.read_text())
        cover = FileCover(**facts)
        cover.by_file = set(facts["by_file"])
        cover.by_test = {test: set(lines) for test, lines in facts["by_test"].items()}
        covers.append(cover)
    return covers


class _Chosen:
    """A pytest plugin that keeps the chosen tests, in the order in which they were chosen."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(kept, key=lambda item: self._place[item.nodeid])


def tests_of(mutant: Mutant, covers: Sequence[FileCover]) -> tuple[list[str], float]:
    """Tests that can notice a mutant, the quickest files first, and their seconds. Tests that fail
    without a mutant are left out."""
    choices = []
    for cover in covers:
        direct, others = cover.chosen(mutant)
        tests = [test for test in (*direct, *others) if test not in cover.failed]
        if tests:
            fixtures = max(cover.seconds - sum(cover.test_seconds.values()), 0.0)
            seconds = fixtures + sum(cover.test_seconds.get(test, 0.0) for test in tests)
            choices.append((seconds, tests))
    choices.sort()
    return [test for _, tests in choices for test in tests], sum(s for s, _ in choices)


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
