"""Engines on the shipped tiny model, rows that reach every branch of the loss, and a plain twin."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from naive_sampler import copied_sampler
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.engine.models import eos_token_ids, load_policy, load_tokenizer
from grpo_replay.prompts.prompt_set import load_prompts
from grpo_replay.recipe import LossSection, Recipe, resolve_recipe
from grpo_replay.replay.batch import TrainRow, token_weights
from grpo_replay.types import GenerationRequest, RequestKey

ALL_AT_ONCE, ONE_BY_ONE = 100_000, 23  # tokens per micro-batch; the recipe's limits allow no less
SHORTEST_ROW = 12  # so that two never share a micro-batch of ONE_BY_ONE

SHARDED: dict[str, Any] = {
    "zero_stage": 3,
    "logprob_chunk_tokens": 7,
    "zero": {"stage3_param_persistence_threshold": 0},
}
"""ZeRO-3 as at real widths: every parameter is sharded (DeepSpeed's threshold would keep all of
the tiny model's whole), and ranks with different rows have different numbers of chunks."""

SCALED: dict[str, Any] = {
    "zero_stage": 3,
    "logprob_chunk_tokens": 7,
    "zero": {
        "stage3_param_persistence_threshold": 4,
        "stage3_prefetch_bucket_size": 2_000,
        "stage3_max_live_parameters": 40_000,
        "stage3_max_reuse_distance": 40_000,
        "sub_group_size": 40_000,
        "reduce_bucket_size": 20_000,
        "allgather_bucket_size": 20_000,
    },
}
"""All of DeepSpeed's thresholds divided by 25,000, as the tiny model is a 4B model divided: it
crosses every one that the 4B model crosses."""


def engine_recipe(**sections: dict[str, Any]) -> Recipe:
    """A recipe whose clip of the gradient norm does not bind and whose updates are visible.

    Adam's ε is large enough that a gradient which is only rounding does not become a full step.
    """
    base: dict[str, Any] = {
        "prompts": {
            "source": "builtin:tiny", "id_field": "problem_id", "template": "plain",
            "user_template": "{problem}=", "max_prompt_length": 3,
        },
        "sampling": {"max_completion_length": 20},
        "replay": {"preset": "grpo"},
        "batch": {"max_tokens_per_microbatch": ALL_AT_ONCE},
        "optimizer": {"learning_rate": 1e-3, "adamw": {"eps": 1e-5}, "max_grad_norm": 1e6},
        "engine": {
            "device": "cpu", "zero_stage": 0, "threads_per_process": 1, "timeout_seconds": 120,
        },
    }  # fmt: skip
    return resolve_recipe([base, sections])


@contextmanager
def open_engine(
    processes: tuple[Comm, torch.device], policy: nn.Module | None = None, **sections: Any
) -> Iterator[DeepSpeedEngine]:
    recipe = engine_recipe(**sections)
    comm, device = processes
    fp32_head = recipe.sampling.fp32_head
    policy = load_policy(recipe.model, 0, fp32_head) if policy is None else policy
    tokenizer, stage = load_tokenizer(recipe.model), recipe.zero_stage(comm.world_size)
    engine = DeepSpeedEngine(recipe, policy, tokenizer, comm, device, stage)
    try:
        yield engine
    finally:
        engine.close()


def share_prompts(engine: DeepSpeedEngine) -> None:
    """Let the engine share prompts wherever they repeat: at the tiny model's size it saves no
    work."""
    assert engine._layout.pairs_per_token is not None, "the model's trial failed"
    engine._layout = replace(engine._layout, pairs_per_token=math.inf)


def keep_rows_apart(engine: DeepSpeedEngine) -> None:
    engine._layout = replace(engine._layout, pairs_per_token=None)


def tiny_model() -> nn.Module:
    return load_policy(engine_recipe().model, 0)


def plain_logprobs(
    model: nn.Module, row: TrainRow, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs_T, entropies_T) of one row alone, unpadded, as anyone would compute them."""
    prompt, completion = row.prompt_token_ids, row.completion_token_ids
    ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.int64)
    logits = model(input_ids=ids[None]).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : len(ids) - 1]
    chosen = logprobs[torch.arange(len(completion)), ids[len(prompt) :]]
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def make_rows(
    count: int, seed: int = 3, temperature: float = 1.0, per_prompt: int = 1, prefix: int = 0
) -> list[TrainRow]:
    """Completions, up to `per_prompt` of each prompt, that the tiny model sampled, with behaviour
    log-probs that put their ratios on every side of every clip, none so near an edge that rounding
    could carry it across. All prompts begin with the same `prefix` random tokens. Sampled once for
    the same arguments: a test changes no array of them."""
    return list(_sampled_rows(count, seed, temperature, per_prompt, prefix))


@cache
def _sampled_rows(
    count: int, seed: int, temperature: float, per_prompt: int, prefix: int
) -> list[TrainRow]:
    rng = np.random.default_rng(seed)
    model, recipe = tiny_model(), engine_recipe()
    tokenizer = load_tokenizer(recipe.model)
    section = recipe.prompts.model_copy(update={"max_prompt_length": 16})
    prompts = load_prompts(section, tokenizer, seed).take(0, 3 * count)
    first = rng.integers(5, 15, prefix).astype(np.int32) if prefix else np.zeros(0, np.int32)
    begun = [np.concatenate([first, prompt.token_ids]) for prompt in prompts]
    requests = [
        GenerationRequest(RequestKey(1, i, j), prompt_ids, draw, 20, temperature)
        for i, prompt_ids in enumerate(begun)
        for j, draw in enumerate(range(1000 * seed + i, 10**6, 10**6 // per_prompt))
    ]
    sampler = copied_sampler(model, eos_token_ids(recipe.model, tokenizer), 0)
    completions = sorted(sampler.generate(requests), key=lambda completion: completion.key)
    pairs = [
        (request, completion)
        for request, completion in zip(requests, completions, strict=True)
        if len(request.prompt_token_ids) + len(completion.token_ids) >= SHORTEST_ROW
    ]
    assert len(pairs) >= count
    rows = []
    for request, completion in pairs[:count]:
        tokens = len(completion.token_ids)
        row = TrainRow(
            request.prompt_token_ids,
            completion.token_ids,
            np.zeros(tokens, np.float32),
            np.zeros(tokens, np.float32),
            float(np.float32(rng.choice([-2.0, -1.0, -0.4, 0.5, 1.0, 2.5]))),
        )
        with torch.no_grad():
            now = plain_logprobs(model, row, temperature)[0].numpy()
        log_ratios = np.log(rng.choice([0.5, 0.7, 0.9, 1.0, 1.1, 1.2, 1.5, 3.0, 12.0], tokens))
        behavior = (now - log_ratios).astype(np.float32)
        reference = (now + rng.normal(0, 0.3, tokens)).astype(np.float32)
        rows.append(replace(row, behavior_logprobs=behavior, reference_logprobs=reference))
    return weighted(rows, LossSection())


def weighted(rows: Sequence[TrainRow], settings: LossSection) -> list[TrainRow]:
    """The rows as one mini-batch, with its denominator in their token weights."""
    weights = token_weights(np.array([len(row.trained_C) for row in rows]), settings, 20)
    return [replace(row, token_weight=float(w)) for row, w in zip(rows, weights, strict=True)]


def parameters(engine: DeepSpeedEngine) -> torch.Tensor:
    """All parameters in full, each once, in one fp32 vector."""
    found = {}
    for name, tensor in engine.named_full_tensors(2**29):
        if name != "lm_head.weight":  # tied
            found[name] = tensor.detach().float().clone().flatten()
    return torch.cat([found[name] for name in sorted(found)])


def first_gradient(engine: DeepSpeedEngine) -> torch.Tensor:
    """The gradient of the engine's first update: AdamW's first moment is (1 - β1) times it."""
    optimizer = engine._engine.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    moments = [state["exp_avg"].float().flatten() for state in optimizer.state.values()]
    return torch.cat(moments) / (1 - engine._recipe.optimizer.adamw.betas[0])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found - expected‖ / ‖expected‖."""
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))


