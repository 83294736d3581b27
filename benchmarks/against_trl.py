"""One GRPO step without generation, beside TRL's: seconds, memory, and whether it is the same step.

    pip install trl==1.16.0                      # in an environment of its own
    python benchmarks/against_trl.py             # 32 rollouts a step, two minutes
    python benchmarks/against_trl.py --same-step # one update, no hopeless prompts: equal weights?
    python benchmarks/against_trl.py --device cuda --shape qwen3-0.6b

Both trainers get the same random Qwen3, prompts, completions (of uneven length), rewards, loss
(clipped, token mean), optimizer and rows per micro-batch, in fp32; the sampler is canned, so that
what is timed is scoring, advantages, old log-probs, updates and logs. Replay is off. Each round
runs both, in processes of their own; the first step of each is left out. With `--device cuda` both
compute in bf16 on fp32 weights (ours under ZeRO-3, TRL's under autocast), with gradient
checkpointing, and memory is torch's peak of live tensors.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 8
EPSILON_STD = 1e-4  # TRL's
LEARNING_RATE = 1e-5
HOPELESS = "hopeless"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4, help=f"groups of {GROUP} a step")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128, help="longest completion")
    parser.add_argument("--rows", type=int, default=4, help="longest rows in a micro-batch")
    parser.add_argument("--updates", type=int, default=2, help="optimizer updates a step")
    parser.add_argument("--hopeless", type=float, default=0.25, help="share of all-wrong groups")
    parser.add_argument("--shape", help="a published one (qwen3-0.6b), instead of the next three")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=16_384)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--same-step", action="store_true", help="compare the weights afterwards")
    parser.add_argument("--json", type=Path, help="keep the numbers in this file")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.same_step:  # several updates or dropped groups are counted differently by TRL
        options.updates, options.hopeless, options.rounds = 1, 0.0, 1
    return options


# What both are given


def problems(options: argparse.Namespace) -> list[dict[str, str]]:
    """In the order of training: one row of text per group."""
    rng = np.random.default_rng(0)
    count = options.prompts * (options.steps + 1)
    hopeless = rng.permutation(count) < round(count * options.hopeless)
    letters = rng.integers(ord("a"), ord("z") + 1, (count, options.prompt_tokens), dtype=np.uint8)
    return [
        {
            "prompt_id": str(index),
            "prompt": bytes(letters[index]).decode(),
            "answer": HOPELESS if hopeless[index] else "even",
        }
        for index in range(count)
    ]


def completion(step: int, place: int, options: argparse.Namespace) -> np.ndarray:
    """Token ids of a rollout; lengths are skewed to the right, a few are cut off."""
    rng = np.random.default_rng([step, place])
    length = int(rng.lognormal(np.log(0.4 * options.max_tokens), 0.6))
    length = int(np.clip(length, 8, options.max_tokens))
    return rng.integers(97, 123, length).astype(np.int32)  # "a" to "z" of the byte tokenizer


def grade(completion: str, answer: str, row: dict[str, Any]) -> float:
    """±1 by a checksum of the text; -1 where there is no hope."""
    return 1.0 if answer != HOPELESS and zlib.crc32(completion.encode()) % 2 == 0 else -1.0


def write_model(folder: Path, options: argparse.Namespace) -> None:
    import torch

    from grpo_replay.engine.models import load_policy, load_tokenizer
    from grpo_replay.recipe import ModelSection

    heads = options.hidden // 64
    small = {
        "num_hidden_layers": options.layers, "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden, "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 2, 1), "head_dim": 64,
        "vocab_size": options.vocabulary,
    }  # fmt: skip
    section = ModelSection(
        path=f"builtin:{options.shape or 'qwen3-0.6b'}",
        tokenizer="builtin:bytes",
        random_init=True if options.shape else small,
    )
    with torch.device(options.device):  # a GPU draws in a second what takes a CPU a minute
        load_policy(section, seed=0).save_pretrained(folder)
    load_tokenizer(section).save_pretrained(folder)


class Meter:
    """Wall and CPU seconds of each step, and the peak of memory over where it began, MiB."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._start = 0.0 if self._cuda else resident("VmRSS")
        self._marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        """A step begins (or the last one is over)."""
        if self._cuda:
            import torch

            torch.cuda.synchronize()
        self._marks.append((time.perf_counter(), time.process_time()))
        if len(self._marks) == 2:  # the first step is over
            self._reset_peak()

    def _reset_peak(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def _peak_mib(self) -> float:
        if self._cuda:
            import torch

            return torch.cuda.max_memory_allocated() / 2**20
        return resident("VmHWM") - self._start

    def result(self) -> dict[str, Any]:
        wall, cpu = (np.diff(column)[1:].tolist() for column in zip(*self._marks, strict=True))
        return {"wall": wall, "cpu": cpu, "peak_mib": self._peak_mib()}


def resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


# The contenders


def ours(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from grpo_replay.distributed.rendezvous import initialize_processes
    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
    from grpo_replay.engine.models import load_policy, load_tokenizer
    from grpo_replay.prompts.prompt_set import load_prompts
    from grpo_replay.recipe import resolve_recipe
    from grpo_replay.replay import ReplayBuffer
    from grpo_replay.rewards.scorer import RewardScorer
    from grpo_replay.storage.checkpoint import RunState
    from grpo_replay.storage.run_directory import RunDirectory
    from grpo_replay.training.rollout_source import Parts
    from grpo_replay.training.synchronous import SynchronousSource
    from grpo_replay.training.trainer import Trainer

    data = folder / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in problems(options)))
    recipe = resolve_recipe([recipe_of(options, folder, data)])
    comm, device = initialize_processes(recipe)
    tokenizer = load_tokenizer(recipe.model)
    run_dir = RunDirectory(Path(tempfile.mkdtemp(dir=folder)) / "run")
    run_dir.create(recipe)
    meter = Meter(options.device)
    prompts = load_prompts(recipe.prompts, tokenizer, 0)
    prompts._order = lambda epoch: range(len(prompts))  # that of the file, as TRL's
    engine = DeepSpeedEngine(recipe, load_policy(recipe.model, 0), tokenizer, comm, device)
    with RewardScorer.open(recipe.reward) as scorer:
        parts = Parts(
            recipe=recipe, comm=comm, engine=engine, sampler=CannedSampler(options), scorer=scorer,
            prompts=prompts, tokenizer=tokenizer,
            buffer=ReplayBuffer(recipe.replay, GROUP), run_dir=run_dir,
        )  # fmt: skip
        state = RunState()
        trainer = Trainer(parts, state, SynchronousSource(parts, state))
        for _ in range(options.steps + 1):
            meter.mark()
            trainer.train_step()
        meter.mark()
    result = meter.result()
    engine.save_model(folder / "ours")
    return result


