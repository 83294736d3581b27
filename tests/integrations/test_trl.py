"""Replay in TRL's own trainer, on the tiny model."""

import io
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import MethodType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")

import torch
from outside_ranks import environment
from rich.console import Console
from slow_tests import slow_except
from test_trl_rows import EOS, PAD, TOKENS, batch, rollouts
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict
from trl_runs import logged, make, metrics, preset, weights_of
from typer.testing import CliRunner

from grpo_replay import ReplayBuffer, ReplayConfig
from grpo_replay.api import inspect
from grpo_replay.cli.app import app
from grpo_replay.errors import (
    CheckpointError,
    DataError,
    OutputDirectoryError,
    RecipeError,
    UsageError,
)
from grpo_replay.integrations.interception import evaluating, intercepted
from grpo_replay.integrations.trl import ReplayGRPOTrainer, ReplayMixin, _add_left_over_rows
from grpo_replay.integrations.trl_rows import EXTRAS, Texts
from grpo_replay.lab.inspection.buffer_panels import print_inspection
from grpo_replay.lab.inspection.source import open_source
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.recipe import LossSection
from grpo_replay.replay.batch import token_weights
from grpo_replay.replay.loss import token_loss

RUNS = Path(__file__).parents[1] / "support" / "trl_runs.py"
THREE_OF_FOUR = {"steps_per_generation": 3, "gradient_accumulation_steps": 4,
                 "per_device_train_batch_size": 8}  # fmt: skip
"""Generation batches that end inside an optimizer step."""


