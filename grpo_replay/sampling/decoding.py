"""Decodes one batch of requests: prefills each distinct prompt once, and a prefix that all prompts
share only once; then samples one token per row and step.

Tokens are sampled by inverse transform sampling, with one uniform number per token. The tokens of a
row depend only on its own logits and seed, not on other rows of the batch (up to rounding in the
model).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from grpo_replay.engine.shared_prompts import common_prefix
from grpo_replay.sampling.decode_modes import DecodeMode, HfCache, expanded_cache, model_code
from grpo_replay.types import GenerationRequest, RequestKey

CHUNK_LOGITS = 1 << 24
"""Logits processed at once; limits each float32 copy to 64 MiB."""

BLOCK_TOKENS = 128
"""Tokens per block of the two-level cumulative sum; divides Qwen's vocabulary size."""


class UniformRows:
    """Uniform numbers of each row: that of row i at position t is the t-th double of
    `Generator(Philox(key=seeds[i]))`."""

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
    def from_requests(
        cls, requests: Sequence[GenerationRequest], device: torch.device
    ) -> "SamplingParameters":
        """Collects the parameters of requests, row by row, on the device."""
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
    """Sample token ids (int64 [R]), and return their log-probs (float32 [R]) under the sampling
    distribution: softmax(logits / temperature), cut to the nucleus and renormalised.

    A greedy row takes the largest logit; its log-prob is at temperature 1, without the nucleus cut.
    """
    rows, vocabulary = logits_RV.shape
    chunk = max(1, CHUNK_LOGITS // vocabulary)
    if rows <= chunk:
        return _choose(logits_RV, uniforms_R, parameters)
    chunks = [
        _choose(logits_RV[i : i + chunk], uniforms_R[i : i + chunk], parameters.rows(i, i + chunk))
        for i in range(0, rows, chunk)
    ]
    tokens, logprobs = zip(*chunks, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _choose(
    logits_RV: torch.Tensor, uniforms_R: torch.Tensor, parameters: SamplingParameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples a token for each row of logits by inversion, the largest logit at temperature 0;
    returns tokens and log-probs. Called by `choose_tokens` for each chunk."""
    temperature, top_p = parameters.temperature, parameters.top_p
    if parameters.any_greedy:
        is_greedy = temperature == 0
        temperature = torch.where(is_greedy, 1.0, temperature)
        top_p = torch.where(is_greedy, 1.0, top_p)
    logp_RV = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
    if parameters.any_nucleus:
        logp_RV = _nucleus(logp_RV, top_p)
    tokens_R1 = _invert(logp_RV.exp(), uniforms_R)
    if parameters.any_greedy:
        tokens_R1 = torch.where(is_greedy, logp_RV.argmax(-1, keepdim=True), tokens_R1)
    return tokens_R1.squeeze(1), logp_RV.gather(1, tokens_R1).squeeze(1)


def _invert(probabilities_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Find the first token whose cumulative probability exceeds a row's uniform, int64 [R, 1].

    Cumulative sums are float64: in float32, rounding over a large vocabulary biases the samples.
    For speed they run over sums of blocks, then inside each row's block with the token.
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
    tokens_R1 = block_R1 * BLOCK_TOKENS + _first_above(inside_RK, target_R1 - before_R1)
    # A row of NaN has no such token; the caller refuses its log-prob, which is NaN.
    return tokens_R1.clamp_(max=vocabulary - 1) if padding else tokens_R1


def _first_above(cumulative: torch.Tensor, target_R1: torch.Tensor) -> torch.Tensor:
    """Returns the first index of each row whose cumulative sum exceeds the target, int64 [R, 1]."""
    total_R1 = cumulative[:, -1:]
    # Stay below the total: tokens that reach it later have probability zero.
    below_total = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    index_R1 = torch.searchsorted(cumulative, torch.minimum(target_R1, below_total), right=True)
    return index_R1.clamp_(max=cumulative.shape[1] - 1)


def _nucleus(logp_RV: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Renormalise log-probs over the smallest set of most likely tokens whose mass reaches `top_p`
    (Holtzman et al. 2020); -inf outside. A row with `top_p` 1 is unchanged, bit for bit."""
    sorted_RV, order_RV = logp_RV.sort(dim=-1, descending=True, stable=True)
    mass_RV = sorted_RV.exp()
    mass_before_RV = mass_RV.cumsum(-1, dtype=torch.float64) - mass_RV
    outside_RV = torch.zeros_like(logp_RV, dtype=torch.bool)
    outside_RV.scatter_(1, order_RV, mass_before_RV >= top_p_R1)
    outside_RV &= top_p_R1 < 1
    cut_RV = torch.log_softmax(logp_RV.masked_fill(outside_RV, -torch.inf), dim=-1)
    return torch.where(top_p_R1 < 1, cut_RV, logp_RV)


PREFILL_TOKENS = 16_384
"""Prompt tokens, including padding, of one forward pass of the prefill."""

MIN_SHARED_PREFIX = 16
"""Minimum length of a prefix shared by all prompts of a batch that is prefilled once."""

INITIAL_CAPACITY = 512
"""Completion tokens for which the cache has room at first."""

UNIFORM_BLOCK = 64
"""Uniform numbers drawn at once for each row."""


class FinishedRow(NamedTuple):
    """A finished completion; `row` is the index of its request in the batch."""

    row: int
    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    finish_reason: str


class DecodingBatch:
    """Requests that are decoded together. Rows at the end move into the slots of finished rows.

    A slot is a row of the batch's tensors; `_row_of_slot` has the index of its request.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[GenerationRequest],
        eos_ids: Sequence[int],
        pad_id: int,
        mode: DecodeMode,
        model_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Prefill the prompts, which must have equal lengths if `mode` is not padded.
        `model_context` is entered around calls into the model and its cache."""
        self._model, self._mode, self._model_context = model, mode, model_context
        device = model.device
        self.alive = len(requests)
        self._length = 0  # completion tokens so far
        self._longest = max(request.max_tokens for request in requests)
        self._uniform_rows = UniformRows([request.seed for request in requests])
        self._eos = torch.tensor(eos_ids, device=device)
        self._row_of_slot = np.arange(self.alive)
        self._limits = np.array([request.max_tokens for request in requests])
        self._parameters = SamplingParameters.from_requests(requests, device)
        self._tokens_RT = torch.empty(self.alive, self._longest, dtype=torch.int32, device=device)
        self._logprobs_RT = torch.empty(self.alive, self._longest, device=device)
        self._prefill(requests, pad_id)

    def _prefill(self, requests: Sequence[GenerationRequest], pad_id: int) -> None:
        """Computes every distinct prompt, and a prefix common to all, once. Sets, for every row,
        its cache, the logits of its first token, its position, and the mask of padding."""
        device = self._model.device
        prompts, prompt_of_row = _distinct_prompts(requests)
        lengths = np.array([len(prompt) for prompt in prompts])
        width, prefix = int(lengths.max()), self._shared_prefix_tokens(prompts)
        padded, real = _left_padded(prompts, width, prefix, pad_id)
        ids, mask = torch.from_numpy(padded).to(device), torch.from_numpy(real).to(device)
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)
        # An index copies the last hidden states. A slice would leave them strided, and bfloat16
        # matrix products of strided tensors are a hundred times slower on a CPU (torch 2.13).
        last_only: dict[str, Any] = {}
        if "logits_to_keep" in self._mode.forward_arguments:
            last_only["logits_to_keep"] = torch.tensor([-1], device=device)
        chunk = len(prompts) if self._mode.hf_cache else max(1, PREFILL_TOKENS // width)
        rows = torch.from_numpy(prompt_of_row).to(device)
        caches, logits = [], []
        with self._model_context():
            prefix_cache = self._empty_cache()
            if prefix:
                inputs = ids[:1, :prefix], prefix_cache, positions[:1, :prefix], None
                self._model(**self._mode.inputs(*inputs), **last_only)
            for start in range(0, len(prompts), chunk):
                part = slice(start, start + chunk)
                part_mask = None if real[part].all() else mask[part]
                count = len(ids[part])
                cache = self._repeated(prefix_cache, count) if prefix else self._empty_cache()
                suffix = ids[part, prefix:], cache, positions[part, prefix:], part_mask
                logits.append(self._model(**self._mode.inputs(*suffix), **last_only).logits[:, -1])
                caches.append(cache)
            self._cache = self._expanded(caches, rows)
        self._logits = torch.cat(logits)[rows]
        self._positions = torch.from_numpy(lengths).to(device)[rows]
        self._width = width
        self._mask = None if real.all() else self._decode_mask(mask[rows])

    def _shared_prefix_tokens(self, prompts: Sequence[np.ndarray]) -> int:
        """Counts the leading tokens to prefill once for all prompts; 0 if they are few. At least
        one token of each prompt follows: its logits choose the first token of the completions."""
        shortest = min(len(prompt) for prompt in prompts)
        prefix = min(common_prefix(prompts), shortest - 1)
        is_shared = len(prompts) > 1 and prefix >= MIN_SHARED_PREFIX and not self._mode.hf_cache
        return prefix if is_shared else 0

    def _repeated(self, cache: DynamicCache, rows: int) -> DynamicCache:
        """Copy a cache of one row to a cache of `rows` equal rows."""
        repeated = self._empty_cache()
        for index, layer in enumerate(cache.layers):
            keys, values = (states.repeat(rows, 1, 1, 1) for states in (layer.keys, layer.values))
            repeated.update(keys, values, index)
        return repeated

    def _empty_cache(self) -> DynamicCache:
        return HfCache(config=self._model.config) if self._mode.hf_cache else DynamicCache()

    def _expanded(self, prefills: Sequence[DynamicCache], rows: torch.Tensor) -> Any:
        """Returns a cache with one row per request, which has `move_rows`."""
        if not self._mode.hf_cache:
            return expanded_cache(prefills, rows, min(self._longest, INITIAL_CAPACITY))
        (cache,) = prefills
        cache.reorder_cache(rows)
        return cache

    def _decode_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Extends the `mask` of padded prompts, bool [R, width], to the longest completion. For
        transformers' caches bool [R, width + longest], True on tokens; for `RowCache` a bias of the
        attention scores, [R, 1, 1, width + longest], -inf on padding and 0 on tokens."""
        rows, width = mask.shape
        is_token = mask.new_ones(rows, width + self._longest)
        is_token[:, :width] = mask
        if self._mode.hf_cache:
            return is_token
        bias = torch.zeros(is_token.shape, dtype=self._model.dtype, device=mask.device)
        return bias.masked_fill_(~is_token, -torch.inf)[:, None, None]

    @torch.inference_mode()
    def advance(self) -> list[FinishedRow]:
        """Sample one token for each live row; remove and return the rows that are complete."""
        if self._length > 0:
            self._forward()
        n, t = self.alive, self._length
        if t % UNIFORM_BLOCK == 0:
            self._draw_uniforms()
        uniforms = self._uniforms[:n, t % UNIFORM_BLOCK]
        tokens, logprobs = choose_tokens(self._logits, uniforms, self._parameters.rows(0, n))
        self._last_tokens = tokens
        self._tokens_RT[:n, t] = tokens
        self._logprobs_RT[:n, t] = logprobs
        self._length += 1
        ended = (tokens.unsqueeze(1) == self._eos).any(1).cpu().numpy()
        complete = ended | (self._limits[:n] <= self._length)
        if not complete.any():
            return []
        finished = self._collect(np.flatnonzero(complete), ended)
        self._remove(complete)
        return finished

    def _forward(self) -> None:
        """Runs the last sampled tokens of the live rows, and sets the logits of their next ones."""
        n = self.alive
        mask = None if self._mask is None else self._mask[:n, ..., : self._width + self._length]
        positions = self._positions[:n].unsqueeze(1)
        inputs = self._mode.inputs(self._last_tokens.unsqueeze(1), self._cache, positions, mask)
        with self._model_context():
            self._logits = self._model(**inputs).logits[:, -1]
        self._positions[:n] += 1

    def _draw_uniforms(self) -> None:
        count = min(UNIFORM_BLOCK, self._longest - self._length)
        block = self._uniform_rows.next_block(self._row_of_slot[: self.alive], count)
        self._uniforms = torch.from_numpy(block).to(self._model.device)

    def _collect(self, slots: np.ndarray, ended: np.ndarray) -> list[FinishedRow]:
        """Returns the completions in finished slots; `ended` (bool, by slot) is True where the last
        token is a stop token, otherwise the limit ended it."""
        index = torch.from_numpy(slots).to(self._tokens_RT.device)
        tokens = self._tokens_RT[index, : self._length].cpu().numpy()
        logprobs = self._logprobs_RT[index, : self._length].cpu().numpy()
        return [
            FinishedRow(
                int(self._row_of_slot[slot]),
                tokens[i],
                logprobs[i],
                "stop" if ended[slot] else "length",
            )
            for i, slot in enumerate(slots)
        ]

    def _remove(self, complete: np.ndarray) -> None:
        """Remove finished slots from all tensors and the cache: live slots at the end move into
        them, so that live ones stay contiguous and little is copied."""
        alive = int(len(complete) - complete.sum())
        free = np.flatnonzero(complete[:alive])
        moved = np.flatnonzero(~complete[alive:]) + alive
        self.alive = alive
        if alive == 0:
            return
        for array in (self._row_of_slot, self._limits):
            array[free] = array[moved]
        targets = torch.from_numpy(free).to(self._tokens_RT.device)
        sources = torch.from_numpy(moved).to(self._tokens_RT.device)
        with self._model_context():
            self._cache.move_rows(targets, sources, alive)
        length = self._length
        self._tokens_RT[targets, :length] = self._tokens_RT[sources, :length]
        self._logprobs_RT[targets, :length] = self._logprobs_RT[sources, :length]
        per_slot = [self._positions, self._uniforms, self._last_tokens]
        per_slot += [self._parameters.temperature, self._parameters.top_p]
        if self._mask is not None:
            per_slot.append(self._mask)
        for tensor in per_slot:
            tensor[targets] = tensor[sources]
        self._last_tokens = self._last_tokens[:alive]


def decoding_batches(
    ordered: Sequence[GenerationRequest], limit: int, mode: DecodeMode
) -> Iterator[Sequence[GenerationRequest]]:
    """Split requests, ordered by prompt length and prompt, into batches of at most `limit`. With
    transformers' caches a batch must fit one prefill, and unpadded have prompts of one length."""
    batch: list[GenerationRequest] = []
    prompts: set[bytes] = set()
    for request in ordered:
        prompt = request.prompt_token_ids
        is_full = len(batch) == limit
        if mode.hf_cache and batch:
            width = len(batch[0].prompt_token_ids)
            is_full |= len(prompts | {prompt.tobytes()}) * width > PREFILL_TOKENS
            is_full |= not mode.padded and len(prompt) != width
        if is_full:
            yield batch
            batch, prompts = [], set()
        batch.append(request)
        prompts.add(prompt.tobytes())
    if batch:
        yield batch


def _distinct_prompts(
    requests: Sequence[GenerationRequest],
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns distinct prompts in order of appearance, and each request's index, int64 [R]."""
    index_of: dict[bytes, int] = {}
    prompts: list[np.ndarray] = []
    prompt_of_row = np.empty(len(requests), dtype=np.int64)
    for row, request in enumerate(requests):
        prompt = np.ascontiguousarray(request.prompt_token_ids, dtype=np.int64)
        index = index_of.setdefault(prompt.tobytes(), len(prompts))
        if index == len(prompts):
            prompts.append(prompt)
        prompt_of_row[row] = index
    return prompts, prompt_of_row


def _left_padded(
    prompts: Sequence[np.ndarray], width: int, prefix: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pads prompts to token ids int64 [N, width], with a mask, bool [N, width], False on padding.
    Padding comes between the `prefix` tokens that all share and the rest."""
    padded = np.full((len(prompts), width), pad_id, dtype=np.int64)
    real = np.zeros((len(prompts), width), dtype=bool)
    for row, prompt in enumerate(prompts):
        for columns, ids in (
            (slice(0, prefix), prompt[:prefix]),
            (slice(width - len(prompt) + prefix, width), prompt[prefix:]),
        ):
            padded[row, columns], real[row, columns] = ids, True
    return padded, real


TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Maximum RMS difference, relative to the log-probs' deviation (at least 0.1 nats)."""
_PROMPTS = (3, 6, 6)
"""Prompt lengths after the shared prefix, in tokens."""
_TOKENS = (3, 5, 2)
"""Completion lengths of the trial."""
_NO_TOKEN = -1


def matches_forward_pass(model: PreTrainedModel, mode: DecodeMode, pad_id: int) -> bool:
    """Decode random prompts of two lengths, and compare log-probs with those of a forward pass over
    each row alone. Returns whether they agree; True if those of the forward pass are not finite.
    Raises DecodeFailed if the model cannot run in this mode."""
    random = np.random.default_rng(0)

    def ids(tokens: int) -> np.ndarray:
        return random.integers(model.config.vocab_size, size=tokens).astype(np.int32)

    prefix = ids(MIN_SHARED_PREFIX)
    requests = [
        GenerationRequest(
            RequestKey(0, index, 0),
            np.concatenate([prefix, ids(prompt)]),
            seed=index,
            max_tokens=tokens,
        )
        for index, (prompt, tokens) in enumerate(zip(_PROMPTS, _TOKENS, strict=True))
    ]
    batches = [requests] if mode.padded else [requests[:1], requests[1:]]
    decoded, expected = [], []
    for batch in batches:
        decoding = DecodingBatch(model, batch, (_NO_TOKEN,), pad_id, mode, model_code)
        while decoding.alive:
            for row, token_ids, logprobs, _ in decoding.advance():
                decoded.append(logprobs)
                expected.append(_forward_logprobs(model, batch[row].prompt_token_ids, token_ids))
    decoded_T, expected_T = np.concatenate(decoded), np.concatenate(expected)
    if not np.isfinite(expected_T).all():
        return True
    spread = max(float(expected_T.std()), 0.1)
    difference = float(np.sqrt(np.square(decoded_T - expected_T).mean()))
    return difference <= TOLERANCE[model.dtype] * spread


@torch.inference_mode()
def _forward_logprobs(
    model: PreTrainedModel, prompt_ids: np.ndarray, completion_ids: np.ndarray
) -> np.ndarray:
    """Computes a completion's log-probs, float32 [T], without cache or padding."""
    ids = torch.from_numpy(np.concatenate([prompt_ids, completion_ids])).long().to(model.device)
    with model_code():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), -1)
    return logprobs.gather(1, ids[len(prompt_ids) :, None])[:, 0].cpu().numpy()
