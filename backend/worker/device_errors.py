"""Errors of a device, explained with a remedy each."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import CalledProcessError

import torch

from backend.errors import BackendError, ConfigError, DeviceError

_NO_MEMORY = re.compile(r"\bCUDA\b.*\bout of memory\b|_STATUS_ALLOC_FAILED|DefaultCPUAllocator")
"""The words of CUDA and Triton ("CUDA error: out of memory", "Triton Error [CUDA]: ..."), of cuBLAS and cuDNN, and of a
CPU.
"""


def is_device_error(error: Exception) -> bool:
    """Return True if torch, CUDA or Triton raised the error; any other is a fault of this package."""
    return isinstance(error, RuntimeError | MemoryError | CalledProcessError) or _is_tritons(error)


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the device, or the host on its behalf, was out of memory: many errors tell it only in their
    words.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _NO_MEMORY.search(str(error)) is not None


def remedy(error: Exception) -> str | None:
    """Return a remedy, with what the machine lacks; None if the error does not show it."""
    if is_out_of_memory(error):
        return (
            "it has no memory for it: free it, choose a smaller model or a 16-bit dtype, or lower kv_memory_bytes, "
            "max_num_batched_tokens or max_num_seqs"
        )
    if isinstance(error, CalledProcessError) or "C compiler" in str(error):
        return (
            "Triton builds what launches its kernels with a C compiler and Python's headers: install gcc and "
            "python3-dev, or name a compiler in CC; kernels torch need neither, and are slower"
        )
    if _is_tritons(error):
        return "Triton's kernels do not fit this device or this version of Triton: choose kernels torch, and tell us"
    return None


def explained(what: str, error: Exception) -> str:
    """Return one line: the failure, its remedy if that is known, and the error's own words."""
    helps = remedy(error)
    return f"{what}: {error}" if helps is None else f"{what}: {helps} ({_first_line(error)})"


@contextmanager
def placing(device: torch.device) -> Iterator[None]:
    """Translate errors of torch, CUDA and Triton into `ConfigError` with a remedy, or into `DeviceError`."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        if not is_device_error(error):
            raise
        kind = DeviceError if remedy(error) is None else ConfigError
        raise kind(explained(f"the model cannot be placed on {device}", error)) from error


def _is_tritons(error: Exception) -> bool:
    """Return True for an error of Triton's, by name: the package is not imported where its kernels are not chosen."""
    return any(base.__module__.partition(".")[0] == "triton" for base in type(error).__mro__)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
