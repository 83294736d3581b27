"""`verify_run` passes right runs and names what was tampered with in wrong ones."""

import fcntl
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from slow_tests import slow_except
from small_runs.synthetic import SyntheticRun, write_synthetic_run

from grpo_replay.errors import SnapshotError
from grpo_replay.lab.verification import file_checks
from grpo_replay.lab.verification.file_checks import FileChecks, _read_safetensors_header
from grpo_replay.lab.verification.rollout_checks import _last_pushes
from grpo_replay.lab.verification.run_files import read_run_files
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.replay import ReplayBuffer
from grpo_replay.storage.recipe_history import RecipeHistory, change_file, write_recipe
from grpo_replay.storage.rollout_log import step_path

CHECKS = [
    *(
        "files",
        "groups",
        "policy versions",
        "kept flags",
        "group statistics",
        "advantages",
        "trained",
    ),
    *("stored when drawn", "draw counts", "drawn units", "ages", "probabilities"),
    *("metrics", "snapshots", "checkpoints"),
]

QUERY = {"unit": "query", "priority": "group_std"}
FIFO = {"preset": "fifo", "composition": "buffer_only", "priority": "uniform"} | {
    "max_age_steps": None,
    "warmup_steps": 0,
    "capacity_rollouts": 50,
}
RUNS = {
    "ours": {},
    "ours, with replacement": {"with_replacement": True},
    "ours, alpha 100": {"priority_exponent": 100.0, "ratio": 3.0},
    "ours, alpha 1000": {"priority_exponent": 1000.0, "ratio": 3.0},
    "ours, alpha 0": {"priority_exponent": 0.0, "ratio": 1.0},
    "ours, tight capacity": {"capacity_rollouts": 40},
    "uniform rollouts": {"priority": "uniform"},
    "pool of rollouts": {"composition": "pool"},
    "pool of queries": {**QUERY, "composition": "pool"},
    "fresh-anchored queries": QUERY,
    "queries, tight capacity": {**QUERY, "capacity_rollouts": 40, "with_replacement": True},
    "fifo": FIFO,
    "fifo, zero variance dropped": {**FIFO, "drop_zero_variance": True},
    "fifo, without replacement": {**FIFO, "with_replacement": False},
    "fifo, unused first": {**FIFO, "with_replacement": False, "unused_first": True},
    "fifo, positive bias": {**FIFO, "positive_fraction": 0.5},
    "queries, unused first": {**QUERY, "unused_first": True, "ratio": 1.5},
    "ours, zero variance kept": {"drop_zero_variance": False},
    "fifo, age limit": {**FIFO, "max_age_steps": 2},
    "grpo": {"preset": "grpo"},
    "ratio 0": {"ratio": 0.0},
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


QUICK = ["ours", "ours, tight capacity", "pool of queries", "fifo", "fifo, positive bias", "grpo"]


@pytest.mark.parametrize("name", slow_except(QUICK, RUNS))
def test_a_correct_run_passes_every_check(name, tmp_path):
    write_run(tmp_path, **RUNS[name])
    report = verify_run(tmp_path)
    assert [check.name for check in report.checks] == CHECKS
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.steps == 30
    replays = name not in ("grpo", "ratio 0")
    compared = {check.name: check.checked for check in report.checks}
    assert compared["advantages"] > 300
    assert (compared["probabilities"] > 50) == replays
    assert (compared["snapshots"] > 60) == replays
    document = json.loads(json.dumps(report.to_json()))
    assert document["passed"] is True
    assert len(document["checks"]) == len(CHECKS) == 15


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


@pytest.fixture
def run(whole_run, tmp_path):
    return shutil.copytree(whole_run, tmp_path / "run")


def edit(path, column, change, row=None):
    """Rewrite one column of a file, keeping its marks."""
    table = pq.read_table(path)
    values = table[column].to_pylist()
    row = next(i for i, v in enumerate(values) if v is not None) if row is None else row
    values[row] = change(values[row])
    index = table.column_names.index(column)
    array = pa.array(values, table.schema.field(index).type)
    table = table.set_column(index, table.schema.field(index), array)
    pq.write_table(table, path)
    return row


def drop_row(path, row=0):
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table.slice(0, row), table.slice(row + 1)]), path)


