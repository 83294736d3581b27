"""Trials of a model when a run opens, because no list of what models do is complete.

- Output head: log-probs must be those of the model's own logits. Without the trial only the
  comparison with the sampler would find a wrong head, and only where the sampler holds the
  trainer's weights.
- Lengths: transformers chooses the rotary factors of "longrope" for a whole micro-batch, by its
  longest row, so that log-probs of a row depend on its neighbours, and those of a token on later
  tokens.
- Packing: transformers finds the rows of a pack where position ids begin again: flash attention
  gets their lengths, the other attentions a block-diagonal mask (5.19: masking_utils.py,
  `find_packed_sequence_indices`; modeling_flash_attention_utils.py, `_is_packed_sequence`).
- Shared prompts: completions follow one another after their prompt, prompts after their common
  prefix, and a mask keeps them apart (`policy_module.segment_mask`).

Layers that carry a state along the sequence (linear attention, state spaces, convolutions) and
models that do not pass their position ids on mix rows. The mask of shared prompts replaces the
model's own, and a window in it is lost.
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
"""Largest difference by dtype, relative to the largest log-prob, or to 1 nat if that is less."""
LARGEST_DIFFERENCE = 1e-4
"""Largest difference between forward passes of one shape, relative to the spread of log-probs."""
OTHER_SHAPE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference between forward passes of two shapes, by dtype, relative likewise."""
_TOKENS = 16

Forward = Callable[..., np.ndarray]
"""Computes the log-probs of a micro-batch, float32 [C]; with True as second argument, from the
model's own logits."""


def refuse_other_logprobs(model: PreTrainedModel, dtype: str, forward: Forward, comm: Comm) -> None:
    """Raises ModelError if log-probs of a row of random tokens differ from those of the model's own
    logits or are not finite, or if the model does not run on token ids alone. Collective: every
    rank runs the row, and rank 0's result counts."""
    ids = _random_tokens(model.config, _TOKENS)[0]
    batch = _batch([logprob_row(ids[:1], ids[1:])])
    try:
        logprobs_C, own_C = forward(batch), forward(batch, True)
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
    difference = float(np.abs(logprobs_C - own_C).max())
    tolerance = HEAD_TOLERANCE[dtype] * max(1.0, float(np.abs(own_C).max()))
    if comm.broadcast(not difference <= tolerance):  # true of NaN
        refuse_wrong_head(model, difference)


def refuse_crossing(model: ModelSection, config: PreTrainedConfig, longest: int) -> None:
    """Raises RecipeError if `longest` tokens reach the length at which rotary factors change."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope_of_layers = [rope] if "rope_type" in rope else filter(None, rope.values())
    limits = [
        parameters.get("original_max_position_embeddings", longest)
        for parameters in rope_of_layers
        if parameters.get("rope_type") == "longrope"
    ]
    if limits and min(limits) < longest:
        raise RecipeError(
            f"model.path {short_path(model.path)!r}: a {config.model_type} with rope_type longrope "
            f"computes all rows of a micro-batch differently as soon as one has more than "
            f"{min(limits)} tokens (original_max_position_embeddings), and the run's may have "
            f"{longest}: lower prompts.max_prompt_length plus sampling.max_completion_length (and "
            f"eval.max_completion_length), or sampling.vllm.max_model_len, to {min(limits)}"
        )


def refuse_length_dependence(
    config: PreTrainedConfig, longest: int, forward: Forward, comm: Comm
) -> None:
    """Raises ModelError if log-probs of a row of random tokens change when its last position is
    that of a row of `longest` tokens. Collective: rank 0's result counts."""
    longest = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    ids = _random_tokens(config, _TOKENS)[0]
    batch = _batch([logprob_row(ids[:1], ids[1:])])
    results = []
    for length in (_TOKENS, max(_TOKENS, longest)):
        positions_SL = np.arange(batch.input_ids_SL.size).reshape(batch.input_ids_SL.shape)
        positions_SL[:, -1] = length - 1
        results.append(forward(replace(batch, position_ids_SL=positions_SL))[:-1])
    if comm.broadcast(not _close(results[1], results[0], LARGEST_DIFFERENCE)):
        raise ModelError(
            f"model.path: log-probs of a row of a {config.model_type} change when its micro-batch "
            f"has a row of {longest} tokens (prompts.max_prompt_length plus max_completion_length),"
            " so that they depend on its neighbours and on later tokens: lower the lengths to "
            "those at which the model computes all rows alike"
        )


