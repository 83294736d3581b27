"""Whole training runs beside TRL's, generation included: a step, memory, seconds to an accuracy.

    pip install trl==1.16.0                       # in an environment of its own
    python benchmarks/against_trl.py              # the tiny task, three rounds
    python benchmarks/against_trl.py --smollm2 FOLDER --only ours ours-replay trl --rounds 2
    python benchmarks/against_trl.py --steps 80 --save-every 8 --level 0.5 --rate 2e-4
    python benchmarks/against_trl.py --smollm2 FOLDER --steps 8 --save-every 2 --level 0.6

All trainers get the same base model, its training problems, 32 prompts of 8 completions a step, two
updates, the same clipped token-mean loss, AdamW, reward function and temperature, in fp32 on one
thread. `ours` drops groups without a signal, `ours-all` trains on them as TRL does, `ours-replay`
also replays as many rollouts. With `--smollm2`, the folder that `make_smollm2.py` makes, the model
is SmolLM2-135M, a step has 16 prompts, sums of two digits after four worked examples (45 tokens,
answers of up to 6, which end with their line), and all cores work. With `--longest` its completions
go on after their line, nearly always to that length; the first line is graded.

A run is a process of its own; rounds alternate the order, each with the next seed; the first steps
of a run are not timed. CPU seconds count the reward worker; memory is the most that the trainer's
process had resident at once, imports included. With `--save-every` the weights are kept and
evaluated after the run (1,000 held-out problems, two completions each at T = 1; SmolLM2: 200 and
four), all by the same code, and seconds to the `--level` count from the command, without saving:
those of the first evaluation at or above it, interpolated linearly from the one before. To tune the
rates alike, run each contender with several on a seed of its own before.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import psutil

OURS = {
    "ours": ["replay.preset=grpo", "replay.drop_zero_variance=true"],
    "ours-all": ["replay.preset=grpo", "replay.drop_zero_variance=false"],
    "ours-replay": [],  # as the recipe
}
CONTENDERS = (*OURS, "trl")
Run = dict[str, Any]
GROUP, UPDATES, BETA2 = 8, 2, 0.99
WORKED = "2 + 3 = 5\n7 + 6 = 13\n14 + 21 = 35\n52 + 39 = 91\n"
LINE_END = "Ċ"  # the token of SmolLM2 that ends a line


@dataclass(frozen=True)
class Task:
    """What is trained, and its sizes."""

    name: str
    model: Path
    prompts: int  # a step
    longest: int  # completion, tokens
    rate: float
    threads: int
    not_timed: int  # first steps of a run
    samples: int  # of each held-out problem
    rows: int | None = None  # of a micro-batch of TRL's, if not those of an update

    def train_rows(self, seed: int) -> list[dict[str, str]]:
        """`prompt`, `answer` and `prompt_id` of every training problem."""
        if self.name == "smollm2":
            held_out = {row["prompt"] for row in self.held_out_rows()}
            rows = [row for row in sums(seed, 2_700) if row["prompt"] not in held_out]
            return rows[:2_500]
        from grpo_replay.tiny.problems import train_problems

        return [tiny_row(row) for row in train_problems(seed)]

    def held_out_rows(self) -> list[dict[str, str]]:
        if self.name == "smollm2":
            return sums(20260604, 200)
        from grpo_replay.tiny.problems import BENCHMARKS, benchmark_problems

        return [tiny_row(row) for name in BENCHMARKS for row in benchmark_problems(name)]


def tiny_row(row: dict[str, str]) -> dict[str, str]:
    from grpo_replay.tiny.problems import PROMPT_TEMPLATE

    prompt = PROMPT_TEMPLATE.format(problem=row["problem"])
    return {"prompt": prompt, "answer": str(row["answer"]), "prompt_id": row["problem_id"]}


def sums(seed: int, count: int) -> list[dict[str, str]]:
    """Different additions of two digits, each after the worked examples."""
    chosen = np.random.default_rng(seed).choice(90 * 90, count, replace=False)
    pairs = [(10 + int(number) // 90, 10 + int(number) % 90) for number in chosen]
    return [
        {"prompt": f"{WORKED}{a} + {b} =", "answer": str(a + b), "prompt_id": f"{a}+{b}"}
        for a, b in pairs
    ]


def task_of(smollm2: Path | None) -> Task:
    if smollm2:
        return Task("smollm2", smollm2, 16, 6, 1e-5, os.cpu_count() or 1, 1, 4)
    import grpo_replay

    base = Path(grpo_replay.__file__).parent / "tiny" / "base"
    return Task("tiny", base, 32, 20, 7e-5, 1, 3, 2)


def model_to_train(options: argparse.Namespace, folder: Path) -> Path:
    task = options.task
    as_it_is = task.name == "tiny" or options.longest
    return task.model if as_it_is else ending_at_a_line(task.model, folder / "model")


def ending_at_a_line(folder: Path, new: Path) -> Path:
    """The model with the line's end as its end-of-sequence token, for both trainers alike."""
    new.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            (new / file.name).symlink_to(file)
        else:
            shutil.copyfile(file, new / file.name)
    tokenizer = json.loads((new / "tokenizer.json").read_text())
    token_id = tokenizer["model"]["vocab"][LINE_END]
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((new / name).read_text()) | {"eos_token_id": token_id}
        (new / name).write_text(json.dumps(settings))
    settings = json.loads((new / "tokenizer_config.json").read_text()) | {"eos_token": LINE_END}
    (new / "tokenizer_config.json").write_text(json.dumps(settings))
    return new


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1001, help="of the first round, then upwards")
    parser.add_argument("--rate", type=float, help="learning rate; 7e-5, with --smollm2 1e-5")
    parser.add_argument("--smollm2", type=Path, help="folder of the model")
    parser.add_argument("--longest", type=int, help="tokens of SmolLM2's completions; 6")
    parser.add_argument("--save-every", type=int, default=0, help="steps between evaluations")
    parser.add_argument("--level", type=float, default=0.5, help="held-out accuracy to reach")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=["ours", "trl"])
    parser.add_argument("--json", type=Path, help="keep the numbers in this file")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.task = task_of(options.smollm2)
    if options.longest:
        if not options.smollm2:
            parser.error("--longest is for --smollm2")
        options.task = replace(options.task, longest=options.longest, rows=16)
    options.rate = options.rate or options.task.rate
    return options


