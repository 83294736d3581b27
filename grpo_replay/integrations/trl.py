"""Replay in TRL's GRPOTrainer.

    trainer = ReplayGRPOTrainer(
        model, reward_funcs, args, train_dataset, replay=ReplayConfig.of("ours")
    )

TRL's loss divides by `old_per_token_logps` in a row's importance ratio. If these are the log-probs
of the row's birth, it is the off-policy loss of paper A. So only the generation batch changes: the
buffer's composed batch replaces what `_generate_and_score_completions` returns, and every other
method of TRL stays as it is. The trainer's policy computes the log-probs of birth, also with vLLM;
the correction for vLLM's own is stored with the rollout (`importance_sampling_ratio`).

A step of the buffer is a generation batch (`steps_per_generation` micro-batches). With preset
`grpo` or ratio 0 this is TRL's own trainer, bit for bit.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.nn.functional import pad
from trl import GRPOTrainer

from grpo_replay.errors import UsageError
from grpo_replay.integrations.accelerated import AcceleratedReplay, update_by_update
from grpo_replay.integrations.grpo_config import GRPO_CONFIG, sections_of
from grpo_replay.integrations.host import Row
from grpo_replay.integrations.interception import ForwardPasses, evaluating, intercepted
from grpo_replay.integrations.outcomes import outcomes_of, probe_outcomes
from grpo_replay.integrations.trl_rows import (
    EXTRAS,
    ROW,
    Tensors,
    Texts,
    rows_of,
    to_tensors,
    trained_mask,
)
from grpo_replay.recipe import ReplayConfig
from grpo_replay.replay.batch import even_sizes
from grpo_replay.replay.entry_store import checked_settings
from grpo_replay.types import Rollout, RolloutOutcome

PADDED, PADDING_GAP = 8, {False: 1e-2, True: 0.1}
"""Padding tokens put before a prompt as a test, and the mean change of log-probs, in nats, that
they may cause in float32 and in half precision."""


class ReplayMixin(AcceleratedReplay):
    """Adds replay to a subclass of GRPOTrainer; put it first: `class Mine(ReplayMixin, Trainer)`.

    `replay` has the settings of the buffer (default: preset `ours`). rollouts/, draws/ and
    metrics.jsonl are written to `output_dir`, the buffer to every checkpoint, from which
    `resume_from_checkpoint` reads it. Raises UsageError for settings under which replay is wrong.
    """

    stored_keys: Mapping[str, float] = MappingProxyType({})
    """Further keys of a subclass's generation batch, with their padding: tensors [B, T] or [B, 1]
    that are stored with a rollout, and are in the batch again when it is replayed."""
    _buffered_inputs: Any  # TRL's: the micro-batches of the generation batch
    _tag_names: Any  # TRL's: of the model card

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises TypeError for a class in which GRPOTrainer's methods hide those of this one."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if GRPOTrainer in order and order.index(GRPOTrainer) < order.index(ReplayMixin):
            raise TypeError(
                f"class {cls.__name__}: ReplayMixin stands behind GRPOTrainer, so that nothing "
                f"would be replayed; let it stand first: class {cls.__name__}(ReplayMixin, …)"
            )

    def __init__(self, *args: Any, replay: ReplayConfig | None = None, **kwargs: Any) -> None:
        """TRL's own; then, if the settings replay, the buffer. Raises UsageError."""
        super().__init__(*args, **kwargs)
        self.replay = ReplayConfig() if replay is None else checked_settings(replay)
        if not self.replay.replays:
            return
        if problems := list(_problems(self, self.args)):
            raise UsageError("replay in TRL: " + "; ".join(problems))
        self._tag_names = [*self._tag_names, "grpo-replay", "rollout-replay"]
        self._begin_replay(self.replay, GRPO_CONFIG)

    def _sections(self, max_steps: int) -> dict[str, Any]:
        return sections_of(self.args, self.model.config._name_or_path, self._is_rounded, max_steps)

    def _needed_extras(self) -> dict[str, str]:
        needed = {"ref_per_token_logps": "beta 0"} if self.beta != 0 else {}
        if self.use_vllm and self.vllm_importance_sampling_correction:
            needed["importance_sampling_ratio"] = "vllm_importance_sampling_correction False"
        return needed

    @property
    def _is_rounded(self) -> bool:
        """Whether log-probs have half precision."""
        parameter = next(self.accelerator.unwrap_model(self.model).parameters())
        return self.args.bf16 or self.args.fp16 or parameter.dtype != torch.float32

    # The generation batch

    def _prepare_inputs(self, generation_batch: Any) -> Tensors:
        """TRL's own, called for every micro-batch; a new generation batch is made with replay."""
        if not (self.replay.replays and self.model.training):
            return super()._prepare_inputs(generation_batch)
        self._tensors: Tensors = {}
        with intercepted(self, _generate_and_score_completions=self._generate_with_buffer):
            inputs = super()._prepare_inputs(generation_batch)
        if self._tensors:
            _add_left_over_rows(self._tensors, self._buffered_inputs, self._order)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _generate_with_buffer(self, generate: Any, inputs: Any) -> Tensors:
        """Generate a batch by TRL's `generate`, take the step of the buffer with it, and return the
        composed batch to train on in its place; in shadow TRL's own."""
        is_first = self._open_replay()
        self._begin_batch()
        self._texts: Texts | None = None
        seconds, began = self._clock.seconds, time.perf_counter()
        with intercepted(
            self,
            _calculate_rewards=self._record_rewards,
            _get_per_token_logps_and_entropies=self._timed_logprobs,
        ):
            output = generate(inputs)
            if is_first:
                self._refuse_padding(output)
            other_stages = seconds["reward"] + seconds["logprob"]
            seconds["generation"] = time.perf_counter() - began - other_stages
            scored = output
            if "old_per_token_logps" not in output:
                scored = {**output, "old_per_token_logps": self._logprobs(output)}
        if self.replay.shadow:
            self._shadow_step(self._rows(scored), partial(self._score, output=scored))
            return output
        self._tensors = self._replayed(scored)
        return self._tensors

    def _timed_logprobs(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the log-probs of the policy at birth, or of the reference, without dropout, and
        time them. In shadow TRL's own calls stay as they are."""
        began = time.perf_counter()
        result = (method if self.replay.shadow else partial(evaluating, method))(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # else their time counts as that of the next stage
        self._clock.seconds["logprob"] += time.perf_counter() - began
        return result

    def _record_rewards(
        self, calculate: Any, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """Call TRL's method for all processes' rewards; keep texts and scores of our own rows."""
        began = time.perf_counter()
        scores_NF = calculate(inputs, prompts, completions, completion_ids_list)
        first = self.accelerator.process_index * len(prompts)
        scores_BF = scores_NF[first : first + len(prompts)].double().cpu().numpy()
        self._texts = Texts(prompts, completions, completion_ids_list, scores_BF)
        self._clock.seconds["reward"] += time.perf_counter() - began
        return scores_NF

    def _logprobs(self, output: Tensors) -> torch.Tensor:
        """Compute the policy's log-probs [B, T] of the completions, which TRL does not do if a
        generation batch lies within one update."""
        with torch.no_grad():
            return evaluating(
                self._get_per_token_logps_and_entropies,
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )[0]

    def _refuse_padding(self, output: Tensors) -> None:
        """Raises UsageError, on every process, for a model whose log-probs depend on the padding
        before a prompt: a row that is replayed is padded to another length than at its birth."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        row = {name: output[name][:1] for name in names}
        padded = {name: pad(ids, (PADDED * ("prompt" in name), 0)) for name, ids in row.items()}
        change_T = (self._logprobs(row) - self._logprobs(padded)).abs()[row["completion_mask"] > 0]
        change = max(gather_object([change_T.mean().item() if len(change_T) else 0.0]))
        if change > PADDING_GAP[self._is_rounded]:
            raise UsageError(
                f"replay in TRL: {PADDED} tokens of padding before a prompt change the model's "
                f"log-probs, by {change:.2g} on average, and a replayed row is padded anew: take a "
                "model without learned absolute positions (GPT-2, GPT-Neo and StarCoder have them)"
            )

    def _replayed(self, output: Tensors) -> Tensors:
        """Give this process's rows to the buffer, and return its share of the composed batch in
        TRL's format. Padding follows if it has fewer rows than micro-batches or another process."""
        trained, filler = self._replay_step(self._rows(output))
        rows = self._assignment.rows_for(self.accelerator.process_index)
        rollouts = [trained[row] if row >= 0 else filler for row in rows]
        tensors = self._to_tensors(rollouts, rows, output)
        tokens = max(1, sum(rollout.trained_tokens for rollout in trained))
        tensors["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], tokens)
        accumulated = self.args.gradient_accumulation_steps
        self._order = update_by_update(self._assignment.micro_batches, accumulated, self._step)
        return tensors

    @property
    def _extras(self) -> dict[str, float]:
        return {**EXTRAS, **self.stored_keys}

    def _rows(self, output: Tensors) -> list[Row]:
        weights_F = self.reward_weights.cpu().numpy()
        ends = getattr(self, "eos_token_ids", [self._tokenizer.eos_token_id])
        return rows_of(output, self._texts, weights_F, ends, self._extras)

    def _to_tensors(
        self, rollouts: Sequence[Rollout], rows: Sequence[int], output: Tensors
    ) -> Tensors:
        multiple = getattr(self, "pad_to_multiple_of", None)
        padding_id = self._tokenizer.pad_token_id
        return to_tensors(rollouts, rows, output, padding_id, multiple, self._extras)

    def _score(self, rollouts: Sequence[Rollout], output: Tensors) -> list[RolloutOutcome]:
        """Compute the outcomes that drawn rollouts would have in an update now (shadow)."""
        tensors = self._to_tensors(rollouts, range(len(rollouts)), output)
        return probe_outcomes(
            tensors["old_per_token_logps"],
            trained_mask(tensors),
            self._logprobs(tensors),
            tensors["advantages"],
            self._clipped_loss,
        )

    # Results

    def compute_loss(self, model: Any, inputs: Tensors, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns TRL's loss, weighted for unequal micro-batches (0 for padding alone, whose
        metrics are dropped); adds what the update did to its rows to `_outcomes`."""
        if not (self.replay.trains_on_draws and self.model.training):
            return super().compute_loss(model, inputs, *args, **kwargs)
        weight = self._weight(len(inputs[ROW]))
        tokens = inputs["num_items_in_batch"] * (weight or 1.0)
        logged = {name: len(values) for name, values in self._metrics["train"].items()}
        forwards = ForwardPasses(inputs["old_per_token_logps"])
        traced = {"old_per_token_logps": forwards.old_BT, "num_items_in_batch": tokens}
        with intercepted(self, _get_per_token_logps_and_entropies=forwards.record):
            loss = super().compute_loss(model, {**inputs, **traced}, *args, **kwargs)
        forwards.trace(loss, inputs["advantages"])
        # With it the ratio weighs the KL term too, and has a gradient also where it is clipped.
        hides_clips = self.beta and getattr(self.args, "use_bias_correction_kl", False)
        clipped_BT = None if hides_clips else forwards.clipped_BT
        logprobs_BT, entropy_BT = forwards.outputs or (None, None)
        self._outcomes |= outcomes_of(
            inputs[ROW].tolist(),
            inputs["old_per_token_logps"],
            trained_mask(inputs),
            logprobs_BT,
            clipped_BT,
            entropy_BT,
        )
        if weight == 0:  # drop what TRL logged of padding
            for name, values in self._metrics["train"].items():
                del values[logged.get(name, 0) :]
        return loss if weight == 1 else weight * loss

    def _weight(self, rows: int) -> float:
        """Returns the factor for the loss of the current micro-batch, which has so many rows."""
        micro_batches = self._assignment.micro_batches
        turn = self._order.index(micro_batches - self._micro_batches_left)
        return self._weight_of(rows, self._assignment.is_padding(turn))


class ReplayGRPOTrainer(ReplayMixin, GRPOTrainer):
    """TRL's GRPOTrainer with replay; `replay` has the settings of the buffer."""


def _add_left_over_rows(whole: Tensors, micro_batches: list[Tensors], order: Sequence[int]) -> None:
    """Add the rows that TRL leaves out to `micro_batches`: TRL gives each equally many; the first
    in `order` get one more. Micro-batches that are all padding come last in `order`, so that
    no update is all padding while there are enough rows."""
    ordered = [micro_batches[index] for index in order]
    assigned = {row for micro_batch in micro_batches for row in micro_batch[ROW].tolist()}
    left_over = (i for i, row in enumerate(whole[ROW].tolist()) if row not in assigned)
    sizes = even_sizes(len(whole[ROW]), len(micro_batches))
    for micro_batch, size in zip(ordered, sizes, strict=True):
        added = [next(left_over) for _ in range(size - len(micro_batch[ROW]))]
        for name, rows in micro_batch.items():
            if rows.dim() and added:
                micro_batch[name] = torch.cat([rows, whole[name][added]])
    ordered.sort(key=lambda micro_batch: micro_batch[ROW].tolist() == [-1])
    for index, micro_batch in zip(order, ordered, strict=True):
        micro_batches[index] = micro_batch


def _problems(trainer: Any, args: Any) -> Iterator[str]:
    """Yields the settings of TRL under which replay would be wrong, with what to set."""
    if trainer.num_iterations > 1:
        yield (
            f"num_iterations {trainer.num_iterations} trains on every batch several times: set 1 "
            "and raise replay.ratio"
        )
    for name, allowed in (
        ("scale_rewards", "'group' or 'none'"),
        ("multi_objective_aggregation", "'sum_then_normalize'"),
    ):
        if (value := getattr(trainer, name, None)) in ("batch", "normalize_then_sum"):
            yield (
                f"{name} {value!r} normalises over the whole batch, and the rollout log has the "
                f"mean and deviation of a group: set {allowed}"
            )
    if getattr(args, "use_adaptive_entropy", False):
        yield (
            "use_adaptive_entropy follows the entropy of every update, which is 0 in one of "
            "padding alone: set False (entropy_coef may stay)"
        )
    if getattr(trainer, "use_liger_kernel", False):
        yield "use_liger_kernel hides the log-probs of the update: set False"
    if trainer.beta != 0 and args.sync_ref_model:
        yield (
            "sync_ref_model changes the reference, whose log-probs are stored with a rollout: set "
            "False, or beta 0"
        )
