import asyncio
from pathlib import Path

import pytest

from gateway.tenants.file_watch import FileWatcher, signature


class Seen:
    def __init__(self, folder: Path) -> None:
        self.times = 0
        self.watch = FileWatcher(lambda: folder.glob("*.yaml"), self._changed, signature(folder.glob("*.yaml")))

    async def _changed(self) -> None:
        self.times += 1

    async def poll(self, times: int = 2) -> int:
        for _ in range(times):
            await self.watch.poll()
        return self.times


async def test_an_edit_is_seen_once(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("1")
    seen = Seen(tmp_path)
    assert await seen.poll(5) == 0
    file.write_text("22")
    assert await seen.poll(5) == 1


async def test_files_that_come_and_go_are_seen(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    (tmp_path / "a.yaml").write_text("1")
    assert await seen.poll() == 1
    (tmp_path / "a.yaml").unlink()
    assert await seen.poll() == 2


async def test_a_file_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("1")
    seen = Seen(tmp_path)
    for length in range(2, 6):
        file.write_text("1" * length)
        assert await seen.poll(1) == 0
    assert await seen.poll(1) == 1


async def test_a_folder_replaced_through_a_link_is_seen(tmp_path: Path) -> None:
    """As Kubernetes updates a mounted ConfigMap."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a.yaml").write_text("same")
    link = tmp_path / "..data"
    link.symlink_to("one")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    seen = Seen(tmp_path)
    link.unlink()
    link.symlink_to("two")
    assert await seen.poll() == 1


async def test_a_change_since_the_files_were_read_is_seen(tmp_path: Path) -> None:
    """The model is loaded in between, which takes minutes."""
    file = tmp_path / "a.yaml"
    file.write_text("1")
    read, times = signature([file]), []

    async def changed() -> None:
        times.append(1)

    file.write_text("22")
    watch = FileWatcher(lambda: [file], changed, read)
    for _ in range(3):
        await watch.poll()
    assert times == [1]


async def test_a_folder_that_vanishes_and_comes_back_is_seen_and_so_are_its_later_edits(tmp_path: Path) -> None:
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "a.yaml").write_text("1")
    seen = Seen(folder)
    (folder / "a.yaml").unlink()
    folder.rmdir()
    assert await seen.poll() == 1
    folder.mkdir()
    (folder / "a.yaml").write_text("1")
    assert await seen.poll() == 2
    (folder / "a.yaml").write_text("22")
    assert await seen.poll() == 3


async def test_every_edit_by_rename_is_seen(tmp_path: Path) -> None:
    """As editors save a file."""
    file = tmp_path / "a.yaml"
    file.write_text("1")
    seen = Seen(tmp_path)
    for times, content in enumerate(("22", "333"), 1):
        (tmp_path / "fresh").write_text(content)
        (tmp_path / "fresh").replace(file)
        assert await seen.poll() == times


async def test_an_edit_that_cannot_be_taken_up_does_not_end_the_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken_up = asyncio.Queue[str]()
    file = tmp_path / "a.yaml"

    async def changed() -> None:
        taken_up.put_nowait(file.read_text())
        if file.read_text() == "bad":
            raise AttributeError("a fault of ours")

    watching = asyncio.create_task(FileWatcher(lambda: [file], changed, signature([file]), interval=0.001).run())
    for content in ("bad", "good"):
        file.write_text(content)
        assert await taken_up.get() == content
    watching.cancel()
    assert "could not be read" in caplog.text


async def test_files_that_could_not_be_read_are_read_again_without_an_edit(tmp_path: Path) -> None:
    file, failures = tmp_path / "a.yaml", 3
    file.write_text("1")
    times = 0

    async def changed() -> None:
        nonlocal times
        times += 1
        if times <= failures:
            watch.read_again()

    watch = FileWatcher(lambda: [file], changed, signature([file]))
    file.write_text("22")
    for _ in range(10):
        await watch.poll()
    assert times == failures + 1
