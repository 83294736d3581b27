"""How often does docs/replay_with_tools.py collapse at a high learning rate, and why with replay?

    python benchmarks/tools_collapse.py runs/tools ours 1e-3 1-20    # again: what is missing
    python benchmarks/tools_collapse.py runs/tools --record        # docs/records/tools-collapse.csv

Protocol. Seeds 1 to 20 of every arm, 60 steps, at 1e-3 `plain` (TRL's own trainer), `ours` (as in
the script) and `uniform` (the same with `priority: uniform`), at 3e-4 (the script's rate) and 2e-3
`plain` and `ours`. A run has collapsed if no game of its last ten steps was won; it has dipped if
after the eighth step fewer than three quarters of a step's games were won, and it did not collapse.
Arms are compared by Fisher's exact test of collapses and dips together.

Written after seeds 1 to 9 of `plain` and `ours` at 1e-3: one collapse and three dips of `ours`,
none of `plain`. In these runs nearly all games are won, so that a group with a signal has one
failure, of advantage -2.5, among successes of 0.35: a fresh group has mean 0, but draws by
|advantage| take the failures, and the rollouts drawn have a mean near -0.3. The hypothesis is that
this push away from all that was sampled, without a push towards anything, is what makes the policy
write nonsense, and not that the rollouts are old. Draws of `uniform` are as old and have mean 0: it
should collapse and dip as seldom as `plain`. If it does so as often as `ours`, the hypothesis is
wrong.

Seen in the files of the collapse, seed 6 of `ours` at 1e-3, and in P(<call> | <call>) after each of
its updates: the first wrong update is 75, in step 38. Until then that probability is 3.4e-4; one
game that says `<call>` twice is won, fresh (ratio 1), with advantage 0.35, in a batch of 16. It is
6.2e-4, 1.3e-3, 2.7e-3, 7.0e-3, 0.055, 0.13, 0.99 after updates 75 to 81, and 0.999 after 82, whose
gradient has norm 43. Replay did not draw such a game before step 40, where the clip left the one it
drew, of ratio 182, without gradient; fresh games that win in the same way, and the momentum of
AdamW, carry it on. From step 43 on every game is `<call>` to the end of the length. No group has
two rewards then, so nothing is trained on, nothing is drawn, and the policy cannot come back,
although 56 rollouts are stored. The dip of seed 4 is the same token: 0.013 after update 22, 0.97
after 23.

Outcome (docs/records/settings.md): the hypothesis is wrong, and replay does not collapse more often
than no replay.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy.stats import fisher_exact

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "records" / "tools-collapse.csv"
ARMS = ("plain", "ours", "uniform")
LAST_STEPS, FIRST_STEPS, DIP = 10, 8, 0.75


def train(folder: Path, arm: str, rate: float, seed: int) -> None:
    """One run, with a line of JSON for each update beside it."""
    sys.path.insert(0, str(ROOT / "docs"))
    import replay_with_tools as script

    class EveryUpdate(script.TrainerCallback):
        def __init__(self, _: int) -> None:
            self.file = beside(folder, ".part").open("w")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            line = {"update": state.global_step, **(logs or {})}
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    class Uniform:
        @staticmethod
        def of(preset: str, **settings: Any) -> Any:
            return of_settings(preset, **settings, priority="uniform")

    of_settings = script.ReplayConfig.of
    if arm == "uniform":
        script.ReplayConfig = Uniform
    script.SETTINGS |= {"learning_rate": rate, "logging_steps": 1}
    script.Curve = EveryUpdate
    plain = ["--plain"] if arm == "plain" else []
    sys.argv = [sys.argv[0], str(folder), "--seed", str(seed), *plain]
    script.main()
    beside(folder, ".part").rename(beside(folder, ".jsonl"))


def beside(folder: Path, suffix: str) -> Path:
    """A file of a run, whose name has dots."""
    return folder.with_name(folder.name + suffix)


def row_of(log: Path) -> dict[str, str]:
    """What became of a run."""
    folder = log.with_name(log.name.removesuffix(".jsonl"))
    arm, rate, seed = folder.name.split("_")
    won = [line["reward"] for line in map(json.loads, log.open()) if "reward" in line]
    return {
        "arm": arm, "rate": rate, "seed": seed, "steps": str(len(won)),
        "last": f"{np.mean(won[-LAST_STEPS:]):.4f}", "outcome": outcome(won),
        "lowest": f"{min(won[FIRST_STEPS:]):.4f}",
        "dips": str(sum(share < DIP for share in won[FIRST_STEPS:])),
        **{name: f"{value:.4f}" for name, value in drawn(folder).items()},
    }  # fmt: skip


def outcome(won: list[float]) -> str:
    """`collapse`, `dip` or empty, of the share of games won in each step."""
    if max(won[-LAST_STEPS:]) == 0:
        return "collapse"
    return "dip" if min(won[FIRST_STEPS:]) < DIP else ""


def drawn(run: Path) -> Mapping[str, float]:
    """Mean advantage and age of all rollouts drawn after the first steps; 0 without replay."""
    advantage: dict[int, float] = {}
    for file in sorted((run / "rollouts").glob("*.parquet")):
        table = pq.read_table(file, columns=["rollout_id", "advantage"]).to_pydict()
        advantage |= dict(zip(table["rollout_id"], table["advantage"], strict=True))
    files = sorted((run / "draws").glob("*.parquet"))[FIRST_STEPS:]
    tables = [pq.read_table(file, columns=["rollout_id", "age_steps"]).to_pydict()
              for file in files]  # fmt: skip
    ids = [each for table in tables for each in table["rollout_id"]]
    ages = [each for table in tables for each in table["age_steps"]]
    if not ids:
        return {"drawn_advantage": 0.0, "drawn_age": 0.0}
    mean = float(np.mean([advantage[each] for each in ids]))
    return {"drawn_advantage": mean, "drawn_age": float(np.mean(ages))}


def record(folder: Path) -> None:
    """Write the record of all finished runs of a folder, and print its summary."""
    rows = sorted(map(row_of, folder.glob("*.jsonl")), key=lambda row: (
        float(row["rate"]), ARMS.index(row["arm"]), int(row["seed"])))  # fmt: skip
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(summary(rows))


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """Runs of every rate and arm that ended unsteadily, and Fisher's p between arms."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        counts.setdefault((row["rate"], row["arm"]), Counter())[row["outcome"]] += 1
    lines = ["| rate | arm | runs | collapsed | dipped | p against the arms above |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for (rate, arm), found in counts.items():
        above = [other for other in ARMS[: ARMS.index(arm)] if (rate, other) in counts]
        tests = [f"{other} {unlike(found, counts[rate, other]):.3g}" for other in above]
        lines.append(
            f"| {rate} | `{arm}` | {found.total()} | {found['collapse']} | {found['dip']} | "
            f"{', '.join(tests)} |"
        )
    return "\n".join(lines)


def unlike(one: Counter[str], other: Counter[str]) -> float:
    """Fisher's two-sided p of collapses and dips together."""
    table = [[each["collapse"] + each["dip"], each[""]] for each in (one, other)]
    return float(fisher_exact(table).pvalue)


def seeds_of(words: str) -> Iterator[int]:
    first, _, last = words.partition("-")
    yield from range(int(first), int(last or first) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("arm", nargs="?", choices=ARMS)
    parser.add_argument("rate", nargs="?", type=float)
    parser.add_argument(
        "seeds", nargs="?", help="1-20, or a single one, which runs in this process"
    )
    parser.add_argument("--record", action="store_true", help="write the record, run nothing")
    given = parser.parse_args()
    if given.record:
        record(given.folder)
        return
    if given.seeds is None:
        parser.error("name an arm, a rate and seeds, or --record")
    given.folder.mkdir(parents=True, exist_ok=True)
    for seed in (seeds := list(seeds_of(given.seeds))):
        run = given.folder / f"{given.arm}_{given.rate:g}_{seed}"
        if beside(run, ".jsonl").exists():
            continue
        if len(seeds) == 1:
            train(run, given.arm, given.rate, seed)
        else:
            words = [sys.executable, __file__, str(given.folder), given.arm, str(given.rate)]
            subprocess.run([*words, str(seed)], check=True)


if __name__ == "__main__":
    main()
