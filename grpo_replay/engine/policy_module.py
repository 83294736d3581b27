"""The policy as one module that returns log-probs, so that logits never leave it."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class PolicyModule(nn.Module):
    """Backbone, output head, temperature and chunking behind one forward.

    ZeRO-3 gathers a weight only inside its module's forward, so the head must run in here.
    """

    def __init__(self, model: nn.Module, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.head = LogprobHead(model.lm_head, temperature, chunk_tokens)

    def forward(
        self, input_ids_RL: torch.Tensor, positions_C: torch.Tensor, target_ids_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs_C, entropies_C), both fp32, of the distribution sampled from; the entropies
        carry no gradient. Rows are padded on the right: causal attention needs no mask."""
        hidden_RLH = self.model.model(input_ids=input_ids_RL, use_cache=False).last_hidden_state
        return self.head(hidden_RLH.flatten(0, 1)[positions_C], target_ids_C)


class LogprobHead(nn.Module):
    """From hidden states to log-probs, at most `chunk_tokens` completion tokens at a time: the
    [C, V] logits never exist as a whole, in the backward pass neither.

    Ranks hold different numbers of completion tokens, hence of chunks, while under ZeRO-3 every
    gather of a weight is a collective. So the weight is a parameter of this module: ZeRO-3 gathers
    it once per forward, whatever the number of chunks. Calling `lm_head` as a module would gather
    it for each chunk; a ZeRO-3 leaf module would reduce the gradient of a tied weight before the
    embedding's part of it is there.
    """

    def __init__(self, lm_head: nn.Linear, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        assert lm_head.bias is None, "no supported architecture has a bias in its output head"
        self.weight = lm_head.weight
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(
        self, hidden_CH: torch.Tensor, target_ids_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        logits_CV = F.linear(hidden_CH, self.weight).float()
        if self.temperature != 1.0:
            logits_CV = logits_CV / self.temperature
        log_normalizer_C = torch.logsumexp(logits_CV, dim=-1)
        chosen_C = logits_CV.gather(-1, target_ids_C.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            probabilities_CV = (logits_CV - log_normalizer_C.unsqueeze(-1)).exp()
            entropies_C = log_normalizer_C - (probabilities_CV * logits_CV).sum(-1)
        return chosen_C - log_normalizer_C, entropies_C
