"""Lanes: work in the order of its launches, and CUDA's calls in the order that makes them true, on a CUDA on paper."""

from contextlib import nullcontext

import pytest
import torch

from backend import device_memory
from backend.device_memory import measured_memory
from backend.lane import CpuLane, CudaLane
from tests.backend.runners import make_runner


def test_on_a_cpu_waiting_is_doing() -> None:
    lane, done = CpuLane(), []
    running = [lane.launch(lambda n=n: done.append(n)) for n in range(3)]  # type: ignore[misc]
    assert done == []
    times = [step.wait() for step in running]
    assert done == [0, 1, 2]
    assert all(seconds >= 0 for seconds in times)


class PaperCuda:
    """Writes down what is asked of CUDA. An event stands at the number of calls before it, as milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        outer = self

        class Event:
            def __init__(self, enable_timing: bool, blocking: bool) -> None:
                assert enable_timing and blocking

            def record(self) -> None:
                outer.calls.append("record")
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

    def graph(self, graph: str, pool: tuple[int, int]) -> "nullcontext[None]":
        assert pool == (0, 1)
        self.calls.append("capture")
        return nullcontext()


def test_cuda_is_timed_around_the_work_and_waited_for_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PaperCuda(monkeypatch)
    running = CudaLane(torch.device("cuda:0")).launch(lambda: cuda.calls.append("work"))
    assert cuda.calls == ["record", "work", "record"]
    assert running.wait() == pytest.approx(0.002)
    assert cuda.calls[3:] == ["synchronize"]


def test_graphs_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PaperCuda(monkeypatch)
    lane = CudaLane(torch.device("cuda:0"))
    for _ in range(2):
        lane.capture(lambda: cuda.calls.append("work"))
    assert cuda.calls == ["capture", "work"] * 2


def test_memory_is_measured_around_a_step_with_nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def told(name: str, result: object) -> None:
        def call(*_: object) -> object:
            calls.append(name)
            return result

        monkeypatch.setattr(torch.cuda, name, call)

    told("synchronize", None)
    told("reset_peak_memory_stats", None)
    told("memory_allocated", 1000)
    told("max_memory_allocated", 1700)
    told("empty_cache", None)
    told("mem_get_info", (5 * device_memory.RUNTIME_BYTES, 6 * device_memory.RUNTIME_BYTES))
    decoder, cpu = make_runner().decoder, torch.device("cpu")
    memory = measured_memory(decoder, cpu, weights=500, tokens=20, seqs=3, block_size=4)
    assert memory.activations == 700
    assert memory.kv_bytes == 4 * device_memory.RUNTIME_BYTES - 700 - memory.slots
    assert calls.index("reset_peak_memory_stats") < calls.index("max_memory_allocated") < calls.index("empty_cache")
    assert calls[-1] == "mem_get_info"
