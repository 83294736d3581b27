"""A saved policy by one plain forward pass per row, as anyone would compute it.

For verification: shares nothing with the engine but the loading of the model.
"""

from pathlib import Path

import numpy as np
import torch

from grpo_replay.engine.models import load_policy, section_at
from grpo_replay.recipe import Recipe


class PlainPolicy:
    """The weights in a folder, or without one the model that the run began with, on the CPU."""

    def __init__(self, recipe: Recipe, folder: Path | None) -> None:
        section = recipe.model if folder is None else section_at(recipe.model, str(folder))
        self._model = load_policy(section, recipe.run.seed)

    @torch.no_grad()
    def logprobs(
        self, prompt_token_ids: np.ndarray, completion_token_ids: np.ndarray, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs, entropies) of a completion's tokens, float64 [T], in nats."""
        prompt, completion = len(prompt_token_ids), len(completion_token_ids)
        ids = np.concatenate([prompt_token_ids, completion_token_ids]).astype(np.int64)
        logits = self._model(input_ids=torch.from_numpy(ids)[None]).logits[0].double()
        all_logprobs = torch.log_softmax(logits / temperature, dim=-1)[prompt - 1 : -1]
        chosen = all_logprobs[torch.arange(completion), torch.from_numpy(ids[prompt:])]
        entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return chosen.numpy(), entropies.numpy()
