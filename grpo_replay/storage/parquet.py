"""Writes Parquet files atomically, and checks kind and version when reading them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_replay.errors import SnapshotError, first_line
from grpo_replay.storage.atomic import named_if_unwritable, written_whole

_KIND_KEY = b"grpo_replay.kind"
_VERSION_KEY = b"grpo_replay.schema_version"


def write_parquet(
    path: Path,
    kind: str,
    version: int,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    metadata: dict[bytes, bytes] | None = None,
    flushed: bool = True,
) -> None:
    """Write tables of one schema atomically: zstd-compressed, with page checksums, and with kind
    and schema version in the metadata. `flushed`: see `written_whole`. Raises OutputDirectoryError
    if the disk is full or the folder is not writable."""
    marks = {_KIND_KEY: kind.encode(), _VERSION_KEY: str(version).encode(), **(metadata or {})}
    with (
        named_if_unwritable(path),
        written_whole(path, flushed) as temporary,
        pq.ParquetWriter(
            temporary, schema.with_metadata(marks), compression="zstd", write_page_checksum=True
        ) as writer,
    ):
        for table in tables:
            writer.write_table(table.replace_schema_metadata(marks))


@contextmanager
def open_parquet(path: Path, kind: str, version: int) -> Iterator[pq.ParquetFile]:
    """Open a file of this package, after checks of kind and version. Raises SnapshotError, also for
    data that prove damaged while the caller reads."""
    path = Path(path)
    if not path.is_file():
        raise SnapshotError(f"{path}: no such file; expected a {kind} file")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_marks(path, file.schema_arrow.metadata or {}, kind, version)
            yield file
    except (pa.ArrowException, OSError) as error:
        if path.suffix == ".parquet":
            reason = f"truncated or damaged ({first_line(error)}); restore it from a copy"
        else:
            reason = f"expected a {kind} file"
        raise SnapshotError(f"{path}: not a readable Parquet file, {reason}") from error


def kind_of(path: Path) -> str | None:
    """Return the kind of a file of `write_parquet`; None for other files."""
    try:
        marks = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError):
        return None
    return marks.get(_KIND_KEY, b"").decode(errors="replace")


def _check_marks(path: Path, marks: dict[bytes, bytes], kind: str, version: int) -> None:
    """Raises SnapshotError for a file of another program, version or kind."""
    if _KIND_KEY not in marks or not marks.get(_VERSION_KEY, b"").isdigit():
        raise SnapshotError(
            f"{path}: a Parquet file, but not written by grpo-replay, or rewritten by another "
            f"program (no {_KIND_KEY.decode()} in its metadata); expected a {kind} file"
        )
    file_version = int(marks[_VERSION_KEY])
    if file_version != version:
        raise SnapshotError(
            f"{path}: schema version {file_version}, and this grpo-replay reads {version}: use the "
            "version that wrote it (environment.json of the run)"
        )
    if marks[_KIND_KEY] != kind.encode():
        raise SnapshotError(
            f"{path}: a {marks[_KIND_KEY].decode(errors='replace')} file, where "
            f"a {kind} file is expected; check the path"
        )
