"""The policy as one module that returns log-probs instead of logits; finds the body and the output
head of any causal language model by transformers' own methods."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

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
    """How the product of hidden states and head weight becomes logits: z = scale · product, and
    with a soft cap c, c · tanh(z / c); computed in the model's precision, or `in_fp32`."""

    scale: float = 1.0
    cap: float | None = None
    in_fp32: bool = False

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "LogitSettings":
        """Reads the settings of a model's configuration: the product of its multipliers and inverse
        divisors, and its soft cap, if any."""
        scale = 1.0
        for name in (*MULTIPLIERS, *DIVISORS):
            value = getattr(config, name, None)
            if isinstance(value, int | float):
                divides = name in DIVISORS and config.model_type not in _MULTIPLY_LOGITS_SCALING
                scale *= 1 / value if divides else value
        caps = (getattr(config, name, None) for name in CAPS)
        return cls(scale, next((float(cap) for cap in caps if cap), None))


def find_body(model: PreTrainedModel) -> nn.Module:
    """Return the module from token ids to the last hidden states. Raises ModelError without one."""
    body = model.base_model
    if body is model:
        raise ModelError(
            f"{_name(model)}: no module {model.base_model_prefix!r} from token ids to hidden "
            "states; the trainer needs one besides the output head"
        )
    return body


def find_head(model: PreTrainedModel) -> nn.Linear:
    """Return the linear layer from hidden states to logits. Raises ModelError without one."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"{_name(model)}: its output head is {type(head).__name__}, not a linear layer"
        )
    return head


class Fp32Head(nn.Linear):
    """A linear output head (`SamplingSection.fp32_head`) with logits in fp32, whatever the dtype of
    its weight. It shares the parameters of the head that it replaces.

    The sum over the hidden size is rounded to 24 bits instead of bfloat16's 8.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, head.bias is not None, device="meta")
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return fp32_product(hidden, self.weight, self.bias)


def use_fp32_head(model: PreTrainedModel) -> None:
    """Replace the model's output head by an `Fp32Head`; parameters keep their names. Raises
    ModelError without a linear head."""
    head = find_head(model)
    name = next(name for name, module in model.named_modules() if module is head)
    model.set_submodule(name, Fp32Head(head))


def fp32_product(
    hidden: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
) -> torch.Tensor:
    """Compute hidden · weightᵀ + bias in fp32. A GPU reads bfloat16 and writes fp32 sums, as vLLM's
    head does (`LogitsProcessor._apply_head`); a CPU has no such product, and copies the weight."""
    bias = None if bias_V is None else bias_V.float()
    if not hidden.is_cuda or hidden.dtype == torch.float32:
        return F.linear(hidden.float(), weight_VH.float(), bias)
    flat = torch.mm(hidden.flatten(0, -2), weight_VH.t(), out_dtype=torch.float32)
    product = flat.unflatten(0, hidden.shape[:-1])
    return product if bias is None else product + bias


def refuse_wrong_head(model: PreTrainedModel, difference: float) -> None:
    """Raises ModelError: log-probs of the head differ from those of the model's own logits."""
    named = ", ".join(f"{name} {value}" for name, value in suspects(model.config).items())
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
    """Return numeric settings that concern logits (not a router's), for a wrong head's message."""
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


BLOCK_WORDS = 16_384
"""Words of the vocabulary in one product of the weight's gradient, in bfloat16."""