def recipe_of(options: argparse.Namespace, folder: Path, data: Path) -> dict[str, Any]:
    longest = options.prompt_tokens + options.max_tokens
    on_gpu = options.device == "cuda"
    return {
        "name": "against-trl",
        "model": {
            "path": str(folder / "model"), "dtype": "bfloat16" if on_gpu else "float32",
            "gradient_checkpointing": on_gpu,
        },
        "prompts": {
            "source": str(data), "problem_field": "prompt", "id_field": "prompt_id",
            "template": "plain", "user_template": "{problem}",
            "max_prompt_length": options.prompt_tokens,
        },
        "sampling": {
            "prompts_per_step": options.prompts, "group_size": GROUP,
            "max_completion_length": options.max_tokens,
            "logprob_gap_limit": 1e9,  # canned completions are not the policy's
        },
        "reward": {"function": "against_trl:grade", "workers": 1},
        "advantage": {"std": "sample", "epsilon": EPSILON_STD},
        "replay": {"preset": "grpo"},
        "batch": {
            "updates_per_step": options.updates,
            "max_tokens_per_microbatch": options.rows * longest,
        },
        "loss": {"dual_clip": None},
        "optimizer": {"learning_rate": LEARNING_RATE, "adamw": {"weight_decay": 0.0}},
        "engine": {
            "device": options.device, "zero_stage": 3 if on_gpu else 0,
            "threads_per_process": options.threads,
        },
        "run": {"steps": options.steps + 1},
    }  # fmt: skip


