"""The steps of a run by hand: what each records, shows, evaluates and saves, on a clock that only
training moves."""

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from buffer_makers import make_rollout
from small_runs.trained import small_recipe

from grpo_replay.distributed.comm import Comm
from grpo_replay.errors import ServersLost
from grpo_replay.stop import StopToken
from grpo_replay.storage.checkpoint import RunState, checkpoint_name
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.training import Notice, Observer
from grpo_replay.training import run as run_module
from grpo_replay.training.opening import OpenedRun
from grpo_replay.training.run import Run, RunResult
from grpo_replay.training.run_evaluation import NOT_EVALUATED

SECONDS = 10.0
"""What each step takes."""
ACCURACY = {"mean": 0.5, "tiny_add": 0.25}
AS_METRICS = {"eval/mean": 0.5, "eval/tiny_add": 0.25}


class Listener(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_start(self, recipe, run_dir, state, notices) -> None:
        self.told.append(("start", run_dir, list(notices)))

    def on_step(self, metrics) -> None:
        self.told.append(("step", metrics["step"]))

    def on_samples(self, step, rows) -> None:
        self.told.append(("samples", step, [row["rollout_id"] for row in rows]))

    def on_notice(self, text) -> None:
        self.told.append(("notice", text))


class Tracking:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.samples: list[int] = []
        self.closed = 0

    def log(self, step, metrics) -> None:
        self.logged.append((step, dict(metrics)))

    def log_samples(self, step, rows) -> None:
        self.samples.append(step)

    def close(self) -> None:
        self.closed += 1


class OtherRank(Comm):
    """Rank 1 of two. Rank 0 is asked nothing, and evaluates all that it should."""

    def __init__(self) -> None:
        super().__init__(1, 2)

    def all_gather(self, payload):
        return [payload]

    def broadcast(self, payload):
        return b"true"


class Made:
    """A run whose steps take `SECONDS` and train nothing. `at` is what happens within a step."""

    def __init__(self, folder: Path, monkeypatch, comm=None, state=None, due=(), **run) -> None:
        self.now, self.saved, self.evaluated = 1000.0, [], []
        self.saving_seconds = 0.0
        self.due, self.at = set(due), {}
        self.listener, self.tracking, self.first_steps = Listener(), Tracking(), []
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(run_module, "time", clock)
        monkeypatch.setattr(run_module, "open_trackers", self.open_trackers)
        monkeypatch.setattr(run_module, "write_checkpoint", self.write_checkpoint)
        self.state, self.stack = state or RunState(), ExitStack()
        recipe = small_recipe(
            run={"steps": 5} | run, checkpoint={"every_steps": 2}, replay={"preset": "grpo"}
        )
        run_dir = RunDirectory(folder)
        run_dir.checkpoints.mkdir(parents=True)
        words = SimpleNamespace(decode=lambda ids, **_: "")
        parts = SimpleNamespace(
            recipe=recipe,
            comm=comm or Comm(),
            run_dir=run_dir,
            buffer=None,
            tokenizer=words,
            stop=StopToken(),
        )
        opened = OpenedRun(parts, self.state, None, None, [Notice("folder", "a notice")])
        self.run = Run(opened, self.listener, self.stack)
        self.run.trainer.train_step = self.train_step
        self.run.evaluation = SimpleNamespace(
            is_due=lambda step: step in self.due, evaluate=self.evaluate,
            base_and_last=lambda: (None, None),
        )  # fmt: skip

    def open_trackers(self, recipe, folder, first_step):
        self.first_steps.append(first_step)
        return [self.tracking]

    def train_step(self):
        self.now += SECONDS
        self.state.step += 1
        self.at.get(self.state.step, lambda: None)()
        return {"step": self.state.step} if self.run.comm.is_main else {}

    def evaluate(self, step):
        self.evaluated.append(step)
        return SimpleNamespace(accuracies=lambda: ACCURACY) if self.run.comm.is_main else None

    def write_checkpoint(self, parts, source, state, model_card):
        assert f"step {state.step}" in model_card()
        self.saved.append((state.step, state.wall_seconds))
        self.now += self.saving_seconds

    def train(self) -> RunResult:
        return self.run.train()

    def stop(self) -> None:
        self.run.stop.request("a test")

    def lines(self) -> list[dict[str, Any]]:
        return self.run.run_dir.read_metrics()


def test_a_run_records_every_step_and_saves_every_nth_and_the_last(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch, state=RunState(wall_seconds=100.0), due=(0, 3))
    result = made.train()
    assert made.saved == [(2, 120.0), (4, 140.0), (5, 150.0)]
    assert made.evaluated == [0, 3]
    rows = [{"step": step} | (AS_METRICS if step == 3 else {}) for step in range(1, 6)]
    assert made.lines() == rows
    base = [(0, AS_METRICS)]
    assert made.tracking.logged == base + [(row["step"], row) for row in rows]
    assert made.listener.told == [
        ("start", tmp_path, [Notice("folder", "a notice")]),
        *(("step", step) for step in range(1, 6)),
    ]  # fmt: skip
    written = json.loads((tmp_path / "summary.json").read_text())
    assert result == RunResult(tmp_path, 5, False, written)
    assert (written["steps"], written["wall_seconds"]) == (5, 150.0)
    assert made.first_steps == [0] and made.tracking.closed == 0
    made.stack.close()
    assert made.tracking.closed == 1


def test_the_log_has_the_seconds_of_a_checkpoint(tmp_path, monkeypatch, caplog):
    made = Made(tmp_path, monkeypatch, steps=1)
    made.saving_seconds = 1.5
    with caplog.at_level(logging.INFO, "grpo_replay.training.run"):
        made.train()
    assert "checkpoint of step 1: 1.5 s" in caplog.messages


@pytest.mark.parametrize("during", [1, 2])
def test_a_stop_saves_the_step_and_says_once_who_asked(tmp_path, monkeypatch, caplog, during):
    """Also after a step that no checkpoint is due for. The evaluation waits for the resume."""
    made = Made(tmp_path, monkeypatch, due=(1, 2))
    made.at[during] = made.stop
    assert made.train() == RunResult(tmp_path, during, True, None)
    assert made.saved == [(during, during * SECONDS)]
    assert made.evaluated == [1][: during - 1]
    assert not (tmp_path / "summary.json").exists()
    assert [line["step"] for line in made.lines()] == list(range(1, during + 1))
    (said,) = [each.message for each in caplog.records if "stopping" in each.message]
    assert "a test" in said


def test_a_stop_while_a_step_waits_saves_the_step_before_it_once(tmp_path, monkeypatch):
    """A step without rollouts is none. As after a resume, step 3 is the last that was made."""
    made = Made(tmp_path, monkeypatch, state=RunState(step=3))
    made.run.trainer.train_step = lambda: None
    assert made.train() == RunResult(tmp_path, 3, True, None)
    assert [step for step, _ in made.saved] == [3]
    (made.run.run_dir.checkpoints / checkpoint_name(3)).mkdir()
    assert made.train().interrupted
    assert [step for step, _ in made.saved] == [3]


@pytest.mark.parametrize(("due", "interrupted"), [((), False), ((5,), True)])
def test_a_stop_during_the_last_step_ends_the_run_unless_its_evaluation_is_due(
    tmp_path, monkeypatch, due, interrupted
):
    made = Made(tmp_path, monkeypatch, due=due)
    made.at[5] = made.stop
    assert made.train().interrupted is interrupted
    assert made.evaluated == [] and made.saved[-1][0] == 5


@pytest.mark.parametrize("step", [0, 3, 5])
def test_an_evaluation_without_a_server_ends_the_run_after_the_record_and_the_checkpoint(
    tmp_path, monkeypatch, step
):
    made = Made(tmp_path, monkeypatch, due=(step,))

    def evaluate(step):
        raise ServersLost("none is left")

    made.run.evaluation.evaluate = evaluate
    with pytest.raises(ServersLost, match="none is left"):
        made.train()
    assert [line["step"] for line in made.lines()] == list(range(1, step + 1))
    assert [each for each, _ in made.saved] == [each for each in (2, 4) if each < step] + [
        step for _ in range(step > 0)
    ]
    assert not (tmp_path / "summary.json").exists()


def test_an_evaluation_that_the_stop_did_not_wait_for_is_made_up(tmp_path, monkeypatch):
    """Its metrics join the line of its step, and its results the model card, once."""
    state = RunState(step=4, wall_seconds=40.0)
    made = Made(tmp_path, monkeypatch, state=state, due=(4,), steps=4)
    made.run.run_dir.append_metrics({"step": 4})
    card = made.run.run_dir.checkpoints / checkpoint_name(4) / "model" / "README.md"
    card.parent.mkdir(parents=True)
    card.write_text(f"# before\n{NOT_EVALUATED}\n")
    evaluate = made.evaluate

    def slowly(step):
        made.now += 7.0
        return evaluate(step)

    made.run.evaluation.evaluate = slowly
    assert made.train().interrupted is False
    assert made.lines() == [{"step": 4} | AS_METRICS]
    assert made.tracking.logged == [(4, AS_METRICS)] and made.first_steps == [5]
    assert state.wall_seconds == 47.0
    assert "step 4" in card.read_text()
    card.write_text("# with results\n")
    made.train()
    assert card.read_text() == "# with results\n"
    assert len(made.tracking.logged) == 1 and state.wall_seconds == 47.0


def test_notices_of_a_step_and_warnings_of_servers_are_told_once(tmp_path, monkeypatch, caplog):
    """Those of servers at once, by the threads that look after them."""
    made = Made(tmp_path, monkeypatch)
    servers = logging.getLogger("grpo_replay.sampling.server")

    def happen() -> None:
        made.run.trainer.notices.append("of the step")
        servers.warning("one is lost")

    made.at[2] = happen
    made.train()
    after_step_1 = made.listener.told.index(("step", 1)) + 1
    assert made.listener.told[after_step_1 : after_step_1 + 3] == [
        ("notice", "one is lost"), ("step", 2), ("notice", "of the step"),
    ]  # fmt: skip
    assert len([each for each in made.listener.told if each[0] == "notice"]) == 2
    warned = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warned == ["one is lost", "of the step"]
    made.stack.close()
    servers.warning("of another run")
    assert made.listener.told[-1] == ("step", 5)


def test_two_completions_are_shown_where_the_step_has_any(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch)
    made.at[1] = lambda: setattr(made.run.trainer, "generated", [make_rollout(i) for i in range(5)])
    made.at[2] = lambda: setattr(made.run.trainer, "generated", ())
    made.train()
    assert [each for each in made.listener.told if each[0] == "samples"] == [("samples", 1, [0, 4])]
    assert made.tracking.samples == [1]


def test_another_rank_writes_and_shows_nothing(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch, comm=OtherRank(), due=(0, 3))
    assert made.train() == RunResult(tmp_path, 5, False, None)
    assert made.evaluated == [0, 3] and [step for step, _ in made.saved] == [2, 4, 5]
    assert (made.listener.told, made.tracking.logged, made.first_steps) == ([], [], [])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
