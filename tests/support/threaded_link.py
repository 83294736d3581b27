"""A link to a collector that runs in a thread of this process, instead of a process of its own."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator

from grpo_replay.collection.collector import Collector
from grpo_replay.collection.link import CollectorGone, as_error
from grpo_replay.collection.messages import (
    CollectorSettings,
    Command,
    Delivery,
    Failure,
    Report,
    Stop,
    decode_command,
    decode_delivery,
    encode,
)
from grpo_replay.errors import first_line


class ThreadedLink:
    """Everything is encoded and decoded as between processes, also the error that ends the
    collector. `die` is what SIGKILL would do."""

    made: "list[ThreadedLink]" = []  # noqa: RUF012
    prompts = scorer = None  # set by the test

    def __init__(self, settings: CollectorSettings) -> None:
        self.report = Report(sent=time.monotonic())
        self.commands: list[Command] = []
        self._deliveries: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._settings = settings
        self.closed = False
        self._exit_code: int | None = None
        self._loop = asyncio.new_event_loop()
        self._collector = self._loop.run_until_complete(self._make())
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        ThreadedLink.made.append(self)

    async def _make(self) -> Collector:
        kind = type(self)
        return Collector(self._settings, kind.prompts, str, kind.scorer(), self._accept)

    def _accept(self, delivery: Delivery) -> None:
        if self._exit_code is None:
            self._deliveries.put(encode(delivery))

    def _work(self) -> None:
        """Run the collector, and report its failure, as `collector_process.main` does."""
        asyncio.set_event_loop(self._loop)
        code = 0
        try:
            self._loop.run_until_complete(self._collector.run())
        except Exception as error:
            code, failure = 1, Failure(type(error).__name__, str(error) or first_line(error))
            self._accept(Delivery(failure, Report(sent=time.monotonic())))
        if self._exit_code is None:
            self._exit_code = code

    def send(self, command: Command) -> None:
        self.commands.append(command)
        self._loop.call_soon_threadsafe(self._collector.handle, decode_command(encode(command)))

    def receive(self, timeout_seconds: float = 0.0) -> Iterator[Delivery]:
        wait = timeout_seconds
        while True:
            try:
                payload = (
                    self._deliveries.get(timeout=wait) if wait else (self._deliveries.get_nowait())
                )
            except queue.Empty:
                break
            wait = 0.0
            delivery = decode_delivery(payload)
            if isinstance(delivery.body, Failure):
                raise as_error(delivery.body, self._settings.log)
            self.report = delivery.report
            yield delivery
        if self._exit_code is not None and self._deliveries.empty():
            raise CollectorGone(f"it exited with code {self._exit_code}")

    def die(self) -> None:
        self._exit_code = -9
        self._end()

    def close(self) -> None:
        self.closed = True
        self._end()

    def _end(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._collector.handle, Stop())
            self._thread.join(60)
