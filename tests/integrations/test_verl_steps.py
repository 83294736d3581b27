"""Updates of verl's own trainer with replay, without Ray and without a model: its workers and
TransferQueue are stand-ins in this process. What an update is given, in which order. Seconds."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="needs an environment with verl: .ci/check_verl")

import transfer_queue
from test_verl_rows import END, config, row
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from grpo_replay.integrations import verl, verl_rows

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
WORDS = (
    f"{ROLLOUT}.n=2", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=3", "data.train_batch_size=2", "data.seed=1",
    "+trainer.v1.replay.ratio=1.0", "+trainer.v1.replay.warmup_steps=1",
)  # fmt: skip
SHADOW = ("+trainer.v1.replay.shadow=True", "+trainer.v1.replay.probe_every_steps=2")


class Queue:
    """TransferQueue: rows by partition and key."""

    KVBatchMeta = transfer_queue.KVBatchMeta

    def __init__(self):
        self.partitions = {}

    def kv_batch_put(self, keys, partition_id, tags, fields):
        columns = {name: fields[name].unbind() for name in fields.keys()}  # noqa: SIM118
        for i, key in enumerate(keys):
            values = {name: column[i] for name, column in columns.items()}
            self.partitions.setdefault(partition_id, {}).setdefault(key, {}).update(values)

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        rows = [self.partitions[partition_id][key] for key in keys]
        names = [name for name in rows[0] if select_fields is None or name in select_fields]
        return list_of_dict_to_tensordict([{name: row[name] for name in names} for row in rows])

    def kv_clear(self, keys, partition_id):
        for key in keys:
            del self.partitions[partition_id][key]


class Workers:
    """The actor: keeps what it is called for, and says that every log-prob is -1."""

    _dispatch_info = {"actor": [0]}  # noqa: RUF012

    def __init__(self, queue):
        self.queue, self.calls, self.loss = queue, [], None

    def set_loss_fn(self, loss):
        self.loss = loss

    def compute_log_prob(self, batch):
        self.calls.append(SimpleNamespace(name="probe", rows=len(batch)))
        rows = self.queue.partitions[batch.partition_id]
        for key in batch.keys:
            rows[key]["log_probs"] = torch.full((len(rows[key]["input_ids"]),), -1.0)

    def update_actor(self, batch):
        rows = [self.queue.partitions[batch.partition_id][key] for key in batch.keys]
        numbers = [int(row.get(verl_rows.ROW, -1)) for row in rows]
        call = {"name": "update", "partition": batch.partition_id, "rows": numbers}
        self.calls.append(SimpleNamespace(**call, info=dict(batch.extra_info)))
        outcomes = [(number, 2, *[0.0] * 8) for number in numbers if number >= 0]
        known = {} if self.loss is None else {verl_rows.OUTCOMES: outcomes}
        return {"metrics": {"mfu": [0.0], **known}}


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Makes a trainer of a run in a folder, with stand-ins as `workers`."""
    for name in ("_setup", "_save_checkpoint"):  # the parts of Ray and the workers
        monkeypatch.setattr(PPOTrainerSync, name, lambda self: None)

    def load_checkpoint(self):
        self.global_steps = self.resumed_at

    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", load_checkpoint)

    def make(*words, resumed_at=0):
        queue = Queue()
        monkeypatch.setattr(verl, "tq", queue)
        trainer_class = type("Trainer", (verl.ReplayMixin, PPOTrainerSync), {})
        trainer = trainer_class(config(tmp_path, *WORDS, *words))
        trainer.tokenizer = SimpleNamespace(decode=str, eos_token_id=END)
        trainer.actor_rollout_wg = trainer.workers = Workers(queue)
        trainer.queue, trainer.timing_raw, trainer.total_training_steps = queue, {}, 4
        trainer.resumed_at = resumed_at
        trainer._load_checkpoint()
        trainer._setup()
        return trainer

    return make


