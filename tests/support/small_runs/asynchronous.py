"""Small asynchronous runs: the real trainer, collector and journal with fake policy servers.

    python -m small_runs.asynchronous FOLDER SECTIONS_JSON

trains in FOLDER, resuming if a run is there.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from grpo_replay.recipe import Recipe, resolve_recipe
from grpo_replay.training import Observer
from grpo_replay.training.run import run_training
from small_runs.trained import SMALL, Action, FinishedRun, Listener, same_weights

ASYNCHRONOUS: dict[str, Any] = {
    "sampling": {"backend": "vllm_server", "logprob_gap_limit": 1000.0},
    "reward": {"function": "collected_rewards:even"},
    "replay": {"warmup_steps": 2, "max_age_steps": 6},
    "loss": {"behavior_logprobs": "sampler"},
    "run": {"mode": "async", "steps": 6},
    "eval": {"benchmarks": []},
}

BUFFER_ONLY: dict[str, Any] = {
    "preset": "fifo", "warmup_steps": 0, "capacity_rollouts": 60, "ratio": 1.0,
    "max_age_steps": None,
}  # fmt: skip


def async_recipe(urls: Sequence[str], *layers: dict[str, Any]) -> Recipe:
    servers = {"urls": list(urls), "request_timeout_seconds": 20.0, "max_in_flight": 16}
    return resolve_recipe([SMALL, ASYNCHRONOUS, {"sampling": {"servers": servers}}, *layers])


def train_async_run(
    recipe: Recipe, path: Path, resume: bool = False, after: dict[int, Action] | None = None
) -> FinishedRun:
    """Train in this process. `after[step]()` is called after that step."""
    run_training(recipe, path, resume, Listener(after))
    return FinishedRun(path, recipe)


def written_steps(folder: Path) -> int:
    """How many steps the metrics of a run have, which may still be going on."""
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def collector_pids() -> list[int]:
    """Collectors that this process started and that live."""
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
        and any("collection.collector_process" in word for word in child.cmdline())
    ]


def replay_run(run: FinishedRun, path: Path, *layers: dict[str, Any]) -> FinishedRun:
    """The run again, from its journal, without servers."""
    source = {"sampling": {"collection": {"replay_journal": str(run.path)}}}
    changed = resolve_recipe([run.recipe.model_dump(mode="json"), source, *layers])
    return train_async_run(changed, path)


def same_weights_as_journal(run: FinishedRun, folder: Path) -> bool:
    return same_weights(run.weights(), replay_run(run, folder).weights())


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    folder, sections = Path(sys.argv[1]), json.loads(sys.argv[2])
    urls = sections.pop("urls")
    exists = (folder / "recipe.yaml").exists()
    run_training(async_recipe(urls, sections), folder, exists, Observer())
