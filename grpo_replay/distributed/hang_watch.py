"""Reports hangs: when a rank stays in one place for long, every rank logs where all ranks are.

Every few seconds, a thread of each rank writes the rank's position to the store that the ranks
share. It also runs while the main thread waits in a collective, which releases the interpreter
lock. A report stops nothing: a slow rank goes on, and `engine.timeout_seconds` decides when a wait
is a failure.
"""

import contextlib
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_replay.distributed.comm import Comm, Place
from grpo_replay.distributed.failures import is_lost_peer, leave_positions, name_ranks
from grpo_replay.errors import GrpoReplayError

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_SECONDS = 5.0
"""Longest wait for an answer of the store."""
_MOST_SECONDS_BETWEEN_LOOKS = 5.0
_REPORTS = "hang/reports"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sighting:
    """Where a rank was, for how long, and how long ago it wrote that to the store."""

    rank: int
    place: Place
    seconds: float
    silent_seconds: float = 0.0


def describe_sightings(sightings: Sequence[Sighting], silent_after_seconds: float) -> str:
    """`rank 0 at step 2, training, in gather for 61 s; ranks 1, 2 at …`. Ranks in the same place
    are grouped, with the longest of their times."""
    places: dict[tuple[Place, bool], list[Sighting]] = {}
    for sighting in sightings:
        is_silent = sighting.silent_seconds > silent_after_seconds
        places.setdefault((sighting.place, is_silent), []).append(sighting)
    parts = []
    for (place, is_silent), members in places.items():
        text = f"{name_ranks([member.rank for member in members])} at {place}"
        text += f" for {max(member.seconds for member in members):.0f} s"
        if is_silent:
            silent = max(member.silent_seconds for member in members)
            text += f" (no sign of life for {silent:.0f} s)"
        parts.append(text)
    return "; ".join(parts)


class HangWatch:
    """Watches this rank's `comm.position` while the context lasts. Entering it is collective.

    Once this rank has been in one place for `report_seconds`, all ranks log a report; another one
    follows when twice the time has passed, and so on. An error about a lost rank gets a note of
    where the ranks were last seen. The methods of `store` raise RuntimeError when it is out of
    reach.
    """

    def __init__(self, comm: Comm, store: "Store", report_seconds: float) -> None:
        self._comm = comm
        self._store = store
        self._report_seconds = report_seconds
        self._look_seconds = min(_MOST_SECONDS_BETWEEN_LOOKS, report_seconds / 10)
        self._main_thread = threading.get_ident()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)
        self._started = time.monotonic()
        self._reports = 0  # that this rank has seen
        self._last_report = 0.0
        self._reported_since: float | None = None

    def __enter__(self) -> "HangWatch":
        self._reports = int(self._store.compare_set(_REPORTS, "", "0"))
        self._post()
        self._comm.barrier()
        self._started = time.monotonic()  # at once on all ranks: their clocks agree
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, GrpoReplayError) and is_lost_peer(error):
            with contextlib.suppress(RuntimeError):  # the store may be lost with the peer
                self._post()
                error.add_note(f"Last seen: {self._describe(self._sightings())}.")
        self._left.set()
        self._thread.join(2 * STORE_SECONDS)

    def _clock(self) -> float:
        """Seconds since the ranks started to watch."""
        return time.monotonic() - self._started

    def _watch(self) -> None:
        try:
            while not self._left.wait(self._look_seconds):
                self._look()
        except RuntimeError as error:
            logger.info("the hang watch ends: the ranks' store is out of reach (%s)", error)

    def _look(self) -> None:
        """Write this rank's position; report if any rank has been in one place for long."""
        since = self._post()
        if self._reported_since not in (None, since):
            self._reported_since = None
            leave_positions(self._comm.rank, None)
            logger.info("rank %d goes on: %s", self._comm.rank, self._comm.position.read()[0])
        if self._is_due(since):
            # Of ranks that are due at the same time, one increments the count: one report.
            asked = (str(self._reports), str(self._reports + 1))
            reports = int(self._store.compare_set(_REPORTS, *asked))
        else:
            reports = int(self._store.get(_REPORTS))
        if reports != self._reports:
            self._reports = reports
            self._report(since)

    def _is_due(self, since: float) -> bool:
        now = self._clock()
        waited, reported = now - since, now - self._last_report
        return waited >= self._report_seconds <= reported and reported >= waited / 2

    def _post(self) -> float:
        """Write this rank's position to the store; returns when the rank reached it."""
        place, reached = self._comm.position.read()
        since = reached - self._started
        record = json.dumps([place, since, self._clock()])
        self._store.set(f"hang/position/{self._comm.rank}", record)
        return since

    def _sightings(self) -> list[Sighting]:
        found = []
        for rank in range(self._comm.world_size):
            place, since, said = json.loads(self._store.get(f"hang/position/{rank}"))
            now = self._clock()
            found.append(Sighting(rank, Place(*place), now - since, now - said))
        return found

    def _report(self, since: float) -> None:
        sightings = self._sightings()
        text = self._describe(sightings)
        self._last_report, self._reported_since = self._clock(), since
        leave_positions(self._comm.rank, text)
        stack = traceback.format_stack(sys._current_frames()[self._main_thread])
        logger.warning(
            "waiting %.0f s: %s. Stack of rank %d:\n%s",
            max(sighting.seconds for sighting in sightings), text, self._comm.rank, "".join(stack),
        )  # fmt: skip

    def _describe(self, sightings: Sequence[Sighting]) -> str:
        return describe_sightings(sightings, 3 * self._look_seconds + 1.0)
