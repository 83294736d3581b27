"""Whether a model keeps the rows of a pack apart.

transformers finds the rows of a pack where position ids begin again: flash attention gets their
lengths, the other attentions a block-diagonal mask (5.19: masking_utils.py,
`find_packed_sequence_indices`; modeling_flash_attention_utils.py, `_is_packed_sequence`). Layers
that carry a state along the sequence (linear attention, state spaces, convolutions) and models that
do not pass their position ids on mix them. No list of those is complete, so it is tried out.
"""

from collections.abc import Callable

import numpy as np
from transformers import PreTrainedConfig

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import RecipeError
from grpo_replay.recipe import Recipe
from grpo_replay.replay.batch import MicroBatch, logprob_row, plan_microbatches

LARGEST_DIFFERENCE = 1e-4
_TOKENS = 16

Forward = Callable[[MicroBatch], np.ndarray]
"""The log-probs of a micro-batch, float32 [C]."""


def can_pack(recipe: Recipe, config: PreTrainedConfig, forward: Forward, comm: Comm) -> bool:
    """Whether rows can be packed: by rank 0's result for all ranks. Collective.

    Raises RecipeError if they cannot and `batch.packing` is true.
    """
    apart = bool(comm.broadcast_json(keeps_rows_apart(forward, config.vocab_size)))
    if recipe.batch.packing and not apart:
        raise RecipeError(
            f"batch.packing true: a model of type {config.model_type} does not keep the rows of a "
            "pack apart (log-probs of a row change with the row before it); set it to false"
        )
    return apart


def keeps_rows_apart(forward: Forward, vocabulary: int) -> bool:
    """Whether a row has the same log-probs behind one row of random tokens and behind another.

    They are equal to the last bit where attention is all that moves between positions, or, with a
    mixture of experts, to rounding. Relative to the spread of the log-probs.
    """
    random = np.random.default_rng(0)
    row, *others = random.integers(vocabulary, size=(3, _TOKENS)).astype(np.int32)
    found = []
    for other in others:
        rows = [logprob_row(other, other[:0]), logprob_row(row[:1], row[1:])]
        ((pack,),) = plan_microbatches(rows, 2 * _TOKENS, 1, packing=True)
        found.append(forward(pack))
    first_C, second_C = found
    spread = np.linalg.norm(first_C - first_C.mean())
    return bool(np.linalg.norm(first_C - second_C) <= LARGEST_DIFFERENCE * spread)
