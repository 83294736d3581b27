"""Kill runs between their files and at random moments, resume them, and compare each with the run
that was never killed.

    python benchmarks/kills.py --kills 200 [--kinds synchronous lora …] [--results FILE]

Kinds: one rank, with evaluations, with LoRA, with packed rows, two and three ranks with sharded
weights (ZeRO-3) whose rank 0 is killed, three of which an inner one is, and two that
`--num-processes` starts, of which rank 0 is killed, or their launcher. Two kills in three are
forced: right before or after a rename, a link or a removal in the run's folder, or within a
removal, each of them in turn; of the others one in four comes while the run starts. A run is killed
up to CHAIN times, then it finishes. It survived if metrics, rollouts, draws, weights, buffer and
evaluations are those of the run that was never killed, bit for bit, `--verify` passes, and no
process was left. Ranks that no launcher watches give up after `engine.timeout_seconds`, here 60.
One line per kill goes to FILE.
"""

import argparse
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pyarrow.parquet as pq
import torch
from kill_windows import PARENT, Window
from run_processes import Forked, RunProcess, free_port, living, wait_for

from grpo_replay.errors import LaunchError
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.training.metrics import depends_on_time

CHAIN, TRIES, FORCED_SHARE, START_SHARE = 6, 3, 2 / 3, 0.25
GONE_SECONDS, LONGEST_SECONDS = 120.0, 1200.0
STEPS, EVERY = 8, 2
OVERRIDES = (
    f"run.steps={STEPS}", "sampling.prompts_per_step=4", "sampling.group_size=4",
    "replay.warmup_steps=2",
    f"checkpoint.every_steps={EVERY}", "checkpoint.keep=2", "eval.benchmarks=[]",
    "tracking.report_to=[]", "reward.workers=1", "reward.function=minerva",
)  # fmt: skip
SHARDED = ("engine.zero_stage=3", "engine.timeout_seconds=60")


@dataclass(frozen=True)
class Kind:
    """Runs on `ranks`, of which the rank `victim` is killed; with `launched`, rank 0 or the
    launcher is."""

    overrides: tuple[str, ...] = ()
    ranks: int = 1
    victim: int = 0
    launched: Literal["", "rank 0", "launcher"] = ""


KINDS = {
    "synchronous": Kind(),
    "evaluated": Kind(("eval.benchmarks=[tiny_add]", "eval.every_steps=4", "eval.samples=1")),
    "lora": Kind(("model.lora.r=4",)),
    "packed": Kind(("batch.packing=true",)),
    "two sharded ranks": Kind(SHARDED, 2),
    "three sharded ranks": Kind(SHARDED, 3),
    "an inner rank": Kind(SHARDED, 3, 1),
    "launched ranks": Kind(SHARDED, 2, launched="rank 0"),
    "their launcher": Kind(SHARDED, 2, launched="launcher"),
}