def plain_loss(model: nn.Module, rows: Sequence[TrainRow], settings: LossSection) -> torch.Tensor:
    """The mini-batch loss, token by token in Python."""
    total = torch.zeros(())
    for row in rows:
        logprobs_T, _ = plain_logprobs(model, row)
        for t, logprob in enumerate(logprobs_T):
            if row.completion_mask is not None and not row.completion_mask[t]:
                continue
            ratio = torch.exp(logprob - float(row.behavior_logprobs[t]))
            a = row.coefficient
            clipped = min(max(ratio, torch.tensor(1 - settings.epsilon)),
                          torch.tensor(1 + settings.epsilon_high))  # fmt: skip
            value = min(ratio * a, clipped * a)
            if a < 0:
                value = max(value, torch.tensor(settings.dual_clip * a))
            loss = -value
            if settings.beta:
                difference = float(row.reference_logprobs[t]) - logprob
                loss = loss + settings.beta * (torch.exp(difference) - difference - 1)
            total = total + row.token_weight * loss
    return total


class PlainTraining:
    """The same updates with torch alone: whole mini-batch in one graph, clip_grad_norm_, AdamW."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = load_policy(recipe.model, 0)
        o = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=o.learning_rate, betas=tuple(o.adamw.betas),
            eps=o.adamw.eps, weight_decay=o.adamw.weight_decay,
        )  # fmt: skip

    def update(self, rows: Sequence[TrainRow]) -> tuple[float, float]:
        """(loss, gradient norm before clipping)."""
        loss = plain_loss(self.model, rows, self.recipe.loss)
        self.optimizer.zero_grad()
        loss.backward()
        limit = self.recipe.optimizer.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        return loss.item(), norm.item()

    def parameters(self) -> torch.Tensor:
        named = dict(self.model.named_parameters())
        return torch.cat([named[name].detach().flatten() for name in sorted(named)])


def reference_statistics(row: TrainRow) -> dict[str, float]:
    """Outcome of a row before the first update, from the plain model."""
    with torch.no_grad():
        logprobs, entropies = plain_logprobs(tiny_model(), row)
    trained, entropies = row.trained_C, entropies[torch.from_numpy(row.trained_C)]
    deltas = logprobs.double().numpy()[trained] - row.behavior_logprobs.astype(np.float64)[trained]
    ratios = np.exp(deltas)
    a = row.coefficient
    clipped = (ratios > 1.28) if a > 0 else (ratios < 0.8) | (ratios > 10)
    return {
        "tokens": len(deltas),
        "clip_fraction": float(clipped.mean()),
        "log_ratio_mean": float(deltas.mean()),
        "log_ratio_var": float(deltas.var()),
        "approx_kl": float((ratios - 1 - deltas).mean()),
        "ratio_mean": float(ratios.mean()),
        "ratio_squared_mean": float((ratios**2).mean()),
        "ratio_max": math.exp(deltas.max()),
        "entropy": float(entropies.mean()),
    }


@contextmanager
def rates_of_updates() -> Iterator[list[float]]:
    """Filled with the learning rate of every AdamW update within, measured on the weights:
    w' = w - rate · u, with u = m̂ / (√v̂ + ε) + weight decay · w from the state after the update."""
    rates: list[float] = []
    before: list[torch.Tensor] = []

    def keep_weights(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        before[:] = [
            p.detach().clone() for group in optimizer.param_groups for p in group["params"]
        ]

    def measure(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (group,) = optimizer.param_groups
        moved, squared = 0.0, 0.0
        for old, new in zip(before, group["params"], strict=True):
            state, (beta1, beta2) = optimizer.state[new], group["betas"]
            count = float(state["step"])
            mean = state["exp_avg"] / (1 - beta1**count)
            root = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt()
            u = mean / (root + group["eps"]) + group["weight_decay"] * old
            moved += float(((old - new.detach()).double() * u.double()).sum())
            squared += float((u.double() ** 2).sum())
        rates.append(moved / squared)

    hooks = [
        register_optimizer_step_pre_hook(keep_weights),
        register_optimizer_step_post_hook(measure),
    ]
    try:
        yield rates
    finally:
        for hook in hooks:
            hook.remove()