def rollouts_at(run, step):
    return step_path(run / "rollouts", step)


def draws_at(run, step):
    return step_path(run / "draws", step)


def test_one_changed_advantage_is_named(run):
    row = edit(rollouts_at(run, 12), "advantage", lambda a: a * 1.001)
    changed = pq.read_table(rollouts_at(run, 12)).slice(row, 1).to_pylist()[0]
    place = f"step 12, group {changed['group_id']}, rollout {changed['rollout_id']}: advantage"
    assert place in detail(run, "advantages")


def test_one_changed_age_is_named(run):
    edit(draws_at(run, 15), "age_steps", lambda age: age + 1)
    assert "step 15, rollout" in detail(run, "ages")
    assert "age_steps" in detail(run, "ages")


def test_one_draw_less_is_named(run):
    drop_row(draws_at(run, 15))
    assert "step 15: drew" in detail(run, "draw counts")
    assert "step 15: replay/rollouts" in detail(run, "metrics")


def test_one_draw_more_is_named(run):
    table = pq.read_table(draws_at(run, 15))
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), draws_at(run, 15))
    assert "step 15: drew" in detail(run, "draw counts")
    assert "drawn twice" in detail(run, "drawn units")


def test_one_changed_probability_is_named(run):
    edit(draws_at(run, 15), "probability", lambda p: p * (1 + 1e-6))
    assert failed(run) == {"probabilities"}
    assert "step 15, rollout" in detail(run, "probabilities")


def test_a_dropped_rollout_row_is_named(run):
    drop_row(rollouts_at(run, 12), row=5)
    assert "step 12, group 1201: completion indices [0, 2, 3]" in detail(run, "groups")


@pytest.mark.parametrize(
    ("column", "found"), [("policy_version", "10 to 11"), ("policy_version_end", "11 to 10")]
)
def test_a_changed_policy_version_is_named(run, column, found):
    edit(rollouts_at(run, 12), column, lambda version: version - 1)
    assert failed(run) == {"policy versions", "snapshots"}
    assert f"has policy_version {found}, the last push was 11" in detail(run, "policy versions")


def test_a_missing_file_is_named(run):
    rollouts_at(run, 12).unlink()
    assert "step_000012.parquet is missing" in detail(run, "files")
    assert "not stored then" in detail(run, "stored when drawn")


def test_a_missing_draw_file_is_named(run):
    draws_at(run, 12).unlink()
    assert "step 12: drew 0" in detail(run, "draw counts")


def test_a_changed_reward_is_named(run):
    edit(rollouts_at(run, 12), "reward", lambda reward: -reward, row=0)
    assert failed(run) & {"kept flags", "advantages", "group statistics"}


def test_a_changed_birth_step_is_named(run):
    edit(rollouts_at(run, 12), "birth_step", lambda birth: birth - 1)
    assert "has birth_step 11" in detail(run, "groups")