class Hearing(ReplayGRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.forward = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.forward


class Watched(Hearing):
    """Keeps (step, first update, rollout id, birth step, largest |log-ratio|, log-probs of birth)
    of every row that is trained on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"].bool()
        old = inputs["old_per_token_logps"]
        gaps = torch.where(mask, self.forward[0].detach() - old, 0).abs().amax(1).tolist()
        first = self._micro_batches_left == self.args.steps_per_generation
        for i, row in enumerate(inputs["replay_row"].tolist()):
            if row >= 0:
                rollout = self._batch.rollouts[row]
                logprobs = old[i][mask[i]].detach().numpy().tobytes()
                self.seen.append((self.replay_buffer.last_step, first, rollout.rollout_id,
                                  rollout.birth_step, gaps[i], logprobs))  # fmt: skip
        return loss


def check_run(folder, trainer, name):
    """What holds of a run of every preset."""
    born = {row["rollout_id"]: row for row in logged(folder)}
    assert all(
        np.array(born[rollout]["behavior_logprobs"], np.float32).tobytes() == logprobs
        for _, _, rollout, _, _, logprobs in trainer.seen
    )
    fresh = [gap for step, first, _, birth, gap, _ in trainer.seen if first and birth == step]
    assert 0 <= max(fresh) < 1e-5
    ages = [step - birth for step, _, _, birth, _, _ in trainer.seen]
    assert 0 < max(ages) <= (trainer.replay.max_age_steps or 4)

    def keeps_fresh(line):
        return name == "ours" or (name != "fifo" and line["step"] == 1)  # the warm-up

    for line in metrics(folder):
        stages = ("generation", "reward", "logprob", "training")
        named = sum(line[f"cost/{stage}_seconds"] for stage in stages)
        assert 0 <= line["cost/other_seconds"] < named
        survivors, drawn = line["fresh/rollouts"], line["cost/trained_rollouts"]
        if name == "ours" and line["step"] > 1:
            assert line["replay/rollouts"] == round(0.5 * survivors)
            assert drawn == survivors + line["replay/rollouts"]
        if name == "fifo":
            assert survivors == 32 and drawn == 16
    assert len(logged(folder, "draws")) == sum(
        line["cost/trained_rollouts"] - (line["fresh/rollouts"] if keeps_fresh(line) else 0)
        for line in metrics(folder)
    )


OWN = GRPOConfig.__dataclass_fields__
WITHOUT_BIAS_CORRECTION = {name: False for name in ("use_bias_correction_kl",) if name in OWN}
SAVES = {"save_strategy": "steps", "save_steps": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of our method with checkpoints after four and eight updates, two a generation batch."""
    folder = tmp_path_factory.mktemp("trl") / "whole"
    trainer = make(folder, preset("ours"), Watched, **SAVES)
    trainer.train()
    return folder, trainer


def test_a_run_replays_as_the_settings_say_and_can_be_looked_into(whole):
    folder, trainer = whole
    check_run(folder, trainer, "ours")
    assert len(metrics(folder)) == 4
    log = [line for line in trainer.state.log_history if "replay/rollouts" in line]
    assert [line["replay/rollouts"] for line in log] == [
        line["replay/rollouts"] for line in metrics(folder)
    ]
    inspection = inspect(folder)
    assert inspection.occupancy.stored_rollouts == len(trainer.replay_buffer)
    said = CliRunner().invoke(app, ["plan", "--from-run", str(folder)])
    assert "μ " in said.output and 'not run: ReplayConfig.of("fifo", capacity' in said.output


def test_a_run_passes_its_verification(whole):
    report = verify_run(whole[0])
    assert report.passed, [check for check in report.checks if not check.passed]


def test_the_model_card_names_the_replay(whole):
    assert "- grpo-replay\n" in (whole[0] / "README.md").read_text()


class Timed(ReplayGRPOTrainer):
    """Moves the clock itself: by 1 s for completions, by 1/4 s for log-probs of birth or of the
    reference, by 1/16 s for those of a micro-batch."""

    clock_seconds = 0.0

    def _generate(self, *args, **kwargs):
        Timed.clock_seconds += 1.0
        return super()._generate(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        Timed.clock_seconds += 1 / 16 if torch.is_grad_enabled() else 1 / 4
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


@pytest.mark.parametrize("passes", slow_except([2], [1, 2]))
def test_the_time_of_log_probs_of_birth_is_none_of_generation(tmp_path, passes, monkeypatch):
    """With a reference TRL makes two passes. In the first batch the mixin tries, in two more,
    whether padding changes them."""
    clock = SimpleNamespace(perf_counter=lambda: Timed.clock_seconds)
    for module in ("trl", "accelerated"):
        monkeypatch.setattr(f"grpo_replay.integrations.{module}.time", clock)
    make(tmp_path, preset("ours"), Timed, max_steps=6, beta=0.1 * (passes - 1)).train()
    names = ("logprob", "generation", "training")
    seconds = [[line[f"cost/{name}_seconds"] for name in names] for line in metrics(tmp_path)]
    assert seconds == [[each / 4, 1.0, 2 / 16] for each in (passes + 2, passes, passes)]
    if passes == 2:
        screen = io.StringIO()
        print_inspection(inspect(tmp_path), Console(file=screen))
        assert "It is unknown which" in screen.getvalue() and "nan" not in screen.getvalue()


class NarrowRewards(ReplayGRPOTrainer):
    """Rewards near 10 with a deviation of 0.004, whose mean TRL rounds to float32."""

    def __init__(self, model, _, args, dataset, **others):
        def narrow(completions, **_):
            return [10 + 0.01 * (len(each) % 3 == 0) for each in completions]

        super().__init__(model, narrow, args, dataset, **others)


def test_verify_allows_the_rounding_of_the_mean_of_trl(tmp_path):
    make(tmp_path, preset("ours"), NarrowRewards, max_steps=4).train()
    report = verify_run(tmp_path)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert any(row["kept"] for row in logged(tmp_path))


def test_where_generation_and_updates_are_aligned_log_probs_of_birth_are_computed(tmp_path):
    """TRL has none there."""
    aligned = {"gradient_accumulation_steps": 2, "max_steps": 3}
    trainer = make(tmp_path, preset("ours"), Watched, **aligned)
    trainer.train()
    check_run(tmp_path, trainer, "ours")


class BothLosses(Hearing):
    """Computes the loss of this package for the rows of every micro-batch beside TRL's. Log-probs
    of birth are moved, so that every clip binds."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compared = []

    def compute_loss(self, model, inputs, **kwargs):
        mask = inputs["completion_mask"].bool()
        moved = torch.randn(mask.shape, generator=torch.Generator().manual_seed(len(self.compared)))
        old = inputs["old_per_token_logps"] + 3 * moved
        loss = super().compute_loss(model, inputs | {"old_per_token_logps": old}, **kwargs)
        logprobs, rows = self.forward[0], inputs["replay_row"].tolist()
        if rows == [-1]:
            return loss
        settings = LossSection(
            kind="gspo" if self.importance_sampling_level == "sequence" else "clipped",
            aggregation=AGGREGATIONS[self.loss_type],
            epsilon=0.2, epsilon_high=0.28, dual_clip=10.0, beta=self.beta,
        )  # fmt: skip
        everything = [rollout.trained_tokens for rollout in self._batch.rollouts]
        weights = token_weights(np.array(everything), settings, self.max_completion_length)[rows]
        advantages = inputs["advantages"].unsqueeze(1).expand_as(logprobs)[mask]
        lengths = mask.sum(1)
        reference = inputs["ref_per_token_logps"][mask] if self.beta else old[mask]
        ours = token_loss(logprobs[mask], old[mask], reference, advantages, settings,
                          lengths.tolist())  # fmt: skip
        updates = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        each = torch.tensor(weights).repeat_interleave(lengths)
        total = (ours.losses_C * each).sum() * updates
        gradients = [torch.autograd.grad(each, logprobs, retain_graph=True)[0]
                     for each in (loss, total)]  # fmt: skip
        dual = (advantages < 0) & (ours.log_ratios_C > np.log(10))
        gap = (gradients[0] - gradients[1]).abs().max().item()
        size = gradients[0].abs().max().item()
        self.compared.append((loss.item(), total.item(), gap, size, int(dual.sum()), len(rows)))
        shares = [part.double().mean().item() for part in ours.clipped_C.split(lengths.tolist())]
        assert [self._outcomes[row].clip_fraction for row in rows] == pytest.approx(shares)
        return loss


AGGREGATIONS = {"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant"}


@pytest.mark.parametrize(
    "loss_type, level, beta",
    slow_except(
        [("dapo", "token", 0), ("grpo", "sequence", 0)],
        [
            ("dapo", "token", 0),
            ("grpo", "token", 0.1),
            ("dr_grpo", "token", 0),
            ("grpo", "sequence", 0),
        ],
    ),
)
def test_the_loss_and_its_gradient_are_those_of_this_package(tmp_path, loss_type, level, beta):
    """Dual-clipped tokens, replayed rows and micro-batches of unequal size included (paper A, eq.
    3); `grpo` with the ratio of a sequence is GSPO as its paper has it."""
    trainer = make(
        tmp_path, ReplayConfig.of("ours", ratio=0.3, max_age_steps=2, warmup_steps=1),
        BothLosses, per_device_train_batch_size=32,
        steps_per_generation=3, max_steps=12, beta=beta, epsilon=0.2, epsilon_high=0.28, delta=10.0,
        loss_type=loss_type, importance_sampling_level=level, **WITHOUT_BIAS_CORRECTION,
    )  # fmt: skip
    trainer.train()
    trained = [micro_batch for micro_batch in trainer.compared if micro_batch[3] > 0]
    sizes = [rows for *_, rows in trainer.compared]
    assert len(trained) >= 6 and any(sizes[i] != sizes[i + 2] for i in range(0, 12, 3))
    for theirs, ours, gap, size, *_ in trainer.compared:
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9)
        assert gap <= 1e-6 * size
    assert sum(dual for *_, dual, _ in trained) > 30 or level == "sequence"
    assert any(line["replay/rollouts"] for line in metrics(tmp_path))


def dealt(given, trained, processes, micro_batches, accumulated=1, done=0):
    """(tokens of the normaliser, micro-batches) of each process, with TRL's shuffle and split."""
    for index in range(processes):
        trainer = SimpleNamespace(
            _texts=Texts(["p"] * 4, ["c"] * 4, TOKENS, np.ones((4, 1))),
            _run=SimpleNamespace(
                step=lambda _: SimpleNamespace(rollouts=trained, filler=rollouts(given)[0])
            ),
            num_generations=2,
            accelerator=SimpleNamespace(
                num_processes=processes, process_index=index, is_main_process=True
            ),
            args=SimpleNamespace(
                steps_per_generation=micro_batches, gradient_accumulation_steps=accumulated
            ),
            _step=done,
            _tokenizer=SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD),
            reward_weights=torch.ones(1),
            _extras=EXTRAS,
        )
        methods = (
            "_replay_step",
            "_compose",
            "_weight_of",
            "_from_main",
            "_rows",
            "_to_tensors",
        )
        for name in methods:
            setattr(trainer, name, MethodType(getattr(ReplayMixin, name), trainer))
        whole = ReplayMixin._replayed(trainer, given)
        parts = split_tensor_dict(shuffle_sequence_dict(whole), micro_batches)
        _add_left_over_rows(whole, parts, trainer._order)
        weights = []
        for part in parts:
            rows = len(part["replay_row"])
            weights.append((rows, ReplayMixin._weight(trainer, rows)))
            trainer._micro_batches_left -= 1
        yield whole["num_items_in_batch"].item(), parts, weights


@pytest.mark.parametrize("rows", range(5))
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 5])
@pytest.mark.parametrize("accumulated", [1, 2, 3])
def test_every_row_is_dealt_once_and_has_one_weight(rows, processes, micro_batches, accumulated):
    """The loss is a mean over the tokens that train, not those of a tool: 2, 3, 4, 6 here. Ranks
    have equally many rows in each micro-batch, and padding only where rows are missing."""
    given = batch(tool_mask=torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1]]))
    trained = rollouts(given)[:rows]
    ranks = list(dealt(given, trained, processes, micro_batches, accumulated, micro_batches))
    numbers = [part["replay_row"].tolist() for _, parts, _ in ranks for part in parts]
    flat = [number for each in numbers for number in each]
    assert sorted(number for number in flat if number >= 0) == list(range(rows))
    assert flat.count(-1) == max(-rows % processes, micro_batches * processes - rows)
    for tokens, parts, weights in ranks:
        assert tokens == (1, 2, 3, 4, 6)[rows] and weights == ranks[0][2]
        for part, (count, weight) in zip(parts, weights, strict=True):
            assert len(part["completion_ids"]) == count
            if weight:  # what a row weighs in the mean of all ranks
                assert weight / count / processes / micro_batches == pytest.approx(1 / rows)
    trains = [any(max(parts[i]["replay_row"]) >= 0 for _, parts, _ in ranks)
              for i in range(micro_batches)]  # fmt: skip
    assert [weight > 0 for _, weight in ranks[0][2]] == trains
    updates = [(micro_batches + i) // accumulated for i in range(micro_batches)]
    of_update = Counter(update for update, real in zip(updates, trains, strict=True) if real)
    assert len(of_update) == min(len(set(updates)), sum(trains))
    if micro_batches % accumulated == 0 and rows:
        assert max(of_update.values()) - min(of_update.values()) <= 1


def test_draws_have_the_seed_of_trl(tmp_path):
    assert make(tmp_path, preset("ours"), seed=7).replay_buffer.seed == 7


def test_without_replay_it_is_trls_trainer_bit_for_bit(tmp_path):
    found = []
    for name, replay, kind in (
        ("plain", None, GRPOTrainer),
        ("off", ReplayConfig.of("ours", ratio=0.0), ReplayGRPOTrainer),
    ):
        trainer = make(tmp_path / name, replay, kind, max_steps=4)
        trainer.train()
        found.append(weights_of(trainer))
    assert found[0] == found[1]
    assert not (tmp_path / "off" / "rollouts").exists()


@pytest.mark.parametrize(
    "changes, replay, named",
    [
        (
            {"num_iterations": 2, "scale_rewards": "batch", "beta": 0.1, "sync_ref_model": True},
            {},
            ["num_iterations 2", "scale_rewards 'batch'", "sync_ref_model"],
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "use_adaptive_entropy": True},
            {},
            ["aggregation 'normalize_then_sum'", "use_adaptive_entropy"],
        ),
        ({}, {"warmup_steps": 4}, ["replay.warmup_steps 4"]),
        ({}, {"capacity_rollouts": 31}, ["replay.capacity_rollouts 31"]),
    ],
    ids=["many", "others", "warm-up", "capacity"],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_by_name(tmp_path, changes, replay, named):
    settings = ReplayConfig.of("ours", **{"warmup_steps": 1, **replay})
    with pytest.raises(UsageError) as seen:
        make(tmp_path, settings, **changes)
    assert [name for name in named if name not in str(seen.value)] == []


def test_settings_that_are_no_replay_config_are_refused(tmp_path):
    with pytest.raises(TypeError, match="ReplayConfig"):
        make(tmp_path, {"preset": "ours"})


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "float32"),
        ({"bf16": True}, "bfloat16"),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, "bfloat16"),
    ],
)
def test_the_recipe_has_the_precision_in_which_the_policy_computes(tmp_path, changes, dtype):
    sections = make(tmp_path, preset("ours"), **changes)._sections(8)
    assert sections["model"]["dtype"] == dtype


