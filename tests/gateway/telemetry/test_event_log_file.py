import errno
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.telemetry import event_log_file
from gateway.telemetry.event_log_file import BUFFER_BYTES, EventLogError, EventLogFile, read_event_log


def never(_: float, __: object) -> None:
    """No time passes, so that lines are written at the end."""


HEADER = '["log",1]'


def write(path: Path, lines: list[str], segment_bytes: int = 10_000) -> None:
    with EventLogFile(path, segment_bytes, never) as file:
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
    with EventLogFile(Path("/dev/full"), 1 << 20, never) as file:
        for _ in range(10):
            file.write("x" * BUFFER_BYTES)
    (record,) = caplog.records
    assert "/dev/full ends here" in record.getMessage() and "No space left" in record.getMessage()


def test_lines_unwritten_at_the_end_on_a_full_disk_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with EventLogFile(Path("/dev/full"), 1 << 20, never) as file:
        file.write("short")
        assert not caplog.records
    assert len(caplog.records) == 1


def test_a_written_line_can_be_read_a_moment_later_and_costs_one_timer(tmp_path: Path) -> None:
    timers: list[Callable[[], None]] = []
    with EventLogFile(tmp_path / "log", 1 << 20, lambda _, call: timers.append(call)) as file:
        for line in (HEADER, '["plan",1]'):
            file.write(line)
        (flush,) = timers
        flush()
        assert list(read_event_log(tmp_path / "log")) == [HEADER, '["plan",1]']
        file.write('["plan",2]')
        assert len(timers) == 2
    timers[1]()
    assert list(read_event_log(tmp_path / "log"))[-1] == '["plan",2]'


def test_a_full_disk_is_told_when_what_is_pending_is_written(caplog: pytest.LogCaptureFixture) -> None:
    timers: list[Callable[[], None]] = []
    with EventLogFile(Path("/dev/full"), 1 << 20, lambda _, call: timers.append(call)) as file:
        file.write("short")
        timers[0]()
        assert len(caplog.records) == 1
        file.write("more")
    assert len(caplog.records) == 1


def test_a_segment_that_cannot_be_rotated_ends_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with EventLogFile(tmp_path / "log", 20, never) as file:
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
        EventLogFile(tmp_path / "nowhere" / "log", 100, never)


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
