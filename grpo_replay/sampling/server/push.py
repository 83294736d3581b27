"""Pushes weights to servers over HTTP.

`WeightPush.push` stages a version as files on rank 0, then switches every server to it, including
lost servers that answer again. A server is used again only after it has confirmed the label of the
new version.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

import torch

from grpo_replay.distributed.failures import run_collectively
from grpo_replay.engine.models import load_policy
from grpo_replay.engine.weights import (
    CheckedWeights,
    ExpectedWeights,
    expected_weights,
    named_weights,
    refuse_problems,
)
from grpo_replay.errors import SamplerError
from grpo_replay.sampling.sampler_protocol import SYNC_BUCKET_BYTES, SamplerOpening
from grpo_replay.sampling.server.dispatcher import Servers
from grpo_replay.sampling.server.routes import UPDATING, Refused, Unreachable, VllmServer, block_on
from grpo_replay.sampling.weight_files import FolderTransfer
from grpo_replay.types import NamedTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

RETURN_SECONDS = 2.0
"""Maximum wait before a push for the answer of a lost server."""

ADAPTER_ADVICE = (
    "the server must see the adapter's folder (sampling.servers.weight_transfer); with "
    "sampling.lora merged it gets whole weights instead"
)


class WeightPush:
    """Pushes versions of the policy to all `servers`, which read them from `files` (on rank 0).

    `check` raises if a server does not match the recipe. Asynchronous runs update one server after
    the other, while the others keep sampling. `on_switch(url, version)` is called after each
    server; version None means that it did not confirm. `paused_seconds` sums the time that servers
    were paused for weights.
    """

    def __init__(
        self,
        opening: SamplerOpening,
        servers: Servers,
        expected: ExpectedWeights,
        files: FolderTransfer | None,
        check: Callable[[VllmServer], None],
    ) -> None:
        """Sends nothing yet; `push_first` does. `files` is None off rank 0."""
        self._opening, self._comm, self.servers = opening, opening.comm, servers
        self._expected, self._files, self._check = expected, files, check
        self._base: FolderTransfer | None = None  # on rank 0, during a push
        self._staging_base = Lock()
        self.on_switch: Callable[[str, int | None], None] = lambda url, version: None
        self.paused_seconds = 0.0

    def push_first(self) -> None:
        """Push version 0 to servers given by URL, which may have any weights. Launched servers have
        read it from the model's files. The first adapters are zeros."""
        if self._opening.with_adapters:
            shapes = self._expected.shapes.items()
            zeros = ((name, torch.zeros(shape)) for name, shape in shapes)
            self.push(zeros if self._comm.is_main else None, 0)
        elif self._opening.sampling.servers.launch:
            self._switch_all(None, 0)
        else:
            weights = named_weights(self._first_policy()) if self._comm.is_main else None
            self.push(weights, 0)
        self.servers.refuse_all_lost()

    def push(self, named_tensors: NamedTensors | None, version: int) -> None:
        """Stage the tensors on rank 0, validate them on every rank that has some, then switch the
        servers. All tensors are gathered before the first server gets any. Collective."""
        for lost_on_rank in self._comm.all_gather(self.servers.lost):
            self.servers.lost |= lost_on_rank
        try:
            run_collectively(self._comm, lambda: self._stage(named_tensors, version))
            self._switch_all(self._files, version)
        finally:
            if self._files is not None:
                self._files.discard()

    def _stage(self, named_tensors: NamedTensors | None, version: int) -> None:
        """Validates the tensors and, on rank 0, writes them to files, after lost servers that
        answer again are readmitted. Raises SamplerError for tensors that do not fit the model."""
        if named_tensors is None:
            return
        checked = CheckedWeights(named_tensors, self._expected)
        try:
            if self._files is not None:
                self._readmit_lost(version)
                self._files.stage(iter(checked), version)
        finally:
            checked.drain()
        refuse_problems(checked.problems, version)

    def _readmit_lost(self, version: int) -> None:
        """Use lost servers again if they answer: they then get the version too."""
        for server in self.servers.all:
            if server.url in self.servers.lost:
                with contextlib.suppress(Refused, Unreachable):
                    block_on(server.check_health(RETURN_SECONDS))
                    del self.servers.lost[server.url]
                    logger.warning("%s is back, and gets version %d", server.url, version)

    def _switch_all(self, staged: FolderTransfer | None, version: int) -> None:
        """Switch all servers to the version, on rank 0; `staged` is None if they have its weights.
        All ranks learn which servers are lost. Collective."""
        if self._comm.is_main:
            live = self.servers.live()
            at_once = 1 if self._opening.pushed_while_sampling else len(live)
            with ThreadPoolExecutor(max_workers=max(at_once, 1)) as threads:
                list(threads.map(lambda server: self._switch(server, staged, version), live))
            if self._base is not None:
                self._base.close()
                self._base = None
        self.servers.lost = self._comm.broadcast(self.servers.lost)

    def _switch(self, server: VllmServer, staged: FolderTransfer | None, version: int) -> None:
        """Push the version to one server (`staged` None: it only gets the label); one that fails is
        lost. A restarted one is checked first, and gets the base of adapters again."""
        started = time.monotonic()
        try:
            label = block_on(server.weight_label())
            is_new = server.version_of(label) is None  # restarted, or a load of weights failed
            if is_new and version > 0:
                self._check(server)
            if is_new and server.with_adapters and not self._opening.sampling.servers.launch:
                self._push_base(server)
            folder = str(staged.path) if staged else None
            reason = switch_server(server, folder, version, self.servers.timeout_seconds)
        except (Refused, Unreachable, SamplerError) as error:
            reason = str(error)
        if not server.with_adapters:
            self.paused_seconds += time.monotonic() - started
        if reason is not None:
            self.servers.lose(server, reason)
        self.on_switch(server.url, None if reason else version)

    def _push_base(self, server: VllmServer) -> None:
        """Push the base of the adapters to a server that has none of this run. It is staged once
        per push, whichever server needs it first."""
        with self._staging_base:
            if self._base is None:
                parent = self._opening.sampling.servers.sync_folder
                bytes_needed = expected_weights(self._opening.model).bytes_needed
                base = FolderTransfer(parent, bytes_needed, SYNC_BUCKET_BYTES)
                try:
                    base.stage(named_weights(self._first_policy()), 0)
                except BaseException:
                    base.close()
                    raise
                self._base = base
        replace_weights(server, str(self._base.path), self.servers.timeout_seconds)
        server.resume()

    def _first_policy(self) -> "PreTrainedModel":
        plain = self._opening.model.model_copy(update={"attn_implementation": "eager"})
        return load_policy(plain, self._opening.seed)


