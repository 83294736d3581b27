"""The `hf` sampler: batched decoding with transformers, without further packages.

It has its own decoding loop because `model.generate` has no seed per row and is slower. Here a
prompt is prefilled once for its whole group, finished rows are removed from batch and cache, the
tokens of a row depend only on its own seed, and the log-prob of every sampled token is returned.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo_replay.engine.models import load_policy, load_tokenizer
from grpo_replay.engine.weights import (
    CheckedWeights,
    LoraAdapters,
    pushed_weights,
    refuse_problems,
    weights_of,
)
from grpo_replay.errors import SamplerError
from grpo_replay.sampling.decode_modes import first_working_mode
from grpo_replay.sampling.decoding import (
    DecodingBatch,
    FinishedRow,
    decoding_batches,
    matches_forward_pass,
)
from grpo_replay.sampling.sampler_protocol import (
    SamplerOpening,
    WeightState,
    refuse_impossible,
)
from grpo_replay.types import Completion, GenerationRequest, NamedTensors


class HfSampler:
    """Implements `sampling.sampler_protocol.Sampler` on one device, with its own weights.

    With LoRA, updates replace only the adapters; the base stays.
    """

    reads_files: ClassVar[bool] = False
    ranks_sample_together = False

    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: Sequence[int],
        pad_id: int,
        max_batch_rollouts: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Use `open`. Moves the model to the device; finds a decode mode that works."""
        model = model.to(device).eval().requires_grad_(False)
        _align(pushed_weights(model).values())
        self._mode = first_working_mode(
            model, lambda mode: matches_forward_pass(model, mode, pad_id)
        )
        self._model: PreTrainedModel | None = model
        self._expected = weights_of(model, model.dtype)
        self.stop_token_ids = tuple(eos_ids)
        self._pad_id = pad_id
        self._max_batch_rollouts = max_batch_rollouts
        self._device = torch.device(device)
        self._weights = WeightState()
        self.policy_version = 0

    @classmethod
    def open(cls, opening: SamplerOpening) -> "HfSampler":
        """Load the model. Raises ModelError, also if no decode mode works for the model."""
        device = torch.device("cuda", torch.cuda.current_device()) if opening.on_gpu else "cpu"
        model = load_policy(opening.model, opening.seed, opening.sampling.fp32_head)
        if opening.with_adapters:
            LoraAdapters.attach(model, opening.model.lora, opening.seed)
        return cls(
            model,
            opening.stop_token_ids,
            load_tokenizer(opening.model).pad_token_id,
            opening.sampling.max_batch_rollouts,
            device,
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Yield completions as they finish, in any order, exactly one for each request.

        A completion depends only on its request: the seed determines the random number of every
        position. Raises RecipeError for a request longer than the model's positions, SamplerError
        for an invalid one, or if a weight update was left incomplete.
        """
        self._weights.refuse_incomplete()
        model = self._open_model().to(self._device)
        positions = getattr(model.config, "max_position_embeddings", None)
        limit = f"the model's {positions} positions;"
        for request in requests:
            refuse_impossible(request, model.config.vocab_size, positions, limit)
        ordered = sorted(
            requests,
            key=lambda r: (-len(r.prompt_token_ids), r.prompt_token_ids.astype(np.int32).tobytes()),
        )
        return self._run(model, ordered)

    def _run(
        self, model: PreTrainedModel, ordered: Sequence[GenerationRequest]
    ) -> Iterator[Completion]:
        for batch in decoding_batches(ordered, self._max_batch_rollouts, self._mode):
            first_version = self.policy_version
            for finished in self._decode(model, batch):
                yield self._completion(batch[finished.row], finished, first_version)

    def _decode(
        self, model: PreTrainedModel, requests: Sequence[GenerationRequest]
    ) -> Iterator[FinishedRow]:
        """Yields a batch's completions as they finish. Raises SamplerError out of memory."""
        try:
            batch = DecodingBatch(model, requests, self.stop_token_ids, self._pad_id, self._mode)
            while batch.alive:
                yield from batch.advance()
        except torch.OutOfMemoryError as error:
            raise SamplerError(
                f"out of GPU memory while decoding {len(requests)} rows at once: lower "
                f"sampling.max_batch_rollouts (now {self._max_batch_rollouts}) or "
                "sampling.max_completion_length, or use sampling.backend vllm"
            ) from error

    def _completion(
        self, request: GenerationRequest, finished: FinishedRow, first_version: int
    ) -> Completion:
        """Makes the completion of a finished row: `first_version` sampled its first token, the
        present version its last. Raises SamplerError for a log-prob that is not finite."""
        if not np.isfinite(finished.logprobs).all():
            raise SamplerError(
                f"request {tuple(request.key)}: a log-prob of policy version "
                f"{self.policy_version} is not finite; the weights hold NaN or infinity: take "
                "an earlier checkpoint, and look at grad_norm and loss of the steps before"
            )
        return Completion(
            key=request.key,
            token_ids=finished.token_ids,
            sampler_logprobs=finished.logprobs,
            finish_reason=finished.finish_reason,
            policy_version=first_version,
            policy_version_end=self.policy_version,
        )

    @torch.no_grad()
    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace all weights, or all adapters, by full tensors; tied ones come under every name.

        Raises SamplerError if `version` does not increase, and, after consuming `named_tensors`,
        for tensors that are unknown, missing, repeated, of a wrong shape or of lower precision. The
        sampler then refuses to generate until a complete update.
        """
        self._weights.begin(version, self.policy_version)
        weights = pushed_weights(self._open_model())
        checked = CheckedWeights(named_tensors, self._expected)
        for name, tensor in checked:
            if weights[name].numel() != tensor.numel():  # freed by `sleep`
                weights[name].data = weights[name].new_empty(tensor.shape, device=self._device)
            weights[name].copy_(tensor)
        checked.drain()
        refuse_problems(checked.problems, version)
        self._weights.complete()
        self.policy_version = version

    def sleep(self, keep_weights: bool = True) -> None:
        """Move kept weights from a GPU to host memory. Without `keep_weights`, free those that the
        next update replaces (with LoRA the adapters)."""
        model = self._open_model()
        if not keep_weights:
            self._weights.discard()
            for tensor in pushed_weights(model).values():
                tensor.data = tensor.new_empty(0)
        if self._device.type == "cuda":
            model.to("cpu")
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the weights. May be called twice."""
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _open_model(self) -> PreTrainedModel:
        assert self._model is not None, "the sampler is closed"
        return self._model


ALIGNMENT = 64
"""Alignment of memory that torch allocates, in bytes."""


def _align(weights: Iterable[torch.Tensor]) -> None:
    """Copy unaligned weights, those mapped from a file, to memory that torch allocates, as pushed
    weights are. Matrix products of a single row round differently with unaligned weights, and a
    resumed run, whose sampler gets a push first, must round as one that was never killed."""
    for tensor in weights:
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
