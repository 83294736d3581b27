"""A rank's place, read from the environment of each launcher; agreement and failure of ranks."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from commands import run_eval, run_train
from outside_ranks import RANK_NAMES, environment

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import (
    RankEnvironment,
    first_slurm_host,
    named_gpus,
    rank_environment,
    refuse_other_count,
)
from grpo_replay.distributed.failures import (
    PeerFailure,
    exit_rank,
    is_lost_peer,
    is_reported_elsewhere,
    lost_contact,
    raise_first_failure,
    run_collectively,
)
from grpo_replay.errors import DatasetError, LaunchError, RecipeError
from grpo_replay.tiny import BASES

TORCHRUN = {
    "WORLD_SIZE": "16", "RANK": "11", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node-a", "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
DEEPSPEED = {
    "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1",
    "CROSS_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[017-018]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}  # fmt: skip


SALLOC = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
}  # fmt: skip


ALONE = """
import json, torch
from core_engine import engine_recipe
from torch._C._distributed_c10d import _dump_fr_trace_json
from grpo_replay.engine.processes import initialize_processes
initialize_processes(engine_recipe(engine={"threads_per_process": None}))
torch.distributed.all_reduce(torch.ones(1))
print(len(json.loads(_dump_fr_trace_json()).get("entries", [])), torch.get_num_threads())
"""


@pytest.mark.slow
def test_a_rank_alone_keeps_no_record_of_its_collectives_and_the_threads_that_are_set():
    """torch's has their stacks: memory that grows over the first 2,000."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120,
        env={**environment(), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["0 1"], done.stderr


def test_a_process_without_a_launcher_is_rank_0_of_1():
    place = rank_environment({})
    assert place == RankEnvironment(0, 0, 1, 1, "127.0.0.1", 29500)
    assert not place.is_launched


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, RankEnvironment(11, 3, 16, 8, "node-a", 1234, True)),
        (DEEPSPEED, RankEnvironment(3, 1, 4, 2, "10.0.0.1", 29500, True)),
        (SLURM, RankEnvironment(9, 1, 16, 8, "gpu017", 20_000 + (31 * 123456) % 12_000, True)),
        (
            SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "7"},
            RankEnvironment(9, 1, 16, 8, "ib0", 7, True),
        ),
        # The shell of `salloc`, a batch script: one task, whatever the job has.
        (SALLOC, RankEnvironment()),
        (SALLOC | {"SLURM_STEP_ID": "4294967291"}, RankEnvironment()),
        # torchrun inside a Slurm step: torchrun's ranks, not Slurm's tasks
        (SLURM | TORCHRUN, RankEnvironment(11, 3, 16, 8, "node-a", 1234, True)),
    ],
)
def test_each_launcher_says_where_a_rank_stands(environ, expected):
    assert rank_environment(environ) == expected


def test_variables_given_back_name_the_same_place():
    place = rank_environment(SLURM)
    again = rank_environment(place.variables())
    assert (again.rank, again.local_rank, again.world_size) == (9, 1, 16)
    assert (again.master_addr, again.master_port) == (place.master_addr, place.master_port)


def test_a_slurm_batch_script_is_no_rank_though_slurm_procid_is_set():
    batch = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert not rank_environment(batch).is_launched


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("gpu[003-008,12],x1", "gpu003"),
        ("rack2-gpu[7,9]-ib", "rack2-gpu7-ib"),
        ("r[1-2]n[3-4]", "r1n3"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes, first):
    assert first_slurm_host(nodes) == first


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1"}, "MASTER_ADDR"),
        (TORCHRUN | {"RANK": "16"}, "rank 16 of 16"),
        (SLURM | {"SLURM_LOCALID": "8"}, "local rank 8 of 8"),
    ],
)
def test_contradicting_variables_are_refused(environ, said):
    with pytest.raises(LaunchError, match=said):
        rank_environment(environ)


OF_A_POD = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "pod-0", "MASTER_PORT": "29500"}
SLURM_STEP = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0",
              "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}  # fmt: skip


