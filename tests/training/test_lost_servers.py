"""A synchronous run whose only server goes away (asynchronous ones: test_async_faults)."""

import pytest
from fake_policy_server import FakePolicyServer
from small_runs.asynchronous import train_async_run
from small_runs.trained import small_recipe

from grpo_replay.errors import ServersLost


def test_the_loss_of_the_last_server_ends_a_synchronous_run_with_a_checkpoint(tmp_path, processes):
    """It is lost after the second step, and back for the resume."""
    server = FakePolicyServer()
    recipe = small_recipe(
        sampling={
            "backend": "vllm_server", "servers": {"urls": [server.url]}, "prompts_per_step": 2,
            "group_size": 2, "max_completion_length": 16, "logprob_gap_limit": 1000.0,
        },
        reward={"function": "collected_rewards:even"}, run={"steps": 3},
        eval={"benchmarks": []},
    )  # fmt: skip
    with pytest.raises(ServersLost, match=server.url) as lost:
        train_async_run(recipe, tmp_path / "run", after={2: server.stop})
    assert lost.value.exit_code == 4
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step_*")
    assert checkpoint.name == "step_000002"
    again = FakePolicyServer(int(server.url.rsplit(":", 1)[1]))
    run = train_async_run(recipe, tmp_path / "run", resume=True)
    again.stop()
    assert [line["step"] for line in run.metrics] == [1, 2, 3]