@pytest.mark.parametrize(
    ("every", "pushed"),
    [
        ([3, 3, 3, 3, 3], [0, 0, 0, 3, 3]),
        ([1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
        ([3, 3, 1, 1, 1], [0, 0, 2, 3, 4]),  # a resume without a lag pushes the policy
        ([1, 1, 3, 3, 3], [0, 1, 2, 3, 3]),
    ],
)
def test_the_last_push_before_each_step_by_hand(every, pushed):
    """`run.sync_every_steps` of five steps, which resumes change."""
    recipes = [SimpleNamespace(run=SimpleNamespace(sync_every_steps=each)) for each in every]
    run = SimpleNamespace(
        rows_of_step=dict.fromkeys(range(1, 6)), recipe_at=lambda step: recipes[step - 1]
    )
    assert list(_last_pushes(run).values()) == pushed


def test_a_wrong_kept_flag_is_named(run):
    edit(rollouts_at(run, 7), "kept", lambda kept: True)
    assert "step 7" in detail(run, "kept flags")


def test_a_draw_from_the_birth_step_is_named(run):
    born_now = pq.read_table(rollouts_at(run, 15)).to_pylist()
    survivor = next(row["rollout_id"] for row in born_now if row["kept"])
    row = edit(draws_at(run, 15), "rollout_id", lambda _: survivor)
    edit(draws_at(run, 15), "age_steps", lambda _: 0, row)
    assert f"rollout {survivor} was drawn but not stored" in detail(run, "stored when drawn")
    assert "age 0 is outside 1 to 5" in detail(run, "ages")


def test_a_dropped_rollout_that_trained_is_named(run):
    edit(rollouts_at(run, 7), "tokens", lambda _: 3, row=0)
    assert "step 7" in detail(run, "trained")


def test_a_fresh_survivor_that_did_not_train_is_named(run):
    edit(rollouts_at(run, 12), "tokens", lambda _: None)
    assert "(-1: not trained)" in detail(run, "trained")


def test_a_split_query_is_named(tmp_path):
    write_run(tmp_path, **QUERY)
    drop_row(draws_at(tmp_path, 15))
    assert "without the other rollouts of its query" in detail(tmp_path, "drawn units")


@pytest.mark.parametrize("column", ["times_used", "last_used_step"])
def test_a_changed_use_in_a_checkpoint_is_named(run, column):
    path = run / "checkpoints" / "step_000015" / "buffer.parquet"
    row = edit(path, column, lambda value: value + 1)
    rollout_id = pq.read_table(path)["rollout_id"][row]
    assert f"checkpoint 15, rollout {rollout_id}: {column}" in detail(run, "snapshots")


def test_log_probs_that_changed_after_birth_are_named(run):
    path = run / "checkpoints" / "step_000015" / "buffer.parquet"
    edit(path, "behavior_logprobs", lambda values: [values[0] + 1e-6, *values[1:]])
    assert "behavior_logprobs is not what it was at birth" in detail(run, "snapshots")


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("advantage", lambda value: value + 0.5),
        ("reward", lambda value: value + 1),
        ("prompt_id", lambda value: "another"),
        ("prompt_token_ids", lambda value: [value[0] + 1, *value[1:]]),
        ("completion_token_ids", lambda value: [*value[:-1], value[-1] + 1]),
    ],
)
def test_what_changed_after_birth_is_named(run, column, change):
    path = run / "checkpoints" / "step_000015" / "buffer.parquet"
    rollout_id = pq.read_table(path)["rollout_id"][edit(path, column, change)]
    expected = f"checkpoint 15, rollout {rollout_id}: {column} is not what it was at birth"
    assert expected in detail(run, "snapshots")


def test_a_mask_that_the_buffer_lost_is_named_and_extras_may_not_be_numbers(run):
    snapshot = run / "checkpoints" / "step_000015" / "buffer.parquet"
    for path in (snapshot, *(rollouts_at(run, step) for step in range(11, 16))):
        table = pq.read_table(path)
        extras = pa.array([[1.0, float("nan")]] * len(table))
        pq.write_table(table.append_column("extra_x", extras), path)
    assert "snapshots" not in failed(run)
    for step in range(11, 16):
        table = pq.read_table(rollouts_at(run, step))
        masks = [[True] * len(ids) for ids in table["completion_token_ids"].to_pylist()]
        table = table.append_column("completion_mask", pa.array(masks))
        pq.write_table(table, rollouts_at(run, step))
    assert "completion_mask is not what it was at birth" in detail(run, "snapshots")


def test_a_changed_priority_in_a_checkpoint_is_named(run):
    path = run / "checkpoints" / "step_000015" / "buffer.parquet"
    edit(path, "priority", lambda value: value * (1 + 1e-6))
    assert ": priority " in detail(run, "snapshots")


ZERO = """
def zero(columns):
    return (columns["completion_tokens"] % 2).astype(float)

zero.columns, zero.epsilon = ("completion_tokens",), False
"""


@pytest.mark.parametrize(
    "replay",
    [{"ratio": 3.0}, {**QUERY, "ratio": 3.0}, {"unused_first": True, "ratio": 1.0}],
    ids=["all drawn", "queries", "unused first"],
)
def test_rollouts_of_priority_zero_are_not_missed_in_the_draws(tmp_path, replay):
    (tmp_path / "zero.py").write_text(ZERO)
    replay = {"max_age_steps": 2, **replay, "priority": f"{tmp_path}/zero.py:zero"}
    write_synthetic_run(tmp_path / "run", **replay)
    report = verify_run(tmp_path / "run")
    assert report.passed, [check for check in report.checks if not check.passed]
    drop_row(draws_at(tmp_path / "run", 15))
    assert "draw counts" in failed(tmp_path / "run")


