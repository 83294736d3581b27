"""One small run of the real thing, and everything it promises to leave behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
import yaml

from grpo_replay.recipe import load_recipe

SETTINGS = [
    "run.steps=5",
    "sampling.prompts_per_step=8",
    "sampling.group_size=4",
    "replay.warmup_steps=1",
    "replay.max_age_steps=2",
    "checkpoint.every_steps=2",
    "checkpoint.keep=2",
    "eval.every_steps=3",
    "eval.samples=1",
    "eval.max_problems=10",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from grpo_replay.training import Observer
    from grpo_replay.training.run import run_training

    path = tmp_path_factory.mktemp("run") / "tiny"
    result = run_training(load_recipe("tiny", SETTINGS), path, False, Observer())
    assert not result.interrupted
    return path


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_directory_holds_what_the_design_says(run):
    steps = [f"step_{step:06d}.parquet" for step in range(1, 6)]
    assert sorted(path.name for path in (run / "rollouts").iterdir()) == steps
    assert sorted(path.name for path in (run / "draws").iterdir()) == steps
    reports = sorted(path.name for path in (run / "eval").glob("*.json"))
    assert reports == ["step_000000.json", "step_000003.json", "step_000005.json"]
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert checkpoints == ["latest", "step_000004", "step_000005"]
    assert (run / "checkpoints/latest").resolve().name == "step_000005"
    parts = {path.name for path in (run / "checkpoints/latest").iterdir()}
    assert parts == {"model", "engine", "buffer.parquet", "state.json", "manifest.json"}
    assert list((run / "tensorboard").glob("events.*"))
    assert [path.name for path in (run / "log").iterdir()] == ["attempt_001.log"]


def test_metrics_have_one_line_per_step_and_no_nan(run):
    text = (run / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert [row["step"] for row in metrics_of(run)] == [1, 2, 3, 4, 5]


def test_every_step_after_the_warm_up_replays_within_the_age_limit(run):
    first, *later = metrics_of(run)
    assert first["replay/rollouts"] == 0
    for row in later:
        assert row["replay/rollouts"] > 0
        assert row["replay/age_max"] <= 2


def test_the_sampler_is_the_policy_at_every_step(run):
    for row in metrics_of(run):
        assert row["sampler/logprob_gap_mean"] < 1e-5
        assert row["sampler/policy_version"] == row["step"] - 1


def test_the_summary_has_exactly_its_keys(run):
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) == {
        "recipe", "preset", "steps", "wall_seconds", "base", "final", "base_stderr",
        "final_stderr", "base_greedy", "final_greedy", "comparable", "generated_tokens",
        "trained_tokens", "replayed_rollouts", "means", "checkpoint",
    }  # fmt: skip
    rows = metrics_of(run)
    assert summary["generated_tokens"] == sum(row["cost/generated_tokens"] for row in rows)
    assert summary["trained_tokens"] == sum(row["cost/trained_tokens"] for row in rows)
    assert summary["replayed_rollouts"] == sum(row["replay/rollouts"] for row in rows)
    assert summary["checkpoint"] == "checkpoints/step_000005"
    benchmarks = {"tiny_add", "tiny_sub", "tiny_mul", "tiny_order", "tiny_pair", "mean"}
    assert set(summary["base"]) == set(summary["final"]) == benchmarks
    assert rows[-1]["eval/mean"] == summary["final"]["mean"]


def test_the_state_names_the_policy_of_the_weights(run):
    state = json.loads((run / "checkpoints/latest/state.json").read_text())
    assert (state["step"], state["policy_version"], state["prompt_cursor"]) == (5, 5, 40)


def test_the_resolved_recipe_is_the_run_again(run):
    from grpo_replay.recipe import resolve_recipe

    resolved = resolve_recipe([yaml.safe_load((run / "recipe.yaml").read_text())])
    assert resolved == load_recipe("tiny", SETTINGS)


def test_the_environment_is_recorded(run):
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["world_size"] == 1


def test_plain_transformers_loads_the_checkpoint(run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run / "checkpoints/latest/model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    prompt = tokenizer("47+38=", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert "\\boxed{" in tokenizer.decode(output[0])
    assert torch.isfinite(next(model.parameters())).all()
    assert (folder / "README.md").read_text().startswith("---\nlibrary_name: transformers")


def test_checkpointed_weights_give_the_log_probs_that_were_sampled_with(run):
    """Rollouts of policy version 4 were sampled from the weights of step_000004."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints/step_000004/model")
    table = pq.read_table(run / "rollouts/step_000005.parquet").to_pylist()
    assert {row["policy_version"] for row in table} == {4}
    for row in table[:8]:
        prompt, completion = row["prompt_token_ids"], row["completion_token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0]
        expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(completion)[:, None])[:, 0]
        stored = torch.tensor(row["sampler_logprobs"])
        assert (chosen - stored).abs().max() < 1e-4


@pytest.mark.slow
def test_an_interrupted_run_checkpoints_and_can_be_resumed(tmp_path):
    words = [word for setting in SETTINGS[1:] for word in ("--set", setting)]
    command = [sys.executable, "-m", "grpo_replay.cli.app", "train", "tiny", "--output-dir",
               str(tmp_path / "run"), "--set", "run.steps=400", "--set", "eval.benchmarks=[]",
               *words]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    state = json.loads((tmp_path / "run/checkpoints/latest/state.json").read_text())
    assert state["step"] == len(metrics.read_text().splitlines())


def test_a_run_directory_belongs_to_one_process(tmp_path):
    from grpo_replay.errors import OutputDirectoryError
    from grpo_replay.storage.run_directory import RunDirectory

    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.lock()
    with pytest.raises(OutputDirectoryError, match=f"in use by process {os.getpid()}"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


@pytest.mark.slow
def test_a_capacity_that_binds_is_said_once(tmp_path):
    from grpo_replay.training import Observer
    from grpo_replay.training.run import run_training

    class Listener(Observer):
        heard: list[str] = []  # noqa: RUF012

        def on_notice(self, text):
            self.heard.append(text)

    settings = [*SETTINGS, "replay.capacity_rollouts=32", "eval.benchmarks=[]"]
    run_training(load_recipe("tiny", settings), tmp_path / "run", False, Listener())
    (notice,) = Listener.heard
    assert "replay.capacity_rollouts 32 binds" in notice
