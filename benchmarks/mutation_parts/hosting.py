"""Tries mutants in forks of a process that has collected the tests of a folder. A fork only
replaces the functions that its mutant changes: nothing is imported or collected again."""

import gc
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.main import pytest_runtestloop

from mutation_parts.covering import PYTEST
from mutation_parts.mutants import Mutant
from mutation_parts.running import FAILED, POLL_SECONDS, Task, end_group, write

CO_OPTIMIZED = 1
"""Flag of the code of a function; that of a module or of a class's body has it not."""
Place = tuple[str, int]
"""The name of a function within its module, and its first line."""


@dataclass(frozen=True)
class Trial:
    """A mutant and the tests to try, of which a file stands for all of its tests. `complete`: no
    other test could notice it."""

    mutant: Mutant
    tests: Sequence[str]
    limit_seconds: float
    complete: bool


def changed_functions(before: str, after: str, path: str) -> dict[Place, CodeType]:
    """The outermost functions that differ, with their new code."""
    found: dict[Place, CodeType] = {}
    codes = [compile(source, path, "exec", dont_inherit=True) for source in (before, after)]
    _compare(codes[0], codes[1], found)
    return found


def _compare(before: CodeType, after: CodeType, found: dict[Place, CodeType]) -> None:
    if before.co_flags & CO_OPTIMIZED:
        if _facts(before) != _facts(after):
            found[before.co_qualname, before.co_firstlineno] = after
        return
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (before, after)]
    for pair in zip(*inner, strict=True):
        _compare(*pair, found)


def _facts(code: CodeType) -> tuple[Any, ...]:
    """What a code object does, whatever lines it is on."""
    consts = [
        _facts(each) if isinstance(each, CodeType) else (type(each), repr(each))
        for each in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, code.co_exceptiontable, consts


class _Host:
    """A pytest plugin that tries mutants in place of the session's loop over its tests."""

    def __init__(
        self, copy: Path, trials: Sequence[Trial], tmp: Path, note: Callable[..., None]
    ) -> None:
        self._copy, self._trials, self._tmp, self._note = copy, trials, tmp, note
        self._killer = tmp.with_suffix(".killer")
        self._parent = os.getppid()
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.splitlines()[:1] if crash else []
            self._killer.write_text(" ".join([report.nodeid, report.when or "", *message])[:300])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()
        for function in gc.get_objects():
            if type(function) is FunctionType:
                code = function.__code__
                place = code.co_filename, code.co_qualname, code.co_firstlineno
                self._functions.setdefault(place, []).append(function)
        for trial in self._trials:
            if os.getppid() != self._parent:
                os._exit(FAILED)
            self._try(session, trial)
        return True

    def _try(self, session: pytest.Session, trial: Trial) -> None:
        path = self._copy / trial.mutant.path
        before = path.read_text(encoding="utf-8")
        self._killer.unlink(missing_ok=True)
        started = time.monotonic()
        write(path, trial.mutant.source)
        try:
            pid = os.fork()
            if not pid:
                self._work(session, trial, before, path)
            code = _wait(pid, trial.limit_seconds)
        finally:
            write(path, before)
            shutil.rmtree(self._tmp, ignore_errors=True)
        seconds = round(time.monotonic() - started, 1)
        if code not in (0, FAILED):
            state = "killed"
        else:
            state = "survived" if trial.complete and code == 0 else "undecided"
        killer = "time limit" if code is None else f"exit code {code}" if code else ""
        if self._killer.exists():
            killer = self._killer.read_text()
        self._note(trial.mutant, state, killer=killer, seconds=seconds)

    def _work(self, session: pytest.Session, trial: Trial, before: str, path: Path) -> None:
        """In the fork: run the tests until one fails, and exit with 1 if one does."""
        code = FAILED
        try:
            os.setsid()
            self._change(str(path), before, trial.mutant.source)
            session.items = [
                item
                for test in trial.tests
                for item in session.items
                if test in (item.nodeid, item.nodeid.split("::")[0])
            ]
            code = 2
            try:
                pytest_runtestloop(session)
            except session.Failed:
                session._setupstate.teardown_exact(None)
            code = int(session.testsfailed > 0)
        finally:
            os._exit(code)

    def _change(self, path: str, before: str, after: str) -> None:
        """Replace the functions that differ; those of a module that is not imported yet will be
        read as they are now."""
        changed = changed_functions(before, after, path)
        assert changed, f"no function of {path} changed"
        for (name, line), code in changed.items():
            for function in self._functions.get((path, name, line), []):
                function.__code__ = code


def _wait(pid: int, limit_seconds: float) -> int | None:
    """The exit code of a fork; None if it was ended at the time limit."""
    end = time.monotonic() + limit_seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            end_group(pid)  # what its tests started
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            end_group(pid)
            os.waitpid(pid, 0)
            return None
        time.sleep(POLL_SECONDS)


def host_task(name: str, trials: Sequence[Trial], output: Path, note: Callable[..., None]) -> Task:
    """Try mutants one after the other, and note the outcome of each."""

    def work(copy: Path) -> int:
        tmp = output / f"{name}.tmp"
        files = dict.fromkeys(test.split("::")[0] for trial in trials for test in trial.tests)
        arguments = [*PYTEST, "-x", "--basetemp", str(tmp), *files]
        return int(pytest.main(arguments, plugins=[_Host(copy, trials, tmp, note)]))

    return Task(name, work, float("inf"), output / f"{name}.log")
