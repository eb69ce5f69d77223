"""Streams: work in the order of its launches, and CUDA's calls in the order that makes them true, on CUDA on paper."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from backend.kernels.cpu import select_ops
from backend.worker.device_stream import CpuStream, CudaStream, make_device_stream, on_device
from tests.backend.runners import make_runner


def test_on_a_cpu_waiting_is_doing() -> None:
    stream, done = CpuStream(), []
    running = [stream.launch(lambda n=n: done.append(n)) for n in range(3)]  # type: ignore[misc]
    assert done == []
    times = [step.synchronize() for step in running]
    assert done == [0, 1, 2]
    assert all(seconds >= 0 for seconds in times)


@pytest.mark.parametrize("numbers", [[3, 5], np.array([3, 5], np.int32)], ids=["list", "array"])
def test_numbers_are_pinned_before_they_go_to_a_gpu(numbers: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch pins no tensor as it makes it of an array: `torch.tensor(array, pin_memory=True)` fails where CUDA is."""
    calls: list[object] = []
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, dtype: calls.append("made") or make(data, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *where, **how: calls.append((*where, how)) or tensor)
    device = torch.device("cuda", 0)
    assert on_device(numbers, torch.int64, device).tolist() == [3, 5]
    assert calls == ["made", "pinned", (device, {"non_blocking": True})]


def test_on_a_cpu_copies_are_made_right_before_their_work() -> None:
    stream, done = CpuStream(), []
    running = [stream.launch(lambda n=n: done.append(n), lambda n=n: done.append(-n)) for n in (1, 2)]  # type: ignore[misc]
    for step in running:
        step.synchronize()
    assert done == [-1, 1, -2, 2]


class PaperStream:
    """A stream that writes down what it is made to wait for."""

    def __init__(self, cuda: "PaperCuda", name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: "PaperStream") -> None:
        self.cuda.call(f"wait for {other.name}")


class PaperCuda:
    """Writes down what is asked of CUDA, and of which stream. An event stands at the number of calls before it, as
    milliseconds.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.stream = PaperStream(self, "")
        outer = self

        class Event:
            def __init__(self, enable_timing: bool, blocking: bool) -> None:
                assert enable_timing and blocking

            def record(self) -> None:
                outer.call("record")
                self.at = len(outer.calls)

            def synchronize(self) -> None:
                outer.calls.append("synchronize")

            def elapsed_time(self, end: "Event") -> float:
                return float(end.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: PaperStream(self, "copies"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)

    def call(self, name: str) -> None:
        self.calls.append(f"{self.stream.name}: {name}" if self.stream.name else name)

    @contextmanager
    def on(self, stream: PaperStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def graph(self, graph: str, pool: tuple[int, int]) -> "nullcontext[None]":
        assert pool == (0, 1)
        self.calls.append("capture")
        return nullcontext()


def test_cuda_is_timed_around_the_work_and_waited_for_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PaperCuda(monkeypatch)
    running = CudaStream(torch.device("cuda:0")).launch(lambda: cuda.calls.append("work"))
    assert cuda.calls == ["record", "work", "record"]
    assert running.synchronize() == pytest.approx(0.002)
    assert cuda.calls[3:] == ["synchronize"]


def test_cuda_copies_beside_the_work_before_and_ahead_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of the copies waits for nothing; their work waits for them, within the time that it takes."""
    cuda = PaperCuda(monkeypatch)
    stream = CudaStream(torch.device("cuda:0"))
    stream.launch(lambda: cuda.call("work 1"), lambda: cuda.call("copy 1"))
    stream.launch(lambda: cuda.call("work 2"))
    stream.launch(lambda: cuda.call("work 3"), lambda: cuda.call("copy 3"))
    assert cuda.calls == [
        "copies: copy 1",
        "record",
        "wait for copies",
        "work 1",
        "record",
        "record",
        "work 2",
        "record",
        "copies: copy 3",
        "record",
        "wait for copies",
        "work 3",
        "record",
    ]


def test_only_on_a_gpu_work_runs_before_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    PaperCuda(monkeypatch)
    assert make_device_stream(torch.device("cuda:0"), captures=True).runs_ahead
    assert not make_device_stream(torch.device("cpu"), captures=False).runs_ahead
    assert not make_runner().runs_ahead, "a runner's threads follow from its stream"


def test_graphs_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PaperCuda(monkeypatch)
    stream = CudaStream(torch.device("cuda:0"))
    for _ in range(2):
        stream.capture(lambda: cuda.calls.append("work"))
    assert cuda.calls == ["capture", "work"] * 2


@pytest.mark.parametrize(
    ("kernels", "captures"), [("auto", True), ("triton", True), ("torch", False), ("reference", False)]
)
def test_kernels_that_ask_the_host_are_not_recorded(
    kernels: str, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    PaperCuda(monkeypatch)
    device = torch.device("cuda:0")
    assert make_device_stream(device, select_ops(device, torch.bfloat16, kernels).captures).captures is captures
