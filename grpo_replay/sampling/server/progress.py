"""Does a server still generate? The limit is on no progress: a long completion is no failure."""

import time

from grpo_replay.sampling.server.http_client import Refused, Unreachable
from grpo_replay.sampling.server.routes import VllmServer

HEALTH_SECONDS = 60.0
"""Longest wait for a server to say how it is. One that is gone refuses the connection at once; one
that is busy with hundreds of requests may answer late."""


class ServerProgress:
    """How long a server has generated nothing while requests were outstanding there."""

    def __init__(self, server: VllmServer, patience_seconds: float) -> None:
        self._server = server
        self._wait_seconds = min(HEALTH_SECONDS, patience_seconds)
        self._tokens: float | None = None
        self._since = time.monotonic()

    def stalled_seconds(self, outstanding: int) -> float:
        """Seconds since a look that found it idle or found more tokens than the one before."""
        if outstanding == 0:
            self._since = time.monotonic()
            return 0.0
        try:
            tokens = self._server.generated_tokens(self._wait_seconds)
        except (Refused, Unreachable):
            tokens = self._tokens
        if tokens != self._tokens:
            self._tokens, self._since = tokens, time.monotonic()
        return time.monotonic() - self._since
