"""Part d: a whole step, generation and updates, ours or TRL's, on the same batch.

Both get the same model, prompts, completions of a prompt, longest completion, rows of a
micro-batch, updates of a step, loss (clipped, token mean), AdamW, learning rate, reward, precision
(bf16 on fp32 weights on a GPU), gradient checkpointing, and vLLM colocated with the same share of
the card, asleep during updates. Replay is off; rows without a signal are trained on, as TRL does.
A step lasts from the end of the one before to its own.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gpu_parts.devices import MostUsed, synchronize
from gpu_parts.models import Task, our_recipe, task_named, vllm_settings
from gpu_parts.record import Context
from gpu_parts.sizes import GROUP, UPDATES
from grpo_replay.training import Observer

SPARE_SECONDS = 8.0
"""A job ends with the steps that it has, if no more are left than another step and this."""
LIKE_TRL = (
    "replay.preset=grpo", "replay.drop_zero_variance=false", "loss.dual_clip=null",
    "optimizer.adamw.weight_decay=0",
)  # fmt: skip


class Enough(Exception):
    """Enough steps, or no more time. Ends a run before it writes a checkpoint."""


class Steps:
    """The steps of one trainer, in the record as they end."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._memory = MostUsed(context.size.device)
        self._last = time.perf_counter()
        self.rows: list[dict[str, Any]] = []

    def end(self, tokens: float, **more: Any) -> bool:
        """A step is over; returns whether another one is to come."""
        context = self._context
        synchronize(context.size.device)
        self.rows.append({
            "step": len(self.rows) + 1, "seconds": time.perf_counter() - self._last,
            "completion_tokens": tokens, "most_gib": self._memory.read(), **more,
        })  # fmt: skip
        context.record.table("steps", self.rows)
        self._last = time.perf_counter()
        first = len(self.rows) == 1  # with the start in it
        needed = SPARE_SECONDS + (0.0 if first else self.rows[-1]["seconds"])
        return len(self.rows) < context.size.steps and context.seconds_left() > needed

    @property
    def timed(self) -> list[dict[str, Any]]:
        """The steps that count; the first ones, with the start in them, do not."""
        return self.rows[self._context.size.not_timed :]

    def summarise(self) -> None:
        record, timed = self._context.record, self.timed
        record.check("steps were timed", bool(timed), len(self.rows))
        for name, of in (
            ("seconds of a step", "seconds"),
            ("completion tokens of a step", "completion_tokens"),
            ("most memory in use, GiB", "most_gib"),
        ):
            middle = statistics.median if of != "most_gib" else max
            record.figure(name, middle(row[of] for row in timed) if timed else None)


def ours(context: Context, name: str) -> None:
    recipe = our_recipe(context, task_named(context, name), *LIKE_TRL)
    record_vllm(context)
    steps = Steps(context)
    parts = ("generation", "logprob", "training", "sync")
    train(recipe, context.work / f"ours-{name}", lambda metrics: steps.end(
        metrics["cost/generated_tokens"], gap=metrics["sampler/logprob_gap_mean"],
        **{part: metrics[f"cost/{part}_seconds"] for part in parts},
    ))  # fmt: skip
    steps.summarise()


def record_vllm(context: Context) -> None:
    """Which of two very different speeds of generation was measured."""
    if context.sampler == "vllm":
        eager = vllm_settings(context)["enforce_eager"]
        context.record.figure("vLLM", "eager" if eager else "compiled, with CUDA graphs")


def train(recipe: Any, folder: Path, on_step: Callable[[Mapping[str, Any]], bool]) -> None:
    """Our trainer in this process, until `on_step` returns False."""
    from grpo_replay.training.run import run_training

    class Watch(Observer):
        def on_step(self, metrics: Mapping[str, Any]) -> None:
            if not on_step(metrics):
                raise Enough

    with contextlib.suppress(Enough):
        run_training(recipe, folder, False, Watch())


def trl(context: Context, name: str) -> None:
    from trl import GRPOTrainer

    steps = Steps(context)
    record_vllm(context)
    trl_trainer(context, task_named(context, name), steps, GRPOTrainer).train()
    steps.summarise()


def trl_trainer(context: Context, task: Task, steps: Steps, kind: Any, **more: Any) -> Any:
    """A GRPOTrainer, or a subclass with further arguments, whose steps `steps` hears of."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    tokens: list[int] = []

    def reward(
        completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [task.grade(text, gold) for text, gold in zip(completions, answer, strict=True)]

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % UPDATES == 0:
                control.should_training_stop = not steps.end(sum(tokens))
                tokens.clear()

    use_eager_vllm(context)
    trainer = kind(
        str(task.folder), reward, trl_config(context, task), Dataset.from_list(task.rows),
        processing_class=AutoTokenizer.from_pretrained(task.folder), callbacks=[Watch()], **more,
    )  # fmt: skip
    if context.sampler == "vllm" and not context.on_gpu:
        push_to_cpu(trainer)
    return trainer


def trl_config(context: Context, task: Task) -> Any:
    from trl import GRPOConfig

    size, rows, on_gpu = context.size, task.microbatch_rows, context.on_gpu
    parts = task.prompts * GROUP // rows  # micro-batches of a step
    vllm = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": task.longest,
        "vllm_gpu_memory_utilization": size.vllm_share,
        "vllm_enable_sleep_mode": vllm_settings(context)["enable_sleep_mode"],
    }  # fmt: skip
    return GRPOConfig(
        output_dir=str(context.work / f"{context.record.result['job']}-run"), use_cpu=not on_gpu,
        bf16=on_gpu, report_to=[], save_strategy="no", logging_steps=UPDATES, disable_tqdm=True,
        max_steps=UPDATES * size.steps, gradient_checkpointing=task.checkpointing,
        per_device_train_batch_size=rows, steps_per_generation=parts,
        gradient_accumulation_steps=parts // UPDATES, num_generations=GROUP,
        max_completion_length=task.completion_tokens, temperature=1.0, top_p=1.0, top_k=0,
        beta=0.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28, learning_rate=task.rate,
        weight_decay=0.0, lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=1.0,
        model_init_kwargs={"dtype": "float32"}, **(vllm if context.sampler == "vllm" else {}),
    )  # fmt: skip


def use_eager_vllm(context: Context) -> None:
    """TRL has no argument for it."""
    if context.sampler == "vllm" and vllm_settings(context)["enforce_eager"]:
        from trl.generation import vllm_generation

        vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)


def push_to_cpu(trainer: Any) -> None:
    """TRL's own push fails with vLLM's CPU build, which repacks weights as it loads them."""
    generation = trainer.vllm_generation

    def push() -> None:
        named = trainer.model.named_parameters(remove_duplicate=False)
        weights = iter([(name, value.detach().clone()) for name, value in named])
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        generation.llm.reset_prefix_cache()

    generation.sync_weights = push
