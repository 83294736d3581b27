"""The link to a collector's process: a real one, and one that is silent, fails or does not stop."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from fake_server import FakeServer
from shadowing import write_shadowing_files
from small_runs.asynchronous import async_recipe

from grpo_replay.collection import link as link_module
from grpo_replay.collection.link import (
    SILENCE_SECONDS,
    START_SECONDS,
    CollectorGone,
    Link,
    collector_environment,
)
from grpo_replay.collection.messages import (
    CollectorSettings,
    Credit,
    Delivery,
    Failure,
    Group,
    Hello,
    Report,
    encode,
)
from grpo_replay.errors import CollectorError, NotFetchedError, RecipeError


def settings(url: str, folder: Path) -> CollectorSettings:
    return CollectorSettings(
        async_recipe([url]), "run", [url], (1,), folder / "run" / "log" / "c.log"
    )


@pytest.fixture
def idle(monkeypatch, tmp_path) -> Iterator[Link]:
    """A link whose process does nothing, and never stops by itself."""
    command = ["sh", "-c", "trap '' TERM; sleep 600 & wait; wait"]
    monkeypatch.setattr(
        Link, "_spawn", lambda *_: subprocess.Popen(command, start_new_session=True)
    )
    monkeypatch.setattr(link_module, "STOP_SECONDS", 0.1)
    link = Link(settings("http://127.0.0.1:1", tmp_path))
    yield link
    link.close()


def deliver(link: Link, delivery: Delivery) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(link._address("deliveries"))
        socket.send(encode(delivery))


@pytest.mark.slow
def test_a_real_collector_samples_and_its_death_is_noticed(tmp_path, monkeypatch):
    """By default the asynchronous runs of tests/training start and kill one."""
    monkeypatch.chdir(write_shadowing_files(tmp_path / "work"))
    server = FakeServer()
    server.label, server.tokens = "run/0", [3, 1]
    link = Link(settings(server.url, tmp_path))
    link.send(Hello([(0, 2)], 5))
    link.send(Credit(2))
    groups: list[Group] = []
    deadline = time.monotonic() + 120
    while len(groups) < 2 and time.monotonic() < deadline:
        groups += [d.body for d in link.receive(0.2) if isinstance(d.body, Group)]
    assert sorted(group.position for group in groups) == [(0, 2), (0, 5)]
    assert link.report.started_groups == 2
    os.kill(link.pid, signal.SIGKILL)
    with pytest.raises(CollectorGone, match=r"exited with code -9; its log is .*c\.log"):
        for _ in range(100):
            list(link.receive(0.1))
    link.close()
    server.stop()


def test_a_collector_may_be_silent_longer_while_it_starts(idle):
    idle.report = Report(sent=time.monotonic() - SILENCE_SECONDS - 5)
    assert list(idle.receive()) == []
    idle.report = Report(sent=time.monotonic() - START_SECONDS - 5)
    with pytest.raises(CollectorGone, match=r"has reported nothing for 6.. s"):
        list(idle.receive())
    deliver(idle, Delivery(None, Report(sent=time.monotonic() - SILENCE_SECONDS + 5)))
    assert len(list(idle.receive(5.0))) == 1
    idle.report = Report(sent=time.monotonic() - SILENCE_SECONDS - 5)
    with pytest.raises(CollectorGone, match=r"has reported nothing for 1.. s"):
        list(idle.receive())


@pytest.mark.parametrize(
    ("kind", "expected", "message"),
    [
        ("RecipeError", RecipeError, "^as told$"),
        ("NotFetchedError", NotFetchedError, "^as told$"),
        ("ZeroDivisionError", CollectorError, "failed with ZeroDivisionError: as told; its log"),
        ("Iterable", CollectorError, "failed with Iterable: as told"),
    ],
)
def test_the_collectors_error_is_raised_as_its_own_class(idle, kind, expected, message):
    deliver(idle, Delivery(Failure(kind, "as told"), Report(sent=time.monotonic())))
    with pytest.raises(expected, match=message):
        list(idle.receive(5.0))


@pytest.mark.slow
def test_a_collector_that_does_not_stop_is_killed_with_what_it_started(idle):
    process, deadline = psutil.Process(idle.pid), time.monotonic() + 60
    while not process.children() and time.monotonic() < deadline:
        time.sleep(0.01)  # the shell is starting
    processes = [process, *process.children()]
    folder = idle._folder
    assert len(processes) == 2 and folder.stat().st_mode & 0o777 == 0o700
    idle.close()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive and not folder.exists()
    idle.close()


def test_a_closed_link_leaves_no_threads_of_zmq(idle):
    idle.close()
    assert idle._context.closed and idle._deliveries.closed and idle._commands.closed


def test_a_collector_sees_no_gpu_and_is_no_rank(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HF_HOME", "/models")
    found = collector_environment()
    assert "RANK" not in found and found["CUDA_VISIBLE_DEVICES"] == ""
    assert found["HF_HOME"] == "/models"
