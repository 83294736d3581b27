"""`verify_run` passes right runs and names what was tampered with in wrong ones."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from edited_columns import edit
from small_runs.synthetic import SyntheticRun, write_synthetic_run

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.priorities import COLUMNS
from grpo_replay.storage.rollout_log import step_path
from grpo_replay.storage.starts import record_start
from grpo_replay.storage.stored_recipe import read_recipe_file

CHECKS = [
    "files", "groups", "kept flags", "group statistics", "advantages", "trained",
    "stored when drawn", "draw counts", "drawn units", "ages", "probabilities",
    "metrics", "checkpoints",
]  # fmt: skip

QUERY = {"unit": "query", "priority": "group_std"}
FIFO = {"preset": "fifo", "composition": "buffer_only", "priority": "uniform"} | {
    "max_age_steps": None,
    "warmup_steps": 0,
    "capacity_rollouts": 50,
}
RUNS = {
    "ours": {},
    "ours, alpha 1000": {"priority_exponent": 1000.0, "ratio": 3.0},
    "ours, zero variance kept": {"drop_zero_variance": False},
    "pool of rollouts, alpha 0": {"composition": "pool", "priority_exponent": 0.0},
    "queries, tight capacity": {**QUERY, "capacity_rollouts": 40, "with_replacement": True},
    "queries, unused first": {**QUERY, "unused_first": True, "ratio": 1.5},
    "fifo, positive bias": {**FIFO, "positive_fraction": 0.5},
    "fifo, without replacement": {**FIFO, "with_replacement": False, "max_age_steps": 2},
    "grpo": {"preset": "grpo"},
}


def write_run(folder, steps=30, **replay):
    """A run to verify; step 7 has no survivor, steps 15 and 30 have checkpoints."""
    write_synthetic_run(folder, steps=steps, steps_without_survivors=[7], **replay)


def failed(folder):
    return {check.name for check in verify_run(folder).checks if not check.passed}


def detail(folder, name):
    (check,) = [check for check in verify_run(folder).checks if check.name == name]
    assert not check.passed
    return check.detail


@pytest.mark.parametrize("name", RUNS)
def test_a_correct_run_passes_every_check(name, tmp_path):
    write_run(tmp_path, **RUNS[name])
    report = verify_run(tmp_path)
    assert [check.name for check in report.checks] == CHECKS
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.steps == 30
    compared = {check.name: check.checked for check in report.checks}
    assert compared["advantages"] > 300
    assert (compared["probabilities"] > 50) == (name != "grpo")
    assert json.loads(json.dumps(report.to_json()))["passed"] is True


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


@pytest.fixture
def run(whole_run, tmp_path):
    return shutil.copytree(whole_run, tmp_path / "run")


def drop_row(path, row=0):
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table.slice(0, row), table.slice(row + 1)]), path)


def rollouts_at(run, step):
    return step_path(run / "rollouts", step)


def draws_at(run, step):
    return step_path(run / "draws", step)


def draw_one_more(run):
    table = pq.read_table(draws_at(run, 15))
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), draws_at(run, 15))


def draw_a_fresh_rollout(run):
    born_now = pq.read_table(rollouts_at(run, 15)).to_pylist()
    survivor = next(row["rollout_id"] for row in born_now if row["kept"])
    row = edit(draws_at(run, 15), "rollout_id", lambda _: survivor)
    edit(draws_at(run, 15), "age_steps", lambda _: 0, row)


def in_rollouts(column, change, step=12, row=None):
    return lambda run: edit(rollouts_at(run, step), column, change, row)


def in_draws(column, change):
    return lambda run: edit(draws_at(run, 15), column, change)


PLANTED = {
    # the error, the check that finds it, and the place that it names
    "an advantage": (in_rollouts("advantage", lambda a: a * 1.001), "advantages", "step 12"),
    "a reward": (in_rollouts("reward", lambda r: -r, row=0), "group statistics", "step 12"),
    "a birth step": (in_rollouts("birth_step", lambda b: b - 1), "groups", "birth_step 11"),
    "a policy version": (
        in_rollouts("policy_version", lambda v: v - 1), "groups",
        "policy_version 10, policy_version_end 11",
    ),
    "a last policy version": (
        in_rollouts("policy_version_end", lambda v: v - 1), "groups",
        "policy_version 11, policy_version_end 10",
    ),
    "a kept flag": (in_rollouts("kept", lambda _: True, step=7), "kept flags", "step 7"),
    "a dropped rollout that trained": (
        in_rollouts("tokens", lambda _: 3, step=7, row=0), "trained", "step 7",
    ),
    "a survivor that did not train": (in_rollouts("tokens", lambda _: None), "trained", "step 12"),
    "a rollout less": (lambda run: drop_row(rollouts_at(run, 12), 5), "groups", "group 1201"),
    "no rollouts of a step": (lambda run: rollouts_at(run, 12).unlink(), "files", "step_000012"),
    "no draws of a step": (
        lambda run: draws_at(run, 12).unlink(), "files", "draws/step_000012.parquet",
    ),
    "a draw less": (lambda run: drop_row(draws_at(run, 15)), "draw counts", "step 15"),
    "a draw more": (draw_one_more, "drawn units", "step 15"),
    "a draw of the birth step": (draw_a_fresh_rollout, "stored when drawn", "step 15"),
    "an age": (in_draws("age_steps", lambda age: age + 1), "ages", "step 15: rollout"),
    "a probability": (
        in_draws("probability", lambda p: p * (1 + 1e-6)), "probabilities", "step 15: rollout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_named_with_its_place(run, name):
    plant, check, place = PLANTED[name]
    plant(run)
    found = {each.name: each.detail for each in verify_run(run).checks if not each.passed}
    assert place in found[check]
    if name == "a probability":  # nothing else depends on it
        assert found.keys() == {check}


def test_a_run_in_trl_is_verified_without_manifests(run):
    shutil.rmtree(run / "checkpoints")
    report = verify_run(run)
    assert report.passed and [check.name for check in report.checks] == CHECKS[:-1]


def test_a_split_query_is_named(tmp_path):
    write_run(tmp_path, **QUERY)
    drop_row(draws_at(tmp_path, 15))
    assert "step 15" in detail(tmp_path, "drawn units")


ZERO = """
def zero(columns):
    return (columns["completion_tokens"] % 2).astype(float)

