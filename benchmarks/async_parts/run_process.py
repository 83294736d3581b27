"""An asynchronous run as a process of its own, and the proof that it is what its journal says."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from async_parts.forks import Forked
from async_parts.windows import Window
from grpo_replay.collection.arrivals import CATEGORIES
from grpo_replay.collection.journal import read_journal
from grpo_replay.collection.messages import Group, Record
from grpo_replay.lab.verification.verify import verify_run

NOT_OF_THE_JOURNAL = ("cost/", "async/", "step_time", "sampler/policy_version")
"""Beginnings of the metrics that depend on the clock, and not on the journal alone."""


@dataclass(frozen=True)
class RunProcess:
    """A run directory, and the command that trains in it."""

    recipe: str
    folder: Path
    overrides: Sequence[str]

    def start(self, window: Window | None = None) -> Forked:
        """Train, or resume if a run is there; in a session of its own, as from a terminal."""
        return Forked(self.words(), self.log, window)

    def words(self) -> list[str]:
        """The command line, and the folder for its log."""
        words = ["train", self.recipe, "--output-dir", str(self.folder)]
        if (self.folder / "recipe.yaml").exists():
            words.append("--resume")
        for override in self.overrides:
            words += ["--set", override]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return words

    @property
    def log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def steps_since(self, moment: float) -> int:
        """The steps in metrics.jsonl if it was written after `moment` (`time.time()`), else 0: an
        attempt that resumes first cuts the file down to its checkpoint."""
        path = self.folder / "metrics.jsonl"
        written = path.exists() and path.stat().st_mtime > moment
        return self.steps() if written else 0

    def checkpoints(self) -> list[int]:
        folders = (self.folder / "checkpoints").glob("step_*")
        return sorted(int(folder.name.removeprefix("step_")) for folder in folders)

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"checkpoints/step_{step:06d}/model/model.safetensors")

    def records(self) -> list[Record]:
        folder = self.folder / "journal"
        return list(read_journal(folder)) if folder.exists() else []


def family(process: Forked) -> list[psutil.Process]:
    """The processes that a run has started and that live."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def living(members: Sequence[psutil.Process]) -> list[psutil.Process]:
    found = []
    for member in members:
        try:
            if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                found.append(member)
        except psutil.NoSuchProcess:
            continue
    return found


@dataclass(frozen=True)
class Comparison:
    """A run and its repetition from its journal, without servers."""

    run: RunProcess
    again: RunProcess

    @cached_property
    def equal_checkpoints(self) -> dict[int, bool]:
        """For every checkpoint of both, whether all weights are equal bit for bit."""
        both = sorted({*self.run.checkpoints()} & {*self.again.checkpoints()})
        return {step: self._equal(step) for step in both}

    def _equal(self, step: int) -> bool:
        one, other = self.run.weights(step), self.again.weights(step)
        return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)

    @property
    def unequal_steps(self) -> list[int]:
        """Steps of which a metric differs that is a function of the journal."""
        pairs = zip(self.run.metrics(), self.again.metrics(), strict=True)
        return [one["step"] for one, other in pairs if of_journal(one) != of_journal(other)]

    @property
    def unbalanced_steps(self) -> list[int]:
        return [line["step"] for line in self.run.metrics() if not balances(line)]

    @property
    def doubled_groups(self) -> int:
        places = [record.place for record in self.run.records() if isinstance(record, Group)]
        return len(places) - len(set(places))

    def problems(self) -> list[str]:
        """What is wrong; nothing, if the run is what its journal describes."""
        report = verify_run(self.run.folder)
        found = {
            "checkpoints that differ": [
                s for s, same in self.equal_checkpoints.items() if not same
            ],
            "checkpoints compared": [] if self.equal_checkpoints else ["none"],
            "steps whose metrics differ": self.unequal_steps,
            "steps whose ledger does not balance": self.unbalanced_steps,
            "groups journalled twice": [self.doubled_groups] if self.doubled_groups else [],
            "failed checks": [check.name for check in report.checks if not check.passed],
        }
        return [f"{what}: {values}" for what, values in found.items() if values]


def repeat_from_journal(run: RunProcess, name: str = "again") -> Comparison:
    """Train the run's steps again in another folder, from its journal. Raises SystemExit if that
    ends with an error."""
    source = f"sampling.collection.replay_journal={run.folder}"
    steps = f"run.steps={run.steps()}"
    again = RunProcess(run.recipe, run.folder.parent / name, [*run.overrides, source, steps])
    started = time.monotonic()
    if again.start().wait() != 0:
        raise SystemExit(f"the journal could not be repeated: see {again.log}")
    print(f"repeated {run.steps()} steps in {time.monotonic() - started:.0f} s", flush=True)
    return Comparison(run, again)


def of_journal(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if not k.startswith(NOT_OF_THE_JOURNAL)}


def balances(line: dict[str, Any]) -> bool:
    """generated = the five ends + in flight, in rollouts and in tokens."""
    return all(
        line[f"ledger/generated_{unit}"]
        == sum(line[f"ledger/{name}_{unit}"] for name in (*CATEGORIES, "in_flight"))
        for unit in ("rollouts", "tokens")
    )
