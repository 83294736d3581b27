"""A training run in processes of its own, with wall and CPU seconds of every stage of a step.

For growth.py and step_profile.py. The run's metrics hold wall seconds, which other programs on the
machine disturb; CPU seconds are those of rank 0, all its threads, without the reward workers.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_replay.training import Observer
from grpo_replay.training.rollout_source import STAGES, Stopwatch

ALL_STAGES = (*STAGES, "other")
CPU_FILE = "cpu.jsonl"


def parity_reward(completion: str, answer: str, row: dict[str, Any]) -> float:
    """Mixed groups from a random model."""
    return 1.0 if sum(completion.encode("utf-8", "surrogatepass")) % 2 else -1.0


def random_model(shape: dict[str, Any]) -> list[str]:
    """Overrides of the tiny recipe: a Qwen3 of this shape with random weights; no evaluation."""
    return [
        "model.path=builtin:qwen3-0.6b",
        "model.tokenizer=builtin:bytes", f"model.random_init={json.dumps(shape)}",
        "reward.function=stage_clock:parity_reward", "replay.warmup_steps=1",
        "eval.benchmarks=[]", "tracking.report_to=[]",
    ]  # fmt: skip


def clocked_run(
    overrides: list[str], ranks: int = 1, entry: str = "stage_clock:train_clocked", **request: Any
) -> list[dict[str, Any]]:
    """The metrics of each step, and `cpu/STAGE`. `entry` is called on every rank; it gets the
    request as `request_of_rank()`."""
    with tempfile.TemporaryDirectory() as folder:
        request |= {"overrides": overrides, "folder": folder}
        here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, __file__, str(ranks), entry, json.dumps(request)],
            env=os.environ | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                              "DS_ACCELERATOR": "cpu"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{overrides} on {ranks} ranks failed:\n{done.stderr[-3000:]}")
        metrics = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        clocks = (Path(folder) / CPU_FILE).read_text().splitlines()
    return [json.loads(a) | json.loads(b) for a, b in zip(metrics, clocks, strict=True)]


def request_of_rank() -> dict[str, Any]:
    return json.loads(sys.argv[-1])


def train_clocked(display: Observer | None = None) -> int:
    """The run of the request, on one rank."""
    from grpo_replay.distributed.environment import prepare_rank, rank_environment
    from grpo_replay.recipe import load_recipe
    from grpo_replay.terminal.quiet import quiet_libraries

    request = request_of_rank()
    prepare_rank(rank_environment())
    recipe = load_recipe("tiny", request["overrides"])
    folder = Path(request["folder"])
    with quiet_libraries():
        from grpo_replay.training import rollout_source, run

        rollout_source.Stopwatch = clock_writing(folder / CPU_FILE)
        run.run_training(recipe, folder / "run", False, display or Observer())
    return 0


def clock_writing(file: Path) -> type[Stopwatch]:
    class TwoClocks(Stopwatch):
        """Writes the CPU seconds of every step to the file. Only rank 0 reads its clock."""

        def restart(self) -> None:
            super().restart()
            self._cpu_start = time.process_time()
            self._cpu = dict.fromkeys(STAGES, 0.0)

        @contextmanager
        def stage(self, name: str) -> Iterator[None]:
            start = time.process_time()
            try:
                with super().stage(name):
                    yield
            finally:
                self._cpu[name] += time.process_time() - start

        def read(self) -> dict[str, float]:
            total = time.process_time() - self._cpu_start
            stages = {**self._cpu, "other": total - sum(self._cpu.values())}
            with file.open("a") as lines:
                print(json.dumps({f"cpu/{name}": value for name, value in stages.items()}),
                      file=lines)  # fmt: skip
            return super().read()

    return TwoClocks


def main() -> int:
    import importlib

    ranks, entry, request = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if ranks > 1:
        from grpo_replay.distributed.launch import launch_ranks

        return launch_ranks([request], ranks, threads_per_process=1, entry=entry)
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    sys.exit(main())
