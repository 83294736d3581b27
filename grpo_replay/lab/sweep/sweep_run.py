"""Running a sweep: start what is ready, follow what runs, choose what was tuned (per arm, the
values with the best mean over the tuning seeds)."""

import enum
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from grpo_replay.errors import INTERRUPTED, OutputDirectoryError, first_line
from grpo_replay.lab.sweep.cell_processes import Launcher, Process
from grpo_replay.lab.sweep.cells import Cell, CellState, error_line, state_of
from grpo_replay.lab.sweep.sweep_file import (
    CHOSEN,
    SWEEP,
    SweepFile,
    read_choices,
    read_folder,
    sweep_to_yaml,
    value_name,
)
from grpo_replay.storage.atomic import named_if_unwritable, write_json_whole, write_text_whole

POLL_SECONDS = 0.5

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
"""What a cell gets at the first, second and third request to stop: finish the step and checkpoint;
stop at once; die."""

Scores = Mapping[tuple[str, ...], Mapping[int, float]]
"""Accuracy by candidate and seed."""


def open_folder(folder: Path, sweep: SweepFile) -> None:
    """Write sweep.yaml. Raises OutputDirectoryError if the folder is of another sweep, or cannot be
    written."""
    before = read_folder(folder)
    if before is not None and before.name != sweep.name:
        raise OutputDirectoryError(
            f"{folder} holds the sweep {before.name}: choose another --output-dir"
        )
    with named_if_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text_whole(folder / SWEEP, sweep_to_yaml(sweep))


def choose(arm: str, scores: Scores) -> tuple[tuple[str, ...], list[str]]:
    """The candidate with the highest mean over the tuning seeds, the first of equal ones, and what
    the user should know of the choice: the means, a tie, and a number at the edge of those tried,
    beyond which a better one may lie."""
    means = {candidate: fmean(values.values()) for candidate, values in scores.items()}
    best = max(means, key=means.__getitem__)
    listed = ", ".join(f"{value_name(each)} {mean:.4f}" for each, mean in means.items())
    told = [f"{arm}: tuning chose {value_name(best)} by final.mean ({listed})"]
    tied = [each for each in means if each != best and abs(means[each] - means[best]) < 1e-12]
    if tied:
        told.append(f"{arm}: {' and '.join(map(value_name, tied))} tied with it: tune more seeds")
    told += [
        f"{arm}: {each} is at the edge of tune.grid: try values beyond"
        for each in _at_edge(best, scores)
    ]
    return best, told


def _at_edge(chosen: Sequence[str], scores: Scores) -> Iterator[str]:
    for at, word in enumerate(chosen):
        tried = {candidate[at].partition("=")[2] for candidate in scores}
        try:
            numbers = sorted(map(float, tried))
        except ValueError:
            continue
        if len(numbers) > 1 and float(word.partition("=")[2]) in (numbers[0], numbers[-1]):
            yield word


def record_choice(root: Path, arm: str, chosen: Sequence[str], scores: Scores) -> None:
    """Write the choice to chosen.json, beside those of other arms."""
    candidates = [
        {"set": list(each), "mean": fmean(values.values()), "seeds": values}
        for each, values in scores.items()
    ]
    arms = {**read_choices(root), arm: {"set": list(chosen), "candidates": candidates}}
    write_json_whole(root / CHOSEN, {"arms": arms})


