"""Whole runs of the real trainer on the shipped tiny model, small enough for a test, and what is
in their directories."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.engine.models import load_policy
from grpo_replay.prompts.prompt_set import ORDER_STREAM
from grpo_replay.recipe import Recipe, resolve_recipe
from grpo_replay.replay.batch import TrainRow
from grpo_replay.replay.snapshot import Snapshot, read_snapshot
from grpo_replay.tiny.problems import train_problems
from grpo_replay.training import Observer
from grpo_replay.training.metrics import depends_on_time
from grpo_replay.training.run import run_training
from grpo_replay.types import stream

GROUP, PROMPTS = 4, 6
MAX_AGE, WARMUP = 3, 2

SMALL: dict[str, Any] = {
    "prompts": {
        "source": "builtin:tiny", "id_field": "problem_id", "template": "plain",
        "user_template": "{problem}=", "max_prompt_length": 16,
    },
    "sampling": {"prompts_per_step": PROMPTS, "group_size": GROUP, "max_completion_length": 16},
    "reward": {"function": "minerva", "workers": 1},
    "eval": {"reward": "minerva"},
    "replay": {"warmup_steps": 2, "max_age_steps": 3, "capacity_rollouts": 1000},
    "batch": {"max_tokens_per_microbatch": 400},
    "optimizer": {"learning_rate": 1e-3},
    "engine": {"device": "cpu", "zero_stage": 0, "threads_per_process": 1},
    "run": {"steps": 10, "seed": 5},
    "checkpoint": {"every_steps": 1000},
    "tracking": {"report_to": []},
}  # fmt: skip
"""A few seconds: ten steps of 24 rollouts with an update large enough to move every ratio."""


def small_recipe(**sections: dict[str, Any]) -> Recipe:
    return resolve_recipe([SMALL, sections])


def files_of(run: Path) -> dict[str, bytes]:
    """Every file of a run but the log, the lock and the environment of an attempt."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.parent.name != "log"
        and path.name not in (".lock", "environment.json")
    }  # fmt: skip


