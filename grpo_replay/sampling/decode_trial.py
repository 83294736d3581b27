"""Whether a way to decode gives the log-probs of the model's own forward pass."""

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo_replay.sampling.decode_ways import DecodeWay
from grpo_replay.sampling.decoding import DecodingBatch
from grpo_replay.types import GenerationRequest, RequestKey

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference, relative to the spread of the log-probs or to 0.1 nats."""
_PROMPTS = (3, 6, 6)
_TOKENS = (3, 5, 2)
_NO_TOKEN = -1


def gives_own_logprobs(model: PreTrainedModel, way: DecodeWay, pad_id: int) -> bool:
    """Whether completions of random prompts, of two lengths and ending one after the other, have
    the log-probs of a forward pass over each row alone. True where those are not finite."""
    random = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            RequestKey(0, index, 0),
            random.integers(model.config.vocab_size, size=prompt).astype(np.int32),
            seed=index,
            max_tokens=tokens,
        )
        for index, (prompt, tokens) in enumerate(zip(_PROMPTS, _TOKENS, strict=True))
    ]
    batches = [requests] if way.padded else [requests[:1], requests[1:]]
    found, own = [], []
    for batch in batches:
        decoding = DecodingBatch(model, batch, (_NO_TOKEN,), pad_id, way)
        while decoding.alive:
            for row, token_ids, logprobs, _ in decoding.advance():
                found.append(logprobs)
                own.append(_own_logprobs(model, batch[row].prompt_token_ids, token_ids))
    found_T, own_T = np.concatenate(found), np.concatenate(own)
    if not np.isfinite(own_T).all():
        return True
    spread = max(float(own_T.std()), 0.1)
    difference = float(np.sqrt(np.square(found_T - own_T).mean()))
    return difference <= TOLERANCE[model.dtype] * spread


@torch.inference_mode()
def _own_logprobs(
    model: PreTrainedModel, prompt_ids: np.ndarray, completion_ids: np.ndarray
) -> np.ndarray:
    """float32 [T], from one forward pass without cache and padding."""
    ids = torch.from_numpy(np.concatenate([prompt_ids, completion_ids])).long().to(model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), -1)
    return logprobs.gather(1, ids[len(prompt_ids) :, None])[:, 0].cpu().numpy()
