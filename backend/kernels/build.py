"""Compiles the C++ kernels of `csrc` for this machine and keeps the library in a cache directory.

A wheel brings libraries for levels of processors (`PORTABLE`), which serve where the cache has none.

`SLUICE_CACHE_DIR` names the directory (default ~/.cache/sluice). A library's name is made of its sources and flags, the
processor's features, and the compiler. Its last 32 bytes are the SHA-256 of all before them, so that a damaged file is
never mapped. No failure here is an error: without a library the torch kernels serve.
"""

import argparse
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backend.errors import ConfigError
from backend.timed_run import end_on_signals, run_within

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
COMPILE_SECONDS = 900.0  # 20 s of a core, of which a busy machine may leave little
VERSION_SECONDS = 30.0
DIGEST_BYTES = 32
DRAFT = "build-"  # beginning of the names of folders in the cache in which a library is compiled
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # a compiler that fuses products with sums may do so in one copy of a loop only
)
BFLOAT16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86-64, and of Arm
WIDE_FLAG = "-mprefer-vector-width=512"
MACHINE_FLAGS = {"x86_64": ("-march=native", WIDE_FLAG), "aarch64": ("-mcpu=native",)}
_AVX2 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
PORTABLE = {  # the machine, flags and needed features of each level of processors, the best first
    "x86-64-v4": ("x86_64", ("-march=x86-64-v4", WIDE_FLAG), _AVX2 | _AVX512),
    "x86-64-v3": ("x86_64", ("-march=x86-64-v3",), _AVX2),
}
BROUGHT = Path(__file__).parent / "libraries"  # only in wheels