@dataclass(frozen=True)
class FinishedRun:
    """A run's directory, read back."""

    path: Path
    recipe: Recipe

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @cached_property
    def timeless_metrics(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in line.items() if not depends_on_time(name)}
            for line in self.metrics
        ]

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return pq.read_table(self.path / f"rollouts/step_{step:06d}.parquet").to_pylist()

    def survivors(self, step: int) -> list[dict[str, Any]]:
        return [row for row in self.rollouts(step) if row["kept"]]

    def draws(self, step: int) -> list[dict[str, Any]]:
        path = self.path / f"draws/step_{step:06d}.parquet"
        return pq.read_table(path).to_pylist() if path.exists() else []

    @cached_property
    def all_rollouts(self) -> dict[int, dict[str, Any]]:
        steps = range(1, len(self.metrics) + 1)
        return {row["rollout_id"]: row for step in steps for row in self.rollouts(step)}

    @cached_property
    def all_draws(self) -> list[dict[str, Any]]:
        return [row for step in range(1, len(self.metrics) + 1) for row in self.draws(step)]

    def snapshot(self, step: int) -> Snapshot:
        return read_snapshot(self.path / f"checkpoints/step_{step:06d}/buffer.parquet")

    def weights(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """The whole weights of a checkpoint, or with LoRA its adapters if it has no others."""
        folder = self.path / "checkpoints" / ("latest" if step is None else f"step_{step:06d}")
        whole, adapter = folder / "model/model.safetensors", "adapter/adapter_model.safetensors"
        return load_file(whole if whole.exists() else folder / adapter)


Action = Callable[[], object]


class Listener(Observer):
    """Keeps what it is told, and calls `after[step]()` after that step."""

    def __init__(self, after: Mapping[int, Action] | None = None) -> None:
        self.after = after or {}
        self.at_start: list[str] = []
        self.notices: list[str] = []
        self.statuses: list[str] = []
        self.samples: dict[int, Any] = {}
        self.reports: dict[int, Any] = {}

    def on_start(self, recipe: Any, run_dir: Any, state: Any, notices: Any) -> None:
        self.at_start = [each.text for each in notices]

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        if action := self.after.get(metrics["step"]):
            action()

    def on_samples(self, step: int, rows: Any) -> None:
        self.samples[step] = rows

    def on_evaluation(self, step: int, report: Any) -> None:
        self.reports[step] = report

    def on_notice(self, text: str) -> None:
        self.notices.append(text)

    def on_status(self, text: str) -> None:
        self.statuses.append(text)


def train_small_run(path: Path, resume: bool = False, **sections: dict[str, Any]) -> FinishedRun:
    """Train in this process. `path` must be new (or hold the run, with `resume`)."""
    recipe = small_recipe(**sections)
    run_training(recipe, path, resume, Observer())
    return FinishedRun(path, recipe)


@contextmanager
def spied_updates() -> Iterator[list[list[TrainRow]]]:
    """The rows of every optimizer update, as the engine gets them."""
    seen: list[list[TrainRow]] = []
    original = DeepSpeedEngine.update

    def update(engine: DeepSpeedEngine, rows: Sequence[TrainRow]) -> Any:
        seen.append(list(rows))
        return original(engine, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedEngine, "update", update)
        yield seen


class _Stop(Exception):
    pass


def interrupted(path: Path, step: int, **sections: dict[str, Any]) -> None:
    """A run that ends right after a step, as by a crash: without a checkpoint of it."""

    def stop() -> None:
        raise _Stop

    with suppress(_Stop):
        run_training(small_recipe(**sections), path, False, Listener({step: stop}))
        raise AssertionError(f"the run ended before step {step}")


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def same_files(one: Path, other: Path, folder: str) -> int:
    """How many Parquet files of a folder hold the same table in both runs, all of them."""
    names = sorted(file.name for file in (one / folder).glob("*.parquet"))
    assert names == sorted(file.name for file in (other / folder).glob("*.parquet"))
    for name in names:
        a, b = (pq.read_table(root / folder / name) for root in (one, other))
        assert a.equals(b), f"{folder}/{name}"
    return len(names)


def steps_of(run: FinishedRun) -> range:
    return range(1, len(run.metrics) + 1)


def row_of(record: dict) -> TrainRow:
    """A logged rollout as a row for `plain_logprobs`."""
    zeros = np.zeros(len(record["completion_token_ids"]), np.float32)
    return TrainRow(
        np.array(record["prompt_token_ids"], np.int32),
        np.array(record["completion_token_ids"], np.int32),
        zeros,
        zeros,
    )


def policy_at(run: FinishedRun, step: int) -> torch.nn.Module:
    """The policy after `step`, from its checkpoint; the base model for 0."""
    model = load_policy(run.recipe.model, 0)
    if step > 0:
        missing, unexpected = model.load_state_dict(run.weights(step), strict=False)
        assert not unexpected and missing == ["lm_head.weight"]  # tied
    return model


def hopeless_after(tmp_path: Path, steps_of_hope: int) -> dict[str, Any]:
    """Prompts whose answers become impossible after so many steps."""
    problems = train_problems()[::7][:100]
    for i, problem in enumerate(problems):
        if i >= steps_of_hope * PROMPTS:
            problem["answer"] = "never"
    return visited_in_order(tmp_path / "problems.jsonl", problems)


def visited_in_order(path: Path, problems: list[dict[str, Any]]) -> dict[str, Any]:
    """Write problems so that a small run takes them in this order in its first epoch."""
    order = stream(SMALL["run"]["seed"], ORDER_STREAM, 0).permutation(len(problems))
    placed = [problems[i] for i in np.argsort(order)]
    path.write_text("".join(json.dumps(problem) + "\n" for problem in placed))
    return {"source": str(path)}
