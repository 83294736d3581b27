"""Seconds of the stages of a training step per thousand tokens, over the length of completions.

    python benchmarks/growth.py                      # 64 to 2,048 tokens, some minutes
    python benchmarks/growth.py --lengths 64 2048 --ranks 2

Real runs of `grpo-replay train`: a random Qwen3 (two layers of 128, 4,096 tokens) in fp32 with one
thread per rank, sampled with transformers, graded by the parity of the text, with replay. A random
model ends few completions before the limit. Seconds per token that stay level are growth in
proportion to the length; only attention grows with its square.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 4096,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
STAGES = ("generation", "reward", "logprob", "training", "sync", "other")
STEPS, NOT_TIMED = 5, 2


def parity_reward(completion: str, answer: str, row: dict[str, Any]) -> float:
    """Mixed groups from a random model."""
    return 1.0 if sum(completion.encode("utf-8", "surrogatepass")) % 2 else -1.0


def seconds_per_kilotoken(length: int, options: argparse.Namespace) -> dict[str, float]:
    """Of each stage, per thousand completion tokens generated (trained on: training)."""
    settings = [
        "model.path=builtin:qwen3-0.6b", "model.random_init=true",
        "model.tokenizer=builtin:bytes", f"model.config_overrides={json.dumps(SHAPE)}",
        "reward.function=growth:parity_reward", f"sampling.max_completion_length={length}",
        f"sampling.prompts_per_step={options.rollouts // 8}", "sampling.group_size=8",
        "replay.warmup_steps=1", "eval.benchmarks=[]", "tracking.report_to=[]",
        f"run.steps={STEPS}", f"engine.num_processes={options.ranks}",
    ]  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "grpo_replay", "train", "tiny", *words, "--output-dir", run],
            env=os.environ | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(done.stderr[-3000:])
        lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][NOT_TIMED:]
    return {
        "tokens": statistics.mean(step["completions/mean_length"] for step in steps),
        "padding": statistics.median(step["padding_share"] for step in steps),
        **{stage: 1e3 * per_token(steps, stage) for stage in STAGES},
    }


def per_token(steps: list[dict[str, Any]], stage: str) -> float:
    counted = "cost/trained_tokens" if stage == "training" else "cost/generated_tokens"
    return statistics.median(step[f"cost/{stage}_seconds"] / step[counted] for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--rollouts", type=int, default=32, help="a step")
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    print("seconds per thousand completion tokens")
    print(f"| longest | mean | padding | {' | '.join(STAGES)} |")
    for length in options.lengths:
        found = seconds_per_kilotoken(length, options)
        stages = " | ".join(f"{found[stage]:.4f}" for stage in STAGES)
        print(f"| {length:,} | {found['tokens']:.0f} | {100 * found['padding']:.0f} % | {stages} |",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