class CannedSampler:
    """Implements `sampling.sampler_protocol.Sampler` with completions made beforehand."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.policy_version = 0
        self.stop_token_ids = ()
        self._options = options

    def generate(self, requests: Sequence[Any]) -> Iterator[Any]:
        from grpo_replay.types import Completion

        for request in requests:
            step, prompt, sample = request.key
            tokens = completion(step, prompt * GROUP + sample, self._options)
            reason = "length" if len(tokens) == self._options.max_tokens else "stop"
            zeros, version = np.zeros(len(tokens), np.float32), self.policy_version
            yield Completion(request.key, tokens, zeros, reason, version, version)

    def load_weights(self, named_tensors: Any, version: int) -> None:
        for _ in named_tensors:
            pass
        self.policy_version = version

    def sleep(self, keep_weights: bool = True) -> None: ...

    def close(self) -> None: ...


def trl(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    meter = Meter(options.device)
    step = 0

    def canned(prompts: list[str], trainer: Any) -> dict[str, Any]:
        nonlocal step
        meter.mark()
        step += 1
        ids = [completion(step, place, options).tolist() for place in range(len(prompts))]
        return {
            "prompt_ids": [tokenizer(text)["input_ids"] for text in prompts],
            "completion_ids": ids,
            "logprobs": [[0.0] * len(each) for each in ids],
        }

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [grade(text, gold, {}) for text, gold in zip(completions, answer, strict=True)]

    on_gpu = options.device == "cuda"
    parts = options.prompts * GROUP // options.rows
    config = GRPOConfig(
        output_dir=str(folder / "trl-run"), use_cpu=not on_gpu, bf16=on_gpu, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, shuffle_dataset=False,
        max_steps=options.updates * (options.steps + 1), gradient_checkpointing=on_gpu,
        per_device_train_batch_size=options.rows, steps_per_generation=parts,
        gradient_accumulation_steps=parts // options.updates, num_generations=GROUP,
        max_completion_length=options.max_tokens, temperature=1.0, beta=0.0, loss_type="dapo",
        epsilon=0.2, epsilon_high=0.28, learning_rate=LEARNING_RATE, weight_decay=0.0,
        lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=1.0,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(folder / "model"), reward, config, Dataset.from_list(problems(options)),
        processing_class=tokenizer, rollout_func=canned,
    )  # fmt: skip
    trainer.train()
    meter.mark()
    result = meter.result()
    trainer.save_model(str(folder / "trl"))
    return result


CONTENDERS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "ours": ours,
    "trl": trl,
}


# Rounds and report


def run_contender(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    words = [sys.executable, __file__, *sys.argv[1:], "--contender", name, "--folder", str(folder)]
    here = [
        str(Path(__file__).parent),
        os.environ.get("PYTHONPATH", ""),
    ]  # reward workers import us
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(here),
        "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }  # fmt: skip
    if options.device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def movement_difference(folder: Path) -> float:
    """‖(ours - start) - (TRL's - start)‖ / ‖TRL's - start‖ over all parameters."""
    from safetensors.torch import load_file

    start, one, other = (
        load_file(folder / name / "model.safetensors") for name in ("model", "ours", "trl")
    )
    names = start.keys() & one.keys() & other.keys()
    apart = sum(float((one[n] - other[n]).double().square().sum()) for n in names)
    moved = sum(float((other[n] - start[n]).double().square().sum()) for n in names)
    return (apart / moved) ** 0.5


def tokens_per_step(options: argparse.Namespace) -> float:
    rollouts = options.prompts * GROUP
    steps = range(2, options.steps + 2)
    lengths = [len(completion(step, i, options)) for step in steps for i in range(rollouts)]
    return sum(lengths) / options.steps


def report(options: argparse.Namespace, rounds: list[dict[str, dict[str, Any]]]) -> None:
    rollouts = GROUP * options.prompts
    print(f"{tokens_per_step(options):,.0f} completion tokens in {rollouts} rollouts a step")
    middle = {
        name: {
            "wall": statistics.median(s for r in rounds for s in r[name]["wall"]),
            "cpu": statistics.median(s for r in rounds for s in r[name]["cpu"]),
            "peak_mib": statistics.median(r[name]["peak_mib"] for r in rounds),
        }
        for name in CONTENDERS
    }
    print(f"{'':<12}{'wall s/step':>12}{'CPU s/step':>12}{'peak MiB':>12}")
    for name, values in middle.items():
        print(f"{name:<12}{values['wall']:>12.2f}{values['cpu']:>12.2f}{values['peak_mib']:>12.0f}")
    ratios = [middle["trl"][key] / middle["ours"][key] for key in ("wall", "cpu", "peak_mib")]
    print(f"{'TRL / ours':<12}" + "".join(f"{ratio:>12.2f}" for ratio in ratios))


def main() -> None:
    options = parse_options()
    if options.contender:
        print(json.dumps(CONTENDERS[options.contender](options, options.folder)))
        return
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", options)
        for number in range(options.rounds):
            order = list(CONTENDERS) if number % 2 == 0 else list(CONTENDERS)[::-1]
            rounds.append({each: run_contender(each, options, folder) for each in order})
        report(options, rounds)
        if options.same_step:
            print(f"parameters moved alike to {movement_difference(folder):.1e} (relative L2)")
    if options.json:
        options.json.write_text(
            json.dumps({"options": vars(options) | {"json": None}, "rounds": rounds}, default=str)
        )


if __name__ == "__main__":
    main()
