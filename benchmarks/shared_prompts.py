"""What shared prompts save: tokens computed, seconds and peak memory against separate rows.

    python benchmarks/shared_prompts.py      prompts 16, 128, 1,024 × completions 16, 256
    python benchmarks/shared_prompts.py --prompts 45 --completions 5 --groups 16

A log-prob pass and an update of an engine with a random model of SmolLM2-135M's width, in float32,
on groups of eight rollouts. Each measurement is a process of its own; the two ways alternate, and
the least of the repetitions counts. Seconds are processor time of one thread, unless `--wall`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

SIZES = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49_152, "tie_word_embeddings": True,
}  # fmt: skip


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 128, 1024], help="tokens")
    parser.add_argument("--completions", type=int, nargs="+", default=[16, 256], help="tokens")
    parser.add_argument("--groups", type=int, default=2, help="of eight rollouts")
    parser.add_argument("--layers", type=int, default=6, help="SmolLM2-135M has 30")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--wall", action="store_true", help="wall seconds on all cores")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--one", nargs=3, type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    """Print tokens, seconds and MiB of one way to compute one kind of rows."""
    import numpy as np

    from grpo_replay.distributed.rendezvous import initialize_processes
    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
    from grpo_replay.engine.microbatches import plan_microbatches
    from grpo_replay.engine.models import load_policy, load_tokenizer
    from grpo_replay.recipe import resolve_recipe
    from grpo_replay.replay.batch import TrainRow

    prompt, completion, shared = options.one
    recipe = resolve_recipe([recipe_of(options, prompt, completion)])
    comm, device = initialize_processes(recipe)
    model, tokenizer = load_policy(recipe.model, 0), load_tokenizer(recipe.model)
    engine = DeepSpeedEngine(recipe, model, tokenizer, comm, device)
    random = np.random.default_rng(0)

    def ids(tokens: int) -> np.ndarray:
        return random.integers(SIZES["vocab_size"], size=tokens).astype(np.int32)

    behavior = np.full(completion, -10.0, np.float32)
    rows = []
    for _ in range(options.groups):
        head = ids(prompt)
        rows += [TrainRow(head, ids(completion), behavior, behavior, 1.0, 1e-3) for _ in range(8)]
    if not shared:
        engine._layout = replace(engine._layout, pairs_per_token=None)
    (batches,) = plan_microbatches(rows, engine._layout, 1)
    engine.update(rows)  # the optimizer's state
    clock = time.perf_counter if options.wall else time.process_time
    started = clock()
    engine.logprobs(rows)
    middle = clock()
    engine.update(rows)
    result = {
        "tokens": sum(batch.tokens for batch in batches),
        "logprobs": middle - started,
        "update": clock() - middle,
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(result))


def recipe_of(options: argparse.Namespace, prompt: int, completion: int) -> dict[str, Any]:
    sizes = SIZES | {"num_hidden_layers": options.layers}
    return {
        "name": "shared-prompts",
        "model": {
            "path": "builtin:qwen3-0.6b", "tokenizer": "builtin:bytes",
            "dtype": "float32", "random_init": sizes,
        },
        "prompts": {"max_prompt_length": prompt},
        "sampling": {"max_completion_length": completion},
        "replay": {"preset": "grpo"},
        "batch": {"max_tokens_per_microbatch": options.max_tokens},
        "engine": {"device": "cpu", "threads_per_process": None if options.wall else 1},
    }  # fmt: skip


def best_of(options: argparse.Namespace, prompt: int, completion: int) -> list[dict[str, float]]:
    """The least of every quantity: [separate rows, shared prompts]."""
    found: list[list[dict[str, float]]] = [[], []]
    for _ in range(options.repetitions):
        for shared in (0, 1):
            command = [sys.executable, __file__, *sys.argv[1:], "--one"]
            command += [str(prompt), str(completion), str(shared)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[shared].append(json.loads(done.stdout.splitlines()[-1]))
    return [{name: min(run[name] for run in runs) for name in runs[0]} for runs in found]


def main() -> None:
    options = parse_options()
    if options.one:
        measure(options)
        return
    print("| prompt, completion | tokens | log-probs s | update s | peak memory GiB |")
    print("|---|---|---|---|---|")
    for prompt in options.prompts:
        for completion in options.completions:
            apart, shared = best_of(options, prompt, completion)
            cells = [
                f"{apart['tokens']:,.0f} → {shared['tokens']:,.0f}",
                *(f"{apart[name]:.2f} → {shared[name]:.2f}" for name in ("logprobs", "update")),
                f"{apart['MiB'] / 1024:.2f} → {shared['MiB'] / 1024:.2f}",
            ]
            print(f"| {prompt:,}, {completion} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    main()
