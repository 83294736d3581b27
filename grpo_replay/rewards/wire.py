"""The protocol between the trainer and a verifier worker: a length, then JSON in ASCII.

JSON escapes preserve NULs and lone surrogates, and unlike pickle, JSON runs no code.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

_HEADER = struct.Struct(">Q")


def to_json(value: Any) -> bytes:
    """`value` as JSON in ASCII. Raises TypeError for a type that JSON cannot represent."""
    return json.dumps(value, default=_plain).encode("ascii")


def frame(body: bytes) -> bytes:
    """A frame with one JSON document."""
    return _HEADER.pack(len(body)) + body


def frame_of_list(bodies: Sequence[bytes]) -> bytes:
    """A frame with the JSON list of documents."""
    return frame(b"[" + b",".join(bodies) + b"]")


def read(stream: BinaryIO) -> Any:
    """The next message of a blocking stream; None at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    body = stream.read(length)
    return None if len(body) < length else json.loads(body)


class FrameBuffer:
    """Reassembles frames from the chunks that a pipe delivers."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> None:
        self._bytes += piece

    def pop(self) -> Any:
        """The next complete message; None if it has not arrived in full."""
        if len(self._bytes) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._bytes)
        end = _HEADER.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        return json.loads(body)


def _plain(value: Any) -> Any:
    # Dataset rows may contain numpy scalars, arrays and dates.
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a {type(value).__name__} cannot be sent to a verifier worker")
