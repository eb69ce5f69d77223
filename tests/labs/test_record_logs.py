from pathlib import Path

import pytest

from scripts import record_logs


@pytest.mark.parametrize("name", ["requests", "refusals", "cancels"])
def test_a_log_is_recorded_like_the_kept_one(name: str, tmp_path: Path) -> None:
    record_logs.record(name, tmp_path)
    recorded, kept = tmp_path / f"{name}.log.gz", record_logs.FOLDER / f"{name}.log.gz"
    assert record_logs.read(recorded) == record_logs.read(kept)


def test_a_log_of_this_version_is_never_recorded_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_logs.record("requests", tmp_path)
    path = tmp_path / "requests.log.gz"
    lines = [*record_logs.read(path), "another line"]
    record_logs.write(path, lines)
    record_logs.record("requests", tmp_path)
    assert record_logs.read(path) == lines and "is kept" in capsys.readouterr().err


def test_a_log_of_another_version_is(tmp_path: Path) -> None:
    path = tmp_path / "requests.log.gz"
    record_logs.write(path, ['["log",1]'])
    record_logs.record("requests", tmp_path)
    assert len(record_logs.read(path)) > 1
