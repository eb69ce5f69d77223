"""Weights of a model without requests: their memory is given back, and they wait in a file of the page cache.

The kernel drops the file's pages under pressure, and reads them again from disk; otherwise waking copies them in
memory. Weights keep their addresses, so nothing that refers to them changes.
"""

import ctypes
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import FunctionType

import torch
from torch import Tensor

from backend.errors import ConfigError

LEAST_BYTES = 2**16  # of a tensor that sleeps: smaller ones are not worth a call
CHUNK_BYTES = 2**26  # read in one call

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SleepingWeights:
    """Puts the large tensors of one model on a CPU to sleep and wakes them, between steps. The device's thread calls
    it.
    """

    def __init__(self, model: object, folder: Path) -> None:
        """`model` owns the tensors; the file in `folder` has no name. Raises `ConfigError` for a device other than a
        CPU, and `OSError`.
        """
        self._ranges = _whole_pages(tensors_of(model))
        self.num_bytes = sum(size for _, size in self._ranges)
        folder.mkdir(0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=folder)
        Path(name).unlink()
        self._file = number
        weakref.finalize(self, os.close, number)
        for address, size in self._ranges:
            for begin in range(0, size, CHUNK_BYTES):
                os.write(number, (ctypes.c_char * min(CHUNK_BYTES, size - begin)).from_address(address + begin))
        self.is_asleep = False
        self.seconds = self._measure()  # of a waking, from the page cache

    def sleep(self) -> None:
        if self.is_asleep:
            return
        for address, size in self._ranges:
            if _libc.madvise(address, size, mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "the memory of weights cannot be given back")
        self.is_asleep = True

    def wake(self) -> None:
        if not self.is_asleep:
            return
        offset, number = 0, self._file
        for address, size in self._ranges:
            for begin in range(0, size, CHUNK_BYTES):
                part = min(CHUNK_BYTES, size - begin)
                buffer = (ctypes.c_char * part).from_address(address + begin)
                if os.preadv(number, [buffer], offset + begin) != part:
                    raise OSError("the file of sleeping weights is cut off")
            offset += size
        self.is_asleep = False

    def _measure(self) -> float:
        """Put the weights to sleep; returns the seconds of a waking."""
        self.sleep()
        began = time.perf_counter()
        self.wake()
        seconds = time.perf_counter() - began
        self.sleep()
        return seconds


def tensors_of(owner: object) -> list[Tensor]:
    """Return the tensors that an object holds, in its attributes, collections and closures, each storage once.

    Raises `ConfigError` for weights without pages of their own.
    """
    found: dict[int, Tensor] = {}
    seen, waiting = set[int](), [owner]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, str | bytes | int | float | type | torch.dtype | torch.device):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor) and one.is_mkldnn:
            raise ConfigError(
                "weights that oneDNN has packed do not sleep: build the kernels (python -m backend.kernels.build) and "
                "start with --kernels native, or leave out --awake-bytes"
            )
        if isinstance(one, Tensor):
            found.setdefault(one.untyped_storage().data_ptr(), one)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif isinstance(one, partial):
            waiting += [one.func, one.args, one.keywords]
        elif isinstance(one, FunctionType):
            waiting += [cell.cell_contents for cell in one.__closure__ or ()]
        elif type(one).__module__.startswith("backend."):
            waiting += vars(one).values() if hasattr(one, "__dict__") else ()
            waiting += [getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name)]
    return list(found.values())


def _whole_pages(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return the address and the bytes of the whole pages of each large storage."""
    ranges = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu":
            raise ConfigError("weights sleep on a CPU alone: leave out --awake-bytes")
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end - begin >= LEAST_BYTES:
            ranges.append((begin, end - begin))
    return sorted(ranges)
