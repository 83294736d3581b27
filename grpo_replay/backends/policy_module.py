"""The policy as one module that returns log-probs, so that logits never leave it."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class PolicyModule(nn.Module):
    """Backbone, output head, temperature and chunking behind one forward.

    ZeRO-3 gathers a weight only inside its module's forward, so the head must be called here; and
    the [C, V] logits exist for at most `chunk_tokens` completion tokens at a time, in the backward
    pass too.
    """

    def __init__(self, model: nn.Module, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(
        self, input_ids_RL: torch.Tensor, positions_C: torch.Tensor, target_ids_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs_C, entropies_C), both fp32, of the distribution sampled from; the entropies
        carry no gradient. Rows are padded on the right: causal attention needs no mask."""
        hidden_RLH = self.model.model(input_ids=input_ids_RL, use_cache=False).last_hidden_state
        hidden_CH = hidden_RLH.flatten(0, 1)[positions_C]
        hidden_chunks = hidden_CH.split(self.chunk_tokens)
        target_chunks = target_ids_C.split(self.chunk_tokens)
        recompute = torch.is_grad_enabled() and len(hidden_chunks) > 1
        results = []
        for hidden, target in zip(hidden_chunks, target_chunks, strict=True):
            if recompute:
                results.append(
                    checkpoint(self._chunk_logprobs, hidden, target, use_reentrant=False)
                )
            else:
                results.append(self._chunk_logprobs(hidden, target))
        logprobs, entropies = zip(*results, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _chunk_logprobs(
        self, hidden_CH: torch.Tensor, target_ids_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_CV = self.model.lm_head(hidden_CH).float()
        if self.temperature != 1.0:
            logits_CV = logits_CV / self.temperature
        log_normalizer_C = torch.logsumexp(logits_CV, dim=-1)
        chosen_C = logits_CV.gather(-1, target_ids_C.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            probabilities_CV = (logits_CV - log_normalizer_C.unsqueeze(-1)).exp()
            entropies_C = log_normalizer_C - (probabilities_CV * logits_CV).sum(-1)
        return chosen_C - log_normalizer_C, entropies_C
