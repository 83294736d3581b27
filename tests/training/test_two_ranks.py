"""Several ranks do what one does: updates, log-probs, stopping, resuming, and whole runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from core_engine import relative
from slow_tests import slow_except
from small_runs.trained import FinishedRun, same_files, same_weights, small_recipe, train_small_run
from two_rank_program import (
    CASES,
    CORE_CASES,
    LAGGING,
    OPTIONS,
    RANDOM_UPDATES,
    RUN,
    SHARED_PROMPT,
    random_work,
    read_states,
    results_of,
    write_states,
)

from grpo_replay.lab.verification.verify import verify_run

DEADLINE_SECONDS = 1200
STATES = "all states"
PROGRAM = Path(__file__).parents[1] / "support" / "two_rank_program.py"


def run_program(ranks: int, folder: Path, *parts: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(ranks), str(folder), *parts],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def output(tmp_path_factory, processes) -> Path:
    """What two ranks did: the parts of the default suite."""
    folder = tmp_path_factory.mktemp("two_ranks")
    run_program(2, folder, "updates", "shared prompt")
    return folder


@pytest.fixture(scope="module")
def other_output(tmp_path_factory, processes) -> Path:
    """What two ranks did: the parts of the slow tests. The engine states of one rank are there for
    several ranks to read."""
    folder = tmp_path_factory.mktemp("two_ranks_slow")
    (folder / STATES).mkdir()
    write_states(processes, folder / STATES, STATES)
    run_program(2, folder, "other updates", "random", STATES, "run", "other runs")
    return folder


@pytest.mark.timeout(DEADLINE_SECONDS + 20)
@pytest.mark.parametrize("name", slow_except(CORE_CASES, CASES))
def test_two_ranks_update_as_one_rank_does(request, processes, name):
    """With all parameters sharded; also with rows that do not divide evenly, unequal numbers of
    chunks, and a rank that has nothing to train."""
    case = CASES[name]
    if name in CORE_CASES:
        two = torch.load(request.getfixturevalue("output") / "updates.pt")[name]
    else:
        two = torch.load(request.getfixturevalue("other_output") / "other updates.pt")[name]
    one = results_of(processes, case)
    if case.model.get("dtype") == "bfloat16":
        assert two["grad_norm"][0] == pytest.approx(one["grad_norm"][0], rel=0.02)
        assert two["loss"][0] == pytest.approx(one["loss"][0], rel=1e-3)
        assert two["loss"][1] == pytest.approx(one["loss"][1], rel=0.1)  # after a bf16 update
        assert relative(two["parameters"], one["parameters"]) < 2e-3
        return
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
    assert len(two["outcomes"]) == case.count


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stages", slow_except(["output"], ["output", "other_output"]))
def test_a_non_finite_loss_stops_every_rank_before_the_step(request, stages, rank):
    """At ZeRO 3, and at 0 among the slow tests."""
    file = request.getfixturevalue(stages) / f"rank{rank}.json"
    seen = json.loads(file.read_text())["non_finite"]
    assert "rollout_id 71" in seen["raised"] and seen["unchanged"]


@pytest.mark.parametrize("rank", [0, 1])
def test_payloads_of_any_length_reach_rank_0_alone_or_all(output, rank):
    seen = json.loads((output / f"rank{rank}.json").read_text())["exchanged"]
    sent = {"uneven": ["", "a"], "none": ["", ""], "first": ["abc", ""]}
    for name, payloads in sent.items():
        assert seen[name] == [payloads if rank == 0 else None, payloads]


@pytest.mark.slow
def test_uneven_random_work_never_hangs_and_is_that_of_one_rank(other_output, processes):
    updates = RANDOM_UPDATES["random"]
    expected, found = random_work(processes, updates), torch.load(other_output / "random.pt")
    assert len(found["losses"]) == len(expected["losses"]) == updates
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5, abs=1e-6)  # down to 0.02
    assert relative(found["parameters"], expected["parameters"]) < 1e-5


@pytest.mark.slow
def test_a_state_is_restored_on_other_ranks_and_at_other_stages(other_output, processes):
    """With several optimizer sub-groups, each of which has its own count of Adam's steps."""
    folder = other_output / STATES
    for found in (
        torch.load(other_output / f"{STATES}.pt"),
        read_states(processes, folder, STATES),
    ):
        assert len(found) == 8 * 4  # of one and two ranks at four stages, to each stage
        for name, result in found.items():
            expected = torch.load(folder / name.partition(" to ")[0] / "two_more.pt")
            assert relative(result["parameters"], expected["parameters"]) < 1e-7, name
            if result["losses"]:
                assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5), name
                assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5), name


@pytest.mark.slow
def test_deepspeed_s_thresholds_change_no_bit_of_a_run(other_output):
    """But the last of the norm's, whose squares are summed by optimizer sub-group."""
    folders = other_output / "run", other_output / "scaled"
    one, other = (FinishedRun(folder, small_recipe(**RUN)) for folder in folders)
    for a, b in zip(one.timeless_metrics, other.timeless_metrics, strict=True):
        assert a.pop("grad_norm") == pytest.approx(b.pop("grad_norm"), rel=1e-14)
        assert a == b
    assert same_files(one.path, other.path, "rollouts") == 6
    assert same_files(one.path, other.path, "draws") == 6
    assert same_weights(one.weights(), other.weights())


@pytest.mark.slow
def test_steps_without_survivors_push_weights_all_the_same(other_output):
    run = FinishedRun(other_output / "hopeless", small_recipe(**RUN))
    assert [line["fresh/rollouts"] > 0 for line in run.metrics] == [True] * 2 + [False] * 2
    assert run.metrics[-1]["sampler/policy_version"] == 3


@pytest.mark.slow
def test_a_lagging_sampler_of_two_ranks_has_the_versions_of_its_pushes(other_output):
    two = FinishedRun(other_output / "lagging", small_recipe(**LAGGING))
    assert [line["sampler/policy_version"] for line in two.metrics] == [0, 0, 2, 2, 4, 4]
    assert verify_run(two.path).passed


@pytest.mark.slow
def test_a_run_with_lora_and_options_on_two_ranks_is_the_run_on_one(
    other_output, processes, tmp_path
):
    two = FinishedRun(other_output / "options", small_recipe(**OPTIONS))
    assert_same_run(two, train_small_run(tmp_path / "run", **OPTIONS))


def test_ranks_share_the_completions_of_one_prompt_and_change_nothing(output, processes, tmp_path):
    counts = [json.loads((output / f"{rank} samples.json").read_text()) for rank in (0, 1)]
    assert counts == [[2] * 6, [3] * 6]
    two = FinishedRun(output / "shared prompt", small_recipe(**SHARED_PROMPT))
    assert_same_run(two, train_small_run(tmp_path / "run", **SHARED_PROMPT))


@pytest.mark.slow
def test_a_run_on_two_ranks_is_the_run_on_one(other_output, processes, tmp_path):
    two = FinishedRun(other_output / "run", small_recipe(**RUN))
    assert_same_run(two, train_small_run(tmp_path / "run", **RUN))


def assert_same_run(two: FinishedRun, one: FinishedRun) -> None:
    """Same rollouts, same draws; numbers to rounding."""
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
