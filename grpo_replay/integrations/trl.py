"""Replay in TRL's GRPOTrainer.

    trainer = ReplayGRPOTrainer(
        model, reward_funcs, args, train_dataset, replay=ReplayConfig.of("ours")
    )

TRL's loss takes a row's importance ratio with respect to its `old_per_token_logps`. If these are
the log-probs of the row's birth, it is the off-policy loss of paper A. So only the generation batch
changes: what `_generate_and_score_completions` returns goes through the buffer, and every other
method of TRL stays as it is. Log-probs of birth are those of the trainer's policy, also with vLLM;
the correction of vLLM's own is stored with the rollout (`importance_sampling_ratio`).

A step of the buffer is a generation batch (`steps_per_generation` micro-batches). With preset
`grpo` or ratio 0 this is TRL's own trainer, bit for bit.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.nn.functional import pad
from trl import GRPOTrainer

from grpo_replay.errors import CheckpointError, UsageError
from grpo_replay.integrations.output_folder import (
    METRICS,
    OutputFolder,
    refuse_another_run,
    refuse_without_history,
    sections_of,
)
from grpo_replay.integrations.trl_listening import Forwards, evaluating, heard
from grpo_replay.integrations.trl_rows import (
    EXTRAS,
    ROW,
    Tensors,
    Texts,
    make_rollouts,
    outcomes_of,
    rows_of,
    to_tensors,
)
from grpo_replay.recipe import ReplayConfig
from grpo_replay.replay import ReplayBuffer
from grpo_replay.replay.entry_store import checked_settings
from grpo_replay.storage.atomic import json_values
from grpo_replay.storage.rollout_log import write_step
from grpo_replay.training.metrics import (
    Metrics,
    batch_metrics,
    buffer_metrics,
    cost_metrics,
    generation_metrics,
)
from grpo_replay.types import Rollout, RolloutOutcome

SNAPSHOT = "buffer.parquet"
PADDED, PADDING_GAP = 8, {False: 1e-2, True: 0.1}
"""More tokens before a prompt, and the mean gap of log-probs, in nats, that they may make in
float32 and in half precision."""
_Host: Any = object  # a GRPOTrainer, for the type checker


class ReplayMixin(_Host):
    """Replay for a subclass of GRPOTrainer; it stands first: `class Mine(ReplayMixin, Trainer)`.

    `replay` are the settings of the buffer (default: preset `ours`). `output_dir` gets rollouts/,
    draws/ and metrics.jsonl, and every checkpoint the buffer; `resume_from_checkpoint` continues
    with it. Raises UsageError for settings of TRL under which replay would be wrong.
    """

    stored_keys: Mapping[str, float] = MappingProxyType({})
    """Further keys that a subclass puts into the generation batch, with their padding: tensors
    [B, T] or [B, 1], stored with a rollout and back in the batch when it is replayed."""
    _buffered_inputs: Any  # TRL's: the micro-batches of the generation batch
    _tag_names: Any  # TRL's: of the model card

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if GRPOTrainer in order and order.index(GRPOTrainer) < order.index(ReplayMixin):
            raise TypeError(
                f"class {cls.__name__}: ReplayMixin stands behind GRPOTrainer, so that nothing "
                f"would be replayed; let it stand first: class {cls.__name__}(ReplayMixin, …)"
            )

    def __init__(self, *args: Any, replay: ReplayConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replay = ReplayConfig() if replay is None else checked_settings(replay)
        self._micro_batches_left = 0  # of the generation batch that is being trained on
        if not self.replay.replays:
            return
        if problems := list(_problems(self, self.args)):
            raise UsageError("replay in TRL: " + "; ".join(problems))
        self._tag_names = [*self._tag_names, "grpo-replay", "rollout-replay"]
        self._from_main(lambda: refuse_another_run(Path(self.args.output_dir), may_resume=True))
        self.replay_buffer = ReplayBuffer(self.replay, self.num_generations, self.args.seed)
        self._folder: OutputFolder | None = None
        if self.args.max_steps > 0:  # by epochs, the length is known when training begins
            self._folder_of(self.args.max_steps)
        self._goes_on = False  # with a run of which there is a checkpoint
        self._outcomes: dict[int, RolloutOutcome] = {}  # of this process's rows

    def _folder_of(self, max_steps: int) -> OutputFolder:
        """The folder of a run of so many optimizer steps. Raises RecipeError."""
        name = self.model.config._name_or_path
        sections = sections_of(self.args, name, self._is_rounded, max_steps)
        return OutputFolder(Path(self.args.output_dir), self.replay, sections)

    @property
    def _is_rounded(self) -> bool:
        """Whether log-probs are of half precision."""
        parameter = next(self.accelerator.unwrap_model(self.model).parameters())
        return self.args.bf16 or self.args.fp16 or parameter.dtype != torch.float32

    def train(self, *args: Any, **kwargs: Any) -> Any:
        output = super().train(*args, **kwargs)
        if self._micro_batches_left and self.accelerator.is_main_process:
            warnings.warn(
                f"training ended inside generation batch {self.replay_buffer.last_step}, which is "
                f"not in {self.args.output_dir}: let it end after whole generation batches",
                stacklevel=2,
            )
        return output

    # The generation batch

    def _prepare_inputs(self, generation_batch: Any) -> Tensors:
        if not (self.replay.replays and self.model.training):
            return super()._prepare_inputs(generation_batch)
        self._tensors: Tensors = {}
        with heard(self, _generate_and_score_completions=self._through_buffer):
            inputs = super()._prepare_inputs(generation_batch)
        if self._tensors:
            _deal_all(self._tensors, self._buffered_inputs, self._order)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _through_buffer(self, generate: Any, inputs: Any) -> Tensors:
        """What is trained on in place of what `generate` returns."""
        if is_first := self._folder is None:
            folder = self._folder = self._folder_of(self.state.max_steps)
            self._from_main(lambda: folder.open(self.replay_buffer.last_step, self._goes_on))
        self._seconds = dict.fromkeys(("generation", "reward", "logprob", "training", "sync"), 0.0)
        self._texts: Texts | None = None
        began = self._began = time.perf_counter()
        with heard(
            self,
            _calculate_rewards=self._hear_rewards,
            _get_per_token_logps_and_entropies=self._hear_logprobs,
        ):
            output = generate(inputs)
            if is_first:
                self._refuse_padding(output)
            of_others = self._seconds["reward"] + self._seconds["logprob"]
            self._seconds["generation"] = time.perf_counter() - began - of_others
            if "old_per_token_logps" not in output:
                output["old_per_token_logps"] = self._logprobs(output)
        self._tensors = self._replayed(output)
        return self._tensors

    def _hear_logprobs(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Those of the policy at birth, and of the reference."""
        began = time.perf_counter()
        found = evaluating(method, *args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # else their time is that of whatever waits for them
        self._seconds["logprob"] += time.perf_counter() - began
        return found

    def _hear_rewards(
        self, calculate: Any, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        began = time.perf_counter()
        scores_NF = calculate(inputs, prompts, completions, completion_ids_list)
        first = self.accelerator.process_index * len(prompts)
        mine = scores_NF[first : first + len(prompts)].double().cpu().numpy()
        self._texts = Texts(prompts, completions, completion_ids_list, mine)
        self._seconds["reward"] += time.perf_counter() - began
        return scores_NF

    def _logprobs(self, output: Tensors) -> torch.Tensor:
        """The policy's log-probs of the completions, which TRL skips if generation and updates are
        aligned; [B, T]."""
        with torch.no_grad():
            return self._get_per_token_logps_and_entropies(
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
        padded = {name: pad(each, (PADDED * ("prompt" in name), 0)) for name, each in row.items()}
        apart_T = (self._logprobs(row) - self._logprobs(padded)).abs()[row["completion_mask"] > 0]
        apart = max(gather_object([apart_T.mean().item() if len(apart_T) else 0.0]))
        if apart > PADDING_GAP[self._is_rounded]:
            raise UsageError(
                f"replay in TRL: {PADDED} tokens of padding before a prompt change the model's "
                f"log-probs, by {apart:.2g} on average, and a replayed row is padded anew: take a "
                "model without learned absolute positions (GPT-2, GPT-Neo and StarCoder have them)"
            )

    def _replayed(self, output: Tensors) -> Tensors:
        """The generation batch of this process after the step of the buffer: the rows that train,
        and rows of padding where there are fewer than micro-batches, or processes are left over."""
        weights_F, extras = self.reward_weights.cpu().numpy(), {**EXTRAS, **self.stored_keys}
        ends = getattr(self, "eos_token_ids", [self._tokenizer.eos_token_id])
        rows = gather_object(rows_of(output, self._texts, weights_F, ends, extras))
        trained, filler = self._from_main(lambda: self._compose(rows))
        processes, micro_batches = self.accelerator.num_processes, self.args.steps_per_generation
        each = max(math.ceil(len(trained) / processes), micro_batches)
        padding = [-1] * (each * processes - len(trained))
        numbers = [*range(len(trained)), *padding][self.accelerator.process_index :: processes]
        tensors = to_tensors(
            [trained[i] if i >= 0 else filler for i in numbers],
            numbers,
            output,
            self._tokenizer.pad_token_id,
            getattr(self, "pad_to_multiple_of", None),
            extras,
        )
        tokens = max(1, sum(rollout.trained_tokens for rollout in trained))
        tensors["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], tokens)
        self._trained_rows = len(trained)
        self._micro_batches_left = micro_batches
        accumulated = self.args.gradient_accumulation_steps
        self._order = _update_by_update(micro_batches, accumulated, self._step)
        self._composed = time.perf_counter()
        return tensors

    def _compose(self, rows: list[dict[str, Any]]) -> tuple[tuple[Rollout, ...], Rollout]:
        """On the main process: the step of the buffer. Returns what to train on, in order, and a
        rollout to pad with."""
        buffer = self.replay_buffer
        assert self._folder is not None
        self._before = copy(buffer), buffer.get_state()
        rollouts = make_rollouts(
            rows,
            self.num_generations,
            buffer.next_step,
            buffer.next_rollout_id,
            buffer.next_group_id,
            keep_zero_variance=not self.replay.drop_zero_variance,
            std=self._folder.recipe.advantage.deviation,
        )
        buffer.next_rollout_id += len(rows)
        buffer.next_group_id += len(rows) // self.num_generations
        fresh = [rollout for rollout in rollouts if rollout.kept]
        batch = buffer.step(fresh, generated=len(rows))
        self._generated, self._batch = rollouts, batch
        # A dropped rollout has no behaviour log-probs. In a row of padding, any will do.
        return batch.rollouts, replace(rollouts[0], behavior_logprobs=rollouts[0].sampler_logprobs)

    # Results

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self._micro_batches_left:
            self._micro_batches_left -= 1
            if not self._micro_batches_left:
                self._finish_step()
        return loss

    def compute_loss(self, model: Any, inputs: Tensors, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (self.replay.replays and self.model.training):
            return super().compute_loss(model, inputs, *args, **kwargs)
        weight = self._weight(len(inputs[ROW]))
        tokens = inputs["num_items_in_batch"] * (weight or 1.0)
        logged = {name: len(values) for name, values in self._metrics["train"].items()}
        forwards = Forwards({**inputs, "num_items_in_batch": tokens})
        with heard(self, _get_per_token_logps_and_entropies=forwards.hear):
            loss = super().compute_loss(model, forwards.inputs, *args, **kwargs)
        forwards.trace(loss)
        # There the ratio weighs the KL term too, and has a gradient everywhere.
        hidden = self.beta and getattr(self.args, "use_bias_correction_kl", False)
        clipped_BT = None if hidden else forwards.clipped_BT
        self._outcomes |= outcomes_of(inputs, forwards.made, clipped_BT)
        if weight == 0:  # what TRL logs of padding
            for name, values in self._metrics["train"].items():
                del values[logged.get(name, 0) :]
        return loss if weight == 1 else weight * loss

    def _weight(self, rows: int) -> float:
        """What the loss of a micro-batch of so many rows is multiplied by, auxiliary losses
        included: every row has the weight that it has where all micro-batches have equally many,
        none of them padding. 0 if all is padding. A term that divides by the tokens of the
        generation batch has its rows' weight already, so those are multiplied too."""
        processes, micro_batches = self.accelerator.num_processes, self.args.steps_per_generation
        turn = self._order.index(micro_batches - self._micro_batches_left)
        if turn * processes >= self._trained_rows:
            return 0.0
        return rows * processes * micro_batches / self._trained_rows

    def _finish_step(self) -> None:
        """After the last micro-batch of a generation batch: write its files, log its metrics."""
        now = time.perf_counter()
        gathered = dict(gather_object(list(self._outcomes.items())))
        self._outcomes = {}
        seconds = self._seconds | {"training": now - self._composed}
        whole = now - self._began
        seconds |= {"step": whole, "other": max(0.0, whole - sum(seconds.values()))}
        # On every process, as TRL's own: a callback may stop the training by them.
        for name, value in self._from_main(lambda: self._record(gathered, seconds)).items():
            if value is not None and name.startswith(("fresh/", "replay/", "buffer/", "cost/")):
                self._metrics["train"][name].append(value)

    def _record(self, gathered: dict[int, RolloutOutcome], seconds: dict[str, float]) -> Metrics:
        """On the main process: the files of the step. Returns the metrics beside TRL's."""
        batch, buffer = self._batch, self.replay_buffer
        assert self._folder is not None
        outcomes = [gathered[row] for row in range(len(batch.rollouts))]
        survivors = sum(rollout.kept for rollout in self._generated)
        ours = json_values(
            batch_metrics(batch, outcomes, survivors)
            | buffer_metrics(buffer.stats(buffer.last_step))
            | cost_metrics(seconds, seconds["generation"], self._generated, batch.rollouts)
        )
        whole = {**generation_metrics(self._generated, self.num_generations), **ours}
        write_step(self._folder.folder, buffer.last_step, self._generated, batch, outcomes)
        self._folder.log(buffer.last_step, whole)
        return ours

    # Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.replay.replays:
            folder = (
                Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            )
            self._from_main(lambda: self._save_buffer(folder))
        super()._save_checkpoint(model, trial)

    def _save_buffer(self, folder: Path) -> None:
        """The buffer after the last generation batch that was trained to its end."""
        buffer = self.replay_buffer
        if self._micro_batches_left:
            warnings.warn(
                f"{folder} is saved inside a generation batch: a run that resumes from it samples "
                "the batch again, so it is not the run that was never killed; let save_steps be of "
                "whole generation batches (steps_per_generation micro-batches)",
                stacklevel=2,
            )
            buffer, state = self._before
            buffer.set_state(state)
        folder.mkdir(parents=True, exist_ok=True)
        buffer.save(folder / SNAPSHOT)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.replay.replays:
            self._from_main(lambda: self._load_buffer(Path(checkpoint) / SNAPSHOT))
            # As in a new trainer, even if this one was stopped inside a generation batch.
            self._folder, self._micro_batches_left = None, 0
            self._step, self._buffered_inputs = 0, None
            self._outcomes.clear()

    def _load_buffer(self, path: Path) -> None:
        folder = Path(self.args.output_dir)
        if not path.exists():
            if (folder / METRICS).exists():
                raise CheckpointError(
                    f"{path} is missing, and {folder} has rollouts of a run with replay: resume "
                    "from another checkpoint, or train from its weights in a new output_dir"
                )
            warnings.warn(f"{path} is missing: the buffer begins empty", stacklevel=2)
            return
        buffer = ReplayBuffer.load(path)
        found = buffer.settings.model_dump(), buffer.group_size
        if found != (self.replay.model_dump(), self.num_generations):
            raise CheckpointError(
                f"{path} has other replay settings than this trainer, or groups of another size: "
                f"resume with num_generations {buffer.group_size} and {buffer.settings!r}"
            )
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        for name, needed, without in (
            ("ref_per_token_logps", self.beta != 0, "beta 0"),
            ("importance_sampling_ratio", corrects, "vllm_importance_sampling_correction False"),
        ):
            if needed and any(name not in each.extras for each in buffer.rollouts()):
                raise CheckpointError(
                    f"{path}: the run stored no {name} with its rollouts: resume with {without}, "
                    "or train from its weights in a new output_dir"
                )
        refuse_without_history(folder, path.parent.parent, buffer.last_step)
        self.replay_buffer, self._goes_on = buffer, True

    def _from_main(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on the main process, on every process; or raises, on every one."""
        found: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                found[0] = make()
            except Exception as error:
                found[1] = error
        broadcast_object_list(found)
        if found[1] is not None:
            raise found[1]
        return found[0]


class ReplayGRPOTrainer(ReplayMixin, GRPOTrainer):
    """TRL's GRPOTrainer with replay; `replay` are the settings of the buffer."""


def _update_by_update(micro_batches: int, accumulated: int, done: int) -> list[int]:
    """The micro-batches of a generation batch: first one of each optimizer update, then the second
    of each, and so on. An update accumulates the gradients of so many, and `done` were trained on
    before: an update that has begun goes on."""

    def turn(index: int) -> tuple[int, int]:
        update = (done + index) // accumulated
        return index - max(0, update * accumulated - done), update

    return sorted(range(micro_batches), key=turn)


def _deal_all(whole: Tensors, micro_batches: list[Tensors], order: Sequence[int]) -> None:
    """TRL deals equally many rows to each micro-batch and leaves out the rest: the first in `order`
    get one more each. Micro-batches of padding alone are the last in it, so that no update has
    nothing else while there are enough rows."""
    ordered = [micro_batches[index] for index in order]
    dealt = {row for each in micro_batches for row in each[ROW].tolist()}
    left = [i for i, row in enumerate(whole[ROW].tolist()) if row not in dealt]
    for each, i in zip(ordered, left, strict=False):
        for name, rows in each.items():
            if rows.dim():
                each[name] = torch.cat([rows, whole[name][i : i + 1]])
    ordered.sort(key=lambda each: each[ROW].tolist() == [-1])
    for index, each in zip(order, ordered, strict=True):
        micro_batches[index] = each


def _problems(trainer: Any, args: Any) -> Iterator[str]:
    """Settings of TRL under which replay would be wrong, and what to set."""
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
