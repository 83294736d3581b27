"""The engine: DeepSpeed ZeRO 0-3, from one CPU process to many nodes."""

import datetime
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from grpo_replay import __version__
from grpo_replay.backends.policy_module import PolicyModule
from grpo_replay.backends.rendezvous import form_process_group, join_run
from grpo_replay.batch import MicroBatch, TrainRow, plan_microbatches, scatter_microbatches
from grpo_replay.distributed import Comm
from grpo_replay.engine import UpdateResult
from grpo_replay.errors import CheckpointError, NonFiniteError
from grpo_replay.loss import ROW_STATISTICS, kl_to_reference, row_statistics, token_loss
from grpo_replay.ranks import rank_environment
from grpo_replay.recipe import EngineSection, OptimizerSection, Recipe
from grpo_replay.types import RolloutOutcome

ENGINE_TAG = "state"


def choose_device(settings: EngineSection, local_rank: int) -> torch.device:
    """The device of this rank."""
    wanted = settings.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", local_rank) if wanted == "cuda" else torch.device("cpu")


def initialize_processes(recipe: Recipe) -> tuple[Comm, torch.device]:
    """Join the run that the environment describes, and choose this rank's device.

    A process that no launcher started becomes a group of one. Raises LaunchError, on one rank, if
    ranks are missing, cannot reach each other, or were given different recipes.
    """
    settings, environment = recipe.engine, rank_environment()
    # DeepSpeed asks for it even in one process. WORLD_SIZE would say that a launcher started us.
    os.environ.setdefault("LOCAL_RANK", str(environment.local_rank))
    device = choose_device(settings, environment.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    ranks_here = environment.local_world_size
    torch.set_num_threads(settings.threads_per_process or max(1, _cores() // ranks_here))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not torch.distributed.is_initialized():
        form_process_group(environment, _join(recipe), backend, settings.timeout_seconds)
    # DeepSpeed would compile a shared-memory operator for CPU ranks, which needs a C++ compiler
    # and a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    group = None
    if environment.world_size > 1:
        timeout = datetime.timedelta(seconds=settings.timeout_seconds)
        group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    return Comm(environment.rank, environment.world_size, group), device


def _join(recipe: Recipe) -> torch.distributed.Store:
    environment = rank_environment()
    if not environment.is_launched:
        return torch.distributed.HashStore()  # no port: many runs may share a machine
    facts = {"recipe": recipe.model_dump(mode="json"), "grpo-replay": __version__}
    return join_run(environment, facts, None, recipe.engine.timeout_seconds)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def deepspeed_config(recipe: Recipe) -> dict[str, Any]:
    """DeepSpeed's configuration. Accumulation is ours: micro-batches vary from update to update,
    and the loss already has its global denominator."""
    optimizer, engine = recipe.optimizer, recipe.engine
    zero: dict[str, Any] = {"stage": engine.zero_stage}
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if engine.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    bf16 = recipe.model.dtype == "bfloat16"
    # Many micro-batches summed in bf16 would stop adding up. DeepSpeed offers no fp32 sum at
    # stage 0, and at stage 1 only with another optimizer wrapper.
    accumulation = "fp32" if bf16 and engine.zero_stage >= 2 else None
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": _adamw_parameters(optimizer)},
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": accumulation},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def _adamw_parameters(optimizer: OptimizerSection) -> dict[str, Any]:
    return {
        "lr": optimizer.learning_rate,
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "torch_adam": True,
    }


class DeepSpeedEngine:
    """The policy under DeepSpeed. See `engine.Engine` for the contract."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        tokenizer: Any,
        comm: Comm,
        device: torch.device,
        load_universal: bool = False,
    ) -> None:
        """Wrap `model`. With `load_universal`, the engine loads a converted checkpoint only."""
        import deepspeed

        self._recipe = recipe
        self._comm = comm
        self._device = device
        self._tokenizer = tokenizer
        self._max_tokens = recipe.batch.max_tokens_per_microbatch
        if recipe.model.gradient_checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        self._model = model
        self._reference = self._frozen_copy(model) if recipe.loss.beta > 0 else None
        module = self._wrap(model)
        module.train()
        self._engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=deepspeed_config(recipe) | {"checkpoint": {"load_universal": load_universal}},
        )
        self._gather_needs_forward = recipe.engine.zero_stage == 3

    def _wrap(self, model: nn.Module) -> PolicyModule:
        return PolicyModule(
            model, self._recipe.sampling.temperature, self._recipe.engine.logprob_chunk_tokens
        )

    def _frozen_copy(self, model: nn.Module) -> PolicyModule:
        import copy

        frozen = copy.deepcopy(model).requires_grad_(False).eval()
        return self._wrap(frozen.to(self._device))

    def logprobs(self, rows: Sequence[TrainRow] | None) -> list[np.ndarray]:
        self._gather_needs_forward = False
        return self._row_logprobs(self._engine, rows)

    def reference_logprobs(self, rows: Sequence[TrainRow] | None) -> list[np.ndarray]:
        assert self._reference is not None, "the reference policy exists when loss.beta > 0"
        return self._row_logprobs(self._reference, rows)

    def _row_logprobs(self, module: nn.Module, rows: Sequence[TrainRow] | None) -> list[np.ndarray]:
        parts = []
        with torch.no_grad():
            for microbatch in self._microbatches(rows):
                logprobs_C, _ = module(*self._inputs(microbatch))
                parts.append((microbatch, logprobs_C.float().cpu().numpy()))
        flat = np.concatenate([values for _, values in parts] or [np.zeros(0, np.float32)])
        lengths = np.concatenate(
            [_row_lengths(microbatch) for microbatch, _ in parts] or [np.zeros((0, 2), np.int64)]
        )
        gathered_lengths = self._comm.gather(lengths.astype(np.int64).tobytes())
        gathered_flat = self._comm.gather(flat.astype(np.float32).tobytes())
        if gathered_lengths is None or gathered_flat is None or rows is None:
            return []
        return _split_rows(gathered_lengths, gathered_flat, len(rows))

    def _microbatches(self, rows: Sequence[TrainRow] | None) -> list[MicroBatch]:
        plan = None
        if self._comm.is_main:
            assert rows is not None
            plan = plan_microbatches(rows, self._max_tokens, self._comm.world_size)
        return scatter_microbatches(self._comm, plan)

    def _inputs(self, microbatch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            self._tensor(microbatch.input_ids_RL),
            self._tensor(microbatch.positions_C),
            self._tensor(microbatch.target_ids_C),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array).to(self._device, non_blocking=True)

    def update(self, rows: Sequence[TrainRow] | None) -> UpdateResult | None:
        microbatches = self._microbatches(rows)
        tables = []
        for index, microbatch in enumerate(microbatches):
            self._engine.set_gradient_accumulation_boundary(index == len(microbatches) - 1)
            tables.append(self._backward(microbatch))
        table = self._gather_statistics(microbatches, tables, len(rows) if rows else 0)
        self._refuse_non_finite(table, microbatches)
        unsharded_norm = self._unsharded_grad_norm()
        self._engine.step()
        self._gather_needs_forward = False
        grad_norm = self._engine.get_global_grad_norm()
        grad_norm = float(unsharded_norm if grad_norm is None else grad_norm)
        if not np.isfinite(grad_norm):
            raise NonFiniteError(
                f"the gradient norm is {grad_norm}: training stopped before a checkpoint could "
                "hold it; resume from the last checkpoint with a smaller optimizer.learning_rate"
            )
        if table is None:
            return None
        return _update_result(table, grad_norm, len(microbatches))

    def _backward(self, microbatch: MicroBatch) -> torch.Tensor:
        """float64 [R, K] row statistics, on CPU."""
        settings = self._recipe.loss
        logprobs_C, entropies_C = self._engine(*self._inputs(microbatch))
        behavior_C = self._tensor(microbatch.behavior_logprobs_C)
        reference_C = self._tensor(microbatch.reference_logprobs_C)
        row_of_C = self._tensor(microbatch.row_of_C)
        coefficients_C = self._tensor(microbatch.coefficients_R)[row_of_C]
        weights_C = self._tensor(microbatch.token_weights_R)[row_of_C]
        result = token_loss(logprobs_C, behavior_C, reference_C, coefficients_C, settings)
        weighted_C = result.losses_C * weights_C
        # DeepSpeed averages gradients over ranks; the weights already hold the global denominator.
        self._engine.backward(weighted_C.sum() * self._comm.world_size, scale_wrt_gas=False)
        with torch.no_grad():
            reference_kl_C = (
                kl_to_reference(logprobs_C, reference_C)
                if settings.beta > 0
                else torch.zeros_like(logprobs_C)
            )
            rows = len(microbatch.rows_R)
            return row_statistics(
                result, weighted_C, entropies_C, reference_kl_C, row_of_C, rows
            ).cpu()

    def _gather_statistics(
        self, microbatches: Sequence[MicroBatch], tables: Sequence[torch.Tensor], rows: int
    ) -> np.ndarray | None:
        """float64 [N, K] in row order, on rank 0."""
        width = 1 + len(ROW_STATISTICS)
        mine = [
            np.column_stack([microbatch.rows_R, table.numpy()])
            for microbatch, table in zip(microbatches, tables, strict=True)
        ]
        payload = np.concatenate(mine or [np.zeros((0, width))]).tobytes()
        gathered = self._comm.gather(payload)
        if gathered is None:
            return None
        everything = np.concatenate([np.frombuffer(p).reshape(-1, width) for p in gathered])
        table = np.zeros((rows, len(ROW_STATISTICS)))
        real = everything[everything[:, 0] >= 0]
        table[real[:, 0].astype(np.int64)] = real[:, 1:]
        return table

    def _refuse_non_finite(
        self, table: np.ndarray | None, microbatches: Sequence[MicroBatch]
    ) -> None:
        bad = []
        if table is not None:
            bad = [int(row) for row in np.flatnonzero(~np.isfinite(table[:, 0]))]
        bad = self._comm.broadcast_json(bad)
        if bad:
            raise NonFiniteError(
                f"the loss of {len(bad)} rollouts is not finite (first: row {bad[0]} of the "
                "mini-batch): training stopped before the update; resume from the last "
                "checkpoint with a smaller optimizer.learning_rate, or model.dtype float32"
            )

    def _unsharded_grad_norm(self) -> torch.Tensor | None:
        """DeepSpeed does not report the norm for fp32 at stage 0, where gradients are whole."""
        if self._recipe.engine.zero_stage != 0 or self._recipe.model.dtype != "float32":
            return None
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        )

    def named_full_tensors(self, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        self._forward_once()
        parameters = list(self._model.named_parameters(remove_duplicate=False))
        persistent = self._model.state_dict().keys() - {name for name, _ in parameters}
        for bucket in _buckets(parameters, bucket_bytes):
            with _gathered([parameter for _, parameter in bucket]):
                for name, parameter in bucket:
                    yield name, parameter.detach()
        for name, buffer in self._model.named_buffers():
            if name in persistent:
                yield name, buffer.detach()

    def _forward_once(self) -> None:
        """Some DeepSpeed versions need one forward before the first ZeRO-3 gather."""
        if self._gather_needs_forward:
            self._gather_needs_forward = False
            row = TrainRow(
                np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32),
                np.zeros(1, np.float32),
            )  # fmt: skip
            self.logprobs([row] if self._comm.is_main else None)

    def save_model(self, folder: Path) -> None:
        tied = _tied_names(self._model)
        state = {}
        for name, tensor in self.named_full_tensors(2**29):
            if self._comm.is_main and name not in tied:
                state[name] = tensor.to("cpu", copy=True).contiguous()
        if self._comm.is_main:
            self._model.save_pretrained(folder, state_dict=state)
            self._tokenizer.save_pretrained(folder)
        self._comm.barrier()

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=ENGINE_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(str(folder), tag=ENGINE_TAG)
        if path is None:
            raise CheckpointError(f"{folder}: DeepSpeed found no engine state {ENGINE_TAG!r} there")

    def load_converted(self, folder: Path, scratch: Path) -> None:
        """Restore what `save` wrote on another number of ranks, through DeepSpeed's universal
        checkpoint, which is made in `scratch` and removed. Raises CheckpointError."""
        if self._comm.is_main:
            _convert_to_universal(folder / ENGINE_TAG, scratch / ENGINE_TAG)
        self._comm.barrier()
        self.load(scratch)
        self._comm.barrier()
        if self._comm.is_main:
            shutil.rmtree(scratch)

    def close(self) -> None:
        self._engine.destroy()


def _convert_to_universal(source: Path, target: Path) -> None:
    """DeepSpeed's own conversion, in a process of its own: it reads all shards and is chatty."""
    shutil.rmtree(target.parent, ignore_errors=True)
    command = [
        sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
        "--input_folder", str(source), "--output_folder", str(target),
        "--num_extract_workers", "1", "--num_merge_workers", "1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckpointError(
            f"{source}: DeepSpeed could not convert this engine state for another number of "
            f"ranks: {done.stderr.strip().splitlines()[-1:]}; resume on as many ranks, and at "
            "the ZeRO stage, that wrote it"
        )


def _tied_names(model: nn.Module) -> set[str]:
    """Names under which a parameter appears again after its first."""
    unique = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - unique


def _buckets(
    parameters: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters:
        numel = getattr(parameter, "ds_numel", parameter.numel())
        bytes_needed = numel * parameter.element_size()
        if bucket and size + bytes_needed > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += bytes_needed
    if bucket:
        yield bucket


def _gathered(parameters: Iterable[nn.Parameter]) -> Any:
    """A context in which ZeRO-3 parameters are whole; does nothing for others."""
    import contextlib

    import deepspeed

    unique = list({id(p): p for p in parameters}.values())
    if not any(hasattr(parameter, "ds_id") for parameter in unique):
        return contextlib.nullcontext()
    return deepspeed.zero.GatheredParameters(unique)


def _row_lengths(microbatch: MicroBatch) -> np.ndarray:
    """int64 [R, 2]: row and its number of completion tokens."""
    counts = np.bincount(microbatch.row_of_C, minlength=len(microbatch.rows_R))
    return np.column_stack([microbatch.rows_R, counts])


def _split_rows(lengths: Sequence[bytes], flat: Sequence[bytes], count: int) -> list[np.ndarray]:
    table = np.concatenate([np.frombuffer(p, np.int64).reshape(-1, 2) for p in lengths])
    values = np.concatenate([np.frombuffer(p, np.float32) for p in flat])
    pieces = np.split(values, np.cumsum(table[:, 1])[:-1])
    rows: list[np.ndarray] = [np.zeros(0, np.float32)] * count
    for row, piece in zip(table[:, 0], pieces, strict=True):
        if row >= 0:
            rows[row] = piece.copy()
    return rows


def _update_result(table: np.ndarray, grad_norm: float, micro_batches: int) -> UpdateResult:
    column = {name: table[:, index] for index, name in enumerate(ROW_STATISTICS)}
    tokens = np.maximum(column["tokens"], 1.0)
    mean = column["log_ratio"] / tokens
    outcomes = tuple(
        RolloutOutcome(*values)
        for values in zip(
            column["tokens"].astype(int).tolist(),
            (column["clipped"] / tokens).tolist(),
            mean.tolist(),
            np.maximum(column["log_ratio_squared"] / tokens - mean**2, 0.0).tolist(),
            (column["approx_kl"] / tokens).tolist(),
            (column["ratio"] / tokens).tolist(),
            np.exp(np.minimum(column["log_ratio_max"], 700.0)).tolist(),
            (column["entropy"] / tokens).tolist(),
            strict=True,
        )
    )
    total = column["tokens"].sum()
    return UpdateResult(
        outcomes,
        float(column["loss"].sum()),
        grad_norm,
        float(column["reference_kl"].sum() / total) if total else 0.0,
        micro_batches,
    )
