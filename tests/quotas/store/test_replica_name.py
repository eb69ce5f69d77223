import os
from pathlib import Path

import pytest

from quotas.store.replica_name import LIFE_ORDINALS, ReplicaName


def die(name: ReplicaName) -> None:
    """What the end of its process does."""
    assert name._file is not None
    os.close(name._file)


def test_the_next_life_has_the_name_and_counts_from_above_all_before_it(tmp_path: Path) -> None:
    lives = []
    for _ in range(3):
        lives.append(ReplicaName.kept_in(tmp_path / "names"))
        die(lives[-1])
    assert len({life.id for life in lives}) == 1
    assert [life.first_ordinal for life in lives] == [0, LIFE_ORDINALS, 2 * LIFE_ORDINALS]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "names").iterdir()} == {0o600}


def test_processes_that_share_a_folder_have_names_of_their_own_and_a_dead_ones_is_taken_up(tmp_path: Path) -> None:
    first, second = ReplicaName.kept_in(tmp_path), ReplicaName.kept_in(tmp_path)
    assert first.id != second.id
    die(first)
    assert ReplicaName.kept_in(tmp_path).id == first.id
    assert ReplicaName.kept_in(tmp_path).id not in {first.id, second.id}


def test_a_replica_with_unreported_spending_comes_back_under_another_name(tmp_path: Path) -> None:
    name = ReplicaName.kept_in(tmp_path)
    assert name.give_up()
    die(name)
    after = ReplicaName.kept_in(tmp_path)
    assert (after.id != name.id, after.first_ordinal) == (True, 0)
    after.give_up()
    after.keep()
    die(after)
    assert ReplicaName.kept_in(tmp_path).id == after.id


@pytest.mark.parametrize("content", [b"", b"x", b"0123456789abcdef", b"0123456789abcdef 1", b"0123456789abcdef -1\n"])
def test_a_file_that_is_damaged_is_no_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "0").write_bytes(content)
    assert ReplicaName.kept_in(tmp_path).first_ordinal == 0


def test_where_nothing_can_be_written_a_name_lasts_one_life_and_what_is_set_aside_cannot_be_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert ReplicaName.kept_in(tmp_path / "file").give_up(), "no later life takes it for unspent"
    name = ReplicaName.kept_in(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.ftruncate", full)
    assert not name.give_up()
    monkeypatch.setattr("os.pwrite", full)
    die(name)
    assert ReplicaName.kept_in(tmp_path).id != name.id
