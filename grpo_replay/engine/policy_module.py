"""The policy as one module that returns log-probs instead of logits."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class PolicyModule(nn.Module):
    """Backbone and output head in one forward pass, from token ids to log-probs.

    ZeRO-3 gathers a weight only in the forward pass of the module that owns it, so the head runs
    inside this module.
    """

    def __init__(self, model: nn.Module, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        lm_head = model.get_submodule("lm_head")
        assert isinstance(lm_head, nn.Linear), "every supported architecture has a linear head"
        self.head = LogprobHead(lm_head, temperature, chunk_tokens)

    def forward(
        self, input_ids_RL: torch.Tensor, positions_C: torch.Tensor, target_ids_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs_C, entropies_C) under the sampling distribution, both fp32; the entropies
        have no gradient. Rows are padded on the right, so causal attention needs no mask."""
        backbone = self.model.get_submodule("model")
        hidden_RLH = backbone(input_ids=input_ids_RL, use_cache=False).last_hidden_state
        return self.head(hidden_RLH.flatten(0, 1)[positions_C], target_ids_C)


class LogprobHead(nn.Module):
    """The output head: from hidden states [C, H] to log-probs and entropies [C].

    The head works on chunks of `chunk_tokens` completion tokens. With V words in the vocabulary, it
    holds logits for one chunk only, [chunk_tokens, V], instead of [C, V]. The backward pass
    recomputes the logits chunk by chunk.

    The weight of `lm_head` is a parameter of this module, and `lm_head` itself is never called.
    Under ZeRO-3 this avoids a hang. ZeRO-3 gathers a weight, with a collective, each time the
    module that owns it is called. Ranks have different numbers of completion tokens and therefore
    of chunks. If each chunk called `lm_head`, ranks would gather different numbers of times and
    wait for each other forever. As a parameter of this module, the weight is gathered once per
    forward pass.

    Marking a module around `lm_head` as a ZeRO-3 leaf module would also gather once, but gives
    wrong gradients for tied weights: it reduces the gradient of the weight before the embedding
    has added its share.
    """

    weight: nn.Parameter
    temperature: float
    chunk_tokens: int

    def __init__(self, lm_head: nn.Linear, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        assert lm_head.bias is None, "no supported architecture has a bias in its output head"
        self.weight = lm_head.weight
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(
        self, hidden_CH: torch.Tensor, target_ids_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs_C, entropies_C) of the target ids, both fp32."""
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
