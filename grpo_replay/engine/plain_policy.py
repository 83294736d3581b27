"""A saved policy by one plain forward pass per row, as anyone would compute it.

For verification: shares nothing with the engine but the loading of the model.
"""

from pathlib import Path

import numpy as np
import torch

from grpo_replay.engine.models import load_policy, section_at
from grpo_replay.recipe import ModelSection

_CHUNK_TOKENS = 256  # float64 log-probs over a vocabulary of 150,000: 0.3 GB


class PlainPolicy:
    """The weights in a folder, or without one the model that the run began with, on the CPU."""

    def __init__(self, model: ModelSection, seed: int, folder: Path | None) -> None:
        section = model if folder is None else section_at(model, str(folder))
        self._model = load_policy(section, seed)

    @torch.no_grad()
    def logprobs(
        self, prompt_token_ids: np.ndarray, completion_token_ids: np.ndarray, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs, entropies) of a completion's tokens, float64 [T], in nats."""
        completion = len(completion_token_ids)
        ids = np.concatenate([prompt_token_ids, completion_token_ids]).astype(np.int64)
        inputs, targets = torch.from_numpy(ids)[None], torch.from_numpy(ids[-completion:])
        logits_TV = self._model(input_ids=inputs, logits_to_keep=completion + 1).logits[0, :-1]
        chosen, entropies = [], []
        for some_TV, some_T in zip(
            logits_TV.split(_CHUNK_TOKENS), targets.split(_CHUNK_TOKENS), strict=True
        ):
            logprobs_TV = torch.log_softmax(some_TV.double() / temperature, dim=-1)
            chosen.append(logprobs_TV.gather(1, some_T[:, None])[:, 0])
            entropies.append(-(logprobs_TV.exp() * logprobs_TV).sum(-1))
        return torch.cat(chosen).numpy(), torch.cat(entropies).numpy()