def switch_server(
    server: VllmServer, folder: str | None, version: int, timeout_seconds: float
) -> str | None:
    """Load the weights or the adapter in `folder` (None: the server has them), and set its
    version's label. Returns why the server did not confirm the label; None if it did.

    For weights, the server is paused and its prefix cache emptied. Meanwhile the label is
    "updating": a server that fails half-way must be used neither as the old nor as the new version.
    For an adapter, running requests continue: only requests that name it use it.
    """
    label = server.label(version)
    try:
        if server.with_adapters:
            assert folder is not None, "adapters are staged for every version"
            server.load_adapter(label, folder, timeout_seconds)
            server.set_weight_label(label)
        else:
            replace_weights(server, folder, timeout_seconds)
            server.set_weight_label(label)
            server.resume()
        confirmed = block_on(server.weight_label())
    except (Refused, Unreachable) as error:
        refused = isinstance(error, Refused) and server.with_adapters
        more = f"; {ADAPTER_ADVICE}" if refused else ""
        return f"it did not take policy version {version}: {error}{more}"
    return None if confirmed == label else f"it confirmed {confirmed!r} instead of {label!r}"


def replace_weights(server: VllmServer, folder: str | None, timeout_seconds: float) -> None:
    """Pause a server and load the weights in `folder`, if any. Raises Refused or Unreachable."""
    server.pause(timeout_seconds)
    server.set_weight_label(server.prefix + UPDATING)
    if folder is not None:
        server.reload_weights(folder, timeout_seconds)
    if not server.drop_cached_prompts():
        raise Unreachable("its prompt cache could not be emptied")
