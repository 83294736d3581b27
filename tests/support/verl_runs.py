"""Runs of verl for tests, and what they leave. Needs verl, as verl_cpu does."""

import json
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM
from verl_cpu.command import BASE, PLAIN, REPLAY, command, environment

from grpo_replay.training.metrics import depends_on_time

OURS = (
    "trainer.v1.trainer_mode=replay", "+trainer.v1.replay.preset=ours",
    "+trainer.v1.replay.ratio=1.0", "+trainer.v1.replay.warmup_steps=1",
    "+trainer.v1.replay.max_age_steps=2",
)  # fmt: skip
SEEDED = "verl_cpu.seeded"
LIMIT_SECONDS = 600


class VerlRun:
    """A run of verl in `folder`, ended or not."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        module: str = REPLAY,
        ranks: int = 1,
        shift: float = 0.0,
        modules: tuple[str, ...] = (SEEDED,),
    ) -> None:
        self.folder, self.output = folder, folder / "run"
        line = command(folder, *words, module=module, ranks=ranks)
        variables = environment(folder, *modules) | {"VERL_CPU_SHIFT": str(shift)}
        with (folder / "log").open("a") as log:
            self.process = subprocess.Popen(line, env=variables, stdout=log, stderr=log)

    def ended(self) -> "VerlRun":
        """The run when it has ended well; fails with the end of its log."""
        try:
            status = self.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            status = "no end"
        log = (self.folder / "log").read_text(errors="replace")
        assert status == 0, f"{status}: {log[-6000:]}"
        return self

    def kill(self) -> None:
        """SIGKILL for all its processes, and wait until they are gone."""
        leader = psutil.Process(self.process.pid)
        processes = [leader, *leader.children(recursive=True)]
        for each in processes:
            if each.is_running():
                each.kill()
        self.process.wait()
        psutil.wait_procs(processes, timeout=60)

    def wait_for_steps(self, steps: int) -> None:
        """Until verl has logged so many."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(self.verl_metrics()) < steps:
            assert self.process.poll() is None and time.monotonic() < deadline, self.folder
            time.sleep(0.05)

    def verl_metrics(self) -> dict[int, dict[str, Any]]:
        """Those of verl's own logger by step, without times, rates and memory."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {
            row["step"]: {k: v for k, v in row["data"].items() if not _is_of_machine(k)}
            for row in map(json.loads, lines)
        }

    def metrics(self, timed: bool = False) -> list[dict[str, Any]]:
        """Ours, with or without times."""
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        return [{k: v for k, v in row.items() if timed or not depends_on_time(k)} for row in rows]

    def rows(self, kind: str, step: int) -> list[dict[str, Any]]:
        """Of rollouts/ or draws/."""
        return pq.read_table(self.output / kind / f"step_{step:06d}.parquet").to_pylist()

    def trained(self, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Each row that a step trained on: the rollout as logged at its birth, and the outcome as
        logged in this step. Fresh ones first."""
        born = {
            row["rollout_id"]: row for s in range(1, step + 1) for row in self.rows("rollouts", s)
        }
        fresh = [(row, row) for row in self.rows("rollouts", step) if row["kept"]]
        drawn = [(born[draw["rollout_id"]], draw) for draw in self.rows("draws", step)]
        return fresh + drawn

    def checkpoint(self, step: int, kind: str = "model", ranks: int = 1) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint of verl's, by name; the shards of all ranks put together."""
        folder, shards = self.output / f"global_step_{step}" / "actor", []
        for rank in range(ranks):
            path = folder / f"{kind}_world_size_{ranks}_rank_{rank}.pt"
            shards.append(dict(_tensors(torch.load(path, weights_only=False))))
        if ranks == 1:
            return shards[0]
        return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}

    @cache  # noqa: B019  tests are short
    def policy(self, step: int, ranks: int = 1) -> Any:
        """The model of transformers with the weights after a step; of step 0 those of the base."""
        model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
        if step:
            model.load_state_dict(self.checkpoint(step, ranks=ranks), strict=False)
        return model


def _is_of_machine(name: str) -> bool:
    return any(word in name for word in ("timing", "perf/", "cost/", "step_time"))


def _tensors(tree: Any, name: str = "") -> Any:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, torch.Tensor):
        yield name, getattr(tree, "_local_tensor", tree)


def assert_equal_tensors(first: VerlRun, second: VerlRun, step: int) -> None:
    for kind in ("model", "optim"):
        one, other = (run.checkpoint(step, kind) for run in (first, second))
        assert one.keys() == other.keys() and len(one) > 30
        different = [name for name in one if not torch.equal(one[name], other[name])]
        assert different == [], kind


def logprobs_of(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """float32 [T] of a logged rollout's completion, by one plain forward pass."""
    prompt, completion = row["prompt_token_ids"], row["completion_token_ids"]
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


class PlainPolicy:
    """What `verify_run` asks of a policy."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def logprobs(self, prompt: np.ndarray, completion: np.ndarray, temperature: float) -> Any:
        row = {"prompt_token_ids": prompt.tolist(), "completion_token_ids": completion.tolist()}
        return logprobs_of(self.model, row).double().numpy(), None


__all__ = [
    "OURS", "PLAIN", "REPLAY", "SEEDED", "PlainPolicy", "VerlRun", "assert_equal_tensors",
    "logprobs_of",
]  # fmt: skip
