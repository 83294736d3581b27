"""Hours of a run: tokens of its steps over the speed of one GPU: stated, measured or assumed.

Assumed: an update reaches 30 % of the peak of an H100 or H200, and generating a rollout costs μ
times as much as training on it (paper B). Counted are generation, by the rank or server that
samples most, the updates and the pass that recomputes log-probs; not evaluation, weight pushes and
checkpoints.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_replay.lab.dry_run.assumptions import Expected
from grpo_replay.lab.dry_run.fit import Hardware
from grpo_replay.lab.dry_run.memory import ModelShape
from grpo_replay.lab.dry_run.sizes import server_gpus, servers_of
from grpo_replay.recipe import Recipe

UTILISATION = 0.3
"""Assumed share of the peak that updates reach (MFU): 0.3 to 0.5 is usual for dense models."""
PEAK_FLOPS = {"bfloat16": 989e12, "float32": 67e12}
"""Floating-point operations per second of an H100 or H200, dense, from NVIDIA's data sheet."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Completion tokens per second of one GPU (on a CPU, of one rank or server), and where they
    come from. `other_seconds` is the rest of a step; None: only the log-prob pass, a third of an
    update."""

    generated: float
    trained: float
    source: str
    other_seconds: float | None = None
    assumed: bool = False


def choose_speed(
    recipe: Recipe,
    expected: Expected,
    shape: ModelShape | None,
    hardware: Hardware,
    generated: float | None = None,
    trained: float | None = None,
    measured: Speed | None = None,
) -> Speed | None:
    """The speed to plan with: stated (one of the two, or both; μ gives the other), else measured,
    else assumed for a GPU. None if nothing is known."""
    if generated is not None or trained is not None:
        per_trained = trained if trained is not None else (generated or 0.0) * expected.mu
        per_generated = generated if generated is not None else per_trained / expected.mu
        other = None if measured is None else measured.other_seconds
        both = generated is not None and trained is not None
        source = "stated" if both else f"stated, and μ {expected.mu:.3g}"
        return Speed(per_generated, per_trained, source, other)
    if measured is not None or shape is None or hardware.device != "cuda":
        return measured
    peak = PEAK_FLOPS[recipe.model.dtype]
    per_trained = expected.completion_tokens * UTILISATION * peak / update_flops(shape, expected)
    return Speed(
        per_trained / expected.mu,
        per_trained,
        f"assumed: {UTILISATION:.0%} of {peak / 1e12:.0f} TFLOP/s (H100) in updates, and μ "
        f"{expected.mu:.3g}",
        assumed=True,
    )


def update_flops(shape: ModelShape, expected: Expected) -> float:
    """Floating-point operations of an update per rollout of mean length: 6 per active parameter and
    token, 4 if LoRA freezes it (it has no gradient), and causal attention. What gradient
    checkpointing repeats is not counted."""
    tokens = expected.prompt_tokens + expected.completion_tokens
    active = shape.parameters if shape.active_parameters is None else shape.active_parameters
    per_token = (4 if shape.adapters else 6) * active + 6 * shape.adapters
    return per_token * tokens + 6 * shape.layers * shape.attention_width * tokens**2


def describe_time(
    recipe: Recipe,
    step: Mapping[str, Any],
    replay: Mapping[str, Any],
    expected: Expected,
    speed: Speed | None,
    hardware: Hardware,
) -> dict[str, Any]:
    """Seconds of a step and hours of the run; None where no speed is known."""
    steps = recipe.run.steps
    if speed is None:
        return {"steps": steps, "hours": None, "gpu_hours": None}
    tokens, processes = expected.completion_tokens, hardware.processes
    servers = server_gpus(recipe)
    per_generated = tokens / speed.generated
    generation = _busiest(recipe, step["generated_rollouts"], processes) * per_generated
    per_trained = tokens / speed.trained / processes
    survivors, trained = step["surviving_rollouts_expected"], step["trained_rollouts_expected"]
    other = speed.other_seconds
    if other is None:
        recomputes = recipe.loss.behavior_logprobs == "trainer"
        other = survivors * per_trained / 3 if recomputes else 0.0
    first = replay["first_replay_step"]
    early = steps if first is None else min(steps, first - 1)
    # Servers of an asynchronous run sample while the trainer works.
    both = max if recipe.run.mode == "async" else sum
    seconds = sum(
        count * (both((generation, rollouts * per_trained)) + other)
        for count, rollouts in ((early, survivors), (steps - early, trained))
    )
    hours = seconds / 3600
    on_gpus = hardware.device == "cuda"
    return {
        "steps": steps,
        "hours": _significant(hours),
        "gpu_hours": _significant(hours * (processes + servers)) if on_gpus else None,
        "generation_seconds_per_step": _significant(generation),
        "training_seconds_per_step": _significant(trained * per_trained),
        "other_seconds_per_step": _significant(other),
        "generated_tokens_per_second": _significant(speed.generated),
        "trained_tokens_per_second": _significant(speed.trained),
        "speed_is": speed.source,
    }


def _busiest(recipe: Recipe, generated: float, processes: int) -> float:
    """Rollouts of a step per GPU of the rank or server that samples most: each takes whole ones.
    Servers of an asynchronous run do not wait for a step, so they share evenly."""
    if recipe.sampling.collection.replay_journal is not None:
        return 0.0
    servers = servers_of(recipe)
    share = generated / (servers or processes)
    if recipe.run.mode == "sync":
        share = math.ceil(share)
    return share / recipe.sampling.gpus_per_server if servers else share


def _significant(value: float) -> float:
    """Three significant digits: more would claim what no assumption gives."""
    return float(f"{value:.3g}")
