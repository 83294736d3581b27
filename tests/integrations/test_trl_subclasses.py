"""Replay in subclasses of TRL's trainer: what they compute is what counts, wherever they stand."""

import copy

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")

import torch
from slow_tests import slow_except
from trl import GRPOTrainer
from trl_runs import failures, logged, make, metrics, preset, weights_of

from grpo_replay import ReplayConfig
from grpo_replay.errors import UsageError
from grpo_replay.integrations.trl import ReplayGRPOTrainer, ReplayMixin


def of_no_use(completions, **_):
    """The tiny model fails at most of it: without shaping, no group has a signal."""
    return [-1.0] * len(completions)


def shaped(trainer, scores, ids):
    """A bonus for short completions, known to every process."""
    lengths = trainer.accelerator.gather(torch.tensor([float(len(each)) for each in ids]))
    return scores + (lengths % 3 == 0).float()[:, None]


class ShapesAbove(ReplayGRPOTrainer):
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        scores = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return shaped(self, scores, completion_ids_list)


class Shapes(GRPOTrainer):
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        scores = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return shaped(self, scores, completion_ids_list)


class ShapesBelow(ReplayMixin, Shapes):
    pass


class Beside(Shapes, ReplayGRPOTrainer):
    """Its override stands above the mixin's methods."""


KINDS = [ShapesAbove, ShapesBelow, Beside]


@pytest.mark.parametrize("kind", slow_except([ShapesBelow, Beside], KINDS))
def test_rewards_that_a_subclass_shapes_are_those_that_count(tmp_path, kind):
    trainer = make(tmp_path, preset("ours"), kind)
    trainer.reward_funcs = [of_no_use]
    before = weights_of(trainer)
    trainer.train()
    assert {row["reward"] for row in logged(tmp_path)} == {-1.0, 0.0}
    assert sum(line["replay/rollouts"] for line in metrics(tmp_path)) > 0
    assert weights_of(trainer) != before
    assert failures(tmp_path) == []


class AdvantagesOfItsOwn(ReplayGRPOTrainer):
    """Shapes after the rewards: a group of equal rewards has advantages."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        bonus = torch.arange(len(output["advantages"])) % 2
        return output | {"advantages": output["advantages"] + 0.5 * bonus}


def test_advantages_in_a_group_whose_rewards_are_equal_are_an_error(tmp_path):
    trainer = make(tmp_path, preset("ours"), AdvantagesOfItsOwn)
    trainer.reward_funcs = [of_no_use]
    with pytest.raises(UsageError, match=r"all rewards of group 0 are -1\.0, but an adv.* is 0\.5"):
        trainer.train()


@pytest.mark.parametrize("score", slow_except([1e6], [0.1, 1e6, -3.3e-5]))
def test_the_rounding_of_equal_rewards_is_no_contradiction(tmp_path, score):
    trainer = make(tmp_path, preset("ours"), max_steps=4)
    trainer.reward_funcs = [lambda completions, **_: [score] * len(completions)]
    trainer.train()
    assert not any(row["kept"] for row in logged(tmp_path))


class Teacher(ReplayGRPOTrainer):
    """A second forward pass, of another policy, after that of the loss."""

    graph = False

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(self.accelerator.unwrap_model(model)).requires_grad_(
                self.graph
            )
            with torch.no_grad():
                for parameter in self.teacher.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        ids = [torch.cat([inputs[f"prompt_{n}"], inputs[f"completion_{n}"]], 1)
               for n in ("ids", "mask")]  # fmt: skip
        with torch.set_grad_enabled(self.graph):
            theirs = self._get_per_token_logps_and_entropies(
                self.teacher, *ids, inputs["completion_ids"].size(1), compute_entropy=True
            )[0]
        self.gap = (theirs - inputs["old_per_token_logps"])[inputs["completion_mask"].bool()]
        return loss


class TeacherWithAGraph(Teacher):
    graph = True


@pytest.mark.parametrize("kind", slow_except([TeacherWithAGraph], [Teacher, TeacherWithAGraph]))
def test_statistics_are_those_of_the_forward_pass_that_made_the_loss(tmp_path, kind):
    trainer = make(tmp_path, preset("ours"), kind, max_steps=6)
    trainer.train()
    lines = metrics(tmp_path)
    assert max(line["fresh/clip_fraction"] for line in lines) < 0.1
    assert max(line["fresh/approx_kl"] or 0 for line in lines) < 0.01
    assert trainer.gap.abs().mean() > 0.1  # the teacher's would be seen
    assert failures(tmp_path) == []


class ForwardOfItsOwn(ReplayGRPOTrainer):
    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        kept = inputs["completion_ids"].size(1)
        logits = model(input_ids=ids).logits[:, -kept - 1 : -1].log_softmax(-1)
        logprobs = logits.gather(-1, inputs["completion_ids"][:, :, None])[:, :, 0]
        mask = inputs["completion_mask"] * inputs["advantages"][:, None]
        return -(logprobs * mask).sum() / inputs["num_items_in_batch"]


UNKNOWN = ("fresh/clip_fraction", "replay/ratio_max", "replay/approx_kl", "entropy")


def test_a_loss_with_a_forward_pass_of_its_own_has_no_statistics(tmp_path):
    trainer = make(tmp_path, preset("ours"), ForwardOfItsOwn, max_steps=6)
    trainer.train()
    lines = metrics(tmp_path)
    assert sum(line["replay/rollouts"] for line in lines) > 0
    assert all(line[name] is None for line in lines for name in UNKNOWN)
    drawn = logged(tmp_path, "draws")
    assert drawn and all(row["tokens"] and row["clip_fraction"] is None for row in drawn)
    assert failures(tmp_path) == []


UNEVEN = ReplayConfig.of("ours", ratio=0.3, max_age_steps=2, warmup_steps=1)


def gmpo(tmp_path, **changes):
    from trl.experimental.gmpo import GMPOTrainer

    class Replaying(ReplayMixin, GMPOTrainer):
        def __init__(self, model, reward, args, dataset, **others):
            super().__init__(model, reward, args, train_dataset=dataset, **others)

        def compute_loss(self, model, inputs, **kwargs):
            loss = super().compute_loss(model, inputs, **kwargs)
            self.losses.append((len(inputs["replay_row"]), self._assignment.rows, loss.item()))
            return loss

        def _compute_loss(self, model, inputs):
            inner = super()._compute_loss(model, inputs)
            self.inner.append(inner.item())
            return inner

    trainer = make(tmp_path, UNEVEN, Replaying, steps_per_generation=3, **changes)
    trainer.losses, trainer.inner = [], []
    trainer.train()
    return trainer


def test_a_mean_over_rows_weighs_every_row_of_a_generation_batch_alike(tmp_path):
    """TRL's experimental GMPOTrainer has the `loss_type` of dapo, and is one."""
    trainer = gmpo(tmp_path, per_device_train_batch_size=32, max_steps=9, num_generations=8)
    uneven = [each for each in trainer.losses if each[1] % 3]
    assert uneven
    for (rows, real, loss), inner in zip(trainer.losses, trainer.inner, strict=True):
        assert loss == pytest.approx(inner * rows * 3 / max(real, 1), rel=1e-6, abs=1e-12)
    assert failures(tmp_path) == []


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_clip_of_another_loss_is_where_it_has_no_gradient(tmp_path, beta):
    """Of GMPO: outside of ±epsilon for the log-ratio, here of 0. Its KL has one everywhere."""
    changes = {"epsilon": 1e-9, "beta": beta, "use_bias_correction_kl": False}
    gmpo(tmp_path, max_steps=6, learning_rate=1e-3, **changes)
    clipped = [line["replay/clip_fraction"] for line in metrics(tmp_path)]
    assert 0.2 < max(each or 0.0 for each in clipped) < 0.9
    assert failures(tmp_path) == []


