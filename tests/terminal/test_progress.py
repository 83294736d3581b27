"""The progress bar of long operations."""

import io

from grpo_replay.terminal import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_name_in_brackets_is_no_markup(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "DELAY_SECONDS", -1.0)
    monkeypatch.setattr(progress.sys, "stderr", Terminal())
    list(progress.tracked([1, 2], "reading arm [x] :x:"))
    assert "reading arm [x] :x:" in progress.sys.stderr.getvalue()
