"""A run in shadow trains as plain GRPO, bit for bit, and says what replay would have done."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from buffer_makers import make_rollout
from slow_tests import slow_except
from small_runs.asynchronous import async_recipe, replay_run, train_async_run
from small_runs.trained import (
    FinishedRun,
    interrupted,
    same_files,
    same_weights,
    train_small_run,
)

from grpo_replay.errors import RecipeError
from grpo_replay.lab.inspection.compute import outcomes_by_age
from grpo_replay.lab.inspection.rebuild import what_if
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import resolve_recipe
from grpo_replay.replay.insertion import entries_of
from grpo_replay.training.shadow import (
    advice,
    probe_indices,
    shadow_metrics,
    summarise_replay,
)
from grpo_replay.types import Draw

NO_EVAL = {"eval": {"benchmarks": []}}
GRPO = {"replay": {"preset": "grpo", "warmup_steps": 2, "max_age_steps": 3}}
SHADOWS = {
    "pool": {"preset": "uniform"},
    "fifo": {"preset": "fifo", "warmup_steps": 0, "drop_zero_variance": True, "ratio": 1.0},
}
OF_THE_BUFFER = ("replay/", "buffer/", "shadow/")


def shadow(**replay) -> dict:
    return {"replay": {"shadow": True, "probe_every_steps": 3, **replay}, **NO_EVAL}


def of_training(run: FinishedRun) -> list[dict]:
    """Metrics but for the clock and what the buffer says."""
    return [
        {name: value for name, value in line.items() if not name.startswith(OF_THE_BUFFER)}
        for line in run.timeless_metrics
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, processes) -> FinishedRun:
    return train_small_run(tmp_path_factory.mktemp("plain") / "run", **GRPO, **NO_EVAL)


@pytest.fixture(scope="module")
def in_shadow(tmp_path_factory, processes) -> FinishedRun:
    return train_small_run(tmp_path_factory.mktemp("shadow") / "run", **shadow())


# --- training is plain GRPO -----------------------------------------------------------------------


@pytest.mark.parametrize("name", slow_except(["ours"], ["ours", *SHADOWS]))
def test_weights_rollouts_and_metrics_are_those_of_grpo(tmp_path, plain, in_shadow, name):
    run = in_shadow
    if name in SHADOWS:
        run = train_small_run(tmp_path / "run", **shadow(**SHADOWS[name]))
    assert same_weights(plain.weights(), run.weights())
    assert same_files(plain.path, run.path, "rollouts") == 10
    assert of_training(plain) == of_training(run)
    assert len(run.all_draws) > 20 and plain.all_draws == []


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"lora": {"r": 4}}], ids=["whole", "LoRA"])
def test_two_ranks_in_shadow_train_as_two_ranks_of_grpo(tmp_path, model):
    runs = []
    for name, words in (
        ("grpo", ["replay.preset=grpo"]),
        ("shadow", ["replay.shadow=true", "replay.probe_every_steps=2"]),
    ):
        words += ["run.steps=8", "replay.warmup_steps=2", "eval.benchmarks=[]"]
        words += [f"model.lora.r={model['lora']['r']}"] if model else []
        done = subprocess.run(
            [sys.executable, "-m", "grpo_replay", "train", "tiny", "--num-processes", "2",
             "--output-dir", str(tmp_path / name), *(x for w in words for x in ("--set", w))],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        runs.append(FinishedRun(tmp_path / name, None))
    assert same_weights(*(run.weights() for run in runs))
    assert of_training(runs[0]) == of_training(runs[1])
    assert sum(row["tokens"] is not None for row in runs[1].all_draws) > 50
    assert all(check.failed == 0 for check in verify_run(tmp_path / "shadow").checks)


@pytest.mark.slow
def test_an_asynchronous_run_in_shadow_trains_as_grpo_does(tmp_path, fake_server, processes):
    """The steps of a run of GRPO, repeated from its journal in shadow. Its recipe is changed by
    hand, because a journal is only repeated under the rules that it was recorded under."""
    recipe = async_recipe([fake_server.url], {"replay": {"preset": "grpo"}})
    run = train_async_run(recipe, tmp_path / "grpo")
    sections = yaml.safe_load((run.path / "recipe.yaml").read_text())
    sections["replay"] |= {"preset": "ours", "shadow": True, "probe_every_steps": 1}
    (run.path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    repeated = replay_run(FinishedRun(run.path, resolve_recipe([sections])), tmp_path / "shadow")
    assert same_weights(run.weights(), repeated.weights())
    assert same_files(run.path, repeated.path, "rollouts") == 6
    assert len(repeated.all_draws) > 10


def test_killed_and_resumed_equals_never_killed(tmp_path, in_shadow, processes):
    sections = shadow() | {"checkpoint": {"every_steps": 4}}
    interrupted(tmp_path / "run", 6, **sections)
    run = train_small_run(tmp_path / "run", resume=True, **sections)
    assert same_weights(in_shadow.weights(), run.weights())
    assert same_files(in_shadow.path, run.path, "draws") == 10
    assert in_shadow.timeless_metrics == run.timeless_metrics


# --- what the buffer says -------------------------------------------------------------------------


@pytest.mark.parametrize("learning_rate", slow_except([1e-3], [1e-3, 1e-30]))
def test_a_probe_measures_what_the_update_of_a_replaying_run_measures(tmp_path, learning_rate):
    """Both runs have the same policy until the first draw is trained on. At a rate of almost 0
    they have it for ever, and every ratio is 1."""
    same = {"batch": {"updates_per_step": 1}, "optimizer": {"learning_rate": learning_rate}}
    quiet = shadow(probe_rollouts=1000) | same
    loud = {"replay": {"warmup_steps": 2}, **NO_EVAL, **same}
    first, second = (
        train_small_run(tmp_path / name, run={"steps": 3}, **sections)
        for name, sections in (("shadow", quiet), ("replay", loud))
    )
    probed, trained = first.draws(3), second.draws(3)
    assert [row["rollout_id"] for row in probed] == [row["rollout_id"] for row in trained] != []
    for one, other in zip(probed, trained, strict=True):
        assert one["tokens"] == other["tokens"]
        for name in ("clip_fraction", "log_ratio_mean", "approx_kl", "ratio_max", "entropy"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    moved = max(abs(row["log_ratio_mean"]) for row in probed)
    assert moved > 0.01 if learning_rate == 1e-3 else moved < 1e-5
    a, b = first.metrics[2], second.metrics[2]
    for name in ("replay/clip_fraction", "replay/ratio_ess", "replay/approx_kl"):
        assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


def test_the_files_of_a_run_in_shadow_are_verified_and_inspected(tmp_path, in_shadow):
    checks = verify_run(in_shadow.path).checks
    assert (
        all(check.failed == 0 for check in checks) and sum(check.checked for check in checks) > 1000
    )
    probes = [row["step"] for row in in_shadow.all_draws if row["tokens"] is not None]
    assert set(probes) == {3, 6, 9}
    source = open_source(in_shadow.path)
    assert max(outcomes_by_age(source)) >= 3
    found = what_if(source, ["max_age_steps=1"])
    assert found.same["age_mean"] > 1.2 > found.changed["age_mean"] == 1.0
    assert [*found.changes] == ["max_age_steps"]
    assert "shadow" not in what_if(source, ["preset=fifo"]).changes  # which keeps equal groups


def test_verification_finds_an_outcome_that_a_probe_did_not_measure(tmp_path, in_shadow):
    shutil.copytree(in_shadow.path, tmp_path / "run")
    path = tmp_path / "run/draws/step_000006.parquet"
    table = pq.read_table(path)
    halved = pa.array([None if each is None else each / 2 for each in
                       table["approx_kl"].to_pylist()], pa.float64())  # fmt: skip
    index = table.schema.get_field_index("approx_kl")
    pq.write_table(table.set_column(index, table.schema.field(index), halved), path)
    failed = [check.name for check in verify_run(tmp_path / "run").checks if check.failed]
    assert failed == ["metrics"]


def test_the_summary_says_what_replay_would_do_and_cost(in_shadow):
    summary = json.loads((in_shadow.path / "summary.json").read_text())
    replay = summary["replay"]
    assert summary["replayed_rollouts"] == 0 and replay["shadow"]
    drawn = sum(line["replay/rollouts"] for line in in_shadow.metrics)
    trained = sum(line["cost/trained_rollouts"] for line in in_shadow.metrics)
    generated = sum(line["cost/generated_rollouts"] for line in in_shadow.metrics)
    expected = drawn / (trained + drawn + replay["mu"] * generated)
    assert replay["compute_share"] == pytest.approx(expected)
    assert 0 < replay["means"]["shadow/new_prompt_fraction"] <= 1
    assert 0 < replay["shadow_time_share"] < 1


# --- by hand --------------------------------------------------------------------------------------


def draw_of(rollouts: list, ages: list[int]) -> Draw:
    count = len(rollouts)
    return Draw(entries_of(rollouts), np.full(count, 0.1), np.array(ages), 1.0, 0.0)


def test_a_probe_takes_rollouts_of_all_ages_by_turns():
    draw = draw_of([make_rollout(i) for i in range(6)], [1, 1, 1, 4, 2, 1])
    assert probe_indices(draw, 4) == [0, 1, 3, 4]  # the first of ages 1, 4 and 2; then of age 1
    assert probe_indices(draw, 100) == list(range(6))
    assert probe_indices(Draw.empty(), 4) == []


def test_rare_successes_are_those_that_the_fresh_batch_lacks():
    def rollout(number: int, prompt: str, advantage: float, correct: int):
        made = make_rollout(number, advantage=advantage, group_correct=correct)
        return replace(made, prompt_id=prompt)

    fresh = [rollout(0, "a", 1.0, 4), rollout(1, "b", -1.0, 4)]
    drawn = [
        rollout(2, "a", 2.0, 1),  # rare, but the fresh batch has a success
        rollout(3, "b", 2.0, 2),  # rare, and the fresh batch only has a failure
        rollout(4, "c", 2.0, 2),  # of a new prompt
        rollout(5, "c", -0.5, 2),  # a failure
        rollout(6, "d", 1.0, 3),  # three of eight: not rare
    ]
    found = shadow_metrics(draw_of(drawn, [1] * 5), fresh, group_size=8, seconds=0.5)
    assert found == {
        "shadow/rare_success_fraction": 0.4, "shadow/new_prompt_fraction": 0.5,
        "cost/shadow_seconds": 0.5,
    }  # fmt: skip
    assert set(shadow_metrics(Draw.empty(), fresh, 8, 0.5).values()) == {None, 0.5}


def test_compute_is_counted_in_rollouts_trained_on():
    line = {
        "cost/mu": 2.0, "replay/rollouts": 10, "cost/trained_rollouts": 30,
        "cost/generated_rollouts": 10, "cost/shadow_seconds": 1.0, "step_time": 50.0,
    }  # fmt: skip
    settings = resolve_recipe([{}]).replay
    replaying = summarise_replay(
        [line, {**line, "cost/mu": 3.0}, {**line, "cost/mu": 4.0}], settings
    )
    assert replaying["mu"] == 3.0
    assert replaying["compute_share"] == pytest.approx(30 / (90 + 3 * 30))
    unknown = summarise_replay([{**line, "cost/mu": None}], settings)
    assert unknown["compute_share"] is unknown["advice"] is None


def test_the_advice_quotes_the_measured_results():
    results = yaml.safe_load((Path(__file__).parents[2] / "docs/results.yaml").read_text())

    def quoted(each):
        return f"{each['mean']:+.1f} [{each['low']:+.1f}, {each['high']:+.1f}]"

    found, rare = results["tiny-long"], results["tiny-rare"]["equal_compute_5"]["successes"]
    assert f"at {found['mu']} `ours` was {quoted(found['difference']['ours'])}" in advice(5.0)
    assert f"replay.positive_fraction=1 was {quoted(rare)} ahead at equal compute" in advice(5.0)
    assert "leave it off" in advice(0.7) and "leave it open" in advice(2.0)
    assert advice(None) is None


@pytest.mark.parametrize(
    ("replay", "words"),
    [
        ({"preset": "grpo"}, "preset 'grpo'"),
        ({"ratio": 0.0}, "replay.ratio 0"),
        ({"preset": "fifo", "warmup_steps": 0}, "drop_zero_variance"),
    ],
)
def test_a_shadow_of_nothing_and_of_equal_groups_is_refused(replay, words):
    with pytest.raises(RecipeError, match=words):
        resolve_recipe([{"replay": {"shadow": True, **replay}}])
