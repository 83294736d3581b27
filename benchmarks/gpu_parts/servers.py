"""Part h: an asynchronous run with a vLLM server that has the trainer's card too."""

from typing import Any

from gpu_parts.colocated import REPLAY, SHOWN, check_gaps, check_replay
from gpu_parts.models import our_recipe, task_named
from gpu_parts.on_one_card import share
from gpu_parts.record import Context
from gpu_parts.whole_steps import Steps, train

WAYS = {"weights": [], "adapters": ["model.lora.r=16", "model.lora.lora_dropout=0"]}
ASYNCHRONOUS = (
    "sampling.backend=vllm_server", "sampling.servers.launch=1", "run.mode=async",
    "loss.behavior_logprobs=sampler", "sampling.collection.max_ahead_steps=1",
    "sampling.vllm.enforce_eager=true", "sampling.vllm.enable_sleep_mode=false",
)  # fmt: skip
NAMES = {
    **SHOWN, "partial_rollouts": "async/partial_rollouts", "trainer_idle": "async/trainer_idle",
    "server_idle": "async/sampler_idle", "age": "async/age_mean",
}  # fmt: skip


def in_train(context: Context, pushed: str) -> None:
    """Completions of 128 tokens, pushes of whole `weights` or of LoRA's `adapters`. Eager, since
    compiling takes longer than the run."""
    if context.on_gpu:
        share()
    steps = Steps(context)
    replay = (f"replay.{name}={value}" for name, value in REPLAY.items())
    task = task_named(context, "qwen3-0.6b")
    length = f"sampling.max_completion_length={min(task.completion_tokens, 128)}"
    recipe = our_recipe(context, task, *ASYNCHRONOUS, *WAYS[pushed], *replay, length)

    def end(metrics: Any) -> bool:
        shown = {name: metrics.get(key) for name, key in NAMES.items()}
        return steps.end(metrics["cost/generated_tokens"], **shown)

    train(recipe, context.work / f"server-{pushed}", end)
    steps.summarise()
    check_gaps(context, steps.rows, recipe.logprob_gap_limit)
    check_replay(context, steps.rows)