def test_log_probs_of_birth_are_without_dropout(tmp_path):
    """Those of an update have it, as in TRL. What was in evaluation mode before stays so."""
    dropout = {"dtype": "float32", "attention_dropout": 0.5}
    trainer = make(tmp_path, preset("ours"), model_init_kwargs=dropout)
    trainer.model.train()
    trainer.model.lm_head.eval()
    ids = torch.arange(3, 15).reshape(2, 6)
    batch = (trainer.model, ids, torch.ones_like(ids), 4)
    with torch.no_grad(), intercepted(trainer, _get_per_token_logps_and_entropies=evaluating):
        first, second = (trainer._get_per_token_logps_and_entropies(*batch)[0] for _ in "ab")
    assert torch.equal(first, second)
    assert trainer.model.training and not trainer.model.lm_head.training
    noisy = trainer._get_per_token_logps_and_entropies(*batch)[0].detach()
    assert (noisy - first).abs().max() > 0.01


class EightPrompts(ReplayGRPOTrainer):
    """Two generation batches in an epoch."""

    def __init__(self, model, reward, args, dataset, **others):
        super().__init__(model, reward, args, dataset.select(range(8)), **others)


def test_a_run_by_epochs_has_its_own_length_in_the_recipe(tmp_path):
    epochs = {"max_steps": -1, "num_train_epochs": 1}
    with pytest.raises(RecipeError, match=r"warmup_steps 2 .*the 2 generation batches"):
        make(tmp_path / "a", ReplayConfig.of("ours", warmup_steps=2), EightPrompts,
             **epochs).train()  # fmt: skip
    make(tmp_path / "b", preset("ours"), EightPrompts, **epochs).train()
    assert open_source(tmp_path / "b").recipe.run.steps == len(metrics(tmp_path / "b")) == 2
    # A warm-up above the default length of a recipe.
    make(tmp_path / "c", ReplayConfig.of("ours", warmup_steps=250), **epochs)