zero.columns, zero.epsilon = ("completion_tokens",), False
"""


@pytest.mark.parametrize(
    "replay",
    [{**QUERY, "ratio": 3.0}, {"unused_first": True, "ratio": 1.0}],
    ids=["queries, all drawn", "unused first"],
)
def test_rollouts_of_priority_zero_are_not_missed_in_the_draws(tmp_path, replay):
    (tmp_path / "zero.py").write_text(ZERO)
    replay = {"max_age_steps": 2, **replay, "priority": f"{tmp_path}/zero.py:zero"}
    write_synthetic_run(tmp_path / "run", **replay)
    report = verify_run(tmp_path / "run")
    assert report.passed, [check for check in report.checks if not check.passed]
    drop_row(draws_at(tmp_path / "run", 15))
    assert "draw counts" in failed(tmp_path / "run")


EVERY_COLUMN = f"""
def every(columns):
    return columns["completion_tokens"] + columns["truncated"] - columns["behavior_logprob_mean"]

every.columns = {tuple(COLUMNS)}
"""


def test_a_priority_may_read_every_column_that_the_buffer_has(tmp_path):
    (tmp_path / "every.py").write_text(EVERY_COLUMN)
    write_synthetic_run(tmp_path / "run", priority=f"{tmp_path}/every.py:every")
    report = verify_run(tmp_path / "run")
    assert report.passed, [check for check in report.checks if not check.passed]


def test_a_broken_parquet_file_is_named_without_a_traceback(run):
    draws_at(run, 12).write_bytes(b"PAR1 and no more")
    with pytest.raises(SnapshotError, match=r"step_000012\.parquet"):
        verify_run(run)


def test_a_gap_and_a_duplicate_in_the_metrics_are_named(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:10], *lines[11:]]) + "\n")
    assert "line 11 is step 12" in detail(run, "files")
    path.write_text("\n".join([*lines[:10], *lines[9:]]) + "\n")
    assert "line 11 is step 10" in detail(run, "files")


def change_recipe(run, section, **changes):
    path = run / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe[section] |= changes
    path.write_text(yaml.safe_dump(recipe))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ratio": 0.6}, "draw counts"),
        ({"max_age_steps": 4}, "stored when drawn"),
        ({"max_age_steps": 6}, "probabilities"),
        ({"priority_exponent": 0.6}, "probabilities"),
        ({"composition": "pool"}, "draw counts"),
        ({"capacity_rollouts": 40}, "metrics"),
    ],
)
def test_a_run_of_another_recipe_fails(run, change, expected):
    change_recipe(run, "replay", **change)
    assert expected in failed(run)


def test_an_interrupted_run_is_verified_up_to_its_last_line(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:25]) + "\n")
    report = verify_run(run)
    assert report.passed and report.steps == 25


def test_a_resume_without_the_buffer_passes(tmp_path, monkeypatch):
    original = SyntheticRun.step

    def forgetful(made, step):
        if step == 16:
            made.buffer = ReplayBuffer(made.recipe.replay, made.recipe.sampling.group_size)
        return original(made, step)

    monkeypatch.setattr(SyntheticRun, "step", forgetful)
    write_run(tmp_path)
    assert "draw counts" in failed(tmp_path) or "metrics" in failed(tmp_path)
    record_start(tmp_path, read_recipe_file(tmp_path / "recipe.yaml"), 15, empty_buffer=True)
    report = verify_run(tmp_path)
    assert report.passed, [check for check in report.checks if not check.passed]


EDITED = ["reward", "frac_reward_zero_std", "fresh/rollouts", "fresh/clip_fraction", "replay/ratio",
          "replay/clip_fraction", "replay/age_mean", "replay/ess", "buffer/rollouts",
          "cost/generated_tokens", "cost/generated_rollouts", "cost/trained_tokens",
          "cost/trained_rollouts"]  # fmt: skip


def test_a_finished_run_without_its_last_line_of_metrics_is_named(run):
    path = run / "metrics.jsonl"
    (run / "summary.json").write_text(json.dumps({"steps": len(path.read_text().splitlines())}))
    assert failed(run) == set()
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:-1]))
    assert failed(run) == {"files"}


def test_every_metric_that_was_edited_in_a_line_of_its_own_is_counted(run):
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, name in zip(lines[15:], EDITED, strict=False):
        line[name] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert failed(run) == {"metrics"}
    said = detail(run, "metrics")
    assert f"step 16: {EDITED[0]}" in said and f"and {len(EDITED) - 5} more" in said
