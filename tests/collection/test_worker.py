"""The collector's process: what ends it."""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import zmq

from grpo_replay.collection import collector_process as worker
from grpo_replay.collection.messages import Delivery, Failure, decode_delivery
from grpo_replay.errors import RecipeError


def run_main(monkeypatch, tmp_path: Path, collect) -> tuple[int, list[Delivery]]:
    """The exit code of `main` with another `_collect`, and what it sent."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # the path of a socket is short
    settings = {name: f"ipc://{folder / name}" for name in ("deliveries", "commands")}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "settings.json")])
    monkeypatch.setattr(worker, "_collect", collect)
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(settings["deliveries"])
        code = worker.main()
        sent = []
        while socket.poll(500):
            sent.append(decode_delivery(socket.recv()))
    shutil.rmtree(folder)
    return code, sent


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RecipeError("no such file"), Failure("RecipeError", "no such file")),
        (AssertionError(), Failure("AssertionError", "AssertionError")),
    ],
)
def test_a_collector_that_fails_says_why_and_ends_with_1(monkeypatch, tmp_path, error, expected):
    async def collect(settings, commands, send) -> None:
        raise error

    code, (sent,) = run_main(monkeypatch, tmp_path, collect)
    assert (code, sent.body) == (1, expected)
    assert 0 < sent.report.sent <= time.monotonic()
