"""Checks of the machine alone, not of the model or the settings."""

import ctypes
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from backend import compiled_core
from backend.errors import ConfigError
from backend.kernels import build
from backend.kernels.cpu import select_ops
from gateway.doctor.check import Check, ok, problem, warning

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)  # no machine that runs this is from before
FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
NVIDIA = Path("/proc/driver/nvidia/version")
_UNSYNCHRONISED = 5  # adjtimex(2): TIME_ERROR
_TIMEX_BYTES = 256  # at least sizeof(struct timex)


def python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform != "linux":
        return problem("python", found, "Sluice runs on Linux")
    return ok("python", found)


def torch_build() -> Check:
    return ok("torch", f"{torch.__version__}, {'CUDA ' + torch.version.cuda if torch.version.cuda else 'for CPUs'}")


def kernels(features: str | None = None) -> Check:
    """Check which compiled kernels a CPU can run, without compiling any."""
    known = cpu_features() if features is None else features.split()
    shown = " ".join(name for name in FEATURES if name in known) or "no known vector instructions"
    try:
        library = build.cached()
    except (OSError, ConfigError) as error:
        return warning("kernels", f"no cache for compiled ones ({error})", "set SLUICE_CACHE_DIR to a folder to write")
    if library is None:
        hint = (
            "python -m backend.kernels.build" if build.find_compiler() else "install g++ or clang++, then start again"
        )
        found = (
            f"not compiled for this processor ({shown}), torch's serve instead, slower, and seeds depend on the batch"
        )
        return warning("kernels", found, hint)
    try:
        ops = select_ops(torch.device("cpu"), torch.float32, "native")
    except ConfigError:
        return warning(
            "kernels",
            f"the compiled library cannot be used on this processor ({shown}), torch's kernels serve instead, slower",
            f"delete {library} and run python -m backend.kernels.build",
        )
    if not ops.batch_invariant:
        return warning(
            "kernels",
            f"compiled for this processor ({shown}), but their sums depend on the batch: a seed may draw another text",
            "report the processor and the compiler's version; the rest works",
        )
    return ok("kernels", f"compiled for this processor ({shown}); they agree with the reference in every batch")


def core() -> Check:
    if compiled_core.compiled() is None:
        return warning(
            "core", "interpreted: same decisions, in more than twice the time", compiled_core.how_to_compile()
        )
    return ok("core", "compiled from the present sources")


def cpu_features() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next(
        (line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))), []
    )


def gpu(device: str) -> Check:
    """Check the GPU; `device` is the setting."""
    if torch.cuda.is_available():
        return _gpu_found()
    driver = NVIDIA.read_text().splitlines()[0] if NVIDIA.exists() else None
    if device == "cuda":
        seen = f"the driver is there ({driver})" if driver else "there is no NVIDIA driver"
        return problem(
            "gpu", f"torch {torch.__version__} finds none; {seen}", "install driver and a CUDA torch, or --device cpu"
        )
    if driver and device == "auto":
        return warning(
            "gpu",
            f"a driver is here ({driver}), and torch {torch.__version__} cannot use it",
            "install a CUDA build of torch, or say --device cpu",
        )
    return ok("gpu", "none; the CPU serves")


def _gpu_found() -> Check:
    free, total = torch.cuda.mem_get_info()
    name, capability = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.get_device_capability()))
    found = f"{name}, compute capability {capability}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < total / 2:
        return warning("gpu", found, "another process holds most of it; see nvidia-smi")
    return ok("gpu", found)


def clock(now: float | None = None, synchronised: bool | None = None) -> Check:
    """Check the calendar clock, by which keys expire and budgets renew; `now` is in Unix seconds."""
    moment = datetime.fromtimestamp(time.time() if now is None else now, UTC)
    found = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    if moment < EPOCH:
        return problem("clock", found, "set the clock; keys would not expire, and certificates seem not valid yet")
    synchronised = _is_synchronised() if synchronised is None else synchronised
    if not synchronised:
        return warning("clock", f"{found}, not synchronised", "run chrony, systemd-timesyncd or another NTP client")
    return ok("clock", f"{found}, synchronised by NTP")


def _is_synchronised() -> bool:
    """Return whether the kernel's clock is synchronised (adjtimex(2)); a container's is its host's."""
    state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return 0 <= state < _UNSYNCHRONISED