class TwoRewards(ReplayGRPOTrainer):
    """Seven completions of the first group get no reward. Of the others every third has none of
    the second function, whose weight is larger."""

    def __init__(self, model, reward, args, dataset, **others):
        def first(**given):
            scores = enumerate(reward(**given))
            return [score if i == 0 or i >= 8 else None for i, score in scores]

        def second(completions, **_):
            return [float(len(each) % 3) if i >= 8 and i % 3 else None
                    for i, each in enumerate(completions)]  # fmt: skip

        super().__init__(model, [first, second], args, dataset, **others)


def test_rewards_that_do_not_come_and_several_functions_are_logged_as_verify_counts(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 6, "max_steps": 6}
    make(tmp_path, preset("fifo"), TwoRewards, reward_weights=[0.7, 1.0], **saves).train()
    report = verify_run(tmp_path)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert "checkpoints" not in {check.name for check in report.checks}
    assert len(ReplayBuffer.load(tmp_path / "checkpoint-6" / "buffer.parquet")) == 64
    assert any(row["reward"] is not None and not row["kept"] for row in logged(tmp_path))


class Shapes(ReplayGRPOTrainer):
    """Keeps the number of tokens of prompts and completions of every micro-batch."""

    def _compute_loss(self, model, inputs):
        self.shapes |= {inputs["prompt_ids"].size(1), inputs["completion_ids"].size(1)}
        return super()._compute_loss(model, inputs)