def grade(completion: str, answer: str, row: dict[str, Any]) -> float:
    """±1: whether the box, or without one the first line, is the answer."""
    box = completion.rpartition("\\boxed{")[2].partition("\n")[0]
    return 1.0 if box.partition("}")[0].strip() == answer else -1.0


class Marks:
    """Wall and CPU seconds at the end of every step, counted from the start of the process."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._left_out = np.zeros(2)
        self._marks: list[np.ndarray] = []

    def mark(self) -> None:
        self._marks.append(self._now() - self._left_out)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What happens within is not counted."""
        before = self._now()
        yield
        self._left_out += self._now() - before

    def _now(self) -> np.ndarray:
        everyone = [self._me, *self._me.children(recursive=True)]
        cpu = sum(sum(each.cpu_times()[:2]) for each in everyone)
        return np.array([time.time() - self._me.create_time(), cpu])

    def read(self) -> dict[str, list[float]]:
        wall, cpu = np.array(self._marks).T.tolist()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return {"wall": wall, "cpu": cpu, "saving": self._left_out.tolist(), "peak_gib": peak}


def ours(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from grpo_replay.recipe import load_recipe
    from grpo_replay.terminal.quiet import loading_libraries, quiet_libraries
    from grpo_replay.training import Observer

    task = options.task
    recipe = load_recipe("tiny", [
        *OURS[options.contender], *task_settings(options, folder),
        f"sampling.prompts_per_step={task.prompts}", f"sampling.group_size={GROUP}",
        f"batch.updates_per_step={UPDATES}", f"optimizer.learning_rate={options.rate}",
        "reward.function=against_trl:grade", "reward.workers=1", "loss.dual_clip=null",
        "tracking.report_to=[]", "eval.benchmarks=[]", f"run.steps={options.steps}",
        f"run.seed={options.seed}", "checkpoint.keep=1000",
        f"checkpoint.every_steps={options.save_every or options.steps}",
    ])  # fmt: skip
    marks = Marks()

    class Watch(Observer):
        def on_step(self, metrics: Any) -> None:
            marks.mark()

    with quiet_libraries():
        with loading_libraries():  # as grpo-replay train does
            from grpo_replay.training import run
        write = run.write_checkpoint

        def save(*arguments: Any) -> None:
            with marks.left_out():
                write(*arguments)

        run.write_checkpoint = save
        run.run_training(recipe, folder / "run", False, Watch())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    parts = ("generation", "reward", "logprob", "training", "sync", "other")
    saved = sorted((folder / "run" / "checkpoints").glob("step_*/model"))
    return {
        **marks.read(), "reward": [row["reward"] for row in rows],
        "parts": {
            part: statistics.median(row[f"cost/{part}_seconds"] for row in rows[task.not_timed:])
            for part in parts
        },
        "padding": statistics.median(row.get("padding_share") or 0.0 for row in rows),
        "saved": {int(path.parent.name.split("_")[1]): str(path) for path in saved},
    }  # fmt: skip


def task_settings(options: argparse.Namespace, folder: Path) -> list[str]:
    """What the recipe of the tiny task needs to be that of another task."""
    task = options.task
    if task.name == "tiny":
        return []
    data = folder / "problems.jsonl"
    rows = task.train_rows(options.seed)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={model_to_train(options, folder)}",
        f"prompts.source={data}", "prompts.id_field=prompt_id", "prompts.problem_field=prompt",
        "prompts.user_template={problem}", "prompts.max_prompt_length=64",
        f"sampling.max_completion_length={task.longest}",
        f"engine.threads_per_process={task.threads}", "replay.warmup_steps=1",
        "batch.max_tokens_per_microbatch=1024",  # as the recipe smollm2
    ]  # fmt: skip