def test_foreign_files_are_named_and_not_read(run):
    (run / "eval").mkdir()
    (run / "eval/step_final.json").write_text("[]")
    (run / "eval/step_final.parquet").write_text("")
    (run / "draws/notes.txt").write_text("mine")
    shutil.copy(rollouts_at(run, 30), rollouts_at(run, 31))
    shutil.copy(rollouts_at(run, 30), rollouts_at(run, 32))
    report = verify_run(run)
    assert report.passed, [check for check in report.checks if not check.passed]
    expected = "not read: draws/notes.txt, eval (2 files), rollouts (2 files)"
    assert expected in report.unchecked


def link_to_itself(run):
    shutil.rmtree(run / "checkpoints/latest")
    (run / "checkpoints/latest").symlink_to("latest")


def no_rows(run):
    pq.write_table(pq.read_table(rollouts_at(run, 12)).slice(0, 0), rollouts_at(run, 12))


def step_as_text(run):
    path = run / "checkpoints/step_000015/state.json"
    path.write_text(path.read_text().replace('"step": 15', '"step": "15"'))


def no_facts(run):
    path = run / "checkpoints/step_000015/buffer.parquet"
    table = pq.read_table(path)
    marks = {name: value for name, value in table.schema.metadata.items() if b"buffer" not in name}
    pq.write_table(table.replace_schema_metadata(marks), path)


def metrics_folder(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


DAMAGES = {
    "latest is a loop": (link_to_itself, "checkpoints"),
    "rollouts without rows": (no_rows, "groups"),
    "text for a step": (step_as_text, "checkpoints"),
    "an empty list": (
        lambda run: (run / "files.json").write_text('{"files": {}}'),
        "written files",
    ),
    "a null id": (lambda run: edit(draws_at(run, 12), "rollout_id", lambda _: None), "contains a"),
    "a null group": (lambda run: edit(rollouts_at(run, 12), "group_id", lambda _: None), "null"),
    "no facts": (no_facts, r"buffer\.parquet: its metadata has no readable"),
    "a folder of metrics": (metrics_folder, r"metrics\.jsonl: not a file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_without_a_traceback(run, name):
    change, expected = DAMAGES[name]
    change(run)
    try:
        assert expected in failed(run)
    except SnapshotError as error:
        assert re.search(expected, str(error))


def test_a_header_of_weights_that_is_no_object_is_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ValueError, match="not an object"):
        _read_safetensors_header(path)


def test_only_a_run_that_repeats_a_journal_may_have_none(run):
    files = read_run_files(run)
    for journal in ("runs/before", None):
        recipe = files.recipe.model_copy(deep=True)
        recipe.run.__dict__["mode"] = "async"
        recipe.sampling.collection.__dict__["replay_journal"] = journal
        checks = FileChecks(replace(files, recipes=RecipeHistory(recipe)))
        checks.check()
        assert checks.journal.failed == (journal is None)


def test_each_draw_is_checked_by_the_recipe_of_its_step(run):
    """A resume with another exponent that made no step yet changes no draw before it."""
    files = read_run_files(run)
    other = files.recipe.replay.model_copy(update={"priority_exponent": 3.0})
    changed = files.recipe.model_copy(update={"replay": other})
    write_recipe(change_file(run, files.steps[-1]), changed)
    assert read_run_files(run).recipe == changed
    assert failed(run) == set()


def test_the_rule_of_the_number_of_draws_is_that_of_the_composition(tmp_path):
    for preset, rule in (("ours", "round(r B')"), ("uniform", "round((1 + r) B')"),
                         ("fifo", "round(r R)")):  # fmt: skip
        write_synthetic_run(tmp_path / preset, preset, steps=6)
        details = {check.name: check.detail for check in verify_run(tmp_path / preset).checks}
        assert details["draw counts"].startswith(f"{rule} in units")


def test_a_gap_and_a_duplicate_in_the_metrics_are_named(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:10], *lines[11:]]) + "\n")
    assert "line 11 is step 12" in detail(run, "files")
    path.write_text("\n".join([*lines[:10], *lines[9:]]) + "\n")
    assert "line 11 is step 10" in detail(run, "files")


