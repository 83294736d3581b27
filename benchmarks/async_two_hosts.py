"""Train on three hosts that share nothing but the sync folder: a trainer and two vLLM servers.

    sudo python benchmarks/async_two_hosts.py [--recipe tiny-async] [--steps 40] [--output DIR]

The hosts are Linux network namespaces behind a bridge, each with its own address, loopback, /tmp,
/dev/shm, home and working directory. Servers and trainer see one folder in common, /mnt/sync, and
know each other by address only. Prints how much each server generated and whether `--verify`
passes. Needs root.
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run_processes import RunProcess, wait_for

from grpo_replay.collection.arrivals import CATEGORIES
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import load_recipe
from grpo_replay.sampling.server.server_process import server_command
from grpo_replay.sampling.vllm_requests import engine_arguments, set_environment

NETWORK, PORT = "10.213.77", 8000
HOSTS = ("trainer", "server-1", "server-2")
BRIDGE = "grbridge"
METRIC = "vllm:generation_tokens_total"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="tiny-async")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("network and mount namespaces need root")
    folder = options.output or Path(tempfile.mkdtemp(prefix="async-two-hosts-"))
    for name in ("sync", *HOSTS):
        (folder / name).mkdir(parents=True, exist_ok=True)
    urls = [f"http://{address(index)}:{PORT}" for index in (1, 2)]
    overrides = [
        f"run.steps={options.steps}", "checkpoint.every_steps=20", "sampling.servers.launch=0",
        f"sampling.servers.urls=[{', '.join(urls)}]", "sampling.servers.weight_transfer=/mnt/sync",
    ]  # fmt: skip
    with hosts(), contextlib.ExitStack() as stack:
        logs = [start_server(options.recipe, folder, index, stack) for index in (1, 2)]
        for index, log in zip((1, 2), logs, strict=True):
            wait_until_healthy(index, log)
        code = train(options.recipe, folder, overrides)
        print(f"the trainer ended with code {code}")
        shares = {HOSTS[index]: generated_tokens(index) for index in (1, 2)}
    print(f"tokens generated: {shares}")
    return code or judge(RunProcess(options.recipe, folder / "trainer/run", overrides))


def judge(run: RunProcess) -> int:
    """0 if the ledger balances at every step and `--verify` passes."""
    lines = run.metrics()
    print(f"{len(lines)} steps")
    print(f"unbalanced steps: {[line['step'] for line in lines if not balances(line)]}")
    report = verify_run(run.folder)
    print(f"verify: {'passed' if report.passed else report.to_json()}")
    return 0 if report.passed and lines and all(map(balances, lines)) else 1


def balances(line: dict[str, Any]) -> bool:
    """generated = the five ends + in flight, in rollouts and in tokens."""
    return all(
        line[f"ledger/generated_{unit}"]
        == sum(line[f"ledger/{name}_{unit}"] for name in (*CATEGORIES, "in_flight"))
        for unit in ("rollouts", "tokens")
    )


def address(index: int) -> str:
    return f"{NETWORK}.{index + 1}"


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """A namespace for each host, joined by a bridge; removed afterwards."""
    try:
        ip(f"link add {BRIDGE} type bridge")
        ip(f"link set {BRIDGE} up")
        for index, name in enumerate(HOSTS):
            ip(f"netns add {name}")
            ip(f"link add gr{index} type veth peer name eth0 netns {name}")
            ip(f"link set gr{index} master {BRIDGE} up")
            ip(f"-n {name} addr add {address(index)}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
        yield
    finally:
        for name in HOSTS:
            ip(f"netns del {name}", check=False)
        ip(f"link del {BRIDGE}", check=False)


def ip(words: str, check: bool = True) -> None:
    subprocess.run(
        ["ip", *words.split()], check=check, stderr=None if check else subprocess.DEVNULL
    )


def on_host(index: int, folder: Path, command: list[str]) -> list[str]:
    """The command, on a host whose disks have nothing in common with the others' but /mnt/sync.
    What it writes to /mnt/own is in the folder of its name."""
    own = folder / HOSTS[index]
    script = " && ".join(
        (
            "mount -t tmpfs none /mnt",
            "mkdir /mnt/sync /mnt/own /mnt/home",
            f"mount --bind {shlex.quote(str(folder / 'sync'))} /mnt/sync",
            f"mount --bind {shlex.quote(str(own))} /mnt/own",
            "mount -t tmpfs none /tmp",
            "mount -t tmpfs none /dev/shm",
            "cd /mnt/own",
            f"exec {shlex.join(command)}",
        )
    )
    return ["ip", "netns", "exec", HOSTS[index], "unshare", "--mount", "sh", "-c", script]


def environment(index: int) -> dict[str, str]:
    found = {
        **os.environ, "HOME": "/mnt/home", "TMPDIR": "/tmp", "VLLM_HOST_IP": address(index),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "VLLM_SERVER_DEV_MODE": "1",
    }  # fmt: skip
    set_environment(found, on_gpu=False)
    return found


def start_server(recipe_name: str, folder: Path, index: int, stack: contextlib.ExitStack) -> Path:
    """Start it; its log."""
    recipe = load_recipe(recipe_name)
    arguments = engine_arguments(
        recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=False
    )
    command = server_command(arguments, address(index), PORT)
    log = folder / f"{HOSTS[index]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            on_host(index, folder, command), env=environment(index), stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    stack.callback(process.wait, 60)
    stack.callback(process.terminate)
    return log


def http_get(index: int, path: str) -> str | None:
    """As the trainer's host reads it; None without an answer."""
    url = f"http://{address(index)}:{PORT}{path}"
    script = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())"
    command = ["ip", "netns", "exec", HOSTS[0], sys.executable, "-S", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def wait_until_healthy(index: int, log: Path) -> None:
    def healthy() -> bool:
        time.sleep(1)
        return http_get(index, "/health") is not None

    if wait_for(healthy, 300) is None:
        raise SystemExit(f"{HOSTS[index]} did not start: see {log}")


def generated_tokens(index: int) -> float:
    lines = (http_get(index, "/metrics") or "").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(METRIC))


def train(recipe: str, folder: Path, overrides: list[str]) -> int:
    words = [sys.executable, "-m", "grpo_replay", "train", recipe, "--output-dir", "/mnt/own/run"]
    for override in overrides:
        words += ["--set", override]
    with (folder / "trainer.log").open("wb") as output:
        return subprocess.run(
            on_host(0, folder, words), env=environment(0), stdout=output, stderr=output
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
