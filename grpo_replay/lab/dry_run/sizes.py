"""Tokens, buffer size, disk and network traffic of a step, from recipe and model sizes."""

from collections.abc import Mapping
from typing import Any

from grpo_replay.lab.dry_run.assumptions import Expected
from grpo_replay.lab.dry_run.fit import DTYPE_BYTES, EnginePlan, Hardware
from grpo_replay.lab.dry_run.memory import ModelShape
from grpo_replay.recipe import Recipe
from grpo_replay.storage.stored_sizes import checkpoint_bytes, logged_bytes, stored_bytes, to_gib


def describe_step(recipe: Recipe, expected: Expected) -> dict[str, Any]:
    """Rollouts and tokens of one training step, once replay has begun."""
    generated, survivors = _expected_rollouts(recipe, expected)
    most = recipe.rollouts_per_step * (recipe.sampling.max_refills + 1)
    completion = recipe.sampling.max_completion_length
    mean_tokens = expected.completion_tokens
    replayed = 0.0
    if recipe.replays:
        replayed = recipe.replay.ratio * survivors
    trained = survivors + replayed
    if recipe.replays and recipe.replay.composition == "buffer_only":
        trained = replayed = recipe.replay.ratio * generated
    return {
        "generated_rollouts": round(generated),
        "generated_tokens_expected": round(generated * mean_tokens),
        "generated_tokens_most": most * completion,
        "surviving_rollouts_expected": round(survivors),
        "replayed_rollouts_expected": round(replayed),
        "trained_rollouts_expected": round(trained),
        "trained_tokens_expected": round(trained * mean_tokens),
        "longest_sequence_tokens": recipe.prompts.max_prompt_length + completion,
    }


def _expected_rollouts(recipe: Recipe, expected: Expected) -> tuple[float, float]:
    """Rollouts generated in a step, and their survivors: a refill samples what was dropped."""
    generated = sum(
        recipe.rollouts_per_step * (1 - expected.survival) ** refill
        for refill in range(recipe.sampling.max_refills + 1)
    )
    return generated, generated * expected.survival


def launched_servers(recipe: Recipe) -> int:
    """vLLM servers that a run starts on its own machine."""
    return 0 if recipe.sampling.servers.urls else servers_of(recipe)


def servers_of(recipe: Recipe) -> int:
    """vLLM servers that a run samples with; 0 if it samples in its ranks, or repeats a journal."""
    sampling = recipe.sampling
    if sampling.backend != "vllm_server" or sampling.collection.replay_journal is not None:
        return 0
    return sampling.servers.launch or len(sampling.servers.urls)


def server_gpus(recipe: Recipe) -> int:
    """GPUs of these servers, one for each that runs elsewhere."""
    return servers_of(recipe) * recipe.sampling.gpus_per_server


def describe_replay(recipe: Recipe, expected: Expected) -> dict[str, Any]:
    """Number of stored rollouts: the maximum, and with the expected share of survivors."""
    replay = recipe.replay
    _, survivors = _expected_rollouts(recipe, expected)
    if not recipe.replays:
        return {"stored_rollouts_expected": 0, "stored_rollouts_most": 0, "capacity_binds": False,
                "first_replay_step": None, "horizon_steps": None}  # fmt: skip
    births = replay.max_age_steps if replay.max_age_steps is not None else recipe.run.steps
    # A refill replaces dropped groups: no more survive than `prompts_per_step` groups.
    most = births * recipe.rollouts_per_step
    stored = births * survivors
    first = replay.warmup_steps + 1
    if replay.composition != "buffer_only":
        first = max(2, first)  # nothing is replayed in the step it was born
    return {
        "stored_rollouts_expected": round(min(replay.capacity_rollouts, stored)),
        "stored_rollouts_most": min(replay.capacity_rollouts, most),
        "capacity_binds": most > replay.capacity_rollouts,
        "first_replay_step": first,
        "horizon_steps": replay.max_age_steps,
    }


