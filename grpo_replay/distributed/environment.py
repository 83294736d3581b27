"""This process's rank, from variables of our launcher, torchrun, DeepSpeed's launcher or Slurm; its
cores, threads and GPUs; and the environment of processes that it starts.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_replay.errors import LaunchError

DEFAULT_MASTER_PORT = 29500
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
CORES_VARIABLE = "GRPO_REPLAY_CORES"
"""Cores that this process and its children may use, if fewer than the machine offers. A sweep sets
it for runs that share a machine."""
LAUNCHER_VARIABLE = "GRPO_REPLAY_LAUNCHER"
"""Process id of `launch_ranks`, set for the ranks that it starts."""
PRINTED_VARIABLE = "GRPO_REPLAY_PRINTED"
"""File with the errors that the ranks of `launch_ranks` have printed."""
PYTHON_MODULE = ("-P", "-m")
"""Options of a Python that runs a module. With -P, a file of the working directory (a `types.py`,
say) cannot shadow a module of Python or a library. `import_path` has the directory last."""
_PR_SET_PDEATHSIG = 1
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm's step ids from here on are not those of `srun`: a batch script (…FB), the interactive
shell of `salloc` (…FA)."""


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This process's rank and the rendezvous address; rank 0 of 1 if no launcher started it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_MASTER_PORT
    is_launched: bool = False

    def variables(self) -> dict[str, str]:
        """Returns the variables that torch.distributed and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read this process's rank from WORLD_SIZE and its companions, else from a Slurm job step.

    Rank 0 of 1 if neither is set; a batch script and the shell of `salloc` are no ranks. Raises
    LaunchError for variables that are missing or contradict each other.
    """
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" in environ:
        environment = _from_variables(environ)
    elif "SLURM_PROCID" in environ and _is_step_of_srun(environ):
        environment = _from_slurm(environ)
    else:
        return RankEnvironment()
    rank, world_size = environment.rank, environment.world_size
    local_rank, local_world_size = environment.local_rank, environment.local_world_size
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size):
        raise LaunchError(
            f"rank {rank} of {world_size}, local rank {local_rank} of {local_world_size}: the "
            "launcher's variables contradict each other; unset WORLD_SIZE, RANK and LOCAL_RANK to "
            "start without a launcher"
        )
    return environment


def refuse_other_count(environment: RankEnvironment, requested: int | None, option: str) -> None:
    """Raises LaunchError if a launcher started another number of ranks on this machine than
    `requested` by `option` (None: any number). Schedulers may set WORLD_SIZE=1 in every container,
    which would leave all GPUs but one idle."""
    started = environment.local_world_size
    if not environment.is_launched or requested in (None, started):
        return
    raise LaunchError(
        f"{option} is {requested}, but the environment says that a launcher started {started} "
        f"rank{'s' * (started != 1)} on this machine (WORLD_SIZE or SLURM_PROCID is set): unset "
        "WORLD_SIZE, RANK and LOCAL_RANK to let grpo-replay start the ranks itself, have the "
        f"launcher start {requested}, or ask for {started} with --num-processes {started}"
    )