@dataclass(frozen=True, slots=True)
class Recipe:
    """A library's sources, flags and compiler, the processors that it is for, and the directory that it is kept in."""

    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    processor: str
    directory: Path
    compiler: str | None

    @property
    def stem(self) -> str:
        """The file name without the compiler: any library with this beginning runs here and is compiled from these
        sources.
        """
        digest = hashlib.sha256("\0".join((*self.flags, self.processor)).encode())
        for path in sorted(SOURCES.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        return f"kernels-{digest.hexdigest()[:16]}"

    def command(self, output: Path) -> list[str]:
        assert self.compiler is not None
        return [self.compiler, *self.flags, *map(str, self.sources), "-o", str(output)]

    def target(self) -> Path:
        assert self.compiler is not None
        version = hashlib.sha256(_compiler_version(self.compiler).encode()).hexdigest()[:8]
        return self.directory / f"{self.stem}-{version}.so"


def recipe() -> Recipe:
    """The recipe of this machine's own library."""
    flags = (*COMMON_FLAGS, *MACHINE_FLAGS.get(platform.machine(), ()))
    return _recipe(flags, _cpu_features(), cache_directory())


def portable_recipe(level: str, directory: Path) -> Recipe:
    return _recipe((*COMMON_FLAGS, *PORTABLE[level][1]), level, directory)


def _recipe(flags: tuple[str, ...], processor: str, directory: Path) -> Recipe:
    return Recipe(tuple(sorted(SOURCES.glob("*.cpp"))), flags, processor, directory, find_compiler())


def cache_directory() -> Path:
    """Return `$SLUICE_CACHE_DIR`, or `~/.cache/sluice`. Raises `ConfigError` for an unknown home directory."""
    try:
        return Path(os.environ.get("SLUICE_CACHE_DIR") or "~/.cache/sluice").expanduser()
    except RuntimeError:
        raise ConfigError("this user's home directory is not known: set SLUICE_CACHE_DIR to a whole path") from None


def find_compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def cached() -> Path | None:
    """Return the library for this machine and these sources, if an undamaged one is in the cache or was brought by the
    wheel.
    """
    made = recipe()
    candidates = _candidates(made)
    if made.compiler is not None and (exact := made.target()) in candidates:
        candidates = [exact]
    return next((path for path in [*candidates, *brought(_cpu_features())] if _is_whole(path)), None)


def brought(features: str) -> list[Path]:
    """Return the libraries of the wheel that run on a processor with these features, the best first."""
    known, machine = {*features.split()}, platform.machine()
    levels = [level for level, (kind, _, needed) in PORTABLE.items() if kind == machine and needed <= known]
    return [path for level in levels for path in _candidates(portable_recipe(level, BROUGHT))]


def _candidates(made: Recipe) -> list[Path]:
    return sorted(made.directory.glob(f"{made.stem}-*.so"))


def build(made: Recipe | None = None) -> Path | None:
    """Compile now, by default for this machine. Returns the library, or None with the reason logged. Of several
    builders the last one wins.
    """
    made = recipe() if made is None else made
    if made.compiler is None:
        log.warning("no C++ compiler found (tried $CXX, g++, clang++, c++): torch kernels serve instead")
        return None
    try:
        made.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_left(made.directory)
        with tempfile.TemporaryDirectory(dir=made.directory, prefix=DRAFT) as scratch:
            output = Path(scratch) / "kernels.so"
            run_within(COMPILE_SECONDS, made.command(output))
            output.write_bytes(sealed(output.read_bytes()))
            return output.replace(made.target())
    except subprocess.CalledProcessError as error:
        log.warning("compiling the kernels failed, torch kernels serve instead:\n%s", error.stderr[-2000:])
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("compiling the kernels failed, torch kernels serve instead: %s", error)
    return None


def _remove_left(directory: Path) -> None:
    """Remove the drafts of builds that were killed, which are older than any that go on."""
    for draft in directory.glob(f"{DRAFT}*"):
        with suppress(OSError):
            if time.time() - draft.stat().st_mtime > 2 * COMPILE_SECONDS:
                shutil.rmtree(draft)


def load_library(wait: bool) -> ctypes.CDLL | None:
    """Load the cached library. If there is none, compile it now (`wait`) or in the background for the next start."""
    try:
        path = cached()
    except (OSError, ConfigError) as error:  # the cache is not readable, or the user has no home
        log.warning("no cache for compiled kernels, torch kernels serve instead: %s; set SLUICE_CACHE_DIR", error)
        return None
    if path is None and wait:
        path = build()
    elif path is None and find_compiler() is not None:
        log.info("building the C++ kernels in the background for the next start; torch kernels serve this one")
        build_in_background()
    try:
        return None if path is None else ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("cannot load %s, torch kernels serve instead: %s", path, error)
        return None


def build_in_background() -> None:
    """Compile in a process that ends with this one, with its compiler."""
    ours = ("backend.bound_to_parent", str(os.getpid()), "backend.kernels.build", "--background")
    command = [sys.executable, "-m", *ours]
    run = functools.partial(subprocess.run, command, cwd=Path(__file__).parents[2], capture_output=True, check=False)
    threading.Thread(target=run, name="kernel-build", daemon=True).start()


def _compiler_version(compiler: str) -> str:
    """Return what a compiler says of itself; nothing where it cannot be run, or does not answer."""
    try:
        return run_within(VERSION_SECONDS, [compiler, "--version"], check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("the compiler does not tell its version: %s", error)
        return ""


def _cpu_features() -> str:
    """Return the processor's list of features from the operating system: the same text on every core, at every
    start.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())


@functools.cache
def multiplies_in_bfloat16() -> bool:
    """Return True if the processor has instructions for that; elsewhere libraries of others do it all the same."""
    return not BFLOAT16_FEATURES.isdisjoint(_cpu_features().split())


def sealed(library: bytes) -> bytes:
    return library + hashlib.sha256(library).digest()


def _is_whole(path: Path) -> bool:
    content = path.read_bytes()
    return sealed(content[:-DIGEST_BYTES]) == content


def build_command() -> int:
    parser = argparse.ArgumentParser(prog="python -m backend.kernels.build", description="Compile the C++ kernels.")
    parser.add_argument("--background", action="store_true", help="give way to every other process")
    parser.add_argument("--portable", type=Path, metavar="FOLDER", help="for each level of processors, into FOLDER")
    options = parser.parse_args()
    if options.background:
        os.nice(19)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if options.portable:
        levels = [level for level, (machine, *_) in PORTABLE.items() if machine == platform.machine()]
        return 0 if all(build(portable_recipe(level, options.portable)) for level in levels) else 1
    try:
        path = cached()
    except (OSError, ConfigError) as error:
        sys.stderr.write(f"no cache for compiled kernels: {error}\n")
        return 1
    if path is not None:
        sys.stdout.write(f"up to date: {path}\n")
    elif (path := build()) is not None:
        sys.stdout.write(f"built {path} ({path.stat().st_size // 1024} KiB)\n")
    return 0 if path is not None else 1


if __name__ == "__main__":
    end_on_signals()
    sys.exit(build_command())
