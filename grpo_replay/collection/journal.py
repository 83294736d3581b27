"""The journal of an asynchronous run: which groups arrived, in which order, and what each step saw.

    RUN/journal/segment_000001.journal, segment_000002.journal, …

A segment is `MAGIC`, then records: length and CRC-32 of the payload, CRC-32 of these two (uint32
each, little-endian), payload (MessagePack). Segments are only appended to.

Promise: when `append` returns, the record is with the operating system, so it survives a kill of
this process. When `sync` returns, it is on disk and survives a power failure. A run syncs before
every checkpoint, so a checkpoint never knows of a step that the journal lacks.

A kill or a power failure may leave the last record incomplete. `open` cuts such a tail off. Damage
anywhere else is an error: the trainer is a function of the journal, and a hole would change it.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from grpo_replay.collection.messages import Record, Step, decode_record, encode
from grpo_replay.errors import JournalError
from grpo_replay.storage.atomic import flush_descriptor, flush_files

MAGIC = b"grpo-replay journal 1\n"
SEGMENT_BYTES = 64 * 2**20
_FACTS = struct.Struct("<II")
_HEADER = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class Segment:
    """The readable part of one file: its records, and its size in bytes with the magic."""

    records: tuple[Record, ...]
    good_bytes: int


@dataclass(frozen=True, slots=True)
class JournalRecords:
    """The records of a journal, `steps` of them Step records. Iterating reads the files, a segment
    at a time: all records of a long run do not fit into memory."""

    folder: Path
    steps: int

    @classmethod
    def of(cls, folder: Path) -> "JournalRecords":
        """Count the steps by reading the files. Raises JournalError as `read_journal` does."""
        return cls(folder, sum(isinstance(record, Step) for record in read_journal(folder)))

    def __iter__(self) -> Iterator[Record]:
        return read_journal(self.folder)


class Journal:
    """Appends records. Use `open`."""

    def __init__(self, folder: Path, number: int, descriptor: int, size: int) -> None:
        self._folder = folder
        self._number = number
        self._descriptor = descriptor
        self._size = size

    @classmethod
    def open(cls, folder: Path) -> tuple["Journal", JournalRecords]:
        """Open or create the journal in `folder`. Returns it and its records, which must be read
        before the first `append`. An incomplete last record is removed. Raises JournalError if
        another record is damaged."""
        folder.mkdir(parents=True, exist_ok=True)
        records = JournalRecords.of(folder)
        paths = segments(folder)
        if not paths:
            return cls(folder, 1, *_create(folder, 1)), records
        last = paths[-1]
        good = read_segment(last, is_last=True).good_bytes
        descriptor = os.open(last, os.O_WRONLY | os.O_APPEND)
        if last.stat().st_size > good:
            os.ftruncate(descriptor, good)
        if good == 0:  # killed before the magic was there
            _write(descriptor, MAGIC)
        return cls(folder, _number(last), descriptor, max(good, len(MAGIC))), records

    def append(self, record: Record) -> None:
        """Write one record. Raises OSError if the disk is full; the journal is then as before."""
        payload = encode(record)
        if self._size >= SEGMENT_BYTES:
            self._roll()
        facts = _FACTS.pack(len(payload), zlib.crc32(payload))
        framed = facts + struct.pack("<I", zlib.crc32(facts)) + payload
        try:
            _write(self._descriptor, framed)
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(framed)

    def sync(self) -> None:
        """Flush everything appended to disk."""
        flush_descriptor(self._descriptor)

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _roll(self) -> None:
        """Start the next segment, once the full one is on disk."""
        self.sync()
        descriptor, size = _create(self._folder, self._number + 1)
        os.close(self._descriptor)
        self._descriptor, self._size = descriptor, size
        self._number += 1


def read_journal(folder: Path) -> Iterator[Record]:
    """Yields all complete records, in order. Raises JournalError for a missing segment, and for
    damage other than an incomplete last record."""
    paths = segments(folder)
    for index, path in enumerate(paths, start=1):
        if _number(path) != index:
            raise JournalError(
                f"{folder}: segment {index} is missing, {path.name} follows: restore it from a copy"
            )
        yield from read_segment(path, is_last=index == len(paths)).records


def segments(folder: Path) -> list[Path]:
    """Returns the files of a journal, oldest first."""
    return sorted(folder.glob("segment_*.journal"))


def read_segment(path: Path, is_last: bool) -> Segment:
    """Reads the records of one file. An incomplete record at the end of the last segment is left
    out (a kill interrupted its writing); JournalError for any other damage."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        if is_last and MAGIC.startswith(data):
            return Segment((), 0)
        raise JournalError(f"{path} is not a journal of this version: it begins {data[:24]!r}")
    records: list[Record] = []
    offset = len(MAGIC)
    while offset < len(data):
        end, record = _read_record(data, offset)
        if record is None:
            if is_last and end >= len(data):
                return Segment(tuple(records), offset)
            raise JournalError(
                f"{path}: the record at byte {offset} is damaged, and it is not an incomplete last "
                "one: restore the file from a copy, or start a new run"
            )
        records.append(record)
        offset = end
    return Segment(tuple(records), offset)


def _read_record(data: bytes, offset: int) -> tuple[int, Record | None]:
    """Reads the record at byte `offset`. Returns the offset of its end, and the record or None if
    it is incomplete or damaged. Raises JournalError for a whole record of another version."""
    body = offset + _HEADER.size
    if body > len(data) or _is_zero_from(data, offset):
        return len(data), None
    length, checksum, own_checksum = _HEADER.unpack_from(data, offset)
    if zlib.crc32(data[offset : offset + _FACTS.size]) != own_checksum:
        return offset, None  # the length cannot be trusted: where the next record begins is unknown
    payload = data[body : body + length]
    if len(payload) < length or zlib.crc32(payload) != checksum:
        return body + length, None
    try:
        return body + length, decode_record(payload)
    except msgspec.DecodeError as error:
        raise JournalError(
            f"the record at byte {offset} of a journal segment is whole, but not of this version "
            f"of grpo-replay: {error}"
        ) from error


def _is_zero_from(data: bytes, offset: int) -> bool:
    """Whether only zeros follow: a file system may leave them where a write did not complete."""
    is_begun = any(data[offset : offset + _HEADER.size])  # else every record would read the rest
    return not is_begun and data.count(0, offset) == len(data) - offset


def _create(folder: Path, number: int) -> tuple[int, int]:
    """Creates a segment file, flushed to disk. Returns its descriptor and size in bytes."""
    path = folder / f"segment_{number:06d}.journal"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write(descriptor, MAGIC)
        flush_files([folder])  # the file's name
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor, len(MAGIC)


def _write(descriptor: int, payload: bytes) -> None:
    view = memoryview(payload)
    while view:
        view = view[os.write(descriptor, view) :]


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("segment_"))
