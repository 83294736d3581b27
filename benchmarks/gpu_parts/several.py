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
    # An asynchronous step has a gap only if the present policy sampled.
    gaps = [gap for row in rows if (gap := row["sampler/logprob_gap_mean"]) is not None]
    limit = recipe.logprob_gap_limit
    record.check(f"mean gap within {limit:g} nats", max(gaps, default=0.0) <= limit, gaps)


def shared_prompts(context: Context) -> None:
    """Groups of eight with one prompt, seven eighths of a row, beside rows with prompts of their
    own; sdpa, and on a GPU packs of flex attention."""
    settings: dict[str, Any] = {"sdpa": {"engine": {"zero_stage": 2}}}
    if context.size.device == "cuda":
        flex = {"model": {"attn_implementation": "flex_attention"}}
        settings["packs, flex attention"] = settings["sdpa"] | flex
    for name, rows_of in (("one prompt to eight rows", rows_of_groups), ("own", rows_alone)):
        named = {f"{name}, {each}": layer for each, layer in settings.items()}
        compare(context, MODELS[0], named, rows_of=rows_of)


def rows_alone(recipe: Any, lengths: Sequence[int]) -> list[Any]:
    """Two groups' number of rows of a quarter of the longest, seven eighths of it prompt."""
    length = max(lengths) // 4
    return random_rows([length] * (2 * GROUP), length * 7 // 8, shape_of(recipe).vocabulary)


def rows_of_groups(recipe: Any, lengths: Sequence[int]) -> list[Any]:
    """The same rows, of which every group has the prompt of its first."""
    rows = rows_alone(recipe, lengths)
    return [
        replace(row, prompt_token_ids=rows[index // GROUP * GROUP].prompt_token_ids)
        for index, row in enumerate(rows)
    ]
