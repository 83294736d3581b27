"""Whole training runs of the tiny task beside TRL's, generation included: seconds of a step, and of
the way to an accuracy.

    pip install trl==1.16.0                            # in an environment of its own
    python benchmarks/tiny_against_trl.py              # seconds of a step, three rounds
    python benchmarks/tiny_against_trl.py --steps 240 --save-every 20 --rates 7e-5 1.4e-4
                                                       # and held-out accuracy over time

All trainers get the tiny base model, its training problems, 32 prompts of 8 completions a step, two
updates, the same clipped token-mean loss, AdamW, reward function and temperature, in fp32 on one
thread. `ours` drops groups without a signal, `ours-all` trains on them as TRL does. A run is a
process of its own; rounds alternate the order; the first steps of a run are not timed. CPU seconds
count the reward worker. With `--save-every` the weights are kept, and evaluated afterwards on the
held-out problems (T = 1, one completion each), all by the same code.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

CONTENDERS = ("ours", "ours-all", "trl")
PROMPTS, GROUP, UPDATES = 32, 8, 2
LONGEST = 20
BETA2 = 0.99
NOT_TIMED = 3


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1001, help="of the first round, then upwards")
    parser.add_argument("--rates", type=float, nargs="+", default=[7e-5])
    parser.add_argument("--save-every", type=int, default=0, help="steps between kept weights")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, help="keep the numbers in this file")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def grade(completion: str, answer: str, row: dict[str, Any]) -> float:
    """±1: whether the box holds the answer."""
    box = completion.rpartition("\\boxed{")[2]
    return 1.0 if box.partition("}")[0].strip() == answer else -1.0


class Marks:
    """Wall and CPU seconds at the end of every step, counted from the start of the process."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def mark(self) -> None:
        everyone = [self._me, *self._me.children(recursive=True)]
        self.cpu.append(sum(sum(each.cpu_times()[:2]) for each in everyone))
        self.wall.append(time.time() - self._me.create_time())


def ours(options: argparse.Namespace, folder: Path, drop: bool) -> dict[str, Any]:
    from grpo_replay.commands.train_display import Display
    from grpo_replay.recipe import load_recipe
    from grpo_replay.terminal.quiet import quiet_libraries

    recipe = load_recipe(
        "tiny",
        [
            "replay.preset=grpo", f"replay.drop_zero_variance={str(drop).lower()}",
            f"sampling.prompts_per_step={PROMPTS}", f"sampling.group_size={GROUP}",
            f"batch.updates_per_step={UPDATES}", f"optimizer.learning_rate={options.rates[0]}",
            "reward.function=tiny_against_trl:grade", "reward.workers=1", "loss.dual_clip=null",
            "tracking.report_to=[]", "eval.benchmarks=[]", f"run.steps={options.steps}",
            f"run.seed={options.seed}",
            f"checkpoint.every_steps={options.save_every or options.steps}", "checkpoint.keep=1000",
        ],
    )  # fmt: skip
    marks = Marks()

    class Watch(Display):
        def on_step(self, metrics: Any) -> None:
            marks.mark()

    with quiet_libraries():
        from grpo_replay.training.run import run_training

        run_training(recipe, folder / "run", False, Watch())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    parts = ("generation", "reward", "logprob", "training", "sync", "other")
    saved = sorted((folder / "run" / "checkpoints").glob("step_*/model"))
    return {
        "wall": marks.wall, "cpu": marks.cpu, "reward": [row["reward"] for row in rows],
        "parts": {
            part: statistics.median(row[f"cost/{part}_seconds"] for row in rows[NOT_TIMED:])
            for part in parts
        },
        "padding": statistics.median(row.get("padding_share") or 0.0 for row in rows),
        "saved": {int(path.parent.name.split("_")[1]): str(path) for path in saved},
    }  # fmt: skip


