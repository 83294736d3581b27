"""Publish new weights to the servers.

A transfer first stages one version (writes it to files, or streams it), then every server switches
to it. A server is used again only after it has confirmed the label of the new policy version.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from grpo_replay.sampling.server.http_client import Refused, Unreachable, block_on
from grpo_replay.sampling.server.routes import VllmServer
from grpo_replay.sampling.server.weight_files import SyncFolder


class Transfer(Protocol):
    def stage(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        servers: Sequence[VllmServer],
    ) -> None:
        """Consume all tensors: write them to files, or broadcast them. Raises SamplerError."""
        ...

    def load_on(self, server: VllmServer) -> None:
        """Make one server load the staged version. Raises Unreachable or Refused."""
        ...

    def discard(self) -> None:
        """Discard the staged version."""
        ...

    def close(self) -> None:
        """Free all resources. May be called twice."""
        ...


class FolderTransfer:
    """Transfer through safetensors files in a folder that trainer and servers share."""

    def __init__(self, folder: SyncFolder, bucket_bytes: int, timeout_seconds: float) -> None:
        self._folder = folder
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._staged: Path | None = None

    def stage(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        servers: Sequence[VllmServer],
    ) -> None:
        self._staged = self._folder.write(named_tensors, version, self._bucket_bytes)

    def load_on(self, server: VllmServer) -> None:
        assert self._staged is not None, "nothing was staged"
        server.reload_weights(str(self._staged), self._timeout_seconds)

    def discard(self) -> None:
        if self._staged is not None:
            self._folder.remove(self._staged)
            self._staged = None

    def close(self) -> None:
        self._folder.close()


class KeptFolderTransfer(FolderTransfer):
    """Keeps the staged version until another one is published, for servers that come later."""

    def __init__(self, folder: SyncFolder, bucket_bytes: int, timeout_seconds: float) -> None:
        super().__init__(folder, bucket_bytes, timeout_seconds)
        self._version: int | None = None
        self._superseded: Path | None = None

    def stage(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        servers: Sequence[VllmServer],
    ) -> None:
        superseded = self._staged
        super().stage(named_tensors, version, servers)
        self._superseded, self._version = superseded, version

    def holds(self, version: int) -> bool:
        """True if this version is staged."""
        return self._version == version

    def discard(self) -> None:
        """Discard the version before the staged one."""
        if self._superseded is not None:
            self._folder.remove(self._superseded)
            self._superseded = None


UPDATING = "updating"
"""Label of a server while it loads weights, after the run's prefix: not a version."""


def switch_server(
    server: VllmServer,
    load_on: Callable[[VllmServer], None],
    version: int,
    timeout_seconds: float,
) -> str | None:
    """Pause a server, load the weights with `load_on`, empty its prefix cache, set its label and
    resume it. Returns why it did not confirm the label, or None.

    The label is "updating" in between: a server that fails half-way must not be used as the old
    version or as the new one.
    """
    label = server.label(version)
    try:
        server.pause(timeout_seconds)
        server.set_weight_label(server.prefix + UPDATING)
        load_on(server)
        if not server.drop_cached_prompts():
            return f"its prompt cache could not be emptied for policy version {version}"
        server.set_weight_label(label)
        server.resume()
        confirmed = block_on(server.weight_label())
    except (Refused, Unreachable) as error:
        return f"it did not take policy version {version}: {error}"
    except (KeyError, TypeError) as error:
        return f"it answers, but not like vLLM 0.32: {error!r}"
    return None if confirmed == label else f"it confirmed {confirmed!r} instead of {label!r}"


def publish(
    servers: Sequence[VllmServer],
    load_on: Callable[[VllmServer], None],
    version: int,
    timeout_seconds: float,
) -> dict[str, str]:
    """`switch_server` on all servers in parallel. Returns URL -> reason for those that did not
    confirm the label."""

    def switch(server: VllmServer) -> str | None:
        return switch_server(server, load_on, version, timeout_seconds)

    with ThreadPoolExecutor(max_workers=max(len(servers), 1)) as threads:
        reasons = list(threads.map(switch, servers))
    return {s.url: reason for s, reason in zip(servers, reasons, strict=True) if reason}
