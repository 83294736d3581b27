"""The tiny tasks, `builtin:NAME` as a model and as a source of prompts: base models, tokenizers and
arithmetic problems. Imports nothing else of the package; torch and transformers only in
`make_base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_replay.tiny import long_problems, problems

BASE_DIR: Path = Path(__file__).parent / "base"
"""The shipped base model of `train tiny`, a Hugging Face folder."""

LONG_BASE_DIR: Path = Path(__file__).parent / "long_base"
"""The shipped base model of `train tiny-long`."""


@dataclass(frozen=True)
class Task:
    """A base model, training problems by seed, and held-out problems by benchmark."""

    base_dir: Path
    group: str  # name of all its benchmarks together
    benchmarks: tuple[str, ...]
    train_problems: Callable[[int], list[dict[str, str]]]
    benchmark_problems: Callable[[str], list[dict[str, str]]]


TASKS: Mapping[str, Task] = {
    "tiny": Task(
        BASE_DIR,
        "tiny",
        problems.BENCHMARKS,
        problems.train_problems,
        problems.benchmark_problems,
    ),
    "tiny-long": Task(
        LONG_BASE_DIR,
        "tiny_long",
        long_problems.BENCHMARKS,
        long_problems.train_problems,
        long_problems.benchmark_problems,
    ),
}


def benchmark_problems(name: str) -> list[dict[str, str]]:
    """The held-out problems of a benchmark of any task. Raises ValueError for an unknown name."""
    for task in TASKS.values():
        if name in task.benchmarks:
            return task.benchmark_problems(name)
    known = [each for task in TASKS.values() for each in task.benchmarks]
    raise ValueError(f"unknown tiny benchmark {name!r}; allowed: {', '.join(known)}")
