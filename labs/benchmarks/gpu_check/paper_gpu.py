"""A GPU on paper: steps on tensors without memory, and kernels that are compiled and never run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from backend.config import EngineConfig
from backend.kernels import triton_lang
from backend.kernels.triton_ops import TritonOps
from backend.model.decoder import Decoder
from backend.model.model_config import ModelConfig
from backend.model.weights import empty_weights
from backend.paged_kv.kv_cache import KVCache
from backend.worker.device_stream import CpuStream, Work
from backend.worker.logprobs import PickedScores
from backend.worker.model_runner import ModelRunner

META = torch.device("meta")
MULTIPROCESSORS = 132  # of an H100

OnLaunch = Callable[[Any, tuple[Any, ...], dict[str, Any]], object]
"""Called with a Triton kernel and the arguments of its launch."""


class PaperStream(CpuStream):
    """Runs work at once. Its host memory is real except for tokens, which could not be copied from tensors without
    memory.
    """

    device = META
    captures = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._token_bytes = 8 * config.max_num_seqs

    def launch(self, work: Work, copies: Work | None = None) -> Any:
        assert copies is None
        work()
        return SimpleNamespace(synchronize=lambda: 0.0)

    def capture(self, work: Work) -> Any:
        return SimpleNamespace(replay=work)

    def staging(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=META if num_bytes == self._token_bytes else "cpu")


def paper_runner(
    model: ModelConfig, config: EngineConfig, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> ModelRunner:
    """A runner whose steps can be launched, within `paper_gpu`, and not waited for."""
    decoder = Decoder(model, empty_weights(model, dtype, META), TritonOps(), config.max_model_len)
    kv = KVCache(model, config.num_blocks, config.block_size, kv_dtype or dtype, META)
    return ModelRunner(decoder, kv, config, PaperStream(config))


@contextmanager
def paper_gpu(arch: int, on_launch: OnLaunch) -> Iterator[None]:
    """Within the block, tensors of the host and tensors without memory count as a GPU's of this architecture (90: an
    H100), and kernels are reported instead of launched.
    """

    def launcher(kernel: Any, _grid: object) -> Any:
        return lambda *args, **constants: on_launch(kernel, args, constants)

    capability, properties = divmod(arch, 10), SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    with ExitStack() as stack:
        for target, name, value in (
            (triton.JITFunction, "__getitem__", launcher),
            (driver, "_active", PaperDriver(arch)),
            (triton_lang, "CPU_CAPABILITY", capability),
            (triton_lang, "CPU_MULTIPROCESSORS", MULTIPROCESSORS),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (PickedScores, "room", _no_room),
        ):
            stack.enter_context(patch.object(target, name, value))
        for lookup in (triton_lang.capability, triton_lang.multiprocessors):
            lookup.cache_clear()
            stack.callback(lookup.cache_clear)
        yield


class PaperDriver:
    """The driver that Triton compiles for: a device for each architecture, so that none has another's."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def compiled(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Return the kernel that Triton compiles for a launch, and leave it in the cache under the name by which a GPU
    looks for it.
    """
    return kernel.run(*args, grid=(1,), warmup=True, **constants)


def _no_room(rows: int, most: int, pinned: bool) -> PickedScores:
    """Return picked scores whose memory can be copied to from tensors without memory, `pinned` or not."""
    del pinned
    shape = (rows, 1 + most)
    return PickedScores(torch.empty(shape, device=META), torch.empty(shape, dtype=torch.int64, device=META))
