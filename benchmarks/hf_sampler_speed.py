"""Generation speed of the `hf` sampler against `model.generate`, on the same requests.

    python benchmarks/hf_sampler_speed.py                       # the tiny model, 256 rollouts
    python benchmarks/hf_sampler_speed.py --model builtin:qwen3-0.6b --layers 4 --prompts 4 \\
        --group 8 --prompt-tokens 128 --max-tokens 64 --dtype bfloat16

Prints seconds, tokens/s and the ratio. Both sides sample at temperature 1 from the same prompts
with the same limit; runs alternate and the fastest of each counts.
"""

import argparse
import copy
import time

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from grpo_replay.engine.models import DTYPES, eos_token_ids, load_policy, load_tokenizer
from grpo_replay.prompts.prompt_set import load_prompts
from grpo_replay.recipe import ModelSection, PromptsSection
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.types import GenerationRequest, RequestKey


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    section = model_section(options)
    model = load_policy(section, seed=0).to(device)
    eos_ids = eos_token_ids(section, load_tokenizer(section))
    requests = build_requests(options, model.config.vocab_size)
    own = copy.deepcopy(model).to(DTYPES[options.dtype])
    sampler = HfSampler(own, eos_ids, 0, max_batch_rollouts=1024, device=device)
    ours, theirs, tokens = [], [], [0, 0]
    for _ in range(options.repeats + 1):
        seconds, tokens[0] = timed(lambda: ours_tokens(sampler, requests))
        ours.append(seconds)
        seconds, tokens[1] = timed(lambda: generate_tokens(model, requests, eos_ids))
        theirs.append(seconds)
    # The first round of each warms up.
    report("hf sampler", min(ours[1:]), tokens[0])
    report("model.generate", min(theirs[1:]), tokens[1])
    rates = tokens[0] / min(ours[1:]), tokens[1] / min(theirs[1:])
    print(f"ratio in tokens/s  {rates[0] / rates[1]:.2f}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:tiny", help="path, hub id or builtin")
    parser.add_argument("--layers", type=int, help="random weights with so many layers")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--prompt-tokens", type=int, help="random prompts of up to this length")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def model_section(options: argparse.Namespace) -> ModelSection:
    if options.layers is None:
        return ModelSection(path=options.model, dtype=options.dtype)
    return ModelSection(
        path=options.model,
        tokenizer="builtin:bytes",
        random_init={"num_hidden_layers": options.layers},
        dtype=options.dtype,
    )


def build_requests(options: argparse.Namespace, vocabulary: int) -> list[GenerationRequest]:
    if options.prompt_tokens is None:
        section = PromptsSection(template="plain", user_template="{problem}=")
        tokenizer = load_tokenizer(ModelSection(path=options.model))
        prompts = [
            p.token_ids for p in load_prompts(section, tokenizer, 0).take(0, options.prompts)
        ]
    else:
        rng = np.random.default_rng(0)
        lengths = rng.integers(options.prompt_tokens // 2, options.prompt_tokens, options.prompts)
        prompts = [rng.integers(vocabulary, size=n).astype(np.int32) for n in lengths]
    return [
        GenerationRequest(RequestKey(1, i, j), prompt, 1000 * i + j, options.max_tokens)
        for i, prompt in enumerate(prompts)
        for j in range(options.group)
    ]


def ours_tokens(sampler: HfSampler, requests: list[GenerationRequest]) -> int:
    return sum(len(completion.token_ids) for completion in sampler.generate(requests))


def generate_tokens(
    model: PreTrainedModel, requests: list[GenerationRequest], eos_ids: tuple[int, ...]
) -> int:
    width = max(len(request.prompt_token_ids) for request in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        start = width - len(request.prompt_token_ids)
        ids[row, start:] = torch.from_numpy(request.prompt_token_ids)
        mask[row, start:] = 1
    config = GenerationConfig(
        do_sample=True,
        max_new_tokens=requests[0].max_tokens,
        eos_token_id=list(eos_ids),
        pad_token_id=0,
        top_k=0,
    )
    output = model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config
    )[:, width:].cpu()
    ended = torch.isin(output, torch.tensor(eos_ids)).long()
    before_end = (ended.cumsum(1) - ended) == 0
    return int(before_end.sum())


def timed(generate) -> tuple[float, int]:
    start = time.perf_counter()
    tokens = generate()
    return time.perf_counter() - start, tokens


def report(name: str, seconds: float, tokens: int) -> None:
    print(f"{name:<15} {seconds:8.3f} s  {tokens:7d} tokens  {tokens / seconds:9.0f} tokens/s")


if __name__ == "__main__":
    main()
