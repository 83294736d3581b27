"""Work that rank 0 does for all ranks, without a time limit."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.failures import raise_first_failure
from grpo_replay.errors import GrpoReplayError

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
