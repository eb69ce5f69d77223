from pathlib import Path

from gateway.event_log_file import EventLogFile, read_event_log

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


def test_old_segments_are_dropped_beyond_the_limit(tmp_path: Path) -> None:
    lines = [HEADER, *(f'["plan",{n}]' for n in range(500))]
    write(tmp_path / "log", lines, segment_bytes=200)
    kept = list(read_event_log(tmp_path / "log"))
    assert len(list(tmp_path.iterdir())) == 9
    assert kept == lines[-len(kept) :]


def test_a_new_run_rotates_the_last_one_away_and_is_read_alone(tmp_path: Path) -> None:
    write(tmp_path / "log", [HEADER, "first"])
    write(tmp_path / "log", [HEADER, "second"])
    assert list(read_event_log(tmp_path / "log")) == [HEADER, "second"]
    assert (tmp_path / "log.1").read_text() == f"{HEADER}\nfirst\n"
