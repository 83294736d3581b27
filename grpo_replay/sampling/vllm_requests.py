"""Shared by both vLLM backends: requests as sampling parameters, and validation of completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_replay.errors import RecipeError, SamplerError
from grpo_replay.recipe.sampling_sections import LEAST_VLLM_TEMPERATURE
from grpo_replay.sampling.contract import refuse_impossible
from grpo_replay.types import Completion, GenerationRequest

NO_LOGPROB = -9999.0
"""Sent by a vLLM server in place of NaN and minus infinity, which JSON cannot express."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The policy versions of the first and the last sampled token."""

    first: int
    last: int


def sampling_parameters(
    request: GenerationRequest, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Keywords of vLLM's SamplingParams. Every field that a model's generation_config.json could
    change is set. `logprobs=0` returns the log-prob of the sampled token only."""
    return {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p if request.temperature > 0 else 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed,
        "logprobs": 0,
        "stop_token_ids": list(stop_token_ids),
        # Otherwise the stop tokens of the model's generation_config.json end completions as well,
        # although the recipe may have named another tokenizer, in which they are ordinary tokens.
        "ignore_eos": True,
        "detokenize": False,
    }


def check_request(request: GenerationRequest, max_model_len: int, vocabulary: int) -> None:
    """Raises RecipeError or SamplerError for a request that vLLM would refuse or change."""
    limit = f"the sampler's {max_model_len} tokens: raise sampling.vllm.max_model_len, or"
    refuse_impossible(request, vocabulary, max_model_len, limit)
    if 0 < request.temperature < LEAST_VLLM_TEMPERATURE:
        raise RecipeError(
            f"request {tuple(request.key)}: temperature {request.temperature}: vLLM samples no "
            f"colder than {LEAST_VLLM_TEMPERATURE}; use that, or 0 for greedy"
        )


def build_completion(
    request: GenerationRequest,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    spans: Spans,
    stop_token_ids: Sequence[int],
) -> Completion:
    """The validated completion. Raises SamplerError for a missing or non-finite log-prob, an
    aborted request, or an end that is neither a stop token nor the maximum length."""
    place = f"completion {tuple(request.key)} of policy version {spans.first}"
    if len(logprobs) != len(token_ids) or not token_ids:
        raise SamplerError(f"{place}: {len(token_ids)} tokens came with {len(logprobs)} log-probs")
    logprobs_T = np.asarray(logprobs, dtype=np.float32)
    bad = ~np.isfinite(logprobs_T) | (logprobs_T <= NO_LOGPROB)
    if bad.any():
        raise SamplerError(
            f"{place}: the log-prob of token {bad.argmax()} is not finite; the weights hold NaN "
            "or infinity: look at grad_norm and loss of the last steps"
        )
    ended = finish_reason == "stop" and token_ids[-1] in stop_token_ids
    truncated = finish_reason == "length" and len(token_ids) == request.max_tokens
    if finish_reason is None or not (ended or truncated):
        raise SamplerError(
            f"{place}: finished by {finish_reason!r} after {len(token_ids)} of at most "
            f"{request.max_tokens} tokens, the last of them {token_ids[-1]} (stop tokens "
            f"{list(stop_token_ids)}): the sampler aborted it"
        )
    return Completion(
        key=request.key,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        sampler_logprobs=logprobs_T,
        finish_reason=finish_reason,
        policy_version=spans.first,
        policy_version_end=spans.last,
    )


def read_spans(labels: Sequence[Any], place: str, prefix: str = "") -> Spans:
    """First and last policy version of the weight labels of one completion, in token order. A
    label is `prefix` and the version.

    Raises SamplerError for any other label: the weights are not this run's.
    """
    versions = [
        int(version)
        for label in labels
        if isinstance(label, str)
        and label.startswith(prefix)
        and (version := label.removeprefix(prefix)).isdecimal()
    ]
    if not versions or len(versions) < len(labels):
        raise SamplerError(
            f"{place}: sampled by weights labelled {list(labels)}, not by a policy version of "
            "this run: the server was restarted, or something else updates it"
        )
    return Spans(versions[0], versions[-1])
