"""What a job finds, on disk as soon as it is known."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_parts.sizes import Size


class Skipped(Exception):
    """Raised by a job that cannot run here; the message says why."""


class Record:
    """Figures, tables, checks and notes of one job. Every addition rewrites the file, so that a
    job that is stopped leaves what it had; taken up again, it finds its tables."""

    def __init__(self, output: Path, name: str, title: str, size: str) -> None:
        self._path = output / "jobs" / f"{name}.json"
        self.result: dict[str, Any] = {
            "job": name, "title": title, "size": size, "status": "running", "reason": None,
            "figures": {}, "tables": read_json(self._path).get("tables", {}), "checks": [],
            "notes": [],
        }  # fmt: skip
        self.save()

    def figure(self, name: str, value: Any) -> None:
        self.result["figures"][name] = value
        self.save()

    def row(self, table: str, row: Mapping[str, Any]) -> None:
        self.result["tables"].setdefault(table, []).append(dict(row))
        self.save()

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """All rows of a table, in place of what it had."""
        self.result["tables"][name] = rows
        self.save()

    def rows(self, table: str) -> list[dict[str, Any]]:
        return self.result["tables"].get(table, [])

    def check(self, claim: str, holds: bool, found: Any = None) -> None:
        """A claim that must hold, and what was found. The job fails if one does not."""
        self.result["checks"].append({"claim": claim, "holds": bool(holds), "found": found})
        self.save()

    def note(self, sentence: str) -> None:
        self.result["notes"].append(sentence)
        self.save()

    def finish(self, status: str, reason: str | None = None, last_lines: str | None = None) -> None:
        self.result |= {"status": status, "reason": reason, "last_lines": last_lines}
        self.save()

    def save(self) -> None:
        write_json(self._path, self.result)


def read_json(path: Path) -> dict[str, Any]:
    """Empty if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all: a reader never sees half a file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1, default=str) + "\n")
    os.replace(temporary, path)


@dataclass(frozen=True, slots=True)
class Context:
    """What a job is given. `output` is the folder of the results, `work` one that later jobs find
    as this one left it, `vllm` what part b found."""

    size: "Size"
    record: Record
    output: Path
    deadline: float  # of time.monotonic
    kit: Path | None
    wheels: Path | None  # a folder with SmolLM2's
    study: Path | None
    seeds: list[int] | None  # in place of the study's own
    cells: int  # runs of the study at a time

    @property
    def work(self) -> Path:
        return self.output / "work"

    @property
    def vllm(self) -> dict[str, Any]:
        return read_json(self.output / "vllm.json")

    @property
    def sampler(self) -> str:
        return "hf" if self.vllm.get("works") is False else "vllm"

    @property
    def on_gpu(self) -> bool:
        return self.size.device == "cuda"

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()
