"""The sampler of asynchronous runs: servers take new weights one after the other.

Requests in flight are frozen during an update and go on with the new weights (`pause` with mode
keep). While one server is updated, the others sample. A server that is away is left out; as soon as
it answers again, a thread of rank 0 brings it the newest version, from the last staged folder.

A version counts for a server only when that has confirmed the label, and the label says "updating"
while the weights are neither the old ones nor the new.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from grpo_replay.errors import SamplerError, first_line
from grpo_replay.recipe import ServersSection
from grpo_replay.sampling.server.routes import Refused, Unreachable, VllmServer, block_on
from grpo_replay.sampling.server.sampler import ServerPool, VllmServerSampler
from grpo_replay.sampling.server.weight_transfer import FolderTransfer, switch_server
from grpo_replay.types import Completion, GenerationRequest, NamedTensors

logger = logging.getLogger(__name__)

KEEPER_SECONDS = 1.0
PROBE_SECONDS = 5.0
"""Longest wait for the label of a server, before an update and when it was away."""


class RejoiningPool(ServerPool):
    """Servers that may come back. With `on_failure` stop, an evaluation that loses one still ends
    the run."""

    def note_lost(self, server: VllmServer, reason: str) -> None:
        logger.warning("the vLLM server %s is away: %s", server.url, reason)

    def note_away(self, server: VllmServer, reason: str) -> None:
        """Note that a server is lost, without ending the run."""
        if server.url not in self.lost:
            self.note_lost(server, reason)
        self.lost[server.url] = reason


class RollingServerSampler(VllmServerSampler):
    """A `VllmServerSampler` for asynchronous runs. `on_switch(url, version)` is called after each
    server's update, with None if it failed. `paused_seconds` sums the time that servers spent in
    updates."""

    pushed_while_sampling: ClassVar[bool] = True
    pool_class: ClassVar[type[ServerPool]] = RejoiningPool
    _pool: RejoiningPool

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.on_switch: Callable[[str, int | None], None] = lambda url, version: None
        self.paused_seconds = 0.0
        self._suspects: set[str] = set()
        self._switching = threading.Lock()
        self._closing = threading.Event()
        self._keeper: threading.Thread | None = None

    @property
    def servers(self) -> Sequence[VllmServer]:
        return self._pool.servers

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """As `VllmServerSampler.generate`, for evaluations. Raises SamplerError if all servers are
        away."""
        if not self._pool.live():
            raise SamplerError(f"all vLLM servers are away: {self._pool.lost}")
        return super().generate(requests)

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As `VllmServerSampler.load_weights`. Meanwhile the keeper brings weights to no server: it
        would not know which version is the newest, and which is staged."""
        with self._switching:
            super().load_weights(named_tensors, version)

    def suspect(self, urls: Iterable[str]) -> None:
        """Look at these servers, which the collector does not use. Raises SamplerError if the run
        started all of its servers, and they have ended: none of them comes back by itself."""
        if self._launched and all(server.exited() for server in self._launched):
            logs = ", ".join(str(server.log) for server in self._launched)
            raise SamplerError(
                f"every vLLM server that the run started has ended; their logs: {logs}. A resume "
                "starts them again"
            )
        self._suspects.update(urls)

    def _check_servers(self, settings: ServersSection) -> None:
        """Validate the servers. Of those given by URL, one must be there; the others may come later
        if `on_failure` is drop."""
        if not self._comm.is_main or self._launched or not self._pool.settings.drop_lost:
            super()._check_servers(settings)
            return
        for server in self._pool.servers:
            try:
                block_on(server.check_health(PROBE_SECONDS))
            except (Refused, Unreachable) as error:
                self._pool.lose(server, str(error))
            else:
                self._check_server(server)
        if not self._pool.live():
            raise SamplerError(
                f"none of the vLLM servers answers: {self._pool.lost}; check "
                "sampling.servers.urls and that one is running"
            )

    def _lose_all(self, reasons: dict[str, str]) -> None:
        """A no-op: rank 0 looks for itself, and other ranks do not know who came back."""

    def _publish(self, load_on: Callable[[VllmServer], None] | None, version: int) -> None:
        """Switch the servers on rank 0, one after the other. Every rank learns which are away."""
        if self._comm.is_main and load_on is not None:
            for server in self._pool.live():  # the keeper brings it to the others
                self._switch(server, load_on, version)
        lost = self._comm.broadcast_json(dict(self._pool.lost))
        if lost and not self._pool.settings.drop_lost:
            raise SamplerError(
                f"vLLM servers are lost: {lost}. The run stops because sampling.servers.on_failure "
                "is stop; resume it when they are back, or set on_failure to drop"
            )
        if not self._comm.is_main:
            self._pool.lost = lost
        if self._comm.is_main and self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, daemon=True, name="server-keeper")
            self._keeper.start()

    def _switch(
        self, server: VllmServer, load_on: Callable[[VllmServer], None], version: int
    ) -> None:
        started = time.monotonic()
        timeout = self._pool.settings.request_timeout_seconds
        reason = self._unreachable(server)
        if reason is None:
            reason = switch_server(server, load_on, version, timeout)
            self.paused_seconds += time.monotonic() - started
        if reason is None:
            self._pool.lost.pop(server.url, None)
        else:
            self._pool.note_away(server, reason)
        self.on_switch(server.url, None if reason else version)

    def _unreachable(self, server: VllmServer) -> str | None:
        try:
            block_on(server.weight_label(PROBE_SECONDS))
        except (Refused, Unreachable, KeyError, TypeError) as error:
            return first_line(error)
        return None

    def _keep(self) -> None:
        """Bring servers that were away the newest version, until closed."""
        while not self._closing.wait(KEEPER_SECONDS):
            urls = {*self._pool.lost, *self._suspects}
            self._suspects.clear()
            for server in self._pool.servers:
                if server.url not in urls or self._closing.is_set():
                    continue
                if self._unreachable(server) is None:  # asked without holding up an update
                    with self._switching:
                        self._rejoin(server)

    def _rejoin(self, server: VllmServer) -> None:
        transfer, version = self._transfer, self.policy_version
        try:
            label = block_on(server.weight_label(PROBE_SECONDS))
            if label == server.label(version):
                self._pool.lost.pop(server.url, None)
                return
            if not isinstance(transfer, FolderTransfer) or not transfer.holds(version):
                return  # the next update brings it
            self._check_server(server)
            timeout = self._pool.settings.request_timeout_seconds
            reason = switch_server(server, transfer.load_on, version, timeout)
        except (Refused, Unreachable, SamplerError, KeyError, TypeError) as error:
            reason = first_line(error)
        if reason is None:
            self._pool.lost.pop(server.url, None)
            logger.warning("the vLLM server %s joined with version %d", server.url, version)
        else:
            self._pool.lost[server.url] = reason

    def close(self) -> None:
        """Stop the keeper and launched servers, and remove weight files. May be called twice."""
        self._closing.set()
        if self._keeper is not None:
            self._keeper.join(PROBE_SECONDS + KEEPER_SECONDS)
        super().close()