def trl(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task = options.task
    torch.set_num_threads(task.threads)
    base = model_to_train(options, folder)
    rows = task.train_rows(options.seed)
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

    class Trainer(GRPOTrainer):
        def _save_checkpoint(self, *arguments: Any) -> None:
            with marks.left_out():
                super()._save_checkpoint(*arguments)

    of_update = task.prompts * GROUP // UPDATES
    at_once = task.rows or of_update
    config = GRPOConfig(
        output_dir=str(folder / "run"), use_cpu=True, bf16=False, report_to=[], logging_steps=1,
        disable_tqdm=True, seed=options.seed, max_steps=UPDATES * options.steps,
        save_strategy="steps" if options.save_every else "no", save_only_model=True,
        save_steps=UPDATES * (options.save_every or options.steps), gradient_checkpointing=False,
        per_device_train_batch_size=at_once, gradient_accumulation_steps=of_update // at_once,
        steps_per_generation=UPDATES * of_update // at_once, num_generations=GROUP,
        max_completion_length=task.longest,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, loss_type="dapo", epsilon=0.2,
        epsilon_high=0.28, learning_rate=options.rate, adam_beta2=BETA2, weight_decay=0.01,
        lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=1.0,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(base)
    trainer = Trainer(
        str(base), reward, config, Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[Watch()],
    )  # fmt: skip
    trainer.train()
    saved = (folder / "run").glob("checkpoint-*")
    return {
        **marks.read(), "reward": rewards,
        "saved": {int(path.name.split("-")[1]) // UPDATES: str(path) for path in saved},
    }  # fmt: skip


def run_here(options: argparse.Namespace) -> Run:
    train = ours if options.contender in OURS else trl
    result = train(options, options.folder)
    if options.save_every:
        saved = sorted(result["saved"].items())
        result["accuracy"] = {step: accuracy(Path(model), options.task) for step, model in saved}
    return result


def run_apart(options: argparse.Namespace, name: str, seed: int, folder: Path) -> Run:
    """The result of one run, in a process of its own."""
    folder.mkdir(parents=True)
    task = options.task
    words = [
        sys.executable, __file__, "--contender", name, "--folder", str(folder), "--seed", str(seed),
        "--rate", str(options.rate), "--steps", str(options.steps),
        "--save-every", str(options.save_every),
        *(["--smollm2", str(task.model)] if task.name == "smollm2" else []),
        *(["--longest", str(options.longest)] if options.longest else []),
    ]  # fmt: skip
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": here, "OMP_NUM_THREADS": str(task.threads), "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"name": name, "seed": seed}


def accuracy(model: Path, task: Task) -> float:
    """Share of right answers to the held-out problems, sampled at T = 1 with the same seeds for
    every model."""
    from grpo_replay.engine.models import load_policy, load_tokenizer
    from grpo_replay.recipe import ModelSection
    from grpo_replay.sampling.hf import HfSampler
    from grpo_replay.types import GenerationRequest, RequestKey

    section = ModelSection(path=str(model))
    tokenizer, policy = load_tokenizer(section), load_policy(section, 0)
    rows, samples = task.held_out_rows(), task.samples
    prompts = tokenizer([row["prompt"] for row in rows])
    requests = [
        GenerationRequest(
            RequestKey(1, index, sample), np.array(ids, np.int32), index * samples + sample,
            task.longest,
        )
        for index, ids in enumerate(prompts["input_ids"])
        for sample in range(samples)
    ]  # fmt: skip
    sampler = HfSampler(policy, [tokenizer.eos_token_id], tokenizer.pad_token_id, 1000)
    right = 0
    for completion in sampler.generate(requests):
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        right += grade(text, str(rows[completion.key.prompt_index]["answer"]), {}) > 0
    return right / len(requests)


def report_steps(task: Task, runs: list[Run], names: list[str]) -> None:
    middle = {
        name: {
            quantity: statistics.median(
                seconds
                for run in runs
                if run["name"] == name
                for seconds in np.diff(run[quantity])[task.not_timed :].tolist()
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
        held_out = " ".join(f"{100 * each:.1f}" for each in run.get("accuracy", {}).values())
        print(f"{run['name']} seed {run['seed']}: {first}, at most {run['peak_gib']:.1f} GiB. "
              f"{parts} {held_out}")  # fmt: skip


def seconds_to(level: float, run: Run, quantity: str) -> float:
    """Seconds to the level; infinite if it is never reached."""
    before: tuple[float, float] | None = None
    for step, value in run["accuracy"].items():
        seconds = run[quantity][int(step) - 1]
        if value >= level:
            if before is None:
                return seconds
            share = (level - before[1]) / (value - before[1])
            return before[0] + share * (seconds - before[0])
        before = seconds, value
    return inf


def report_level(level: float, runs: list[Run], names: list[str]) -> None:
    print(f"\nto {100 * level:.0f} % held-out")
    for quantity in ("wall", "cpu"):
        needed = {
            name: [seconds_to(level, run, quantity) for run in runs if run["name"] == name]
            for name in names
        }
        peers = statistics.median(needed.get("trl", [inf]))
        for name, seconds in needed.items():
            middle = statistics.median(seconds)
            each = ", ".join("not reached" if one == inf else f"{one:.1f}" for one in seconds)
            line = f"  {name:<12} {quantity:>4} s: {each}; median {middle:.1f}"
            if name != "trl" and middle < inf and peers < inf:
                line += f", {middle / peers:.2f} of TRL's"
            print(line)


def main() -> None:
    options = parse_options()
    if options.contender:
        print(json.dumps(run_here(options)))
        return
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for each in options.only if number % 2 == 0 else options.only[::-1]:
                folder = Path(name) / f"{number}-{each}"
                runs.append(run_apart(options, each, options.seed + number, folder))
                if options.json:
                    options.json.write_text(json.dumps(runs))
    report_steps(options.task, runs, options.only)
    for near in (-0.05, 0.0, 0.05) if options.save_every else ():
        report_level(options.level + near, runs, options.only)


if __name__ == "__main__":
    main()
