"""The journal: append, read back, incomplete tails, damage."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from collected import group

from grpo_replay.collection import journal as journal_module
from grpo_replay.collection.journal import Journal, read_journal, segments
from grpo_replay.collection.messages import Drop, Restart, Step
from grpo_replay.errors import JournalError

RECORDS = [
    group((0, 0)),
    group((0, 1), version=3, rewards=(1.0, 1.0)),
    Drop(0, 2, "cancelled", 1, 12),
    Step(1, 3, 5, 24, 0, 0),
    Restart(2, 7),
    Step(2, 3, 7, 31, 0, 0),
]


def write(folder: Path, records=RECORDS) -> Path:
    journal, _ = Journal.open(folder)
    for record in records:
        journal.append(record)
    journal.close()
    return segments(folder)[-1]


def test_records_come_back_in_order_and_a_reopened_journal_goes_on(tmp_path):
    write(tmp_path, RECORDS[:4])
    journal, found = Journal.open(tmp_path)
    assert list(found) == RECORDS[:4] and found.steps == 1
    for record in RECORDS[4:]:
        journal.append(record)
    assert list(read_journal(tmp_path)) == RECORDS  # without sync or close
    journal.close()


def test_a_journal_cut_at_any_byte_keeps_every_whole_record_and_goes_on(tmp_path):
    path = write(tmp_path / "whole")
    data = path.read_bytes()
    ends, checked = [], 0
    for count in range(len(RECORDS) + 1):
        ends.append(len(write(tmp_path / str(count), RECORDS[:count]).read_bytes()))
    for cut in range(len(data)):
        folder = tmp_path / "cut"
        folder.mkdir(exist_ok=True)
        (folder / path.name).write_bytes(data[:cut])
        journal, found = Journal.open(folder)
        whole = sum(end <= cut for end in ends[1:])
        assert list(found) == RECORDS[:whole]
        journal.append(RECORDS[-1])
        journal.close()
        assert list(read_journal(folder)) == [*RECORDS[:whole], RECORDS[-1]]
        checked += 1
    assert checked == len(data) > 500


def test_a_tail_of_zeros_is_incomplete_not_damaged(tmp_path):
    """What a file system leaves after a power failure."""
    path = write(tmp_path)
    with path.open("ab") as file:
        file.write(bytes(4096))
    assert list(Journal.open(tmp_path)[1]) == RECORDS


def test_damage_before_the_last_record_is_refused_wherever_it_is(tmp_path):
    path = write(tmp_path)
    data = path.read_bytes()
    last = len(write(tmp_path / "without", RECORDS[:-1]).read_bytes())
    for offset in range(len(journal_module.MAGIC), last):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 0x40]) + data[offset + 1 :])
        with pytest.raises(JournalError, match="damaged"):
            Journal.open(tmp_path)


def test_another_file_is_refused(tmp_path):
    path = write(tmp_path)
    path.write_bytes(b"PAR1" + path.read_bytes())
    with pytest.raises(JournalError, match="not a journal of this version"):
        Journal.open(tmp_path)


def test_segments_follow_each_other_and_a_missing_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 200)
    write(tmp_path)
    assert len(segments(tmp_path)) > 2
    assert list(read_journal(tmp_path)) == RECORDS
    segments(tmp_path)[1].unlink()
    with pytest.raises(JournalError, match="segment 2 is missing"):
        list(read_journal(tmp_path))


def test_a_full_segment_is_on_disk_before_the_next_begins(tmp_path, monkeypatch):
    flushed, real = [], os.fsync

    def fsync(descriptor):
        flushed.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), len(segments(tmp_path))))
        real(descriptor)

    monkeypatch.setattr(journal_module.os, "fsync", fsync)
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 200)
    write(tmp_path)
    paths = segments(tmp_path)
    for count, full in enumerate(paths[:-1], start=1):
        assert (full, count) in flushed, "flushed while it was the last"


def test_an_incomplete_record_in_an_earlier_segment_is_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 200)
    write(tmp_path)
    first = segments(tmp_path)[0]
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(JournalError, match="damaged"):
        Journal.open(tmp_path)


def test_what_append_returned_for_survives_sigkill(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from collected import group; from grpo_replay.collection.journal import Journal\n"
        f"journal, _ = Journal.open(Path({str(tmp_path)!r}))\n"
        "for index in range(25): journal.append(group((0, index)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == -9
    assert list(read_journal(tmp_path)) == [group((0, index)) for index in range(25)]


@pytest.mark.parametrize("segment_bytes", [journal_module.SEGMENT_BYTES, 60])
def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path, monkeypatch, segment_bytes):
    """Also where the next segment would begin."""
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", segment_bytes)
    journal, _ = Journal.open(tmp_path)
    journal.append(RECORDS[0])
    real, before = os.write, segments(tmp_path)

    def half(descriptor, view):
        real(descriptor, view[: len(view) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space left"):
            journal.append(RECORDS[1])
    assert segments(tmp_path) == before
    journal.append(RECORDS[2])
    assert list(read_journal(tmp_path)) == [RECORDS[0], RECORDS[2]]
