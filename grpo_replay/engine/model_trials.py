"""What a model is tried out for when a run opens, because no list of what models do is complete.

- Its output head: log-probs must be those of the model's own logits. Without the trial only the
  comparison with the sampler would find a wrong head, and only where the sampler holds the
  trainer's weights.
- Lengths: transformers chooses the rotary factors of "longrope" for a whole micro-batch, by its
  longest row, so that log-probs of a row change with its neighbours, and of a token with those
  after it.
- Packing: transformers finds the rows of a pack where position ids begin again: flash attention
  gets their lengths, the other attentions a block-diagonal mask (5.19: masking_utils.py,
  `find_packed_sequence_indices`; modeling_flash_attention_utils.py, `_is_packed_sequence`).
- Shared prompts: completions lie one behind the other after their prompt, prompts after what they
  begin with, and a mask keeps them apart (`policy_module.segment_mask`).

Layers that carry a state along the sequence (linear attention, state spaces, convolutions) and
models that do not pass their position ids on mix rows. A window that is set in the mask of the
model is lost in that of shared prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.microbatches import MicroBatch, micro_batch
from grpo_replay.engine.policy_module import refuse_wrong_head
from grpo_replay.errors import ModelError, RecipeError, first_line
from grpo_replay.recipe import ModelSection
from grpo_replay.recipe.layers import short_path
from grpo_replay.replay.batch import TrainRow, logprob_row

HEAD_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest difference, relative to the largest log-prob or to 1 nat."""
LARGEST_DIFFERENCE = 1e-4
"""Between forward passes of one shape; relative to the spread of the log-probs."""
OTHER_SHAPE = {"float32": 1e-3, "bfloat16": 0.1}
"""Likewise, between forward passes of two shapes."""
_TOKENS = 16

Forward = Callable[..., np.ndarray]
"""The log-probs of a micro-batch, float32 [C]; with True as well, those of the model's own
logits."""


def refuse_other_logprobs(model: PreTrainedModel, dtype: str, forward: Forward, comm: Comm) -> None:
    """Raises ModelError, by rank 0's result on all ranks, if log-probs of a row of random tokens
    differ from those of the model's own logits or are not finite, or the model does not run on
    token ids alone. Collective: every rank runs the row."""
    ids = _random_tokens(model.config, _TOKENS)[0]
    batch = _batch([logprob_row(ids[:1], ids[1:])])
    try:
        found_C, own_C = forward(batch), forward(batch, True)
    except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise ModelError(
            f"model.path: a model of type {model.config.model_type} does not run on token ids "
            f"alone: {first_line(error)}"
        ) from error
    if not comm.broadcast(bool(np.isfinite(own_C).all())):
        raise ModelError(
            "model.path: log-probs of the model are not finite, so its weights hold NaN or "
            "infinity: take an earlier checkpoint, or fetch the model again"
        )
    difference = float(np.abs(found_C - own_C).max())
    largest = HEAD_TOLERANCE[dtype] * max(1.0, float(np.abs(own_C).max()))
    if comm.broadcast(not difference <= largest):  # also of NaN
        refuse_wrong_head(model, difference)


def refuse_crossing(model: ModelSection, config: PreTrainedConfig, longest: int) -> None:
    """Raises RecipeError if sequences of up to `longest` tokens cross the length at which the model
    changes its rotary factors."""
    found = getattr(config, "rope_parameters", None) or {}
    of_layers = [found] if "rope_type" in found else filter(None, found.values())
    limits = [
        each.get("original_max_position_embeddings", longest)
        for each in of_layers
        if each.get("rope_type") == "longrope"
    ]
    if limits and min(limits) < longest:
        raise RecipeError(
            f"model.path {short_path(model.path)!r}: a {config.model_type} with rope_type longrope "
            f"computes all rows of a micro-batch otherwise as soon as one has more than "
            f"{min(limits)} tokens (original_max_position_embeddings), and the run's may have "
            f"{longest}: lower prompts.max_prompt_length plus sampling.max_completion_length (and "
            f"eval.max_completion_length), or sampling.vllm.max_model_len, to {min(limits)}"
        )


