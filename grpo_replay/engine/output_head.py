"""The body and the output head of any causal language model, by transformers' own means."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from grpo_replay.errors import ModelError

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
"""Settings by which a model multiplies its logits: Cohere, Falcon-H1."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Settings by which a model divides its logits or last hidden states: Granite, Inkling."""
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Settings that bound a model's logits: Gemma, RecurrentGemma, xLSTM."""
_MULTIPLY_LOGITS_SCALING = ("hyperclovax",)


@dataclass(frozen=True, slots=True)
class LogitSettings:
    """From the product of hidden states and weight to logits: z = scale · product, and with a soft
    cap c, c · tanh(z / c). Otherwise in the model's precision, or `in_fp32`."""

    scale: float = 1.0
    cap: float | None = None
    in_fp32: bool = False

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "LogitSettings":
        scale = 1.0
        for name in (*MULTIPLIERS, *DIVISORS):
            value = getattr(config, name, None)
            if isinstance(value, int | float):
                divides = name in DIVISORS and config.model_type not in _MULTIPLY_LOGITS_SCALING
                scale *= 1 / value if divides else value
        caps = (getattr(config, name, None) for name in CAPS)
        return cls(scale, next((float(cap) for cap in caps if cap), None))


def find_body(model: PreTrainedModel) -> nn.Module:
    """The module from token ids to the last hidden states. Raises ModelError without one."""
    body = model.base_model
    if body is model:
        raise ModelError(
            f"{_name(model)}: no module {model.base_model_prefix!r} from token ids to hidden "
            "states; the trainer needs one beside the output head"
        )
    return body


def find_head(model: PreTrainedModel) -> nn.Linear:
    """The linear layer from hidden states to logits. Raises ModelError without one."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{_name(model)}: its output head is {type(head).__name__}, not a linear layer"
        )
    return head


class Fp32Head(nn.Linear):
    """A linear output head (`ModelSection.fp32_head`) with logits in fp32, whatever its weight is.

    The sum over the hidden size is rounded to 24 bits instead of bfloat16's 8.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return fp32_product(hidden, self.weight, self.bias)


def use_fp32_head(model: PreTrainedModel) -> None:
    """Makes the model's output head an `Fp32Head` in place; its parameters keep their names.
    Raises ModelError without a linear head."""
    find_head(model).__class__ = Fp32Head


def fp32_product(
    hidden: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
) -> torch.Tensor:
    """fp32 hidden · weightᵀ + bias. A GPU reads bfloat16 and writes fp32 sums, as vLLM's head does
    (`LogitsProcessor._apply_head`); a CPU has no such product, and copies the weight."""
    bias = None if bias_V is None else bias_V.float()
    if not hidden.is_cuda or hidden.dtype == torch.float32:
        return F.linear(hidden.float(), weight_VH.float(), bias)
    flat = torch.mm(hidden.flatten(0, -2), weight_VH.t(), out_dtype=torch.float32)
    product = flat.unflatten(0, hidden.shape[:-1])
    return product if bias is None else product + bias


def refuse_wrong_head(model: PreTrainedModel, difference: float) -> None:
    """Raises ModelError: log-probs of the head differ from those of the model's own logits."""
    found = suspects(model.config)
    named = ", ".join(f"{name} {value}" for name, value in found.items())
    raise ModelError(
        f"{_name(model)}: log-probs of the trainer's output head differ from those of the model's "
        f"own logits by up to {difference:.2g} nats, so it would train on wrong ones; "
        + (
            f"its configuration has settings that the trainer may not know: {named}"
            if named
            else "its head is more than a linear layer with a scale, a soft cap and a bias"
        )
    )


def suspects(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings that have to do with logits and are set."""
    return {
        name: value
        for name, value in config.get_text_config().to_dict().items()
        if ("logit" in name or "head_mul" in name or "soft_cap" in name)
        and "router" not in name
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def _name(model: PreTrainedModel) -> str:
    return f"model.path: a model of type {model.config.model_type} ({type(model).__name__})"