def update(trainer, step, signal=True):
    """A step of verl with two groups of two; returns what its workers were called for."""
    trainer.global_steps = step
    rows = {
        f"{prompt}_{i}_0": row(prompt, [9 - i, 3 + step % 5, END], signal * i, signal * (i - 0.5))
        for prompt in "ab"
        for i in (0, 1)
    }
    trainer.queue.kv_batch_put([*rows], "train", None, list_of_dict_to_tensordict([*rows.values()]))
    batch = transfer_queue.KVBatchMeta(
        keys=[*rows], tags=[{"seq_len": 4}] * 4, partition_id="train", extra_info={}
    )
    trainer.workers.calls.clear()
    metrics = {}
    trainer._update_actor(batch, metrics)
    trainer.timing_raw = {}
    assert list(trainer.queue.partitions.get(verl.MODE, {})) == [], "composed rows are cleared"
    return trainer.workers.calls, metrics


def test_verl_runs_in_the_mode_that_replay_runs_in(begin):
    """verl asks in many places whether its mode is sync."""
    assert begin().trainer_mode == "sync"
    trainer = begin("+trainer.v1.replay.host_mode=colocate_async")
    assert trainer.trainer_mode == "colocate_async"


def test_every_row_of_an_update_has_one_weight_and_padding_has_none(begin):
    """Four fresh rows, and in the second step four drawn ones, in micro-batches of three: verl
    divides by the rows without padding, which are 4 and 8, and not by 6 and 9."""
    trainer = begin()
    for step, rows in ((1, 4), (2, 8)):
        (call,), metrics = update(trainer, step)
        assert call.partition == verl.MODE and sorted(r for r in call.rows if r >= 0) == [
            *range(rows)
        ]
        assert len(call.rows) == call.info["mini_batch_size"] == -(-rows // 3) * 3
        assert call.info["global_batch_size"] == rows
        assert call.info["dataloader_kwargs"] == {"shuffle": False}
        assert metrics["cost/trained_rollouts"] == rows


def test_a_step_without_rows_makes_no_update(begin):
    trainer = begin()
    calls, metrics = update(trainer, 1, signal=False)
    assert calls == [] and metrics["cost/trained_rollouts"] == 0
    (call,), _ = update(trainer, 2)
    assert len(call.rows) == 6


def test_shadow_trains_on_verl_s_own_batch_after_the_probe(begin, capsys):
    """The probe, of the drawn rows and padding, has the policy before the update. The end says what
    would be replayed."""
    trainer = begin(*SHADOW)
    for step, names in ((1, ["update"]), (2, ["probe", "update"]), (3, ["update"])):
        calls, metrics = update(trainer, step)
        assert [call.name for call in calls] == names
        assert calls[-1].partition == "train" and calls[-1].rows == [-1] * 4
        assert calls[-1].info["mini_batch_size"] == 4, "verl's own sizes"
        assert metrics["replay/rollouts"] == (0 if step == 1 else 4)
        if step == 2:  # log-probs were -0.1 of each token at birth, and are -1 now
            gaps = np.array([[-0.1, -0.6, -0.9], [-0.2, -0.6, -0.9]])
            assert metrics["replay/ratio_mean"] == pytest.approx(np.exp(gaps).mean(), rel=1e-5)
        else:
            assert "replay/ratio_mean" not in metrics
    trainer.on_train_end()
    assert "in shadow: 3 rollouts a step would be replayed" in capsys.readouterr().out


def test_a_resumed_run_draws_as_the_run_that_was_never_killed(begin, tmp_path):
    """By the seed with which it began: two of eight stored rollouts, in the third step."""
    words, draws = ("trainer.v1.replay.ratio=0.5",), tmp_path / "draws" / "step_000003.parquet"
    trainer = begin(*words)
    for step in (1, 2):
        update(trainer, step)
    trainer._save_checkpoint()
    update(trainer, 3)
    expected = draws.read_bytes()
    for more in ((), ("data.seed=2",)):
        update(begin(*words, *more, resumed_at=2), 3)
        assert draws.read_bytes() == expected
