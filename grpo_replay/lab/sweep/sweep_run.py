"""Running a sweep: start what is ready, follow what runs, choose what was tuned (per arm, the
values with the best mean over the tuning seeds)."""

import enum
import math
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_replay.errors import INTERRUPTED, OutputDirectoryError, first_line
from grpo_replay.lab.sweep.cell_processes import STOP_SIGNALS, Launcher
from grpo_replay.lab.sweep.cells import (
    CellState,
    Progress,
    describe_holder,
    error_line,
    is_running,
    last_attempt,
    process_in,
    state_of,
)
from grpo_replay.lab.sweep.grid import Arm, Cell, Comparison, all_cells, open_folder
from grpo_replay.lab.sweep.sweep_file import (
    CHOSEN,
    SweepFile,
    TuneSection,
    read_choices,
    value_name,
)
from grpo_replay.storage.atomic import write_json_whole
from grpo_replay.storage.run_directory import RunDirectory, read_summary


@dataclass(frozen=True, slots=True)
class Choice:
    """The values chosen for an arm. `scores` maps each candidate to its accuracy by seed; `tied`
    are other candidates with the same mean; `at_edge` are keys whose value is the grid's least or
    greatest number."""

    arm: str
    overrides: tuple[str, ...]
    scores: Mapping[tuple[str, ...], Mapping[int, float]]
    tied: tuple[str, ...]
    at_edge: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "set": list(self.overrides),
            "tied": list(self.tied),
            "at_edge": list(self.at_edge),
            "candidates": [
                {
                    "name": value_name(candidate),
                    "set": list(candidate),
                    "mean": fmean(by_seed.values()),
                    "seeds": {str(seed): value for seed, value in by_seed.items()},
                }
                for candidate, by_seed in self.scores.items()
            ],
        }

    def describe(self) -> list[str]:
        """Sentences for the user; a tie has one of its own."""
        means = ", ".join(
            f"{value_name(candidate)} {fmean(values.values()):.4f}"
            for candidate, values in self.scores.items()
        )
        told = [f"{self.arm}: tuning chose {value_name(self.overrides)} by final.mean ({means})"]
        if self.tied:
            told.append(
                f"{self.arm}: {' and '.join(self.tied)} tied with {value_name(self.overrides)}, "
                "which was taken because tune.grid names it first; more tune.seeds would decide"
            )
        for key in self.at_edge:
            told.append(
                f"{self.arm}: {value_name(self.overrides)} is at the edge of tune.grid.{key}: a "
                "value beyond it may be better"
            )
        return told


def choose(arm: Arm, tune: TuneSection) -> Choice:
    """The candidate with the highest mean held-out accuracy over the tuning runs, which are all
    finished.

    Of candidates with the same mean, the first of the grid. Raises OutputDirectoryError for a run
    that evaluated nothing.
    """
    scores = {
        candidate: {cell.seed: _accuracy_of(cell) for cell in cells}
        for candidate, cells in arm.tuning.items()
    }
    means = {candidate: fmean(values.values()) for candidate, values in scores.items()}
    highest = max(means.values())
    best = [each for each in means if math.isclose(means[each], highest, abs_tol=1e-12)]
    tied = tuple(map(value_name, best[1:]))
    return Choice(arm.name, best[0], scores, tied, tuple(_at_edge(tune, best[0])))


def _at_edge(tune: TuneSection, chosen: Sequence[str]) -> Iterator[str]:
    for key, values in tune.grid.items():
        numbers = [float(v) for v in values if isinstance(v, int | float) and v is not bool(v)]
        value = next(word.partition("=")[2] for word in chosen if word.startswith(f"{key}="))
        if len(numbers) == len(values) > 1 and float(value) in (min(numbers), max(numbers)):
            yield key


def _accuracy_of(cell: Cell) -> float:
    accuracy = final_accuracy(cell)
    if accuracy is None:
        raise OutputDirectoryError(
            f"{cell.folder}/summary.json has no final.mean, so nothing can be chosen: remove the "
            "run to repeat it, or start in another --output-dir"
        )
    return accuracy


def record_choice(comparison: Comparison, choice: Choice) -> None:
    """Write the choice to chosen.json."""
    tune = comparison.file.tune
    assert tune is not None
    document = read_choices(comparison.root) or {"seeds": list(tune.seeds), "arms": {}}
    document["arms"][choice.arm] = choice.to_json()
    write_json_whole(comparison.root / CHOSEN, document)


POLL_SECONDS = 0.5


