"""Replay in TRL's GRPOTrainer.

    trainer = ReplayGRPOTrainer(
        model, reward_funcs, args, train_dataset, replay=ReplayConfig.preset("ours")
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl import GRPOTrainer

from grpo_replay.errors import CheckpointError, UsageError
from grpo_replay.integrations.output_folder import OutputFolder, sections_of
from grpo_replay.integrations.trl_rows import (
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
from grpo_replay.replay.replay_buffer import checked_settings
from grpo_replay.storage.atomic import json_values
from grpo_replay.training.metrics import (
    batch_metrics,
    buffer_metrics,
    cost_metrics,
    generation_metrics,
)
from grpo_replay.types import Rollout, RolloutOutcome

SNAPSHOT = "buffer.parquet"
_COUNTERS = ("last_step", "next_rollout_id", "next_group_id")
LOSSES = ("dapo", "cispo", "vespo")
"""Losses that are means over the tokens of the generation batch. The others are means over rows,
whose number changes with replay, and `bnpo` is one over the tokens of a micro-batch."""

_Result = TypeVar("_Result")
_Host: Any = object  # a GRPOTrainer, for the type checker


class ReplayMixin(_Host):
    """Replay for a subclass of GRPOTrainer; it stands first: `class Mine(ReplayMixin, Trainer)`.

    `replay` are the settings of the buffer (default: preset `ours`). `output_dir` gets rollouts/,
    draws/ and metrics.jsonl, and every checkpoint the buffer; `resume_from_checkpoint` continues
    with it. Raises UsageError for settings of TRL under which replay would be wrong.
    """

    def __init__(self, *args: Any, replay: ReplayConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replay = ReplayConfig() if replay is None else checked_settings(replay)
        self._micro_batches_left = 0  # of the generation batch that is being trained on
        if not self.replay.replays:
            return
        _refuse(self)
        self.replay_buffer = ReplayBuffer(self.replay, self.num_generations, self.args.seed)
        self._folder: OutputFolder | None = None
        if self.args.max_steps > 0:  # by epochs, the length is known when training begins
            self._folder_of(self.args.max_steps)
        self._goes_on = False  # with a run of which there is a checkpoint
        self._outcomes: dict[int, RolloutOutcome] = {}  # of this process's rows

    def _folder_of(self, max_steps: int) -> OutputFolder:
        """The folder of a run of so many optimizer steps. Raises RecipeError."""
        args, model = self.args, self.accelerator.unwrap_model(self.model)
        is_rounded = args.bf16 or args.fp16 or next(model.parameters()).dtype != torch.float32
        sections = sections_of(args, self.model.config._name_or_path, is_rounded, max_steps)
        return OutputFolder(Path(self.args.output_dir), self.replay, sections)

    # The generation batch

    def _generate_and_score_completions(self, inputs: Any) -> Tensors:
        if not (self.replay.replays and self.model.training):
            return super()._generate_and_score_completions(inputs)
        if self._folder is None:
            folder = self._folder = self._folder_of(self.state.max_steps)
            self._from_main(lambda: folder.open(self.replay_buffer.last_step, self._goes_on))
        self._seconds = dict.fromkeys(("generation", "reward", "logprob", "training", "sync"), 0.0)
        began = self._began = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        generated = time.perf_counter()
        if "old_per_token_logps" not in output:
            output["old_per_token_logps"] = self._logprobs(output)
        self._seconds["logprob"] = time.perf_counter() - generated
        self._seconds["generation"] = generated - began - self._seconds["reward"]
        return self._replayed(output)

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        began = time.perf_counter()
        scores_NF = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.replay.replays and self.model.training:
            first = self.accelerator.process_index * len(prompts)
            mine = scores_NF[first : first + len(prompts)].double().cpu().numpy()
            self._texts = Texts(prompts, completions, completion_ids_list, mine)
            self._seconds["reward"] = time.perf_counter() - began
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

    def _replayed(self, output: Tensors) -> Tensors:
        """The generation batch of this process after the step of the buffer."""
        scores = rows_of(output, self._texts, self.reward_weights.cpu().numpy(), _eos_ids(self))
        rows = gather_object(scores)
        trained, filler = self._from_main(lambda: self._compose(rows))
        processes = self.accelerator.num_processes
        unit = processes * self.args.steps_per_generation
        padding = -len(trained) % unit or (0 if trained else unit)
        numbers = [*range(len(trained)), *[-1] * padding][
            self.accelerator.process_index :: processes
        ]
        tensors = to_tensors(
            [trained[i] if i >= 0 else filler for i in numbers],
            numbers,
            output,
            _tokenizer(self).pad_token_id,
            getattr(self, "pad_to_multiple_of", None),
        )
        tokens = max(1, sum(rollout.trained_tokens for rollout in trained))
        tensors["num_items_in_batch"] = torch.full_like(output["num_items_in_batch"], tokens)
        self._micro_batches_left = self.args.steps_per_generation
        self._composed = time.perf_counter()
        return tensors

    def _compose(self, rows: list[dict[str, Any]]) -> tuple[tuple[Rollout, ...], Rollout]:
        """On the main process: the step of the buffer. Returns what to train on, in order, and a
        rollout to pad with."""
        buffer = self.replay_buffer
        assert self._folder is not None
        self._before = buffer.get_state(), {name: getattr(buffer, name) for name in _COUNTERS}
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

    # What came of it

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self._micro_batches_left:
            self._micro_batches_left -= 1
            if not self._micro_batches_left:
                self._finish_step()
        return loss

    def _compute_loss(self, model: Any, inputs: Tensors) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        if ROW in inputs:
            logprobs_BT, entropies_BT = self._forward
            by_sequence = self.importance_sampling_level == "sequence"
            self._outcomes |= outcomes_of(
                inputs, logprobs_BT, entropies_BT, *_clip_range(self), by_sequence
            )
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Log-probs of birth are those of the policy, without dropout."""
        of_birth = self.replay.replays and not torch.is_grad_enabled()
        with _evaluating(model) if of_birth else nullcontext():
            result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self._forward = result[:2]
        return result

    def _finish_step(self) -> None:
        """After the last micro-batch of a generation batch: write its files, log its metrics."""
        now = time.perf_counter()
        gathered = dict(gather_object(list(self._outcomes.items())))
        self._outcomes = {}
        seconds = self._seconds | {"training": now - self._composed}
        whole = now - self._began
        seconds |= {"step": whole, "other": max(0.0, whole - sum(seconds.values()))}
        self._from_main(lambda: self._record(gathered, seconds))

    def _record(self, gathered: dict[int, RolloutOutcome], seconds: dict[str, float]) -> None:
        batch, buffer = self._batch, self.replay_buffer
        assert self._folder is not None
        outcomes = [gathered[row] for row in range(len(batch.rollouts))]
        survivors = sum(rollout.kept for rollout in self._generated)
        ours = {
            **batch_metrics(batch, outcomes, survivors),
            **buffer_metrics(buffer.stats(buffer.last_step)),
            **cost_metrics(seconds, seconds["generation"], self._generated, batch.rollouts),
        }
        ours = json_values(ours)
        whole = {**generation_metrics(self._generated, self.num_generations), **ours}
        self._folder.write(buffer.last_step, self._generated, batch, outcomes, whole)
        for name, value in ours.items():
            if value is not None and name.startswith(("fresh/", "replay/", "buffer/", "cost/")):
                self._metrics["train"][name].append(value)

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
                "the batch again, so it is not the run that was never killed",
                stacklevel=2,
            )
            buffer = _restored(buffer, *self._before)
        folder.mkdir(parents=True, exist_ok=True)
        buffer.save(folder / SNAPSHOT)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.replay.replays:
            self._from_main(lambda: self._load_buffer(Path(checkpoint) / SNAPSHOT))
            # As in a new trainer, even if this one was stopped inside a generation batch.
            self._folder, self._micro_batches_left, self._goes_on = None, 0, True
            self._step, self._buffered_inputs = 0, None
            self._outcomes.clear()

    def _load_buffer(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing: this checkpoint was written without replay; resume from "
                "another, or train from its weights in a new output_dir"
            )
        buffer = ReplayBuffer.load(path)
        if buffer.settings.model_dump() != self.replay.model_dump():
            raise CheckpointError(
                f"{path} has other replay settings than this trainer ({buffer.settings!r}): resume "
                "with the same"
            )
        if buffer.group_size != self.num_generations:
            raise CheckpointError(
                f"{path} has groups of {buffer.group_size}, num_generations is "
                f"{self.num_generations}: resume with num_generations {buffer.group_size}"
            )
        self.replay_buffer = buffer

    def _from_main(self, make: Callable[[], _Result]) -> _Result:
        """What `make` returns on the main process, on every process; or raises, on every one."""
        found: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                found[0] = make()
            except Exception as error:
                if self.accelerator.num_processes == 1:
                    raise
                found[1] = error
        broadcast_object_list(found)
        if found[1] is not None:
            raise found[1]
        return found[0]


