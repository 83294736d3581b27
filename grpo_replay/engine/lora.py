"""LoRA (Hu et al., arXiv 2106.09685) with peft: trained adapters on a frozen base.

The adapters of a linear layer W are A [r, in] and B [out, r]; the layer computes
x·Wᵀ + (α/r)·x·Aᵀ·Bᵀ. B starts at zero, so that the policy starts as the base. Samplers and files
get the merged weight W + (α/r)·B·A (`full_tensors`), under the name that it has in the base.

The output head has no adapters: `policy_module.LogprobHead` owns its weight and never calls it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_replay.errors import RecipeError, did_you_mean
from grpo_replay.recipe import LoraSection

ADAPTER = "default"
"""peft's name of the only set of adapters; part of their parameters' names."""

MISSING_PEFT = "model.lora needs peft, which is not installed: pip install 'grpo-replay[lora]'"


class LoraAdapters:
    """The adapters of a model, in place."""

    def __init__(self, wrapped: Any) -> None:
        """`wrapped` is peft's model around the policy."""
        from peft.tuners.lora import LoraLayer

        self._wrapped = wrapped
        self.parameters = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
        self._layers = [each for each in wrapped.modules() if isinstance(each, LoraLayer)]

    @classmethod
    def attach(cls, model: PreTrainedModel, settings: LoraSection, seed: int) -> "LoraAdapters":
        """Freeze a model and put adapters on its linear layers. A is a function of `seed`; the
        global random state is left as it was.

        Raises RecipeError if peft is not installed, or for a target that the model does not have.
        """
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise RecipeError(MISSING_PEFT) from error
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=lora_targets(model, settings.targets),
            lora_dropout=settings.dropout,
            task_type="CAUSAL_LM",
            **settings.others,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # The engine decides the precision: DeepSpeed holds fp32 master weights of bf16 ones.
            wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
        return cls(wrapped)

    def set_dropout(self, active: bool) -> None:
        """Dropout is for updates: log-probs are those of the policy that is pushed."""
        for layer in self._layers:
            layer.lora_dropout.train(active)

    @contextmanager
    def dropout(self, seed: int, device: torch.device) -> Iterator[None]:
        """Within, dropout is active, with masks that are a function of `seed`; the global random
        state is afterwards as it was."""
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            self.set_dropout(True)
            try:
                yield
            finally:
                self.set_dropout(False)

    @contextmanager
    def without(self) -> Iterator[None]:
        """Within, the model computes as the base. Every module runs all the same, because under
        ZeRO-3 the modules must run in the same order each time."""
        scalings = [dict(layer.scaling) for layer in self._layers]
        try:
            for layer in self._layers:
                layer.scaling[ADAPTER] = 0.0
            yield
        finally:
            for layer, scaling in zip(self._layers, scalings, strict=True):
                layer.scaling.update(scaling)

    def save(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write adapters in peft's format. `tensors` are all of them, in full, by their names in
        the model."""
        state = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        self._wrapped.save_pretrained(folder, state_dict=state, save_embedding_layers=False)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is of an adapter."""
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def lora_targets(model: PreTrainedModel, wanted: Sequence[str] | None) -> list[str]:
    """The last names of the linear layers that get adapters: `wanted`, or all but the head."""
    head = model.get_output_embeddings()
    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    for target in wanted or ():
        if target not in found:
            raise RecipeError(
                f"model.lora.target_modules: {target!r} is no linear layer of the model that can "
                f"have adapters{did_you_mean(target, found)}; there are: {', '.join(sorted(found))}"
            )
    return sorted(found if wanted is None else set(wanted))
