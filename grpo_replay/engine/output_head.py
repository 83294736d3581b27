"""The body and the output head of any causal language model, by transformers' own means."""

from dataclasses import dataclass
from typing import Any

from torch import nn
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
    cap c, c · tanh(z / c)."""

    scale: float = 1.0
    cap: float | None = None

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
