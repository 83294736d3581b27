"""One rank of the two-rank tests; started by torchrun. Usage: two_rank_program.py OUTPUT

Rank 0 writes results.pt; every rank writes rank<r>.json.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from core_engine import engine_recipe, make_rows, open_engine, parameters
from core_run import run_small

from grpo_replay.backends.processes import initialize_processes
from grpo_replay.errors import NonFiniteError

CASES = {
    f"{name}, ZeRO {stage}": (stage, count, tokens)
    for stage in (0, 2, 3)
    for name, count, tokens in [
        ("seven rows, three to a micro-batch", 7, 60),
        ("eight rows at once", 8, 100_000),
        ("one row", 1, 100_000),
    ]
}
RANDOM_UPDATES = 200
RUN = {
    "run": {"steps": 6},
    "engine": {"zero_stage": 3, "timeout_seconds": 120},
    "checkpoint": {"every_steps": 3},
}


def results_of(processes, stage, rows, tokens):
    """What two updates and the log-probs after them are."""
    comm, _ = processes
    mine = rows if comm.is_main else None
    with open_engine(
        processes,
        engine={"zero_stage": stage},
        batch={"max_tokens_per_microbatch": tokens},
        loss={"beta": 0.05},
    ) as engine:
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
    with open_engine(processes, engine={"zero_stage": stage}) as engine:
        before = parameters(engine)
        try:
            engine.update(rows if comm.is_main else None)
            raised = ""
        except NonFiniteError as error:
            raised = str(error)
        return {"raised": raised, "unchanged": bool(torch.equal(parameters(engine), before))}


def random_updates(processes) -> int:
    """Updates of random sizes at ZeRO 3, often fewer rows than ranks; how many were made."""
    comm, _ = processes
    rows = make_rows(12)
    rng = np.random.default_rng(0)  # every rank draws the same sizes
    with open_engine(
        processes, engine={"zero_stage": 3}, batch={"max_tokens_per_microbatch": 40}
    ) as engine:
        for _ in range(RANDOM_UPDATES):
            chosen = rng.permutation(12)[: rng.integers(1, 7)]
            engine.update([rows[i] for i in chosen] if comm.is_main else None)
    return RANDOM_UPDATES


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


def main(output: Path) -> None:
    processes = initialize_processes(engine_recipe())
    comm, _ = processes
    results = {
        name: results_of(processes, stage, make_rows(count), tokens)
        for name, (stage, count, tokens) in CASES.items()
    }
    report = {
        "non_finite": {stage: non_finite(processes, stage) for stage in (0, 2, 3)},
        "random_updates": random_updates(processes),
        "exchanged": exchanged(processes),
    }
    run_small(output / "run", **RUN)
    if comm.is_main:
        torch.save(results, output / "results.pt")
    (output / f"rank{comm.rank}.json").write_text(json.dumps(report))
    comm.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
