"""The built-in tasks, `builtin:NAME` as a source of prompts: arithmetic problems, and for the tiny
ones base models and tokenizers (made by benchmarks/make_tiny_base.py). Imports nothing else of the
package, nor torch or transformers."""

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
    """A base model (None: any language model), its benchmarks, and the module of this folder that
    makes the problems, loaded with the first of them. `arguments` say which problems it makes, if
    it has those of several tasks."""

    base_dir: Path | None
    benchmarks: tuple[str, ...]
    module: str
    arguments: tuple[str, ...] = ()

    def train_problems(self, seed: int = 0) -> list[dict[str, str]]:
        """The training problems of a seed."""
        problems: list[dict[str, str]] = self._loaded().train_problems(*self.arguments, seed)
        return problems

    def benchmark_problems(self, name: str) -> list[dict[str, str]]:
        """The held-out problems of one of its benchmarks."""
        problems: list[dict[str, str]] = self._loaded().benchmark_problems(name)
        return problems

    def _loaded(self) -> ModuleType:
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
