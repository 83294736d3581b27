"""The `vllm` sampler: one vLLM engine in the process of every rank.

With several ranks the engines use vLLM's external launcher, which reads rank and world size from
the environment. At tensor_parallel_size 1 they are independent; above 1, consecutive ranks form one
engine, and `generate` is collective.
"""

import gc
import logging
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from grpo_replay.distributed.comm import Comm
from grpo_replay.distributed.environment import rank_environment
from grpo_replay.distributed.failures import run_collectively
from grpo_replay.engine.weights import (
    CheckedWeights,
    ExpectedWeights,
    expected_weights,
    refuse_problems,
)
from grpo_replay.errors import RecipeError, SamplerError
from grpo_replay.sampling.sampler_protocol import (
    SamplerOpening,
    WeightState,
)
from grpo_replay.sampling.vllm_process import (
    VLLM_ERRORS,
    SleepState,
    preserved_process_state,
    preserved_torch_randomness,
    short_message,
    stdout_to_stderr,
)
from grpo_replay.sampling.vllm_requests import (
    build_completion,
    check_request,
    engine_arguments,
    log_through_root,
    sampling_parameters,
    set_environment,
)
from grpo_replay.sampling.weight_files import AdapterTransfer
from grpo_replay.types import Completion, GenerationRequest, NamedTensors

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

logger = logging.getLogger(__name__)


