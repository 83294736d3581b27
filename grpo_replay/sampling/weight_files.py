"""Transfers weights or adapters to an engine as files, in one folder per version."""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_replay.distributed.held_folder import HeldFolder
from grpo_replay.engine.weights import expected_adapters, write_adapters
from grpo_replay.errors import SamplerError
from grpo_replay.recipe import ModelSection
from grpo_replay.storage.atomic import try_operation

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "grpo-replay-weights-"


class FolderTransfer:
    """Transfers weights through safetensors files in a folder that trainer and servers share: a
    folder of this run under `parent`, or in this machine's shared memory if that is None. Host
    memory holds one file of about `bucket_bytes` at a time. `path` is the folder of the staged
    version.

    Removes the folders of killed runs. Raises SamplerError if the folder cannot be created.
    """

    def __init__(self, parent: str | None, bytes_needed: int, bucket_bytes: int) -> None:
        """Creates the run's folder. `bytes_needed` are those of one version."""
        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        self._parent = Path(parent) if parent else shared
        self._bytes_needed, self._bucket_bytes = bytes_needed, bucket_bytes
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            self._held = HeldFolder(PREFIX, self._parent)
        except OSError as error:
            raise SamplerError(
                f"cannot write weights for the servers to {self._parent}: {error.strerror}; set "
                "sampling.servers.weight_transfer to the path of a folder that trainer and servers "
                "share"
            ) from error
        # A server may run as another user.
        try_operation(os.chmod, self._held.path, 0o755)
        self.path = self._held.path / "none"

    def stage(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Write one version. Tied tensors are written under every name, or vLLM would keep its old
        output head. Raises SamplerError if the disk is full."""
        self._make_folder(version)
        bucket: dict[str, torch.Tensor] = {}
        size = files = 0
        for name, tensor in named_tensors:
            if bucket and size + tensor.nbytes > self._bucket_bytes:
                save_file(bucket, self.path / f"model-{files:05d}.safetensors")
                bucket, size, files = {}, 0, files + 1
            bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += tensor.nbytes
        save_file(bucket, self.path / f"model-{files:05d}.safetensors")

    def _make_folder(self, version: int, sets: int = 1) -> None:
        """Create the folder of a version. Raises SamplerError if `sets` of weights do not fit."""
        free, needed = shutil.disk_usage(self._parent).free, sets * self._bytes_needed
        if free < needed:
            raise SamplerError(
                f"{self._parent} has {free / 2**30:.2f} GiB free, {sets} set(s) of weights need "
                f"{needed / 2**30:.2f} GiB: set sampling.servers.weight_transfer to "
                "the path of a larger folder that the servers share (in a container, raise "
                "--shm-size)"
            )
        self.path = self._held.path / f"version-{version}"
        shutil.rmtree(self.path, ignore_errors=True)  # left by a refused update
        self.path.mkdir()

    def discard(self) -> None:
        """Remove the staged version."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Remove everything. May be called twice."""
        self._held.release()


class AdapterTransfer(FolderTransfer):
    """Transfers LoRA's adapters, in peft's format. The newest `versions` stay on disk, because vLLM
    may read the adapter of a running request again."""

    def __init__(self, parent: str | None, model: ModelSection, versions: int) -> None:
        self.expected, self._config = expected_adapters(model)
        super().__init__(parent, self.expected.bytes_needed, 0)
        self._versions = versions

    def stage(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Write one version. Raises SamplerError if the disk has no room for all kept versions."""
        self._make_folder(version, max(self._versions - len(self._staged()), 1))
        write_adapters(self.path, named_tensors, self._config)

    def discard(self) -> None:
        """Remove all but the newest versions."""
        for old in self._staged()[: -self._versions]:
            shutil.rmtree(old, ignore_errors=True)

    def _staged(self) -> list[Path]:
        """Returns the folders of versions, oldest first."""
        folders = self._held.path.glob("version-*")
        return sorted(folders, key=lambda folder: folder.stat().st_mtime_ns)
