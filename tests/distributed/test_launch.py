"""Real ranks under real launchers: one message, the right exit code, and nobody left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from slow_tests import slow_except

from grpo_replay.distributed.failures import RankFailure
from grpo_replay.distributed.launch import (
    Payload,
    _conclude,
    decode_payload,
    encode_payload,
    launch_ranks,
    nodes_command,
    read_hostfile,
)
from grpo_replay.errors import DatasetError, GrpoReplayError, LaunchError, UsageError

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
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_one_node_form_one_run_and_only_rank_0_speaks(ranks):
    done = run_program("launch", ranks, "sums")
    assert done.returncode == 0, done.stderr
    places = [[rank, "127.0.0.1"] for rank in range(ranks)]
    total = sum(range(1, ranks + 1))
    assert done.stdout.splitlines() == [f"rank 0 of {ranks}: sum {total} {places}"]


@pytest.mark.slow
def test_ranks_wait_for_rank_0_for_longer_than_a_collective_may_take():
    done = run_program("launch", 2, "long-work", RANKS_TIMEOUT="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["done [[7, True], [None, True]]"]


FAILURES = {
    "long-work-fails": (3, "the shards are of another run (on rank 0 of 2)"),
    "setup-fails": (3, "train.jsonl:7: no field 'answer' (on rank 1 of 2)"),
    "crash-on-1": (3, "row 12 is broken"),
    "bug-on-1": (1, "rank 1: KeyError: 'surprise'"),
    "killed-on-1": (4, "rank 1 was killed by SIGKILL"),
    "disagree": (4, "the ranks disagree on the run, so none of them started:"),
    "late": (4, "rank 1 of 2 did not arrive"),
}


@pytest.mark.parametrize("mode", slow_except(["crash-on-1"], FAILURES))
def test_a_failure_is_printed_once_keeps_its_exit_code_and_ends_every_rank(mode, tmp_path):
    code, message = FAILURES[mode]
    started = time.monotonic()
    done = run_program("launch", 2, mode, tmp_path, RANKS_TIMEOUT="6")
    printed = errors_in(done.stderr)
    assert done.returncode == code, done.stderr
    assert len(printed) == 1 and message in printed[0], done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    if mode == "disagree":
        assert "recipe.replay.ratio: 0.5 on rank 0, 0.25 on rank 1" in done.stderr
    assert time.monotonic() - started < 60
    pids = [int(file.read_text()) for file in tmp_path.glob("pid_*")]
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_each_rank_once_and_lets_it_finish(number, tmp_path):
    """SIGUSR1, Slurm's usual warning, reaches them as SIGTERM. Meanwhile nobody outside can."""
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
    told = int(signal.SIGTERM if number == signal.SIGUSR1 else number)
    assert out == f"stopped after [[{told}], [{told}]]\n"
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
        "from grpo_replay.distributed.environment import rank_environment; "
        "from grpo_replay.distributed.rendezvous import form_process_group, join_run; "
        "e = rank_environment(); form_process_group(e, join_run(e, {}, 5), 'gloo', 5); "
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
@pytest.mark.parametrize("mode", ["crash-on-1", "setup-fails"])
def test_ranks_started_by_hand_also_print_one_message(mode):
    codes, errs = by_hand(mode, free_port())
    printed = [line for err in errs for line in errors_in(err)]
    assert len(printed) == 1 and FAILURES[mode][1] in printed[0], errs
    assert codes[1] == FAILURES[mode][0] and codes[0] in {FAILURES[mode][0], 4}


@pytest.mark.slow
def test_when_the_rank_that_hosts_the_store_is_killed_every_other_rank_says_so():
    codes, errs = by_hand("killed-on-0", free_port(), local_ranks=(0, 1, 2))
    assert codes == [-signal.SIGKILL, 4, 4], errs
    for rank in (1, 2):
        (line,) = errors_in(errs[rank])
        assert f"rank {rank} lost contact with another rank" in line


