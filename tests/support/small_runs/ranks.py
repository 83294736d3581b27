"""A program of several ranks without a trainer: they join, talk through Comm, and fail on request.

python ranks.py launch N MODE [ARGUMENT]     through launch_ranks and the commands' error boundary
python ranks.py rank MODE [ARGUMENT]         as a rank that another launcher started
"""

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from grpo_replay.cli.error_boundary import report_error
from grpo_replay.distributed import failures, launch
from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import prepare_rank, rank_environment
from grpo_replay.distributed.failures import exit_as_rank, leave_run, run_on_main
from grpo_replay.errors import DatasetError, LaunchError, SamplerError
from grpo_replay.stop import StopToken

TIMEOUT_SECONDS = float(os.environ.get("RANKS_TIMEOUT", "30"))


def boundary(action) -> None:
    def program() -> None:
        try:
            sys.exit(action())
        except Exception as error:
            sys.exit(report_error(error))

    exit_as_rank(program)


def join(seed: int) -> Comm:
    import torch.distributed as dist

    from grpo_replay.distributed.rendezvous import form_group, refuse_disagreement
    from grpo_replay.recipe import load_recipe

    environment = rank_environment()
    form_group(environment, "gloo", timedelta(seconds=TIMEOUT_SECONDS))
    comm = Comm(environment.rank, environment.world_size, dist.group.WORLD)
    refuse_disagreement(comm, load_recipe("tiny", [f"run.seed={seed}"]))
    return comm


def run_mode(mode: str, argument: str = "") -> int:
    environment = rank_environment()
    prepare_rank(environment)
    rank = environment.rank
    if argument:
        Path(argument, f"pid_{rank}").write_text(str(os.getpid()))
    if mode == "killed-starting-on-0" and rank == 0:
        others = [Path(argument, f"pid_{each}") for each in range(1, environment.world_size)]
        while not all(path.exists() for path in others):
            time.sleep(0.05)
        time.sleep(1.0)  # they wait for it
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "no-gpu-for-1":
        with StopToken().on_signals():
            time.sleep(2.0 if rank == 1 else 60.0)
            raise LaunchError("local rank 1 needs GPU 1")
    seed = 2 if mode == "disagree" and rank == 1 else 1
    return MODES.get(mode, sums)(join(seed))


def sums(comm: Comm) -> int:
    total = sum(comm.all_gather(comm.rank + 1))
    everyone = comm.all_gather([comm.rank, os.environ["MASTER_ADDR"]])
    print(f"rank {comm.rank} of {comm.world_size}: sum {total} {everyone}")
    return 0


def crash_on_1(comm: Comm) -> int:
    comm.barrier()
    if comm.rank == 1:
        raise DatasetError("row 12 is broken")
    return wait_for_others(comm)


def fail_alike(comm: Comm) -> int:
    comm.barrier()
    raise DatasetError("row 12 is broken")


def killed_on_0(comm: Comm) -> int:
    return killed_on(0, comm)


def killed_on_1(comm: Comm) -> int:
    return killed_on(1, comm)


def killed_on(rank: int, comm: Comm) -> int:
    comm.barrier()
    if comm.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return wait_for_others(comm)


def busy_on_0(comm: Comm) -> int:
    """Rank 1 fails while rank 0 generates, and takes a SIGTERM for a request to save."""
    stop = StopToken()
    with stop.on_signals():
        stop.can_save = True
        comm.barrier()
        if comm.rank == 1:
            raise SamplerError("the server of rank 1 is lost")
        time.sleep(60.0)
    return 0


def slow_to_print(comm: Comm) -> int:
    """Rank 0 fails; the other knows it at once."""

    def fail() -> None:
        if comm.is_main:
            raise SamplerError("rank 0 takes its time")

    if comm.is_main:
        at_once = failures.print_error
        failures.print_error = lambda text: (time.sleep(2.0), at_once(text))
    failures.run_collectively(comm, fail)
    return 0


def no_server(comm: Comm) -> int:
    """A sampler of the user's own finds its server down on rank 0."""
    comm.barrier()
    if comm.is_main:
        socket.create_connection(("127.0.0.1", 1))
    return wait_for_others(comm)


def wait_for_others(comm: Comm) -> int:
    while True:
        comm.barrier()
        time.sleep(0.02)


def long_work(comm: Comm) -> int:
    """Rank 0 works for longer than a collective may wait (RANKS_TIMEOUT)."""
    comm.barrier()
    started = time.monotonic()
    done = run_on_main(
        comm, lambda: time.sleep(3 * TIMEOUT_SECONDS) or 7, poll_seconds=TIMEOUT_SECONDS / 10
    )
    waited = time.monotonic() - started > 2.5 * TIMEOUT_SECONDS
    print(f"done {comm.all_gather([done, waited])}")
    return 0


def until_signal(comm: Comm) -> int:
    """Like the trainer: a signal asks all ranks to stop after the step; exit 130."""
    received = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: received.append(number))
    comm.barrier()
    print("ready", flush=True)
    while not any(comm.all_gather(len(received))):
        time.sleep(0.02)
    time.sleep(0.3 * (1 + comm.rank))  # a checkpoint
    counts = comm.all_gather(received)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if comm.is_main:
        time.sleep(0.7)  # closes its trackers, while the other ranks are done
    print(f"stopped after {counts}", flush=True)
    leave_run()
    return 130


MODES = {
    "sums": sums,
    "crash-on-1": crash_on_1,
    "fail-alike": fail_alike,
    "killed-on-0": killed_on_0,
    "killed-on-1": killed_on_1,
    "busy-on-0": busy_on_0,
    "slow-to-print": slow_to_print,
    "no-server": no_server,
    "long-work": long_work,
    "until-signal": until_signal,
    "hang": wait_for_others,
}


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "rank":
        boundary(lambda: run_mode(*rest))
    count, *arguments = rest
    if seconds := int(os.environ.get("RANKS_FOLLOW", "0")):
        from torch.distributed.elastic.multiprocessing.api import PContext

        PContext.close.__defaults__ = (None, seconds)  # of torch's agent: 30
        launch._PEER_KILL_SECONDS = seconds - 1
    boundary(lambda: launch.launch_ranks(["rank", *arguments], int(count), program=[__file__]))
