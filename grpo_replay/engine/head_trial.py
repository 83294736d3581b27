"""Whether the trainer's output head gives the log-probs of the model's own logits.

No list of what models do to their logits is complete, so it is tried out when a run starts. Without
the trial only the comparison with the sampler would find a wrong head, and only where the sampler
holds the trainer's weights.
"""

from collections.abc import Callable

import numpy as np
from transformers import PreTrainedModel

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.output_head import refuse_wrong_head
from grpo_replay.errors import ModelError, first_line
from grpo_replay.replay.batch import MicroBatch, logprob_row, plan_microbatches

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest difference, relative to the largest log-prob or to 1 nat."""
_TOKENS = 16

Forward = Callable[[MicroBatch, bool], np.ndarray]
"""Log-probs of a micro-batch, float32 [C]; with True those of the model's own logits."""


def refuse_other_logprobs(model: PreTrainedModel, dtype: str, forward: Forward, comm: Comm) -> None:
    """Raises ModelError, by rank 0's result on all ranks, if log-probs of a row of random tokens
    differ from those of the model's own logits, or the model does not run on token ids alone.
    Collective: every rank runs the row."""
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=_TOKENS)
    row = logprob_row(ids[:1].astype(np.int32), ids[1:].astype(np.int32))
    ((batch,),) = plan_microbatches([row], _TOKENS, 1, packing=False)
    try:
        found_C, own_C = forward(batch, False), forward(batch, True)
    except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise ModelError(
            f"model.path: a model of type {model.config.model_type} does not run on token ids "
            f"alone: {first_line(error)}"
        ) from error
    difference = float(np.abs(found_C - own_C).max())
    largest = TOLERANCE[dtype] * max(1.0, float(np.abs(own_C).max()))
    if comm.broadcast_json(difference > largest):
        refuse_wrong_head(model, difference)