@pytest.mark.slow
def test_a_rank_that_never_arrives_is_named():
    process = start_program(
        "rank", "sums", RANK="0", LOCAL_RANK="0", WORLD_SIZE="3", LOCAL_WORLD_SIZE="3",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANKS_TIMEOUT="2",
    )  # fmt: skip
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "ranks 1, 2 of 3 did not arrive at 127.0.0.1" in err and len(errors_in(err)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid"])
def test_an_unreachable_master_is_named_within_the_timeout(host):
    port = str(free_port())
    started = time.monotonic()
    process = start_program(
        "rank", "sums", RANK="1", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR=host, MASTER_PORT=port, RANKS_TIMEOUT="2",
    )  # fmt: skip
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4 and time.monotonic() - started < 30
    (line,) = errors_in(err)
    assert f"cannot reach rank 0 at {host}:{port} within 2 s" in line
    assert "frame #" not in err


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
def test_two_torchrun_agents_with_addresses_of_their_own_form_one_run():
    port = free_port()
    nodes = [torchrun_node(i, port, f"127.0.0.{2 + i}", "sums") for i in range(2)]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert outputs[0][0] == "rank 0 of 2: sum 3 [[0, '127.0.0.2'], [1, '127.0.0.2']]\n"
    assert outputs[1][0] == ""


@pytest.mark.slow
def test_a_failure_on_one_of_two_nodes_ends_both():
    port = free_port()
    nodes = [torchrun_node(i, port, f"127.0.0.{2 + i}", "crash-on-1") for i in range(2)]
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert all(node.returncode != 0 for node in nodes)
    assert [len(errors_in(err)) for _, err in outputs] == [0, 1]


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


FAKE_SSH = """#!/bin/sh
# ssh, but into a network namespace: options, then host, then the command
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
host=$1; shift
grep -q "^$host " "$NODES" || { echo "ssh: Could not resolve hostname $host" >&2; exit 255; }
exec ip netns exec $(sed -n "s/^$host //p" "$NODES") sh -c "$*"
"""
FAKE_PDSH = """#!/usr/bin/env python3
# pdsh -S -f N -w hosts command...: the command on every host at once, the largest exit code
import os, signal, subprocess, sys
hosts = sys.argv[sys.argv.index("-w") + 1].split(",")
command = " ".join(sys.argv[sys.argv.index("-w") + 2 :])
if "pkill" in command:
    raise SystemExit(0)
running = [
    subprocess.Popen(["ssh", host, command.replace("%n", str(index))])
    for index, host in enumerate(hosts)
]
def stop(number, _frame):
    for each in running:
        each.send_signal(signal.SIGTERM)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, signal.SIG_IGN)
raise SystemExit(max(abs(each.wait()) for each in running))
"""


@pytest.fixture
def cluster(two_nodes, tmp_path):
    """Those two machines behind ssh and pdsh, with a hostfile."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("ssh", FAKE_SSH), ("pdsh", FAKE_PDSH)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "nodes").write_text("".join(f"node{i} {n}\n" for i, n in enumerate(two_nodes)))
    (tmp_path / "hostfile").write_text("node0 slots=1\nnode1 slots=1\n")
    return tmp_path


def run_on_cluster(cluster, mode: str, hostfile: str = "hostfile"):
    code = (
        "from pathlib import Path; from small_runs.ranks import boundary; "
        "from grpo_replay.distributed.launch import launch_ranks; "
        f"boundary(lambda: launch_ranks([{mode!r}], None, Path({str(cluster / hostfile)!r}), "
        "entry='small_runs.ranks:rank_main'))"
    )
    environment = program_environment(
        PATH=f"{cluster / 'bin'}:{os.environ['PATH']}", NODES=str(cluster / "nodes"),
        GLOO_SOCKET_IFNAME="node0", HOME=str(cluster),
    )  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=environment
    )


@pytest.mark.slow
def test_a_hostfile_starts_a_run_on_two_machines(cluster):
    done = run_on_cluster(cluster, "sums")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2: sum 3 [[0, '10.77.0.1'], [1, '10.77.0.1']]" in done.stdout
    assert "rank 1" not in done.stdout


@pytest.mark.slow
def test_a_failure_on_a_machine_of_the_hostfile_keeps_its_exit_code(cluster):
    done = run_on_cluster(cluster, "setup-fails")
    assert done.returncode == 3, done.stderr
    assert len(errors_in(done.stderr)) == 1


@pytest.mark.slow
def test_an_unreachable_host_of_the_hostfile_is_named_with_its_line(cluster):
    (cluster / "bad").write_text("node0 slots=1\n\nnode7 slots=1\n")
    done = run_on_cluster(cluster, "sums", "bad")
    assert done.returncode == 4
    assert "1 of 2 hosts cannot be reached over ssh" in done.stderr
    assert re.search(r"bad:3: node7: ssh: Could not resolve hostname node7", done.stderr)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node0 slots=2\nnode1 8\n", ":2: expected `host slots=8`, found 'node1 8'"),
        ("node0 slots=2\n# x\nnode0 slots=2\n", ":3: 'node0' is already on line 1"),
        ("node0 slots=0\n", ":1: expected"),
        ("\n# nothing\n", "no hosts"),
    ],
)
def test_a_bad_hostfile_is_refused_by_line(tmp_path, text, said):
    file = tmp_path / "hostfile"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(said)):
        read_hostfile(file)


def test_more_processes_than_slots_is_refused(tmp_path):
    file = tmp_path / "hostfile"
    file.write_text("node0 slots=4\nnode1 slots=2\n")
    with pytest.raises(UsageError, match=r"--num-processes 4 but .*:2 gives node1 2 slots"):
        launch_ranks([], 4, file)
    with pytest.raises(UsageError, match="cannot be read"):
        launch_ranks([], 4, tmp_path / "missing")
    with pytest.raises(UsageError, match="--num-processes 0"):
        launch_ranks([], 0)


def test_the_arguments_survive_any_shell(tmp_path):
    payload = Payload(
        ("train", "--set", "prompts.user_template=$HOME \\boxed{} 'x' \"y\" {problem}")
    )
    word = encode_payload(payload)
    echoed = subprocess.run(f"echo {word}", shell=True, capture_output=True, text=True)
    assert decode_payload(echoed.stdout.strip()) == payload
    with pytest.raises(UsageError, match="started by grpo-replay itself"):
        decode_payload("train")


def test_without_pdsh_the_alternatives_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"pdsh, which is not installed.*torchrun or Slurm"):
        nodes_command(Payload(()), None, tmp_path, [])


def failure(rank, kind, code, echo=False, when=0.0):
    return RankFailure(rank, kind, "text", code, echo, when)


def test_the_cause_is_reported_before_its_echoes():
    cause = failure(1, "DatasetError", 3)
    with pytest.raises(DatasetError, match=r"^text$"):
        _conclude({0: 4, 1: 3}, [cause, failure(0, "LostContact", 4, echo=True)], False)
    with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL"):
        _conclude({0: 4, 1: -9}, [failure(0, "LostContact", 4, echo=True)], False)
    with pytest.raises(GrpoReplayError, match="rank 2: KeyError: text") as caught:
        _conclude({2: 1}, [failure(2, "KeyError", 1)], False)
    assert caught.value.exit_code == 1
    assert _conclude({0: 130, 1: -15}, [], True) == 130
    assert _conclude({}, [], False) == 0


def test_a_rank_that_was_stopped_before_it_could_speak_is_spoken_for():
    told = failure(1, "PeerFailure", 4, echo=True)
    with pytest.raises(LaunchError, match=r"^text$") as caught:
        _conclude({0: -signal.SIGTERM, 1: 4}, [told], False)
    assert caught.value.exit_code == 4
    with pytest.raises(LaunchError, match="rank 0 was killed by SIGKILL"):
        _conclude({0: -signal.SIGKILL, 1: 4}, [told], False)
