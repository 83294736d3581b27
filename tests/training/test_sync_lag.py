"""`run.sync_every_steps` above 1: the sampler lags behind the trainer on purpose."""

import json

import pytest
from small_runs.trained import interrupted, same_files, same_weights, steps_of, train_small_run

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine.models import load_tokenizer
from grpo_replay.errors import LogprobGapError
from grpo_replay.evaluation.benchmarks import plan_evaluation
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.sampling.hf import HfSampler
from grpo_replay.sampling.sampler_protocol import SamplerOpening
from grpo_replay.training.weight_sync import read_pushed_weights

EVERY = 4
LAG = {
    "run": {"steps": 10, "sync_every_steps": EVERY},
    "loss": {"behavior_logprobs": "sampler"},
    "checkpoint": {"every_steps": 3, "keep": 100},
    "replay": {"preset": "fifo", "capacity_rollouts": 48, "ratio": 1.0},
    "eval": {"benchmarks": ["tiny_add"], "max_problems": 4, "samples": 1, "temperature": 1.0,
             "reward": "minerva"},
}  # fmt: skip


@pytest.fixture(scope="module")
def lagging_run(tmp_path_factory, processes):
    return train_small_run(tmp_path_factory.mktemp("lag") / "run", **LAG)


def last_push(step: int) -> int:
    return (step - 1) // EVERY * EVERY


def test_every_file_has_the_version_of_the_last_push(lagging_run):
    run = lagging_run
    for step in steps_of(run):
        versions = {(r["policy_version"], r["policy_version_end"]) for r in run.rollouts(step)}
        assert versions == {(last_push(step), last_push(step))}
        assert run.metrics[step - 1]["sampler/policy_version"] == last_push(step)
    for step in (3, 6, 9, 10):  # that of the weights in model/, pushed or not
        state = json.loads((run.path / f"checkpoints/step_{step:06d}/state.json").read_text())
        assert state["policy_version"] == step
    stored = run.snapshot(10).rollouts
    assert {(r.birth_step, r.policy_version) for r in stored} == {(9, 8), (10, 8)}
    report = verify_run(run.path)
    assert report.passed, [check for check in report.checks if not check.passed]


def test_behaviour_log_probs_are_the_sampler_s_and_the_gap_grows_while_it_lags(lagging_run):
    for step in steps_of(lagging_run):
        for row in lagging_run.rollouts(step):
            assert row["behavior_logprobs"] == row["sampler_logprobs"]
    gaps = [line["sampler/logprob_gap_mean"] for line in lagging_run.metrics]
    for step, gap in enumerate(gaps, start=1):
        in_step = last_push(step) == step - 1
        assert (gap < 1e-5) == in_step, step
    assert gaps[3] > gaps[1] > 1e-4
    assert all(gap > 0.005 for gap in (gaps[3], gaps[7]))


def test_a_sampler_that_is_not_the_policy_is_still_refused_after_a_push(
    tmp_path, processes, monkeypatch
):
    def push_other_weights(engine, sampler, version, *_):
        tensors = engine.named_full_tensors(2**29)
        sampler.load_weights(((name, tensor.flip(0)) for name, tensor in tensors), version)

    monkeypatch.setattr("grpo_replay.training.synchronous.sync_weights", push_other_weights)
    sections = LAG | {"run": {"steps": 10, "sync_every_steps": 2}, "eval": {"benchmarks": []}}
    with pytest.raises(LogprobGapError, match="step 3, weight sync 2"):
        train_small_run(tmp_path / "run", **sections)


def test_a_checkpoint_between_pushes_holds_the_weights_of_the_sampler(lagging_run):
    folder = lagging_run.path / "checkpoints"
    held = {step: read_pushed_weights(folder / f"step_{step:06d}") for step in (3, 6, 9, 10)}
    assert {step: version for step, (_, version) in held.items()} == {3: 0, 6: 4, 9: 8, 10: 8}
    assert held[3][0] == {}  # the initial model, which the recipe names
    assert same_weights(held[9][0], held[10][0])
    name = "model.embed_tokens.weight"
    assert not held[6][0][name].equal(lagging_run.weights(6)[name])


def test_the_final_evaluation_is_of_the_final_policy(lagging_run):
    """Evaluated in step 10, two steps after the last push, and again by a run in step."""
    recipe = lagging_run.recipe
    rows = read_report(lagging_run.path / "eval/step_000010.json").samples
    sampler = HfSampler.open(
        SamplerOpening.from_recipe(
            recipe, str(lagging_run.path / "checkpoints/latest/model"), Comm()
        )
    )
    tokenizer = load_tokenizer(recipe.model)
    plan = plan_evaluation(tokenizer, recipe)
    of_key = {each.request.key: each for each in plan.samples}
    texts = {
        of_key[c.key].problem.problem_id: tokenizer.decode(c.token_ids, skip_special_tokens=True)
        for c in sampler.generate([each.request for each in plan.samples])
    }
    logged = dict(zip(rows["problem_id"].to_pylist(), rows["completion_text"].to_pylist()))
    assert logged == texts and len(texts) == 4


@pytest.mark.slow
def test_a_run_killed_between_pushes_and_resumed_is_the_run_never_killed(
    lagging_run, tmp_path, processes
):
    interrupted(tmp_path / "run", 8, **LAG)
    resumed = train_small_run(tmp_path / "run", resume=True, **LAG)
    assert resumed.timeless_metrics == lagging_run.timeless_metrics
    assert same_files(lagging_run.path, resumed.path, "rollouts") == 10
    assert same_files(lagging_run.path, resumed.path, "draws") == 10
    assert same_weights(lagging_run.weights(10), resumed.weights(10))