class PolicyModule(nn.Module):
    """Backbone and output head in one forward pass, from token ids to log-probs.

    ZeRO-3 gathers a weight only in its owner's forward pass, so the head runs in this module.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, chunk_tokens: int) -> None:
        """`temperature` divides the logits, of which `chunk_tokens` rows exist at a time. Raises
        ModelError for a model without a body or a linear output head."""
        super().__init__()
        self.model = model
        head, settings = find_head(model), LogitSettings.of(model.config)
        settings = replace(settings, in_fp32=isinstance(head, Fp32Head))
        self.head = LogprobHead(head, temperature, chunk_tokens, settings)
        parameters = inspect.signature(find_body(model).forward).parameters
        self._takes_positions = "position_ids" in parameters or "kwargs" in parameters
        attention = str(model.config._attn_implementation)
        self._takes_bounds = "flash" in attention and "kwargs" in parameters

    def forward(
        self,
        input_ids_RL: torch.Tensor,
        positions_C: torch.Tensor,
        target_ids_C: torch.Tensor,
        position_ids_RL: torch.Tensor | None = None,
        bounds: torch.Tensor | None = None,
        longest: int | None = None,
        segments_3RL: torch.Tensor | None = None,
        through_logits: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probs and entropies, fp32 [C], of the targets under the sampling
        distribution; the entropies have no gradient. Rows are padded on the right, so causal
        attention needs no mask, or packed into one, which the model separates by the position ids
        (`engine.model_trials`). They share prompts if `segments_3RL` says what each position
        attends to (`MicroBatch`).

        Flash attention gets the `bounds` of packed rows and the length of the `longest`; otherwise
        every layer would compute them from the position ids, and wait for the GPU. With
        `through_logits` the log-probs come from the logits of the model's own forward pass."""
        inputs: dict[str, Any] = {"input_ids": input_ids_RL, "use_cache": False}
        if position_ids_RL is not None and self._takes_positions:
            inputs["position_ids"] = position_ids_RL
            if bounds is not None and self._takes_bounds:
                inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
                inputs |= {"max_length_q": longest, "max_length_k": longest}
        if segments_3RL is not None:
            attention = str(self.model.config._attn_implementation)
            inputs["attention_mask"] = segment_mask(segments_3RL, attention, self.model.dtype)
        if through_logits:
            logits_CV = self.model(**inputs).logits.flatten(0, 1)[positions_C].float()
            return _chunk_logprobs(logits_CV / self.head.temperature, target_ids_C)[:2]
        hidden_RLH = find_body(self.model)(**inputs).last_hidden_state
        return self.head(hidden_RLH.flatten(0, 1)[positions_C], target_ids_C)


def segment_mask(segments_3RL: torch.Tensor, attention: str, dtype: torch.dtype) -> torch.Tensor:
    """Make the attention mask [R, 1, L, L] for transformers: each position attends to its own
    segment, the rest of its prompt and the common prefix, up to itself.

    The mask is boolean for sdpa; for eager it holds what is added to scores.
    """
    own_RL, prompt_RL, prefix_RL = segments_3RL
    key_R11L = own_RL[:, None, None, :]
    own_R1L1, prompt_R1L1, prefix_R1L1 = (
        segment_RL[:, None, :, None] for segment_RL in (own_RL, prompt_RL, prefix_RL)
    )
    allowed = (key_R11L == own_R1L1) | (key_R11L == prompt_R1L1) | (key_R11L == prefix_R1L1)
    position_L = torch.arange(own_RL.shape[1], device=own_RL.device)
    mask_R1LL = allowed & (position_L <= position_L[:, None])
    if attention == "eager":
        lowest = torch.finfo(dtype).min
        return torch.zeros_like(mask_R1LL, dtype=dtype).masked_fill_(~mask_R1LL, lowest)
    return mask_R1LL


