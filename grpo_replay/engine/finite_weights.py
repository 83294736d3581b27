"""The check that every weight is a number, where a model is loaded and where it is pushed: with one
that is none, a model samples from no distribution, and nothing else says which tensor it is."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from grpo_replay.errors import ModelError
from grpo_replay.types import NamedTensors


def is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all numbers of a tensor are finite: bool [] on its device, for which the host need
    not wait."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return torch.tensor(True)
    numbers = tensor.detach()
    if numbers.element_size() == 1:  # float8, which has no comparisons
        numbers = numbers.float()
    return torch.stack(torch.aminmax(numbers)).isfinite().all()  # NaN is both


def not_finite(finite: Mapping[str, torch.Tensor]) -> str:
    """Which tensors are not `finite`, in words; empty if all are."""
    names = [name for name, each in finite.items() if not each]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"NaN or infinity in {', '.join(names[:3])}{more}" if names else ""


def refuse_not_finite(tensors: NamedTensors, place: str) -> None:
    """Raises ModelError that names `place` and the first tensors that are not finite."""
    if found := not_finite({name: is_finite(tensor) for name, tensor in tensors}):
        raise ModelError(f"{place}: {found}: take an earlier checkpoint, or fetch the model again")


def stored_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """What the safetensors files of a folder hold, one tensor at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
