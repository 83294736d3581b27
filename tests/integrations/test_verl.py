"""Replay in verl, by whole runs of verl on a CPU (`tests/support/verl_cpu`): off it is verl's own
trainer bit for bit, resumed is never killed, and its files verify. Run by .ci/check_verl, in an
environment that has verl."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("verl", reason="needs an environment with verl: .ci/check_verl")

from verl_runs import OURS, PLAIN, PlainPolicy, VerlRun, assert_equal_tensors

from grpo_replay.lab.verification.verify import verify_run

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps with replay, checkpoints after steps 2 and 4."""
    return VerlRun(tmp_path_factory.mktemp("whole"), *OURS, "trainer.save_freq=2").ended()


def test_preset_grpo_is_verl_s_own_trainer_bit_for_bit(tmp_path):
    plain = VerlRun(tmp_path / "plain", "trainer.save_freq=4", module=PLAIN).ended()
    off = (OURS[0], "+trainer.v1.replay.preset=grpo", "trainer.save_freq=4")
    ours = VerlRun(tmp_path / "ours", *off).ended()
    assert plain.verl_metrics() == ours.verl_metrics()
    assert len(plain.verl_metrics()[4]) > 60
    assert_equal_tensors(plain, ours, step=4)
    assert not (ours.output / "rollouts").exists()


def test_a_killed_and_resumed_run_is_the_run_that_was_never_killed(tmp_path, whole):
    words = (*OURS, "trainer.save_freq=2")
    killed = VerlRun(tmp_path, *words)
    killed.wait_for_steps(2)
    killed.kill()
    assert not (killed.output / "global_step_4").exists(), "killed too late"
    resumed = VerlRun(tmp_path, *words).ended()
    assert sorted(resumed.verl_metrics()) == [3, 4], "it began again"
    for step in (3, 4):
        assert resumed.verl_metrics()[step] == whole.verl_metrics()[step]
    assert resumed.metrics() == whole.metrics()
    for step in (1, 2, 3, 4):
        for kind in ("rollouts", "draws"):
            assert resumed.rows(kind, step) == whole.rows(kind, step)
    assert whole.rows("draws", 3) and whole.rows("draws", 4)
    buffers = [run.output / "global_step_4" / "buffer.parquet" for run in (resumed, whole)]
    tables = [pq.read_table(path) for path in buffers]
    assert tables[0].equals(tables[1], check_metadata=True) and len(tables[0]) > 0
    assert_equal_tensors(resumed, whole, step=4)


def verified(folder: Path, run: VerlRun) -> dict[str, bool]:
    report = verify_run(folder, lambda step: PlainPolicy(run.policy(step)))
    return {check.name: check.passed for check in report.checks}


def test_the_files_of_a_run_verify_and_a_wrong_birth_logprob_is_found(tmp_path, whole):
    checks = verified(whole.output, whole)
    assert len(checks) >= 13 and all(checks.values()), checks
    path = whole.output / "rollouts" / "step_000001.parquet"
    before = path.read_bytes()
    table = pq.read_table(path)
    logprobs = table["behavior_logprobs"].to_pylist()
    row = next(i for i, values in enumerate(logprobs) if values)
    logprobs[row][0] -= 0.01
    at = table.column_names.index("behavior_logprobs")
    column = pa.array(logprobs, table.schema.field(at).type)
    pq.write_table(table.set_column(at, table.schema.field(at), column), path)
    try:
        checks = verified(whole.output, whole)
    finally:
        path.write_bytes(before)
    assert [name for name, passed in checks.items() if not passed] == ["behaviour log-probs"]


def test_verl_s_logger_has_the_metrics_of_replay(whole):
    ours = {row["step"]: row for row in whole.metrics()}
    for step, logged in whole.verl_metrics().items():
        names = [name for name in logged if name.startswith(("replay/", "buffer/", "fresh/"))]
        assert len(names) >= 10
        assert {name: logged[name] for name in names} == pytest.approx(
            {name: ours[step][name] for name in names}
        )
    assert json.dumps(ours[3]["replay/age_max"]) == "2"