@dataclass
class Chain:
    """A run that is killed again and again."""

    kind: Kind
    run: RunProcess
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def notes(self) -> Path:
        return self.run.folder.parent / "changes"

    def window(self, label: str = "", after: bool = False, count: int = 1) -> Window:
        return Window(str(self.run.folder), str(self.notes), label, after, count)

    def start(self, window: Window) -> list[Forked]:
        """The ranks; the victim dies in the window."""
        kind, words = self.kind, self.run.words()
        if kind.ranks == 1:
            return [Forked(words, self.run.log, window)]
        if kind.launched:
            words += ["--num-processes", str(kind.ranks)]
            window = replace(window, victim=PARENT if kind.launched == "launcher" else 0)
            return [Forked(words, self.run.log, window, launches=True)]
        common = {
            "WORLD_SIZE": str(kind.ranks), "LOCAL_WORLD_SIZE": str(kind.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        ranks: dict[int, Forked] = {}
        for rank in (kind.victim, *(set(range(kind.ranks)) - {kind.victim})):
            place = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # Rank 0 alone changes files: in the window it kills the victim.
            armed = replace(window, label=window.label if rank == 0 else "")
            if kind.victim and rank == 0:
                armed = replace(armed, victim=ranks[kind.victim].pid)
            ranks[rank] = Forked(words, self.run.log, armed, place)
        return [ranks[rank] for rank in range(kind.ranks)]

    def finish(self) -> None:
        """Let it run to its end. Raises SystemExit if it fails."""
        ranks = self.start(self.window())
        codes = [rank.wait(LONGEST_SECONDS) for rank in ranks]
        if any(codes):
            raise SystemExit(f"the run failed with {codes}: see {self.run.log}")

    def suffer(self, window: Window | None, chance: random.Random, start_seconds: float) -> bool:
        """One attempt with a kill, noted in `rows`; False if it ended before the kill."""
        began, members, earlier = time.time(), [], len(self.run.metrics())
        ranks = self.start(window or self.window())
        victim = ranks[self.kind.victim]
        moment = window.name if window else self._wait(chance, victim, start_seconds)
        deadline = time.time() + LONGEST_SECONDS
        while victim.poll() is None and (window is None or time.time() < deadline):
            members = _below(ranks) or members
            if window is None:
                victim.kill()
            time.sleep(0.05)
        gone = wait_for(lambda: all(r.poll() is not None for r in ranks), GONE_SECONDS)
        wait_for(lambda: not living(members), GONE_SECONDS)
        left = len(living(members)) + sum(rank.poll() is None for rank in ranks)
        if victim.poll() is None:
            raise SystemExit(f"no end after {LONGEST_SECONDS:.0f} s: see {self.run.log}")
        codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
        lost_rank = window is not None and self.kind.launched == "rank 0"
        if codes[self.kind.victim] != (LaunchError.exit_code if lost_rank else -signal.SIGKILL):
            return False
        self.rows.append({
            "moment": moment, "forced": window is not None, "resumed_at": earlier,
            "step": len(self.run.metrics()), "seconds": round(time.time() - began, 2), "left": left,
            "gone_after": gone, "codes": codes,
        })  # fmt: skip
        return True

    def _wait(self, chance: random.Random, victim: Forked, start_seconds: float) -> str:
        """Wait for a random moment; what it was."""
        if chance.random() < START_SHARE:
            time.sleep(chance.uniform(0, start_seconds / 2))
            return "start"
        first, began = len(self.run.metrics()) // EVERY * EVERY, time.time()
        goal = min(first + chance.randint(1, 2 * EVERY - 1), STEPS - 1)
        done = self.run.steps_since
        wait_for(lambda: done(began) >= goal or victim.poll() is not None, LONGEST_SECONDS)
        time.sleep(chance.uniform(0, start_seconds / STEPS))
        return f"step {goal}"


def _below(ranks: list[Forked]) -> list[psutil.Process]:
    found = []
    for rank in ranks:
        try:
            found += psutil.Process(rank.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return found


def facts(folder: Path) -> dict[str, Any]:
    """All of a run that is not the clock's, by name."""
    found: dict[str, Any] = {}
    for number, line in enumerate((folder / "metrics.jsonl").read_text().splitlines()):
        values = json.loads(line).items()
        found[f"metrics {number}"] = {k: v for k, v in values if not depends_on_time(k)}
    tables = [*folder.glob("rollouts/*"), *folder.glob("draws/*"), *folder.glob("eval/*.parquet")]
    for path in [*tables, *folder.glob("checkpoints/step_*/buffer.parquet")]:
        found[str(path.relative_to(folder))] = pq.read_table(path).to_pydict()
    for path in folder.glob("checkpoints/step_*/*/*.safetensors"):
        found[str(path.relative_to(folder))] = path.read_bytes()
    for path in folder.glob("checkpoints/step_*/engine/**/*.pt"):
        found[str(path.relative_to(folder))] = _numbers(torch.load(path, weights_only=False))
    summary = json.loads((folder / "summary.json").read_text())
    timed = ("wall_seconds", "replay")  # the costs of replay are in seconds
    return found | {"summary": {k: v for k, v in summary.items() if k not in timed}}


def _numbers(value: Any) -> Any:
    """The tensors of an engine's file as bytes: equal if they are equal bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        # ZeRO's flat weights end in memory that was never set; the weights are in model/ too.
        named = {str(key): each for key, each in value.items() if key != "fp32_flat_groups"}
        return {key: _numbers(each) for key, each in named.items()}
    if isinstance(value, list | tuple):
        return [_numbers(each) for each in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What is missing, differs, or should not be there."""
    # Compared as text, in which NaN is equal to itself.
    names = sorted(found.keys() | expected.keys())
    return [name for name in names if repr(found.get(name)) != repr(expected.get(name))]


def campaign(name: str, kills: int, folder: Path, seed: int, results: Path) -> list[dict[str, Any]]:
    """Rows of so many kills of a kind."""
    kind, chance = KINDS[name], random.Random(f"{seed} {name}")
    never = Chain(kind, RunProcess("tiny", folder / "never/run", [*OVERRIDES, *kind.overrides]))
    began = time.time()
    never.finish()
    start_seconds, expected = time.time() - began, facts(never.run.folder)
    tried: Counter[tuple[str, bool]] = Counter()
    rows: list[dict[str, Any]] = []
    for attempts in itertools.count():
        if len(rows) >= kills:
            break
        chain = Chain(kind, RunProcess("tiny", folder / f"{attempts}/run", never.run.overrides))
        while len(chain.rows) < min(CHAIN, kills - len(rows)):
            window = None
            if chance.random() < FORCED_SHARE:
                window = next_window((never, chain), tried, chance, first=not chain.rows)
            if not chain.suffer(window, chance, start_seconds):
                break
        if not chain.rows:
            continue
        chain.finish()
        differ = differences(facts(chain.run.folder), expected)
        if kind.launched:  # ranks save where their launcher leaves them: other steps are kept
            last = f"checkpoints/step_{STEPS:06d}"
            differ = [each for each in differ if not each.startswith("checkpoints") or last in each]
        verified = verify_run(chain.run.folder).passed
        for row in chain.rows:
            row |= {"kind": name, "differ": differ[:5], "verified": verified}
            row["survived"] = not differ and verified and not row["left"]
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        rows += chain.rows
        print(f"{name}: {len(rows)} kills, {sum(row['survived'] for row in rows)} survived",
              flush=True)  # fmt: skip
    return rows


def next_window(
    seen: tuple[Chain, Chain], tried: Counter[tuple[str, bool]], chance: random.Random, first: bool
) -> Window | None:
    """A window that was tried least, among those of the run that was never killed, or, in a resumed
    attempt, of this chain too; None if all were tried TRIES times."""
    chain = seen[1]
    texts = [each.notes.read_text() for each in seen if each.notes.exists()]
    labels = {line for text in texts for line in text.splitlines()}
    windows = sorted((label, after) for label in labels for after in (False, True))
    chance.shuffle(windows)
    windows = [each for each in windows if tried[each] < TRIES]
    if not windows:
        return None
    label, after = min(windows, key=lambda each: tried[each])
    tried[label, after] += 1
    return chain.window(label, after, 1 if first else chance.randint(1, 2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="over all kinds")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    results = options.results or folder / "kills.jsonl"
    rows = []
    for number, name in enumerate(options.kinds):
        share = (options.kills + number) // len(options.kinds)
        rows += campaign(name, share, folder / str(number), options.seed, results)
    survived = sum(row["survived"] for row in rows)
    windows = {row["moment"] for row in rows if row["forced"]}
    print(f"{survived} of {len(rows)} kills survived, {len(windows)} windows between files")
    return int(survived < len(rows))


if __name__ == "__main__":
    sys.exit(main())
