"""What vLLM is started with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labs.benchmarks import vllm_environment as module


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty one; what is downloaded is an empty file, and what is unpacked an empty library."""

    def run(args: list[Any], *, cwd: Path | None = None, check: bool) -> None:
        if args[0] == "apt-get":
            assert cwd is not None
            (cwd / f"{module.TCMALLOC}_2.10-1_amd64.deb").touch()
        else:
            (args[-1] / "usr" / "lib").mkdir(parents=True)
            (args[-1] / "usr" / "lib" / "libtcmalloc_minimal.so.4").touch()
        calls.append(args[0])

    calls = list[str]()
    monkeypatch.setattr(module, "bound", lambda command: {"args": command})
    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module, "vllm_python", lambda: tmp_path / "bin" / "python")
    yield tmp_path
    assert calls == ["apt-get", "dpkg-deb"], "once"


def test_the_allocator_and_openmp_that_it_asks_for_are_loaded_before_it(environment: Path) -> None:
    for _ in range(2):
        names = module.vllm_environ(0)["LD_PRELOAD"].split(":")
        assert names[0].endswith("libtcmalloc_minimal.so.4") and Path(names[0]).exists()
        assert names[1] == f"{environment}/lib/libiomp5.so"
