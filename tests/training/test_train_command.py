"""`grpo-replay train` itself on two ranks and on two nodes, killed, resumed and interrupted."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

SHORT = [
    "run.steps=5", "sampling.prompts_per_step=4", "replay.warmup_steps=2", "eval.benchmarks=[]",
    "checkpoint.every_steps=2", "tracking.report_to=[]", "engine.threads_per_process=1",
    "batch.max_tokens_per_microbatch=60",
]  # fmt: skip
WORDS = [word for override in SHORT for word in ("--set", override)]
PORT = 20_000 + os.getpid() % 20_000
VARYING = ("step_time", "cost/mu", "cost/gamma")


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "grpo_replay", "train", "tiny", *WORDS, *map(str, words)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def train(*words: object) -> None:
    done = subprocess.run(
        command(*words), capture_output=True, text=True, timeout=280, env=environment()
    )
    assert done.returncode == 0, done.stderr


def metrics(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in VARYING and not k.endswith("_seconds")}
        for row in rows
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two ranks, never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train("--num-processes", 2, "--output-dir", run)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 5]
    assert sum(row["replay/rollouts"] for row in metrics(run)) > 0
    return run


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The same run, launcher and ranks killed at once after the checkpoint of step 2."""
    run = tmp_path_factory.mktemp("killed") / "run"
    process = subprocess.Popen(
        command("--num-processes", 2, "--output-dir", run),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not (run / "checkpoints" / "step_000002" / "manifest.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in reversed(family):  # ranks first: a launcher's death would let them finish
        member.kill()
    process.wait()
    return run


def test_a_killed_run_resumed_on_two_ranks_is_the_run_that_was_never_killed(whole, killed):
    run = killed.parent / "on-two"
    shutil.copytree(killed, run, symlinks=True)
    train("--num-processes", 2, "--output-dir", run, "--resume")
    assert metrics(run) == metrics(whole)


def test_a_killed_run_resumes_on_one_rank_to_rounding(whole, killed):
    run = killed.parent / "on-one"
    shutil.copytree(killed, run, symlinks=True)
    train("--num-processes", 1, "--output-dir", run, "--resume")
    ours, theirs = metrics(run), metrics(whole)
    assert [row["step"] for row in ours] == [1, 2, 3, 4, 5]
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm"):
            if other[name] is None:
                assert mine[name] is None
            else:
                assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


def test_two_nodes_train_one_run_through_torchrun(whole, tmp_path):
    run = tmp_path / "run"

    def node(index: int) -> subprocess.Popen[str]:
        words = [
            "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--node-rank", str(index), "--master-addr", "127.0.0.2", "--master-port", str(PORT),
            "--local-addr", f"127.0.0.{2 + index}", "-m", "grpo_replay", "train", "tiny",
            *WORDS, "--output-dir", str(run),
        ]  # fmt: skip
        return subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(),
        )  # fmt: skip

    nodes = [node(0), node(1)]
    outputs = [each.communicate(timeout=280) for each in nodes]
    assert [each.returncode for each in nodes] == [0, 0], outputs
    assert metrics(run) == metrics(whole)
    assert outputs[1][0] == ""


def test_ranks_agree_on_a_directory_and_a_signal_to_any_one_stops_them_all(tmp_path):
    """Two ranks as under srun, one of whose nodes is about to be taken away. They name no output
    directory, and the second starts over a second later."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = []
    for rank in range(2):
        own = {"MASTER_PORT": str(PORT + 8), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            subprocess.Popen(
                command("--set", "run.steps=5000"), cwd=tmp_path, env=environment() | place | own,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        time.sleep(1.1)
    try:
        deadline = time.monotonic() + 200
        while not any(file.stat().st_size for file in tmp_path.glob("runs/*/metrics.jsonl")):
            assert all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGTERM)
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [130, 130], errors
    (run,) = (tmp_path / "runs").iterdir()
    checkpoint = (run / "checkpoints" / "latest").resolve()
    assert checkpoint.name == f"step_{metrics(run)[-1]['step']:06d}"
    shards = list((checkpoint / "engine").rglob("*optim_states.pt"))
    assert len(shards) == 2, shards
