"""The tiny task in TRL with and without replay, beside the same two runs of this package's trainer.

    pip install trl==1.16.0                                # in an environment of its own
    python benchmarks/tiny_replay_in_trl.py --json runs/tiny_in_trl.json

All arms have the settings of recipes/tiny.yaml at equal generated rollouts and updates: 16 prompts
of 8 completions a step, two updates, one learning rate, AdamW, the clipped token-mean loss; replay
has ratio 1, age limit 4 and 20 steps of warm-up. Arms of one seed share their training problems,
but not their random numbers between trainers. A run is a process of its own; finished ones are in
the file and are not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from tiny_against_trl import accuracy, grade, task_of

ARMS = ("trl", "trl-replay", "ours", "ours-replay")
RATE, PROMPTS, GROUP, UPDATES, LONGEST = 7e-5, 16, 8, 2, 20
REPLAY = {"ratio": 1.0, "max_age_steps": 4, "warmup_steps": 20}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44, 45, 46])
    parser.add_argument("--json", type=Path, required=True, help="results, as they come")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def train_here(arm: str, seed: int, steps: int, folder: Path) -> Path:
    """The path of the trained model."""
    from grpo_replay.recipe import load_recipe

    preset = "ours" if arm.endswith("replay") else "grpo"
    if arm.startswith("trl"):
        return _train_in_trl(preset, seed, steps, folder)
    from grpo_replay.training import Observer
    from grpo_replay.training.run import run_training

    recipe = load_recipe("tiny", [
        f"replay.preset={preset}", "replay.drop_zero_variance=true",
        "reward.function=tiny_against_trl:grade", "reward.workers=1", "tracking.report_to=[]",
        "eval.benchmarks=[]", f"run.steps={steps}", f"run.seed={seed}",
        f"checkpoint.every_steps={steps}",
    ])  # fmt: skip
    run_training(recipe, folder / "run", False, Observer())
    return folder / "run" / "checkpoints" / f"step_{steps:06d}" / "model"


def _train_in_trl(preset: str, seed: int, steps: int, folder: Path) -> Path:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    import grpo_replay
    from grpo_replay import ReplayConfig
    from grpo_replay.integrations.trl import ReplayGRPOTrainer
    from grpo_replay.tiny.problems import PROMPT_TEMPLATE, train_problems

    torch.set_num_threads(1)
    base = Path(grpo_replay.__file__).parent / "tiny" / "base"
    rows = [
        {"prompt": PROMPT_TEMPLATE.format(problem=row["problem"]), "answer": str(row["answer"])}
        for row in train_problems(seed)
    ]

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [grade(text, gold, {}) for text, gold in zip(completions, answer, strict=True)]

    config = GRPOConfig(
        output_dir=str(folder / "run"), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        logging_steps=UPDATES * steps, seed=seed, max_steps=UPDATES * steps, save_strategy="no",
        gradient_checkpointing=False, per_device_train_batch_size=PROMPTS * GROUP // UPDATES,
        gradient_accumulation_steps=1, steps_per_generation=UPDATES, num_generations=GROUP,
        max_completion_length=LONGEST, temperature=1.0, top_p=1.0, top_k=0, beta=0.0,
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28, delta=10.0, learning_rate=RATE,
        adam_beta2=0.99, weight_decay=0.01, lr_scheduler_type="constant", warmup_steps=0,
        max_grad_norm=1.0, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = ReplayGRPOTrainer(
        str(base), reward, config, Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(base),
        replay=ReplayConfig.preset(preset, **REPLAY),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return folder / "model"


def run_apart(arm: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run in a process of its own: arm, seed, steps, held-out accuracy."""
    words = [sys.executable, __file__, "--arm", arm, "--seeds", str(seed), "--steps", str(steps)]
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": here, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    done = subprocess.run(
        [*words, "--folder", str(folder), "--json", "-"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{arm} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return {"arm": arm, "seed": seed, "steps": steps, "accuracy": float(done.stdout.split()[-1])}


def report(runs: list[dict[str, Any]]) -> None:
    found = {(run["arm"], run["seed"]): 100 * run["accuracy"] for run in runs}
    for trainer in ("trl", "ours"):
        pairs = [
            (seed, found[trainer, seed], found[f"{trainer}-replay", seed])
            for arm, seed in sorted(found)
            if arm == trainer and (f"{trainer}-replay", seed) in found
        ]
        for seed, without, with_replay in pairs:
            gain = with_replay - without
            print(f"{trainer:<5} seed {seed}  {without:.1f}  {with_replay:.1f}  {gain:+.1f}")
        gains = [with_replay - without for _, without, with_replay in pairs]
        if len(gains) > 1:
            error = statistics.stdev(gains) / len(gains) ** 0.5
            ahead = sum(gain > 0 for gain in gains)
            print(f"{trainer:<5} mean {statistics.mean(gains):+.2f} ± {error:.2f} (standard error "
                  f"over seeds), {ahead} of {len(gains)} ahead")  # fmt: skip


def main() -> None:
    options = parse_options()
    if options.arm:
        model = train_here(options.arm, options.seeds[0], options.steps, options.folder)
        print(accuracy(model, task_of(None)))
        return
    runs = json.loads(options.json.read_text()) if options.json.exists() else []
    done = {(run["arm"], run["seed"], run["steps"]) for run in runs}
    for arms in (ARMS[:2], ARMS[2:]):
        for seed, arm in product(options.seeds, arms):
            if (arm, seed, options.steps) not in done:
                with tempfile.TemporaryDirectory() as folder:
                    runs.append(run_apart(arm, seed, options.steps, Path(folder)))
                options.json.write_text(json.dumps(runs, indent=1))
    report([run for run in runs if run["steps"] == options.steps])


if __name__ == "__main__":
    main()
