"""Completions shown while a run trains."""

from dataclasses import replace

import numpy as np
from buffer_makers import make_rollout
from small_runs.trained import FinishedRun, small_recipe

from grpo_replay.cli.train_command import samples_table, shortened
from grpo_replay.training import run as run_module
from grpo_replay.training.run import run_training, sample_rows, samples_are_due


class Watcher:
    """An observer that keeps the samples."""

    def __init__(self) -> None:
        self.samples = {}

    def on_samples(self, step, rows):
        self.samples[step] = rows

    def __getattr__(self, name):
        return lambda *_: None


def test_samples_are_due_after_the_first_the_last_and_every_nth_step(monkeypatch):
    monkeypatch.setattr(run_module, "SAMPLES_EVERY_STEPS", 3)
    due = [step for step in range(1, 8) if samples_are_due(step, 7)]
    assert due == [1, 3, 6, 7]


def test_a_run_shows_rollouts_of_the_step_and_tensorboard_has_them(
    tmp_path, processes, monkeypatch
):
    monkeypatch.setattr(run_module, "SAMPLES_EVERY_STEPS", 2)
    watcher = Watcher()
    recipe = small_recipe(
        run={"steps": 4},
        tracking={"report_to": ["tensorboard"]},
    )
    run_training(recipe, tmp_path / "run", False, watcher)
    run = FinishedRun(tmp_path / "run", recipe)
    assert list(watcher.samples) == [1, 2, 4]
    for step, rows in watcher.samples.items():
        logged = {row["rollout_id"]: row for row in run.rollouts(step)}
        assert len(rows) == 2
        for row in rows:
            of_file = logged[row["rollout_id"]]
            assert row["completion"] == of_file["completion_text"]
            assert (row["reward"], row["verdict"]) == (of_file["reward"], of_file["verdict"])
            assert row["tokens"] == len(of_file["completion_token_ids"])
            assert row["prompt"].endswith("=")
    texts = text_events(run.path / "tensorboard")
    assert len(texts) == 3 and watcher.samples[2][0]["completion"] in texts[1]


class Words:
    """A tokenizer whose token 0 is special."""

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(i) for i in ids if i or not skip_special_tokens)


def test_samples_are_spread_from_the_first_rollout_to_the_last():
    rollouts = [make_rollout(i) for i in range(5)]
    rows = sample_rows(rollouts, 3, Words())
    assert [row["rollout_id"] for row in rows] == [0, 2, 4]
    with_start = replace(rollouts[0], prompt_token_ids=np.array([0, 7, 8], np.int32))
    assert sample_rows([with_start], 3, Words())[0]["prompt"] == "7 8"


def text_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert tags == ["samples/text_summary"]
    return [e.tensor_proto.string_val[0].decode() for e in events.Tensors(tags[0])]


def test_long_and_hostile_texts_fit_on_a_line():
    assert shortened("a\x1b[31m\nb") == "a [31m b"
    assert len(shortened("x" * 10_000)) == 303
    row = {"rollout_id": 1, "prompt": "[/a]", "completion": "[bold]", "reward": 1.0,
           "verdict": "correct"}  # fmt: skip
    assert samples_table(1, [row]).columns[4]._cells[0].plain == "[bold]"
