"""`grpo-replay train tiny` with vLLM, from the command line, and what its files say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from server_helpers import free_ports, group_members, kill_child_of, wait_for
from transformers import AutoModelForCausalLM

from grpo_replay.storage.checkpoint import find_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SHORT = [
    "run.steps=5", "replay.warmup_steps=1", "eval.benchmarks=[]", "checkpoint.every_steps=2",
    "tracking.report_to=[]", "sampling.prompts_per_step=8",
]  # fmt: skip
LARGEST_GAP = 1e-4


def start(folder: Path, *overrides: str, ranks: int = 1) -> subprocess.Popen:
    words = [word for each in (*SHORT, *overrides) for word in ("--set", each)]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "grpo_replay.cli.app", "train", "tiny"),
            *("--output-dir", str(folder), "--num-processes", str(ranks), *words),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(folder: Path, *overrides: str, ranks: int = 1) -> Path:
    process = start(folder, *overrides, ranks=ranks)
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-3000:]
    assert "vllm" not in output.lower(), "stdout is for results"
    return folder


def largest_gaps(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["sampler/logprob_gap_max"] for line in lines]


def rollouts(folder: Path, step: int) -> list[dict]:
    return pq.read_table(folder / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "one", "sampling.backend=vllm")


def test_the_sampler_is_the_policy_at_every_sync(one_rank):
    gaps = largest_gaps(one_rank)
    assert len(gaps) == 5
    assert max(gaps) <= LARGEST_GAP
    versions = {row["policy_version"] for step in range(1, 6) for row in rollouts(one_rank, step)}
    assert versions == {0, 1, 2, 3, 4}


@torch.no_grad()
def test_stored_logprobs_are_those_of_the_checkpoint_they_were_sampled_from(one_rank):
    """From files alone: a checkpoint opened by plain transformers, and the next step's rollouts."""
    folder = one_rank / "checkpoints" / "step_000002"
    state = json.loads((folder / "state.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    rows = [
        row for row in rollouts(one_rank, 3) if row["policy_version"] == state["policy_version"]
    ]
    assert len(rows) == 8 * 8
    for row in rows:
        prompt, tokens = row["prompt_token_ids"], row["completion_token_ids"]
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
        own = torch.log_softmax(logits, dim=-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
        np.testing.assert_allclose(row["sampler_logprobs"], own.numpy(), atol=LARGEST_GAP)


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_adapters_are_in_sync_too(tmp_path, form):
    folder = train(
        tmp_path / "lora", "sampling.backend=vllm", "model.lora.r=8", f"sampling.lora={form}",
        "optimizer.learning_rate=1e-2", "engine.zero_stage=3",
    )  # fmt: skip
    gaps = largest_gaps(folder)
    assert len(gaps) == 5
    assert max(gaps) <= LARGEST_GAP
    adapter = folder / "checkpoints/latest/adapter/adapter_model.safetensors"
    assert all(
        tensor.abs().max() > 1e-3 for name, tensor in load_file(adapter).items() if "lora_B" in name
    )


def test_two_ranks_sample_what_one_samples(one_rank, tmp_path):
    folder = train(tmp_path / "two", "sampling.backend=vllm", "engine.zero_stage=3", ranks=2)
    assert max(largest_gaps(folder)) <= LARGEST_GAP
    same = total = 0
    for step in range(1, 6):
        one, two = (
            {(row["group_id"], row["completion_index"]): row for row in rollouts(run, step)}
            for run in (one_rank, folder)
        )
        assert one.keys() == two.keys()
        total += len(one)
        same += sum(
            row["completion_token_ids"] == two[key]["completion_token_ids"]
            for key, row in one.items()
        )
    assert total == 5 * 8 * 8
    assert same >= 0.99 * total


def test_a_killed_server_ends_the_run_and_leaves_its_checkpoint(one_rank, tmp_path):
    """Until then the run over HTTP is the run in process; then nothing stays behind."""
    folder = tmp_path / "served"
    process = start(
        folder,
        "sampling.backend=vllm_server",
        "sampling.servers.launch=1",
        f"sampling.servers.address=127.0.0.1:{free_ports(1)[0]}",
        "run.steps=2000",
    )
    try:
        checkpoint = folder / "checkpoints" / "step_000002" / "manifest.json"
        assert wait_for(lambda: checkpoint.exists() or process.poll() is not None, seconds=300)
        guard = _guard_of(process.pid)
        kill_child_of(guard)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 4, errors[-3000:]
    assert "vllm-server-" in errors, "the message names the server's log"
    assert wait_for(lambda: not group_members(guard), seconds=30)
    assert find_checkpoint(folder / "checkpoints") is not None
    assert max(largest_gaps(folder)) <= LARGEST_GAP
    for step in (1, 2):
        ours = {tuple(row["completion_token_ids"]) for row in rollouts(folder, step)}
        assert ours == {tuple(row["completion_token_ids"]) for row in rollouts(one_rank, step)}


def _guard_of(trainer: int) -> int:
    """The process that leads the launched server's group: a child of the trainer's, or of one of
    its ranks."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if any(word.endswith("server/guard.py") for word in words) and parent == trainer:
            return int(entry.name)
    raise AssertionError("no server guard")
