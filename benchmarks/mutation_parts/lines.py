"""Which lines of the package run. Loads nothing else: a copy of this file is the `sitecustomize` of
processes that tests start, which append the lines that they run to the file MUTATION_LINES."""

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

LINES_VARIABLE = "MUTATION_LINES"
Line = tuple[str, int]
"""A file and a line number."""


class LineRecorder:
    """Collects the lines that run in files below `folder`, in all threads, from `start` on."""

    def __init__(self, folder: Path, output: Path | None = None) -> None:
        self._folder = f"{folder}{os.sep}"
        self._lines: set[Line] = set()
        self._output = output.open("a", buffering=1) if output else None

    def start(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def take(self) -> set[Line]:
        """The lines since the last call."""
        taken, self._lines = self._lines, set()
        return taken

    def _call(self, frame: FrameType, event: str, value: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        return self._line(frame, event, value)

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if line not in self._lines:
            self._lines.add(line)
            if self._output:
                self._output.write(f"{line[0]}:{line[1]}\n")
        return self._line


if LINES_VARIABLE in os.environ and __name__ == "sitecustomize":
    here = Path(__file__).resolve().parent
    LineRecorder(here / "grpo_replay", Path(os.environ[LINES_VARIABLE])).start()
