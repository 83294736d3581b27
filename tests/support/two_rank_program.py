"""The ranks of the tests on several ranks.

Usage: two_rank_program.py RANKS OUTPUT PART…    (WORK below)

The ranks are forks of this process, so that torch and DeepSpeed are loaded only once.
Rank 0 writes <part>.pt or a run; with "updates", every rank writes rank<r>.json.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_engine import (
    SCALED,
    SHARDED,
    engine_recipe,
    make_rows,
    open_engine,
    parameters,
    share_prompts,
)
from small_runs.trained import hopeless_after, train_small_run

from grpo_replay.engine.processes import initialize_processes
from grpo_replay.errors import NonFiniteError
from grpo_replay.sampling.hf import HfSampler

TIMEOUT = {"timeout_seconds": 60}  # of a collective: a rank that is left alone ends the test


@dataclass(frozen=True)
class Case:
    """A mini-batch of `count` rows, and the sections of the engine that trains on it."""

    count: int
    tokens: int
    engine: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    packing: bool | None = None
    per_prompt: int = 1  # rows, which share it on several ranks


ROWS = {
    "seven rows, three to a micro-batch": (7, 60),
    "eight rows at once": (8, 100_000),
    "one row": (1, 100_000),
}
LORA = {"lora": {"r": 4}}
CHECKPOINTING, BF16 = {"gradient_checkpointing": True}, {"dtype": "bfloat16"}
ENGINES: dict[str, tuple[Any, ...]] = {
    "ZeRO 0": ({"zero_stage": 0}, {}),
    "ZeRO 1": ({"zero_stage": 1}, {}),
    "ZeRO 2": ({"zero_stage": 2}, {}),
    "ZeRO 3": (SHARDED, {}),
    "ZeRO 2, LoRA": ({"zero_stage": 2}, LORA),
    "ZeRO 3, LoRA, bf16 and checkpointing": (SHARDED, LORA | BF16 | CHECKPOINTING),
    "ZeRO 3, bf16": (SHARDED, BF16),
    "ZeRO 3, packed, checkpointing": (SHARDED, CHECKPOINTING, True),
    "ZeRO 3, thresholds of a 4B model, checkpointing": (SCALED, CHECKPOINTING),
}
SHARING: dict[str, tuple[Any, ...]] = {
    "seven rows of three prompts": (7, 100, SHARDED, {}, None, 3),
    "four rows of one prompt, packed": (4, 100_000, SHARDED, {}, True, 4),
    "seven rows of three prompts, checkpointing": (7, 60, SHARDED, CHECKPOINTING, None, 3),
}
CASES = {
    f"{rows}, {engine}": Case(*ROWS[rows], *ENGINES[engine])
    for engine in ENGINES
    for rows in (ROWS if engine == "ZeRO 3" else list(ROWS)[:1])
} | {name: Case(*values) for name, values in SHARING.items()}
FIRST_ROWS = next(iter(ROWS))
CORE_CASES = [  # the cases of the part "updates"; the others are of "other updates"
    f"{FIRST_ROWS}, ZeRO 3",
    next(iter(SHARING)),
]
RANDOM_UPDATES = {"random": 8}
RUN: dict[str, Any] = {
    "run": {"steps": 6},
    "engine": SHARDED | TIMEOUT,
    "checkpoint": {"every_steps": 3},
}
LAGGING: dict[str, Any] = RUN | {
    "run": {"steps": 6, "sync_every_steps": 2},
    "loss": {"behavior_logprobs": "sampler"},
}
OPTIONS: dict[str, Any] = RUN | {
    "model": LORA,
    "sampling": {"max_refills": 2},
    "loss": {"kind": "gspo", "aggregation": "sequence_mean"},
    "optimizer": {"learning_rate": 1e-3, "schedule": "cosine"},
}
"""LoRA and the options of loss, optimizer and sampling together."""
SHARED_PROMPT: dict[str, Any] = {
    "run": {"steps": 6},
    "engine": TIMEOUT,
    "sampling": {"prompts_per_step": 1, "group_size": 5},
    "replay": {"drop_zero_variance": False, "ratio": 1.0},
}
"""One prompt a step, whose completions do not divide evenly by two."""
STAGES = {"all states": (0, 1, 2, 3)}  # by part


def results_of(processes, case: Case):
    """What two updates and the log-probs after them are."""
    comm, _ = processes
    mine = make_rows(case.count, per_prompt=case.per_prompt) if comm.is_main else None
    with open_engine(
        processes,
        engine=case.engine | TIMEOUT,
        model=case.model,
        batch={"max_tokens_per_microbatch": case.tokens, "packing": case.packing},
        loss={"beta": 0.05},
    ) as engine:
        if comm.world_size > 1 and case.per_prompt > 1:
            share_prompts(engine)
        updates = [engine.update(mine) for _ in range(2)]
        logprobs = engine.logprobs(mine)
        reference = engine.reference_logprobs(mine)
        found = parameters(engine)
    if not comm.is_main:
        assert updates == [None, None] and logprobs == [] and reference == []
        return {}
    return {
        "parameters": found,
        "grad_norm": [update.grad_norm for update in updates],
        "loss": [update.loss for update in updates],
        "reference_kl": [update.reference_kl for update in updates],
        "micro_batches": updates[0].micro_batches,
        "outcomes": [asdict(outcome) for outcome in updates[0].outcomes],
        "logprobs": [torch.from_numpy(values) for values in logprobs],
        "reference": [torch.from_numpy(values) for values in reference],
    }


def non_finite(processes, stage: int) -> dict:
    """Whether this rank stopped, and whether its parameters are what they were."""
    comm, _ = processes
    rows = make_rows(5)
    poisoned = rows[2].behavior_logprobs.copy()
    poisoned[-1] = np.nan
    rows[2] = replace(rows[2], behavior_logprobs=poisoned, rollout_id=71)
    with open_engine(processes, engine=SHARDED | {"zero_stage": stage} | TIMEOUT) as engine:
        before = parameters(engine)
        try:
            engine.update(rows if comm.is_main else None)
            raised = ""
        except NonFiniteError as error:
            raised = str(error)
        return {"raised": raised, "unchanged": bool(torch.equal(parameters(engine), before))}


def random_work(processes, updates: int) -> dict:
    """Updates of random sizes, often fewer rows than ranks, with log-prob passes and weight
    gathers in between, every parameter sharded; the results on rank 0.

    The learning rate is small enough that no ratio reaches a clip's edge, where rounding decides.
    """
    comm, _ = processes
    rows = make_rows(12)
    rng = np.random.default_rng(0)  # every rank draws the same sizes
    losses, norms = [], []
    with open_engine(
        processes,
        engine=SHARDED | TIMEOUT,
        batch={"max_tokens_per_microbatch": 40},
        optimizer={"learning_rate": 1e-5},
    ) as engine:
        for update in range(updates):
            chosen = [rows[i] for i in rng.permutation(12)[: rng.integers(1, 7)]]
            if update % 5 == 0:
                engine.logprobs(chosen if comm.is_main else None)
            if update % 10 == 0:
                parameters(engine)
            result = engine.update(chosen if comm.is_main else None)
            if result is not None:
                losses.append(result.loss)
                norms.append(result.grad_norm)
        return {"losses": losses, "norms": norms, "parameters": parameters(engine)}


def resharding_engine(processes, stage: int):
    return open_engine(
        processes,
        engine={**SCALED, "zero_stage": stage} | TIMEOUT,
        batch={"max_tokens_per_microbatch": 60},
    )


def write_states(processes, folder: Path, part: str) -> None:
    """The state after three updates at every stage of the part, and what two more come to."""
    comm, _ = processes
    rows = make_rows(7) if comm.is_main else None
    for stage in STAGES[part]:
        with resharding_engine(processes, stage) as engine:
            for _ in range(3):
                engine.update(rows)
            place = folder / f"{comm.world_size} ranks, ZeRO {stage}"
            engine.save(place)
            result = two_more(engine, rows)
        if comm.is_main:
            torch.save(result, place / "two_more.pt")
    comm.barrier()


def read_states(processes, folder: Path, part: str) -> dict[str, dict[str, Any]]:
    """{"SOURCE to ZeRO stage": what two more updates come to} for every state in the folder."""
    comm, _ = processes
    rows = make_rows(7) if comm.is_main else None
    found = {}
    for source in sorted(path for path in folder.iterdir() if path.is_dir()):
        for stage in STAGES[part]:
            with resharding_engine(processes, stage) as engine:
                engine.load(source)
                found[f"{source.name} to ZeRO {stage}"] = two_more(engine, rows)
    return found


def two_more(engine, rows) -> dict[str, Any]:
    updates = [engine.update(rows) for _ in range(2)]
    return {
        "losses": [update.loss for update in updates if update],
        "norms": [update.grad_norm for update in updates if update],
        "parameters": parameters(engine),
    }


def exchanged(processes) -> dict:
    """What this rank gets where rank r sends `r` letters, both send none, or only rank 0 sends."""
    comm, _ = processes
    payloads = {"uneven": b"ab"[: comm.rank], "none": b"", "first": b"abc" * comm.is_main}
    return {
        name: [
            [part.decode() for part in received] if received is not None else None
            for received in (comm.gather(payload), comm.all_gather(payload))
        ]
        for name, payload in payloads.items()
    }


def other_runs(output: Path) -> None:
    """The run with every threshold scaled, one whose sampler lags, and one whose steps lose their
    survivors: log-probs are then followed by a weight push with no update in between."""
    train_small_run(output / "scaled", **RUN | {"engine": SCALED | TIMEOUT})
    train_small_run(output / "lagging", **LAGGING)
    train_small_run(output / "options", **OPTIONS)
    train_small_run(
        output / "hopeless",
        **RUN | {"engine": SCALED | TIMEOUT, "run": {"steps": 4}},
        prompts=hopeless_after(output, 2),
        replay={"preset": "grpo"},
    )


def shared_prompt(processes, output: Path) -> None:
    """A run; <rank> samples.json gets how many completions this rank sampled in each step."""
    counts: list[int] = []
    generate = HfSampler.generate

    def counting(sampler, requests):
        counts.append(len(requests))
        return generate(sampler, requests)

    HfSampler.generate = counting
    train_small_run(output / "shared prompt", **SHARED_PROMPT)
    HfSampler.generate = generate
    (output / f"{processes[0].rank} samples.json").write_text(json.dumps(counts))


def main(output: Path, parts: Sequence[str]) -> None:
    processes = initialize_processes(engine_recipe(engine=TIMEOUT))
    comm, _ = processes
    for part in parts:
        WORK[part](processes, output, part)
    comm.barrier()
    torch.distributed.destroy_process_group()


def core_updates(processes, output: Path, part: str) -> None:
    comm, _ = processes
    results = {name: results_of(processes, CASES[name]) for name in CORE_CASES}
    report = {"non_finite": non_finite(processes, 3), "exchanged": exchanged(processes)}
    (output / f"rank{comm.rank}.json").write_text(json.dumps(report))
    save(comm, output / f"{part}.pt", results)


def other_updates(processes, output: Path, part: str) -> None:
    results = {n: results_of(processes, case) for n, case in CASES.items() if n not in CORE_CASES}
    report = {"non_finite": non_finite(processes, 0)}
    (output / f"rank{processes[0].rank}.json").write_text(json.dumps(report))
    save(processes[0], output / f"{part}.pt", results)


def random_updates(processes, output: Path, part: str) -> None:
    save(processes[0], output / f"{part}.pt", random_work(processes, RANDOM_UPDATES[part]))


def states(processes, output: Path, part: str) -> None:
    write_states(processes, output / part, part)
    save(processes[0], output / f"{part}.pt", read_states(processes, output / part, part))


def save(comm, path: Path, results: dict) -> None:
    if comm.is_main:
        torch.save(results, path)


WORK = {
    "updates": core_updates,
    "other updates": other_updates,
    "random": random_updates,
    "all states": states,
    "shared prompt": lambda processes, output, part: shared_prompt(processes, output),
    "run": lambda processes, output, part: train_small_run(output / "run", **RUN),
    "other runs": lambda processes, output, part: other_runs(output),
}


def fork_ranks(count: int, output: Path, parts: Sequence[str]) -> int:
    """The exit code: 1 if a rank failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(count):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(context.Process(target=main, args=(output, parts)))
        ranks[-1].start()
    failed = False
    while alive := [process for process in ranks if process.is_alive()]:
        wait([process.sentinel for process in alive])
        if failed := any(process.exitcode for process in ranks):
            break
    for process in ranks:
        process.kill()  # those that wait for one that failed
    return int(failed or any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(fork_ranks(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
