"""Real ranks under real launchers: one message, the right exit code, and nobody left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from slow_tests import slow_except

from grpo_replay.distributed.launch import _first_exit_code
from grpo_replay.errors import EXIT_AFTER_PEER, LaunchError

SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = SUPPORT / "small_runs" / "ranks.py"


def program_environment(**extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC"))}
    return {
        **clean, **extra, "PYTHONPATH": f"{SUPPORT}:{SUPPORT.parents[1]}", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def run_program(*arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env=program_environment(**extra),
    )  # fmt: skip


def start_program(*arguments: object, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=program_environment(**extra),
    )  # fmt: skip


def errors_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_ranks_of_one_node_form_one_run_and_only_rank_0_speaks():
    done = run_program("launch", 3, "sums")
    assert done.returncode == 0, done.stderr
    places = [[rank, "127.0.0.1"] for rank in range(3)]
    assert done.stdout.splitlines() == [f"rank 0 of 3: sum 6 {places}"]


@pytest.mark.slow
def test_ranks_wait_for_rank_0_for_longer_than_a_collective_may_take():
    done = run_program("launch", 2, "long-work", RANKS_TIMEOUT="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["done [[7, True], [None, True]]"]


FAILURES = {
    "crash-on-1": (3, "row 12 is broken"),
    "fail-alike": (3, "row 12 is broken"),
    "disagree": (4, "rank 1 and rank 0 differ in: run; give every rank the same recipe"),
    "killed-on-1": (4, "rank 1 was killed by SIGKILL"),
    "no-gpu-for-1": (4, "local rank 1 needs GPU 1"),
    "busy-on-0": (4, "the server of rank 1 is lost"),
    "slow-to-print": (4, "rank 0 takes its time"),
}


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ({2: (4, 100), 0: (EXIT_AFTER_PEER, 101), 1: (-signal.SIGTERM, 101)}, 4),
        ({0: (EXIT_AFTER_PEER, 100), 1: (3, 100)}, 3),  # both were seen at once
        ({1: (4, 100), 0: (-signal.SIGKILL, 130)}, 4),
        ({0: (EXIT_AFTER_PEER, 100), 1: (-signal.SIGKILL, 103)}, "rank 1 was killed by SIGKILL"),
        (
            {1: (EXIT_AFTER_PEER, 100), 0: (EXIT_AFTER_PEER, 100)},
            "ranks 0, 1 lost contact .* none says why",
        ),
    ],
)
def test_the_code_is_that_of_the_rank_that_failed_by_itself(ends, code):
    """Not of those that lost it, or that torch's agent ended because of it."""
    failures = {
        rank: SimpleNamespace(exitcode=ended, timestamp=second)
        for rank, (ended, second) in ends.items()
    }
    if isinstance(code, int):
        assert _first_exit_code(failures) == code
    else:
        with pytest.raises(LaunchError, match=code):
            _first_exit_code(failures)


@pytest.mark.parametrize("mode", slow_except(["crash-on-1"], FAILURES))
def test_a_failure_is_printed_once_keeps_its_exit_code_and_ends_every_rank(mode, tmp_path):
    code, message = FAILURES[mode]
    done = run_program("launch", 2, mode, tmp_path, RANKS_TIMEOUT="6", RANKS_FOLLOW="3")
    printed = errors_in(done.stderr)
    assert done.returncode == code, done.stderr
    assert len(printed) == 1 and message in printed[0], done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    pids = [int(file.read_text()) for file in tmp_path.glob("pid_*")]
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_connection_that_is_no_rank_s_is_named():
    done = run_program("launch", 2, "no-server", RANKS_TIMEOUT="6")
    (line,) = errors_in(done.stderr)
    assert done.returncode == 1 and "ConnectionRefusedError in" in line
    assert "ranks.py" in line and "no_server" in line and "lost contact" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_each_rank_once_and_lets_it_finish(number, tmp_path):
    """SIGUSR1 is Slurm's usual warning. Meanwhile no other machine reaches them."""
    process = start_program("launch", 2, "until-signal", tmp_path)
    assert process.stdout.readline() == "ready\n"
    launcher = psutil.Process(process.pid)
    listening = {
        socket.laddr.ip
        for each in [launcher, *launcher.children(recursive=True)]
        for socket in each.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == f"stopped after [[{int(number)}], [{int(number)}]]\n"
    assert errors_in(err) == []
    assert listening and listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.slow
def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    process = start_program("launch", 2, "hang", tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("pid_*"))) == 2)
    pids = [int(file.read_text()) for file in tmp_path.glob("pid_*")]
    wait_until(lambda: all(alive(pid) for pid in pids))
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: not any(alive(pid) for pid in pids), 20)