def _from_variables(environ: Mapping[str, str]) -> RankEnvironment:
    """Reads the variables of torchrun, DeepSpeed's launcher or ours. Raises LaunchError if one of
    several ranks lacks its rank or address."""
    world_size = _integer(environ, "WORLD_SIZE")
    if world_size > 1:
        for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                raise LaunchError(
                    f"WORLD_SIZE is {world_size} but {name} is not set: a launcher sets both; "
                    "unset WORLD_SIZE to let grpo-replay start the ranks itself"
                )
    local_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "LOCAL_SIZE"
    return RankEnvironment(
        rank=_integer(environ, "RANK", 0),
        local_rank=_integer(environ, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_integer(environ, local_name, world_size),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_integer(environ, "MASTER_PORT", DEFAULT_MASTER_PORT),
        is_launched=True,
    )


def _is_step_of_srun(environ: Mapping[str, str]) -> bool:
    name = "SLURM_STEP_ID" if "SLURM_STEP_ID" in environ else "SLURM_STEPID"
    return 0 <= _integer(environ, name, -1) < _FIRST_SPECIAL_STEP


def _from_slurm(environ: Mapping[str, str]) -> RankEnvironment:
    """Reads the variables of a Slurm job step: rank 0 of 1 for a single task; rank 0's node is the
    first, its port a function of job and step. Raises LaunchError if one is missing."""
    # The step's own count: SLURM_NTASKS may still be the job's.
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _integer(environ, count)
    if world_size == 1:
        return RankEnvironment()
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
    node = _integer(environ, "SLURM_NODEID", 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    # From job and step, so that every task computes the same port, and most likely a free one.
    step = _integer(environ, "SLURM_STEP_ID", 0)
    port = 20_000 + (31 * _integer(environ, "SLURM_JOB_ID", 0) + step) % 12_000
    return RankEnvironment(
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=_tasks_on_node(tasks, node) or world_size,
        master_addr=environ.get("MASTER_ADDR") or first_slurm_host(nodes),
        master_port=_integer(environ, "MASTER_PORT", port),
        is_launched=True,
    )


def first_slurm_host(nodes: str) -> str:
    """Returns the first name of a Slurm node list: `gpu[003-008,12],x1` gives `gpu003`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _tasks_on_node(tasks: str, node: int) -> int | None:
    """Reads a node's tasks from Slurm's form `8(x2),4` for 8, 8, 4; None if it does not say."""
    counts: list[int] = []
    for part in filter(None, tasks.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Reads a whole number. Raises LaunchError for others, and without value and default."""
    text = environ.get(name)
    if text is None:
        if default is None:
            raise LaunchError(f"{name} is not set, though other variables of its launcher are")
        return default
    try:
        return int(text)
    except ValueError as error:
        raise LaunchError(f"{name} is {text!r}: expected a whole number") from error


def import_path() -> dict[str, str]:
    """PYTHONPATH for a child that imports like this process, with the working directory last."""
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        here = os.getcwd()
        folders = [folder for folder in sys.path if folder not in ("", here)]
        return {"PYTHONPATH": os.pathsep.join([*folders, here])}
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def named_gpus(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it: numbers, or identifiers
    that all begin with GPU- or MIG-, up to the first word that is neither (`0,-1,1` is GPU 0). None
    if it is not set. Raises LaunchError for a GPU named twice, for which CUDA shows no GPU at all.
    """
    value = (os.environ if environ is None else environ).get(GPUS_VARIABLE)
    if value is None:
        return None
    kind = value[:4] if value.startswith(("GPU-", "MIG-")) else None
    gpus = list[str]()
    for word in value.split(","):
        number = re.match(r"\s*\+?(\d+)", word)
        if not (word.startswith(kind) if kind else number):
            break
        gpus.append(word if kind or number is None else str(int(number[1])))
    if len(set(gpus)) < len(gpus):
        raise LaunchError(
            f"{GPUS_VARIABLE} is {value!r}: it names a GPU twice, so that CUDA shows none; name "
            "each once"
        )
    return gpus


def available_cores() -> int:
    """Count the CPU cores that this process may use: those of its affinity (else of the machine),
    and at most GRPO_REPLAY_CORES. Raises LaunchError if that is not a whole number above 0."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    limit = _integer(os.environ, CORES_VARIABLE, cores)
    if limit < 1:
        raise LaunchError(f"{CORES_VARIABLE} is {limit}: expected at least 1, or unset it")
    return min(cores, limit)


def threads_per_rank(setting: int | None, ranks: int) -> int:
    """Return the CPU threads of torch for each of `ranks` ranks of this machine: the `setting`, or
    the cores divided by the ranks and at most OMP_NUM_THREADS (its first number). Raises
    LaunchError if that is not above 0.

    torchrun sets OMP_NUM_THREADS to 1 if it is not set; that 1 is ignored.
    """
    if setting is not None:
        return setting
    share = max(1, available_cores() // ranks)
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER_VARIABLE not in os.environ
    if limit == "" or (limit == "1" and by_torchrun):
        return share
    if not limit.isdecimal() or int(limit) < 1:
        raise LaunchError(f"OMP_NUM_THREADS is {limit!r}: expected at least 1, or unset it")
    return min(share, int(limit))


def prepare_rank(environment: RankEnvironment) -> None:
    """Set torch's variables for this rank, silence stdout on ranks other than 0, and end a rank of
    `launch_ranks` with its launcher."""
    if not environment.is_launched:
        return
    if launcher := os.environ.get(LAUNCHER_VARIABLE):
        stop_with_parent(int(launcher))
    os.environ.update(environment.variables())
    if environment.rank > 0:
        sys.stdout.flush()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.close(silence)


def stop_with_parent(parent_pid: int) -> None:
    """Ask Linux to send SIGTERM when the launcher dies, also by SIGKILL, so that no rank stays."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if parent_pid != os.getppid():  # it died before the request
        raise SystemExit(1)
