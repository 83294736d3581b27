"""Parts 2 and 9 to 11: updates of the engine alone."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_parts.devices import (
    GIB,
    PeakMemory,
    allocated_gib,
    device_capacity,
    device_name,
    is_out_of_memory,
    peak_tflops,
    synchronize,
    training_flops,
)
from gpu_parts.record import Context
from gpu_parts.sizes import MODELS, Size, make_recipe
from gpu_parts.workload import open_engine, random_rows

if TYPE_CHECKING:
    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
    from grpo_replay.lab.dry_run.memory import EngineMemory, ModelShape
    from grpo_replay.recipe import Recipe
    from grpo_replay.replay.batch import TrainRow

MICRO_BATCHES = 2  # per update: the second one finds the first one's gradients there
VISIBLE = 1e-4  # a step size at which a few updates show in bf16
GRADIENT_AGREEMENT = 0.02  # relative, of norms in bf16


def compare_chunks(context: Context) -> None:
    """The same updates with few and with many completion tokens' logits at once."""
    record = context.record
    norms = [measure_chunk(context, chunk) for chunk in context.size.chunks]
    apart = abs(norms[0] - norms[1]) / norms[1]
    record.check(
        f"first gradient norms agree to {GRADIENT_AGREEMENT:.0%}",
        apart <= GRADIENT_AGREEMENT,
        apart,
    )