class LogprobHead(nn.Module):
    """The output head, which maps hidden states [C, H] to log-probs and entropies [C].

    The head works on chunks of `chunk_tokens` completion tokens. With V words in the vocabulary, it
    holds those of one chunk only, [chunk_tokens, V], instead of [C, V]. The backward pass
    recomputes them chunk by chunk (`_ChunkedLogprobs`); a single chunk keeps them, unless they are
    `in_fp32`.

    Weight and bias of `lm_head` are parameters of this module, and `lm_head` itself is never called
    in training. Under ZeRO-3 this avoids a hang. ZeRO-3 gathers a weight, with a collective, each
    time the module that owns it is called. Ranks have different numbers of completion tokens and
    therefore of chunks. If each chunk called `lm_head`, ranks would gather different numbers of
    times and wait for each other forever. As parameters of this module, they are gathered once per
    forward pass.

    Marking a module around `lm_head` as a ZeRO-3 leaf module would also gather once, but gives
    wrong gradients for tied weights: it reduces the gradient of the weight before the embedding
    has added its share.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float
    chunk_tokens: int
    settings: LogitSettings
    chunks: "Chunks"

    def __init__(
        self,
        lm_head: nn.Linear,
        temperature: float,
        chunk_tokens: int,
        settings: LogitSettings | None = None,
    ) -> None:
        """Takes over the parameters of `lm_head`, shared with the model."""
        super().__init__()
        self.weight, self.bias = lm_head.weight, lm_head.bias
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.settings = settings or LogitSettings()
        self.chunks = PLAIN_CHUNKS

    def forward(
        self, hidden_CH: torch.Tensor, target_ids_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probs and entropies, fp32 [C], of the target ids; chunk by chunk if there
        are gradients and more than one chunk, or logits `in_fp32`."""
        inputs = (hidden_CH, self.weight, self.bias, target_ids_C)
        constants = (self.settings, self.temperature, self.chunk_tokens, self.chunks)
        chunked = len(target_ids_C) > self.chunk_tokens or self.settings.in_fp32
        if torch.is_grad_enabled() and chunked:
            return _ChunkedLogprobs.apply(*inputs, *constants)
        logprobs_C, entropies_C, _ = _in_chunks(*inputs, *constants)
        return logprobs_C, entropies_C


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs and entropies [C] whose backward pass recomputes the logits of one chunk at a time.

    d log p(target) / d logits is one-hot(target) - softmax, computed in the memory of the logits.
    Unlike `torch.utils.checkpoint`, it computes neither entropies nor normalisers twice. The
    gradient of the weight is summed over chunks in one fp32 buffer, also in bfloat16. The products
    of the backward pass are in the weight's precision, also with logits `in_fp32`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_CH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_ids_C: torch.Tensor,
        settings: LogitSettings,
        temperature: float,
        chunk_tokens: int,
        chunks: "Chunks",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes log-probs and entropies, and saves inputs and normalisers, no logits."""
        # Detached, so that it shares its graph with passes without gradients.
        logprobs_C, entropies_C, log_normalizers_C = _in_chunks(
            hidden_CH.detach(), weight_VH, bias_V, target_ids_C,
            settings, temperature, chunk_tokens, chunks,
        )  # fmt: skip
        ctx.save_for_backward(hidden_CH, weight_VH, bias_V, target_ids_C, log_normalizers_C)
        ctx.settings, ctx.temperature, ctx.chunk_tokens = settings, temperature, chunk_tokens
        ctx.chunks = chunks
        ctx.mark_non_differentiable(entropies_C)
        return logprobs_C, entropies_C

    @staticmethod
    def backward(ctx: Any, gradients_C: torch.Tensor, _: Any) -> Any:
        """Computes the gradients of hidden states, weight and bias, as far as they are needed, from
        those of the log-probs; the logits of one chunk at a time are recomputed."""
        hidden_CH, weight_VH, bias_V, target_ids_C, log_normalizers_C = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        hidden_gradients = []
        weight_gradient_VH = bias_gradient_V = None
        if needs_weight:
            weight_gradient_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        if needs_bias:
            bias_gradient_V = torch.zeros_like(bias_V, dtype=torch.float32)
        product_weight_VH = _product_weight(weight_VH, ctx.settings)
        columns = (hidden_CH, target_ids_C, log_normalizers_C, gradients_C)
        for hidden, target, log_normalizer, gradient in zip(
            *(column.split(ctx.chunk_tokens) for column in columns), strict=True
        ):
            gradient_cV, bias_gradient = ctx.chunks.gradient(
                hidden, product_weight_VH, bias_V, target, log_normalizer, gradient,
                ctx.settings, ctx.temperature,
            )  # fmt: skip
            if bias_gradient_V is not None:
                bias_gradient_V += bias_gradient
            if needs_hidden:
                hidden_gradients.append(gradient_cV @ weight_VH)
            if weight_gradient_VH is not None:
                _add_product(weight_gradient_VH, gradient_cV.t(), hidden)
        return (
            torch.cat(hidden_gradients) if needs_hidden else None,
            None if weight_gradient_VH is None else weight_gradient_VH.to(weight_VH.dtype),
            None if bias_gradient_V is None else bias_gradient_V.to(bias_V.dtype),
            None, None, None, None, None,
        )  # fmt: skip


def _in_chunks(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_ids_C: torch.Tensor,
    settings: LogitSettings,
    temperature: float,
    chunk_tokens: int,
    chunks: "Chunks",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes log-probs, entropies and log-normalisers, fp32 [C], `chunk_tokens` at a time."""
    product_weight_VH = _product_weight(weight_VH, settings)
    results = [
        chunks.logprobs(hidden, product_weight_VH, bias_V, target, settings, temperature)
        for hidden, target in zip(
            hidden_CH.split(chunk_tokens), target_ids_C.split(chunk_tokens), strict=True
        )
    ]
    logprobs, entropies, log_normalizers = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(log_normalizers)


def _product_weight(weight_VH: torch.Tensor, settings: LogitSettings) -> torch.Tensor:
    """The weight, or its fp32 copy if `fp32_product` would otherwise copy it for every chunk."""
    return weight_VH if weight_VH.is_cuda or not settings.in_fp32 else weight_VH.float()


