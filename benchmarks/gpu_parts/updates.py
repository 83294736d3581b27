"""Part e: updates of the engine alone, on full micro-batches; and what may be tried besides."""

import json
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_parts.devices import (
    GIB,
    device_capacity,
    peak_gib,
    peak_tflops,
    reset_peak,
    timed,
    training_flops,
)
from gpu_parts.record import Context

if TYPE_CHECKING:
    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
    from grpo_replay.lab.dry_run.memory import ModelShape
    from grpo_replay.recipe import Recipe
    from grpo_replay.replay.batch import TrainRow

MICRO_BATCHES = 2  # of an update: the second one finds the first one's gradients there
KERNELS = 20  # rows of the table
VARIANTS = {
    "ZeRO 2": ["engine.zero_stage=2"],
    "ZeRO 3": ["engine.zero_stage=3"],
    "LoRA, rank 16": ["engine.zero_stage=2", "model.lora.r=16"],
}


def measure(context: Context, argument: str) -> None:
    """`MODEL: VARIANT`. Tokens per second, MFU and peak memory of an update, way by way and pack
    by pack, beside the dry run's memory; the log-prob pass; and where the host waits."""
    import torch

    model, _, variant = argument.partition(": ")
    record, size = context.record, context.size
    largest = update_recipe(context, model, variant, max(size.packs))
    with ExitStack() as stack:
        engine, seconds = timed(size.device, lambda: open_engine(largest, stack))
        record.figure("seconds to open the engine", seconds)
        measure_packs(context, engine, argument, "as it is", size.packs)
        rows, lengths = full_rows(largest, shape_of(largest))
        plain = logprob_pass(context, engine, rows, lengths, "as it is")
        if engine._stage == 3:
            return
        stack.enter_context(compiler(size.device))
        _, seconds = timed(size.device, engine._compile)
        record.figure("seconds to compile and try", seconds)
        gaps = np.abs(logprob_pass(context, engine, rows, lengths, "compiled") - plain)
        record.figure("log-probs compiled and not, mean difference", float(gaps.mean()))
        record.figure("log-probs compiled and not, largest difference", float(gaps.max()))
        measure_packs(context, engine, argument, "compiled", size.packs)
        record.table("waits of an update", waits(size.device, lambda: engine.update(rows)))
        record.table("kernels of an update", kernels(size.device, lambda: engine.update(rows)))
        engine._model.gradient_checkpointing_disable()
        try:
            measure_packs(context, engine, argument, "compiled, no checkpointing", size.packs)
        except torch.OutOfMemoryError:
            record.note("without checkpointing the card's memory is too small for a pack")


def measure_packs(
    context: Context, engine: "DeepSpeedEngine", argument: str, way: str, packs: Sequence[int]
) -> None:
    """A row of the table for each pack that has none."""
    model, _, variant = argument.partition(": ")
    for pack in packs:
        compiled, kept = way.startswith("compiled"), not way.endswith("no checkpointing")
        words = f"model.compile={compiled}", f"model.gradient_checkpointing={kept}"
        recipe = update_recipe(context, model, variant, pack, *words)
        named = {"model": model, "variant": variant, "way": way, "pack_tokens": pack}
        if any(named.items() <= row.items() for row in context.record.rows("packs")):
            continue  # taken up again after it
        row = named | measure_pack(context, engine, recipe, shape_of(recipe))
        context.record.row("packs", row)


def logprob_pass(
    context: Context,
    engine: "DeepSpeedEngine",
    rows: list["TrainRow"],
    lengths: list[int],
    way: str,
) -> np.ndarray:
    """The log-probs of the second of two passes, which alone is timed."""
    engine.logprobs(rows)
    found, seconds = timed(context.size.device, lambda: engine.logprobs(rows))
    context.record.figure(f"log-prob pass {way}, tokens/s", sum(lengths) / seconds)
    return np.concatenate(found)


@contextmanager
def compiler(device: str) -> Iterator[None]:
    """On a CPU graphs are captured and not made faster: its compiler takes minutes."""
    import torch

    usual = torch.compile
    if device == "cpu":
        torch.compile = partial(usual, backend="aot_eager")
    try:
        yield
    finally:
        torch.compile = usual


def waits(device: str, action: Callable[[], Any]) -> list[dict[str, Any]]:
    """Where the host waits for the device, and how often, by torch's count; none on a CPU."""
    if device != "cuda":
        return []
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(each.filename).name}:{each.lineno}"
        for each in caught
        if "synchronizing" in str(each.message)
    )
    return [{"place": place, "waits": count} for place, count in places.most_common()]


