import contextlib
import errno
import gzip
import os
import time
from pathlib import Path

import pytest

from gateway.telemetry import event_log_file
from gateway.telemetry.event_log_file import EventLogError, EventLogFile, read_event_log

HEADER = '["log",1]'


def write(path: Path, lines: list[str], segment_bytes: int = 10_000) -> None:
    with EventLogFile(path, segment_bytes) as file:
        for line in lines:
            file.write(line)


def test_lines_come_back_in_order_over_all_segments(tmp_path: Path) -> None:
    lines = [HEADER, *(f'["plan",{n}]' for n in range(50))]
    write(tmp_path / "log", lines, segment_bytes=200)
    assert (tmp_path / "log.1").exists()
    assert list(read_event_log(tmp_path / "log")) == lines


def test_segments_are_open_to_their_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "log").touch(0o644)
    write(tmp_path / "log", [HEADER, *(f'["plan",{n}]' for n in range(50))], segment_bytes=200)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_old_segments_are_dropped_beyond_the_limit(tmp_path: Path) -> None:
    lines = [HEADER, *(f'["plan",{n}]' for n in range(500))]
    write(tmp_path / "log", lines, segment_bytes=200)
    kept = list(read_event_log(tmp_path / "log"))
    assert len(list(tmp_path.iterdir())) == 9
    assert kept == lines[-len(kept) :]


def test_segments_that_were_compressed_are_read_as_they_were(tmp_path: Path) -> None:
    lines = [HEADER, *(f'["plan",{n}]' for n in range(50))]
    write(tmp_path / "log", lines, segment_bytes=200)
    for number in (1, 3):
        segment = tmp_path / f"log.{number}"
        segment.write_bytes(gzip.compress(segment.read_bytes()))
    assert list(read_event_log(tmp_path / "log")) == lines
    segment.write_bytes(segment.read_bytes()[:-12])
    with pytest.raises(EventLogError, match=r"log cannot be read: Compressed file ended"):
        list(read_event_log(tmp_path / "log"))


def test_a_compressed_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log_file, "MAX_LINE_CHARS", 1000)
    (tmp_path / "log").write_bytes(gzip.compress(HEADER.encode() + b"\n" + b"x" * 2**20))
    with pytest.raises(EventLogError, match="a line of 1000 characters or more"):
        list(read_event_log(tmp_path / "log"))


def test_a_new_run_rotates_the_last_one_away_and_is_read_alone(tmp_path: Path) -> None:
    write(tmp_path / "log", [HEADER, "first"])
    write(tmp_path / "log", [HEADER, "second"])
    assert list(read_event_log(tmp_path / "log")) == [HEADER, "second"]
    assert (tmp_path / "log.1").read_text() == f"{HEADER}\nfirst\n"


def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with EventLogFile(Path("/dev/full"), 1 << 20) as file:
        for _ in range(10):
            file.write("x" * 65536)
    (record,) = caplog.records
    assert "/dev/full ends here" in record.getMessage() and "No space left" in record.getMessage()


def test_a_written_line_can_be_read_a_moment_later(tmp_path: Path) -> None:
    with EventLogFile(tmp_path / "log", 1 << 20) as file:
        for line in (HEADER, '["plan",1]'):
            file.write(line)
        while list(read_event_log(tmp_path / "log") if (tmp_path / "log").stat().st_size else ()) != [HEADER, line]:
            time.sleep(0.01)
        file.write('["plan",2]')
    assert list(read_event_log(tmp_path / "log"))[-1] == '["plan",2]'


def test_a_full_disk_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with EventLogFile(Path("/dev/full"), 1 << 20) as file:
        file.write("short")
        while not caplog.records:
            time.sleep(0.01)
        file.write("more")
    assert len(caplog.records) == 1


def _full_pipe(path: Path) -> int:
    """Makes a disk that takes nothing: a pipe that is full. Returns its only reader, once it is closed writes fail."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    filler = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filler, bytes(4096))
    os.close(filler)
    return reader


def test_a_disk_that_takes_nothing_holds_nobody_up_and_is_told_once_though_it_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log_file, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(event_log_file, "MAX_WAITING_LINES", 1000)
    reader = _full_pipe(tmp_path / "log")
    with EventLogFile(tmp_path / "log", 1 << 30) as file:
        for _ in range(5000):
            file.write("a line")
        assert len(file._lines) <= 1000
    os.close(reader)
    file._writer.join()
    (record,) = caplog.records
    assert "ends here" in record.getMessage() and "the disk has not taken" in record.getMessage()


def test_lines_that_the_disk_has_not_taken_are_bounded_and_the_log_ends_before_its_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log_file, "MAX_WAITING_LINES", 100)
    monkeypatch.setattr(event_log_file, "FLUSH_SECONDS", 1000.0)
    with EventLogFile(tmp_path / "log", 1 << 20) as file:
        for line in (HEADER, *(f'["plan",{n}]' for n in range(200))):
            file.write(line)
    assert list(read_event_log(tmp_path / "log")) == [HEADER, *(f'["plan",{n}]' for n in range(99))]
    assert len(caplog.records) == 1


def test_a_segment_that_cannot_be_rotated_ends_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with EventLogFile(tmp_path / "log", 20) as file:
        file.write(HEADER)
        monkeypatch.setattr(Path, "replace", refuse)
        for _ in range(5):
            file.write('["plan",1]')
    assert len(caplog.records) == 1
    assert list(read_event_log(tmp_path / "log")) == [HEADER]


def test_a_line_that_was_cut_off_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "log", [HEADER, '["plan",1]', '["plan",2]'])
    (tmp_path / "log").write_text((tmp_path / "log").read_text()[:-4])
    assert list(read_event_log(tmp_path / "log")) == [HEADER, '["plan",1]']


def test_a_log_that_cannot_be_begun_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match=r"nowhere/log cannot be written: No such file .* with --event-log"):
        EventLogFile(tmp_path / "nowhere" / "log", 100)


@pytest.mark.parametrize("content", [b'{"level":"info"}\n', b"garbage", b"\x8b\xff\n"])
def test_another_file_is_not_taken_for_a_log(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(EventLogError, match=r"other is no event log: it begins with '"):
        list(read_event_log(tmp_path / "other"))


def test_a_log_with_bytes_that_are_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b'["log",1]\n["plan","\xff"]\n')
    with pytest.raises(EventLogError, match="log is no event log"):
        list(read_event_log(tmp_path / "log"))


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match=r"log cannot be read: No such file"):
        list(read_event_log(tmp_path / "log"))
