"""The two published methods that docs/ has as files of a user: a priority, and a loss with its
advantage estimator."""

import runpy
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from small_runs.trained import train_small_run

from grpo_replay.lab.verification.verify import verify_run

DOCS = Path(__file__).parents[2] / "docs"
GATED, OAPL = DOCS / "gated_negatives.py", DOCS / "oapl.py"


def test_the_gate_by_hand():
    gated = runpy.run_path(str(GATED))["gated"]
    columns = {
        "advantage": np.array([1.0, -1.0, -2.0, -1.0, -1.0]),
        "behavior_logprob_mean": np.array([-5.0, -0.5, -1.0, -1.5, -0.05]),
    }
    assert gated(columns).tolist() == [1.0, 1.0, 2.0, 0.0, 0.0]


def test_optimal_advantages_and_squared_errors_by_hand():
    oapl = runpy.run_path(str(OAPL))
    value = np.log((np.e + 1) / 2)
    found = oapl["optimal_advantage"](np.array([1.0, 0.0]), None)
    np.testing.assert_allclose(found, [1 - value, -value])
    logprobs = torch.tensor([0.1, 0.3, -0.4], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -0.5])
    losses = oapl["squared_error"](logprobs, torch.zeros(3), advantages, None, [2, 1])
    torch.testing.assert_close(losses, torch.tensor([0.36, 0.36, 0.01]))
    (losses / torch.tensor([2.0, 2.0, 1.0])).sum().backward()  # the means of two completions
    # 2·(Σ log-ratio - A) for every token of a completion
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.2, -1.2, 0.2]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_small_run(
        tmp_path_factory.mktemp("published") / "run",
        replay={"priority": f"{GATED}:gated"},
        advantage={"estimator": f"{OAPL}:optimal_advantage"},
        loss={"kind": f"{OAPL}:squared_error", "aggregation": "sequence_mean"},
        optimizer={"learning_rate": 1e-4},
        run={"steps": 6},
    )


def test_a_run_draws_and_trains_by_them_and_verifies(run):
    logged = pq.read_table(run.path / "rollouts" / "step_000003.parquet").to_pylist()
    kept = [row for row in logged if row["kept"]]
    for row in kept:
        expected = np.mean(row["behavior_logprobs"], dtype=np.float64)
        assert row["behavior_logprob_mean"] == pytest.approx(expected, abs=1e-12)
    assert {row["behavior_logprob_mean"] for row in logged if not row["kept"]} <= {None}
    assert [check.name for check in verify_run(run.path).checks if not check.passed] == []
