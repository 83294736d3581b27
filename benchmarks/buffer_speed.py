"""Seconds to insert 1,024 rollouts, evict as many, and draw 1,024, beside other buffers.

    pip install torchrl cpprb        # optional: peers that are missing are left out
    python benchmarks/buffer_speed.py --stored 30000 1000000

Same work for all: a buffer filled to `--stored` with rollouts of 64 completion tokens (ids, two
log-probs each), priorities |A| of 32 groups of 32, exponent 0.5; then one step at a time. Medians
over `--repeats` steps of CPU milliseconds of one thread, which other programs disturb less than
they do the clock; each contender has a process of its own. What the contenders do differently is
said in docs/performance.md.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay import ReplayBuffer
from grpo_replay.types import Rollout

BATCH, GROUP, TOKENS, PROMPT_TOKENS, EXPONENT = 1024, 32, 64, 16, 0.5


def advantages(step: int) -> np.ndarray:
    """|A| of BATCH rollouts in groups with 1 to GROUP - 1 right answers."""
    right = np.repeat(1 + (np.arange(BATCH // GROUP) + step) % (GROUP - 1), GROUP)
    correct = np.tile(np.arange(GROUP), BATCH // GROUP) < right
    return np.where(correct, np.sqrt((GROUP - right) / right), np.sqrt(right / (GROUP - right)))


def make_rollouts(step: int) -> list[Rollout]:
    return [
        Rollout(
            rollout_id=BATCH * step + i, group_id=(BATCH * step + i) // GROUP, prompt_id="p",
            completion_index=i % GROUP, birth_step=step, policy_version=step,
            policy_version_end=step, prompt_token_ids=np.zeros(PROMPT_TOKENS, np.int32),
            completion_token_ids=np.zeros(TOKENS, np.int32), completion_text="",
            behavior_logprobs=np.zeros(TOKENS, np.float32),
            sampler_logprobs=np.zeros(TOKENS, np.float32), reward=1.0,
            advantage=float(np.float32(advantage)), group_reward_mean=0.0, group_reward_std=1.0,
            group_correct=1, finish_reason="stop", verdict="correct", kept=True,
        )
        for i, advantage in enumerate(advantages(step))
    ]  # fmt: skip


class Ours:
    def __init__(self, stored: int, with_replacement: bool) -> None:
        settings = ReplaySection(
            capacity_rollouts=stored + BATCH, max_age_steps=stored // BATCH,
            priority_exponent=EXPONENT, with_replacement=with_replacement,
        )  # fmt: skip
        self.buffer = ReplayBuffer(settings, GROUP)
        self.rng = np.random.default_rng(0)

    prepare = staticmethod(make_rollouts)

    def insert(self, rollouts: list[Rollout], step: int) -> None:
        self.buffer.insert(rollouts, step)

    def evict(self, step: int) -> None:
        self.buffer.evict(step + 1)

    def draw(self, step: int) -> int:
        return len(self.buffer.draw(BATCH, step + 1, self.rng).rollouts)


def columns(step: int) -> dict[str, np.ndarray]:
    """The same rollouts as padded columns, which is what the peers store."""
    return {
        "prompt_token_ids": np.zeros((BATCH, PROMPT_TOKENS), np.int32),
        "completion_token_ids": np.zeros((BATCH, TOKENS), np.int32),
        "behavior_logprobs": np.zeros((BATCH, TOKENS), np.float32),
        "sampler_logprobs": np.zeros((BATCH, TOKENS), np.float32),
        "advantage": advantages(step).astype(np.float32)[:, None],
        "birth_step": np.full((BATCH, 1), step, np.int64),
    }


class Ring:
    """A peer of fixed capacity: eviction is overwriting, draws are with replacement."""

    def evict(self, step: int) -> None: ...


class TorchRL(Ring):
    def __init__(self, stored: int) -> None:
        # torchrl's extension is built against one torch; bound lazily, what another torch lacks
        # (autograd functions, which a buffer never calls) does not matter.
        sys.setdlopenflags(os.RTLD_LAZY)
        from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

        self.buffer = TensorDictPrioritizedReplayBuffer(
            alpha=EXPONENT, beta=0.0, eps=1e-6, storage=LazyTensorStorage(stored),
            priority_key="priority", batch_size=BATCH,
        )  # fmt: skip

    def prepare(self, step: int) -> Any:
        import torch
        from tensordict import TensorDict

        tensors = {name: torch.from_numpy(array) for name, array in columns(step).items()}
        tensors["priority"] = tensors["advantage"][:, 0].clone()
        return TensorDict(tensors, batch_size=[BATCH])

    def insert(self, batch: Any, step: int) -> None:
        self.buffer.extend(batch)

    def draw(self, step: int) -> int:
        return len(self.buffer.sample())


class Cpprb(Ring):
    def __init__(self, stored: int) -> None:
        from cpprb import PrioritizedReplayBuffer

        layout = {
            name: {"shape": array.shape[1:], "dtype": array.dtype}
            for name, array in columns(0).items()
        }
        self.buffer = PrioritizedReplayBuffer(stored, layout, alpha=EXPONENT, eps=1e-6)

    prepare = staticmethod(columns)

    def insert(self, batch: dict[str, np.ndarray], step: int) -> None:
        self.buffer.add(**batch, priorities=batch["advantage"][:, 0])

    def draw(self, step: int) -> int:
        return len(self.buffer.sample(BATCH, beta=0.0)["indexes"])


CONTENDERS: dict[str, Callable[[int], Any]] = {
    "grpo-replay, without replacement": lambda stored: Ours(stored, with_replacement=False),
    "grpo-replay, with replacement": lambda stored: Ours(stored, with_replacement=True),
    "torchrl TensorDictPrioritizedReplayBuffer": TorchRL,
    "cpprb PrioritizedReplayBuffer": Cpprb,
}


def measure(name: str, stored: int, repeats: int) -> dict[str, float]:
    """Medians in milliseconds, after filling, and the MiB that the full buffer took; in this
    process. Empty if the contender is not installed."""
    try:
        CONTENDERS[name](BATCH)  # the memory of what it imports does not count
    except ModuleNotFoundError:
        return {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contender = CONTENDERS[name](stored)
    steps = stored // BATCH
    for step in range(1, steps + 1):
        contender.insert(contender.prepare(step), step)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    times = []
    for step in range(steps + 1, steps + 1 + repeats):
        batch = contender.prepare(step)
        marks = [time.process_time()]
        contender.insert(batch, step)
        marks.append(time.process_time())
        contender.evict(step)
        marks.append(time.process_time())
        assert contender.draw(step) == BATCH
        marks.append(time.process_time())
        times.append([*np.diff(marks), marks[-1] - marks[0]])
    insert, evict, draw, together = (1e3 * statistics.median(each) for each in zip(*times))
    best = 1e3 * min(each[-1] for each in times)
    return {"insert": insert, "evict": evict, "draw": draw, "all": together, "best": best,
            "memory": memory}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stored", type=int, nargs="+", default=[30_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.stored[0], options.repeats)))
        return
    print("| stored | buffer | insert | evict | draw | all | best | memory |")
    print("|---|---|---|---|---|---|---|---|")
    for stored in options.stored:
        for name in CONTENDERS:
            command = [sys.executable, __file__, "--stored", str(stored), "--one", name]
            command += ["--repeats", str(options.repeats)]
            one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
            output = subprocess.check_output(command, stderr=subprocess.DEVNULL, env=one_thread)
            found = json.loads(output.splitlines()[-1])
            if not found:
                print(f"{name}: not installed, left out", file=sys.stderr)
                continue
            memory = found.pop("memory")
            times = " | ".join(f"{each:.2f}" for each in found.values())
            print(f"| {stored:,} | {name} | {times} | {memory:,.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
