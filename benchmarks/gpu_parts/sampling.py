"""Parts 3 to 6: vLLM in the trainer's process, beside the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_parts.devices import GIB, device_capacity, free_gib, host_available_gib, release
from gpu_parts.record import Context, Record
from gpu_parts.sizes import MODELS, Size, make_recipe
from gpu_parts.training import timed
from gpu_parts.workload import gap_in_nats, make_requests, open_engine, rows_of

if TYPE_CHECKING:
    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
    from grpo_replay.recipe import Recipe
    from grpo_replay.sampling.sampler_protocol import Sampler

LEAK_GIB = 0.5
"""How much less may be free after the last cycle than after the first."""


def measure_memory(context: Context) -> None:
    """Memory of the device, free and used (CUDA's context included), as engine and sampler open,
    generate, sleep and close."""
    size, record = context.size, context.record
    recipe = sampling_recipe(size, eager=True)
    plan = planned(recipe, size)
    capacity = device_capacity(size.device) / GIB

    def stage(name: str, predicted: float | None) -> None:
        free = free_gib(size.device)
        record.row("free memory", {
            "stage": name, "free_gib": free, "used_gib": capacity - free,
            "predicted_gib": predicted,
        })  # fmt: skip

    stage("nothing open", None)
    at_rest = plan.engine.at_rest / GIB
    awake, asleep = plan.sampler.awake / GIB, plan.sampler.asleep / GIB
    with open_engine(recipe) as engine:
        release()
        stage("engine at rest", at_rest)
        with open_vllm(recipe, engine, context.work) as sampler:
            stage("vLLM open", at_rest + awake)
            requests = requests_of(size, step=1)
            for turn in ("first", "second"):
                completions, seconds = timed(size.device, lambda: list(sampler.generate(requests)))
                tokens = sum(len(completion.token_ids) for completion in completions)
                record.figure(f"tokens/s, {turn} generation", tokens / seconds)
            stage("after generation", at_rest + awake)
            sampler.sleep()
            release()
            stage("vLLM asleep", at_rest + asleep)
        stage("vLLM closed", at_rest)
    record.check("every request has its completion", len(completions) == len(requests))


def compare_logprobs(context: Context) -> None:
    """The log-prob gap at temperature 1, and completions of the same seeds, twice."""
    size, record = context.size, context.record
    recipe = sampling_recipe(size, eager=True)
    with open_engine(recipe) as engine, open_vllm(recipe, engine, context.work) as sampler:
        requests = requests_of(size, step=1)
        first = {c.key: c for c in sampler.generate(requests)}
        again = {c.key: c for c in sampler.generate(requests)}
        turned = {c.key: c for c in sampler.generate(requests[::-1])}
        rows = rows_of(requests, list(first.values()))
        measure_gap(context, recipe, engine, rows)
    record.figure("tokens sampled", sum(len(row.completion_token_ids) for row in rows))

    def same(others: dict[Any, Any]) -> int:
        return sum(first[key].token_ids.tolist() == others[key].token_ids.tolist() for key in first)

    everything = len(requests)
    # The second sampling finds the prompts in the prefix cache, so its batches have other shapes.
    record.figure("same seeds, same order: same completions", f"{same(again)} of {everything}")
    record.figure("same seeds, reversed order: same completions", f"{same(turned)} of {everything}")
    different = len({tuple(c.token_ids.tolist()) for c in first.values()})
    record.check("different seeds, different completions", different > everything // 2, different)


def cycle_eager(context: Context) -> None:
    cycle(context, eager=True)


def cycle_with_graphs(context: Context) -> None:
    if context.size.device == "cpu":
        context.record.note("a CPU captures no graphs: this is the eager cycle again")
    cycle(context, eager=False)


def cycle(context: Context, eager: bool) -> None:
    """Generate, sleep, train, wake the weights and reload them, wake the cache and generate: as
    in a training step, several times over."""
    size, record = context.size, context.record
    recipe = sampling_recipe(size, eager)
    rows = []
    with open_engine(recipe) as engine, open_vllm(recipe, engine, context.work) as sampler:
        for number in range(size.cycles):
            row = one_cycle(context, recipe, engine, sampler, number)
            check_cycle(record, recipe, row, rows[-1] if rows else None)
            rows.append(row)
    if size.device == "cuda":
        lost = rows[0]["free_asleep_gib"] - rows[-1]["free_asleep_gib"]
        record.check(f"at most {LEAK_GIB} GiB lost over the cycles", lost <= LEAK_GIB, lost)


def one_cycle(
    context: Context, recipe: "Recipe", engine: "DeepSpeedEngine", sampler: "Sampler", number: int
) -> dict[str, Any]:
    """A row of the table; the weights it pushes have version `number` + 1."""
    from grpo_replay.training.weight_sync import sync_weights

    size = context.size
    requests = requests_of(size, step=number + 1)
    completions, generating = timed(size.device, lambda: list(sampler.generate(requests)))
    awake, host_awake = free_gib(size.device), host_available_gib()
    _, sleeping = timed(size.device, sampler.sleep)
    release()
    asleep, host_asleep = free_gib(size.device), host_available_gib()
    rows = rows_of(requests, completions)
    gap = gap_in_nats(engine.logprobs(rows), rows)
    _, training = timed(size.device, lambda: engine.update(rows))
    moved = gap_in_nats(engine.logprobs(rows), rows)
    _, reloading = timed(size.device, lambda: sync_weights(engine, sampler, number + 1))
    ends = {c.policy_version for c in completions} | {c.policy_version_end for c in completions}
    row = {
        "cycle": number + 1, "versions": sorted(ends),
        "tokens_per_second": sum(len(c.token_ids) for c in completions) / generating,
        "gap_mean_nats": float(gap.mean()), "gap_max_nats": float(gap.max()),
        "moved_by_update_nats": float(moved.mean()), "free_awake_gib": awake,
        "free_asleep_gib": asleep, "free_reloaded_gib": free_gib(size.device),
        "host_taken_by_sleep_gib": host_awake - host_asleep, "sleep_seconds": sleeping,
        "update_seconds": training, "wake_and_reload_seconds": reloading,
    }  # fmt: skip
    context.record.row("cycles", row)
    return row


def check_cycle(
    record: Record, recipe: "Recipe", row: dict[str, Any], before: dict[str, Any] | None
) -> None:
    """The sampler had the weights of the update before, and no others."""
    place, gap, version = f"cycle {row['cycle']}", row["gap_mean_nats"], row["cycle"] - 1
    record.check(
        f"{place}: completions are of version {version}", row["versions"] == [version],
        row["versions"],
    )  # fmt: skip
    limit = recipe.logprob_gap_limit
    record.check(f"{place}: mean gap within {limit:g} nats", gap <= limit, gap)
    if before is not None:
        moved = before["moved_by_update_nats"]
        record.check(
            f"{place}: mean gap under half of what the last update moved", gap < moved / 2,
            f"{gap:.3g} of {moved:.3g} nats",
        )  # fmt: skip


def measure_gap(context: Context, recipe: "Recipe", engine: "DeepSpeedEngine", rows: Any) -> None:
    gap = gap_in_nats(engine.logprobs(rows), rows)
    limit = recipe.logprob_gap_limit
    context.record.figure("log-prob gap, mean, nats", float(gap.mean()))
    context.record.figure("log-prob gap, largest, nats", float(gap.max()))
    context.record.check(
        f"mean gap within the recipe's limit of {limit:g} nats", float(gap.mean()) <= limit
    )


def sampling_recipe(size: Size, eager: bool) -> "Recipe":
    longest = size.prompt_tokens + size.completion_tokens
    return make_recipe(
        size, MODELS[0], prompt=size.prompt_tokens, completion=size.completion_tokens,
        pack=8 * longest, optimizer={"learning_rate": size.moving_rate},
        sampling={
            "backend": "vllm",
            "vllm": {"gpu_memory_utilization": size.vllm_share, "enforce_eager": eager},
        },
    )  # fmt: skip


def requests_of(size: Size, step: int) -> Any:
    return make_requests(size.requests, size.prompt_tokens, size.completion_tokens, step)


@contextmanager
def open_vllm(recipe: "Recipe", engine: "DeepSpeedEngine", folder: Path) -> Iterator["Sampler"]:
    """vLLM on the engine's own weights, written to `folder` first."""
    from grpo_replay.distributed.comm import Comm
    from grpo_replay.sampling.sampler_protocol import open_sampler

    model = folder / "model"
    engine.save_model(model)
    sampler = open_sampler(recipe, str(model), Comm())
    try:
        yield sampler
    finally:
        sampler.close()
        release()


def planned(recipe: "Recipe", size: Size) -> Any:
    """The dry run's engine and sampler on this device."""
    from grpo_replay.lab.dry_run.planner import Machines, plan_memory

    ranks = (recipe.engine.num_processes,)
    here = Machines(size.device, ranks, device_capacity(size.device))
    return plan_memory(recipe, here)