@pytest.mark.parametrize("environ", [OF_A_POD, SLURM_STEP])
@pytest.mark.parametrize("asked", ["option", "recipe", "dry run", "eval"])
def test_another_number_of_ranks_than_the_launcher_gives_is_refused(
    monkeypatch, tmp_path, environ, asked
):
    """Some schedulers set WORLD_SIZE=1 in every container; seven of eight GPUs were idle."""
    for name in RANK_NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    out = str(tmp_path / "out.json")
    of_recipe = ("engine.num_processes=2",)
    given = environ.get("SLURM_STEP_NUM_TASKS", "1")
    with pytest.raises(
        LaunchError, match=rf"is 2, but .* {given} ranks? .*--num-processes {given}"
    ):
        if asked == "eval":
            run_eval(str(BASES["tiny"]), benchmarks=("tiny",), output=out, num_processes=2)
        elif asked == "option":
            run_train("tiny", output_dir=out, num_processes=2)
        else:
            dry = asked == "dry run"
            run_train("tiny", output_dir=out, overrides=of_recipe, dry_run=dry)
    refuse_other_count(rank_environment(), int(given), "engine.num_processes")
    refuse_other_count(rank_environment(), None, "engine.num_processes")
    refuse_other_count(rank_environment({}), 2, "engine.num_processes")


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        ("0,1,2", ["0", "1", "2"]),
        ("0, 1,2", ["0", "1", "2"]),
        ("0,1,", ["0", "1"]),
        ("0,-1,1", ["0"]),
        ("2,,1", ["2"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,GPU-8a,2", ["1"]),
        ("GPU-8a,GPU-b1,0", ["GPU-8a", "GPU-b1"]),
        ("MIG-8a,GPU-b1", ["MIG-8a"]),
    ],
)
def test_gpus_are_read_as_cuda_reads_them(monkeypatch, named, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert named_gpus() == gpus
    found = torch.cuda._parse_visible_devices()  # torch's own reading
    assert [str(each) for each in found] == gpus


@pytest.mark.parametrize("named", ["0,0,1", "0,1, 00", "GPU-8a,GPU-8a"])
def test_a_gpu_that_is_named_twice_is_refused(monkeypatch, named):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert torch.cuda._parse_visible_devices() == []
    with pytest.raises(LaunchError, match=r"CUDA_VISIBLE_DEVICES is .* twice"):
        named_gpus()


def test_the_lowest_failed_rank_raises_its_error_and_the_others_its_exit_code():
    outcomes = [None, ["no field 'answer'", 3], ["no field 'answer'", 3]]
    with pytest.raises(DatasetError, match=r"no field 'answer' \(on ranks 1, 2 of 3\)"):
        raise_first_failure(1, outcomes, DatasetError("no field 'answer'"))
    for rank, mine in ((0, None), (2, DatasetError("no field 'answer'"))):
        with pytest.raises(PeerFailure, match="rank 1: no field") as caught:
            raise_first_failure(rank, outcomes, mine)
        assert caught.value.exit_code == 3
    raise_first_failure(0, [None, None], None)


class ThreadComm(Comm):
    """Ranks as threads: an all-gather over a barrier."""

    def __init__(self, rank, slots, barrier):
        super().__init__(rank, len(slots))
        self._slots, self._barrier = slots, barrier

    def all_gather(self, payload):
        self._slots[self.rank] = payload
        self._barrier.wait(timeout=100)
        return list(self._slots)


def test_run_collectively_returns_each_ranks_result_or_fails_everywhere():
    def outcomes_of(action):
        slots, barrier, seen = [b""] * 3, threading.Barrier(3, timeout=100), [None] * 3

        def rank(index):
            comm = ThreadComm(index, slots, barrier)
            try:
                seen[index] = run_collectively(comm, lambda: action(index))
            except Exception as error:  # the others wait for it no longer than the barrier
                seen[index] = error

        threads = [threading.Thread(target=rank, args=(index,)) for index in range(3)]
        [each.start() for each in threads]
        [each.join() for each in threads]
        return seen

    assert outcomes_of(lambda index: index * 10) == [0, 10, 20]

    def fail_on_2(index):
        if index == 2:
            raise RecipeError("does not fit")
        return index

    seen = outcomes_of(fail_on_2)
    assert [type(each) for each in seen] == [PeerFailure, PeerFailure, RecipeError]
    assert [each.exit_code for each in seen] == [2, 2, 2]


def raised_in(module: str, error: Exception) -> Exception:
    try:
        exec("raise error", {"__name__": module, "error": error})
    except Exception as caught:
        return caught


def test_lost_peers_are_told_from_real_errors(monkeypatch):
    place = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "grpo_replay.distributed.rendezvous", SimpleNamespace())
    text = "Read error [127.0.0.1]:9105: Connection reset by peer. This is typical"
    gloo = raised_in("torch.distributed.distributed_c10d", RuntimeError(text))
    wrapped = ValueError("while gathering")
    wrapped.__cause__ = gloo
    assert is_lost_peer(gloo) and is_lost_peer(wrapped)
    assert is_lost_peer(PeerFailure("x", 3)) and is_lost_peer(lost_contact(gloo))
    assert not is_lost_peer(RuntimeError("CUDA out of memory"))
    refused = LaunchError("cannot reach rank 0: Connection refused")  # the cause itself
    refused.__cause__ = ConnectionRefusedError("Connection refused")
    assert not is_lost_peer(refused)
    assert "Connection reset" in str(lost_contact(gloo)) and "--resume" in str(lost_contact(gloo))
    for module in ("samplers", "wandb.sdk", "torchvision.io"):  # their own connections
        assert not is_lost_peer(raised_in(module, RuntimeError(text)))
    assert not is_lost_peer(raised_in("grpo_replay.rewards.pool", BrokenPipeError("Broken pipe")))
    assert "RuntimeError" in str(lost_contact(RuntimeError()))
    monkeypatch.delenv("WORLD_SIZE")  # a process of its own has no peer to lose
    assert not is_lost_peer(gloo)


