"""Two ranks do what one does: updates, log-probs, stopping, and a whole run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from core_engine import make_rows, relative
from core_run import FinishedRun, run_small, small_recipe
from two_rank_program import CASES, RANDOM_UPDATES, RUN, results_of

from grpo_replay.verify import verify_run

DEADLINE_SECONDS = 280
PROGRAM = Path(__file__).with_name("two_rank_program.py")


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(PROGRAM), str(folder),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.timeout(DEADLINE_SECONDS + 20)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_update_as_one_rank_does(output, processes, name):
    """Also with rows that do not divide evenly, and with a rank that has nothing to train."""
    stage, count, tokens = CASES[name]
    two = torch.load(output / "results.pt")[name]
    one = results_of(processes, stage, make_rows(count), tokens)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-6)
    assert two["reference_kl"] == pytest.approx(one["reference_kl"], rel=1e-4)
    assert relative(two["parameters"], one["parameters"]) < 1e-5
    assert two["micro_batches"] <= one["micro_batches"]
    for a, b in zip(two["outcomes"], one["outcomes"], strict=True):
        assert a == pytest.approx(b, rel=5e-5, abs=1e-5)
    for kind in ("logprobs", "reference"):
        for a, b in zip(two[kind], one[kind], strict=True):
            assert (a - b).abs().max() < 2e-4
    assert len(two["outcomes"]) == count


@pytest.mark.parametrize("stage", ["0", "2", "3"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_non_finite_loss_stops_every_rank_before_the_step(output, stage, rank):
    seen = json.loads((output / f"rank{rank}.json").read_text())["non_finite"][stage]
    expected = "the loss of 1 of the mini-batch's rollouts is not finite (rollout_id 71 first)"
    assert expected in seen["raised"]
    assert seen["unchanged"]


@pytest.mark.parametrize("rank", [0, 1])
def test_payloads_of_any_length_reach_rank_0_alone_or_all(output, rank):
    seen = json.loads((output / f"rank{rank}.json").read_text())["exchanged"]
    sent = {"uneven": ["", "a"], "none": ["", ""], "first": ["abc", ""]}
    for name, payloads in sent.items():
        assert seen[name] == [payloads if rank == 0 else None, payloads]


def test_updates_of_random_sizes_never_hang(output):
    for rank in range(2):
        seen = json.loads((output / f"rank{rank}.json").read_text())
        assert seen["random_updates"] == RANDOM_UPDATES == 200


def test_a_run_on_two_ranks_is_the_run_on_one(output, processes, tmp_path):
    """Same rollouts, same draws; numbers to rounding."""
    two = FinishedRun(output / "run", small_recipe(**RUN))
    one = run_small(tmp_path / "run", **RUN)
    assert len(two.metrics) == len(one.metrics) == 6
    for step in range(1, 7):
        for name in ("rollout_id", "group_id", "prompt_id", "completion_token_ids", "reward",
                     "advantage", "kept", "birth_step", "policy_version"):  # fmt: skip
            assert [r[name] for r in two.rollouts(step)] == [r[name] for r in one.rollouts(step)]
        for name in ("rollout_id", "age_steps", "probability"):
            assert [d[name] for d in two.draws(step)] == [d[name] for d in one.draws(step)]
        for a, b in zip(two.survivors(step), one.survivors(step), strict=True):
            assert a["log_ratio_mean"] == pytest.approx(b["log_ratio_mean"], abs=2e-4)
            assert a["behavior_logprobs"] == pytest.approx(b["behavior_logprobs"], abs=2e-4)
    for a, b in zip(two.metrics, one.metrics, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3, abs=1e-4)
        assert a["num_tokens"] == b["num_tokens"]
    assert sum(line["replay/rollouts"] for line in two.metrics) > 10
    assert verify_run(two.path).passed
    weights = one.weights()
    for name, tensor in two.weights().items():
        assert relative(tensor, weights[name]) < 1e-4
