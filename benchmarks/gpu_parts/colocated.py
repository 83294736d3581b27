"""Part c: replay with vLLM in the trainer's process, in TRL and in this package."""

import statistics
from collections import defaultdict
from typing import Any

from gpu_parts.devices import timed, used_gib
from gpu_parts.models import our_recipe, task_named
from gpu_parts.record import Context
from gpu_parts.whole_steps import Steps, train, trl_trainer

REPLAY = {"ratio": 1.0, "max_age_steps": 4, "warmup_steps": 1}
SHOWN = {
    "generation": "cost/generation_seconds", "logprob": "cost/logprob_seconds",
    "training": "cost/training_seconds", "push": "cost/sync_seconds",
    "replayed": "replay/rollouts", "reward": "reward", "gap": "sampler/logprob_gap_mean",
    "largest_gap": "sampler/logprob_gap_max",
}  # fmt: skip
"""Columns of a step of ours; see docs/metrics.md."""
TRL_GAP = "sampling/sampling_logp_difference"


def in_trl(context: Context) -> None:
    """ReplayGRPOTrainer, preset `ours`."""
    from grpo_replay import ReplayConfig
    from grpo_replay.integrations.trl import ReplayGRPOTrainer

    steps, replay = Steps(context), ReplayConfig.of("ours", **REPLAY)
    task = task_named(context, "smollm2")
    trainer = trl_trainer(context, task, steps, ReplayGRPOTrainer, replay=replay)
    trainer.train()
    steps.summarise()
    names = {
        "gap": f"{TRL_GAP}/mean", "largest_gap": f"{TRL_GAP}/max", "replayed": "replay/rollouts",
        "clipped": "replay/clip_fraction", "reward": "reward",
    }  # fmt: skip
    logged = [row for row in trainer.state.log_history if "reward" in row]
    rows = [{name: row.get(key) for name, key in names.items()} for row in logged]
    context.record.table("TRL's log", rows)
    check_replay(context, rows)


def in_train(context: Context) -> None:
    """The recipe smollm2 with `sampling.backend=vllm`, with the seconds of each sleep and wake."""
    from grpo_replay.sampling.vllm_local import VllmLocalSampler
    from grpo_replay.sampling.vllm_process import SleepState

    record, watch, steps = context.record, Stopwatch(context.size.device), Steps(context)
    watch.put_on(VllmLocalSampler, "sleep", lambda *_: "sleep")
    watch.put_on(VllmLocalSampler, "load_weights", lambda *_: "take new weights")
    watch.put_on(SleepState, "wake", lambda *parts: f"wake {' and '.join(parts)}")
    replay = (f"replay.{name}={value}" for name, value in REPLAY.items())
    recipe = our_recipe(context, task_named(context, "smollm2"), *replay)
    train(recipe, context.work / "train-smollm2", lambda metrics: steps.end(
        metrics["cost/generated_tokens"], **{name: metrics[key] for name, key in SHOWN.items()}
    ))  # fmt: skip
    steps.summarise()
    rates = [row["completion_tokens"] / row["generation"] for row in steps.timed]
    record.figure("tokens/s of generation", statistics.median(rates))
    record.table("sleep and wake", watch.medians())
    check_gaps(context, steps.rows, recipe.logprob_gap_limit)
    check_replay(context, steps.rows)


def check_gaps(context: Context, rows: list[dict[str, Any]], limit: float) -> None:
    gaps = [row["gap"] for row in rows if row["gap"] is not None]
    context.record.check(f"mean gap within {limit:g} nats", gaps and max(gaps) <= limit, gaps)


def check_replay(context: Context, rows: list[dict[str, Any]]) -> None:
    replayed = [row["replayed"] for row in rows]
    context.record.check("some step replays", any(replayed), replayed)


class Stopwatch:
    """Seconds and freed memory of every call of some methods."""

    def __init__(self, device: str) -> None:
        self._found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._device = device

    def put_on(self, owner: type, method: str, name_of: Any) -> None:
        original = getattr(owner, method)

        def watched(instance: Any, *args: Any, **kwargs: Any) -> Any:
            name, before = name_of(*args), used_gib(self._device)
            result, seconds = timed(self._device, lambda: original(instance, *args, **kwargs))
            self._found[name].append((seconds, before - used_gib(self._device)))
            return result

        setattr(owner, method, watched)

    def medians(self) -> list[dict[str, Any]]:
        return [
            {
                "what": name, "times": len(calls),
                "seconds": statistics.median(seconds for seconds, _ in calls),
                "freed_gib": statistics.median(gib for _, gib in calls),
            }
            for name, calls in self._found.items()
        ]  # fmt: skip