def test_truncated_completions_padding_and_ratios_of_sequences_are_those_of_trl(tmp_path):
    trainer = make(
        tmp_path, preset("ours"), Shapes, mask_truncated_completions=True, max_completion_length=12,
        pad_to_multiple_of=16, importance_sampling_level="sequence", learning_rate=1e-3,
    )  # fmt: skip
    trainer.shapes = set()
    trainer.processing_class.pad_token = trainer.processing_class.eos_token
    trainer.train()
    assert trainer.shapes == {16}
    cut_off = [row for row in logged(tmp_path) if row["finish_reason"] == "length"]
    assert cut_off and not any(row["kept"] for row in cut_off)
    assert {len(row["completion_token_ids"]) for row in cut_off} == {12}
    assert verify_run(tmp_path).passed
    clipped = {row["clip_fraction"] for row in logged(tmp_path, "draws")}
    assert clipped == {0.0, 1.0}  # a sequence is clipped as a whole


def test_steps_without_a_survivor_train_on_nothing(tmp_path):
    trainer = make(tmp_path, preset("ours"), max_steps=4)
    before = weights_of(trainer)
    trainer.reward_funcs = [lambda completions, **_: [1.0] * len(completions)]
    trainer.train()
    assert [line["cost/trained_rollouts"] for line in metrics(tmp_path)] == [0, 0]
    assert weights_of(trainer) == before  # a gradient of 0, no weight decay


def of_one_group(completions, **_):
    """Seven of eight groups have no signal: eight rows are left of 64, four on each process."""
    return [float(i < 8 and i % 2) for i, _ in enumerate(completions)]


