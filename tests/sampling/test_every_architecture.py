"""Every architecture trains with right log-probs, or is refused by name: the table of
docs/scaling.md, which this test makes (GRPO_REPLAY_WRITE_DOCS=1 writes it)."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, attention_of, random_config
from core_engine import engine_recipe
from naive_sampler import copied_sampler

from grpo_replay.engine.deepspeed_engine import DeepSpeedEngine
from grpo_replay.engine.models import byte_tokenizer, load_config, load_policy
from grpo_replay.errors import GrpoReplayError, ModelError
from grpo_replay.lab.dry_run.trace import Microbatch, forward_memory, model_shape
from grpo_replay.recipe import Recipe
from grpo_replay.replay.batch import TrainRow, logprob_row
from grpo_replay.sampling.decode_modes import DECODE_ATTENTION
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.types import GenerationRequest, RequestKey

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
VLLM = PAGE.with_name("models_vllm.json")
"""What benchmarks/vllm_architectures.py found."""
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
LARGEST_GAP = 1e-4  # nats, in float32
REFUSED = {"bert", "modernbert-decoder", "rwkv"}


def requests() -> list[GenerationRequest]:
    """Three prompts of 4, 20 and 11 tokens with three completions each, longer than the windows."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(250, size=size).astype(np.int32) for size in (4, 20, 11)]
    return [
        GenerationRequest(RequestKey(1, i, j), prompt, 10 * i + j, max_tokens=12)
        for i, prompt in enumerate(prompts)
        for j in range(3)
    ]


def gap(engine: DeepSpeedEngine, sampler: HfSampler) -> tuple[float, list[TrainRow]]:
    """The largest difference of log-probs between sampler and trainer, and the rows."""
    asked = {request.key: request for request in requests()}
    done = list(sampler.generate(list(asked.values())))
    assert len(done) == len(asked)
    rows = [logprob_row(asked[each.key].prompt_token_ids, each.token_ids) for each in done]
    pairs = zip(engine.logprobs(rows), done, strict=True)
    return max(float(np.abs(own - each.sampler_logprobs).max()) for own, each in pairs), rows


def step(engine: DeepSpeedEngine, rows: list[TrainRow]) -> float:
    """Gradient norm of one update."""
    trained = [
        replace(row, behavior_logprobs=own, coefficient=(-1.0) ** index, token_weight=0.01)
        for index, (row, own) in enumerate(zip(rows, engine.logprobs(rows), strict=True))
    ]
    result = engine.update(trained)
    assert result is not None
    return result.grad_norm


def recipe_of(kind: str, folder: Path) -> Recipe:
    random_config(kind).save_pretrained(folder)
    return engine_recipe(
        model={
            "path": str(folder),
            "tokenizer": "builtin:bytes",
            "random_init": True,
            "attn_implementation": attention_of(kind),
        }
    )


def outcome(kind: str, processes, folder: Path) -> str:
    """ "our cache" and the like, or why it is refused."""
    recipe = recipe_of(kind, folder)
    try:
        policy = load_policy(recipe.model, 0)
        comm, device = processes
        stage = recipe.zero_stage(comm.world_size)
        engine = DeepSpeedEngine(recipe, policy, byte_tokenizer(), comm, device, stage)
        try:
            sampler = copied_sampler(policy, (257,), 256)
            before, rows = gap(engine, sampler)
            engine.begin_step(1)
            assert step(engine, rows) > 0
            sampler.load_weights(engine.named_full_tensors(2**20), 1)
            after, _ = gap(engine, sampler)
        finally:
            engine.close()
        assert max(before, after) < LARGEST_GAP, f"{kind}: {before:.1e}, then {after:.1e} nats"
    except GrpoReplayError as error:
        return f"refused: {type(error).__name__}"
    way = sampler._mode
    if not way.hf_cache:
        return "our cache" if way.attention == DECODE_ATTENTION else f"our cache, {way.attention}"
    return "transformers' cache" + ("" if way.padded else ", prompts of one length at a time")


def is_traced(kind: str, folder: Path) -> bool:
    """Whether the dry run knows the memory of its forward pass."""
    try:
        assert model_shape(random_config(kind)).parameters > 0
        section, batch = recipe_of(kind, folder).model, Microbatch(2, 32, 16, 64)
        assert forward_memory(section, load_config(section), batch).peak > 0
    except ModelError:
        return False
    return True


def in_vllm(kind: str) -> str:
    """The measured outcome in process: "yes", an error's class, or why there is none."""
    found = json.loads(VLLM.read_text())[kind]
    if found["outcome"] == "yes":
        assert found["gap"] < LARGEST_GAP
    elif found["outcome"] == "refused":
        when = " at new weights" if "weights of version 1" in found["error"] else ""
        return f"refused{when}: {found['error'].partition(':')[0]}"
    elif found["outcome"] == "wrong":
        return "wrong at new weights" if "mean_after" in found else "wrong"
    return found["outcome"]


def table_of(found: dict[str, str], untraced: list[str]) -> str:
    """A row for each pair of outcomes, with its types; then the types with `eager` attention, and
    those whose memory the dry run does not know."""
    rows: dict[tuple[str, str], list[str]] = {}
    for kind, how in found.items():
        rows.setdefault((how, in_vllm(kind)), []).append(kind)
    lines = ["| `hf` sampler | vLLM in process | types |", "|---|---|---|"]
    lines += [f"| {how} | {vllm} | {', '.join(kinds)} |" for (how, vllm), kinds in rows.items()]
    eager = [kind for kind in found if attention_of(kind) == "eager"]
    lines += [
        "",
        f"Attention is `eager` for {', '.join(eager)}, and `sdpa` for the others. The dry run",
    ]
    lines += [f"cannot count the memory of {', '.join(untraced)}."]
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_every_architecture_trains_or_is_refused_by_name(processes, tmp_path):
    torch.set_num_threads(1)
    found = {kind: outcome(kind, processes, tmp_path / kind) for kind in ARCHITECTURES}
    refused = {kind for kind, how in found.items() if how.startswith("refused")}
    table = table_of(
        found, [kind for kind in ARCHITECTURES if not is_traced(kind, tmp_path / kind)]
    )
    page = PAGE.read_text()
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    if os.environ.get("GRPO_REPLAY_WRITE_DOCS"):
        PAGE.write_text(page[:begin] + table + page[end:])
    assert refused == REFUSED
    assert len(found) - len(refused) >= 30
    assert PAGE.read_text()[begin:].startswith(table)
