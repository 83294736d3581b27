"""What tests of the collector share."""

from collections.abc import Iterator

import pytest
from fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that answers within 20 ms."""
    fake = FakeServer()
    fake.seconds = 0.02
    yield fake
    fake.stop()