class Status(enum.Enum):
    """What the sweep knows of a cell."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    BLOCKED = "blocked"


@dataclass(slots=True)
class Entry:
    """A cell in the sweep's table. `message` says why it failed or cannot start."""

    cell: Cell
    status: Status
    disk: CellState
    steps: int
    progress: Progress
    message: str = ""
    exit_code: int = 0
    running: subprocess.Popen[bytes] | None = None
    accuracy: float | None = None


class Observer:
    """Receives what happens in a sweep. This one ignores it."""

    def on_change(self, entry: Entry) -> None:
        """The status of a cell changed."""

    def on_progress(self, entries: Sequence[Entry]) -> None:
        """Called every half second."""

    def on_notice(self, text: str) -> None:
        """Something that the user should read."""


@dataclass(slots=True)
class StopRequests:
    """How often the user asked to stop. Signal handlers raise it."""

    count: int = 0


@dataclass(slots=True)
class SweepRun:
    """One attempt at a sweep."""

    comparisons: Sequence[Comparison]
    launcher: Launcher
    observer: Observer
    stops: StopRequests
    entries: list[Entry] = field(default_factory=list)
    _stops_passed_on: int = 0

    def prepare(self, record: bool = True, starts: bool = True) -> None:
        """Look at every cell, before anything is started, and make the choices of tuning that is
        complete; `record` writes them to chosen.json. `starts`: cells will be started, and those
        that a killed sweep left running are waited for, until the user asks to stop.

        Raises OutputDirectoryError for a folder with something other than the cell's run, and with
        `starts` for a run that a process works on which no sweep started.
        """
        cells = list(all_cells(self.comparisons))
        if starts:
            self._wait_for_earlier(cells)
            if self.stops.count:
                return
        for cell in cells:
            self.entries.append(self._entry(cell, starts))
        self._choose(record)

    def _wait_for_earlier(self, cells: Sequence[Cell]) -> None:
        left = [cell for cell in cells if is_running(cell)]
        for cell in left:
            self.observer.on_notice(
                f"waiting for {cell.name}, {describe_holder(cell)}, left by an earlier sweep"
            )
        while not self.stops.count and any(map(is_running, left)):
            time.sleep(POLL_SECONDS)

    def _entry(self, cell: Cell, starts: bool) -> Entry:
        progress = Progress(RunDirectory(cell.folder).metrics_path)
        steps = cell.resolved_recipe().run.steps
        holder = describe_holder(cell) if is_running(cell) else process_in(cell)
        if holder is not None and starts:
            raise OutputDirectoryError(
                f"{cell.folder} is in use by {holder}, a run that this sweep did not start: wait "
                "for it or stop it"
            )
        entry = Entry(cell, Status.WAITING, state_of(cell), steps, progress)
        progress.refresh()
        if holder is not None:
            entry.status, entry.message = Status.RUNNING, holder
        elif entry.disk is CellState.DONE:
            entry.status, entry.accuracy = Status.DONE, final_accuracy(cell)
        return entry

    def run(self) -> int:
        """Run until no cell can be started; returns the exit code of the sweep."""
        if done := len(self._with(Status.DONE)):
            self.observer.on_notice(f"{done} of {len(self.entries)} cells are done already")
        while True:
            self._collect()
            if not self.stops.count:
                self._choose()
                self._start()
            self._pass_stops_on()
            self.observer.on_progress(self.entries)
            if not self._must_wait():
                break
            time.sleep(POLL_SECONDS)
        return self._conclude()

    def _must_wait(self) -> bool:
        return bool(self._with(Status.RUNNING) or (not self.stops.count and self._ready()))

    def _with(self, status: Status) -> list[Entry]:
        return [entry for entry in self.entries if entry.status is status]

    def _ready(self) -> list[Entry]:
        return [e for e in self._with(Status.WAITING) if not e.cell.awaits_choice]

    def _start(self) -> None:
        free = self.launcher.jobs - len(self._with(Status.RUNNING))
        for entry in self._ready()[: max(0, free)]:
            try:
                entry.disk = state_of(entry.cell)
                if entry.disk is CellState.DONE:
                    self._note_done(entry)
                    continue
                entry.running = self.launcher.start(entry.cell, entry.disk)
                self._set(entry, Status.RUNNING, f"process {entry.running.pid}")
            except OutputDirectoryError as error:
                self._fail([entry], error)

    def _collect(self) -> None:
        for entry in self._with(Status.RUNNING):
            assert entry.running is not None
            entry.progress.refresh()
            entry.accuracy = entry.progress.accuracy
            code = entry.running.poll()
            if code is not None:
                self._note_end(entry, code)

    def _note_end(self, entry: Entry, code: int) -> None:
        entry.running = None
        try:
            entry.disk = state_of(entry.cell)
        except OutputDirectoryError as error:
            self._fail([entry], error)
            return
        if entry.disk is CellState.DONE:
            self._note_done(entry)
        elif self.stops.count and code in (INTERRUPTED, -15, -2, -9):
            self._set(entry, Status.INTERRUPTED, "")
        else:
            entry.exit_code = code if code > 0 else 4
            self._set(entry, Status.FAILED, describe_end(entry.cell, code))

    def _note_done(self, entry: Entry) -> None:
        entry.accuracy = final_accuracy(entry.cell)
        self._set(entry, Status.DONE, "")

    def _set(self, entry: Entry, status: Status, message: str) -> None:
        entry.status, entry.message = status, message
        self.observer.on_change(entry)

    def _choose(self, record: bool = True) -> None:
        """Give the comparison cells of arms that are now tuned their values. Those of an arm fail,
        and the other arms go on, if a tuning run evaluated nothing, or if a cell of the arm was
        started with other values."""
        for comparison, arm, waiting in self._newly_tuned():
            assert comparison.file.tune is not None
            try:
                choice = choose(arm, comparison.file.tune)
                cells = [entry.cell.with_choice(choice.overrides) for entry in waiting]
                states = [state_of(cell) for cell in cells]
            except OutputDirectoryError as error:
                self._fail(waiting, error)
                continue
            for entry, cell, state in zip(waiting, cells, states, strict=True):
                entry.cell, entry.disk = cell, state
            if record:
                record_choice(comparison, choice)
            for sentence in choice.describe():
                self.observer.on_notice(sentence)

    def _fail(self, entries: Sequence[Entry], error: OutputDirectoryError) -> None:
        for entry in entries:
            entry.exit_code = error.exit_code
            self._set(entry, Status.FAILED, first_line(error))

    def _newly_tuned(self) -> Iterator[tuple[Comparison, Arm, list[Entry]]]:
        """Arms whose tuning runs are done and whose comparison cells have no values yet."""
        for comparison in self.comparisons:
            for arm in comparison.arms:
                own = [
                    entry
                    for entry in self.entries
                    if entry.cell.root == comparison.root and entry.cell.arm == arm.name
                ]
                waiting = [entry for entry in own if _lacks_values(entry)]
                tuning = [entry for entry in own if entry.cell.value is not None]
                if waiting and all(entry.status is Status.DONE for entry in tuning):
                    yield comparison, arm, waiting

    def _pass_stops_on(self) -> None:
        """Send running cells one signal for each new request to stop."""
        while self._stops_passed_on < self.stops.count:
            number = STOP_SIGNALS[min(self._stops_passed_on, len(STOP_SIGNALS) - 1)]
            for entry in self._with(Status.RUNNING):
                assert entry.running is not None
                entry.running.send_signal(number)
            self._stops_passed_on += 1

    def _conclude(self) -> int:
        for entry in self._with(Status.WAITING):
            if entry.cell.awaits_choice and not self.stops.count:
                self._set(entry, Status.BLOCKED, "its tuning is incomplete")
        if self.stops.count:
            return INTERRUPTED
        failed = self._with(Status.FAILED)
        return failed[0].exit_code if failed else 0


