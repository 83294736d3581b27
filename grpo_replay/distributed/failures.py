"""Failures of ranks: one message, one exit code, and no rank left waiting; and work that rank 0
does for all ranks without a time limit."""

import atexit
import fcntl
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NoReturn, TypeVar

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import (
    LAUNCHER_VARIABLE,
    PRINTED_VARIABLE,
    rank_environment,
)
from grpo_replay.errors import EXIT_AFTER_PEER, GrpoReplayError, LaunchError, first_line

POLL_SECONDS = 2.0
_Result = TypeVar("_Result")


def run_on_main(
    comm: Comm, action: Callable[[], _Result], poll_seconds: float = POLL_SECONDS
) -> _Result | None:
    """Run `action` on rank 0, and return its result there; None on the others. Collective.

    Rank 0 works in a thread and tells the others every `poll_seconds` that it is still working. No
    collective takes longer than that, so `engine.timeout_seconds` does not limit the work, and the
    others still notice if rank 0 dies.

    A GrpoReplayError is raised on rank 0, and on others a PeerFailure. `action` must call no
    collectives.
    """
    future = start_in_thread(action) if comm.is_main else None
    while not comm.broadcast(future is not None and bool(wait([future], poll_seconds).done)):
        pass  # rank 0 is still working
    error = None if future is None else future.exception()
    if error is not None and not isinstance(error, GrpoReplayError):
        raise error
    outcome = comm.broadcast(None if error is None else [str(error), error.exit_code])
    raise_first_failure(comm.rank, [outcome] + [None] * (comm.world_size - 1), error)
    return None if future is None else future.result()


def start_in_thread(action: Callable[[], _Result]) -> "Future[_Result]":
    """Run `action` in a thread, so that this one can handle signals. Returns its future result."""
    future: Future[_Result] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    # A daemon thread, so that an interrupted process does not wait for it.
    threading.Thread(target=work, name="long work", daemon=True).start()
    return future


_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)"
    r"|timed out waiting|wait timeout|read timeout|connectfullmesh|communicator was aborted"
    r"|remote process exited|heartbeat",
    re.IGNORECASE,
)
_COMMUNICATING_MODULES = ("torch.", "deepspeed.", "grpo_replay.")
# Looked up in sys.modules, not imported, because it loads torch. If it is not loaded, this rank has
# not joined a run.
_RENDEZVOUS = "grpo_replay.distributed.rendezvous"


class PeerFailure(LaunchError):
    """Another rank failed and reports it; this rank exits with the same code and prints nothing."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LostContact(LaunchError):
    """This rank lost the connection to another rank, which is the one that failed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if LAUNCHER_VARIABLE in os.environ:
            self.exit_code = EXIT_AFTER_PEER


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, only says that another rank has ended: by the
    wording of torch.distributed, and the module, for a refused connection is worded alike."""
    if isinstance(error, GrpoReplayError):
        return isinstance(error, PeerFailure | LostContact)
    if not _has_joined():
        return False
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, RuntimeError) and _LOST_PEER.search(str(current)):
            frames = [frame for frame, _ in traceback.walk_tb(current.__traceback__)]
            module = frames[-1].f_globals.get("__name__", "") if frames else ""
            if module.startswith(_COMMUNICATING_MODULES):
                return True
        current = current.__cause__ or current.__context__
    return False


def _has_joined() -> bool:
    """Returns whether this process has joined other ranks. A command without ranks does not read a
    launcher's variables, which may be incomplete."""
    return _RENDEZVOUS in sys.modules and rank_environment().world_size > 1


def is_reported_elsewhere(error: BaseException) -> bool:
    """Returns whether the failing rank, or for a lost peer our launcher, prints this failure."""
    lost = isinstance(error, LostContact) and LAUNCHER_VARIABLE in os.environ
    return lost or isinstance(error, PeerFailure)