class ReplayGRPOTrainer(ReplayMixin, GRPOTrainer):
    """TRL's GRPOTrainer with replay; `replay` are the settings of the buffer."""


def _restored(
    buffer: ReplayBuffer, state: Mapping[str, Any], counters: Mapping[str, int]
) -> ReplayBuffer:
    """The buffer as it was when `state` and `counters` were taken."""
    before = ReplayBuffer(buffer.settings, buffer.group_size, buffer.seed)
    before.set_state(state)
    for name, value in counters.items():
        setattr(before, name, value)
    return before


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within, every module of the model is in evaluation mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _refuse(trainer: Any) -> None:
    """Raises UsageError for settings of TRL under which replay would be wrong."""
    args, settings = trainer.args, trainer.replay
    problems = [*_loss_problems(trainer), *_advantage_problems(trainer), *_save_problems(args)]
    if trainer.num_iterations > 1:
        problems.append(
            f"num_iterations {trainer.num_iterations} trains on every batch several times: set 1 "
            "and raise replay.ratio"
        )
    if args.generation_batch_size > settings.capacity_rollouts:
        problems.append(
            f"a step generates {args.generation_batch_size} rollouts, replay.capacity_rollouts is "
            f"{settings.capacity_rollouts}: raise it"
        )
    if problems:
        raise UsageError("replay in TRL: " + "; ".join(problems))


