"""Outcomes of mutants: a JSON line each, in a file that grows."""

import json
from pathlib import Path

from mutation_parts.covering import fingerprint
from mutation_parts.mutants import Mutant

PARTS = ("grpo_replay", "tests/support")


class Results:
    """The last outcome of each mutant, "killed" or "survived", as long as the package and the
    folder of tests that it was tried with are the same: `tests` of a mutant."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path, self._root = path, root
        self._sources: dict[str, str] = {}
        self._last: dict[tuple[str, ...], str] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            facts = json.loads(line)
            key = (facts["path"], facts["old"], facts["new"], facts["sources"])
            self._last[key] = facts["outcome"]

    def note(self, mutant: Mutant, tests: str, outcome: str, **facts: object) -> None:
        key = self._key(mutant, tests)
        self._last[key] = outcome
        named = dict(zip(("path", "old", "new", "sources"), key, strict=True))
        line = {**named, "line": mutant.lines[0], "outcome": outcome, "tests": tests, **facts}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def outcome(self, mutant: Mutant, tests: str) -> str | None:
        """None if it was not tried with these sources."""
        return self._last.get(self._key(mutant, tests))

    def _key(self, mutant: Mutant, tests: str) -> tuple[str, ...]:
        """The sources are those of the first call."""
        if tests not in self._sources:
            parts = [self._root / part for part in (*PARTS, tests)]
            files = [path for part in parts for path in part.rglob("*.py")]
            self._sources[tests] = fingerprint(self._root, map(str, files))
        return mutant.path, mutant.old, mutant.new, self._sources[tests]
