"""What reaches the hosted trackers, and that a resumed run continues there."""

import json
import math
import struct
import sys
import time
import types
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs.trained import small_recipe

from grpo_replay.storage.tracking import TensorBoardTracker, open_trackers


def recorded(monkeypatch, name: str) -> list:
    calls: list = []
    module = types.ModuleType(name)
    module.init = lambda **words: calls.append(("init", words))
    module.log = lambda values, step: calls.append(("log", step, values))
    module.define_metric = lambda *words, **more: None
    module.Table = lambda dataframe: ("table", dataframe.to_dict("records"))
    module.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_a_resumed_run_has_the_same_id_at_wandb_and_the_name_of_its_directory(
    tmp_path, monkeypatch
):
    calls = recorded(monkeypatch, "wandb")
    monkeypatch.delenv("WANDB_NAME", raising=False)
    recipe = small_recipe(tracking={"report_to": ["wandb"]})
    for name in ("one", "one", "two"):
        (tmp_path / name).mkdir(exist_ok=True)
        open_trackers(recipe, tmp_path / name, 1)
    monkeypatch.setenv("WANDB_NAME", "mine")
    open_trackers(recipe, tmp_path, 1)
    ids = [words["id"] for _, words in calls]
    assert ids[0] == ids[1] != ids[2]
    assert {words["resume"] for _, words in calls} == {"allow"}
    assert [words["name"] for _, words in calls] == ["one", "one", "two", "mine"]


def test_samples_reach_a_hosted_tracker_as_a_table(tmp_path, monkeypatch):
    calls = recorded(monkeypatch, "trackio")
    (tracker,) = open_trackers(small_recipe(tracking={"report_to": ["trackio"]}), tmp_path, 1)
    rows = [{"rollout_id": 3, "completion": "x"}]
    tracker.log_samples(5, rows)
    assert calls[1] == ("log", 5, {"samples": ("table", rows)})
    assert "id" not in calls[0][1]


def test_tensorboard_is_loaded_by_the_first_record_or_a_resume(tmp_path):
    """Loading it would delay the first step. A resume hides later events even if it makes none."""
    recipe = small_recipe(tracking={"report_to": ["tensorboard"]})

    def files(run: str) -> int:
        return len(list((tmp_path / run / "tensorboard").glob("events.*")))

    (new,) = open_trackers(recipe, tmp_path / "new", 1)
    before = files("new")
    new.log(1, {"loss": 0.5})
    new.close()
    (resumed,) = open_trackers(recipe, tmp_path / "resumed", 6)
    resumed.close()
    assert (before, files("new"), files("resumed")) == (0, 1, 1)


def test_a_run_that_begins_again_at_step_0_has_one_point_of_its_base_model(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for accuracy in (0.5, 0.25):
        tracker = TensorBoardTracker(tmp_path, 0)
        tracker.log(0, {"eval/mean": accuracy})
        tracker.close()
        time.sleep(1)  # TensorBoard reads the files by their second
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = [(each.step, each.value) for each in events.Scalars("eval/mean")]
    assert points == [(0, 0.25)]


def rows_of_wandb(file: Path) -> Iterator[dict]:
    """The rows of an offline file: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record, whole = wandb_internal_pb2.Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {(each.key or each.nested_key[0]): each.value_json for each in items}


def log_a_killed_and_a_resumed_run(name: str, folder: Path) -> None:
    """Steps 1 to 7, then again from 6 on, as after a checkpoint of step 5."""
    recipe = small_recipe(tracking={"report_to": [name]})
    for attempt, steps in enumerate((range(1, 8), range(6, 10))):
        (tracker,) = open_trackers(recipe, folder, steps[0])
        for step in steps:
            loss = math.nan if step == 6 else step + attempt / 10
            tracker.log(step, {"step": step, "loss": loss, "none": None})
        tracker.close()
        if name == "tensorboard":
            time.sleep(1)  # it reads the files by their second


def test_wandb_has_every_row_of_a_resumed_run_on_its_own_axis_of_steps(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for key, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{key}", value)
    log_a_killed_and_a_resumed_run("wandb", tmp_path)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    found = [[(int(r["step"]), json.loads(r["loss"])) for r in rows_of_wandb(f)] for f in files]
    assert [[step for step, _ in rows] for rows in found] == [[*range(1, 8)], [*range(6, 10)]]
    assert found[0][4] == (5, 5) and found[1][1:] == [(7, 7.1), (8, 8.1), (9, 9.1)]
    assert math.isnan(found[1][0][1])
    assert all("none" not in row for file in files for row in rows_of_wandb(file))


def test_trackio_has_every_row_of_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is first loaded
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run = tmp_path / uuid.uuid4().hex  # its rows are elsewhere if another test has loaded trackio
    log_a_killed_and_a_resumed_run("trackio", run)
    rows = SQLiteStorage.get_logs("grpo-replay", run.name)
    first = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, math.nan), (7, 7.0)]
    again = [(6, math.nan), (7, 7.1), (8, 8.1), (9, 9.1)]
    assert str([(row["step"], row["loss"]) for row in rows]) == str(first + again)
    assert "none" not in rows[0]


def test_tensorboard_has_the_rows_of_the_last_attempt(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_a_killed_and_a_resumed_run("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = {each.step: each.value for each in events.Scalars("loss")}
    assert math.isnan(points.pop(6))
    assert points == {
        step: pytest.approx(step + (step > 6) / 10) for step in (1, 2, 3, 4, 5, 7, 8, 9)
    }
    assert events.Tags()["scalars"] == ["loss"]
