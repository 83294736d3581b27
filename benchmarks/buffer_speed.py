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
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from grpo_replay.recipe import ReplaySection
from grpo_replay.replay import ReplayBuffer
from grpo_replay.types import Rollout

BATCH = 1024
GROUP = 32
TOKENS = 64
PROMPT_TOKENS = 16
EXPONENT = 0.5

Timed = dict[str, float]


def advantages(step: int) -> np.ndarray:
    """|A| of BATCH rollouts in groups with 1 to GROUP - 1 right answers."""
    right = np.repeat(1 + (np.arange(BATCH // GROUP) + step) % (GROUP - 1), GROUP)
    correct = np.tile(np.arange(GROUP), BATCH // GROUP) < right
    return np.where(correct, np.sqrt((GROUP - right) / right), np.sqrt(right / (GROUP - right)))


def make_rollouts(step: int) -> list[Rollout]:
    return [
        Rollout(
            rollout_id=BATCH * step + i,
            group_id=(BATCH * step + i) // GROUP,
            prompt_id="p",
            completion_index=i % GROUP,
            birth_step=step,
            policy_version=step,
            policy_version_end=step,
            prompt_token_ids=np.zeros(PROMPT_TOKENS, np.int32),
            completion_token_ids=np.zeros(TOKENS, np.int32),
            completion_text="",
            behavior_logprobs=np.zeros(TOKENS, np.float32),
            sampler_logprobs=np.zeros(TOKENS, np.float32),
            reward=1.0,
            advantage=float(np.float32(advantage)),
            group_reward_mean=0.0,
            group_reward_std=1.0,
            group_correct=1,
            finish_reason="stop",
            verdict="correct",
            kept=True,
        )
        for i, advantage in enumerate(advantages(step))
    ]


class Ours:
    def __init__(self, stored: int, with_replacement: bool) -> None:
        settings = ReplaySection(
            capacity_rollouts=stored + BATCH,
            max_age_steps=stored // BATCH,
            priority_exponent=EXPONENT,
            with_replacement=with_replacement,
        )
        self.buffer = ReplayBuffer(settings, GROUP)
        self.rng = np.random.default_rng(0)
        self.name = f"grpo-replay, {'with' if with_replacement else 'without'} replacement"

    def prepare(self, step: int) -> list[Rollout]:
        return make_rollouts(step)

    def insert(self, rollouts: list[Rollout], step: int) -> None:
        self.buffer.insert(rollouts, step)

    def evict(self, step: int) -> None:
        self.buffer.evict(step + 1)

    def draw(self, step: int) -> None:
        assert len(self.buffer.draw(BATCH, step + 1, self.rng).rollouts) == BATCH


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


class TorchRL:
    """Ring of fixed capacity; eviction is overwriting, draws are with replacement."""

    def __init__(self, stored: int) -> None:
        # torchrl's extension is built against one torch; bound lazily, what another torch lacks
        # (autograd functions, which a buffer never calls) does not matter.
        sys.setdlopenflags(os.RTLD_LAZY)
        from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

        self.buffer = TensorDictPrioritizedReplayBuffer(
            alpha=EXPONENT,
            beta=0.0,
            eps=1e-6,
            storage=LazyTensorStorage(stored),
            priority_key="priority",
            batch_size=BATCH,
        )
        self.name = "torchrl TensorDictPrioritizedReplayBuffer"

    def prepare(self, step: int) -> object:
        import torch
        from tensordict import TensorDict

        tensors = {name: torch.from_numpy(array) for name, array in columns(step).items()}
        tensors["priority"] = tensors["advantage"][:, 0].clone()
        return TensorDict(tensors, batch_size=[BATCH])

    def insert(self, batch: object, step: int) -> None:
        self.buffer.extend(batch)

    def evict(self, step: int) -> None:
        pass

    def draw(self, step: int) -> None:
        assert len(self.buffer.sample()) == BATCH


class Cpprb:
    """Ring of fixed capacity in C++; eviction is overwriting, draws are with replacement."""

    def __init__(self, stored: int) -> None:
        from cpprb import PrioritizedReplayBuffer

        layout = {
            name: {"shape": array.shape[1:], "dtype": array.dtype}
            for name, array in columns(0).items()
        }
        self.buffer = PrioritizedReplayBuffer(stored, layout, alpha=EXPONENT, eps=1e-6)
        self.name = "cpprb PrioritizedReplayBuffer"

    def prepare(self, step: int) -> dict[str, np.ndarray]:
        return columns(step)

    def insert(self, batch: dict[str, np.ndarray], step: int) -> None:
        self.buffer.add(**batch, priorities=batch["advantage"][:, 0])

    def evict(self, step: int) -> None:
        pass

    def draw(self, step: int) -> None:
        assert len(self.buffer.sample(BATCH, beta=0.0)["indexes"]) == BATCH


def measure(make: Callable[[], object], stored: int, repeats: int) -> dict[str, object]:
    """Medians in milliseconds, after filling, and the memory that the full buffer took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contender = make()
    steps = stored // BATCH
    for step in range(1, steps + 1):
        contender.insert(contender.prepare(step), step)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    times: dict[str, list[float]] = {"insert": [], "evict": [], "draw": [], "all": []}
    for step in range(steps + 1, steps + 1 + repeats):
        batch = contender.prepare(step)
        taken = {
            "insert": seconds(lambda batch=batch, step=step: contender.insert(batch, step)),
            "evict": seconds(lambda step=step: contender.evict(step)),
            "draw": seconds(lambda step=step: contender.draw(step)),
        }
        for name, value in {**taken, "all": sum(taken.values())}.items():
            times[name].append(1e3 * value)
    medians = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    best = min(times["all"])
    return {"name": contender.name, "stored": stored, **medians, "best_ms": best,
            "memory_mib": memory / 1024}  # fmt: skip


def seconds(action: Callable[[], None]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def contenders(stored: int) -> list[Callable[[], object]]:
    makers: list[Callable[[], object]] = [
        lambda: Ours(stored, with_replacement=False),
        lambda: Ours(stored, with_replacement=True),
    ]
    peers = {"torchrl": TorchRL, "cpprb": Cpprb}
    for module, peer in peers.items():
        if importlib.util.find_spec(module):
            makers.append(lambda peer=peer: peer(stored))
        else:
            print(f"{module} is not installed: left out", file=sys.stderr)
    return makers


def run_one(stored: int, index: int, repeats: int) -> None:
    """One contender in this process, so that memory is its own."""
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)
    print(json.dumps(measure(contenders(stored)[index], stored, repeats)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stored", type=int, nargs="+", default=[30_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        run_one(options.stored[0], options.one, options.repeats)
        return
    print("| stored | buffer | insert | evict | draw | all | best | memory |")
    print("|---|---|---|---|---|---|---|---|")
    for stored in options.stored:
        for index in range(len(contenders(stored))):
            command = [sys.executable, __file__, "--stored", str(stored), "--one", str(index)]
            command += ["--repeats", str(options.repeats)]
            output = subprocess.check_output(command, stderr=subprocess.DEVNULL)
            row = json.loads(output.splitlines()[-1])
            print(
                f"| {stored:,} | {row['name']} | {row['insert_ms']:.2f} | {row['evict_ms']:.2f} | "
                f"{row['draw_ms']:.2f} | {row['all_ms']:.2f} | {row['best_ms']:.2f} | "
                f"{row['memory_mib']:,.0f} MiB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
