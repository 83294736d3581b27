"""Parts 13 to 15: one update under settings that should change its time or memory alone."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpu_parts.devices import PeakMemory
from gpu_parts.record import Context, Skipped
from gpu_parts.sizes import MODELS, make_recipe
from gpu_parts.training import GRADIENT_AGREEMENT, beside_prediction, shape_of, timed
from gpu_parts.workload import open_engine, random_rows

if TYPE_CHECKING:
    from grpo_replay.recipe import Recipe
    from grpo_replay.replay.batch import TrainRow

EIGHTHS = (8, 3, 5, 2, 7, 4, 1, 6)
"""Lengths of the rows of an update, in eighths of the longest."""


def stages(context: Context) -> None:
    """ZeRO 2 and 3 on one rank, and ZeRO 2 with the optimizer on the host: the same gradient."""
    settings = {
        "ZeRO 2": {"engine": {"zero_stage": 2}},
        "ZeRO 3": {"engine": {"zero_stage": 3}},
        "ZeRO 2, optimizer offloaded": {"engine": {"zero_stage": 2, "offload": "optimizer"}},
    }
    compare(context, MODELS[0], settings)


def lora(context: Context) -> None:
    """Adapters of rank 16 beside all parameters; their gradients are not the same."""
    full: dict[str, Any] = {"engine": {"zero_stage": 2}}
    adapters = full | {"model": {"lora": {"r": 16}}}
    compare(context, MODELS[1], {"all parameters": full, "LoRA, rank 16": adapters}, same=False)


def packing(context: Context) -> None:
    """Rows of uneven length, padded to the longest under sdpa and packed under flex attention."""
    if context.size.device == "cpu":
        raise Skipped("flex attention needs a GPU; tests/engine/test_packing.py packs on a CPU")
    engine = {"zero_stage": 2}
    packed = {"model": {"attn_implementation": "flex_attention"}, "batch": {"packing": True}}
    compare(
        context,
        MODELS[0],
        {
            "padded, sdpa": {"engine": engine, "batch": {"packing": False}},
            "packed, flex attention": {"engine": engine, **packed},
        },
    )


def uneven_rows(recipe: "Recipe", lengths: Sequence[int]) -> "list[TrainRow]":
    return random_rows(lengths, recipe.prompts.max_prompt_length, shape_of(recipe).vocabulary)


def compare(
    context: Context, model: str, settings: Mapping[str, Mapping[str, Any]], same: bool = True,
    rows_of: Callable[..., "list[TrainRow]"] = uneven_rows,
) -> None:  # fmt: skip
    """One row of the table for each of the settings. `same`: their first gradient norms agree."""
    norms = [measure(context, model, name, layer, rows_of) for name, layer in settings.items()]
    if same:
        apart = max(norms) / min(norms) - 1
        claim = f"first gradient norms agree to {GRADIENT_AGREEMENT:.0%}"
        context.record.check(claim, apart <= GRADIENT_AGREEMENT, apart)


def measure(
    context: Context, model: str, name: str, layer: Mapping[str, Any],
    rows_of: Callable[..., "list[TrainRow]"],
) -> float:  # fmt: skip
    """Median seconds, tokens per second and peak memory of an update with these settings; the
    gradient norm of the first one."""
    size = context.size
    length, prompt = size.row_tokens, size.row_tokens // 8
    recipe = make_recipe(
        size, model, prompt=prompt, completion=length - prompt, pack=2 * length, **layer
    )
    lengths = [max(prompt + 1, length * each // 8) for each in EIGHTHS]
    rows = rows_of(recipe, lengths)
    tokens = sum(row.length_tokens for row in rows)
    meter = PeakMemory(size.device)
    with open_engine(recipe) as engine:
        meter.reset()
        updates = [timed(size.device, lambda: engine.update(rows)) for _ in range(size.updates + 1)]
        memory = beside_prediction(meter, recipe, size.device)
    seconds = statistics.median(took for _, took in updates[1:])
    first = updates[0][0]
    context.record.row("updates", {
        "settings": name, "seconds": seconds, "tokens_per_second": tokens / seconds,
        "micro_batches": first.micro_batches, "first_grad_norm": first.grad_norm, **memory,
    })  # fmt: skip
    norm = first.grad_norm
    context.record.check(f"{name}: a gradient", norm is not None and 0 < norm < math.inf, norm)
    return norm