def _logits(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    settings: LogitSettings,
    temperature: float,
) -> torch.Tensor:
    """Computes the logits of the sampling distribution, fp32 [C, V]. Scale and cap are applied in
    the precision of the product, as in the model's own forward pass."""
    multiply = fp32_product if settings.in_fp32 else F.linear
    logits_CV = multiply(hidden_CH, weight_VH, bias_V)
    if settings.scale != 1.0:
        logits_CV = logits_CV * settings.scale
    if settings.cap is not None:
        logits_CV = torch.tanh(logits_CV / settings.cap) * settings.cap
    logits_CV = logits_CV.float()
    return logits_CV if temperature == 1.0 else logits_CV / temperature


def _cap_slopes(
    logits_CV: torch.Tensor, settings: LogitSettings, temperature: float
) -> torch.Tensor | None:
    """Derivative of the soft cap at the capped logits, 1 - tanh²; None without a cap."""
    if settings.cap is None:
        return None
    return 1 - (logits_CV * (temperature / settings.cap)).square()


def _chunk_logprobs(
    logits_CV: torch.Tensor, target_ids_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes log-probs of the targets, entropies (without gradient) and log-normalisers, [C]."""
    log_normalizers_C = torch.logsumexp(logits_CV, dim=-1)
    target_logits_C = logits_CV.gather(-1, target_ids_C.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        terms_CV = (logits_CV - log_normalizers_C.unsqueeze(-1)).exp_().mul_(logits_CV)
        entropies_C = log_normalizers_C - terms_CV.sum(-1)
    return target_logits_C - log_normalizers_C, entropies_C, log_normalizers_C


def _logprobs(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_ids_C: torch.Tensor,
    settings: LogitSettings,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes logits, then `_chunk_logprobs` of them: the head's forward pass on one chunk."""
    logits_CV = _logits(hidden_CH, weight_VH, bias_V, settings, temperature)
    return _chunk_logprobs(logits_CV, target_ids_C)


def _logit_gradient(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_ids_C: torch.Tensor,
    log_normalizers_C: torch.Tensor,
    gradients_C: torch.Tensor,
    settings: LogitSettings,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes, from the gradients of the log-probs, that of the product of hidden states and
    weight (in their dtype) and that of the bias (fp32): the head's backward pass on one chunk."""
    logits_CV = _logits(hidden_CH, weight_VH, bias_V, settings, temperature)
    slopes_CV = _cap_slopes(logits_CV, settings, temperature)
    probabilities_CV = logits_CV.sub_(log_normalizers_C.unsqueeze(-1)).exp_()
    gradient_CV = probabilities_CV.mul_(-gradients_C.unsqueeze(-1))
    if torch.compiler.is_compiling():  # a scatter would be a pass of its own
        words_V = torch.arange(gradient_CV.shape[-1], device=gradient_CV.device)
        is_target_CV = words_V == target_ids_C.unsqueeze(-1)
        gradient_CV = torch.where(is_target_CV, gradient_CV + gradients_C[:, None], gradient_CV)
    else:
        gradient_CV.scatter_add_(1, target_ids_C.unsqueeze(-1), gradients_C.unsqueeze(-1))
    if slopes_CV is not None:
        gradient_CV *= slopes_CV
    if settings.scale != temperature:
        gradient_CV /= temperature / settings.scale
    bias_gradient_V = None if bias_V is None else gradient_CV.sum(0)
    return gradient_CV.to(hidden_CH.dtype), bias_gradient_V


class Chunks(NamedTuple):
    """The functions that the head runs on a chunk of tokens, forward and backward."""

    logprobs: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    gradient: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


PLAIN_CHUNKS = Chunks(_logprobs, _logit_gradient)


@cache
def compiled_chunks() -> Chunks:
    """The functions compiled by torch: it fuses passes over the logits, and leaves the product."""
    return Chunks(
        torch.compile(_logprobs, dynamic=True), torch.compile(_logit_gradient, dynamic=True)
    )


def _add_product(total_VH: torch.Tensor, left_Vc: torch.Tensor, right_cH: torch.Tensor) -> None:
    """Add `left @ right` to `total` (fp32); in blocks of words if the product is in another dtype,
    so that it never takes the memory of a whole weight."""
    if left_Vc.dtype == total_VH.dtype:
        total_VH.addmm_(left_Vc, right_cH)
        return
    blocks = zip(total_VH.split(BLOCK_WORDS), left_Vc.split(BLOCK_WORDS), strict=True)
    for total_vH, left_vc in blocks:
        total_vH.add_(left_vc @ right_cH)
