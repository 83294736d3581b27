"""The engine: DeepSpeed ZeRO 0-3, from one CPU process to many nodes; and its configuration."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_replay.distributed.comm import Comm
from grpo_replay.engine import UpdateResult
from grpo_replay.engine.compiled import (
    compile_policy,
    leave_uncompiled,
    why_not_compiled,
)
from grpo_replay.engine.engine_state import (
    layout_of,
    leave_base_out,
    load_other_layout,
    load_same_layout,
    param_groups,
    save_state,
    saved_layout,
    undo_first_step,
)
from grpo_replay.engine.microbatches import (
    MicroBatch,
    RankStatistics,
    RowValues,
    exchange,
    join_statistics,
    join_values,
    plan_sequences,
    rank_statistics,
    row_outcomes,
    update_result,
    values_of_rows,
)
from grpo_replay.engine.model_trials import (
    can_pack,
    can_share,
    refuse_length_dependence,
    refuse_other_logprobs,
)
from grpo_replay.engine.policy_module import PolicyModule
from grpo_replay.engine.saved_policies import write_model, write_tokenizer
from grpo_replay.engine.shared_prompts import Layout, pairs_per_token
from grpo_replay.engine.weights import LoraAdapters, full_adapters, full_tensors, tied_names
from grpo_replay.errors import ModelError, NonFiniteError
from grpo_replay.recipe import EngineSection, OptimizerSection, Recipe
from grpo_replay.replay.batch import TrainRow
from grpo_replay.replay.loss import kl_to_reference, row_statistics, token_loss
from grpo_replay.types import NamedTensors, RolloutOutcome, stream

DROPOUT_STREAM = 0x64726F70
"""Identifies the random streams of dropout ("drop" in ASCII)."""


class DeepSpeedEngine:
    """The policy and its optimizer over all ranks, under DeepSpeed.

    Methods are collective: every rank calls them in the same order. Rows are given on rank 0 and
    None elsewhere, and results come back on rank 0.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: PreTrainedModel,
        tokenizer: Any,
        comm: Comm,
        device: torch.device,
        zero_stage: int,
    ) -> None:
        """Attaches LoRA, copies the reference, opens DeepSpeed, runs the model's trials and
        compiles it, as the recipe says. Collective. Raises ModelError or RecipeError."""
        self._recipe = recipe
        self._comm = comm
        self._stage = zero_stage
        self._device = device
        self._tokenizer = tokenizer
        self.notices: list[str] = []
        if recipe.model.gradient_checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            if recipe.model.lora.r is None:  # else the first layer would be compiled separately
                model.disable_input_require_grads()
        self._model = model
        self._adapters: LoraAdapters | None = None
        if recipe.model.lora.r is not None:
            self._adapters = LoraAdapters.attach(model, recipe.model.lora, recipe.run.seed)
        has_copy = recipe.loss.beta > 0 and self._adapters is None
        self._reference = self._frozen_copy(model) if has_copy else None
        self._engine = self._open_deepspeed(model)
        # Some DeepSpeed versions need this forward pass before the first ZeRO-3 gather.
        self._layout = self._run_trials(model)
        if recipe.compiles(self._stage, device.type == "cuda"):
            self._compile()
        if self._stage == 3:  # a state that is loaded next must find no gathered parameters
            self._engine.optimizer.empty_partition_cache()
        self._step = self._updates_of_step = 0

    def _open_deepspeed(self, model: PreTrainedModel) -> Any:
        """Wraps the model in a policy module and gives it to DeepSpeed, which shards it by the ZeRO
        stage and makes the optimizer."""
        import deepspeed

        recipe = self._recipe
        module = self._wrap(model)
        module.train()
        if self._adapters is not None:
            self._adapters.set_dropout(False)
            leave_base_out(module)
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=deepspeed_config(
                recipe.optimizer, recipe.engine, recipe.model.dtype, self._stage
            ),
        )
        undo_first_step(engine.optimizer)
        if self._skips_reduction:  # DeepSpeed would sum copies of all gradients over one rank
            engine.enable_backward_allreduce = False
        return engine

    @property
    def _skips_reduction(self) -> bool:
        """True if gradients are neither sharded nor summed over ranks."""
        return self._stage == 0 and self._comm.world_size == 1

    def _run_trials(self, model: PreTrainedModel) -> Layout:
        """Run the trials of the model, and return the layout that the recipe asks for as far as the
        model supports it. Collective.

        Raises ModelError for log-probs that are not the model's own or not finite, RecipeError if
        `batch.packing` is true and rows of a pack mix.
        """
        recipe, comm, dtype = self._recipe, self._comm, self._recipe.model.dtype

        def forward(*batch: Any) -> np.ndarray:
            return self._device_logprobs(self._engine, *batch).cpu().numpy()

        refuse_other_logprobs(model, dtype, forward, comm)
        refuse_length_dependence(model.config, recipe.longest_sequence, forward, comm)
        packs = recipe.packs(self._device.type == "cuda")
        packs = packs and can_pack(recipe.batch.packing, model.config, forward, comm)
        pairs = pairs_per_token(recipe.model.attn_implementation, model.config.hidden_size)
        if pairs is not None and not can_share(
            model.config, dtype, recipe.longest_sequence, forward, comm
        ):
            pairs = None
            self.notices.append(
                f"shared prompts: a model of type {model.config.model_type} does not keep "
                "completions of one prompt apart, so every rollout computes its own prompt"
            )
        return Layout(recipe.batch.max_tokens_per_microbatch, packs, pairs)

    def _compile(self) -> None:
        """Compile the policy and the reference policy. If rank 0's trial or this rank's fails, the
        model stays uncompiled, or with `model.compile: true` ModelError is raised. Collective."""
        module = self._engine.module

        def forward(batch: MicroBatch) -> torch.Tensor:
            return module(*self._inputs(batch))[0]

        own_reason = why_not_compiled(module, self._recipe, self._layout.packing, forward)
        reason = self._comm.broadcast(own_reason) or own_reason
        if reason is None:
            if self._reference is not None:
                compile_policy(self._reference)
            return
        problem = f"a model of type {self._model.config.model_type} cannot be compiled: {reason}"
        if self._recipe.model.compile is True:
            raise ModelError(f"model.compile true: {problem}; set it to false")
        leave_uncompiled(module)
        self.notices.append(f"model.compile auto: {problem}; it runs uncompiled")

    @property
    def adapter_parameters(self) -> int:
        """Number of parameters of the LoRA adapters; 0 without LoRA."""
        return 0 if self._adapters is None else self._adapters.parameters

    def _wrap(self, model: PreTrainedModel) -> PolicyModule:
        on_cuda = self._device.type == "cuda"
        chunk_tokens = self._recipe.logprob_chunk_tokens(model.config.vocab_size, on_cuda)
        return PolicyModule(model, self._recipe.sampling.temperature, chunk_tokens)

    def _frozen_copy(self, model: PreTrainedModel) -> PolicyModule:
        import copy

        frozen = copy.deepcopy(model).requires_grad_(False).eval()
        return self._wrap(frozen.to(self._device))

    def logprobs(self, rows: Sequence[TrainRow] | None) -> list[np.ndarray]:
        """Per row float32 [T]: log-probs of its completion tokens under the current policy."""
        return self._row_logprobs(self._engine, rows)

    def reference_logprobs(self, rows: Sequence[TrainRow] | None) -> list[np.ndarray]:
        """Per row float32 [T]: log-probs under the frozen initial policy. Needs `loss.beta` > 0."""
        if self._adapters is not None:  # the initial policy is the base
            with self._adapters.without():
                return self.logprobs(rows)
        assert self._reference is not None, "the reference policy exists when loss.beta > 0"
        return self._row_logprobs(self._reference, rows)

    def _row_logprobs(self, module: nn.Module, rows: Sequence[TrainRow] | None) -> list[np.ndarray]:
        rows = rows or ()
        values = self._run_forward(module, self._exchange(rows))
        return join_values(self._comm.gather(values), len(rows))

    def _exchange(self, rows: Sequence[TrainRow]) -> list[MicroBatch]:
        """This rank's micro-batches of rank 0's rows. Collective."""
        plan = plan_sequences(rows, self._layout, self._comm.world_size)
        return exchange(self._comm, plan, rows, self._layout)

    def _run_forward(
        self, module: nn.Module, microbatches: Sequence[MicroBatch]
    ) -> list[RowValues]:
        logprobs = on_host([self._device_logprobs(module, batch) for batch in microbatches])
        parts = zip(microbatches, logprobs, strict=True)
        return [pair for part in parts for pair in values_of_rows(*part)]

    @torch.no_grad()
    def _device_logprobs(
        self, module: nn.Module, microbatch: MicroBatch, through_logits: bool = False
    ) -> torch.Tensor:
        logprobs_C, _ = module(*self._inputs(microbatch), through_logits=through_logits)
        return logprobs_C.float()

    def _inputs(self, batch: MicroBatch) -> tuple[torch.Tensor | int | None, ...]:
        arrays = (
            batch.input_ids_SL, batch.positions_C, batch.target_ids_C, batch.position_ids_SL,
            batch.bounds, batch.segments_3SL,
        )  # fmt: skip
        *tensors, segments = (None if array is None else self._tensor(array) for array in arrays)
        return (*tensors, int(batch.widths_S.max()), segments)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array).to(self._device, non_blocking=True)

    def update(self, rows: Sequence[TrainRow] | None) -> UpdateResult | None:
        """Make one optimizer update on a mini-batch. Returns its result, None off rank 0. Raises
        NonFiniteError on every rank if a loss or the gradient norm is not finite."""
        rows = rows or ()
        microbatches = self._exchange(rows)
        statistics = self._run_backward(microbatches)
        joined = join_statistics(self._comm.gather(statistics), len(rows))
        self._refuse_non_finite(joined, rows)
        grad_norm = self._step_optimizer()
        if joined is None:
            return None
        rate = param_groups(self._engine)[0]["lr"]
        return update_result(*joined, grad_norm, len(microbatches), rate)

    def measure(self, rows: Sequence[TrainRow] | None) -> tuple[RolloutOutcome, ...]:
        """Compute each row's outcome in an update without making it; () off rank 0. Collective."""
        rows = rows or ()
        microbatches = self._exchange(rows)
        with torch.no_grad():
            tables = [self._forward(microbatch)[1] for microbatch in microbatches]
        statistics = rank_statistics(microbatches, on_host(tables))
        joined = join_statistics(self._comm.gather(statistics), len(rows))
        return () if joined is None else row_outcomes(joined[0])

    def _run_backward(self, microbatches: Sequence[MicroBatch]) -> RankStatistics:
        """Accumulates the gradients of all micro-batches, and returns this rank's statistics."""
        tables = []
        with self._dropout():
            for index, microbatch in enumerate(microbatches):
                self._engine.set_gradient_accumulation_boundary(index == len(microbatches) - 1)
                tables.append(self._backward(microbatch))
        return rank_statistics(microbatches, on_host(tables))

    def _dropout(self) -> AbstractContextManager[None]:
        """Returns a context in which LoRA's dropout is active, and counts the update. The masks are
        a function of seed, step, update and rank, so that a resumed run has the same masks."""
        self._updates_of_step += 1
        if self._adapters is None or self._recipe.model.lora.lora_dropout == 0:
            return nullcontext()
        path = (self._step, self._updates_of_step, self._comm.rank)
        generator = stream(self._recipe.run.seed, DROPOUT_STREAM, *path)
        return self._adapters.dropout(int(generator.integers(2**63)), self._device)

    def _backward(self, microbatch: MicroBatch) -> torch.Tensor:
        """Accumulate gradients; returns float64 [R, K] row statistics on the device."""
        loss, statistics_RK = self._forward(microbatch)
        # DeepSpeed averages gradients over ranks; the weights already hold the global denominator.
        self._engine.backward(loss * self._comm.world_size, scale_wrt_gas=False)
        return statistics_RK

    def _forward(self, microbatch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a micro-batch, and returns its weighted loss (its share of the mini-batch loss) and
        float64 [R, K] row statistics, both on the device."""
        settings = self._recipe.loss
        logprobs_C, entropies_C = self._engine(*self._inputs(microbatch))
        behavior_C = self._tensor(microbatch.behavior_logprobs_C)
        reference_C = self._tensor(microbatch.reference_logprobs_C)
        row_of_C = self._tensor(microbatch.row_of_C)
        coefficients_C = self._tensor(microbatch.coefficients_R)[row_of_C]
        weights_C = self._tensor(microbatch.token_weights_R)[row_of_C]
        lengths_R = np.bincount(microbatch.row_of_C, minlength=len(microbatch.rows_R)).tolist()
        weights = microbatch.sampler_weights_C
        sampler_weights_C = self._tensor(weights) if len(weights) else None
        result = token_loss(
            logprobs_C, behavior_C, reference_C, coefficients_C, settings,
            lengths_R, sampler_weights_C,
        )  # fmt: skip
        weighted_C = result.losses_C * weights_C
        with torch.no_grad():
            reference_kl_C = (
                kl_to_reference(logprobs_C, reference_C)
                if settings.beta > 0
                else torch.zeros_like(logprobs_C)
            )
            rows = len(microbatch.rows_R)
            statistics_RK = row_statistics(
                result, weighted_C, entropies_C, reference_kl_C, row_of_C, rows
            )
        return weighted_C.sum(), statistics_RK

    def _refuse_non_finite(
        self, joined: tuple[np.ndarray, float] | None, rows: Sequence[TrainRow]
    ) -> None:
        """Raises NonFiniteError on every rank if a loss joined on rank 0 is not finite."""
        bad = []
        if joined is not None:
            finite = np.isfinite(joined[0][:, 0]).tolist()
            bad = [row.rollout_id for row, fine in zip(rows, finite, strict=True) if not fine]
        bad = self._comm.broadcast(bad)
        if bad:
            raise NonFiniteError(
                f"the loss of {len(bad)} of the mini-batch's rollouts is not finite (rollout_id "
                f"{bad[0]} first): training stopped before the update; resume from the last "
                "checkpoint with a smaller optimizer.learning_rate, or model.dtype float32"
            )

    def _step_optimizer(self) -> float:
        """Steps the optimizer, and returns the gradients' global L2 norm before clipping. Raises
        NonFiniteError if it is not finite."""
        module, norm = self._engine.module, None
        if self._skips_reduction:
            # Weight decay is for parameters without a gradient too, as where DeepSpeed reduces.
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        if self._stage == 0 and self._recipe.model.dtype == "float32":
            # DeepSpeed does not report this norm. Gradients are whole here.
            norms = [
                torch.linalg.vector_norm(parameter.grad)
                for parameter in module.parameters()
                if parameter.grad is not None
            ]
            norm = torch.linalg.vector_norm(torch.stack(norms))
        self._engine.step()
        reported = self._engine.get_global_grad_norm()
        grad_norm = float(reported if norm is None else norm)
        if not np.isfinite(grad_norm):
            raise NonFiniteError(
                f"the gradient norm is {grad_norm}: training stopped before a checkpoint could "
                "hold it; resume from the last checkpoint with a smaller optimizer.learning_rate"
            )
        return grad_norm

    def pushed_tensors(self, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that a push sends to the sampler: the adapters, by their names in the
        model, or all of `named_full_tensors`. Gathers `bucket_bytes` at once, collectively: all
        ranks must exhaust the iterator."""
        if not self._recipe.pushes_adapters:
            yield from self.named_full_tensors(bucket_bytes)
            return
        self._prepare_gather()
        yield from full_adapters(self._model, bucket_bytes)

    def named_full_tensors(self, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every parameter in full under its Hugging Face name, a tied one under each name,
        LoRA merged, gathered a bucket at a time. All ranks must exhaust the iterator."""
        self._prepare_gather()
        yield from full_tensors(self._model, bucket_bytes)

    def _prepare_gather(self) -> None:
        if self._stage == 3:
            # A log-prob pass leaves parameters gathered or in flight; gathering them again
            # without an update in between fails ("Cannot partition a param in flight").
            # The engine's method of this name also collects garbage: 0.3 s each time.
            self._engine.optimizer.empty_partition_cache()

    def save_model(self, folder: Path) -> None:
        """Write policy and tokenizer in Hugging Face format, with LoRA merged in float32."""
        dtype = torch.float32 if self._adapters is not None else None
        self._prepare_gather()
        state = self._on_main(full_tensors(self._model, 2**29, dtype=dtype))
        if self._comm.is_main:
            write_model(folder, self._model, state, dtype)
            write_tokenizer(folder, self._tokenizer)
        self._comm.barrier()

    def save_adapter(self, folder: Path) -> None:
        """Write the LoRA adapters in peft's format; nothing without LoRA."""
        if self._adapters is None:
            return
        self._prepare_gather()
        state = self._on_main(full_adapters(self._model, 2**29))
        if self._comm.is_main:
            self._adapters.save(folder, state)
        self._comm.barrier()

    def _on_main(self, tensors: NamedTensors) -> dict[str, torch.Tensor]:
        """Copy the tensors to host memory on rank 0, each tied tensor once."""
        tied, state = tied_names(self._model), {}
        for name, tensor in tensors:
            if self._comm.is_main and name not in tied:
                state[name] = tensor.to("cpu", copy=True).contiguous()
        return state

    def save(self, folder: Path) -> None:
        """Write parameters and optimizer state."""
        layout = layout_of(self._recipe, self._comm.world_size, self._stage)
        save_state(self._engine, layout, self._comm, folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, even if the number of ranks, the ZeRO stage or the dtype has
        changed. Raises CheckpointError."""
        layout = layout_of(self._recipe, self._comm.world_size, self._stage)
        if saved_layout(folder) != layout:
            load_other_layout(self._engine, self._stage, folder)
            self._comm.barrier()
        else:
            load_same_layout(self._engine, layout, folder)

    def begin_step(self, step: int) -> None:
        """Set the learning rate of a training step's updates, and its seed of dropout."""
        self._step, self._updates_of_step = step, 0
        rate = self._recipe.optimizer.rate_of(step, self._recipe.run.steps)
        for group in param_groups(self._engine):
            group["lr"] = rate

    def close(self) -> None:
        self._engine.destroy()


def on_host(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Copy tensors to the host. It waits for the device once, after everything is queued."""
    if not tensors:
        return []
    sizes = [len(tensor) for tensor in tensors]
    return [tensor.numpy() for tensor in torch.cat(list(tensors)).cpu().split(sizes)]


def deepspeed_config(
    optimizer: OptimizerSection, engine: EngineSection, dtype: str, stage: int
) -> dict[str, Any]:
    """Make DeepSpeed's configuration at a ZeRO stage. It accumulates nothing by itself: the number
    of micro-batches varies, and our loss already has its global denominator."""
    zero = {"stage": stage, **engine.zero.model_dump()}
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if engine.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    adamw = {
        # One pass over every tensor; torch's own choice makes ten, on a GPU with temporaries.
        "fused": "foreach" not in optimizer.adamw.extra_settings,
        "lr": optimizer.learning_rate,  # a placeholder: `begin_step` sets the rate of each step
        **optimizer.adamw.model_dump(),
        "torch_adam": True,
    }
    bf16 = dtype == "bfloat16"
    accumulation = "fp32" if bf16 and not sums_in_bf16(dtype, stage) else None
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": adamw},
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": accumulation},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def sums_in_bf16(dtype: str, stage: int) -> bool:
    """Return whether the gradients of an update's micro-batches are summed in bfloat16.

    DeepSpeed 0.19 refuses an fp32 sum at stage 0 ("unsupported mix", engine.py
    `_do_optimizer_sanity_check`), and at stage 1 makes it with another optimizer, BF16_Optimizer,
    whose checkpoints are not those of the other stages.
    """
    return dtype == "bfloat16" and stage < 2
