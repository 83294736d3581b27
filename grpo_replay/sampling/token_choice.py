"""Sample tokens from logits by inverse transform sampling, with one uniform number per token.

The tokens of a row depend only on its own logits and seed, not on the other rows of the batch
(up to rounding in the model).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from grpo_replay.types import GenerationRequest

CHUNK_LOGITS = 1 << 24
"""Logits processed at once; limits each float32 copy to 64 MiB."""

BLOCK_TOKENS = 128
"""Tokens per block of the two-level cumulative sum; divides Qwen's vocabulary size."""


class UniformRows:
    """Row i's number at position t is the t-th double of `Generator(Philox(key=seeds[i]))`."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]

    def next_block(self, rows: np.ndarray, count: int) -> np.ndarray:
        """The next `count` numbers of each of `rows`, float64 [len(rows), count] in [0, 1)."""
        block = np.empty((len(rows), count))
        for target, row in zip(block, rows.tolist(), strict=True):
            self._generators[row].random(out=target)
        return block


@dataclass
class SamplingParameters:
    """Temperature (0: greedy) and nucleus mass of each row, float32 [R, 1]."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    any_greedy: bool
    any_nucleus: bool

    @classmethod
    def of(
        cls, requests: Sequence[GenerationRequest], device: torch.device
    ) -> "SamplingParameters":
        temperature = torch.tensor([[r.temperature] for r in requests], dtype=torch.float32)
        top_p = torch.tensor([[r.top_p] for r in requests], dtype=torch.float32)
        return cls(
            temperature.to(device),
            top_p.to(device),
            bool((temperature == 0).any()),
            bool((top_p < 1).any()),
        )

    def rows(self, start: int, stop: int) -> "SamplingParameters":
        return SamplingParameters(
            self.temperature[start:stop],
            self.top_p[start:stop],
            self.any_greedy,
            self.any_nucleus,
        )


def choose_tokens(
    logits_RV: torch.Tensor, uniforms_R: torch.Tensor, parameters: SamplingParameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (int64 [R]) and their log-probs (float32 [R]) under the distribution sampled
    from: softmax(logits / temperature) cut to the nucleus and renormalised.

    A greedy row takes the largest logit; its log-prob is at temperature 1, without the nucleus cut.
    """
    rows, vocabulary = logits_RV.shape
    step = max(1, CHUNK_LOGITS // vocabulary)
    if rows <= step:
        return _choose(logits_RV, uniforms_R, parameters)
    parts = [
        _choose(logits_RV[i : i + step], uniforms_R[i : i + step], parameters.rows(i, i + step))
        for i in range(0, rows, step)
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _choose(
    logits_RV: torch.Tensor, uniforms_R: torch.Tensor, parameters: SamplingParameters
) -> tuple[torch.Tensor, torch.Tensor]:
    temperature = parameters.temperature
    if parameters.any_greedy:
        greedy = temperature == 0
        temperature = torch.where(greedy, 1.0, temperature)
    logp_RV = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
    if parameters.any_nucleus:
        top_p = (
            torch.where(greedy, 1.0, parameters.top_p)
            if parameters.any_greedy
            else parameters.top_p
        )
        logp_RV = _nucleus(logp_RV, top_p)
    tokens_R1 = _invert(logp_RV.exp(), uniforms_R)
    if parameters.any_greedy:
        tokens_R1 = torch.where(greedy, logp_RV.argmax(-1, keepdim=True), tokens_R1)
    return tokens_R1.squeeze(1), logp_RV.gather(1, tokens_R1).squeeze(1)


def _invert(probabilities_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the uniform number, int64 [R, 1].

    Cumulative sums are float64: in float32, rounding over a large vocabulary biases the samples.
    They run over blocks, then inside one block per row, instead of over the whole vocabulary.
    """
    rows, vocabulary = probabilities_RV.shape
    if vocabulary <= BLOCK_TOKENS:
        cumulative_RV = probabilities_RV.cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative_RV, uniforms_R.unsqueeze(1) * cumulative_RV[:, -1:])
    padding = -vocabulary % BLOCK_TOKENS
    padded = pad(probabilities_RV, (0, padding)) if padding else probabilities_RV
    blocks_RBK = padded.view(rows, -1, BLOCK_TOKENS)
    ends_RB = blocks_RBK.sum(-1).double().cumsum(-1)
    target_R1 = uniforms_R.unsqueeze(1) * ends_RB[:, -1:]
    block_R1 = _first_above(ends_RB, target_R1)
    before_R1 = pad(ends_RB, (1, 0)).gather(1, block_R1)
    chosen_R1K = block_R1.unsqueeze(2).expand(rows, 1, BLOCK_TOKENS)
    inside_RK = blocks_RBK.gather(1, chosen_R1K).squeeze(1).cumsum(-1, dtype=torch.float64)
    return block_R1 * BLOCK_TOKENS + _first_above(inside_RK, target_R1 - before_R1)


def _first_above(cumulative: torch.Tensor, target_R1: torch.Tensor) -> torch.Tensor:
    """The first index of each row whose cumulative sum exceeds the target, int64 [R, 1]."""
    total_R1 = cumulative[:, -1:]
    # Stay below the total: only tokens of probability zero come after it.
    below_total = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    index_R1 = torch.searchsorted(cumulative, torch.minimum(target_R1, below_total), right=True)
    return index_R1.clamp_(max=cumulative.shape[1] - 1)


def _nucleus(logp_RV: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Log-probs renormalised over the smallest set of most likely tokens whose mass reaches `top_p`
    (Holtzman et al. 2020). A row with `top_p` 1 is unchanged, bit for bit."""
    sorted_RV, order_RV = logp_RV.sort(dim=-1, descending=True, stable=True)
    mass_RV = sorted_RV.exp()
    mass_before_RV = mass_RV.cumsum(-1, dtype=torch.float64) - mass_RV
    outside_RV = torch.zeros_like(logp_RV, dtype=torch.bool)
    outside_RV.scatter_(1, order_RV, mass_before_RV >= top_p_R1)
    outside_RV &= top_p_R1 < 1
    cut_RV = torch.log_softmax(logp_RV.masked_fill(outside_RV, -torch.inf), dim=-1)
    return torch.where(top_p_R1 < 1, cut_RV, logp_RV)
