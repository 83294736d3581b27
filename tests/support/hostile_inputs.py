"""Hostile inputs of the command line, from hostile_inputs.yaml: what is typed and answered.

tests/cli/test_hostile_inputs.py runs this table.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

STAND_INS = {
    "{5,000 digits}": "7" * 5000,
    "{5,000 letters}": "x" * 5000,
    "{1,000 brackets}": "[" * 1000 + "]" * 1000,
    "{100,000 brackets}": "[" * 100_000,
    "{5,000 parentheses}": "(" * 5000 + "reward > 0" + ")" * 5000,
}
"""What the table writes for words that are too long to print."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """One input. `command` follows `grpo-replay` and runs in a folder with `files`, and if it needs
    one, with `run`: a finished run of 24 steps with checkpoints at 12 and 24, which `change` may
    damage. The first line on stderr is `says`, where … stands for any text. `heavy` loads torch."""

    group: str
    what: str
    command: str
    code: int
    says: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    change: str | None = None
    heavy: bool = False

    @property
    def needs_run(self) -> bool:
        return self.change is not None or re.search(r"\brun\b", self.command) is not None

    def words(self) -> list[str]:
        return [_filled(word) for word in shlex.split(self.command)]

    def prepare(self, run: Path) -> None:
        """Write the files of the case into the current folder. `run` is a run to copy."""
        if self.needs_run:
            shutil.copytree(run, "run")
        for name, content in self.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else _filled(content).encode()
            Path(name).write_bytes(data)
        if self.change is not None:
            _CHANGES[self.change](Path("run"))

    def is_answered_by(self, line: str) -> bool:
        pattern = ".*".join(map(re.escape, self.says.split("…")))
        return re.fullmatch(pattern, line) is not None


def read_table() -> list[Hostile]:
    """Every case, in the order of the file."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    groups = yaml.safe_load(text)
    return [Hostile(group, **case) for group, cases in groups.items() for case in cases]


def _filled(text: str) -> str:
    for name, value in STAND_INS.items():
        text = text.replace(name, value)
    return text


def _with_reward(value: str) -> Callable[[Path], None]:
    """Give the last line of metrics.jsonl another reward, as JSON text."""

    def change(run: Path) -> None:
        path = run / "metrics.jsonl"
        lines = path.read_text().splitlines()
        assert json.loads(lines[-1])["step"] == 24
        lines[-1] = re.sub(r'"reward": [^,]+', f'"reward": {value}', lines[-1])
        path.write_text("\n".join(lines) + "\n")

    return change


def _export(run: Path) -> None:
    from grpo_replay.lab.inspection.rows import export_rows, open_rows
    from grpo_replay.lab.inspection.source import open_source

    export_rows(open_rows(open_source(run)), None, Path("exported.parquet"))


def _foreign(_run: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), "foreign.parquet")


_CHANGES: Mapping[str, Callable[[Path], None]] = {
    "reward is text": _with_reward('"high"'),
    "reward is NaN": _with_reward("NaN"),
    "reward has 5,000 digits": _with_reward("7" * 5000),
    "reward is deep": _with_reward("[" * 100_000),
    "exported.parquet": _export,
    "foreign.parquet": _foreign,
    "no rollouts": lambda run: shutil.rmtree(run / "rollouts"),
    "a link to nothing": lambda run: (run / "checkpoints" / "gone").symlink_to("nowhere"),
    "the snapshot alone": lambda run: shutil.copy(
        run / "checkpoints/step_000024/buffer.parquet", "buffer.parquet"
    ),
}
