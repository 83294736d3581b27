"""torch.compile for decoder layers and the output head: fuses what lies between matrix products.

Each layer is compiled in place (`nn.Module.compile`), inside gradient checkpointing: parameters
keep their names, and DeepSpeed, peft and transformers see the same modules. Layers of the same kind
share their graphs. Shapes are dynamic, so one graph serves all numbers of rows and tokens; torch
makes further graphs for one row, for a mask, without gradients, and for inputs without gradients.
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
"""Graphs of one function. Torch's own limit of 8, beyond which a layer runs uncompiled, is too low
for models that alternate kinds of layers: each kind needs every kind of graph."""

TRIAL_TOKENS = 2048
"""Longest row of the trial, in tokens. Torch tunes a kernel to the first sizes that it meets, so
they should be close to those of training."""


def refuse_stage_3(setting: bool | str, stage: int) -> None:
    """Raises RecipeError for `model.compile: true` at ZeRO 3."""
    if setting is True and stage == 3:
        raise RecipeError(
            "model.compile true at ZeRO 3, which gathers weights inside the layers: set it to "
            "false, or engine.zero_stage to 0, 1 or 2"
        )


def decoder_layers(module: PolicyModule) -> list[nn.Module]:
    """Returns the layers that transformers can checkpoint; empty for a model that marks none."""
    return [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]


def compile_policy(module: PolicyModule) -> None:
    """Compile the layers and the head of a policy in place; torch compiles at the first calls."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, MOST_GRAPHS)
    for layer in decoder_layers(module):
        layer.compile(dynamic=True)
    if not module.head.settings.in_fp32:  # torch cannot compile the product in fp32
        module.head.chunks = compiled_chunks()


def leave_uncompiled(module: PolicyModule) -> None:
    """Undo `compile_policy`, also if it failed halfway."""
    for layer in decoder_layers(module):
        layer._compiled_call_impl = None
    module.head.chunks = PLAIN_CHUNKS


def why_not_compiled(
    module: PolicyModule,
    recipe: Recipe,
    packed: bool,
    forward: Callable[[MicroBatch], torch.Tensor],
) -> str | None:
    """Compile the policy in place, and compare log-probs and gradients of two random rows with
    those before. Returns why it cannot be used (it does not run, or they change), None if it can.
    `forward` returns a micro-batch's log-probs with their graph."""
    layers = decoder_layers(module)
    if not layers:
        return "it has no decoder layers that transformers marks (GradientCheckpointingLayer)"
    length = max(min(recipe.longest_sequence, TRIAL_TOKENS), 3)
    batch = two_rows(module.model.config, length, packed)
    with torch.no_grad():
        plain_C = _array(forward(batch))
    plain_gradient = _gradient(layers[0], forward(batch))
    try:
        compile_policy(module)
        with torch.no_grad():
            compiled_C = _array(forward(batch))
        compiled_gradient = _gradient(layers[0], forward(batch))
    except Exception as error:  # dynamo, inductor, triton and the C++ compiler raise anything
        return f"{type(error).__name__}: {first_line(error)}"
    gap = float(np.abs(compiled_C - plain_C).mean())
    plain_norm = max(float(np.linalg.norm(plain_gradient)), 1e-30)
    difference = float(np.linalg.norm(compiled_gradient - plain_gradient) / plain_norm)
    if gap <= recipe.logprob_gap_limit and difference <= OTHER_SHAPE[recipe.model.dtype]:
        return None
    return f"log-probs differ by {gap:.2g} nats, gradients by {difference:.2g} of their norm"


def _gradient(layer: nn.Module, logprobs_C: torch.Tensor) -> np.ndarray:
    """Computes the gradient of the log-probs' sum for a layer's trainable parameters, flat. It is
    not accumulated, and hooks of DeepSpeed do not run."""
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if not parameters:
        return np.zeros(0, np.float32)
    gradients = torch.autograd.grad(logprobs_C.sum(), parameters, allow_unused=True)
    return np.concatenate([_array(part.flatten()) for part in gradients if part is not None])


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
