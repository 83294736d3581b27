"""Parts 7 and 8: whole training runs, interrupted and resumed, and a sampler closed asleep."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_parts.devices import PeakMemory, device_capacity
from gpu_parts.record import Context, Record, Skipped
from gpu_parts.runner import missing_modules
from gpu_parts.sizes import make_recipe
from gpu_parts.workload import with_random_weights, write_problems
from grpo_replay.training import Observer

if TYPE_CHECKING:
    from grpo_replay.recipe import Recipe

STEPS = 5
SHOWN = (
    "step", "loss", "grad_norm", "reward", "entropy", "cost/trained_rollouts", "replay/rollouts",
    "sampler/logprob_gap_mean", "sampler/policy_version", "cost/generated_tokens", "step_time",
    "cost/generation_seconds", "cost/logprob_seconds", "cost/training_seconds",
    "cost/sync_seconds",
)  # fmt: skip
"""Columns of a step; see docs/metrics.md."""
CHECKPOINT_EVERY = 2
NOT_REPEATED = ("step_time", "cost/mu", "cost/gamma")
CLOSING = "--- closing ---"
CLOSE_ASLEEP = """
import sys
from pathlib import Path
from gpu_parts.sampling import open_vllm, requests_of, sampling_recipe
from gpu_parts.sizes import FULL, TOY
from gpu_parts.whole_runs import CLOSING
from gpu_parts.workload import open_engine
size = TOY if sys.argv[1] == "toy" else FULL
recipe = sampling_recipe(size, eager=False)
with open_engine(recipe) as engine, open_vllm(recipe, engine, Path(sys.argv[2])) as sampler:
    list(sampler.generate(requests_of(size, step=1)))
    sampler.sleep()
    print(CLOSING, file=sys.stderr, flush=True)
"""


def take_steps(context: Context) -> None:
    """Sample, score, replay, train and push, step after step, in this process."""
    from grpo_replay.training.run import run_training

    record, size = context.record, context.size
    recipe = run_recipe(context, steps=STEPS)
    record.figure("sampler", recipe.sampling.backend)
    watcher = Watcher(record, PeakMemory(size.device))
    run_training(recipe, context.work / "run", False, watcher)
    rows = watcher.rows
    record.check(f"{STEPS} steps", [row["step"] for row in rows] == list(range(1, STEPS + 1)))
    trained = [row["cost/trained_rollouts"] for row in rows]
    record.check("some step trains", any(trained), trained)
    replayed = [row["replay/rollouts"] for row in rows]
    record.check("some step replays", any(replayed), replayed)
    versions = [row["sampler/policy_version"] for row in rows]
    record.check("each step samples from the weights of the last", versions == list(range(STEPS)),
                 versions)  # fmt: skip
    record.figure("peak by the dry run, GiB, all phases", predicted_peak(recipe, size.device))


class Watcher(Observer):
    """A run's observer that records its steps."""

    def __init__(self, record: Record, meter: PeakMemory) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self._record, self._meter = record, meter

    def on_start(self, recipe: Any, run_dir: Any, state: Any, notices: list[str]) -> None:
        for notice in notices:
            self.on_notice(notice)
        self._meter.reset()

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        self.rows.append(metrics)
        row = {name.removeprefix("cost/"): metrics.get(name) for name in SHOWN}
        self._record.row("steps", row | self._meter.read())
        self._meter.reset()

    def on_notice(self, text: str) -> None:
        self._record.note(text)

    def on_status(self, text: str) -> None: ...

    def lost_reader(self) -> bool:
        return False


def resume_and_close(context: Context) -> None:
    """The plain command: train, lose the last checkpoint, resume; then close a sampler asleep."""
    record, size = context.record, context.size
    free, needed = shutil.disk_usage(context.work).free / 2**30, 4 * size.checkpoint_gib
    if free < needed:
        raise Skipped(
            f"{context.work} has {free:.0f} GiB free, needed are {needed:.0f}: set TMPDIR"
        )
    write_recipe(context, steps=2 * CHECKPOINT_EVERY)
    run = context.work / "run"
    record.figure("seconds to train", train(record, context.work, "train"))
    whole = metrics_of(run)
    checkpoint = run / "checkpoints" / f"step_{2 * CHECKPOINT_EVERY:06d}"
    record.figure("GiB of a checkpoint", folder_gib(checkpoint))
    shutil.rmtree(checkpoint)
    record.figure("seconds to resume", train(record, context.work, "resume", "--resume"))
    compare_steps(context, whole, metrics_of(run))
    shutil.rmtree(run)
    close_asleep(context)