def test_the_mixin_behind_the_trainer_is_refused():
    """It would train without replay, and say nothing."""
    with pytest.raises(TypeError, match=r"class Wrong\(ReplayMixin, …\)"):

        class Wrong(Shapes, ReplayMixin):
            pass


class GeneratesElsewhere(ReplayGRPOTrainer):
    """Trains on a batch that the buffer has never seen."""

    def _prepare_inputs(self, generation_batch):
        return GRPOTrainer._prepare_inputs(self, generation_batch)


def test_a_batch_that_did_not_go_through_the_buffer_is_an_error(tmp_path):
    with pytest.raises(KeyError, match="replay_row"):
        make(tmp_path, preset("ours"), GeneratesElsewhere).train()


class Reorders(ReplayGRPOTrainer):
    """Rows in another order than the rewards."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        return {k: v.flip(0) if v.dim() else v for k, v in output.items()}


class ScoresNothing(ReplayGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self._texts = None
        return output


@pytest.mark.parametrize("kind, number", [(Reorders, 32), (ScoresNothing, 0)])
def test_rewards_that_are_not_of_the_rows_are_an_error(tmp_path, kind, number):
    with pytest.raises(UsageError, match=f"scored {number} completions that are not the 32"):
        make(tmp_path, preset("ours"), kind).train()


class KeepsMore(ReplayGRPOTrainer):
    stored_keys = {"difficulty": 0.0, "teacher_logps": -1.0}  # noqa: RUF012

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        rows = torch.arange(len(output["advantages"]), dtype=torch.float32)
        shape = output["completion_ids"].shape
        theirs = torch.arange(shape[1]) + 100.0 * rows[:, None]
        return output | {"difficulty": rows[:, None], "teacher_logps": theirs}

    def _compute_loss(self, model, inputs):
        rows = inputs["replay_row"].tolist()
        for i, row in enumerate(rows) if rows != [-1] else ():
            rollout = self._batch.rollouts[row]
            kept, mask = rollout.extras, inputs["completion_mask"][i].bool()
            assert inputs["difficulty"][i].tolist() == kept["difficulty"].tolist()
            assert inputs["teacher_logps"][i][mask].tolist() == kept["teacher_logps"].tolist()
            self.seen.append((rollout.birth_step, self.replay_buffer.last_step))
        return super()._compute_loss(model, inputs)


def test_keys_of_a_subclass_are_stored_and_replayed_with_their_rollout(tmp_path):
    trainer = make(tmp_path, preset("ours"), KeepsMore, max_steps=6)
    trainer.seen = []
    trainer.train()
    assert any(birth < step for birth, step in trainer.seen)
    assert failures(tmp_path) == []
    KeepsMore.stored_keys, names = {}, KeepsMore.stored_keys
    try:
        with pytest.raises(UsageError, match=r"difficulty, teacher_logps.*stored_keys"):
            make(tmp_path / "b", preset("ours"), KeepsMore).train()
    finally:
        KeepsMore.stored_keys = names
