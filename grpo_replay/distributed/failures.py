"""How ranks fail together: one message, one exit code, and no rank left waiting; and work that rank
0 does for all of them, without a time limit."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import LAUNCH_FOLDER_VARIABLE, rank_environment
from grpo_replay.errors import GrpoReplayError, LaunchError, first_line
from grpo_replay.terminal.quiet import without_secrets

HEARD = (
    b"\nstopping after this step, with a checkpoint; Ctrl-C again stops now, and loses the steps "
    b"since the last one\n"
)
"""What Ctrl-C shows at once: a step may take minutes."""


class Interruption:
    """Remembers the first request to stop until the run can. `reason` says what asked, or None. A
    further SIGINT raises at once."""

    def __init__(self) -> None:
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask to stop. Later reasons are not kept."""
        self.reason = self.reason or reason

    @contextmanager
    def caught(self) -> Iterator[None]:
        """A context in which SIGINT, SIGTERM, SIGUSR1 and SIGHUP are requests. A SIGHUP that is
        ignored, as under nohup, stays so. Does nothing outside the main thread, which alone gets
        signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGINT and sys.__stderr__ and rank_environment().rank == 0:
            with contextlib.suppress(OSError, ValueError):  # it is closed, or no file
                os.write(sys.__stderr__.fileno(), HEARD)  # not print, amid which we may be
        self.request(signal.Signals(number).name)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A context in which SIGTERM raises KeyboardInterrupt as Ctrl-C does. Main thread only. Does
    nothing in a rank that a launcher started: it ends the others of a failed one with SIGTERM, and
    reports the failure."""
    if rank_environment().is_launched:
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


POLL_SECONDS = 2.0
_Result = TypeVar("_Result")


def run_on_main(
    comm: Comm, action: Callable[[], _Result], poll_seconds: float = POLL_SECONDS
) -> _Result | None:
    """The result of `action` on rank 0, None on the others, once it is done. Collective.

    Rank 0 works in a thread and tells the others every `poll_seconds` that it is still working. No
    collective takes longer than that, so `engine.timeout_seconds` does not limit the work, and the
    others still notice if rank 0 dies.

    A GrpoReplayError of `action` is raised on rank 0, and on the others as a PeerFailure.
    `action` must not call collectives.
    """
    future = _started(action) if comm.is_main else None
    while not comm.broadcast_json(future is not None and _is_done(future, poll_seconds)):
        pass  # rank 0 is still working
    error = None if future is None else future.exception()
    if error is not None and not isinstance(error, GrpoReplayError):
        raise error
    outcome = comm.broadcast_json(None if error is None else [str(error), error.exit_code])
    raise_first_failure(comm.rank, [outcome] + [None] * (comm.world_size - 1), error)
    return None if future is None else future.result()


def _started(action: Callable[[], _Result]) -> "Future[_Result]":
    future: Future[_Result] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    # A daemon thread, so that an interrupted process does not wait for it.
    threading.Thread(target=work, name="long work", daemon=True).start()
    return future


def _is_done(future: "Future[_Result]", seconds: float) -> bool:
    return bool(wait([future], timeout=seconds).done)


_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)"
    r"|timed out waiting|wait timeout|read timeout|connectfullmesh|communicator was aborted"
    r"|remote process exited|heartbeat",
    re.IGNORECASE,
)
# Looked up in sys.modules, not imported, because it loads torch. If it is not loaded, this rank has
# not joined a run.
_RENDEZVOUS = "grpo_replay.distributed.rendezvous"


class PeerFailure(LaunchError):
    """Another rank failed and reports it: this rank exits with the same code and prints nothing."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LostContact(LaunchError):
    """This rank lost the connection to another rank, which is the one that failed."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone, by the wording of torch.distributed."""
    if isinstance(error, GrpoReplayError):
        return isinstance(error, PeerFailure | LostContact)
    if rank_environment().world_size == 1:
        return False  # some other connection
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, RuntimeError | OSError) and _LOST_PEER.search(str(current)):
            return True
        current = current.__cause__ or current.__context__
    return False


def report_failure(error: BaseException, exit_code: int) -> bool:
    """Whether this process should print `error`, so that a run's failure is printed once.

    Under our launcher the failure is left in a file for the launcher to print. Under another
    launcher the first rank to fail prints; when the ranks' store is gone (rank 0, which hosts it,
    was killed), every rank prints. A process that no launcher started always prints.
    """
    environment = rank_environment()
    if not environment.is_launched or environment.world_size == 1:
        return True
    folder = os.environ.get(LAUNCH_FOLDER_VARIABLE)
    if folder:
        _leave_failure(Path(folder), environment.rank, error, exit_code)
        return False
    if isinstance(error, PeerFailure):
        return False
    rendezvous = sys.modules.get(_RENDEZVOUS)
    if rendezvous is None or not rendezvous.has_joined():
        return environment.local_rank == 0
    return bool(rendezvous.claim_report())


def lost_contact(error: BaseException) -> LaunchError:
    """The error to show to the user instead of one for which `is_lost_peer` holds."""
    if isinstance(error, PeerFailure | LostContact):
        return error
    seen = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    return LostContact(
        f"rank {rank_environment().rank} lost contact with another rank "
        f"({type(error).__name__}: {first_line(error)[:200]}).{seen} Look for the first error "
        "of another rank; a rank that the kernel killed, because memory ran out, leaves none. "
        "Resume from the last checkpoint with --resume"
    )


