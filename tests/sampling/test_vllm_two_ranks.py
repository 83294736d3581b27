"""Two ranks that form one engine sample what one rank samples (each with an engine of its own: see
test_vllm_training)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from server_helpers import free_ports
from tiny_policy import by_key, changed, logprobs_of, make_requests, push

from grpo_replay.types import RequestKey

pytestmark = pytest.mark.vllm

PROGRAM = Path(__file__).parents[1] / "support" / "rank_program.py"
DEADLINE_SECONDS = 240


def run_two_ranks(folder: Path, output: Path, tensor_parallel_size: int) -> list[dict]:
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(output), str(tensor_parallel_size)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            text, _ = process.communicate(timeout=DEADLINE_SECONDS)
            assert process.returncode == 0, text[-3000:]
    finally:
        for process in ranks:
            process.kill()
    return [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(2 * DEADLINE_SECONDS)
def test_a_tensor_parallel_engine_samples_what_one_rank_samples(tied, tied_sampler, tmp_path):
    seen = run_two_ranks(tied.folder, tmp_path, tensor_parallel_size=2)
    for rank in seen:
        assert "missing tensor model.embed_tokens.weight" in rank["refusal"]
    rows = [row for rank in seen for row in rank["rows"]]
    requests = {request.key: request for request in make_requests()}
    assert {RequestKey(*row[0]) for row in rows} == set(requests)
    assert len(rows) == len(requests)
    model = changed(tied, 21)
    push(tied_sampler, model)
    expected = by_key(list(tied_sampler.generate(make_requests())))
    for key, tokens, logprobs, version in rows:
        completion = expected[RequestKey(*key)]
        assert tokens == completion.token_ids.tolist()
        assert version == 2
        own = logprobs_of(model, requests[RequestKey(*key)], completion)
        np.testing.assert_allclose(logprobs, own, atol=1e-4)
