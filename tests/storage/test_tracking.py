"""What reaches the hosted trackers, and that a resumed run continues there."""

import sys
import time
import types

from small_runs.trained import small_recipe

from grpo_replay.storage.tracking import TensorBoardTracker, open_trackers


def recorded(monkeypatch, name: str) -> list:
    calls: list = []
    module = types.ModuleType(name)
    module.init = lambda **words: calls.append(("init", words))
    module.log = lambda values, step: calls.append(("log", step, values))
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
