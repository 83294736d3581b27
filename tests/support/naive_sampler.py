"""Small random models with grouped queries and tied embeddings, and a sampler that is obvious."""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from grpo_replay.engine.models import DTYPES
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.types import GenerationRequest, RequestKey

PAD, EOS, SECOND_EOS = 0, 1, 2
VOCABULARY = 29


def copied_sampler(
    model: PreTrainedModel,
    eos_ids: Sequence[int],
    pad_id: int,
    dtype: str = "float32",
    max_batch_rollouts: int = 1024,
) -> HfSampler:
    """A sampler with a copy of a model in memory, on the same device."""
    own = copy.deepcopy(model).to(DTYPES[dtype])
    return HfSampler(own, eos_ids, pad_id, max_batch_rollouts, model.device)


def qwen3(seed: int = 0, tied: bool = True, **changes) -> PreTrainedModel:
    """A Qwen3 of two layers whose distributions are far from uniform."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "initializer_range": 0.25,
        "tie_word_embeddings": tied,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes})).eval()


def make_requests(
    prompts: int = 5, group: int = 4, max_tokens: int = 12, seed: int = 0, **settings
) -> list[GenerationRequest]:
    """Groups of requests with prompts of 1 to 11 tokens and one seed each."""
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(prompts):
        prompt = rng.integers(3, VOCABULARY, size=1 + 5 * index // 2).astype(np.int32)
        for member in range(group):
            key = RequestKey(1, index, member)
            number = int(rng.integers(1 << 62))
            requests.append(GenerationRequest(key, prompt, number, max_tokens, **settings))
    return requests


@torch.no_grad()
def naive_logits(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """Logits after the last of `tokens`: one row, no cache, no padding."""
    return model(input_ids=torch.tensor([tokens])).logits[0, -1].float().numpy()


def naive_logp(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """Log-probs of the law sampled from, token by token as the definition has it."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    if temperature > 0 and top_p < 1:
        kept, mass = [], 0.0
        for token in sorted(range(len(probabilities)), key=lambda t: -probabilities[t]):
            if mass >= top_p:
                break
            kept.append(token)
            mass += probabilities[token]
        inside = np.zeros_like(probabilities)
        inside[kept] = probabilities[kept] / probabilities[kept].sum()
        probabilities = inside
    with np.errstate(divide="ignore"):
        return np.log(probabilities)


def naive_completion(
    model: PreTrainedModel, request: GenerationRequest, eos_ids: tuple[int, ...]
) -> tuple[list[int], list[float], str]:
    """Tokens, log-probs and finish reason of one request, one full forward per token."""
    uniforms = np.random.Generator(np.random.Philox(key=request.seed)).random(request.max_tokens)
    tokens, logprobs = request.prompt_token_ids.tolist(), []
    for uniform in uniforms:
        logp = naive_logp(naive_logits(model, tokens), request.temperature, request.top_p)
        if request.temperature == 0:
            token = int(np.argmax(logp))
        else:
            cumulative = np.cumsum(np.exp(logp))
            token = int(np.searchsorted(cumulative / cumulative[-1], uniform, side="right"))
        tokens.append(token)
        logprobs.append(float(logp[token]))
        if token in eos_ids:
            return tokens[len(request.prompt_token_ids) :], logprobs, "stop"
    return tokens[len(request.prompt_token_ids) :], logprobs, "length"