@pytest.mark.slow
def test_ranks_do_not_wait_for_a_rank_0_that_was_killed_while_it_started(tmp_path):
    """The launcher ends them: by themselves they would wait for `engine.timeout_seconds`."""
    started = time.monotonic()
    done = run_program("launch", 3, "killed-starting-on-0", tmp_path, RANKS_TIMEOUT="600")
    assert done.returncode == 4, done.stderr
    (line,) = errors_in(done.stderr)
    assert "rank 0 was killed by SIGKILL" in line
    assert time.monotonic() - started < 60
    pids = [int(file.read_text()) for file in tmp_path.glob("pid_*")]
    assert len(pids) == 3 and not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_single_processes_share_a_machine_without_fighting_for_a_port():
    code = (
        "from datetime import timedelta; "
        "from grpo_replay.distributed.environment import rank_environment; "
        "from grpo_replay.distributed.rendezvous import form_group; "
        "form_group(rank_environment(), 'gloo', timedelta(seconds=60)); "
        "print('in', flush=True); input()"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=program_environment(),
        )
        for _ in range(2)
    ]  # fmt: skip
    assert [each.stdout.readline() for each in both] == ["in\n", "in\n"]
    for each in both:
        each.communicate("\n", timeout=30)


def by_hand(mode: str, port: int, local_ranks=(0, 1), **extra: str):
    ranks = [
        start_program(
            "rank", mode, RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(len(local_ranks)),
            LOCAL_WORLD_SIZE=str(1 + max(local_ranks)), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), **extra,
        )
        for rank, local in enumerate(local_ranks)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=90) for rank in ranks]
    return [rank.returncode for rank in ranks], [err for _, err in outputs]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_of_ranks_started_by_hand_each_says_what_it_knows():
    codes, errs = by_hand("crash-on-1", free_port())
    (lost,), (cause,) = map(errors_in, errs)
    assert "row 12 is broken" in cause and "rank 0 lost contact with another rank" in lost
    assert codes == [4, 3]


@pytest.mark.slow
def test_when_the_rank_that_hosts_the_store_is_killed_every_other_rank_says_so():
    codes, errs = by_hand("killed-on-0", free_port(), local_ranks=(0, 1, 2))
    assert codes == [-signal.SIGKILL, 4, 4], errs
    for rank in (1, 2):
        (line,) = errors_in(errs[rank])
        assert f"rank {rank} lost contact with another rank" in line


def torchrun_node(node: int, port: int, address: str, mode: str, prefix=(), **extra: str):
    command = [
        *prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
        "--nproc-per-node", "1", "--node-rank", str(node), "--master-addr", MASTER_OF[bool(prefix)],
        "--master-port", str(port), "--local-addr", address, str(PROGRAM), "rank", mode,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=program_environment(**extra),
    )  # fmt: skip


MASTER_OF = {False: "127.0.0.2", True: "10.77.0.1"}


@pytest.mark.slow
def test_a_failure_on_one_of_two_nodes_ends_both():
    port = free_port()
    nodes = [torchrun_node(i, port, f"127.0.0.{2 + i}", "crash-on-1") for i in range(2)]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert all(node.returncode != 0 for node in nodes)
    (lost,), (cause,) = (errors_in(err) for _, err in outputs)
    assert "lost contact" in lost and "row 12 is broken" in cause


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


@pytest.fixture
def two_nodes():
    """Two network namespaces on one cable, 10.77.0.1 and 10.77.0.2: as good as two machines."""
    names = [f"grpo{os.getpid()}{side}" for side in "ab"]
    if shutil.which("ip") is None or not ip("netns", "add", names[0]):
        pytest.skip("network namespaces need root and iproute2")
    try:
        cable = [f"v{os.getpid()}{side}" for side in "ab"]
        assert ip("netns", "add", names[1])
        assert ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for index, (name, end) in enumerate(zip(names, cable, strict=True)):
            assert ip("link", "set", end, "netns", name, "name", "node0")
            assert ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", "node0")
            assert ip("-n", name, "link", "set", "node0", "up")
            assert ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.slow
def test_two_machines_form_one_run_through_torchrun(two_nodes):
    nodes = [
        torchrun_node(
            index, 29611, f"10.77.0.{index + 1}", "sums", ("ip", "netns", "exec", name),
            GLOO_SOCKET_IFNAME="node0",
        )
        for index, name in enumerate(two_nodes)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert outputs[0][0] == "rank 0 of 2: sum 3 [[0, '10.77.0.1'], [1, '10.77.0.1']]\n"