def exit_as_rank(program: Callable[[], object]) -> NoReturn:
    """Run a program that may raise SystemExit, and end this process with its exit code."""
    code: object = 0
    try:
        program()
    except SystemExit as stop:
        code = stop.code
    exit_rank(code if isinstance(code, int) else int(code is not None))


def exit_rank(exit_code: int) -> NoReturn:
    """End this process. A failed rank exits without destroying its process group: if other members
    are gone, that can hang or abort, and would change the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if rank_environment().is_launched and exit_code != 0:
        os._exit(exit_code)
    rendezvous = sys.modules.get(_RENDEZVOUS)
    if rendezvous is not None:  # NCCL complains on stderr about a group that is left open
        rendezvous.leave_run()
    sys.exit(exit_code)


def wait_for_rank_0() -> None:
    """Call on every rank after a run that was asked to stop, when it has closed everything. A
    launcher kills the remaining ranks as soon as one exits with an error code, and rank 0 may still
    have trackers and servers to close."""
    rendezvous = sys.modules.get(_RENDEZVOUS)
    if rendezvous is not None and rank_environment().is_launched:
        rendezvous.wait_for_rank_0()


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How a rank failed. `kind` is the error's class name. `echo`: the error only says that another
    rank is gone. `when` is in seconds since the epoch."""

    rank: int
    kind: str
    message: str
    exit_code: int
    echo: bool
    when: float


def _leave_failure(folder: Path, rank: int, error: BaseException, exit_code: int) -> None:
    echo, kind = is_lost_peer(error), type(error).__name__
    record = {
        "rank": rank, "kind": kind, "message": without_secrets(str(error)),
        "exit_code": exit_code,
        "echo": echo, "when": time.time(),
    }  # fmt: skip
    temporary = folder / f"rank_{rank:05d}.tmp"
    with contextlib.suppress(OSError):  # the launcher still sees the exit code
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(folder / f"rank_{rank:05d}.json")


def read_failures(folder: Path) -> list[RankFailure]:
    """The failures that ranks wrote there: causes before echoes, then by time."""
    records = [json.loads(file.read_text()) for file in sorted(folder.glob("rank_*.json"))]
    failures = [RankFailure(**record) for record in records]
    return sorted(failures, key=lambda failure: (failure.echo, failure.when))


def leave_positions(rank: int, text: str | None) -> None:
    """Tell our launcher where the ranks wait (None: they go on), in case they are killed there.
    NCCL aborts a process whose collective takes too long, before it can raise an error of ours."""
    folder = os.environ.get(LAUNCH_FOLDER_VARIABLE)
    if folder is None:
        return
    file = Path(folder) / f"positions_{rank:05d}.txt"
    with contextlib.suppress(OSError):  # information only
        if text is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(text, encoding="utf-8")


def read_positions(folder: Path) -> str:
    """The newest text of `leave_positions`, or ""."""
    files = sorted(folder.glob("positions_*.txt"), key=lambda file: file.stat().st_mtime)
    return files[-1].read_text(encoding="utf-8") if files else ""


def run_collectively(comm: Comm, action: Callable[[], _Result]) -> _Result:
    """This rank's result of `action`, once it has succeeded on every rank.

    If it raises a GrpoReplayError on some ranks, the lowest of them raises that error, and every
    other rank a PeerFailure with its exit code. `action` must not call collectives.
    """
    outcome: _Result | None = None
    failure: GrpoReplayError | None = None
    try:
        outcome = action()
    except GrpoReplayError as error:
        failure = error
    mine = None if failure is None else [str(failure), failure.exit_code]
    raise_first_failure(comm.rank, comm.all_gather_json(mine), failure)
    return outcome  # type: ignore[return-value]


def raise_first_failure(
    rank: int,
    outcomes: Sequence[Sequence[Any] | None],
    mine: GrpoReplayError | None,
) -> None:
    """Raise if any rank's outcome is [message, exit code]: the lowest failed rank its own error,
    the others a PeerFailure."""
    failed = [index for index, outcome in enumerate(outcomes) if outcome is not None]
    if not failed:
        return
    if rank == failed[0] and mine is not None:
        if len(failed) == len(outcomes):
            raise mine
        raise type(mine)(f"{mine} (on {name_ranks(failed)} of {len(outcomes)})") from mine
    message, exit_code = outcomes[failed[0]] or ("", 1)
    raise PeerFailure(f"rank {failed[0]}: {message}", int(exit_code))


def describe_disagreement(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """One line per leaf on which ranks disagree with rank 0 (five at most), or None.

    `facts[rank]` is a nested mapping of JSON values, such as the resolved recipe.
    """
    flat = [dict(_leaves(each)) for each in facts]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    lines = []
    for key in keys:
        values = [json.dumps(each.get(key, "(absent)")) for each in flat]
        other = next((value for value in values if value != values[0]), None)
        if other is not None:
            ranks = [rank for rank, value in enumerate(values) if value == other]
            lines.append(f"  {key}: {values[0]} on rank 0, {other} on {name_ranks(ranks)}")
    if not lines:
        return None
    more = [f"  and {len(lines) - 5} more"] if len(lines) > 5 else []
    return "\n".join([*lines[:5], *more])


def _leaves(value: Any, at: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(at, value)]
    return [
        pair
        for key, inner in value.items()
        for pair in _leaves(inner, f"{at}.{key}" if at else str(key))
    ]


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2`, `ranks 1, 2, 3, 4, … (12)`."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    if len(ranks) == 1:
        return f"rank {shown}"
    return f"ranks {shown}" if len(ranks) <= 8 else f"ranks {shown}, … ({len(ranks)})"
