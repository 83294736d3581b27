"""`grpo-replay train` itself on two ranks and on two nodes, killed, resumed and interrupted."""

import contextlib
import json
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
from hang_program import HANG_STEP, SLOW_STEP

SHORT = [
    "run.steps=5", "sampling.prompts_per_step=4", "replay.warmup_steps=2", "eval.benchmarks=[]",
    "checkpoint.every_steps=2", "tracking.report_to=[]", "engine.threads_per_process=1",
    "batch.max_tokens_per_microbatch=60",
]  # fmt: skip
WORDS = [word for override in SHORT for word in ("--set", override)]
PORT = 20_000 + os.getpid() % 20_000
REPORT_SECONDS, TIMEOUT_SECONDS = 3, 18
VARYING = ("step_time", "cost/mu", "cost/gamma")


def command(*words: object) -> list[str]:
    entry = "from grpo_replay.cli.app import main; main()"
    return [sys.executable, "-c", entry, "train", "tiny", *WORDS, *map(str, words)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def train(*words: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*words), capture_output=True, text=True, timeout=280, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done


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


@pytest.mark.slow
def test_two_ranks_train_replay_and_agree_on_one_directory(whole):
    rows = metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert sum(row["replay/rollouts"] for row in rows) > 0
    facts = json.loads((whole / "summary.json").read_text())
    assert facts["steps"] == 5


@pytest.mark.slow
def test_a_killed_run_resumed_on_two_ranks_is_the_run_that_was_never_killed(whole, killed):
    run = killed.parent / "on-two"
    shutil.copytree(killed, run, symlinks=True)
    train("--num-processes", 2, "--output-dir", run, "--resume")
    assert metrics(run) == metrics(whole)


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_interrupted_run_checkpoints_on_every_rank_and_exits_130(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        command("--num-processes", 2, "--output-dir", run, "--set", "run.steps=5000"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    last = metrics(run)[-1]["step"]
    assert (run / "checkpoints" / "latest").resolve().name == f"step_{last:06d}"
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_bad_dataset_field_ends_two_ranks_with_one_message(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text('{"problem": "1+1", "reply": "2", "problem_id": "a"}\n')
    done = subprocess.run(
        command("--num-processes", 2, "--output-dir", tmp_path / "run",
                "--set", f"prompts.source={file}"),
        capture_output=True, text=True, timeout=200, env=environment(),
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("no field 'answer'") == 1
    assert "Traceback" not in done.stderr


@contextlib.contextmanager
def ranks_started_by_hand(folder: Path, port: int):
    """Two ranks as under srun: nobody but themselves to print. They run in `folder`, name no
    output directory, and the second starts over a second later."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = []
    for rank in range(2):
        own = {"MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            subprocess.Popen(
                command("--set", "run.steps=5000"), cwd=folder, env=environment() | place | own,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        time.sleep(1.1)
    deadline = time.monotonic() + 200
    while not any(file.stat().st_size for file in folder.glob("runs/*/metrics.jsonl")):
        assert all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline
        time.sleep(0.05)
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.communicate()


@pytest.mark.slow
def test_a_rank_started_by_hand_says_that_it_lost_the_other(tmp_path):
    with ranks_started_by_hand(tmp_path, PORT + 7) as ranks:
        ranks[1].kill()
        _, err = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == 4, err
        assert err.count("error: rank 0 lost contact with another rank") == 1
        assert "--resume" in err and "Traceback" not in err


@pytest.mark.slow
def test_ranks_agree_on_a_directory_and_a_signal_to_any_one_stops_them_all(tmp_path):
    """As when one node is about to be taken away."""
    with ranks_started_by_hand(tmp_path, PORT + 8) as ranks:
        ranks[1].send_signal(signal.SIGTERM)
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [130, 130], errors
    (run,) = (tmp_path / "runs").iterdir()
    last = metrics(run)[-1]["step"]
    checkpoint = (run / "checkpoints" / "latest").resolve()
    assert checkpoint.name == f"step_{last:06d}"
    shards = list((checkpoint / "engine").rglob("*optim_states.pt"))
    assert len(shards) == 2, shards


@pytest.mark.slow
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


HANG_PROGRAM = Path(__file__).parents[1] / "support" / "hang_program.py"
PART = "training, update 1 of 2, micro-batch 2 of "
RANK_0_HANGS = rf"rank 0 at step {HANG_STEP}, {PART}\d+ for (\d+) s"
RANK_1_HANGS = rf"rank 1 at step {HANG_STEP}, training, update 1 of 2, in gather for (\d+) s"


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """(the finished command, its run directory): rank 1 was slow in one step, and in a later one
    it skipped the reduction of the gradients."""
    run = tmp_path_factory.mktemp("hung") / "run"
    words = [*WORDS, "--set", f"engine.timeout_seconds={TIMEOUT_SECONDS}"]
    done = subprocess.run(
        [sys.executable, str(HANG_PROGRAM), "train", "tiny", "--num-processes", "2",
         "--output-dir", str(run), *words],
        capture_output=True, text=True, timeout=280,
        env=environment() | {"HANG_TEST": str(run),
                             "PYTHONPATH": f"{HANG_PROGRAM.parent}:{HANG_PROGRAM.parents[2]}"},
    )  # fmt: skip
    return done, run


def reports(run: Path, name: str) -> list[str]:
    """The records of a log that report a wait, stack included."""
    text = (run / "log" / name).read_text()
    records = re.split(r"(?=^\d{4}-\d\d-\d\d )", text, flags=re.MULTILINE)
    return [
        record
        for record in records
        if "WARNING grpo_replay.distributed.hang_watch: waiting" in record
    ]


@pytest.mark.parametrize(
    ("rank", "name", "function"),
    [(0, "attempt_001.log", "_backward"), (1, "attempt_001.rank_1.log", "gather")],
)
@pytest.mark.slow
def test_each_rank_of_a_hang_logs_in_time_where_all_are_and_its_own_stack(
    hung, rank, name, function
):
    first = next(text for text in reports(hung[1], name) if f"at step {HANG_STEP}" in text)
    for pattern in (RANK_0_HANGS, RANK_1_HANGS):
        assert REPORT_SECONDS <= int(re.search(pattern, first)[1]) < 2 * REPORT_SECONDS
    assert f"Stack of rank {rank}:\n" in first
    assert f", in {function}\n" in first.split("in run_training")[1]


@pytest.mark.slow
def test_the_error_at_the_time_out_says_where_the_ranks_were(hung):
    done, _ = hung
    (printed,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "lost contact with another rank" in printed and "Last seen: " in printed
    for pattern in (RANK_0_HANGS, RANK_1_HANGS):
        assert int(re.search(pattern, printed)[1]) >= TIMEOUT_SECONDS - 1
    assert "Traceback" not in done.stderr
    assert done.returncode == 4


@pytest.mark.slow
def test_a_hang_leaves_no_process_behind(hung):
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            left += [process] if process.environ().get("HANG_TEST") == str(hung[1]) else []
    assert left == []


@pytest.mark.slow
def test_a_slow_rank_is_reported_and_the_run_is_the_run_without_it(whole, hung):
    _, run = hung
    place = f"at step {SLOW_STEP}, {PART}"
    (slow,) = [text for text in reports(run, "attempt_001.rank_1.log") if place in text]
    assert "time.sleep(SLOW_SECONDS)" in slow
    log = (run / "log/attempt_001.rank_1.log").read_text()
    goes_on = re.search(r"rank 1 goes on: step (\d+), ", log.split(slow)[1])
    assert SLOW_STEP <= int(goes_on[1]) <= HANG_STEP  # a fast step may end before the next look
    assert metrics(run) == metrics(whole)[: HANG_STEP - 1]
    weights = "checkpoints/step_000002/model/model.safetensors"
    assert SLOW_STEP == 2 and (run / weights).read_bytes() == (whole / weights).read_bytes()
