"""Runs a sweep: starts cells that are ready, follows running ones, and chooses tuned values (per
arm those with the best mean over the tuning seeds)."""

import enum
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from grpo_replay.errors import INTERRUPTED, OutputDirectoryError
from grpo_replay.lab.sweep.cell_processes import Launcher, Process
from grpo_replay.lab.sweep.cells import Cell, CellState, error_line, state_of
from grpo_replay.lab.sweep.sweep_file import (
    CHOSEN,
    SWEEP,
    SweepFile,
    read_choices,
    read_sweep_file,
    sweep_to_yaml,
    value_name,
)
from grpo_replay.storage.atomic import named_if_unwritable, write_json_whole, write_text_whole

POLL_SECONDS = 0.5

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
"""Signals to a cell at the first, second and third request to stop: finish the step and checkpoint;
stop at once; be killed."""

Scores = Mapping[tuple[str, ...], Mapping[int, float]]
"""Accuracy by candidate and seed."""


def refuse_other_sweep(folder: Path, sweep: SweepFile) -> None:
    """Raises OutputDirectoryError if the folder belongs to a sweep with another name."""
    path = folder / SWEEP
    if path.exists() and (name := read_sweep_file(path).name) != sweep.name:
        raise OutputDirectoryError(f"{folder} holds the sweep {name}: choose another --output-dir")


def write_sweep(folder: Path, sweep: SweepFile) -> None:
    """Write sweep.yaml. Raises OutputDirectoryError if the folder cannot be written."""
    with named_if_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text_whole(folder / SWEEP, sweep_to_yaml(sweep))


def choose(scores: Scores) -> tuple[str, ...]:
    """The candidate with the highest mean over the tuning seeds, the first of equal ones."""
    return max(scores, key=lambda candidate: fmean(scores[candidate].values()))


def record_choice(root: Path, arm: str, chosen: Sequence[str], scores: Scores) -> None:
    """Add the choice of an arm to chosen.json."""
    candidates = [
        {"set": list(candidate), "mean": fmean(values.values()), "seeds": values}
        for candidate, values in scores.items()
    ]
    arms = {**read_choices(root), arm: {"set": list(chosen), "candidates": candidates}}
    write_json_whole(root / CHOSEN, {"arms": arms})


class Status(enum.Enum):
    """The status of a cell in the running sweep."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Entry:
    """A cell and its status in the running sweep. `message` says why it failed."""

    cell: Cell
    state: CellState
    status: Status = Status.WAITING
    message: str = ""
    exit_code: int = 0
    process: Process | None = None


@dataclass(slots=True)
class SweepRun:
    """One attempt at a sweep. Signal handlers count requests to stop in `stops`."""

    cells: Sequence[Cell]
    jobs: int = 1
    on_change: Callable[[Entry], object] = lambda _: None
    on_notice: Callable[[str], object] = lambda _: None
    stops: int = 0
    entries: list[Entry] = field(default_factory=list)

    def prepare(self) -> None:
        """Read the state of every cell before any is started, and choose values where tuning is
        complete. Raises OutputDirectoryError for a folder with a run of another recipe. If runs of
        a comparison have other tuned values than are now chosen, the arm fails instead."""
        self.entries = [Entry(cell, state_of(cell)) for cell in self.cells]
        for entry in self.entries:
            if entry.state is CellState.DONE and not entry.cell.awaits_tuning:
                entry.status = Status.DONE
        self._choose()

    def run(self) -> int:
        """Run at most `jobs` cells at a time until none can be started; returns 0, the code of the
        first that failed, or 130. A request to stop sends cells the next of `STOP_SIGNALS`."""
        launcher, stops_sent = Launcher(self.jobs), 0
        while True:
            for entry in self._with(Status.RUNNING):
                self._collect(entry)
            if not self.stops:
                self._choose()
                self._start(launcher)
            for number in range(stops_sent, self.stops):
                for entry in self._with(Status.RUNNING):
                    assert entry.process is not None
                    entry.process.send_signal(STOP_SIGNALS[min(number, len(STOP_SIGNALS) - 1)])
            stops_sent = self.stops
            starts_nothing = self.stops or not self.ready()
            if not self._with(Status.RUNNING) and starts_nothing:
                break
            time.sleep(POLL_SECONDS)
        failed = self._with(Status.FAILED)
        return INTERRUPTED if self.stops else failed[0].exit_code if failed else 0

    def _with(self, status: Status) -> list[Entry]:
        return [entry for entry in self.entries if entry.status is status]

    def ready(self) -> list[Entry]:
        """Returns the entries that can be started."""
        return [e for e in self._with(Status.WAITING) if not e.cell.awaits_tuning]

    def _start(self, launcher: Launcher) -> None:
        for entry in self.ready():
            slot = launcher.free_slot()
            if slot is None:
                return
            entry.process = launcher.start(entry.cell, entry.state, slot)
            self._set(entry, Status.RUNNING, f"process {entry.process.pid}")

    def _collect(self, entry: Entry) -> None:
        """Sets the status of a cell that ended: done, interrupted or failed (its log's error)."""
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
            reason = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._set(entry, Status.FAILED, error_line(entry.cell.log) or reason)

    def _set(self, entry: Entry, status: Status, message: str = "") -> None:
        entry.status, entry.message = status, message
        self.on_change(entry)

    def _choose(self) -> None:
        """Set the tuned values in the comparison cells of arms whose tuning is complete."""
        for arm in dict.fromkeys(cell.arm for cell in self.cells):
            entries = [entry for entry in self.entries if entry.cell.arm == arm]
            waiting = [e for e in entries if e.cell.awaits_tuning]
            tuning = [e for e in entries if e.cell.candidate is not None]
            if waiting and all(e.status is Status.DONE for e in tuning):
                self._apply_choice(arm, waiting, [entry.cell for entry in tuning])

    def _apply_choice(self, arm: str, waiting: Sequence[Entry], tuning: Sequence[Cell]) -> None:
        """Chooses an arm's best candidate, and gives it to the waiting cells of the comparison;
        they fail if their folders have runs of another choice."""
        scores: dict[tuple[str, ...], dict[int, float]] = {}
        for cell in tuning:
            assert cell.accuracy is not None, f"{cell.folder}/summary.json has no final.mean"
            scores.setdefault(cell.candidate or (), {})[cell.seed] = cell.accuracy
        chosen = choose(scores)
        for entry in waiting:
            entry.cell = entry.cell.with_choice(chosen)
        try:
            states = [state_of(entry.cell) for entry in waiting]
        except OutputDirectoryError as error:  # runs with the choice from an earlier grid
            for entry in waiting:
                entry.exit_code = error.exit_code
                self._set(entry, Status.FAILED, f"tuning chose {value_name(chosen)}, but {error}")
            return
        for entry, state in zip(waiting, states, strict=True):
            entry.state = state
            if state is CellState.DONE:
                entry.status = Status.DONE
        record_choice(tuning[0].root, arm, chosen, scores)
        listed = ", ".join(f"{value_name(x)} {fmean(scores[x].values()):.4f}" for x in scores)
        self.on_notice(f"{arm}: tuning chose {value_name(chosen)} by final.mean of {listed}")
