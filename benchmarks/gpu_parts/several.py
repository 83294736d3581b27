"""Parts 16 to 20: two GPUs (two ranks, or a rank and a vLLM server), and shared prompts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpu_parts.record import Context, Skipped
from gpu_parts.sizes import MODELS
from gpu_parts.training import shape_of
from gpu_parts.variants import compare
from gpu_parts.whole_runs import SHOWN, metrics_of, train, write_recipe
from gpu_parts.workload import random_rows

STEPS = 3
GROUP = 8
SERVER = ("sampling.backend=vllm_server", "sampling.servers.launch=1")


def two_ranks(context: Context) -> None:
    """ZeRO 3 over two ranks (NCCL on GPUs, gloo on a CPU), each with a sampler of its own."""
    run(context, "engine.num_processes=2")


def tensor_parallel(context: Context) -> None:
    """Two ranks whose samplers are one vLLM engine."""
    run(context, "engine.num_processes=2", "sampling.vllm.tensor_parallel_size=2")


def nccl_weights(context: Context) -> None:
    """One rank, and a vLLM server that gets its weights over NCCL."""
    if context.size.device == "cpu":
        raise Skipped("NCCL needs GPUs; tests/sampling/test_vllm_nccl.py does this over gloo")
    run(context, *SERVER, "sampling.servers.weight_transfer=nccl")


def asynchronous(context: Context) -> None:
    """One rank trains while a vLLM server samples."""
    run(context, *SERVER, "run.mode=async", "loss.behavior_logprobs=sampler")


def run(context: Context, *settings: str) -> None:
    """A run of `STEPS` steps with these settings: every step is there, and the gap within its
    limit."""
    record = context.record
    recipe = write_recipe(context, steps=STEPS)
    words = [word for setting in settings for word in ("--set", setting)]
    record.figure("seconds, with start and end", train(record, context.work, "run", *words))
    rows = metrics_of(context.work / "run")
    for row in rows:
        record.row("steps", {name.removeprefix("cost/"): row.get(name) for name in SHOWN})
    steps = [row["step"] for row in rows]
    record.check(f"{STEPS} steps", steps == list(range(1, STEPS + 1)), steps)
    gaps = [row["sampler/logprob_gap_mean"] for row in rows]
    limit = recipe.logprob_gap_limit
    record.check(
        f"mean gap within {limit:g} nats", all(g is not None and g <= limit for g in gaps), gaps
    )


def shared_prompts(context: Context) -> None:
    """Groups of eight with prompts of seven eighths of a row: each prompt once, or eight times."""
    engine = {"zero_stage": 2}
    shared, separate = (
        {"engine": engine, "batch": {"share_prompts": share}} for share in (True, False)
    )
    settings: dict[str, Any] = {"shared prompts": shared, "separate rows": separate}
    if context.size.device == "cuda":
        flex = {"model": {"attn_implementation": "flex_attention"}}
        settings["shared prompts, packed, flex attention"] = shared | flex
    compare(context, MODELS[0], settings, rows_of=rows_of_groups)


def rows_of_groups(recipe: Any, lengths: Sequence[int]) -> list[Any]:
    """Rows of a quarter of the longest, seven eighths of it the prompt of their group."""
    length = max(lengths) // 4
    prompt = length * 7 // 8
    rows = random_rows([length] * (2 * GROUP), prompt, shape_of(recipe).vocabulary)
    return [
        replace(row, prompt_token_ids=rows[index // GROUP * GROUP].prompt_token_ids)
        for index, row in enumerate(rows)
    ]