def train(record: Record, work: Path, name: str, *words: str) -> float:
    """Seconds of `grpo-replay train` in `work`. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "grpo_replay", "train", str(work / "recipe.yaml")]
    command += ["--output-dir", str(work / "run"), *words]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
    record.check(f"{name}: no traceback on stderr", "Traceback" not in done.stderr)
    return seconds


def compare_steps(context: Context, whole: list[dict], resumed: list[dict]) -> None:
    """The steps after the checkpoint, done twice: equal on a CPU, nearly so on a GPU."""
    record = context.record
    steps = [row["step"] for row in resumed]
    record.check(
        "the resumed run has every step once", steps == [row["step"] for row in whole], steps
    )
    if len(whole) != len(resumed):
        return
    for once, again in zip(whole[CHECKPOINT_EVERY:], resumed[CHECKPOINT_EVERY:], strict=True):
        record.row("after the checkpoint", {
            "step": once["step"], "loss": once["loss"], "loss_resumed": again["loss"],
            "grad_norm": once["grad_norm"], "grad_norm_resumed": again["grad_norm"],
        })  # fmt: skip
    differing = sorted(
        name for once, again in zip(whole, resumed, strict=True) for name in once
        if is_repeatable(name) and once[name] != again.get(name)
    )  # fmt: skip
    if context.size.device == "cpu":
        record.check("the same metrics, bit for bit", not differing, differing[:5])
    else:
        record.figure("metrics that differ after resuming", len(differing))


def is_repeatable(name: str) -> bool:
    return name not in NOT_REPEATED and not name.endswith("_seconds")


def close_asleep(context: Context) -> None:
    """Sampler and engine are closed while the sampler sleeps: no error, nothing on stderr."""
    record = context.record
    if missing := missing_modules(("vllm",)):
        record.note(f"closing while asleep left out: not installed: {', '.join(missing)}")
        return
    command = [sys.executable, "-c", CLOSE_ASLEEP, context.size.name, str(context.work / "asleep")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    _, reached, said = done.stderr.partition(CLOSING)
    found = errors_in(said if reached else done.stderr)
    record.check("closed while asleep: exit code 0", done.returncode == 0, done.returncode)
    record.check("closed while asleep: no error on stderr", bool(reached) and not found, found[-3:])


def errors_in(text: str) -> list[str]:
    words = ("Traceback", "Error", "error", "Exception", "terminate called", "Aborted")
    return [line for line in text.splitlines() if any(word in line for word in words)]


def run_recipe(context: Context, steps: int, eager: bool = False) -> "Recipe":
    """A whole run: vLLM if it is installed, else the hf sampler."""
    size = context.size
    problems = context.work / "problems.jsonl"
    write_problems(problems, 2 * steps * size.prompts_per_step, size.prompt_tokens)
    longest = size.prompt_tokens + size.completion_tokens
    recipe = make_recipe(
        size, prompt=size.prompt_tokens, completion=size.completion_tokens, pack=8 * longest,
        prompts={"source": str(problems)},
        sampling={
            "backend": "hf" if missing_modules(("vllm",)) else "vllm",
            "vllm": {"enforce_eager": eager},
        },
        reward={"function": "gpu_parts.workload:checksum_reward", "workers": 1},
        replay={"preset": "ours", "warmup_steps": 1},
        optimizer={"learning_rate": size.moving_rate / 10},
        run={"steps": steps},
        checkpoint={"every_steps": CHECKPOINT_EVERY, "keep": 2},
    )  # fmt: skip
    return with_random_weights(recipe, context.work / "weights")


def write_recipe(context: Context, steps: int) -> "Recipe":
    """recipe.yaml of an eager run: starting twice, it has no time for graphs."""
    from grpo_replay.recipe import recipe_to_yaml

    recipe = run_recipe(context, steps, eager=True)
    (context.work / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    return recipe


def predicted_peak(recipe: "Recipe", device: str) -> float:
    from grpo_replay.lab.dry_run.planner import Machines, plan_memory

    ranks = (recipe.engine.num_processes,)
    here = Machines(device, ranks, device_capacity(device))
    plan = plan_memory(recipe, here)
    return plan.peak / 2**30


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def folder_gib(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**30