class VllmLocalSampler:
    """Implements `sampling.sampler_protocol.Sampler` with an engine in this process."""

    reads_files: ClassVar[bool] = True

    def __init__(
        self,
        engine: "LLMEngine",
        stop_token_ids: Sequence[int],
        expected: ExpectedWeights,
        comm: Comm,
        files: AdapterTransfer | None = None,
    ) -> None:
        """With LoRA, updates go through adapter `files`; `expected` are their tensors."""
        config = engine.vllm_config
        self._engine: LLMEngine | None = engine
        self.stop_token_ids = tuple(stop_token_ids)
        self._expected = expected
        self._comm = comm
        self._tensor_parallel_size = config.parallel_config.tensor_parallel_size
        self._max_model_len = config.model_config.max_model_len
        self._vocabulary = config.model_config.get_vocab_size()
        self._memory = SleepState(engine)
        self._files = files
        self._adapter: LoRARequest | None = None
        self._weights = WeightState()
        self.policy_version = 0
        engine.set_weight_version("0")

    @classmethod
    def open(cls, opening: SamplerOpening) -> "VllmLocalSampler":
        """Start an engine on every rank. Collective.

        Raises RecipeError for settings that contradict each other or the model, SamplerError if
        vLLM is missing or its engine does not start.
        """
        section, on_gpu = opening.model, opening.on_gpu
        arguments = engine_arguments(opening.sampling, section, opening.longest, on_gpu)
        arguments |= _colocation_arguments(opening)
        # Before the engine: an engine that `_refuse_transformers_classes` refuses breaks new
        # models.
        files = AdapterTransfer(None, section, versions=1) if opening.with_adapters else None
        expected = expected_weights(section) if files is None else files.expected
        if not on_gpu:
            _refuse_experts(expected)
        engine = _start_engine(arguments, on_gpu)
        _refuse_transformers_classes(engine)
        sampler = cls(engine, opening.stop_token_ids, expected, opening.comm, files)
        if files is not None:
            sampler._load_zero_adapters()
        return sampler

    @classmethod
    def check(
        cls, opening: SamplerOpening, ranks: int, ranks_here: int, elsewhere: bool = False
    ) -> None:
        """Raises what `open` would raise with `ranks_here` ranks on a node. Collective."""
        size = opening.sampling.vllm.tensor_parallel_size
        run_collectively(opening.comm, lambda: _refuse_split_engine(size, ranks_here))

    def _load_zero_adapters(self) -> None:
        """Load adapters of zeros. Raises SamplerError if vLLM refuses adapters of this model."""
        zeros = ((name, torch.zeros(shape)) for name, shape in self._expected.shapes.items())
        try:
            self._replace(self._open_engine(), CheckedWeights(zeros, self._expected), 0)
        except VLLM_ERRORS as error:
            self.close()
            raise SamplerError(
                f"sampling.backend vllm does not take the adapters of model.lora: "
                f"{short_message(error)}; choose other model.lora.target_modules, or set "
                "sampling.lora merged"
            ) from error

    @property
    def ranks_sample_together(self) -> bool:
        """True with tensor parallelism: consecutive ranks then form one engine."""
        return self._tensor_parallel_size > 1

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Yield completions as they finish, exactly one for each request.

        Collective with tensor parallelism. Raises RecipeError for a request longer than the
        engine's longest sequence; SamplerError for an invalid request, for a log-prob that is not
        finite, if the engine does not wake, or if the weights are incomplete.
        """
        self._weights.refuse_incomplete()
        engine = self._open_engine()
        for request in requests:
            check_request(request, self._max_model_len, self._vocabulary)
        self._memory.wake("weights", "kv_cache")
        all_requests, offset = self._gather_requests(requests)
        local_indices = range(offset, offset + len(requests))
        return self._run(engine, all_requests, local_indices)

    def _run(
        self, engine: "LLMEngine", requests: Sequence[GenerationRequest], local_indices: range
    ) -> Iterator[Completion]:
        """Adds all requests of the engine's ranks and steps it until they are finished; yields this
        rank's completions (`local_indices`). Aborts what is left if closed early."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # By default the engine would return every request at every step.
        kind = RequestOutputKind.FINAL_ONLY
        running = set()
        try:
            for index, request in enumerate(requests):
                prompt = {"prompt_token_ids": request.prompt_token_ids.tolist()}
                parameters = sampling_parameters(request, self.stop_token_ids)
                sampling = SamplingParams(**parameters, output_kind=kind)
                engine.add_request(str(index), prompt, sampling, lora_request=self._adapter)
                running.add(str(index))
            while running:
                for output in _step_until_finished(engine):
                    running.discard(output.request_id)
                    index = int(output.request_id)
                    if index in local_indices:
                        yield self._completion(requests[index], output.outputs[0])
        finally:
            self._abandon(engine, running)

    def _completion(self, request: GenerationRequest, sampled: Any) -> Completion:
        """Makes a completion of vLLM's output, with the policy versions of its first and last
        token. Raises SamplerError if it is aborted, has no tokens or lacks log-probs."""
        tokens = list(sampled.token_ids)
        entries = sampled.logprobs or []
        # Labels set by `set_weight_version`; none without tokens, which `build_completion` refuses.
        versions = [int(span.version) for span in sampled.weight_versions or ()]
        return build_completion(
            request,
            tokens,
            [entry[token].logprob for token, entry in zip(tokens, entries, strict=False)],
            sampled.finish_reason,
            (versions[0], versions[-1]) if versions else (self.policy_version,) * 2,
            self.stop_token_ids,
        )

    def _abandon(self, engine: "LLMEngine", running: set[str]) -> None:
        """Abort the unfinished requests of an iterator that was closed early."""
        if not running:
            return
        if self._tensor_parallel_size == 1:
            engine.abort_request(list(running))
            return
        # Other ranks of this engine keep stepping, and would hang in their collectives.
        while engine.has_unfinished_requests():
            engine.step()

    def _gather_requests(
        self, requests: Sequence[GenerationRequest]
    ) -> tuple[list[GenerationRequest], int]:
        """Returns all requests of this engine's ranks, in rank order, and the offset of this
        rank's. Collective with tensor parallelism."""
        size = self._tensor_parallel_size
        if size == 1:
            return list(requests), 0
        shares = self._comm.all_gather(list(requests))
        first = self._comm.rank // size * size
        engine_shares = shares[first : first + size]
        offset = sum(len(share) for share in engine_shares[: self._comm.rank - first])
        return [request for share in engine_shares for request in share], offset

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace all weights, or all adapters. Collective. If tensors do not fit the model on a
        rank, raises SamplerError there and PeerFailure on other ranks; no rank generates again
        until a complete update. Raises SamplerError if `version` does not increase."""
        self._weights.begin(version, self.policy_version)
        engine = self._open_engine()
        checked = CheckedWeights(named_tensors, self._expected)
        refusals = []
        try:
            self._memory.wake("weights")
            self._replace(engine, checked, version)
        except VLLM_ERRORS as error:
            refusals.append(f"vLLM refused them: {short_message(error)}")
        except SamplerError as error:
            refusals.append(str(error))
        finally:
            checked.drain()
        problems = [*checked.problems, *refusals]
        if not engine.reset_prefix_cache():
            problems.append("the prefix cache could not be reset: requests are still running")
        run_collectively(self._comm, lambda: refuse_problems(problems, version))
        engine.set_weight_version(str(version))
        self._weights.complete()
        self.policy_version = version

    def _replace(self, engine: "LLMEngine", checked: CheckedWeights, version: int) -> None:
        """Give vLLM the weights, or a complete adapter as files. Each version of an adapter has its
        own name and id, because vLLM's prefix cache tells adapters apart by these."""
        if self._files is None:
            engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(checked)})
            return
        from vllm.lora.request import LoRARequest

        self._files.stage(checked, version)
        checked.drain()
        if checked.problems:
            return
        self._adapter = LoRARequest(f"version-{version}", version + 1, str(self._files.path))
        engine.add_lora(self._adapter)  # replaces the previous adapter
        self._files.discard()

    def sleep(self, keep_weights: bool = True) -> None:
        """Free the GPU memory of cache and weights until the next `load_weights` or `generate`.
        Kept weights and adapters' base move to pinned host memory. Without kept weights `generate`
        is refused until the next `load_weights`. Frees nothing without sleep mode."""
        if not keep_weights:
            self._weights.discard()
        self._memory.sleep(keep_weights or self._files is not None)

    def close(self) -> None:
        """Free engine and GPU memory, but not the trainer's process group. May be called twice."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if self._files is not None:
            self._files.close()
        try:
            # vLLM would free sleeping memory a second time, and the driver would report errors.
            self._memory.wake("weights", "kv_cache")
        except SamplerError as error:
            logger.warning("closing a sleeping sampler: %s", error)
        del self._memory
        engine.model_executor.shutdown()
        del engine
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _open_engine(self) -> "LLMEngine":
        assert self._engine is not None, "the sampler is closed"
        return self._engine


def _refuse_split_engine(size: int, ranks_here: int) -> None:
    """Raises RecipeError if the ranks of a node do not split into engines of `size` ranks."""
    if ranks_here % size:
        raise RecipeError(
            f"sampling.vllm.tensor_parallel_size {size} does not divide the {ranks_here} ranks of "
            "a node: every engine spans that many ranks of one node"
        )


def _colocation_arguments(opening: SamplerOpening) -> dict[str, Any]:
    """Returns the EngineArgs that only an engine in the trainer's process needs."""
    vllm, world_size = opening.sampling.vllm, opening.comm.world_size
    sleeps = opening.on_gpu and vllm.enable_sleep_mode
    size = vllm.tensor_parallel_size
    _refuse_split_engine(size, rank_environment().local_world_size)
    return {
        "distributed_executor_backend": "external_launcher" if world_size > 1 else None,
        "enable_sleep_mode": sleeps,
        # CUDA graphs go to host memory too, at either level, and return with whatever wakes first
        # (vLLM 0.32, device_allocator/sleep_mode_backend.py, cumem.py).
        "sleep_mode_offload_cudagraph": vllm.extra_settings.get(
            "sleep_mode_offload_cudagraph", sleeps
        ),
        # For the process groups in which ranks of an engine exchange activations.
        "distributed_timeout_seconds": math.ceil(opening.timeout_seconds),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


def _start_engine(arguments: dict[str, Any], on_gpu: bool) -> "LLMEngine":
    """Starts vLLM's engine in this process, without its side effects on random states, threads and
    stdout. Raises SamplerError if vLLM is missing or refuses to start."""
    set_environment(os.environ, on_gpu)
    log_through_root(os.environ)
    # Its engine core must run in this process: weights are passed as tensors, and the external
    # launcher requires it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with preserved_process_state(), stdout_to_stderr():
        try:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.llm_engine import LLMEngine
        except ImportError as error:
            raise SamplerError(
                f"sampling.backend vllm: vLLM cannot be imported ({error}); "
                "pip install 'grpo-replay[vllm]', or use sampling.backend hf"
            ) from error
        try:
            engine = LLMEngine.from_engine_args(
                EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS
            )
        except VLLM_ERRORS as error:
            lora = ", or sampling.lora merged" if "enable_lora" in arguments else ""
            raise SamplerError(
                f"sampling.backend vllm: the engine did not start: {short_message(error)}; "
                f"see sampling.vllm in the recipe (on a GPU, gpu_memory_utilization first){lora}"
            ) from error
    # On garbage collection the engine core would destroy every process group of this process,
    # including the trainer's. `close` shuts the executor down instead.
    engine.engine_core._finalizer.detach()
    return engine


def _refuse_experts(expected: ExpectedWeights) -> None:
    """Raises SamplerError for a mixture of experts. On a CPU, vLLM 0.32 computes log-probs of
    Qwen3-MoE wrong by up to 2.3 nats after new weights, and does not load Mixtral's."""
    for name in expected.shapes:
        if name.endswith(".experts.gate_up_proj"):
            raise SamplerError(
                f"sampling.backend vllm on a CPU: vLLM does not load new weights of experts "
                f"({name}) correctly; use sampling.backend hf"
            )


def _refuse_transformers_classes(engine: "LLMEngine") -> None:
    """Raises SamplerError if vLLM runs the model with transformers' classes. vLLM decorates these
    for the whole process (0.32, `support_torch_compile`), which breaks the trainer's model."""
    config = engine.vllm_config.model_config
    if config.using_transformers_backend():
        engine.model_executor.shutdown()
        raise SamplerError(
            f"sampling.backend vllm: vLLM has no implementation of its own for a model of type "
            f"{config.hf_config.model_type}, and the one that it uses of transformers breaks "
            "the trainer's in the same process; use sampling.backend vllm_server or hf"
        )


def _step_until_finished(engine: "LLMEngine") -> list[Any]:
    """Step the engine until at least one request is finished. Returns finished outputs."""
    with preserved_torch_randomness():
        while True:
            if outputs := [output for output in engine.step() if output.finished]:
                return outputs
