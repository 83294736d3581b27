"""What a part finds, on disk as soon as it is known."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_parts.sizes import Size


class Skipped(Exception):
    """Raised by a part that cannot run here; the message says why."""


class Record:
    """Figures, tables, checks and notes of one part. Every addition rewrites the file, so that a
    part that is killed leaves what it had."""

    def __init__(self, path: Path, number: int, title: str, size: str) -> None:
        self._path = path
        self.result: dict[str, Any] = {
            "part": number, "title": title, "size": size, "status": "running", "reason": None,
            "figures": {}, "tables": {}, "checks": [], "notes": [],
        }  # fmt: skip
        self.save()

    def figure(self, name: str, value: Any) -> None:
        self.result["figures"][name] = value
        self.save()

    def row(self, table: str, row: dict[str, Any]) -> None:
        """One more row of `table`; the first row's keys are its columns."""
        self.result["tables"].setdefault(table, []).append(row)
        self.save()

    def check(self, claim: str, holds: bool, found: Any = None) -> None:
        """A claim that must hold, and what was found. The part fails if one does not."""
        self.result["checks"].append({"claim": claim, "holds": bool(holds), "found": found})
        self.save()

    def note(self, sentence: str) -> None:
        self.result["notes"].append(sentence)
        self.save()

    def finish(self, status: str, reason: str | None = None, traceback: str | None = None) -> None:
        self.result["status"], self.result["reason"] = status, reason
        if traceback:
            self.result["traceback"] = traceback
        self.save()

    def save(self) -> None:
        write_json(self._path, self.result)


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all: a reader never sees half a file."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1, default=str) + "\n")
    os.replace(temporary, path)


@dataclass(frozen=True, slots=True)
class Context:
    """What a part is given. `work` is an empty folder that is removed afterwards."""

    size: "Size"
    record: Record
    work: Path
    peak_tflops: float | None = None
