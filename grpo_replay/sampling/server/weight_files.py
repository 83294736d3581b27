"""Safetensors files that carry weights to the servers, in a folder shared with them."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import torch
from safetensors.torch import save_file

from grpo_replay.errors import SamplerError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "grpo-replay-weights-"
LOCK = "in-use"


class SyncFolder:
    """A folder of this run under `parent` (if None, under this machine's shared memory).

    Removes the folders of killed runs: a live run holds a lock in its folder. Raises SamplerError
    if the folder cannot be created.
    """

    def __init__(self, parent: str | None, bytes_needed: int) -> None:
        self._parent = Path(parent) if parent else _default_parent()
        self._bytes_needed = bytes_needed
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self._parent)
            self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
        except OSError as error:
            raise SamplerError(
                f"cannot write weights for the servers to {self._parent}: {error.strerror}; set "
                "sampling.servers.sync_folder to a folder that trainer and servers share"
            ) from error
        os.chmod(self._folder, 0o755)  # a server may run as another user
        self._lock: IO | None = _locked(self._folder / LOCK)

    def write(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, bucket_bytes: int
    ) -> Path:
        """Write one version in files of about `bucket_bytes` and return its folder. Host memory
        holds one such file at a time. Tied tensors are written under every name: otherwise vLLM
        would keep its old output head. Raises SamplerError if the disk has no room."""
        free = shutil.disk_usage(self._parent).free
        if free < self._bytes_needed:
            raise SamplerError(
                f"{self._parent} has {free / 2**30:.2f} GiB free, one set of weights needs "
                f"{self._bytes_needed / 2**30:.2f} GiB: set sampling.servers.sync_folder to a "
                "larger folder that the servers share (in a container, raise --shm-size)"
            )
        folder = self._folder / f"version-{version}"
        folder.mkdir()
        bucket: dict[str, torch.Tensor] = {}
        size = files = 0
        for name, tensor in named_tensors:
            if bucket and size + tensor.nbytes > bucket_bytes:
                save_file(bucket, folder / f"model-{files:05d}.safetensors")
                bucket, size, files = {}, 0, files + 1
            bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += tensor.nbytes
        if bucket:
            save_file(bucket, folder / f"model-{files:05d}.safetensors")
        return folder

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove everything. May be called twice."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _default_parent() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _locked(path: Path) -> IO:
    lock = path.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, another run's, or just removed
            if (folder / LOCK).is_file():
                _locked(folder / LOCK).close()
                shutil.rmtree(folder)