def change_recipe(run, **replay):
    path = run / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["replay"] |= replay
    path.write_text(yaml.safe_dump(recipe))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ratio": 0.6}, "draw counts"),
        ({"warmup_steps": 5}, "draw counts"),
        ({"max_age_steps": 4}, "stored when drawn"),
        ({"max_age_steps": 6}, "probabilities"),
        ({"priority_exponent": 0.6}, "probabilities"),
        ({"priority": "group_std"}, "probabilities"),
        ({"composition": "pool"}, "draw counts"),
        ({"capacity_rollouts": 40}, "metrics"),
    ],
)
def test_a_run_of_another_recipe_fails(run, change, expected):
    change_recipe(run, **change)
    assert expected in failed(run)


def test_an_interrupted_run_is_verified_up_to_its_last_line(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:25]) + "\n")
    assert "step_000030/state.json: trained_tokens" in detail(run, "checkpoints")
    shutil.rmtree(run / "checkpoints" / "step_000030")
    shutil.rmtree(run / "checkpoints" / "latest")  # a copy: the fixture does not keep links
    (run / "checkpoints" / "latest").symlink_to("step_000015")
    report = verify_run(run)
    assert report.passed
    assert report.steps == 25


def test_a_resume_without_the_buffer_passes(tmp_path, monkeypatch):
    original = SyntheticRun.step

    def forgetful(made, step):
        if step == 16:
            made.buffer = ReplayBuffer(made.recipe.replay, made.recipe.sampling.group_size)
        return original(made, step)

    monkeypatch.setattr(SyntheticRun, "step", forgetful)
    write_run(tmp_path)
    assert "draw counts" in failed(tmp_path) or "metrics" in failed(tmp_path)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    recipe["checkpoint"]["restore_buffer"] = False
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    report = verify_run(tmp_path)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert any("emptied by a resume before step 16" in check.detail for check in report.checks)


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "rollouts"])
def test_a_folder_that_is_not_a_run_is_refused(run, name):
    (run / name).rename(run / "elsewhere")
    with pytest.raises(SnapshotError, match=f"{name}: missing"):
        verify_run(run)


def test_a_damaged_metrics_line_is_named(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 31, "los')
    with pytest.raises(SnapshotError, match=r"metrics\.jsonl:31"):
        verify_run(run)


def test_what_a_running_run_writes_and_removes_meanwhile_is_no_damage(run, monkeypatch):
    """The logs were read when step 20 was the last; then come a checkpoint of step 30, half of a
    line, and a checkpoint is rotated away while it is read."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:20]) + lines[20][:50])
    original = file_checks.verify_checkpoint

    def rotated_away(path):
        if path.name == "step_000015":
            shutil.rmtree(path)
        return original(path)

    monkeypatch.setattr(file_checks, "verify_checkpoint", rotated_away)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = verify_run(run)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.steps == 20
    assert "the run is still running: what it wrote after step 20" in report.unchecked
    (run / "metrics.jsonl").write_text("".join(lines[:20]))
    assert "checkpoints" in failed(run), "the same of a run that has ended is damage"


EDITED = ["reward", "frac_reward_zero_std", "fresh/rollouts", "fresh/clip_fraction", "replay/ratio",
          "replay/clip_fraction", "replay/age_mean", "replay/ess", "buffer/rollouts",
          "cost/generated_tokens", "cost/generated_rollouts", "cost/trained_tokens",
          "cost/trained_rollouts"]  # fmt: skip


@pytest.mark.parametrize("name", slow_except(EDITED[::3], EDITED))
def test_a_metric_that_was_edited_in_every_line_is_named(run, name):
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line[name] = None if line[name] is None else line[name] + 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    totals = {"cost/generated_tokens", "cost/trained_tokens"}  # state.json has them too
    assert failed(run) == {"metrics"} | ({"checkpoints"} if name in totals else set())
    assert f": {name} " in detail(run, "metrics")


def test_a_buffer_of_another_step_is_named(run):
    folder = run / "checkpoints"
    shutil.copy(folder / "step_000015/buffer.parquet", folder / "step_000030/buffer.parquet")
    assert "checkpoint 30: its buffer is of step 15" in detail(run, "snapshots")
