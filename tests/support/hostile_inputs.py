"""Wrong inputs of the command line, from hostile_inputs.yaml: what is typed and answered.

tests/cli/test_hostile_inputs.py runs this table.
"""

import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True)
class Hostile:
    """One input. `command` follows `grpo-replay` and runs in a folder with `files`, and if it needs
    one, with `run`: a finished run of 24 steps with checkpoints at 12 and 24. The first line on
    stderr is `says`, where … stands for any text. `heavy` loads torch."""

    group: str
    what: str
    command: str
    code: int
    says: str
    files: Mapping[str, str] = field(default_factory=dict)
    heavy: bool = False

    def prepare(self, run: Path) -> None:
        """Write the files of the case into the current folder. `run` is a run to copy."""
        if "run" in shlex.split(self.command):
            shutil.copytree(run, "run")
        for name, content in self.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(content, encoding="utf-8")

    def is_answered_by(self, line: str) -> bool:
        pattern = ".*".join(map(re.escape, self.says.split("…")))
        return re.fullmatch(pattern, line) is not None


def read_table() -> list[Hostile]:
    """Every case, in the order of the file."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    groups = yaml.safe_load(text)
    return [Hostile(group, **case) for group, cases in groups.items() for case in cases]
