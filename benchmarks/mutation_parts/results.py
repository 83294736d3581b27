"""Outcomes of mutants: a JSON line each, in a file that grows."""

import json
from pathlib import Path
from typing import Any

from mutation_parts.covering import fingerprint
from mutation_parts.mutants import Mutant

PARTS = ("grpo_replay", "tests/support")


class Results:
    """The last outcome of each mutant: "killed", "survived", or "undecided" where not all tests
    were tried."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self._root = path, root
        self._sources: dict[str, str] = {}
        self._last: dict[tuple[str, str, str], dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            self._take(json.loads(line))

    def _take(self, facts: dict[str, Any]) -> None:
        self._last[facts["path"], facts["old"], facts["new"]] = facts

    def note(self, mutant: Mutant, outcome: str, **facts: object) -> None:
        named = {"path": mutant.path, "old": mutant.old, "new": mutant.new, "outcome": outcome}
        sources = self._sources_of(mutant.folder)
        line = {**named, "line": mutant.lines[0], **facts, "sources": sources}
        self._take(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def outcome(self, mutant: Mutant) -> str | None:
        return self._facts(mutant).get("outcome")

    def is_settled(self, mutant: Mutant, quick: float | None) -> bool:
        """Whether the same sources and tests would come to the same outcome."""
        facts = self._facts(mutant)
        if not facts or facts["sources"] != self._sources_of(mutant.folder):
            return False
        tried = facts.get("quick") or 0.0
        return facts["outcome"] != "undecided" or (quick is not None and tried >= quick)

    def _facts(self, mutant: Mutant) -> dict[str, Any]:
        return self._last.get((mutant.path, mutant.old, mutant.new), {})

    def _sources_of(self, folder: str) -> str:
        """Fingerprint of the package and of the folder's tests, as they were first seen."""
        if folder not in self._sources:
            parts = [self._root / part for part in (*PARTS, f"tests/{folder}")]
            files = [path for part in parts for path in part.rglob("*.py")]
            self._sources[folder] = fingerprint(self._root, map(str, files))
        return self._sources[folder]