def print_error(text: str) -> None:
    """Print to stderr, unless another rank of `launch_ranks` has printed the same: an error that
    all ranks raise is printed once."""
    try:
        with open(os.environ.get(PRINTED_VARIABLE, ""), "a+", encoding="utf-8") as printed:
            # A rank that finds its error there ends the others, so they must have printed it.
            fcntl.flock(printed, fcntl.LOCK_EX)
            printed.seek(0)
            if text in printed.read().split("\0"):
                return
            print(text, file=sys.stderr, flush=True)
            printed.write(f"{text}\0")
    except OSError:  # no launcher of ours, or it is gone
        print(text, file=sys.stderr)


def wait_until_printed(seconds: float = 10.0) -> None:
    """Wait until a rank of `launch_ranks` has printed an error. The launcher ends all ranks as soon
    as one exits, so a rank that only follows another must not exit first."""
    name, deadline = os.environ.get(PRINTED_VARIABLE), time.monotonic() + seconds
    while name and time.monotonic() < deadline:
        if os.path.exists(name) and os.path.getsize(name):
            return
        time.sleep(0.02)


def lost_contact(error: BaseException) -> LaunchError:
    """Return the error that a user sees instead of one for which `is_lost_peer` is true."""
    if isinstance(error, PeerFailure | LostContact):
        return error
    return LostContact(
        f"rank {rank_environment().rank} lost contact with another rank "
        f"({type(error).__name__}: {first_line(error)[:200]}). Look for the first error "
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
    are gone, that can hang or abort. The interpreter of a rank, and of a process with vLLM, runs
    its exit handlers but is not torn down: threads of gloo, which outlive the destruction of a
    group that something still refers to, and of vLLM's CUDA graphs have aborted it there."""
    has_joined = _has_joined()
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code != 0 and has_joined:
        os._exit(exit_code)
    leave_run()  # NCCL warns on stderr about a group that is left open
    if has_joined or "vllm" in sys.modules:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def leave_run() -> None:
    """Wait for the other ranks, then destroy the process group. Call it when everything is closed:
    a launcher kills the remaining ranks as soon as one exits with an error code."""
    rendezvous = sys.modules.get(_RENDEZVOUS)
    if rendezvous is not None:
        rendezvous.leave_run()


def run_collectively(comm: Comm, action: Callable[[], _Result]) -> _Result:
    """Run `action` on every rank, and return this rank's result once all have succeeded.

    If it raises a GrpoReplayError on some ranks, the lowest of them raises that error, and every
    other rank a PeerFailure with its exit code. `action` must not call collectives.
    """
    outcome: _Result | None = None
    failure: GrpoReplayError | None = None
    try:
        outcome = action()
    except GrpoReplayError as error:
        failure = error
    report = None if failure is None else [str(failure), failure.exit_code]
    raise_first_failure(comm.rank, comm.all_gather(report), failure)
    return outcome  # type: ignore[return-value]


def raise_first_failure(
    rank: int,
    outcomes: Sequence[Sequence[Any] | None],
    own_error: GrpoReplayError | None,
) -> None:
    """Raise if any rank has failed, whose outcome is then [message, exit code]: on the lowest
    failed rank its own error, with the failed ranks unless all are, on the others a PeerFailure."""
    failed = [index for index, outcome in enumerate(outcomes) if outcome is not None]
    if not failed:
        return
    if rank == failed[0] and own_error is not None:
        if len(failed) == len(outcomes):
            raise own_error
        ranks = f"(on {name_ranks(failed)} of {len(outcomes)})"
        raise type(own_error)(f"{own_error} {ranks}") from own_error
    message, exit_code = outcomes[failed[0]] or ("", 1)
    raise PeerFailure(f"rank {failed[0]}: {message}", int(exit_code))


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2`, `ranks 1, 2, 3, 4, … (12)`."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    if len(ranks) == 1:
        return f"rank {shown}"
    return f"ranks {shown}" if len(ranks) <= 8 else f"ranks {shown}, … ({len(ranks)})"
