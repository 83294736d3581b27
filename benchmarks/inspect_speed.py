"""How long inspect-buffer takes on large snapshots, and how much memory.

    python benchmarks/inspect_speed.py [--tokens 128] [--rollouts 30000 1000000] [--folder DIR]

Writes a snapshot of each size in row groups of 4,096 (as the trainer does), then summarises it in
a process of its own: seconds from open to summary, imports excluded, and the process's peak
memory. Targets: 30,000 rollouts in under 2 s, a million in under 20 s.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay.snapshot import SNAPSHOT_SCHEMA, SNAPSHOT_VERSION
from grpo_replay.storage.parquet import write_parquet

GROUP_SIZE = 8
PROMPTS = 40_306
CHUNK = 4096
STEPS = 60


def chunks(rollouts: int, tokens: int) -> Iterator[pa.Table]:
    """Tables of random rollouts with `tokens` completion tokens on average."""
    rng = np.random.default_rng(0)
    for start in range(0, rollouts, CHUNK):
        yield chunk(np.arange(start, min(start + CHUNK, rollouts)), rollouts, tokens, rng)


def chunk(ids: np.ndarray, rollouts: int, tokens: int, rng: np.random.Generator) -> pa.Table:
    count = len(ids)
    births = 1 + ids * STEPS // rollouts
    correct = 1 + (ids // GROUP_SIZE) % (GROUP_SIZE - 1)
    right = ids % GROUP_SIZE < correct
    advantage = np.where(
        right, np.sqrt((GROUP_SIZE - correct) / correct), -np.sqrt(correct / (GROUP_SIZE - correct))
    ).astype(np.float32)
    used = rng.poisson(0.5, count)
    last = np.where(used > 0, births + 1, 0)
    logprobs = lists(rng, count, tokens, np.float32)
    columns = {
        "rollout_id": ids,
        "group_id": ids // GROUP_SIZE,
        "prompt_id": [f"problem-{i}" for i in (ids // GROUP_SIZE) % PROMPTS],
        "completion_index": (ids % GROUP_SIZE).astype(np.int32),
        "birth_step": births,
        "policy_version": births - 1,
        "policy_version_end": births - 1,
        "prompt_token_ids": lists(rng, count, 64, np.int32),
        "completion_token_ids": lists(rng, count, tokens, np.int32),
        "behavior_logprobs": logprobs,
        "sampler_logprobs": logprobs,
        "reward": np.where(right, 1, -1).astype(np.float32),
        "advantage": advantage,
        "group_reward_mean": (2 * correct / GROUP_SIZE - 1).astype(np.float32),
        "group_reward_std": np.ones(count, np.float32),
        "group_correct": correct.astype(np.int32),
        "finish_reason": np.where(rng.random(count) < 0.05, "length", "stop"),
        "verdict": np.where(right, "correct", "incorrect"),
        "kept": np.ones(count, bool),
        "priority": np.abs(advantage).astype(np.float64) + 1e-6,
        "times_used": used.astype(np.int32),
        "last_used_step": pa.array(last, mask=used == 0),
    }
    return pa.table([columns[field.name] for field in SNAPSHOT_SCHEMA], schema=SNAPSHOT_SCHEMA)


def lists(rng: np.random.Generator, count: int, mean: int, dtype: type) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(rng.integers(mean // 2, mean * 3 // 2, count))])
    if dtype == np.int32:
        values = rng.integers(0, 151_936, offsets[-1]).astype(np.int32)
    else:
        values = -rng.exponential(0.3, offsets[-1]).astype(np.float32)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))


def write_snapshot(path: Path, rollouts: int, tokens: int) -> None:
    facts = {
        "step": STEPS,
        "group_size": GROUP_SIZE,
        "settings": ReplaySection(capacity_rollouts=rollouts, max_age_steps=STEPS).model_dump(
            mode="json"
        ),
        "evicted_by_age": 0,
        "evicted_by_capacity": 0,
        "evicted_at": [STEPS, 0],
    }
    metadata = {b"grpo_replay.buffer": json.dumps(facts).encode()}
    tables = chunks(rollouts, tokens)
    write_parquet(path, "buffer", SNAPSHOT_VERSION, SNAPSHOT_SCHEMA, tables, metadata)


def measure(path: Path) -> dict[str, float]:
    """Seconds and MiB of one summary, in this process."""
    from grpo_replay.lab.inspection.compute import summarise
    from grpo_replay.lab.inspection.source import open_source

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start, busy = time.perf_counter(), time.process_time()
    seen = summarise(open_source(path))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "rollouts": seen.occupancy.stored_rollouts,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "before_mib": before,
        "peak_mib": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128, help="mean completion tokens")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[30_000, 1_000_000])
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if absent")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    print("| rollouts | tokens each | file, MiB | summary, s | CPU, s | before, MiB | peak, MiB |")
    print("|---|---|---|---|---|---|---|")
    for rollouts in options.rollouts:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = Path(folder) / "buffer.parquet"
            write_snapshot(path, rollouts, options.tokens)
            command = [sys.executable, __file__, "--measure", str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            seen = json.loads(done.stdout)
            mib = path.stat().st_size / 2**20
            print(
                f"| {rollouts:,} | {options.tokens} | {mib:,.0f} | {seen['seconds']:.2f} | "
                f"{seen['cpu_seconds']:.2f} | {seen['before_mib']:.0f} | {seen['peak_mib']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
