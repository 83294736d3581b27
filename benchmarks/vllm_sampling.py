"""What our samplers cost over bare vLLM: tokens per second on the same requests.

    python benchmarks/vllm_sampling.py [--requests 256] [--tokens 50] [--rounds 9] [--json FILE]

In process: `VllmLocalSampler.generate` against `LLM.generate` of an engine with the same settings.
Over HTTP: `VllmServerSampler.generate` against aiohttp (the client of vLLM's own benchmarks)
posting the same bodies to the same server and reading JSON. Both pairs alternate, and each one's
best round counts, so that a busy machine slows neither. Needs vLLM (the CPU build will do).
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from grpo_replay.distributed.comm import Comm
from grpo_replay.recipe import Recipe, resolve_recipe
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.sampling.server.sampler import VllmServerSampler
from grpo_replay.sampling.vllm_local import VllmLocalSampler
from grpo_replay.sampling.vllm_requests import engine_arguments, sampling_parameters
from grpo_replay.types import GenerationRequest, RequestKey, completion_seed

VOCABULARY = 512
PORT = 8720


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    requests = make_requests(options.requests, options.tokens)
    with TemporaryDirectory() as folder:
        save_model(folder)
        figures = {
            "requests": options.requests,
            "tokens_per_request": options.tokens,
            "in_process": compare_in_process(folder, requests, options.rounds),
            "http": compare_http(folder, requests, options.rounds),
        }
    for path in ("in_process", "http"):
        pair = figures[path]
        print(
            f"{path}: ours {pair['ours']:,.0f} tokens/s, bare {pair['bare']:,.0f} tokens/s, "
            f"ratio {pair['ratio']:.3f}; per CPU second of this process: ours "
            f"{pair['ours_cpu']:,.0f}, bare {pair['bare_cpu']:,.0f}"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def save_model(folder: str) -> None:
    """A random Qwen3 of 0.8M parameters, nearly uniform: few completions end early."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def make_recipe(folder: str, tokens: int, **sampling: Any) -> Recipe:
    layer = {
        "model": {"path": folder, "tokenizer": "builtin:bytes"},
        "prompts": {"max_prompt_length": 64},
        "sampling": {"max_completion_length": tokens, **sampling},
    }
    return resolve_recipe([layer])


def make_requests(count: int, tokens: int) -> list[GenerationRequest]:
    """Groups of eight completions of prompts of 16 tokens."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(300, VOCABULARY, (count // 8 + 1, 16)).astype(np.int32)
    keys = [RequestKey(1, index // 8, index % 8) for index in range(count)]
    return [
        GenerationRequest(key, prompts[key.prompt_index], completion_seed(42, key), tokens)
        for key in keys
    ]


def compare(ours: Callable[[], int], bare: Callable[[], int], rounds: int) -> dict[str, float]:
    """Tokens per second of wall time and of this process's CPU time: each one's best round, of
    rounds that alternate, after one of each that does not count."""
    ours()
    bare()
    best = {"ours": 0.0, "bare": 0.0, "ours_cpu": 0.0, "bare_cpu": 0.0}
    for index in range(rounds):
        pair = [("ours", ours), ("bare", bare)]
        for name, sample in pair if index % 2 else pair[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = sample()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            best[name] = max(best[name], tokens / wall)
            best[f"{name}_cpu"] = max(best[f"{name}_cpu"], tokens / cpu)
    return best | {
        "ratio": best["ours"] / best["bare"],
        "cpu_ratio": best["ours_cpu"] / best["bare_cpu"],
    }


def compare_in_process(
    folder: str, requests: Sequence[GenerationRequest], rounds: int
) -> dict[str, Any]:
    recipe = make_recipe(folder, requests[0].max_tokens, backend="vllm")
    sampler = VllmLocalSampler.open(SamplerOpening.of(recipe, folder, Comm()))
    from vllm import LLM, SamplingParams

    llm = LLM(
        **engine_arguments(recipe.sampling, recipe.model, recipe.longest_sequence, on_gpu=False),
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )

    def ours() -> int:
        return sum(len(c.token_ids) for c in sampler.generate(requests))

    def bare() -> int:
        prompts = [{"prompt_token_ids": r.prompt_token_ids.tolist()} for r in requests]
        parameters = [
            SamplingParams(**sampling_parameters(r, sampler.stop_token_ids)) for r in requests
        ]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    figures = compare(ours, bare, rounds)
    sampler.close()
    return figures


def compare_http(folder: str, requests: Sequence[GenerationRequest], rounds: int) -> dict[str, Any]:
    servers = {"launch": 1, "address": f"127.0.0.1:{PORT}"}
    tokens = requests[0].max_tokens
    recipe = make_recipe(folder, tokens, backend="vllm_server", servers=servers)
    sampler = VllmServerSampler.open(SamplerOpening.of(recipe, folder, Comm()))
    url = f"http://127.0.0.1:{PORT}/inference/v1/generate"

    def ours() -> int:
        return sum(len(c.token_ids) for c in sampler.generate(requests))

    def bare() -> int:
        bodies = [
            {
                "token_ids": r.prompt_token_ids.tolist(),
                "sampling_params": sampling_parameters(r, sampler.stop_token_ids),
            }
            for r in requests
        ]
        return asyncio.run(post_all(url, bodies))

    try:
        return compare(ours, bare, rounds)
    finally:
        sampler.close()


async def post_all(url: str, bodies: Sequence[dict[str, Any]]) -> int:
    """Tokens in the answers to all bodies, posted at once over at most 256 connections."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=256)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def post(body: dict[str, Any]) -> int:
            async with session.post(url, json=body) as response:
                answer = await response.json()
                return len(answer["choices"][0]["token_ids"])

        return sum(await asyncio.gather(*(post(body) for body in bodies)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
