"""What a run would take: rollouts and tokens of a step, its buffer and files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_replay.lab.planning.expected import Expected, drawn_rollouts, expected_rollouts
from grpo_replay.recipe import Recipe
from grpo_replay.training.disk_room import to_gib


def describe_step(recipe: Recipe, expected: Expected) -> dict[str, Any]:
    """Rollouts and tokens of one training step, once replay has begun."""
    sampling, replay = recipe.sampling, recipe.replay
    generated, survivors = expected_rollouts(sampling, expected)
    most = sampling.rollouts_per_step * (sampling.max_refills + 1)
    replayed = 0.0
    if replay.trains_on_draws:
        replayed = drawn_rollouts(replay, generated, survivors, recipe.draws_per_step)
    own_batch = replay.trains_on_draws and replay.stores_first
    trained = replayed if own_batch else survivors + replayed
    trained *= recipe.batch.epochs
    return {
        "generated_rollouts": round(generated),
        "generated_tokens_expected": round(generated * expected.completion_tokens),
        "generated_tokens_most": most * sampling.max_completion_length,
        "surviving_rollouts_expected": round(survivors),
        "replayed_rollouts_expected": round(replayed),
        "trained_rollouts_expected": round(trained),
        "trained_tokens_expected": round(trained * expected.completion_tokens),
    }


def describe_replay(recipe: Recipe, expected: Expected) -> dict[str, Any]:
    """Number of stored rollouts: the maximum, and with the expected share of survivors."""
    sampling, replay = recipe.sampling, recipe.replay
    if not replay.replays:
        return {"stored_rollouts_expected": 0, "stored_rollouts_most": 0,
                "first_replay_step": None}  # fmt: skip
    _, survivors = expected_rollouts(sampling, expected)
    births = replay.max_age_steps if replay.max_age_steps is not None else recipe.run.steps
    # A refill replaces dropped groups: no more survive than `prompts_per_step` groups.
    most = births * sampling.rollouts_per_step
    first = replay.warmup_steps + 1
    return {
        "stored_rollouts_expected": round(min(replay.capacity_rollouts, births * survivors)),
        "stored_rollouts_most": min(replay.capacity_rollouts, most),
        # otherwise nothing is replayed in the step it was born
        "first_replay_step": first if replay.stores_first else max(2, first),
    }


def describe_storage(
    recipe: Recipe, stored: Mapping[str, Any], expected: Expected
) -> dict[str, Any]:
    """Host memory of the buffer, and sizes of the files of a step. `stored` is of
    `describe_replay`."""
    sampling = recipe.sampling
    longest = recipe.prompts.max_prompt_length, sampling.max_completion_length
    mean = (expected.prompt_tokens, expected.completion_tokens)
    generated, _ = expected_rollouts(sampling, expected)
    most = sampling.rollouts_per_step * (sampling.max_refills + 1)
    in_memory = stored["stored_rollouts_expected"], stored["stored_rollouts_most"]
    return {
        "buffer_memory_gib_expected": to_gib(stored_bytes(in_memory[0], *mean)),
        "buffer_memory_gib_most": to_gib(stored_bytes(in_memory[1], *longest)),
        "disk_per_step_mib_expected": _mib(logged_bytes(generated, *mean)),
        "disk_per_step_mib_most": _mib(logged_bytes(most, *longest)),
    }


def stored_bytes(rollouts: float, prompt_tokens: float, completion_tokens: float) -> float:
    """Host memory of rollouts in the buffer, from their mean lengths: ids in int32, behaviour and
    sampler log-probs in float32, and 1,000 bytes of Python objects per rollout (measured). The
    buffer does not store their text."""
    return rollouts * (4 * prompt_tokens + (4 + 4 + 4) * completion_tokens + 1000)


def logged_bytes(rollouts: float, prompt_tokens: float, completion_tokens: float) -> float:
    """Size of rollouts in the file of a step, before compression, which gains little on log-probs:
    the same arrays, about four bytes of text per token, and 256 bytes of scalars per rollout."""
    return rollouts * (4 * prompt_tokens + (4 + 4 + 4 + 4) * completion_tokens + 256)


def _mib(size: float) -> float:
    return round(size / 2**20, 2)


@dataclass(frozen=True, slots=True)
class Speed:
    """Completion tokens per second of this process, and the seconds of the rest of a step."""

    generated: float
    trained: float
    other_seconds: float


@dataclass(frozen=True, slots=True)
class Known:
    """What a first look measured: fields of `Expected`, and a speed. `prompt_tokens` is the mean of
    the prompts, if they were read."""

    measured: Mapping[str, float] | None = None
    speed: Speed | None = None
    prompt_tokens: float | None = None


def seconds_of_step(step: Mapping[str, Any], speed: Speed, overlaps: bool) -> float:
    """Seconds of a step of `describe_step`, without evaluation and checkpoints. In an asynchronous
    run generation and updates overlap."""
    generation = step["generated_tokens_expected"] / speed.generated
    training = step["trained_tokens_expected"] / speed.trained
    both = max(generation, training) if overlaps else generation + training
    # Three significant digits: more would claim what no assumption gives.
    return float(f"{both + speed.other_seconds:.3g}")
