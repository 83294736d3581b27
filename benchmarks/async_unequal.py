"""Two servers, one of them slow: what is dropped, and does dropping favour short answers?

    python benchmarks/async_unequal.py [--recipe tiny-async] [--steps 40] [--slow-share 0.25]

The slow server runs for --slow-share of the time only: it is stopped (SIGSTOP) and continued
(SIGCONT) five times a second. For every setting one run with equal and one with unequal servers.
Prints how many rollouts with a signal were dropped, as stale or straddling, and the mean length of
the completions dropped, kept and generated.
"""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from async_parts.run_process import RunProcess, balances
from async_parts.servers import Server, servers

from grpo_replay.lab.verification.verify import verify_run

PERIOD_SECONDS = 0.2
SETTINGS = {
    "straddlers kept": [],
    "straddlers dropped": ["sampling.collection.straddlers=drop"],
    "straddlers kept, `max_age_steps` 1": ["replay.max_age_steps=1"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="tiny-async")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--slow-share", type=float, default=0.25)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp(prefix="async-unequal-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with servers(options.recipe, folder, 2) as pair:
        for name, settings in SETTINGS.items():
            for unequal in (False, True):
                run = RunProcess(
                    options.recipe, folder / f"run-{len(rows)}",
                    [
                        f"run.steps={options.steps}", "eval.benchmarks=[]",
                        "sampling.servers.launch=0",
                        f"sampling.servers.urls=[{pair[0].url}, {pair[1].url}]",
                        *options.set, *settings,
                    ],
                )  # fmt: skip
                row = one_run(run, pair, options.slow_share if unequal else 1.0)
                rows.append({"setting": name, "servers": "unequal" if unequal else "equal", **row})
                print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    return int(any(row["problems"] for row in rows))


def one_run(run: RunProcess, pair: list[Server], share: float) -> dict[str, Any]:
    before = [server.generated_tokens() for server in pair]
    with throttled(pair[1], share):
        code = run.start().wait()
    if code != 0:
        raise SystemExit(f"the run ended with code {code}: see {run.log}")
    tokens = [server.generated_tokens() - b for server, b in zip(pair, before, strict=True)]
    return {"share of the slow": tokens[1] / sum(tokens), **lengths(run), **shown_by(run)}


@contextlib.contextmanager
def throttled(server: Server, share: float) -> Iterator[None]:
    """The server runs for a share of the time."""
    over, processes = threading.Event(), server.processes()

    def send(number: signal.Signals) -> None:
        for process in processes:
            process.send_signal(number)

    def alternate() -> None:
        while not over.wait(PERIOD_SECONDS * share):
            send(signal.SIGSTOP)
            over.wait(PERIOD_SECONDS * (1 - share))
            send(signal.SIGCONT)

    thread = threading.Thread(target=alternate, daemon=True)
    try:
        if share < 1:
            thread.start()
        yield
    finally:
        over.set()
        if share < 1:
            thread.join()


def lengths(run: RunProcess) -> dict[str, Any]:
    """From rollouts/: mean completion lengths, over all steps, of rollouts with a signal."""
    files = sorted((run.folder / "rollouts").glob("*.parquet"))
    names = ["kept", "group_reward_std", "completion_token_ids"]
    rows = [row for file in files for row in pq.read_table(file, columns=names).to_pylist()]
    signal_ = [row for row in rows if row["group_reward_std"] > 0]

    def mean(chosen: list[dict[str, Any]]) -> float | None:
        return float(np.mean([len(r["completion_token_ids"]) for r in chosen])) if chosen else None

    dropped = [row for row in signal_ if not row["kept"]]
    return {
        "with a signal": len(signal_),
        "dropped": len(dropped) / len(signal_),
        "length generated": mean(signal_),
        "length kept": mean([row for row in signal_ if row["kept"]]),
        "length dropped": mean(dropped),
        "error": standard_error(dropped),
    }


def standard_error(rows: list[dict[str, Any]]) -> float | None:
    """Of the mean length."""
    values = [len(row["completion_token_ids"]) for row in rows]
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def shown_by(run: RunProcess) -> dict[str, Any]:
    """What the run's own metrics say."""
    lines = run.metrics()
    report = verify_run(run.folder)
    problems = [line["step"] for line in lines if not balances(line)]
    problems += [check.name for check in report.checks if not check.passed]

    def mean(name: str) -> float | None:
        values = [line[name] for line in lines if line[name] is not None]
        return float(np.mean(values)) if values else None

    generated = lines[-1]["ledger/generated_rollouts"]
    return {
        "step_time": mean("step_time"),
        "straddlers": sum(line["async/straddlers"] for line in lines) / generated,
        "age": mean("async/age_mean"),
        "stale": lines[-1]["ledger/stale_rollouts"],
        "cancelled": lines[-1]["ledger/cancelled_rollouts"],
        "async/kept_mean_length": mean("async/kept_mean_length"),
        "async/dropped_mean_length": mean("async/dropped_mean_length"),
        "problems": problems,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    names = (
        "setting", "servers", "tokens of the slow one", "step, s", "straddlers", "dropped",
        "length generated", "kept", "dropped", "stale", "cancelled",
    )  # fmt: skip
    print("\n| " + " | ".join(names) + " |")
    print("|---" * 11 + "|")
    for row in rows:
        dropped = "–" if row["length dropped"] is None else (
            f"{row['length dropped']:.2f} ± {row['error'] or 0:.2f}"
        )  # fmt: skip
        print(
            f"| {row['setting']} | {row['servers']} | {row['share of the slow']:.0%} | "
            f"{row['step_time']:.2f} | {row['straddlers']:.1%} | {row['dropped']:.1%} | "
            f"{row['length generated']:.2f} | {row['length kept']:.2f} | {dropped} | "
            f"{row['stale']} | {row['cancelled']} |"
        )


if __name__ == "__main__":
    sys.exit(main())