class Status(enum.Enum):
    """What the sweep knows of a cell."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Entry:
    """A cell of a sweep that runs. `message` says why it failed or cannot start."""

    cell: Cell
    state: CellState
    status: Status = Status.WAITING
    message: str = ""
    exit_code: int = 0
    process: Process | None = None

    @property
    def accuracy(self) -> float | None:
        return self.cell.accuracy


def _ignore(*_: object) -> None:
    pass


@dataclass(slots=True)
class SweepRun:
    """One attempt at a sweep. `stops` is how often the user asked to stop; signal handlers raise
    it."""

    cells: Sequence[Cell]
    jobs: int = 1
    on_change: Callable[[Entry], object] = _ignore
    on_notice: Callable[[str], object] = _ignore
    stops: int = 0
    entries: list[Entry] = field(default_factory=list)

    def prepare(self) -> None:
        """Look at every cell, before anything is started, and make the choices of tuning that is
        complete. Raises OutputDirectoryError for a folder with something other than the cell's
        run."""
        self.entries = [Entry(cell, state_of(cell)) for cell in self.cells]
        for entry in self.entries:
            if entry.state is CellState.DONE and not entry.cell.awaits_choice:
                entry.status = Status.DONE
        self._choose()

    def run(self) -> int:
        """Run until no cell can be started; returns the exit code of the sweep."""
        launcher, passed_on = Launcher(self.jobs), 0
        launcher.check(self.cells)
        while True:
            for entry in self._with(Status.RUNNING):
                self._collect(entry)
            if not self.stops:
                self._choose()
                self._start(launcher)
            for number in range(passed_on, self.stops):
                for entry in self._with(Status.RUNNING):
                    assert entry.process is not None
                    entry.process.send_signal(STOP_SIGNALS[min(number, len(STOP_SIGNALS) - 1)])
            passed_on = self.stops
            if not self._with(Status.RUNNING) and (self.stops or not self.ready()):
                break
            time.sleep(POLL_SECONDS)
        failed = self._with(Status.FAILED)
        return INTERRUPTED if self.stops else failed[0].exit_code if failed else 0

    def _with(self, status: Status) -> list[Entry]:
        return [entry for entry in self.entries if entry.status is status]

    def ready(self) -> list[Entry]:
        """The entries that can be started."""
        return [e for e in self._with(Status.WAITING) if not e.cell.awaits_choice]

    def _start(self, launcher: Launcher) -> None:
        for entry in self.ready():
            place = launcher.free_place()
            if place is None:
                return
            entry.process = launcher.start(entry.cell, entry.state, place)
            self._set(entry, Status.RUNNING, f"process {entry.process.pid}")

    def _collect(self, entry: Entry) -> None:
        assert entry.process is not None
        code = entry.process.poll()
        if code is None:
            return
        entry.state = state_of(entry.cell)
        if entry.state is CellState.DONE:
            self._set(entry, Status.DONE)
        elif self.stops and code in (INTERRUPTED, *(-number for number in STOP_SIGNALS)):
            self._set(entry, Status.INTERRUPTED)
        else:
            entry.exit_code = code if code > 0 else 4
            self._set(entry, Status.FAILED, describe_end(entry.cell, code))

    def _set(self, entry: Entry, status: Status, message: str = "") -> None:
        entry.status, entry.message = status, message
        self.on_change(entry)

    def _choose(self) -> None:
        """Give the comparison cells of arms that are now tuned their values. Those of an arm fail,
        and the other arms go on, if a tuning run evaluated nothing, or if a cell of the arm was
        started with other values."""
        for arm in dict.fromkeys(cell.arm for cell in self.cells):
            own = [entry for entry in self.entries if entry.cell.arm == arm]
            waiting = [e for e in own if e.cell.awaits_choice and e.status is Status.WAITING]
            tuning = [e for e in own if e.cell.candidate is not None]
            if not waiting or any(e.status is not Status.DONE for e in tuning):
                continue
            try:
                self._give_choice(arm, waiting, [entry.cell for entry in tuning])
            except OutputDirectoryError as error:
                for entry in waiting:
                    entry.exit_code = error.exit_code
                    self._set(entry, Status.FAILED, first_line(error))

    def _give_choice(self, arm: str, waiting: Sequence[Entry], tuning: Sequence[Cell]) -> None:
        scores: dict[tuple[str, ...], dict[int, float]] = {}
        for cell in tuning:
            if cell.accuracy is None:
                raise OutputDirectoryError(
                    f"{cell.folder}/summary.json has no final.mean, so nothing can be chosen: "
                    "remove the run to repeat it"
                )
            scores.setdefault(cell.candidate or (), {})[cell.seed] = cell.accuracy
        chosen, told = choose(arm, scores)
        for entry in waiting:
            entry.cell = entry.cell.with_choice(chosen)
            entry.state = state_of(entry.cell)
            if entry.state is CellState.DONE:
                entry.status = Status.DONE
        record_choice(tuning[0].root, arm, chosen, scores)
        for sentence in told:
            self.on_notice(sentence)


def describe_end(cell: Cell, code: int) -> str:
    """Why a cell failed, in one line: its own error, or how its process ended."""
    if code < 0:
        why = "; the kernel does that when memory runs out (see dmesg)" if code == -9 else ""
        return f"killed by signal {-code}{why}"
    if code == INTERRUPTED:
        return "told to stop by someone else; it wrote a checkpoint"
    return error_line(cell.log) or f"ended with exit code {code} and no summary"
