"""Detect a server that no longer generates. Only a lack of progress counts: a completion may take
as long as it needs."""

import time

from grpo_replay.sampling.server.http_client import Refused, Unreachable
from grpo_replay.sampling.server.routes import VllmServer

HEALTH_SECONDS = 60.0
"""Longest wait for the answer to a health check. A server that is gone refuses the connection at
once; one that is busy with hundreds of requests may answer late."""


class ServerProgress:
    """Measures for how long a server has generated nothing with requests outstanding."""

    def __init__(self, server: VllmServer, patience_seconds: float) -> None:
        self._server = server
        self._wait_seconds = min(HEALTH_SECONDS, patience_seconds)
        self._tokens: float | None = None
        self._since = time.monotonic()

    async def stalled_seconds(self, outstanding: int) -> float:
        """Seconds since the last check that found the server idle or its token count changed."""
        if outstanding == 0:
            self._since = time.monotonic()
            return 0.0
        try:
            tokens = await self._server.generated_tokens(self._wait_seconds)
        except (Refused, Unreachable):
            tokens = self._tokens
        if tokens != self._tokens:
            self._tokens, self._since = tokens, time.monotonic()
        return time.monotonic() - self._since
