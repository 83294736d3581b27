"""The sampler: a Ray actor with the model of transformers. It imports verl late, in its process."""

import hashlib
import os
from collections import Counter
from typing import Any

import torch


class Sampler:
    """Samples a completion from the weights, the prompt, and how often it was asked for with them:
    whatever arrives together with it, the tokens and their log-probs are the same.

    VERL_CPU_SHIFT, in nats, is added to the log-probs of every second token: an engine that does
    not agree with the trainer."""

    def __init__(self, model_path: str, max_tokens: int) -> None:
        from transformers import AutoModelForCausalLM
        from verl.workers.rollout.replica import TokenOutput

        torch.set_num_threads(1)
        self.output, self.max_tokens = TokenOutput, max_tokens
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.step = 0
        self.shift = float(os.environ.get("VERL_CPU_SHIFT", "0"))
        self.asked: Counter[Any] = Counter()  # with the weights of `step`

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        temperature = float(sampling_params["temperature"])
        key = self.step, tuple(prompt_ids), temperature
        self.asked[key] += 1
        digest = hashlib.sha256(f"{key} {self.asked[key]}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        tokens, logprobs = self._sample(list(prompt_ids), temperature, generator)
        return self.output(
            token_ids=tokens,
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": self.step},
        )

    @torch.no_grad()
    def _sample(
        self, prompt: list[int], temperature: float, generator: torch.Generator
    ) -> tuple[list[int], list[float]]:
        end, tokens, logprobs = self.model.config.eos_token_id, [], []
        new, cache = torch.tensor([prompt]), None
        while len(tokens) < self.max_tokens and (not tokens or tokens[-1] != end):
            output = self.model(new, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            log_p = (output.logits[0, -1] / (temperature or 1)).log_softmax(-1)
            token = log_p.argmax() if temperature == 0 else None
            if token is None:
                token = torch.multinomial(log_p.exp(), 1, generator=generator)[0]
            tokens.append(int(token))
            logprobs.append(float(log_p[token]) + self.shift * (len(tokens) % 2))
            new = token.view(1, 1)
        return tokens, logprobs

    async def load(self, tensors: dict[str, torch.Tensor], step: int | None) -> None:
        self.model.load_state_dict(tensors, strict=False)
        self.step = step or 0
        self.asked.clear()

    async def ignore(self, *_: Any, **__: Any) -> None:
        """What an engine on a GPU does about its memory."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = ignore
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = ignore