def can_pack(required: bool | None, config: PreTrainedConfig, forward: Forward, comm: Comm) -> bool:
    """Try whether rows of this model can be packed. Collective: rank 0's result counts.

    Raises RecipeError if they cannot and packing is `required`.
    """
    keeps_apart = comm.broadcast(keeps_rows_apart(forward, config))
    if required and not keeps_apart:
        raise RecipeError(
            f"batch.packing true: a model of type {config.model_type} does not keep the rows of a "
            "pack apart (log-probs of a row change with the row before it); set it to false"
        )
    return keeps_apart


def keeps_rows_apart(forward: Forward, config: PreTrainedConfig) -> bool:
    """Try whether a packed row has the same log-probs after one random row and after another.

    Equal bit for bit if only attention mixes positions, to rounding with a mixture of experts.
    """
    row, *others = _random_tokens(config, _TOKENS, _TOKENS, _TOKENS)
    results = []
    for other in others:
        rows = [logprob_row(other, other[:0]), logprob_row(row[:1], row[1:])]
        results.append(forward(_batch(rows, packing=True)))
    return _close(results[1], results[0], LARGEST_DIFFERENCE)


def can_share(
    config: PreTrainedConfig, dtype: str, longest: int, forward: Forward, comm: Comm
) -> bool:
    """Try whether completions of this model can share one copy of their prompt. Collective: rank
    0's result counts. False also for a model that raises an error on such rows.

    A completion after a sibling, and after a prompt with a common prefix, must have the same
    log-probs after another sibling, and those of a row of its own. The common prefix is longer than
    a window of the model, if sequences of up to `longest` tokens are.
    """
    windows = [tokens for tokens in _windows(config) if tokens < longest]
    prefix_tokens = _TOKENS + max(windows, default=0)
    prefix, completion, *siblings = _random_tokens(config, prefix_tokens, *[_TOKENS] * 3)
    other_prompt, prompt = np.append(prefix, siblings[0]), np.append(prefix, siblings[1])
    row, results = logprob_row(prompt, completion), []
    try:
        single_C = forward(_batch([row]))
        for sibling in siblings:
            before = [logprob_row(other_prompt, sibling), logprob_row(prompt, sibling)]
            results.append(forward(_batch([*before, row], sizes=[3]))[2 * _TOKENS :])
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        keeps_apart = False
    else:
        keeps_apart = _close(results[1], results[0], LARGEST_DIFFERENCE) and _close(
            results[0], single_C, OTHER_SHAPE[dtype]
        )
    return comm.broadcast(keeps_apart)


def two_rows(config: PreTrainedConfig, length: int, packing: bool) -> MicroBatch:
    """A micro-batch of two rows of random tokens, one of `length` and one shorter by a token."""
    ids, other = _random_tokens(config, length, length - 1)
    return _batch([logprob_row(ids[:1], ids[1:]), logprob_row(other[:1], other[1:])], packing)


def _windows(config: PreTrainedConfig) -> list[int]:
    """Returns the integer settings that are named after a window or a chunk of attention: sizes in
    tokens, and perhaps others, such as a number of layers, which are smaller."""
    settings = config.get_text_config().to_dict()
    return [
        value
        for name, value in settings.items()
        if ("window" in name or "chunk" in name)
        and isinstance(value, int)
        and not isinstance(value, bool)
    ]


def _random_tokens(config: PreTrainedConfig, *lengths: int) -> list[np.ndarray]:
    """Returns an array int32 [T] for each length, the same in every call."""
    random = np.random.default_rng(0)
    return [random.integers(config.vocab_size, size=size).astype(np.int32) for size in lengths]


def _batch(
    rows: Sequence[TrainRow], packing: bool = False, sizes: Sequence[int] | None = None
) -> MicroBatch:
    return micro_batch(range(len(rows)), rows, sizes or [1] * len(rows), packing)


def _close(logprobs_C: np.ndarray, expected_C: np.ndarray, tolerance: float) -> bool:
    """Returns whether log-probs are the expected ones; `tolerance` is relative to their spread."""
    spread = np.linalg.norm(expected_C - expected_C.mean())
    return bool(np.linalg.norm(logprobs_C - expected_C) <= tolerance * spread)
