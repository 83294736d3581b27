"""A tiny policy for the vLLM tests: its files, its plain transformers twin, and requests to it."""

import copy
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_replay.engine.weights import LoraAdapters, pushed_weights
from grpo_replay.recipe import LoraSection, Recipe, resolve_recipe
from grpo_replay.sampling.sampler_protocol import Sampler
from grpo_replay.tiny import BASE_DIR
from grpo_replay.types import Completion, GenerationRequest, RequestKey, completion_seed

STOP_TOKENS = (1, 9)
PROMPTS = ((5, 6, 7), (8, 10), (10, 11, 12, 13, 14))
LONGEST_PROMPT = 200  # longer than a block of vLLM's cache on a CPU, 128 tokens
GAP_LIMIT = 0.1  # the recipe's default


@dataclass(frozen=True)
class Policy:
    folder: Path
    model: PreTrainedModel


def save_policy(folder: Path, tie: bool, seed: int = 0, **changes: Any) -> Policy:
    """A random model of the tiny base's shape in `folder`, with its tokenizer and two stop tokens.
    The wide initialisation makes its distributions uneven and its errors visible."""
    config = AutoConfig.from_pretrained(BASE_DIR)
    config.tie_word_embeddings = tie
    config.initializer_range = 0.3
    config.max_position_embeddings = 512
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = list(STOP_TOKENS)
    model.save_pretrained(folder)
    for file in BASE_DIR.glob("tokenizer*"):
        shutil.copy(file, folder)
    return Policy(folder, model)


def changed(policy: Policy, seed: int) -> PreTrainedModel:
    """The model with every parameter moved, as far as a long training might."""
    model = copy.deepcopy(policy.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What the trainer's engine yields: tied tensors under every name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter.detach()


def push(sampler: Sampler, model: PreTrainedModel) -> int:
    version = sampler.policy_version + 1
    sampler.load_weights(named_tensors(model), version)
    return version


def tiny_recipe(folder: Path, **sampling: Any) -> Recipe:
    section = {"backend": "vllm", "max_completion_length": 24, **sampling}
    return resolve_recipe(
        [
            {
                "model": {"path": str(folder)},
                "prompts": {"max_prompt_length": LONGEST_PROMPT},
                "sampling": section,
            }
        ]
    )


def make_requests(
    count: int = 24,
    max_tokens: int = 24,
    temperature: float = 1.0,
    top_p: float = 1.0,
    step: int = 1,
) -> list[GenerationRequest]:
    """`count` requests in groups of four, keyed and seeded as the trainer does."""
    requests = []
    for index in range(count):
        key = RequestKey(step, index // 4, index % 4)
        prompt = np.asarray(PROMPTS[index // 4 % len(PROMPTS)], dtype=np.int32)
        seed = completion_seed(42, key)
        requests.append(GenerationRequest(key, prompt, seed, max_tokens, temperature, top_p))
    return requests


def long_prompt_requests() -> list[GenerationRequest]:
    prompt = np.random.default_rng(3).integers(2, 24, LONGEST_PROMPT).astype(np.int32)
    return [
        GenerationRequest(RequestKey(1, 0, index), prompt, seed=index, max_tokens=24)
        for index in range(4)
    ]


def many_long_prompts(tokens: int) -> list[GenerationRequest]:
    """Requests with prompts of their own of at least so many tokens together."""
    prompts = np.random.default_rng(4).integers(
        2, 24, (tokens // LONGEST_PROMPT + 1, LONGEST_PROMPT)
    )
    return [
        GenerationRequest(RequestKey(1, index, 0), prompt, seed=index, max_tokens=4)
        for index, prompt in enumerate(prompts.astype(np.int32))
    ]


def by_key(completions: Iterable[Completion]) -> dict[RequestKey, Completion]:
    found: dict[RequestKey, Completion] = {}
    for completion in completions:
        assert completion.key not in found, "a request was answered twice"
        found[completion.key] = completion
    return found


@torch.no_grad()
def logprobs_of(
    model: PreTrainedModel, request: GenerationRequest, completion: Completion
) -> np.ndarray:
    """Log-probs of the completion's tokens by one plain forward, processed as vLLM samples."""
    prompt, tokens = request.prompt_token_ids, completion.token_ids
    input_ids = torch.as_tensor(np.concatenate([prompt, tokens]), dtype=torch.long)
    logits = model(input_ids[None]).logits[0, len(prompt) - 1 : -1].double()
    logits = logits / (request.temperature or 1.0)
    logprobs = torch.log_softmax(_nucleus(logits, request.top_p), dim=-1)
    return logprobs.gather(1, torch.as_tensor(tokens, dtype=torch.long)[:, None])[:, 0].numpy()


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The logits with everything outside the smallest set of mass `top_p` at minus infinity."""
    if top_p == 1.0:
        return logits
    ordered, order = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    return logits.masked_fill(outside.gather(1, order.argsort(dim=-1)), -torch.inf)


def gaps(
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    completions: Sequence[Completion],
) -> np.ndarray:
    """|sampler - model| of every token, in nats."""
    found = by_key(completions)
    assert len(found) == len(requests)
    return np.concatenate(
        [
            np.abs(found[r.key].sampler_logprobs - logprobs_of(model, r, found[r.key]))
            for r in requests
        ]
    )


LORA = LoraSection(r=3, lora_alpha=8, use_rslora=True)


def lora_recipe(policy: Policy, lora: LoraSection = LORA, **sampling: Any) -> Recipe:
    recipe = tiny_recipe(policy.folder, **sampling)
    model = recipe.model.model_copy(update={"lora": lora})
    return recipe.model_copy(update={"model": model})


def adapted(policy: Policy, seed: int) -> torch.nn.Module:
    """The model with adapters as large as a long training might make them."""
    model = copy.deepcopy(policy.model)
    LoraAdapters.attach(model, LORA, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in pushed_weights(model).values():
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model
