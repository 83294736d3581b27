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


def publish(
    servers: Sequence[VllmServer],
    load_on: Callable[[VllmServer], None],
    version: int,
    timeout_seconds: float,
) -> dict[str, str]:
    """Pause every server, load the weights with `load_on`, empty its prefix cache, set its label
    and resume it; all servers in parallel. Returns URL -> reason for those that did not confirm the
    label."""

    def publish_to(server: VllmServer) -> str | None:
        label = server.label(version)
        try:
            server.pause(timeout_seconds)
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

    with ThreadPoolExecutor(max_workers=max(len(servers), 1)) as threads:
        reasons = list(threads.map(publish_to, servers))
    return {s.url: reason for s, reason in zip(servers, reasons, strict=True) if reason}
