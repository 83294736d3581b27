"""Starting the ranks of a run on one node with torchrun's agent.

This module adds three guarantees: a signal reaches every rank once; the first error of the ranks is
printed once and its exit code kept; no rank outlives this process.
"""

import base64
import binascii
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import psutil

from grpo_replay.distributed.environment import LAUNCH_FOLDER_VARIABLE, threads_per_rank
from grpo_replay.distributed.failures import (
    PeerFailure,
    RankFailure,
    read_failures,
    read_positions,
)
from grpo_replay.distributed.held_folder import HeldFolder
from grpo_replay.errors import INTERRUPTED, GrpoReplayError, LaunchError, UsageError, error_named

RANK_MODULE = "grpo_replay.distributed.entry"
COMMAND_LINE = "grpo_replay.cli.app:main"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Payload:
    """What a rank receives: the arguments after `grpo-replay`, variables to set, its parent's
    process id (0 if unknown), and the `module:function` to call, which reads sys.argv."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    parent_pid: int = 0
    entry: str = COMMAND_LINE


def encode_payload(payload: Payload) -> str:
    """The payload as one word without characters that are special to a shell."""
    return base64.urlsafe_b64encode(json.dumps(asdict(payload)).encode()).decode()


def decode_payload(word: str) -> Payload:
    """Raises UsageError for a word that `encode_payload` did not make."""
    try:
        values = json.loads(base64.urlsafe_b64decode(word))
        return Payload(**{**values, "arguments": tuple(values["arguments"])})
    except (ValueError, TypeError, binascii.Error) as error:
        raise UsageError(
            f"{RANK_MODULE} is started by grpo-replay itself; run `grpo-replay train` instead"
        ) from error


def launch_ranks(
    arguments: Sequence[str],
    num_processes: int | None = None,
    threads_per_process: int | None = None,
    entry: str = COMMAND_LINE,
) -> int:
    """The exit code of `grpo-replay ARGUMENTS` (or of another `entry`) run as several ranks.

    The ranks' first error is raised here, of its own class, so that it is printed once. Raises
    LaunchError if a rank was killed.
    """
    if num_processes is None or num_processes < 1:
        raise UsageError(f"--num-processes {num_processes}: at least one rank is needed")
    threads = threads_per_rank(threads_per_process, num_processes)
    return _launch_node(arguments, num_processes, threads, entry)


def _launch_node(arguments: Sequence[str], num_processes: int, threads: int, entry: str) -> int:
    from grpo_replay.distributed.rendezvous import run_agent

    held = HeldFolder("grpo-replay-launch-")
    folder = held.path
    try:
        payload = Payload(
            tuple(arguments),
            {
                LAUNCH_FOLDER_VARIABLE: str(folder),
                "OMP_NUM_THREADS": str(threads),
                # The ranks of one node need no other interface.
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or _loopback_interface(),
            },
            os.getpid(),
            entry,
        )
        command = [sys.executable, "-m", RANK_MODULE, encode_payload(payload)]
        # torchrun sets OMP_NUM_THREADS to 1 with a warning if it finds none.
        with _variable("OMP_NUM_THREADS", str(threads)), _pass_signals_on(_own_ranks) as signals:
            exit_codes = run_agent(command, num_processes)
        failures, positions = read_failures(folder), read_positions(folder)
        return _conclude(exit_codes, failures, bool(signals), positions)
    finally:
        held.release()


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def _conclude(
    exit_codes: Mapping[int, int],
    failures: Sequence[RankFailure],
    interrupted: bool,
    positions: str = "",
) -> int:
    """The run's exit code. Raises the ranks' first error.

    An echo of a killed rank (lost contact) is not the first error: the signal is reported instead.
    `positions` is the last report of where the ranks were waiting.
    """
    if not exit_codes:
        return 0
    if failures and not failures[0].echo:
        raise _error_of(failures[0])
    if interrupted:
        return INTERRUPTED
    told = [failure for failure in failures if failure.kind == PeerFailure.__name__] or failures
    if told and all(code in (-signal.SIGTERM, told[0].exit_code) for code in exit_codes.values()):
        # The agent stopped the failed rank before it could report. The other ranks had received
        # its message, or waited for it until the time-out.
        raise _error_of(told[0])
    if INTERRUPTED in exit_codes.values():
        return INTERRUPTED  # the agent may have stopped a rank that was about to end
    for rank, code in exit_codes.items():
        if code < 0:
            raise LaunchError(_describe_signal(rank, -code, positions))
    if failures:
        raise _error_of(failures[0])
    return next(iter(exit_codes.values()))


def _error_of(failure: RankFailure) -> GrpoReplayError:
    """The rank's error as one of this process, with its class and exit code."""
    error = error_named("LaunchError" if failure.echo else failure.kind, failure.message)
    error = error or GrpoReplayError(f"rank {failure.rank}: {failure.kind}: {failure.message}")
    error.exit_code = failure.exit_code
    return error


def _describe_signal(rank: int, number: int, positions: str) -> str:
    name = signal.Signals(number).name
    why, waited = "", f" They were waiting: {positions}." if positions else ""
    if number == signal.SIGKILL and positions:
        why = "; so ends a rank for which the others waited engine.timeout_seconds"
    elif number == signal.SIGKILL:
        why = "; the kernel does that when host memory runs out (see dmesg)"
    return (
        f"rank {rank} was killed by {name}{why}.{waited} The other ranks were stopped; "
        "resume from the last checkpoint with --resume"
    )


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _own_ranks() -> list[int]:
    """Process ids of the agent's ranks: the children of this process that lead a session."""
    leaders = []
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(child.pid) == child.pid:
                leaders.append(child.pid)
    return leaders


@contextlib.contextmanager
def _pass_signals_on(ranks: Callable[[], list[int]]) -> Iterator[list[int]]:
    """Send each signal to every rank once, SIGUSR1 as SIGTERM; the third signal kills them.

    Yields the list of signals received so far.
    """
    received: list[int] = []

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        running = ranks()
        if not running:
            raise KeyboardInterrupt
        told = signal.SIGTERM if number == signal.SIGUSR1 else number
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, told if len(received) < 3 else signal.SIGKILL)

    # Under nohup a hang-up is ignored, by the ranks as well.
    heard = [each for each in _SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
