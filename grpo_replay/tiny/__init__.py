"""The built-in tasks, `builtin:NAME` as a source of prompts: arithmetic problems, and for the tiny
ones base models and tokenizers (made by benchmarks/make_tiny_base.py). The folder imports nothing
else of the package, nor torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

BASE_DIR: Path = Path(__file__).parent / "base"
"""The shipped base model of `train tiny`, a Hugging Face folder."""

LONG_BASE_DIR: Path = Path(__file__).parent / "long_base"
"""The shipped base model of `train tiny-long`."""


@dataclass(frozen=True)
class Task:
    """A task: a base model (None: any language model), benchmarks, and the module of this folder
    that makes the problems, imported when it is first needed. If the module has several tasks,
    `arguments` select one."""

    base_dir: Path | None
    benchmarks: tuple[str, ...]
    module: str
    arguments: tuple[str, ...] = ()

    def train_problems(self, seed: int = 0) -> list[dict[str, str]]:
        """Make the training problems of a seed."""
        problems: list[dict[str, str]] = self._import_module().train_problems(*self.arguments, seed)
        return problems

    def benchmark_problems(self, name: str) -> list[dict[str, str]]:
        """Make the held-out problems of one of the task's benchmarks."""
        problems: list[dict[str, str]] = self._import_module().benchmark_problems(name)
        return problems

    def _import_module(self) -> ModuleType:
        return import_module(f"{__name__}.{self.module}")


TASKS: Mapping[str, Task] = {
    "tiny": Task(
        BASE_DIR, ("tiny_add", "tiny_sub", "tiny_mul", "tiny_order", "tiny_pair"), "problems"
    ),
    "tiny-long": Task(
        LONG_BASE_DIR, ("tiny_long_10", "tiny_long_14", "tiny_long_18"), "long_problems"
    ),
} | {
    name.replace("_", "-"): Task(None, (name,), "text_problems", (name,))
    for name in ("additions", "step_sums")
}
"""The tasks by name. The same name with `_` for `-` stands for all benchmarks of the task."""

BASES: Mapping[str, Path] = {
    name: task.base_dir for name, task in TASKS.items() if task.base_dir is not None
}
"""The shipped base models, `builtin:NAME` as a model."""


def benchmark_problems(name: str) -> list[dict[str, str]]:
    """Make the held-out problems of any task's benchmark. Raises ValueError for an unknown name."""
    for task in TASKS.values():
        if name in task.benchmarks:
            return task.benchmark_problems(name)
    known = [benchmark for task in TASKS.values() for benchmark in task.benchmarks]
    raise ValueError(f"unknown built-in benchmark {name!r}; allowed: {', '.join(known)}")
