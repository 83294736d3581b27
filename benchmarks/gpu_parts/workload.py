"""What the parts train on: rows of random tokens, requests, problems and a reward."""

import json
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_parts.devices import release

if TYPE_CHECKING:
    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
    from grpo_replay.recipe import Recipe
    from grpo_replay.replay.batch import TrainRow
    from grpo_replay.types import Completion, GenerationRequest

LETTERS = (ord("a"), ord("z") + 1)


@contextmanager
def open_engine(recipe: "Recipe") -> Iterator["DeepSpeedEngine"]:
    """The recipe's engine on random weights, in this process as the only rank."""
    from grpo_replay.distributed.rendezvous import initialize_processes
    from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
    from grpo_replay.engine.models import load_policy, load_tokenizer

    release()  # of an engine before
    comm, device = initialize_processes(recipe)
    with tempfile.TemporaryDirectory(prefix="grpo-replay-weights-") as folder:
        policy = load_policy(with_random_weights(recipe, Path(folder)).model, recipe.run.seed)
    engine = DeepSpeedEngine(recipe, policy, load_tokenizer(recipe.model), comm, device)
    try:
        yield engine
    finally:
        engine.close()
        del engine, policy
        release()  # the caller's name for the engine may still hold some of it


def with_random_weights(recipe: "Recipe", folder: Path) -> "Recipe":
    """The recipe with its random weights in `folder`, drawn on its device: a GPU does in a second
    what takes a CPU a minute at 0.6B."""
    import torch
    from transformers import AutoModelForCausalLM

    from grpo_replay.engine.models import DTYPES, load_config

    with torch.device(recipe.engine.device), torch.random.fork_rng():
        torch.manual_seed(recipe.run.seed)
        dtype = DTYPES[recipe.model.dtype]
        policy = AutoModelForCausalLM.from_config(load_config(recipe.model), dtype=dtype)
    policy.save_pretrained(folder)
    del policy
    release()
    kept = {"path": str(folder), "random_init": False}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=kept)})


def random_rows(
    lengths: Sequence[int], prompt: int, vocabulary: int, seed: int = 0
) -> list["TrainRow"]:
    """A mini-batch of rows of these lengths in tokens: uniform tokens, mixed advantages, and
    behaviour log-probs of a uniform policy, which random weights nearly are."""
    from grpo_replay.replay.batch import TrainRow

    rng = np.random.default_rng(seed)
    share = 1.0 / sum(length - prompt for length in lengths)
    rows = []
    for index, length in enumerate(lengths):
        tokens = rng.integers(0, vocabulary, length).astype(np.int32)
        logprobs_T = np.full(length - prompt, -np.log(vocabulary), np.float32)
        advantage = 1.0 if index % 2 else -1.0
        rows.append(
            TrainRow(tokens[:prompt], tokens[prompt:], logprobs_T, logprobs_T, advantage, share)
        )
    return rows


def make_requests(
    count: int, prompt_tokens: int, completion_tokens: int, step: int
) -> list["GenerationRequest"]:
    """In groups of eight, keyed and seeded as the trainer does."""
    from grpo_replay.types import GenerationRequest, RequestKey, completion_seed

    rng = np.random.default_rng(7)
    prompts = rng.integers(*LETTERS, (count // 8 + 1, prompt_tokens)).astype(np.int32)
    keys = [RequestKey(step, index // 8, index % 8) for index in range(count)]
    return [
        GenerationRequest(
            key, prompts[key.prompt_index], completion_seed(42, key), completion_tokens
        )
        for key in keys
    ]


def rows_of(
    requests: Sequence["GenerationRequest"], completions: Sequence["Completion"]
) -> list["TrainRow"]:
    """Sampled completions as a mini-batch with mixed advantages, in the order of `requests`."""
    from grpo_replay.replay.batch import TrainRow

    found = {completion.key: completion for completion in completions}
    share = 1.0 / sum(len(completion.token_ids) for completion in completions)
    return [
        TrainRow(
            request.prompt_token_ids, found[request.key].token_ids,
            found[request.key].sampler_logprobs, found[request.key].sampler_logprobs,
            1.0 if index % 2 else -1.0, share,
        )
        for index, request in enumerate(requests)
    ]  # fmt: skip


def gap_in_nats(logprobs: Sequence[np.ndarray], rows: Sequence["TrainRow"]) -> np.ndarray:
    """|trainer - sampler| of every token, for rows made by `rows_of`."""
    pairs = zip(logprobs, rows, strict=True)
    return np.concatenate([np.abs(ours - row.behavior_logprobs) for ours, row in pairs])


def write_problems(path: Path, count: int, prompt_tokens: int) -> None:
    rng = np.random.default_rng(0)
    letters = rng.integers(*LETTERS, (count, prompt_tokens), dtype=np.uint8)
    rows = [{"problem": bytes(row).decode(), "answer": "even"} for row in letters]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def checksum_reward(completion: str, answer: str, row: dict[str, Any]) -> float:
    """±1 by a checksum of the text, so that a random model's groups are mixed. Few tokens of a
    random model are bytes; a completion without any is an empty text, and wrong."""
    return 1.0 if zlib.crc32(completion.encode()) % 2 else -1.0