def kernels(device: str, action: Callable[[], Any]) -> list[dict[str, Any]]:
    """The largest by time on the device, in milliseconds; on a CPU torch's operators."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        timed(device, action)
    column = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    times = {each.key: (getattr(each, column) / 1e3, each.count) for each in found.key_averages()}
    whole = {"kernel": "all", "ms": sum(ms for ms, _ in times.values()), "calls": None}
    largest = sorted(times.items(), key=lambda item: -item[1][0])[:KERNELS]
    return [whole] + [{"kernel": k[:60], "ms": ms, "calls": n} for k, (ms, n) in largest]


def update_recipe(
    context: Context, model: str, variant: str, pack: int, *settings: str
) -> "Recipe":
    """Rows fill the pack; an eighth is prompt. Random weights; bf16 and checkpointing."""
    from grpo_replay.recipe import load_recipe

    size = context.size
    length = min(size.row_tokens, pack)
    return load_recipe("smollm2", [
        f"model.path=builtin:{model}", "model.tokenizer=builtin:bytes", "model.dtype=bfloat16",
        "model.gradient_checkpointing=true", "model.compile=false",
        f"model.random_init={json.dumps(size.shapes.get(model) or True)}",
        f"prompts.max_prompt_length={length // 8}",
        f"sampling.max_completion_length={length - length // 8}",
        f"batch.max_tokens_per_microbatch={pack}", f"engine.device={size.device}",
        *VARIANTS[variant], *settings,
    ])  # fmt: skip


def open_engine(recipe: "Recipe", stack: ExitStack) -> "DeepSpeedEngine":
    """The recipe's engine in this process as the only rank; weights are drawn on the device."""
    import torch

    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
    from grpo_replay.engine.models import load_policy, load_tokenizer
    from grpo_replay.engine.processes import initialize_processes

    comm, device = initialize_processes(recipe)
    with torch.device(recipe.engine.device):
        policy = load_policy(recipe.model, recipe.run.seed)
    tokenizer, stage = load_tokenizer(recipe.model), recipe.zero_stage(comm.world_size)
    engine = DeepSpeedEngine(recipe, policy, tokenizer, comm, device, stage)
    stack.callback(engine.close)
    return engine


def measure_pack(
    context: Context, engine: "DeepSpeedEngine", recipe: "Recipe", shape: "ModelShape"
) -> dict[str, Any]:
    """One row of the table. The first update is not timed. Raises RuntimeError if the engine
    did not make the micro-batches that are reported."""
    size = context.size
    rows, lengths = full_rows(recipe, shape)
    # The engine was opened for the largest pack; only the budget differs.
    engine._layout = replace(
        engine._layout, max_tokens=recipe.batch.max_tokens_per_microbatch, pairs_per_token=None
    )
    seconds = []
    reset_peak(size.device)
    for _ in range(size.updates + 1):
        result, took = timed(size.device, lambda: engine.update(rows))
        if result.micro_batches != MICRO_BATCHES:
            raise RuntimeError(
                f"{result.micro_batches} micro-batches of an update, expected {MICRO_BATCHES}: "
                "the engine did not take the budget set here"
            )
        seconds.append(took)
    middle = statistics.median(seconds[1:])
    completions = sum(len(row.completion_token_ids) for row in rows)
    tflops = training_flops(shape, lengths, completions) / middle / 1e12
    peak = peak_tflops(size.device)
    whole = recipe.model.lora.r is None  # of adapters, fewer operations are needed
    return {
        "rows": f"{len(rows) // MICRO_BATCHES} x {lengths[0]}", "seconds": middle,
        "tokens_per_second": sum(lengths) / middle,
        "mfu_percent": 100 * tflops / peak if peak and whole else None,
        "peak_gib": peak_gib(size.device),
        "predicted_gib": predicted_gib(recipe, size.device),
    }  # fmt: skip


def full_rows(recipe: "Recipe", shape: "ModelShape") -> tuple[list["TrainRow"], list[int]]:
    """Rows of one length that make MICRO_BATCHES full packs, and their lengths: uniform tokens,
    mixed advantages, and behaviour log-probs of a uniform policy, which random weights nearly
    are."""
    from grpo_replay.replay.batch import TrainRow

    length, prompt = recipe.longest_sequence, recipe.prompts.max_prompt_length
    count = MICRO_BATCHES * (recipe.batch.max_tokens_per_microbatch // length)
    rng = np.random.default_rng(0)
    share = 1.0 / (count * (length - prompt))
    rows = []
    for index in range(count):
        tokens = rng.integers(0, shape.vocabulary, length).astype(np.int32)
        logprobs_T = np.full(length - prompt, -np.log(shape.vocabulary), np.float32)
        advantage = 1.0 if index % 2 else -1.0
        rows.append(
            TrainRow(tokens[:prompt], tokens[prompt:], logprobs_T, logprobs_T, advantage, share)
        )
    return rows, [length] * count


def shape_of(recipe: "Recipe") -> "ModelShape":
    from grpo_replay.engine.models import load_config
    from grpo_replay.lab.dry_run.trace import model_shape

    return model_shape(load_config(recipe.model))


def predicted_gib(recipe: "Recipe", device: str) -> float:
    """The dry run's peak of the engine, without the context that torch does not count."""
    from grpo_replay.lab.dry_run.planner import Machines, plan_memory

    here = Machines(device, (recipe.engine.num_processes,), device_capacity(device))
    memory = plan_memory(recipe, here).engine
    return (memory.peak - memory.base) / GIB
