import ctypes
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.bound_process import bound
from backend.kernels import build

TINY = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A one-line library in place of the kernels, and a cache of its own."""
    directory = tmp_path / "csrc"
    directory.mkdir()
    (directory / "tiny.cpp").write_text(TINY)
    monkeypatch.setattr(build, "SOURCES", directory)
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path / "cache"))
    return directory


@pytest.fixture
def compiler() -> str:
    found = build.find_compiler()
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)


@pytest.mark.parametrize(
    ("features", "multiplies"),
    [("flags\t\t: fpu avx512f avx512_bf16", True), ("Features\t: fp asimd bf16", True), ("flags : avx512f", False)],
)
def test_a_processor_says_whether_it_multiplies_in_bfloat16(
    features: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_cpu_features", lambda: features)
    assert build.multiplies_in_bfloat16.__wrapped__() is multiplies


@pytest.mark.usefixtures("compiler")
def test_a_build_is_cached_and_loads() -> None:
    assert build.cached() is None
    path = build.build()
    assert path is not None
    assert build.cached() == path
    assert [*path.parent.iterdir()] == [path]
    library = build.load_library(wait=False)
    assert library is not None
    assert library.answer() == 42


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("name", "text"), [("tiny.cpp", TINY.replace("42", "43")), ("tiny.h", "#pragma once\n")])
def test_a_changed_source_or_header_is_another_library(name: str, text: str, sources: Path) -> None:
    first = build.build()
    (sources / name).write_text(text)
    assert build.cached() is None
    second = build.build()
    assert first != second
    assert second == build.cached()


@pytest.mark.usefixtures("compiler")
def test_a_library_outlives_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.build()
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.cached() == path


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b"\0" + b[1:]])
def test_a_damaged_library_is_rebuilt_and_never_mapped(damage: Callable[[bytes], bytes]) -> None:
    path = build.build()
    assert path is not None
    path.write_bytes(damage(path.read_bytes()))
    assert build.cached() is None
    library = build.load_library(wait=True)
    assert library is not None
    assert library.answer() == 42


@pytest.mark.usefixtures("no_compiler")
def test_a_missing_compiler_is_logged_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    assert build.load_library(wait=True) is None
    assert "no C++ compiler" in caplog.text
    assert build.load_library(wait=False) is None


@pytest.mark.usefixtures("compiler")
def test_a_failing_compiler_is_logged_and_leaves_nothing_behind(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (sources / "tiny.cpp").write_text("this is not C++")
    assert build.load_library(wait=True) is None
    assert "tiny.cpp" in caplog.text
    assert [*(tmp_path / "cache").iterdir()] == []


def test_a_compiler_that_hangs_ends_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = tmp_path / "c++"
    driver.write_text(f"#!/usr/bin/env bash\n[[ $1 == --version ]] || flock {tmp_path}/lock sleep infinity\n")
    driver.chmod(0o755)
    monkeypatch.setenv("CXX", str(driver))
    monkeypatch.setattr(build, "COMPILE_SECONDS", 1.0)
    assert build.build() is None
    assert "timed out" in caplog.text
    assert [*(tmp_path / "cache").iterdir()] == [], "and it is tried again at the next start"
    subprocess.run(["flock", tmp_path / "lock", "true"], check=True, timeout=240)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("text", ["#!/usr/bin/env bash\nsleep infinity\n", "neither a script nor a program"])
def test_a_compiler_that_does_not_tell_its_version_keeps_nobody_from_a_library_that_is_there(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build.build()
    driver = tmp_path / "c++"
    driver.write_text(text)
    driver.chmod(0o755)
    monkeypatch.setenv("CXX", str(driver))
    monkeypatch.setattr(build, "VERSION_SECONDS", 0.1)
    assert build.cached() == built
    library = build.load_library(wait=False)
    assert library is not None
    assert library.answer() == 42


@pytest.mark.usefixtures("compiler")
def test_an_unusable_cache_directory_is_logged_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path / "file"))
    assert build.load_library(wait=True) is None
    assert "compiling the kernels failed" in caplog.text


def test_a_user_without_a_home_is_served_without_a_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLUICE_CACHE_DIR", "~a-user-who-is-not-here/cache")
    assert build.load_library(wait=True) is None
    assert "set SLUICE_CACHE_DIR" in caplog.text


@pytest.mark.usefixtures("compiler")
def test_a_file_that_is_whole_but_no_library_is_logged_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    path = build.build()
    assert path is not None
    path.write_bytes(build.sealed(b"not a library"))
    assert build.load_library(wait=False) is None
    assert "cannot load" in caplog.text


@pytest.mark.usefixtures("compiler")
def test_without_waiting_the_library_is_built_for_the_next_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = []
    monkeypatch.setattr(build, "build_in_background", lambda: started.append(True))
    with caplog.at_level(logging.INFO):
        assert build.load_library(wait=False) is None
    assert started == [True]
    assert "next start" in caplog.text


@pytest.mark.usefixtures("compiler")
def test_concurrent_builders_leave_one_whole_library(tmp_path: Path) -> None:
    program = (
        f"from pathlib import Path; from backend.kernels import build; build.SOURCES = Path({str(build.SOURCES)!r});"
        "print(build.build())"
    )
    command = bound([sys.executable, "-c", program])
    builders = [subprocess.Popen(**command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {builder.communicate()[0].strip() for builder in builders}
    assert answers == {str(build.cached())}
    assert len([*(tmp_path / "cache").iterdir()]) == 1
    assert ctypes.CDLL(answers.pop()).answer() == 42


@pytest.mark.usefixtures("compiler")
def test_the_command_says_what_it_did(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.build_command() == 0
    assert capsys.readouterr().out.startswith("built ")
    assert build.build_command() == 0
    assert capsys.readouterr().out.startswith("up to date: ")


@pytest.mark.usefixtures("no_compiler")
def test_the_command_fails_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.build_command() == 1


@pytest.mark.usefixtures("compiler")
def test_a_library_of_a_wheel_serves_the_processors_that_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "BROUGHT", tmp_path / "libraries")
    made = {level: build.build(build.portable_recipe(level, build.BROUGHT)) for level in build.PORTABLE}
    v4, v3 = made["x86-64-v4"], made["x86-64-v3"]
    features = {level: " ".join(needed) for level, (*_, needed) in build.PORTABLE.items()}
    assert build.brought(features["x86-64-v4"] + " sse") == [v4, v3]
    assert build.brought(features["x86-64-v3"]) == [v3]
    assert build.brought("sse") == []
    monkeypatch.setattr(build, "_cpu_features", lambda: features["x86-64-v3"])
    assert build.cached() == v3
    assert build.build() == build.cached() != v3, "this machine's own is better"


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()"])
def test_a_build_in_the_background_ends_with_the_process_that_it_is_for(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However that ends, and with all that the compiler has started; what is begun is not left in the cache."""
    driver, started = tmp_path / "c++", tmp_path / "started"
    driver.write_text(
        "#!/usr/bin/env bash\n[[ $1 == --version ]] || "
        f"flock {tmp_path}/lock bash -c 'touch {started}; sleep infinity'\n"
    )
    driver.chmod(0o755)
    monkeypatch.setenv("CXX", str(driver))
    program = (
        "import os, signal, sys, time; from pathlib import Path; from backend.kernels import build;"
        f"build.build_in_background()\nwhile not Path({str(started)!r}).exists(): time.sleep(0.01)\n{ending}"
    )
    subprocess.run(**bound([sys.executable, "-c", program]), check=False, timeout=240)
    subprocess.run(["flock", tmp_path / "lock", "true"], check=True, timeout=240)
    while [*(tmp_path / "cache").iterdir()]:
        time.sleep(0.01)


def test_what_killed_builds_have_left_is_removed(tmp_path: Path) -> None:
    left, going_on = tmp_path / "cache" / "build-left", tmp_path / "cache" / "build-going-on"
    for draft in (left, going_on):
        draft.mkdir(parents=True)
        (draft / "kernels.so").write_text("a part")
    os.utime(left, (0, 0))
    build.build()
    assert going_on.exists() and not left.exists()