def _loss_problems(trainer: Any) -> Iterator[str]:
    if trainer.loss_type not in LOSSES:
        rows = "rows, whose number replay changes"
        tokens = "the tokens of each micro-batch, in which replay's rows of padding have none"
        yield (
            f"loss_type {trainer.loss_type!r} is a mean over "
            f"{tokens if trainer.loss_type == 'bnpo' else rows}: set {', '.join(LOSSES)}"
        )
    if any(getattr(trainer.args, name, 0) for name in ("entropy_coef", "use_adaptive_entropy")):
        yield (
            "entropy_coef and use_adaptive_entropy take the mean entropy of each micro-batch, in "
            "which replay's rows of padding have none: set 0 and False"
        )
    if getattr(trainer, "use_liger_kernel", False):
        yield "use_liger_kernel hides the log-probs of the update: set False"
    if trainer.beta != 0 and trainer.args.sync_ref_model:
        yield (
            "sync_ref_model changes the reference, whose log-probs are stored with a rollout: set "
            "False, or beta 0"
        )


def _advantage_problems(trainer: Any) -> Iterator[str]:
    """The recipe of the run and `--verify` know advantages that follow from the rewards of a group
    alone."""
    if trainer.args.scale_rewards == "batch":
        yield (
            "scale_rewards 'batch' divides by the deviation of the whole batch, and the rollout "
            "log has that of a group: set 'group' or 'none'"
        )
    aggregation = getattr(trainer, "multi_objective_aggregation", "sum_then_normalize")
    if aggregation != "sum_then_normalize":
        yield (
            f"multi_objective_aggregation {aggregation!r} normalises over the whole batch, and the "
            "rollout log has the mean and deviation of a group: set 'sum_then_normalize'"
        )


def _save_problems(args: Any) -> Iterator[str]:
    interval = args.save_steps
    if args.save_strategy != "steps" or (interval < 1 and args.max_steps <= 0):
        return  # by epochs, the interval of a ratio is known when training begins
    if interval < 1:
        interval = math.ceil(args.max_steps * interval)  # as in transformers
    per_batch = args.steps_per_generation
    unit = per_batch // math.gcd(per_batch, args.gradient_accumulation_steps)
    if interval % unit:
        yield (
            f"save_steps {interval} falls inside a generation batch of {per_batch} micro-batches: "
            f"set a multiple of {unit} optimizer steps"
        )


def _clip_range(trainer: Any) -> tuple[float, float, float | None]:
    """The ratios between which the loss has a gradient: low, high, and the bound at a negative
    advantage."""
    if trainer.loss_type == "cispo":
        return 0.0, trainer.epsilon_high, None
    if trainer.loss_type == "vespo":
        return 0.0, np.inf, None
    return 1 - trainer.epsilon_low, 1 + trainer.epsilon_high, trainer.args.delta


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def _eos_ids(trainer: Any) -> list[int]:
    return list(getattr(trainer, "eos_token_ids", None) or [_tokenizer(trainer).eos_token_id])