def test_what_trl_logs_is_of_real_rows_where_few_have_a_signal(tmp_path):
    """Of 32 micro-batches 8 to 12 have a row, the others padding."""
    trainer = make(tmp_path, preset("ours"), per_device_train_batch_size=2, max_steps=2,
                   steps_per_generation=32, gradient_accumulation_steps=32)  # fmt: skip
    trainer.reward_funcs = [of_one_group]
    trainer.train()
    log = [line for line in trainer.state.log_history if "replay/rollouts" in line]
    for theirs, ours in zip(log, metrics(tmp_path), strict=True):
        assert ours["cost/trained_rollouts"] in (8, 12)
        assert theirs["entropy"] == pytest.approx(ours["entropy"], rel=0.25)
        assert theirs["clip_ratio/region_mean"] is not None


def test_no_update_is_of_padding_alone_while_there_are_enough_rows(tmp_path):
    """Eight to twelve rows in 16 micro-batches, for four updates."""
    trainer = make(tmp_path, preset("ours"), per_device_train_batch_size=4, max_steps=8,
                   steps_per_generation=16, gradient_accumulation_steps=4)  # fmt: skip
    trainer.reward_funcs = [of_one_group]
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert len(norms) == 8 and min(norms) > 0


class Experts(ReplayGRPOTrainer):
    """A small mixture of experts, whose auxiliary loss is in TRL's."""

    def __init__(self, model, reward, args, dataset, **others):
        config = Qwen3MoeConfig(
            vocab_size=24, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
            num_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
        )  # fmt: skip
        args.model_init_kwargs = None
        super().__init__(Qwen3MoeForCausalLM(config), reward, args, dataset, **others)


