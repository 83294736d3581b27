"""One asynchronous run with real vLLM servers, and every fault that it must survive, in turn.

    python benchmarks/async_faults.py [--recipe tiny-async] [--output DIR]

Measures how long each fault takes to recover from and what it loses. At the end the run is repeated
from its journal, and files, ledger and weights are checked. Prints a table.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_parts.forks import Forked
from async_parts.run_process import RunProcess, family, living, repeat_from_journal
from async_parts.servers import Server, servers, wait_for

from grpo_replay.collection.messages import Group

LIMIT_SECONDS = 10
PATIENCE_SECONDS = 600.0
VERIFIER = '''
import time
from pathlib import Path

FLAG = Path(__file__).with_name("stall")


def graded(completion, answer, row):
    """Never returns, once, if the file `stall` is there."""
    try:
        FLAG.unlink()
    except FileNotFoundError:
        return 1.0 if f"\\\\boxed{{{answer}}}" in completion else -1.0
    time.sleep(600)
'''


@dataclass
class Scene:
    """The run, its present process, and two servers, the second not started yet."""

    run: RunProcess
    first: Server
    second: Server
    process: Forked
    rows: list[dict[str, Any]] = field(default_factory=list)

    def lost(self) -> int:
        lines = self.run.metrics()
        return lines[-1]["ledger/lost_rollouts"] if lines else 0

    def wait_steps(self, count: int, since: int | None = None) -> float:
        """Seconds until so many more steps are done."""
        goal = (self.run.steps() if since is None else since) + count
        seconds = wait_for(
            lambda: self.run.steps() >= goal or self.process.poll() is not None, PATIENCE_SECONDS
        )
        if seconds is None or self.process.poll() is not None:
            raise SystemExit(f"the run did not go on to step {goal}: see {self.run.log}")
        return seconds

    def wait_use(self, server: Server) -> float:
        """Seconds until a server generates."""
        before = server.generated_tokens()
        seconds = wait_for(lambda: server.generated_tokens() > before, PATIENCE_SECONDS)
        if seconds is None:
            raise SystemExit(f"{server.url} is not used: see {self.run.log}")
        return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="tiny-async")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp(prefix="async-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "verifier.py").write_text(VERIFIER)
    with servers(options.recipe, folder, 2, running=1) as (first, second):
        run = RunProcess(options.recipe, folder / "run", overrides(options, folder, first, second))
        scene = Scene(run, first, second, run.start())
        try:
            for fault in FAULTS:
                suffer(scene, fault, folder / "faults.jsonl")
            scene.process.terminate()
            scene.process.wait(PATIENCE_SECONDS)
        finally:
            scene.process.kill()
    print_table(scene.rows)
    problems = repeat_from_journal(run).problems()
    last = run.metrics()[-1]
    print({name: value for name, value in last.items() if name.startswith("ledger/")})
    print("problems:", problems or "none")
    return int(bool(problems))


def overrides(
    options: argparse.Namespace, folder: Path, first: Server, second: Server
) -> list[str]:
    return [
        "run.steps=100000", "eval.benchmarks=[]", "checkpoint.every_steps=10",
        "checkpoint.keep=1000", "sampling.servers.launch=0",
        f"sampling.servers.urls=[{first.url}, {second.url}]",
        f"sampling.servers.request_timeout_seconds={LIMIT_SECONDS}",
        f"reward.function={folder / 'verifier.py'}:graded", "reward.time_limit_seconds=2",
        *options.set,
    ]  # fmt: skip


def suffer(scene: Scene, fault: Callable[[Scene], dict[str, Any]], results: Path) -> None:
    """Let a fault happen, note what it cost, and let the run go on for some steps."""
    lost = scene.lost()
    row = {"fault": (fault.__doc__ or "").strip(), **fault(scene)}
    scene.wait_steps(2)
    row["lost"] = scene.lost() - lost
    scene.rows.append(row)
    print(json.dumps(row), flush=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def none(scene: Scene) -> dict[str, Any]:
    """none"""
    scene.wait_steps(3)
    return {"two steps": scene.wait_steps(2)}


def server_added(scene: Scene) -> dict[str, Any]:
    """a server comes to an address of the recipe"""
    scene.second.launch()
    scene.second.wait_until_healthy()
    return {"in use after it answers": scene.wait_use(scene.second)}


def server_killed(scene: Scene) -> dict[str, Any]:
    """a server is killed (SIGKILL)"""
    since = scene.run.steps()
    started = time.monotonic()
    scene.second.kill()
    scene.wait_steps(2, since)
    return {"two steps": time.monotonic() - started}


def server_restarted(scene: Scene) -> dict[str, Any]:
    """it is started again at the same address"""
    return server_added(scene)


def server_stopped(scene: Scene) -> dict[str, Any]:
    """a server is stopped (SIGSTOP)"""
    scene.second.signal_all(signal.SIGSTOP)
    return {"two steps": scene.wait_steps(2)}


def server_continued(scene: Scene) -> dict[str, Any]:
    """it is continued (SIGCONT)"""
    scene.wait_steps(3)
    scene.second.signal_all(signal.SIGCONT)
    started = time.monotonic()
    assert wait_for(scene.second.is_healthy, PATIENCE_SECONDS) is not None
    scene.wait_use(scene.second)
    return {"in use after the signal": time.monotonic() - started}


def collector_killed(scene: Scene) -> dict[str, Any]:
    """the collector is killed"""
    (collector,) = [
        each for each in family(scene.process)
        if any("grpo_replay.collection.collector_process" in word for word in each.cmdline())
    ]  # fmt: skip
    collector.kill()
    return {"two steps": scene.wait_steps(2)}


def verifier_stalled(scene: Scene) -> dict[str, Any]:
    """a verifier never returns (`reward.time_limit_seconds` 2)"""
    flag = scene.run.folder.parent / "stall"
    flag.touch()
    wait_for(lambda: not flag.exists(), PATIENCE_SECONDS)
    started = time.time()

    def timeouts() -> list[float]:
        groups = [each for each in scene.run.records() if isinstance(each, Group)]
        return [g.finished for g in groups if any(row.verdict == "timeout" for row in g.rows)]

    assert wait_for(timeouts, PATIENCE_SECONDS) is not None
    return {"group graded": min(timeouts()) - started}


def trainer_killed(scene: Scene) -> dict[str, Any]:
    """the trainer is killed and resumed"""
    members = family(scene.process)
    scene.process.kill()
    scene.process.wait()
    gone = wait_for(lambda: not living(members), 60)
    return {"processes gone": gone, **resumed(scene)}


def interrupted(scene: Scene) -> dict[str, Any]:
    """Ctrl-C, and resumed"""
    return asked_to_stop(scene, lambda: os.killpg(scene.process.pid, signal.SIGINT))


def terminated(scene: Scene) -> dict[str, Any]:
    """SIGTERM, and resumed"""
    return asked_to_stop(scene, scene.process.terminate)


def asked_to_stop(scene: Scene, ask: Callable[[], None]) -> dict[str, Any]:
    members = family(scene.process)
    started = time.monotonic()
    ask()
    code = scene.process.wait(PATIENCE_SECONDS)
    stopped = time.monotonic() - started
    wait_for(lambda: not living(members), 60)
    left, step = len(living(members)), scene.run.steps()
    saved = max(scene.run.checkpoints()) == step
    found = {"stopped": stopped, "exit code": code, "processes left": left, "step saved": saved}
    return found | resumed(scene)


def resumed(scene: Scene) -> dict[str, Any]:
    """Resume; the seconds until the first step beyond those done."""
    step, now, started = scene.run.steps(), time.time(), time.monotonic()
    scene.process = scene.run.start()
    alive = scene.process.poll
    wait_for(lambda: scene.run.steps_since(now) > step or alive() is not None, PATIENCE_SECONDS)
    if alive() is not None:
        raise SystemExit(f"the resumed run ended with code {alive()}: see {scene.run.log}")
    return {"next step after the command": time.monotonic() - started}


FAULTS = (
    none, server_added, server_killed, server_restarted, server_stopped, server_continued,
    collector_killed, verifier_stalled, trainer_killed, interrupted, terminated,
)  # fmt: skip


def print_table(rows: list[dict[str, Any]]) -> None:
    print("\n| fault | time | rollouts lost |\n|---|---|---|")
    for row in rows:
        times = [
            f"{name}: {value:.1f} s" if isinstance(value, float) else f"{name}: {value}"
            for name, value in row.items()
            if name not in ("fault", "lost")
        ]
        print(f"| {row['fault']} | {'; '.join(times)} | {row['lost']} |")


if __name__ == "__main__":
    sys.exit(main())
