"""Estimates what a run would take: rollouts and tokens of a step, buffer, checkpoints, files."""

from dataclasses import dataclass

from grpo_replay.lab.dry_run.planner import MemoryPlan
from grpo_replay.lab.dry_run.rows import Row, Section
from grpo_replay.lab.planning.expected import Expected, drawn_rollouts, expected_rollouts
from grpo_replay.recipe import Recipe
from grpo_replay.training.disk_room import to_gib


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of this process as a first look measured it: completion tokens per second, generated
    and trained on, and the seconds that a step spends on neither."""

    generated: float
    trained: float
    other_seconds: float

    def seconds(self, generated_tokens: float, trained_tokens: float, overlaps: bool) -> float:
        """Returns the seconds of a step without evaluation and checkpoints, to three significant
        digits. With `overlaps` (asynchronous) the slower of generation and training counts."""
        generation = generated_tokens / self.generated
        training = trained_tokens / self.trained
        both = max(generation, training) if overlaps else generation + training
        return float(f"{both + self.other_seconds:.3g}")


def step_section(recipe: Recipe, expected: Expected, speed: Speed | None = None) -> Section:
    """Estimates rollouts and tokens of a step, once replay has begun, with `speed` its seconds.

    A step trains on survivors and replayed rollouts, under `buffer_only` (which stores first) on
    replayed ones alone; each pass over the batch counts. The upper bound of generation is every
    refill used and every completion at the length limit.
    """
    sampling, replay = recipe.sampling, recipe.replay
    generated, survivors = expected_rollouts(sampling, expected)
    replayed = 0.0
    if replay.trains_on_draws:
        replayed = drawn_rollouts(replay, generated, survivors, recipe.draws_per_step)
    trains_on_draws_only = replay.trains_on_draws and replay.stores_first
    trained = recipe.batch.epochs * (replayed if trains_on_draws_only else survivors + replayed)
    most = sampling.rollouts_per_step * (sampling.max_refills + 1)
    generated_tokens = round(generated * expected.completion_tokens)
    trained_tokens = round(trained * expected.completion_tokens)
    seconds = None
    if speed is not None:
        seconds = speed.seconds(generated_tokens, trained_tokens, recipe.run.is_async)
    return Section("step", "A step", [
        Row("generated_rollouts", "rollouts generated", round(generated)),
        Row("generated_tokens_expected", "tokens generated", generated_tokens,
            most * sampling.max_completion_length),
        Row("surviving_rollouts_expected", "rollouts surviving", round(survivors)),
        Row("replayed_rollouts_expected", "rollouts replayed", round(replayed)),
        Row("trained_rollouts_expected", "rollouts trained on", round(trained)),
        Row("trained_tokens_expected", "tokens trained on", trained_tokens),
        Row("seconds", "seconds, about", seconds),
    ])  # fmt: skip


def storage_sections(
    recipe: Recipe, expected: Expected, plan: MemoryPlan | None
) -> tuple[Section, Section]:
    """Estimates how full the buffer gets, and the host memory and disk that a run takes.

    The buffer holds the survivors of the last `max_age_steps` steps (of all steps without an age
    limit), at most its capacity, and nothing if the recipe does not replay. Sizes of a checkpoint
    and of a push are unknown without the `plan`.
    """
    sampling, replay = recipe.sampling, recipe.replay
    generated, survivors = expected_rollouts(sampling, expected)
    stored_steps = recipe.run.steps if replay.max_age_steps is None else replay.max_age_steps
    stored_steps *= replay.replays  # 0 without replay
    stored = round(min(replay.capacity_rollouts, stored_steps * survivors))
    # A refill replaces dropped groups: no more survive than `prompts_per_step` groups.
    stored_most = min(replay.capacity_rollouts, stored_steps * sampling.rollouts_per_step)
    logged_most = sampling.rollouts_per_step * (sampling.max_refills + 1)
    # Unless it stores first, nothing is replayed in the step it was born.
    first = max(1 if replay.stores_first else 2, replay.warmup_steps + 1)
    mean = expected.prompt_tokens, expected.completion_tokens
    longest = recipe.prompts.max_prompt_length, sampling.max_completion_length
    buffer = Section("replay", "The buffer", [
        Row("stored_rollouts_expected", "rollouts stored", stored, stored_most),
        Row("first_replay_step", "replay begins in step", first if replay.replays else None),
    ])  # fmt: skip
    storage = Section("storage", "Host memory and disk", [
        Row("buffer_memory_gib_expected", "buffer, GiB of host memory",
            to_gib(stored_bytes(stored, *mean)), to_gib(stored_bytes(stored_most, *longest))),
        Row("disk_per_step_mib_expected", "files of a step, MiB",
            _mib(logged_bytes(generated, *mean)), _mib(logged_bytes(logged_most, *longest))),
        *_model_rows(recipe, plan),
    ])  # fmt: skip
    return buffer, storage


def _model_rows(recipe: Recipe, plan: MemoryPlan | None) -> list[Row]:
    """Estimates the largest checkpoint, all checkpoints that exist at once, host memory taken by
    offloading, and the weights of a push; unknown without a plan.

    While a checkpoint is written, `checkpoint.keep` older ones still exist. The merged weights of a
    LoRA run are in all of them or, by `checkpoint.merged`, in the last alone.
    """
    section = recipe.checkpoint
    largest = all_kept = host = push = None
    if plan is not None:
        without_merged, merged = map(to_gib, plan.checkpoint_size)
        count_with_merged = section.keep + 1 if section.merged == "all" else 1
        largest = round(without_merged + merged, 3)
        all_kept = round((section.keep + 1) * without_merged + count_with_merged * merged, 3)
        host, push = to_gib(plan.engine.host), _mib(plan.push_bytes(recipe.pushes_adapters))
    return [
        Row("checkpoint_gib", "one checkpoint, GiB", largest),
        Row("checkpoints_gib_most", "all checkpoints kept, GiB", all_kept),
        Row("offloaded_host_gib_per_rank", "offloaded, GiB of host memory per rank", host),
        Row("push_mib", "weights to the sampler at a push, MiB", push),
    ]


def stored_bytes(rollouts: float, prompt_tokens: float, completion_tokens: float) -> float:
    """Returns the host memory, in bytes, of rollouts in the buffer from their mean lengths in
    tokens: ids in int32, behaviour and sampler log-probs in float32, and 1,000 bytes of Python
    objects per rollout (measured). The buffer does not store text."""
    return rollouts * (4 * prompt_tokens + (4 + 4 + 4) * completion_tokens + 1000)


def logged_bytes(rollouts: float, prompt_tokens: float, completion_tokens: float) -> float:
    """Returns the bytes of rollouts in a step's Parquet file, before compression (which gains
    little on log-probs): the arrays of `stored_bytes`, about four bytes of text per completion
    token, and 256 bytes of scalars per rollout."""
    return rollouts * (4 * prompt_tokens + (4 + 4 + 4 + 4) * completion_tokens + 256)


def _mib(size: float) -> float:
    return round(size / 2**20, 2)
