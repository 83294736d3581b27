"""The built-in tasks, `builtin:NAME` as a source of prompts: arithmetic problems, and for the tiny
ones base models and tokenizers. Imports nothing else of the package; torch and transformers only in
`make_base`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpo_replay.tiny import long_problems, problems, text_problems

BASE_DIR: Path = Path(__file__).parent / "base"
"""The shipped base model of `train tiny`, a Hugging Face folder."""

LONG_BASE_DIR: Path = Path(__file__).parent / "long_base"
"""The shipped base model of `train tiny-long`."""


@dataclass(frozen=True)
class Task:
    """A base model (None: any language model), training problems by seed, and held-out problems by
    benchmark."""

    base_dir: Path | None
    benchmarks: tuple[str, ...]
    train_problems: Callable[[int], list[dict[str, str]]]
    benchmark_problems: Callable[[str], list[dict[str, str]]]


TASKS: Mapping[str, Task] = {
    "tiny": Task(
        BASE_DIR,
        problems.BENCHMARKS,
        problems.train_problems,
        problems.benchmark_problems,
    ),
    "tiny-long": Task(
        LONG_BASE_DIR,
        long_problems.BENCHMARKS,
        long_problems.train_problems,
        long_problems.benchmark_problems,
    ),
} | {
    name.replace("_", "-"): Task(
        None,
        (name,),
        partial(text_problems.train_problems, name),
        text_problems.benchmark_problems,
    )
    for name in text_problems.TASKS
}
"""The tasks by name. All benchmarks of one together have its name, with `_` for `-`."""

BASES: Mapping[str, Path] = {
    name: task.base_dir for name, task in TASKS.items() if task.base_dir is not None
}
"""The shipped base models, `builtin:NAME` as a model."""


def benchmark_problems(name: str) -> list[dict[str, str]]:
    """The held-out problems of a benchmark of any task. Raises ValueError for an unknown name."""
    for task in TASKS.values():
        if name in task.benchmarks:
            return task.benchmark_problems(name)
    known = [each for task in TASKS.values() for each in task.benchmarks]
    raise ValueError(f"unknown built-in benchmark {name!r}; allowed: {', '.join(known)}")