def test_one_rank_prints_a_failure(monkeypatch):
    """What follows from another rank's failure is printed by that rank, or by our launcher."""
    assert is_reported_elsewhere(PeerFailure("rank 1: row 12", 3))
    assert not is_reported_elsewhere(DatasetError("row 12"))
    lost = lost_contact(RuntimeError("Connection closed by peer"))
    assert not is_reported_elsewhere(lost)  # under torchrun or srun each rank is on its own
    monkeypatch.setenv("GRPO_REPLAY_LAUNCHER", "1")
    assert is_reported_elsewhere(lost) and not is_reported_elsewhere(DatasetError("row 12"))


def test_rank_modules_load_without_torch():
    code = (
        "import sys, grpo_replay.distributed.launch, grpo_replay.distributed.environment, "
        "grpo_replay.distributed.failures; "
        "print(sorted({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]", done.stderr


MASTER = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("words", "code"),
    [("--version", 0), ("train tiny", 4),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in
       (("aes --reference 1,2 --candidate a=1,2", 0), ("inspect-buffer gone", 3)))],
)  # fmt: skip
def test_only_a_command_with_ranks_asks_for_the_variables_of_a_launcher(words, code):
    """Of which WORLD_SIZE alone is set. One message, and no traceback."""
    command = [sys.executable, "-m", "grpo_replay", *words.split()]
    alone = environment() | {"WORLD_SIZE": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("WORLD_SIZE is 2 but RANK is not set") == (code == 4)


def test_a_fault_in_a_command_without_ranks_is_reported_whatever_a_launcher_has_set(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delitem(sys.modules, "grpo_replay.distributed.rendezvous", raising=False)
    assert not is_lost_peer(TypeError("a bug"))


def test_what_a_failed_rank_printed_is_not_lost():
    program = """
from grpo_replay.distributed.failures import exit_rank
print("the last line", end="")
exit_rank(3)
"""
    launched = {**os.environ, "PYTHONUNBUFFERED": "", "RANK": "0", "WORLD_SIZE": "2", **MASTER}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=launched
    )
    assert (done.returncode, done.stdout) == (3, "the last line")


def test_a_process_that_no_launcher_started_leaves_its_group_too(monkeypatch):
    """Over NCCL, torch writes a warning to stderr about a group that is left open."""
    left = []
    rendezvous = SimpleNamespace(leave_run=lambda: left.append(True))
    monkeypatch.setitem(sys.modules, "grpo_replay.distributed.rendezvous", rendezvous)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stop:
        exit_rank(3)
    assert (left, stop.value.code) == ([True], 3)


@pytest.mark.parametrize(
    "module, ranks", [("vllm", "1"), ("grpo_replay.distributed.rendezvous", "2")]
)
def test_a_rank_and_a_process_with_vllm_end_with_their_exit_code_whatever_their_threads_do(
    module, ranks
):
    program = """
import atexit, os, sys, types
from grpo_replay.distributed.failures import exit_as_rank

class Engine:
    def __del__(self):
        os.abort()

module = types.ModuleType(sys.argv[1])
module.leave_run = lambda: None
engine, sys.modules[sys.argv[1]] = Engine(), module
atexit.register(print, "files are closed")
exit_as_rank(lambda: print("trained"))
"""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": ranks, **MASTER}
    done = subprocess.run(
        [sys.executable, "-c", program, module], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout.split("\n")) == (0, ["trained", "files are closed", ""])