def run_sweep(
    file: SweepFile,
    comparisons: Sequence[Comparison],
    chosen: Sequence[Comparison],
    folder: Path,
    jobs: int,
    observer: Observer,
    stops: StopRequests,
) -> tuple[list[Entry], int]:
    """Run the cells of the `chosen` comparisons in `folder`, or continue them. Returns the cells
    and the exit code."""
    launcher = Launcher(jobs)
    launcher.check([arm.comparison[0] for each in chosen for arm in each.arms])
    lock = open_folder(folder, file, comparisons)
    try:
        run = SweepRun(chosen, launcher, observer, stops)
        run.prepare()
        code = run.run()
    finally:
        lock.unlock()
    return run.entries, code


def _lacks_values(entry: Entry) -> bool:
    return entry.cell.awaits_choice and entry.status is not Status.FAILED


def final_accuracy(cell: Cell) -> float | None:
    """Mean held-out accuracy at the end of a finished run; None if it evaluated nothing."""
    summary = read_summary(cell.folder) or {}
    return (summary.get("final") or {}).get("mean")


def describe_end(cell: Cell, code: int) -> str:
    """Why a cell failed, in one line: its own error, or how its process ended."""
    if code < 0:
        why = "; the kernel does that when memory runs out (see dmesg)" if code == -9 else ""
        return f"killed by signal {-code}{why}"
    if code == INTERRUPTED:
        return "told to stop by someone else; it wrote a checkpoint"
    last = [line for line in last_attempt(cell.log)[1:] if line.strip()][-1:]
    ended = f"ended with exit code {code} and no summary; last line: {''.join(last) or 'none'}"
    return error_line(cell.log) or ended
