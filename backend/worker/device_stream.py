"""A stream runs one device's work in the order of its launches. A CPU's and a CUDA device's differ here.

Copies of blocks to and from the host's memory have an order of their own, beside the work's: a launch's copies may run
at any time from then on, behind the copies of earlier launches, and are done before its work begins.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], object]


class LaunchedWork(Protocol):
    """Work that was launched on a stream."""

    def synchronize(self) -> float:
        """Block until the work is done. Returns seconds, to whole nanoseconds, since the completion of the work before
        it (or its own launch, if later).
        """
        ...


class Graph(Protocol):
    """A graph is work recorded once, whose kernels are launched together."""

    def replay(self) -> None: ...


class DeviceStream(Protocol):
    """Runs work in the order of the launches, and is waited for in that order."""

    device: torch.device
    runs_ahead: bool  # True if launched work runs before it is waited for
    captures: bool  # True if `capture` may be called

    def launch(self, work: Work, copies: Work | None = None) -> LaunchedWork:
        """Queue `work` behind earlier launches, and behind `copies`, which wait for other copies alone.

        The host memory that both read must not change until the work is done.
        """
        ...

    def capture(self, work: Work) -> Graph:
        """Record `work`, which has run before, uses memory that stays in place, and never waits for the host."""
        ...

    def staging(self, num_bytes: int) -> Tensor:
        """Return host memory, uint8, from which copies to the device need not wait."""
        ...

    def recover(self) -> None:
        """Recover from a lack of memory: wait for everything that was launched, and free cached memory."""
        ...


class CpuStream:
    """A CPU's stream: no work runs ahead; work is done when it is waited for."""

    device = torch.device("cpu")
    runs_ahead = False
    captures = False

    def __init__(self) -> None:
        self.completed_ns = 0

    def launch(self, work: Work, copies: Work | None = None) -> "DeferredWork":
        return DeferredWork(self, [copies, work] if copies else [work], time.perf_counter_ns())

    def capture(self, work: Work) -> Graph:
        raise NotImplementedError("a CPU has no graphs")

    def staging(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def recover(self) -> None:
        pass


class DeferredWork:
    """Work that is done when it is waited for."""

    def __init__(self, stream: CpuStream, parts: list[Work], launched_ns: int) -> None:
        self._stream, self._parts, self._launched_ns = stream, parts, launched_ns

    def synchronize(self) -> float:
        for part in self._parts:
            part()
        started, self._stream.completed_ns = max(self._stream.completed_ns, self._launched_ns), time.perf_counter_ns()
        return (self._stream.completed_ns - started) / 1e9


class CudaStream:
    """The current stream of a CUDA device, and a stream for copies beside it. Work launches kernels and copies there,
    for which the host does not wait.
    """

    runs_ahead = True

    def __init__(self, device: torch.device, captures: bool = True) -> None:
        self.device = device
        self.captures = captures
        self._graph_memory = torch.cuda.graph_pool_handle()  # shared, because one graph runs at a time
        self._copies = torch.cuda.Stream(device)

    def launch(self, work: Work, copies: Work | None = None) -> "CudaWork":
        """Queue the work. Its time includes the wait for its copies."""
        with torch.cuda.device(self.device):
            begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
            if copies is not None:
                with torch.cuda.stream(self._copies):
                    copies()
            begin.record()
            if copies is not None:
                torch.cuda.current_stream().wait_stream(self._copies)
            work()
            end.record()
        return CudaWork(begin, end)

    def capture(self, work: Work) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=self._graph_memory):
            work()
        return graph

    def staging(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def recover(self) -> None:
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()


class CudaWork:
    """The work between two events of a stream, the first of which passes when the work before it is done."""

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin, self._end = begin, end

    def synchronize(self) -> float:
        self._end.synchronize()
        milliseconds: float = self._begin.elapsed_time(self._end)
        return round(milliseconds * 1e6) / 1e9


def on_device(numbers: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the host, lists or arrays, on a device; the host does not wait for the copy.

    They are pinned as a tensor, because torch refuses to pin the tensor of an array.
    """
    tensor = torch.tensor(numbers, dtype=dtype)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def make_device_stream(device: torch.device, captures: bool) -> DeviceStream:
    """Return the stream of a device. `captures`: graphs can hold the work that will run on the device, if it has
    graphs.
    """
    return CpuStream() if device.type == "cpu" else CudaStream(device, captures)