def refuse_length_dependence(
    config: PreTrainedConfig, longest: int, forward: Forward, comm: Comm
) -> None:
    """Raises ModelError, by rank 0's result on all ranks, if log-probs of a row of random tokens
    change when its last position is that of a row of `longest` tokens. Collective."""
    longest = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    ids = _random_tokens(config, _TOKENS)[0]
    batch = _batch([logprob_row(ids[:1], ids[1:])])
    found = []
    for last in (_TOKENS, max(_TOKENS, longest)):
        places_SL = np.arange(batch.input_ids_SL.size).reshape(batch.input_ids_SL.shape)
        places_SL[:, -1] = last - 1
        found.append(forward(replace(batch, position_ids_SL=places_SL))[:-1])
    if comm.broadcast(not _close(found[1], found[0], LARGEST_DIFFERENCE)):
        raise ModelError(
            f"model.path: log-probs of a row of a {config.model_type} change when its micro-batch "
            f"has a row of {longest} tokens (prompts.max_prompt_length plus max_completion_length),"
            " so that they depend on its neighbours, and on the tokens after them: lower the "
            "lengths to those at which the model computes all rows alike"
        )


def can_pack(required: bool | None, config: PreTrainedConfig, forward: Forward, comm: Comm) -> bool:
    """Whether rows can be packed: by rank 0's result for all ranks. Collective.

    Raises RecipeError if they cannot and packing is `required`.
    """
    apart = comm.broadcast(keeps_rows_apart(forward, config))
    if required and not apart:
        raise RecipeError(
            f"batch.packing true: a model of type {config.model_type} does not keep the rows of a "
            "pack apart (log-probs of a row change with the row before it); set it to false"
        )
    return apart


def keeps_rows_apart(forward: Forward, config: PreTrainedConfig) -> bool:
    """Whether a row has the same log-probs behind one row of random tokens and behind another.

    They are equal to the last bit where attention is all that moves between positions, or, with a
    mixture of experts, to rounding.
    """
    row, *others = _random_tokens(config, _TOKENS, _TOKENS, _TOKENS)
    found = []
    for other in others:
        rows = [logprob_row(other, other[:0]), logprob_row(row[:1], row[1:])]
        found.append(forward(_batch(rows, packing=True)))
    return _close(found[1], found[0], LARGEST_DIFFERENCE)


def can_share(
    config: PreTrainedConfig, dtype: str, longest: int, forward: Forward, comm: Comm
) -> bool:
    """Whether completions can share their prompt: by rank 0's result for all ranks. Collective.

    A completion behind a sibling, and behind a prompt that begins with the same tokens, must have
    the same log-probs behind another sibling, and those of a row of its own. What prompts begin
    with is longer than a window of the model, if sequences of up to `longest` tokens are.
    """
    sizes = [size for size in _windows(config) if size < longest]
    prompt, row, *others = _random_tokens(config, _TOKENS + max(sizes, default=0), *[_TOKENS] * 3)
    other_prompt, prompt = np.append(prompt, others[0]), np.append(prompt, others[1])
    alone, found = logprob_row(prompt, row), []
    try:
        own_C = forward(_batch([alone]))
        for other in others:
            before = [logprob_row(other_prompt, other), logprob_row(prompt, other)]
            found.append(forward(_batch([*before, alone], sizes=[3]))[2 * _TOKENS :])
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        apart = False
    else:
        apart = _close(found[1], found[0], LARGEST_DIFFERENCE)
        apart = apart and _close(found[0], own_C, OTHER_SHAPE[dtype])
    return comm.broadcast(apart)


def two_rows(config: PreTrainedConfig, length: int, packing: bool) -> MicroBatch:
    """Two rows of random tokens, of at most `length`; the second is shorter."""
    ids, other = _random_tokens(config, length, length - 1)
    return _batch([logprob_row(ids[:1], ids[1:]), logprob_row(other[:1], other[1:])], packing)


def _windows(config: PreTrainedConfig) -> list[int]:
    """Numbers of tokens that bound what a layer sees: sliding windows and chunks."""
    settings = config.get_text_config().to_dict()
    return [
        value
        for name, value in settings.items()
        if ("window" in name or "chunk" in name)
        and isinstance(value, int)
        and not isinstance(value, bool)
    ]


def _random_tokens(config: PreTrainedConfig, *lengths: int) -> list[np.ndarray]:
    """int32 [T] of each length, always the same."""
    random = np.random.default_rng(0)
    return [random.integers(config.vocab_size, size=each).astype(np.int32) for each in lengths]


def _batch(
    rows: Sequence[TrainRow], packing: bool = False, sizes: Sequence[int] | None = None
) -> MicroBatch:
    return micro_batch(range(len(rows)), rows, sizes or [1] * len(rows), packing)


def _close(found_C: np.ndarray, expected_C: np.ndarray, tolerance: float) -> bool:
    """`tolerance` is relative to the spread of the log-probs."""
    spread = np.linalg.norm(expected_C - expected_C.mean())
    return bool(np.linalg.norm(found_C - expected_C) <= tolerance * spread)
