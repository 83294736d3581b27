"""Seconds of the stages of a training step per thousand tokens, over the length of completions and
over the ranks.

    python benchmarks/growth.py                      # 64 to 2,048 tokens, some minutes
    python benchmarks/growth.py --lengths 64 --ranks 1 2 --zero-stages 0 3 --steps 20

Real runs of training: a random Qwen3 (two layers of 128, 4,096 tokens) in fp32 with one thread per
rank, sampled with transformers, graded by the parity of the text, with replay. The work of a step
is the same on any number of ranks. A random model ends few completions before the limit. Seconds
per token that stay level are growth in proportion to the length; only attention grows with its
square. Medians of the steps, in wall seconds and in CPU seconds of rank 0, which other programs
disturb less.
"""

import argparse
import itertools
import statistics
from typing import Any

from stage_clock import ALL_STAGES, clocked_run, random_model

SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 4096,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
NOT_TIMED = 2


def timed_steps(
    length: int, ranks: int, stage: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    overrides = [
        *random_model(SHAPE), f"sampling.max_completion_length={length}",
        f"sampling.prompts_per_step={options.rollouts // 8}", "sampling.group_size=8",
        f"run.steps={options.steps}", f"engine.zero_stage={stage}",
    ]  # fmt: skip
    return clocked_run(overrides, ranks)[NOT_TIMED:]


def per_kilotoken(steps: list[dict[str, Any]], stage: str, clock: str) -> float:
    """Seconds per thousand completion tokens generated (trained on: training)."""
    counted = "cost/trained_tokens" if stage == "training" else "cost/generated_tokens"
    key = f"cost/{stage}_seconds" if clock == "wall" else f"cpu/{stage}"
    return 1e3 * statistics.median(step[key] / step[counted] for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--rollouts", type=int, default=32, help="a step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--zero-stages", nargs="+", default=["auto"])
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    print("seconds per thousand completion tokens")
    print(f"| longest | mean | padding | ranks | ZeRO | clock | {' | '.join(ALL_STAGES)} |")
    cases = itertools.product(options.lengths, options.ranks, options.zero_stages)
    for length, ranks, stage in cases:
        steps = timed_steps(length, ranks, stage, options)
        tokens = statistics.mean(step["completions/mean_length"] for step in steps)
        padding = statistics.median(step["padding_share"] for step in steps)
        for clock in ("wall", "CPU"):
            seconds = [f"{per_kilotoken(steps, each, clock):.4f}" for each in ALL_STAGES]
            print(f"| {length:,} | {tokens:.0f} | {100 * padding:.0f} % | {ranks} | {stage} | "
                  f"{clock} | {' | '.join(seconds)} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
