"""Decoder layers and output head compiled by torch, which fuses what lies between matrix products.

Each layer is compiled in place (`nn.Module.compile`), inside of gradient checkpointing: parameters
keep their names, and DeepSpeed, peft and transformers see the same modules. All layers of a kind
share their graphs. Shapes are dynamic, so a graph serves all numbers of rows and tokens; torch
makes others for one row, for a mask, without gradients, and for an input that needs none.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_replay.engine.microbatches import MicroBatch
from grpo_replay.engine.model_trials import OTHER_SHAPE, two_rows
from grpo_replay.engine.policy_module import PLAIN_CHUNKS, PolicyModule, compiled_chunks
from grpo_replay.errors import RecipeError, first_line
from grpo_replay.recipe import Recipe

MOST_GRAPHS = 64
"""Of one function. Torch's own limit of 8, beyond which a layer runs uncompiled, is too low for the
kinds of a graph times the kinds of layers that some models alternate."""

TRIAL_TOKENS = 2048
"""Most tokens of a row of the trial. Torch chooses how a kernel spreads over a GPU by the sizes
that it meets first, so they should be near those of training."""


def refuse_stage_3(asked: bool | str, stage: int) -> None:
    """Raises RecipeError for `model.compile: true` at ZeRO 3."""
    if asked is True and stage == 3:
        raise RecipeError(
            "model.compile true at ZeRO 3, which gathers the weights inside of the layers: set it "
            "to false, or engine.zero_stage to 0, 1 or 2"
        )


def decoder_layers(module: PolicyModule) -> list[nn.Module]:
    """The layers that transformers can checkpoint; empty for a model that marks none."""
    return [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]


def compile_policy(module: PolicyModule) -> None:
    """Compiles its layers and the chunks of its head in place, at their first calls."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, MOST_GRAPHS)
    for layer in decoder_layers(module):
        layer.compile(dynamic=True)
    if not module.head.settings.in_fp32:  # its product is not one that torch compiles
        module.head.chunks = compiled_chunks()


def leave_uncompiled(module: PolicyModule) -> None:
    """Undoes `compile_policy`, also one that ended halfway."""
    for layer in decoder_layers(module):
        layer._compiled_call_impl = None
    module.head.chunks = PLAIN_CHUNKS


def why_not_compiled(
    module: PolicyModule,
    recipe: Recipe,
    packed: bool,
    forward: Callable[[MicroBatch], torch.Tensor],
) -> str | None:
    """Compiles the policy; returns the reason if it does not run so, or if log-probs or gradients
    are others. `forward` returns a micro-batch's log-probs with their graph."""
    layers = decoder_layers(module)
    if not layers:
        return "it has no decoder layers that transformers marks (GradientCheckpointingLayer)"
    length = max(min(recipe.longest_sequence, TRIAL_TOKENS), 3)
    batch = two_rows(module.model.config, length, packed)
    with torch.no_grad():
        plain_C = _array(forward(batch))
    plain = _gradient(layers[0], forward(batch))
    try:
        compile_policy(module)
        with torch.no_grad():
            compiled_C = _array(forward(batch))
        compiled = _gradient(layers[0], forward(batch))
    except Exception as error:  # of dynamo, inductor, triton, the C++ compiler
        return f"{type(error).__name__}: {first_line(error)}"
    gap = float(np.abs(compiled_C - plain_C).mean())
    other = float(np.linalg.norm(compiled - plain) / max(float(np.linalg.norm(plain)), 1e-30))
    if gap <= recipe.logprob_gap_limit and other <= OTHER_SHAPE[recipe.model.dtype]:
        return None
    return f"log-probs differ by {gap:.2g} nats, gradients by {other:.2g} of their norm"


def _gradient(layer: nn.Module, logprobs_C: torch.Tensor) -> np.ndarray:
    """Of the trainable parameters of a layer, flat. None is accumulated, and no hook of DeepSpeed
    runs."""
    parameters = [each for each in layer.parameters() if each.requires_grad]
    if not parameters:
        return np.zeros(0, np.float32)
    given = torch.autograd.grad(logprobs_C.sum(), parameters, allow_unused=True)
    return np.concatenate([_array(each.flatten()) for each in given if each is not None])


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