def trl(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import grpo_replay
    from grpo_replay.tiny.problems import PROMPT_TEMPLATE, train_problems

    torch.set_num_threads(1)
    base = Path(grpo_replay.__file__).parent / "tiny" / "base"
    rows = [
        {"prompt": PROMPT_TEMPLATE.format(problem=row["problem"]), "answer": str(row["answer"])}
        for row in train_problems(options.seed)
    ]
    marks = Marks()
    rewards: list[float] = []

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        found = [grade(text, gold, {}) for text, gold in zip(completions, answer, strict=True)]
        rewards.append(sum(found) / len(found))
        return found

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % UPDATES == 0:
                marks.mark()

    config = GRPOConfig(
        output_dir=str(folder / "run"), use_cpu=True, bf16=False, report_to=[], logging_steps=1,
        disable_tqdm=True, seed=options.seed, max_steps=UPDATES * options.steps,
        save_strategy="steps" if options.save_every else "no", save_only_model=True,
        save_steps=UPDATES * (options.save_every or options.steps), gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP // UPDATES, gradient_accumulation_steps=1,
        steps_per_generation=UPDATES, num_generations=GROUP, max_completion_length=LONGEST,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, loss_type="dapo", epsilon=0.2,
        epsilon_high=0.28, learning_rate=options.rates[0], adam_beta2=BETA2, weight_decay=0.01,
        lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=1.0,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(base)
    trainer = GRPOTrainer(
        str(base), reward, config, Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[Watch()],
    )  # fmt: skip
    trainer.train()
    saved = (folder / "run").glob("checkpoint-*")
    return {
        "wall": marks.wall, "cpu": marks.cpu, "reward": rewards,
        "saved": {int(path.name.split("-")[1]) // UPDATES: str(path) for path in saved},
    }  # fmt: skip


def run_here(options: argparse.Namespace) -> dict[str, Any]:
    if options.contender == "trl":
        return trl(options, options.folder)
    return ours(options, options.folder, drop=options.contender == "ours")


def run_apart(name: str, seed: int, rate: float, options: argparse.Namespace, folder: Path) -> Any:
    """The result of one run, in a process of its own."""
    folder.mkdir(parents=True)
    words = [
        sys.executable, __file__, "--contender", name, "--folder", str(folder), "--seed", str(seed),
        "--rates", str(rate), "--steps", str(options.steps), "--save-every",
        str(options.save_every),
    ]  # fmt: skip
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": here, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu",
        "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    result |= {"name": name, "seed": seed, "rate": rate}
    if options.save_every:
        result["accuracy"] = {step: accuracy(Path(at)) for step, at in result["saved"].items()}
    return result


def accuracy(model: Path) -> float:
    """Share of the held-out problems that the model answers right, sampled once at T = 1."""
    from grpo_replay.engine.models import load_policy, load_tokenizer
    from grpo_replay.recipe import ModelSection
    from grpo_replay.sampling.hf import HfSampler
    from grpo_replay.tiny.problems import BENCHMARKS, PROMPT_TEMPLATE, benchmark_problems
    from grpo_replay.types import GenerationRequest, RequestKey

    section = ModelSection(path=str(model), tokenizer="builtin:tiny")
    tokenizer, policy = load_tokenizer(section), load_policy(section, 0)
    rows = [row for name in BENCHMARKS for row in benchmark_problems(name)]
    prompts = tokenizer([PROMPT_TEMPLATE.format(problem=row["problem"]) for row in rows])
    requests = [
        GenerationRequest(RequestKey(1, index, 0), np.array(ids, np.int32), index, LONGEST)
        for index, ids in enumerate(prompts["input_ids"])
    ]
    sampler = HfSampler(policy, [tokenizer.eos_token_id], tokenizer.pad_token_id, len(requests))
    right = 0
    for completion in sampler.generate(requests):
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        right += grade(text, str(rows[completion.key.prompt_index]["answer"]), {}) > 0
    return right / len(rows)


def steps_of(run: dict[str, Any], quantity: str) -> list[float]:
    """Seconds of each timed step."""
    marks = run[quantity]
    return np.diff(marks)[NOT_TIMED:].tolist()


def report(runs: list[dict[str, Any]], names: list[str]) -> None:
    middle = {
        name: {
            quantity: statistics.median(
                seconds
                for run in runs
                if run["name"] == name
                for seconds in steps_of(run, quantity)
            )
            for quantity in ("wall", "cpu")
        }
        for name in names
    }
    peer = middle.get("trl")
    print(f"{'':<12}{'wall s/step':>12}{'CPU s/step':>12}{'of TRL, wall':>14}{'of TRL, CPU':>14}")
    for name, seconds in middle.items():
        line = f"{name:<12}{seconds['wall']:>12.3f}{seconds['cpu']:>12.3f}"
        if peer:
            line += "".join(f"{seconds[each] / peer[each]:>14.2f}" for each in ("wall", "cpu"))
        print(line)
    for run in runs:
        first = f"first step after {run['wall'][0]:.1f} s ({run['cpu'][0]:.1f} s of CPU)"
        parts = ", ".join(f"{part} {1e3 * s:.0f} ms" for part, s in run.get("parts", {}).items())
        print(f"{run['name']} seed {run['seed']} rate {run['rate']:g}: {first}. {parts}")
        for step, value in run.get("accuracy", {}).items():
            at = int(step) - 1
            print(f"  step {step}: {100 * value:.1f} % at {run['wall'][at]:.1f} s of wall, "
                  f"{run['cpu'][at]:.1f} s of CPU")  # fmt: skip


def main() -> None:
    options = parse_options()
    if options.contender:
        print(json.dumps(run_here(options)))
        return
    runs = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            order = options.only if number % 2 == 0 else options.only[::-1]
            for rate in options.rates:
                for each in order:
                    folder = Path(name) / f"{number}-{rate:g}-{each}"
                    runs.append(run_apart(each, options.seed + number, rate, options, folder))
                    if options.json:
                        options.json.write_text(json.dumps(runs))
    report(runs, options.only)


if __name__ == "__main__":
    main()