def describe_storage(
    recipe: Recipe, replay: Mapping[str, Any], plan: EnginePlan | None, expected: Expected
) -> dict[str, Any]:
    """Host memory of the buffer, and sizes of the files of a step and of a checkpoint."""
    prompt, completion = recipe.prompts.max_prompt_length, recipe.sampling.max_completion_length
    mean = (expected.prompt_tokens, expected.completion_tokens)
    generated, _ = _expected_rollouts(recipe, expected)
    most_generated = recipe.rollouts_per_step * (recipe.sampling.max_refills + 1)
    checkpoint = None
    if plan is not None:
        size, shape = DTYPE_BYTES[recipe.model.dtype], plan.shape
        stage = recipe.zero_stage(recipe.engine.num_processes)
        checkpoint = to_gib(checkpoint_bytes(shape.parameters, size, stage, shape.adapters))
    stored, most = replay["stored_rollouts_expected"], replay["stored_rollouts_most"]
    return {
        "buffer_memory_gib_expected": to_gib(stored_bytes(stored, *mean)),
        "buffer_memory_gib_most": to_gib(stored_bytes(most, prompt, completion)),
        "disk_per_step_mib_expected": _mib(logged_bytes(generated, *mean)),
        "disk_per_step_mib_most": _mib(logged_bytes(most_generated, prompt, completion)),
        "checkpoint_gib": checkpoint,
        "checkpoints_gib_most": None if checkpoint is None
        else round(checkpoint * (recipe.checkpoint.keep + 1), 3),
        "offloaded_host_gib_per_rank": None if plan is None else to_gib(plan.engine.host),
        "sampler_host_gib_per_rank": None if plan is None
        else to_gib(plan.sampler.host if recipe.eval.benchmarks else 0),
    }  # fmt: skip


def describe_host_copies(recipe: Recipe, shape: ModelShape, hardware: Hardware) -> list[str]:
    """A sentence if every rank of a GPU node holds a whole copy of the model in host memory at the
    start; otherwise empty. Weights stored in `model.dtype` are mapped from their file, which all
    ranks share."""
    from grpo_replay.engine.models import load_config

    stored = str(load_config(recipe.model).dtype or "").removeprefix("torch.")
    if recipe.model.random_init:
        why = "a random initialisation is made there"
    elif stored not in ("", recipe.model.dtype):
        why = f"the weights are stored in {stored}, not in model.dtype {recipe.model.dtype}"
    else:
        return []
    if hardware.device != "cuda":
        return []  # on a CPU the copy is counted as memory of the rank
    size = DTYPE_BYTES[recipe.model.dtype] * shape.parameters * hardware.processes
    return [
        f"{to_gib(size)} GiB of host memory at the start, one whole model for each of "
        f"{hardware.processes} ranks: {why}"
    ]


def describe_asynchrony(recipe: Recipe, shape: ModelShape) -> list[str]:
    """A sentence on what an asynchronous run needs besides; empty for a synchronous one."""
    if recipe.run.mode != "async":
        return []
    folder = to_gib(2 * DTYPE_BYTES[recipe.model.dtype] * shape.parameters_in_files)
    return [
        f"asynchronous run: the sync folder holds two sets of weights, {folder} GiB; the journal "
        "takes about as much disk as the rollouts of the run, and is kept"
    ]


def describe_network(recipe: Recipe, shape: ModelShape) -> dict[str, Any]:
    """GiB that each rank receives; it sends the same amount. Ring collectives move (N-1)/N of the
    whole."""
    ranks = recipe.engine.num_processes
    stage = recipe.zero_stage(ranks)
    whole = DTYPE_BYTES[recipe.model.dtype] * shape.parameters * (ranks - 1) / ranks
    trained = whole * shape.trained / shape.parameters
    # Gather twice, scatter once.
    microbatch = {0: 0.0, 1: 0.0, 2: trained, 3: 2 * whole + trained}[stage]
    update = {0: 2 * trained, 1: 2 * trained, 2: trained, 3: 0.0}[stage]
    pushes_whole_weights = recipe.sampling.backend == "vllm_server"
    return {
        "per_microbatch_gib": to_gib(microbatch),
        "per_update_gib": to_gib(update),
        "weight_push_gather_gib": to_gib(whole if stage == 3 else 0.0),
        "weight_push_to_servers_gib": to_gib(
            DTYPE_BYTES[recipe.model.dtype] * shape.parameters_in_files
            if pushes_whole_weights else 0.0
        ),
        "forward_only_pass_gib": to_gib(whole if stage == 3 else 0.0),
    }  # fmt: skip


def _mib(size: float) -> float:
    return round(size / 2**20, 2)