def measure_chunk(context: Context, chunk: int) -> float:
    """Uneven rows, a log-prob pass and some updates; the gradient norm of the first one."""
    size, record = context.size, context.record
    pack = size.row_tokens
    recipe = row_recipe(size, MODELS[0], pack, chunk=chunk, optimizer={"learning_rate": VISIBLE})
    meter = PeakMemory(size.device)
    with open_engine(recipe) as engine:
        prompt = recipe.prompts.max_prompt_length
        lengths = [max(prompt + 1, pack * eighths // 8) for eighths in (8, 3, 5, 2, 7, 4)]
        rows = random_rows(lengths, prompt, shape_of(recipe).vocabulary)
        logprobs = engine.logprobs(rows)
        rows = [replace(row, behavior_logprobs=lp) for row, lp in zip(rows, logprobs, strict=True)]
        meter.reset()
        updates = [timed(size.device, lambda: engine.update(rows)) for _ in range(size.updates + 1)]
        memory = beside_prediction(meter, recipe, size.device)
    first, last = updates[0][0], updates[-1][0]
    middle = statistics.median(seconds for _, seconds in updates[1:])
    record.row("chunks", {
        "chunk_tokens": chunk, "micro_batches": first.micro_batches, "seconds": middle,
        "tokens_per_second": sum(lengths) / middle, "first_grad_norm": first.grad_norm,
        "first_loss": first.loss, "last_loss": last.loss, **memory,
        "left_when_closed_gib": allocated_gib(size.device),
    })  # fmt: skip
    record.check(f"chunks of {chunk}: the loss falls", last.loss < first.loss)
    return first.grad_norm


def measure_0_6b(context: Context) -> None:
    measure_packs(context, MODELS[0])


def measure_1_7b(context: Context) -> None:
    measure_packs(context, MODELS[1])


def measure_4b(context: Context) -> None:
    measure_packs(context, MODELS[2])


def measure_packs(context: Context, model: str) -> None:
    """Tokens per second, MFU and peak memory of an update, pack by pack, and the dry run's
    prediction; then the log-prob pass, and gathering the weights right after it."""
    size, record = context.size, context.record
    name = device_name(size.device)
    peak = peak_tflops(name, context.peak_tflops)
    record.figure("device", name)
    record.figure("peak TFLOP/s, dense bf16", peak)
    if peak is None:
        record.note(f"no MFU: the peak of {name!r} is not in the table; give --peak-tflops")
    largest = row_recipe(size, model, max(size.packs))
    at_rest = predicted_memory(largest, size.device).at_rest / GIB
    record.figure("GiB at rest, predicted with CUDA's context", at_rest)
    started = time.perf_counter()
    with open_engine(largest) as engine:
        record.figure("seconds to open the engine", time.perf_counter() - started)
        shape = shape_of(largest)
        record.figure("parameters", shape.parameters)
        for pack in size.packs:
            recipe = row_recipe(size, model, pack)
            row = {"model": model, "pack_tokens": pack}
            try:
                row |= measure_pack(engine, recipe, shape, size, peak)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                row |= {"out_of_memory": True, "predicted_gib": predicted_gib(recipe, size.device)}
                record.row("packs", row)
                record.note(f"out of memory at packs of {pack} tokens; larger ones left out")
                return
            record.row("packs", row)
        rows, _ = pack_rows(recipe, shape)
        measure_logprobs(context, engine, recipe, rows)


def measure_pack(
    engine: "DeepSpeedEngine", recipe: "Recipe", shape: "ModelShape", size: Size,
    peak: float | None,
) -> dict[str, Any]:  # fmt: skip
    """One row of the table. The first update is not timed. Raises RuntimeError if the engine
    did not make the micro-batches that are reported."""
    rows, lengths = pack_rows(recipe, shape)
    # The engine was opened for the largest pack; only the budget differs.
    engine._layout = replace(
        engine._layout, max_tokens=recipe.batch.max_tokens_per_microbatch, pairs_per_token=None
    )
    meter = PeakMemory(size.device)
    meter.reset()
    seconds = []
    for _ in range(size.updates + 1):
        result, took = timed(size.device, lambda: engine.update(rows))
        if result.micro_batches != MICRO_BATCHES:
            raise RuntimeError(
                f"{result.micro_batches} micro-batches of an update, expected {MICRO_BATCHES}: "
                "the engine did not take the budget set here"
            )
        seconds.append(took)
    memory = beside_prediction(meter, recipe, size.device)
    middle = statistics.median(seconds[1:])
    completions = sum(len(row.completion_token_ids) for row in rows)
    tflops = training_flops(shape, lengths, completions) / middle / 1e12
    return {
        "rows": f"{len(rows) // MICRO_BATCHES} x {lengths[0]}", "seconds": middle,
        "tokens_per_second": sum(lengths) / middle, "tflops": tflops,
        "mfu_percent": 100 * tflops / peak if peak else None,
        **memory,
    }  # fmt: skip


def measure_logprobs(
    context: Context, engine: "DeepSpeedEngine", recipe: "Recipe", rows: list["TrainRow"]
) -> None:
    """The log-prob pass; and a weight push after it with no update between, as in a step
    without survivors."""
    from grpo_replay.sampling.sampler_protocol import SYNC_BUCKET_BYTES

    device, record = context.size.device, context.record
    engine.logprobs(rows)
    _, took = timed(device, lambda: engine.logprobs(rows))
    tokens = sum(row.length_tokens for row in rows)
    record.figure("log-prob pass, tokens/s", tokens / took)
    gathered = engine.named_full_tensors(SYNC_BUCKET_BYTES)
    count, took = timed(device, lambda: sum(1 for _ in gathered))
    record.figure("seconds to gather all weights", took)
    record.check("weights are gathered after a log-prob pass without an update", count > 0, count)


def row_recipe(
    size: Size, model: str, pack: int, chunk: int | None = None, **sections: Any
) -> "Recipe":
    """Rows fill the pack: one of `row_tokens`, or shorter if the pack is; an eighth is prompt."""
    length = min(size.row_tokens, pack)
    prompt = length // 8
    engine = {"logprob_chunk_tokens": chunk} if chunk else {}
    return make_recipe(
        size, model, prompt=prompt, completion=length - prompt, pack=pack, engine=engine, **sections
    )


def pack_rows(recipe: "Recipe", shape: "ModelShape") -> tuple[list["TrainRow"], list[int]]:
    """Rows of one length that make MICRO_BATCHES full packs, and their lengths."""
    length, pack = recipe.longest_sequence, recipe.batch.max_tokens_per_microbatch
    lengths = [length] * (MICRO_BATCHES * (pack // length))
    return random_rows(lengths, recipe.prompts.max_prompt_length, shape.vocabulary), lengths


def shape_of(recipe: "Recipe") -> "ModelShape":
    from grpo_replay.engine.models import load_config
    from grpo_replay.lab.dry_run.trace import model_shape

    return model_shape(load_config(recipe.model))


def beside_prediction(meter: PeakMemory, recipe: "Recipe", device: str) -> dict[str, float | None]:
    """What was measured, what the dry run says, and by how much the latter is off."""
    measured, predicted = meter.read(), predicted_gib(recipe, device)
    off = 100 * (predicted / measured["peak_gib"] - 1) if measured["peak_gib"] else None
    return {**measured, "predicted_gib": predicted, "prediction_off_percent": off}


def predicted_gib(recipe: "Recipe", device: str) -> float:
    """The dry run's peak of the engine, without the context that torch does not count."""
    memory = predicted_memory(recipe, device)
    return (memory.peak - memory.base) / GIB


def predicted_memory(recipe: "Recipe", device: str) -> "EngineMemory":
    from grpo_replay.lab.dry_run.planner import Machines, plan_memory

    ranks = (recipe.engine.num_processes,)
    here = Machines(device, ranks, device_capacity(device))
    return plan_memory(recipe, here).engine


def timed(device: str, action: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and its seconds."""
    synchronize(device)
    started = time.perf_counter()
    result = action()
    synchronize(device)
    return result, time.perf_counter() - started
