"""Starts the ranks of this machine with torch's own launcher."""

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_replay.distributed.environment import (
    LAUNCHER_VARIABLE,
    PRINTED_VARIABLE,
    PYTHON_MODULE,
    import_path,
    threads_per_rank,
)
from grpo_replay.distributed.failures import name_ranks
from grpo_replay.distributed.held_folder import HeldFolder
from grpo_replay.errors import EXIT_AFTER_PEER, INTERRUPTED, LaunchError, UsageError

PROGRAM = (*PYTHON_MODULE, "grpo_replay")
_SAVE_SECONDS = 3600
"""Time that ranks have for their checkpoint after a signal, before torch's agent kills them."""
_PEER_KILL_SECONDS = 29
"""torch's agent kills the remaining ranks 30 s after one failed, by its own clock."""


def launch_ranks(
    arguments: Sequence[str],
    num_processes: int,
    threads_per_process: int | None = None,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Run `grpo-replay ARGUMENTS` (or another Python `program`) as ranks of this machine. Returns
    the exit code: that of the rank that failed by itself, or 130 after a signal.

    Ranks print their errors; an error that several raise is printed once. A signal to this process
    reaches every rank; when a rank fails, the others get SIGTERM and, 30 s later, SIGKILL. Raises
    LaunchError for a rank that was killed otherwise, and if none failed by itself.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if num_processes < 1:
        raise UsageError(f"--num-processes {num_processes}: at least one rank is needed")
    held = HeldFolder("grpo-replay-launch-")
    os.environ.update(_variables(num_processes, threads_per_process))
    os.environ[PRINTED_VARIABLE] = str(held.path / "printed")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_processes, max_restarts=0,
        run_id=f"grpo-replay-{os.getpid()}", local_addr="127.0.0.1",
        # A file, since torch's store over TCP listens on every interface.
        rdzv_backend="c10d", rdzv_configs={"store_type": "file"},
        rdzv_endpoint=str(held.path / "store"),
        logs_specs=DefaultLogsSpecs(log_dir=str(held.path / "agent")),
        signals_to_handle=",".join(_signals()), shutdown_timeout=_SAVE_SECONDS,
    )  # fmt: skip
    logging.disable(logging.CRITICAL)  # the agent would repeat what the ranks print
    try:
        elastic_launch(config, sys.executable)(*program, *arguments)
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:
        return _first_exit_code(error.failures)
    finally:
        logging.disable(logging.NOTSET)
        held.release()
    return 0


def _variables(ranks: int, threads: int | None) -> dict[str, str]:
    """Returns the variables that the launched ranks inherit: threads, loopback, our launcher."""
    loopback = "lo" if any(name == "lo" for _, name in socket.if_nameindex()) else "lo0"
    return {
        **import_path(),
        LAUNCHER_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads_per_rank(threads, ranks)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or loopback,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # rank 0 opens the store, on loopback only
    }


def _signals() -> list[str]:
    """Returns the signals that torch's agent passes on. Under nohup a hang-up stays ignored."""
    names = ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"]
    return [name for name in names if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]


def _first_exit_code(failures: Mapping[int, Any]) -> int:
    """Returns the exit code of the first rank that did not end because of another. `failures` are
    torch's, in the order in which it saw them. Raises LaunchError if that rank was killed, or if
    all ended because of another."""
    first_failure = min(failure.timestamp for failure in failures.values())
    killed_by_torch = first_failure + _PEER_KILL_SECONDS
    for rank, failure in failures.items():
        code = failure.exitcode
        if code in (EXIT_AFTER_PEER, -signal.SIGTERM):
            continue
        if code == -signal.SIGKILL and failure.timestamp >= killed_by_torch:
            continue
        if code < 0:
            raise LaunchError(_killed(rank, -code)) from None
        return int(code)
    raise LaunchError(
        f"{name_ranks(sorted(failures))} lost contact with another rank or were ended from "
        "outside, and none says why: see log/attempt_*.log in the output directory. Start the "
        "command again, that of a training run with --resume"
    ) from None


def _killed(rank: int, number: int) -> str:
    name = signal.Signals(number).name
    why = "; the kernel does that when host memory runs out (see dmesg)" * (name == "SIGKILL")
    return (
        f"rank {rank} was killed by {name}{why}. The other ranks were stopped. Start the "
        "command again, that of a training run with --resume"
    )
