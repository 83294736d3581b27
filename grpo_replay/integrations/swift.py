"""Replay in ms-swift's GRPOTrainer.

    GRPO_REPLAY=replay.yaml swift rlhf --rlhf_type grpo \\
        --external_plugins "$(python -m grpo_replay.integrations.swift_plugin)" …

ms-swift makes a generation batch in stages. After the last, `_postprocess_batch`, samples, rewards,
log-probs and advantages are complete. There micro-batches of the composed batch replace ms-swift's
own; its own function collates them, and everything else stays as it is. `old_per_token_logps` are
the log-probs of a row's birth, so the loss is the off-policy loss of paper A. With preset `grpo` or
ratio 0 this is ms-swift's own trainer, bit for bit.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch, get_even_process_data

from grpo_replay.errors import RecipeError, UsageError
from grpo_replay.integrations.accelerated import AcceleratedReplay, update_by_update
from grpo_replay.integrations.grpo_config import GRPO_CONFIG, sections_of
from grpo_replay.integrations.host import Row, replay_settings
from grpo_replay.integrations.interception import ForwardPasses, evaluating, intercepted
from grpo_replay.integrations.outcomes import outcomes_of, probe_outcomes
from grpo_replay.integrations.shares import shares_of, spread
from grpo_replay.recipe import ReplayConfig
from grpo_replay.recipe.layers import anchor_paths, read_yaml
from grpo_replay.recipe.yaml_text import parse_yaml
from grpo_replay.types import Rollout, RolloutOutcome

VARIABLE = "GRPO_REPLAY"
"""The environment variable with the settings: ms-swift refuses flags that it does not know."""
ROW = "replay_row"
"""Key of a micro-batch: the index of each of its rows in the composed batch; -1 for padding."""
REFERENCE = "ref_per_token_logps"
WORDS = replace(
    GRPO_CONFIG,
    folder="--add_version false --output_dir",  # else it is a new folder within
    one_prompt=(
        "a scheduler gave each another, or its first response does not train (response_loss_mask, "
        "loss_scale): the prompt is what stands before the first token that trains"
    ),
)


def settings_from(text: str | None) -> ReplayConfig:
    """Read the settings from the value of GRPO_REPLAY, keys of `replay`: the path of a YAML or JSON
    file, or `{…}` itself; without it, preset `ours`. Raises RecipeError, which names either."""
    source, folder, given = VARIABLE, Path.cwd(), None
    if text and not text.lstrip().startswith("{"):
        source, folder, given = text, Path(text).parent, read_yaml(Path(text))
    elif text:
        try:
            given = parse_yaml(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"{VARIABLE}: neither YAML nor JSON: {text}") from error
    anchor_paths({"replay": given}, folder)
    return replay_settings(given, source)


class ReplayMixin(AcceleratedReplay):
    """Adds replay to a subclass of ms-swift's GRPOTrainer; put it first: `class Mine(ReplayMixin,
    Trainer)`. Takes its settings from GRPO_REPLAY. Raises UsageError for settings of ms-swift under
    which replay would be wrong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.replay = settings_from(os.environ.get(VARIABLE))
        super().__init__(*args, **kwargs)
        if self.replay.replays:
            _refuse(self, self.args)
            self._begin_replay(self.replay, WORDS)

    def _sections(self, max_steps: int) -> dict[str, Any]:
        parameter = next(self.accelerator.unwrap_model(self.model).parameters())
        is_rounded = self.args.bf16 or self.args.fp16 or parameter.dtype != torch.float32
        name, masks = self.model.config._name_or_path, self.overlong_filter
        return sections_of(self.args, name, is_rounded, max_steps, "ms-swift", masks)

    def _needed_extras(self) -> Mapping[str, str]:
        return {REFERENCE: "beta 0"} if self.beta else {}

    # The generation batch, by stages

    @property
    def _is_replaying(self) -> bool:
        return self.replay.replays and self.model.training

    @property
    def _trains_on_draws(self) -> bool:
        return self.replay.trains_on_draws and self.model.training

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return self._clock.stage(name) if self._is_replaying else nullcontext()

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self._is_replaying:
            self._open_replay()
            self._begin_batch()
        return super()._generate_and_score_completions(inputs)

    def _generate_completions(self, samples: Any) -> Any:
        with self._stage("generation"):
            return super()._generate_completions(samples)

    def _compute_rewards_per_func(self, samples: Any) -> torch.Tensor:
        with self._stage("reward"):
            return super()._compute_rewards_per_func(samples)

    def _prepare_batch_inputs(self, samples: Any) -> Any:
        interceptors = (
            {"_get_per_token_logps_and_entropies": evaluating} if self._trains_on_draws else {}
        )
        with self._stage("logprob"), intercepted(self, **interceptors):
            return super()._prepare_batch_inputs(samples)

    def _postprocess_batch(self, samples: Any, batches: list[dict[str, Any]]) -> None:
        """ms-swift's last stage; then takes the step of the buffer, and replaces `batches`."""
        super()._postprocess_batch(samples, batches)
        if not self._is_replaying:
            return
        rows = self._rows_of(samples, batches)
        if self.replay.shadow:
            self._shadow_step(rows, partial(self._score, like=batches[0]))
        else:
            batches[:] = self._replayed(rows, batches)

    def _rows_of(self, samples: Any, batches: list[dict[str, Any]]) -> list[Row]:
        """Convert this process's samples, with the tensors of their micro-batches, to rows."""
        grpo_batches = [batch["grpo_batch"] for batch in batches]
        _refuse(self, self.args, grpo_batches)
        scores_BF = get_even_process_data(self, self._rewards_per_func)
        chunks = zip(self.split_by_mini_batches(samples), grpo_batches, strict=True)
        located = [(sample, batch, i) for chunk, batch in chunks for i, sample in enumerate(chunk)]
        pairs = zip(located, scores_BF, strict=True)
        return [self._row_of(*sample_at, scores_F) for sample_at, scores_F in pairs]

    def _replayed(self, rows: Sequence[Row], batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take the step of the buffer with this process's `rows`, and return the micro-batches that
        it trains on, as many as its own `batches`. Sets `_shares` and `_tokens`. Collective."""
        trained, filler = self._replay_step(rows)
        order = update_by_update(len(batches), self.args.gradient_accumulation_steps, self._step)
        row_order = spread([rollout.birth_step for rollout in trained])
        self._shares = shares_of(row_order, self.accelerator.num_processes, order)
        self._tokens = float(max(1, sum(rollout.trained_tokens for rollout in trained)))
        return [
            self._micro_batch(share, [trained[i] if i >= 0 else filler for i in share], batches[0])
            for share in self._shares[self.accelerator.process_index]
        ]

    def _row_of(self, sample: Any, batch: Any, i: int, scores_F: torch.Tensor) -> Row:
        """Convert sample `i` of a micro-batch. The prompt ends before the first trained token."""
        ids = np.array(sample.encoded["input_ids"])
        trains = np.array(sample.encoded["labels"]) != -100
        first = int(trains.argmax())
        index, mask = _token_position(batch, i, len(ids) - first), trains[first:]
        text, sampler = sample.messages[-1]["content"], batch.rollout_per_token_logps
        if not (isinstance(text, str) and mask.all()):  # several turns
            text = self.processing_class.decode(ids[first:])
        return Row(
            prompt_token_ids=ids[:first],
            completion_token_ids=ids[first:],
            behavior_logprobs=batch.old_per_token_logps[index],
            reward=(scores_F * self.reward_weights).nansum().item(),  # as ms-swift: 0 if missing
            advantage=sample.advantages.item(),
            sampler_logprobs=None if sampler is None else sampler[index],
            completion_mask=None if mask.all() else mask,
            completion_text=text,
            reward_scores=tuple(scores_F.tolist()) if len(scores_F) > 1 else (),
            truncated=sample.is_truncated,
            trains=not (self.overlong_filter and sample.is_truncated),
            extras={REFERENCE: batch.ref_per_token_logps[index]} if self.beta else {},
        )

    def _micro_batch(
        self, rows: list[int], rollouts: Sequence[Rollout], like: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Collate rollouts as ms-swift collates samples. `rows` are their indices in the composed
        batch, -1 for padding; `like` is a micro-batch of ms-swift's own. Raises UsageError for a
        model that needs more than tokens."""
        device, samples = self.accelerator.device, [_to_sample(rollout) for rollout in rollouts]
        with self._template_context(self.template):
            inputs, batch = collate_to_grpo_micro_batch(
                samples, self.template, device=device, use_logits_to_keep=True
            )
        inputs.pop("labels", None)
        tensors = {name for name, value in like["model_inputs"].items() if torch.is_tensor(value)}
        if missing := sorted(tensors - inputs.keys()):
            raise UsageError(
                f"replay in ms-swift: the template gives the model {', '.join(missing)}, and "
                "replay stores tokens: take another template"
            )
        columns: dict[str, list[Any]] = {
            "old_per_token_logps": [rollout.behavior_logprobs for rollout in rollouts],
            "advantages": [np.float32(rollout.advantage or 0.0) for rollout in rollouts],
        }
        if self.beta:
            columns[REFERENCE] = [rollout.extras[REFERENCE] for rollout in rollouts]
        if like["grpo_batch"].rollout_per_token_logps is not None:
            columns["rollout_per_token_logps"] = [rollout.sampler_logprobs for rollout in rollouts]
        for name, values in columns.items():
            filled_BT = torch.zeros(batch.completion_mask.shape, device=device)
            for i, (rollout, value) in enumerate(zip(rollouts, values, strict=True)):
                index = _token_position(batch, i, len(rollout.completion_token_ids))
                filled_BT[index] = torch.tensor(value, device=device)
            setattr(batch, name, filled_BT)
        batch.completion_mask[torch.tensor(rows) < 0] = False
        batch.num_items_in_batch = torch.tensor(self._tokens, device=device)
        return {"model_inputs": inputs, "grpo_batch": batch, ROW: rows}

    def _score(self, rollouts: Sequence[Rollout], like: Mapping[str, Any]) -> list[RolloutOutcome]:
        """Compute the outcomes that drawn rollouts would have in an update now (shadow)."""
        self._tokens = 1.0
        inputs = self._micro_batch([*range(len(rollouts))], rollouts, like)
        batch, compute = inputs["grpo_batch"], self._get_per_token_logps_and_entropies
        with torch.no_grad():
            logprobs_BT, _ = evaluating(compute, self.model, inputs["model_inputs"], batch)
        advantages_B = torch.tensor([rollout.advantage for rollout in rollouts])
        return probe_outcomes(
            batch.old_per_token_logps, batch.completion_mask, logprobs_BT,
            advantages_B.to(logprobs_BT), self._clipped_loss,
        )  # fmt: skip

    # The update

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns ms-swift's loss, weighted for unequal micro-batches (0 for padding alone, whose
        metrics are dropped); adds what the update did to its rows to `_outcomes`."""
        if not self._trains_on_draws:
            return super().compute_loss(model, inputs, *args, **kwargs)
        batch, rows = inputs["grpo_batch"], inputs[ROW]
        turn = self.args.steps_per_generation - self._micro_batches_left
        is_padding = all(row < 0 for share in self._shares for row in share[turn])
        weight = self._weight_of(len(rows), is_padding)
        forwards = ForwardPasses(batch.old_per_token_logps)
        tokens = batch.num_items_in_batch * (weight or 1.0)
        traced = replace(batch, old_per_token_logps=forwards.old_BT, num_items_in_batch=tokens)
        logged = {name: [*values] for name, values in self._metrics["train"].items()}
        with intercepted(
            self,
            _get_per_token_logps_and_entropies=forwards.record,
            _get_rollout_is_correction=lambda method, old, *rest: method(old.detach(), *rest),
        ):
            loss = super().compute_loss(model, {**inputs, "grpo_batch": traced}, *args, **kwargs)
        forwards.trace(loss, batch.advantages)
        logprobs_BT, entropy_BT = forwards.outputs or (None, None)
        self._outcomes |= outcomes_of(
            rows, batch.old_per_token_logps, batch.completion_mask, logprobs_BT,
            forwards.clipped_BT, entropy_BT,
        )  # fmt: skip
        if weight == 0:  # drop what ms-swift logged of padding
            self._metrics["train"].clear()
            self._metrics["train"].update(logged)
        return loss if weight == 1 else weight * loss


class ReplayGRPOTrainer(ReplayMixin, GRPOTrainer):
    """ms-swift's GRPOTrainer with replay."""


def _token_position(batch: Any, i: int, length: int) -> tuple[int, slice]:
    """Returns the index of the tokens of row `i` in tensors [B, T], from the first that trains."""
    start = int(batch.completion_mask[i].int().argmax())
    return i, slice(start, start + length)


def _to_sample(rollout: Rollout) -> GRPOSample:
    tokens, mask = rollout.completion_token_ids, rollout.completion_mask
    trained = tokens if mask is None else np.where(mask, tokens, -100)
    ids = [*rollout.prompt_token_ids.tolist(), *tokens.tolist()]
    labels = [-100] * len(rollout.prompt_token_ids) + trained.tolist()
    encoded = {"input_ids": ids, "labels": labels, "length": len(ids)}
    return GRPOSample(messages=[], encoded=encoded, finish_reason=rollout.finish_reason)


def _refuse(trainer: Any, args: Any, batches: Sequence[Any] = ()) -> None:
    """Raises UsageError for settings or `batches` with which replay is wrong: says what to set."""
    distils = trainer._has_teacher_explicit() or args.advantage_reweight or args.sdar_loss_coef
    teaches = any(batch.teacher_per_token_logps is not None for batch in batches)
    refused = {
        f"num_iterations {trainer.num_iterations} trains on every batch several times: set 1, and "
        "raise ratio": trainer.num_iterations > 1,
        f"scale_rewards {args.scale_rewards} normalises over the whole batch, and the rollout log "
        "has the mean and deviation of a group: set group or none":
            args.scale_rewards not in ("group", "none"),
        f"advantage_estimator {trainer.advantage_estimator} has advantages other than those of the "
        "group's mean and deviation, which the rollout log has: set grpo":
            trainer.advantage_estimator != "grpo",
        "kl_in_reward changes rewards after the reward functions: set false": trainer.kl_in_reward,
        "loss_type real compares whole groups: set dapo or grpo": trainer.loss_type == "real",
        "a teacher (teacher_model, teacher_model_server, advantage_reweight, sdar_loss_coef, the "
        "column teacher_prompt) makes advantages per token, and replay has one for each "
        "completion: leave it out": distils or teaches,
        "use_liger_kernel hides the log-probs of the update: set false": trainer.use_liger_loss,
        "sequence_parallel_size splits completions: set 1":
            trainer.template.sequence_parallel_size > 1,
        "the model is multimodal: replay stores no images": trainer.is_multimodal,
        "sync_ref_model changes the reference, whose log-probs are stored with a rollout: set "
        "false, or beta 0": trainer.beta and args.sync_ref_model,
        "async_generate samples with an older policy: set false": args.async_generate,
        "chord_sft_dataset mixes in another loss: leave it out": trainer.chord_sft_iterator,
        "dynamic_num_samples (the scheduler returned several samples of a request): a rollout is "
        "a whole episode, let it return one": trainer.dynamic_num_samples,
    }  # fmt: skip
    if problems := [text for text, is_so in refused.items() if is_so]:
        raise UsageError("replay in ms-swift: " + "; ".join(problems))