class Bonuses(Hearing, Experts):
    """Keeps what the auxiliary loss and the bonus of entropy add to the loss of every micro-batch,
    and what they are for its rows; 0 for those of padding alone."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.added, self.expected = [], []

    def compute_loss(self, model, inputs, **kwargs):
        self.entropy_coef = self.router_aux_loss_coef = 0.0
        alone = super().compute_loss(model, inputs, **kwargs)
        self.entropy_coef = self.router_aux_loss_coef = 0.5
        loss = super().compute_loss(model, inputs, **kwargs)
        _, entropy, auxiliary = self.forward
        mask, real = inputs["completion_mask"], max(inputs["replay_row"]) >= 0
        bonus = (entropy * mask).sum() / mask.sum().clamp(min=1)
        self.added.append((loss - alone).item())
        self.expected.append((0.5 * (auxiliary - bonus)).item() if real else 0.0)
        return loss


@pytest.mark.skipif("router_aux_loss_coef" not in OWN, reason="this TRL has none")
@pytest.mark.parametrize("loss_type", slow_except(["grpo"], ["dapo", "grpo"]))
def test_padding_weakens_neither_the_bonus_of_entropy_nor_the_auxiliary_loss(tmp_path, loss_type):
    """Of 32 micro-batches of an update 8 have a row, 12 in the second step."""
    trainer = make(tmp_path, preset("ours"), Bonuses, per_device_train_batch_size=2, max_steps=2,
                   steps_per_generation=32, gradient_accumulation_steps=32, entropy_coef=0.5,
                   router_aux_loss_coef=0.5, loss_type=loss_type)  # fmt: skip
    trainer.reward_funcs = [of_one_group]
    trainer.train()
    for first, rows in ((0, 8), (32, 12)):
        added, expected = (each[first : first + 32] for each in (trainer.added, trainer.expected))
        assert expected.count(0.0) == added.count(0.0) == 32 - rows
        assert sum(added) == pytest.approx(sum(expected) / rows, rel=1e-3)


class Kill(TrainerCallback):
    def __init__(self, update: int = 6):
        self.update = update

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.update:
            raise KeyboardInterrupt


def test_a_trainer_that_was_stopped_goes_on_from_its_checkpoint(tmp_path, whole):
    """The same object, as in a notebook, and inside a generation batch."""
    folder, never_stopped = whole
    stopped = make(tmp_path, preset("ours"), **SAVES)
    stopped.add_callback(Kill(7))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    stopped.remove_callback(Kill)
    stopped.train(resume_from_checkpoint=True)
    assert weights_of(stopped) == weights_of(never_stopped)
    assert metrics(tmp_path, False) == metrics(folder, False)
    for kind in ("rollouts", "draws"):
        assert logged(tmp_path, kind) == logged(folder, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["group_std", "fifo"])
def test_a_killed_and_resumed_run_is_the_one_never_killed(tmp_path, name):
    whole = make(tmp_path / "whole", preset(name), Watched, **SAVES)
    whole.train()
    check_run(tmp_path / "whole", whole, name)
    killed = make(tmp_path / "killed", preset(name), **SAVES)
    killed.add_callback(Kill())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = make(tmp_path / "killed", preset(name), **SAVES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-4"))
    assert weights_of(resumed) == weights_of(whole)
    assert metrics(tmp_path / "killed", False) == metrics(tmp_path / "whole", False)
    for kind in ("rollouts", "draws"):
        assert logged(tmp_path / "killed", kind) == logged(tmp_path / "whole", kind)


@pytest.mark.parametrize(
    "changes, ends",
    [({"save_steps": 4}, 7), pytest.param(THREE_OF_FOUR, 8, marks=pytest.mark.slow)],
)
def test_a_run_saved_inside_a_generation_batch_repeats_that_batch(tmp_path, changes, ends):
    """The last checkpoint is of five updates, two in a generation batch; or of 20 micro-batches,
    three in a generation batch."""
    changes = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5, **changes}
    stopped = make(tmp_path, preset("ours"), **changes)
    with (
        pytest.warns(UserWarning, match="checkpoint-5 is saved inside a generation batch"),
        pytest.warns(UserWarning, match="training ended inside generation batch"),
    ):
        stopped.train()
    before, lines = logged(tmp_path), metrics(tmp_path)
    assert stopped.replay_buffer.last_step == len(lines) + 1
    changes |= {"max_steps": ends, "save_strategy": "no"}
    resumed = make(tmp_path, preset("ours"), Watched, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    after, more = logged(tmp_path), metrics(tmp_path)
    assert after[: len(before)] == before and more[: len(lines)] == lines
    assert [line["step"] for line in more] == list(range(1, len(more) + 1))
    assert len(more) > len(lines)
    assert [row["rollout_id"] for row in after] == list(range(len(after)))
    assert any(birth <= len(lines) for _, _, _, birth, _, _ in resumed.seen)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("ours", {"num_generations": 4}, "resume with num_generations 8"),
        ("uniform", {}, "replay.priority is 'abs_advantage' in the file and 'uniform' in"),
        ("ours", {}, "buffer.parquet is missing"),
        ("ours", {"beta": 0.04}, "no ref_per_token_logps with its rollouts: resume with beta 0"),
    ],
)
def test_a_checkpoint_with_another_buffer_or_none_is_refused(
    tmp_path, whole, name, changes, message
):
    shutil.copytree(whole[0], tmp_path / "copy")
    checkpoint = tmp_path / "copy" / "checkpoint-4"
    if "missing" in message:
        (checkpoint / "buffer.parquet").unlink()
    other = make(tmp_path / "copy", preset(name), **SAVES, **changes)
    with pytest.raises(DataError, match=message):
        other.train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_without_the_ratios_of_vllm_is_refused_where_they_correct_the_loss(
    tmp_path, whole
):
    trainer = make(tmp_path, preset("ours"))
    trainer.use_vllm = True  # TRL's correction is on by default
    with pytest.raises(CheckpointError, match=r"resume with vllm_importance_sampling_correction"):
        trainer._run.load(whole[0] / "checkpoint-4", trainer._needed_extras())


def test_a_checkpoint_without_the_history_of_its_buffer_is_refused(tmp_path, whole):
    checkpoint = whole[0] / "checkpoint-4"
    with pytest.raises(CheckpointError, match=f"resume with output_dir {whole[0]}"):
        make(tmp_path, preset("ours"), **SAVES).train(resume_from_checkpoint=str(checkpoint))
    assert not (tmp_path / "rollouts").exists()


def test_a_run_of_plain_trl_goes_on_with_an_empty_buffer(tmp_path):
    make(tmp_path, None, GRPOTrainer, **SAVES, max_steps=5).train()
    trainer = make(tmp_path, preset("ours"), **SAVES, max_steps=8)
    with pytest.warns(UserWarning, match=r"checkpoint-4.*the buffer begins empty"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    assert trainer.state.global_step == 8 and metrics(tmp_path)[-1]["replay/rollouts"] > 0
    assert verify_run(tmp_path).passed


def test_the_folder_of_another_run_is_refused_before_anything_is_generated(tmp_path):
    make(tmp_path, preset("ours"), max_steps=4).train()
    with pytest.raises(OutputDirectoryError, match="another run"):
        make(tmp_path, preset("ours"), max_steps=4)
    (tmp_path / "checkpoint-4").mkdir()  # to resume from, or not
    again = make(tmp_path, preset("ours"), max_steps=4)
    again.reward_funcs = []
    with pytest.raises(OutputDirectoryError, match="another run"):
        again.train()


@pytest.mark.slow
def test_a_subclass_of_ones_own_with_a_reference_model(tmp_path):
    class Own(GRPOTrainer):
        pass

    class Replaying(ReplayMixin, Own):
        pass

    trainer = make(tmp_path, preset("ours"), Replaying, beta=0.1)
    trainer.train()
    reference = [
        rollout.extras["ref_per_token_logps"] for rollout in trainer.replay_buffer.rollouts()
    ]
    assert reference and all(np.isfinite(each).all() for each in reference)
    assert sum(line["replay/rollouts"] for line in metrics(tmp_path)) > 0


def two_ranks(folder, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node", "2", str(RUNS), str(folder), *words]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment())


class LearnedPositions(ReplayGRPOTrainer):
    """GPT-2, whose positions count the padding."""

    def __init__(self, model, reward, args, dataset, **others):
        config = GPT2Config(vocab_size=24, n_embd=32, n_layer=1, n_head=2, initializer_range=0.5)
        args.model_init_kwargs = None
        super().__init__(GPT2LMHeadModel(config), reward, args, dataset, **others)


def test_a_model_whose_log_probs_depend_on_padding_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"8 tokens of padding .* change the model's log-probs"):
        make(tmp_path / "replay", preset("ours"), LearnedPositions).train()
    make(tmp_path / "plain", ReplayConfig.of("grpo"), LearnedPositions, max_steps=1).train()


@pytest.mark.slow
def test_a_callback_that_stops_by_a_metric_of_replay_stops_every_rank(tmp_path):
    done = two_ranks(tmp_path, "ours", "stop")
    assert done.returncode == 0, done.stderr
    assert [line["replay/rollouts"] > 0 for line in metrics(tmp_path)] == [False, True]


@pytest.mark.slow
def test_two_ranks_train_on_one_buffer(tmp_path):
    done = two_ranks(tmp_path, "ours")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "weights_0").read_text() == (tmp_path / "weights_1").read_text()
    lines = metrics(tmp_path)
    assert len(lines) == 4 and all(line["cost/generated_rollouts"] == 32 for line in lines)
    assert all(line["replay/rollouts"] == round(line["fresh/rollouts"] / 2) for line in lines[1:])


@pytest.mark.slow
def test_what_the_buffer_refuses_stops_every_rank(tmp_path):
    done = two_ranks(tmp_path, "ours", "nan")
    assert done.returncode != 0
    assert done.stderr.count("ValueError: rollout ") >= 2, done.stderr
    assert "behaviour log-prob of token 0 is nan" in done.stderr


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    example = Path(__file__).parents[2] / "docs" / "replay_in_trl.py"
    done = subprocess.run(
        [sys.executable, str(example), str(tmp_path)],
        capture_output=True, text=True, timeout=280, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.split("reward ")[1].splitlines()[0].split(" to ")
    assert float(last) > float(first) + 0.1


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_in_process_has_its_correction_stored_and_replayed(tmp_path, monkeypatch):
    """TRL's own weight sync fails with vLLM's CPU build, which repacks weights as it loads them."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # To be put back: vLLM replaces it by a function that does nothing.
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)
    trainer = make(tmp_path, preset("ours"), Watched, use_vllm=True, vllm_mode="colocate",
                   vllm_gpu_memory_utilization=0.3, vllm_max_model_length=64,
                   vllm_importance_sampling_mode="token_truncate")  # fmt: skip
    generation = trainer.vllm_generation
    # Collected in the middle of a later test, it would destroy the groups of that test's engine.
    generation.llm.llm_engine.engine_core._finalizer.detach()

    def sync():
        weights = [
            (name, value.detach().clone()) for name, value in trainer.model.named_parameters()
        ]
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync
    trainer.train()
    check_run(tmp_path, trainer, "ours")
    stored = trainer.replay_buffer.rollouts()
    ratios = [rollout.extras["importance_sampling_ratio"] for rollout in stored]
    assert [len(each) for each in ratios] == [len(each.completion_token_ids) for each in stored]
    for rollout, ratio in zip(stored, ratios, strict=True):
        expected = np.exp(rollout.behavior_logprobs - rollout.sampler_logprobs)
        np.testing.assert_allclose(ratio, np.minimum(expected, 3.0), rtol=1e-4)
    assert any((each != 1).any() for each in ratios)
    generation.llm.llm_engine.model_executor.shutdown()
