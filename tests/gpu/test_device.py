"""What only a GPU can show of the runner: memory that comes back, pinned memory, graphs, a step too large for it."""

import gc
from collections.abc import Iterator

import pytest
import torch

from backend.config import EngineOptions
from backend.errors import MemoryExhausted
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch
from backend.worker.model_runner import ModelRunner
from tests.backend.runners import generate

pytest.importorskip("triton")
pytest.importorskip("labs")

from labs.benchmarks.gpu_check import models

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
OPTIONS = EngineOptions(
    max_num_seqs=8, max_model_len=256, max_num_batched_tokens=128, kv_memory_bytes=2**24, swap_space_bytes=2**22
)
PROMPTS = [[(31 * n + 7 * k) % 600 for k in range(3 + 11 * n)] for n in range(8)]
SAMPLING = [SamplingParams(temperature=0.8 * (n % 2), max_tokens=24, ignore_eos=True) for n in range(8)]


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    with torch.inference_mode():
        yield models.random_runner(models.TINY, OPTIONS, DEVICE)


def test_a_runner_that_is_let_go_gives_all_its_memory_back_at_once() -> None:
    models.random_runner(models.TINY, OPTIONS, DEVICE)  # what libraries keep is theirs from now on
    gc.collect()
    before = torch.cuda.memory_allocated(DEVICE)
    gc.disable()
    try:
        generate(models.random_runner(models.TINY, OPTIONS, DEVICE), PROMPTS, SAMPLING)
        assert torch.cuda.memory_allocated(DEVICE) <= before
    finally:
        gc.enable()


def test_graphs_compute_what_is_launched_without_them(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.graphs is not None
    recorded = generate(runner, PROMPTS, SAMPLING)
    monkeypatch.setattr(models.FALLBACK, "has_graphs", False)
    plain = models.random_runner(models.TINY, OPTIONS, DEVICE)
    assert plain.graphs is None
    launched = generate(plain, PROMPTS, SAMPLING)
    assert sum(a == b for a, b in zip(recorded, launched, strict=True)) >= 7, "all but one at a near tie, in 16 bits"


def test_blocks_go_to_pinned_memory_of_their_size_and_come_back_as_they_were(runner: ModelRunner) -> None:
    swapper = runner.swapper
    assert swapper is not None
    assert swapper._host.is_pinned()
    assert swapper._host.nbytes <= 2**22
    runner.kv.blocks.normal_()
    before = runner.kv.blocks[:4].clone()
    swapper.copy(Batch(0, swap_out=[(n, n) for n in range(4)]))
    torch.cuda.synchronize()
    runner.kv.blocks[:4] = torch.nan
    torch.cuda.synchronize()
    swapper.copy(Batch(1, swap_in=[(n, n) for n in range(4)]))
    torch.cuda.synchronize()
    assert torch.equal(runner.kv.blocks[:4], before)


def test_a_step_without_memory_is_told_and_the_next_one_runs(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(runner, PROMPTS, SAMPLING)
    receive = runner._receive

    def too_much(*_: object) -> None:
        torch.empty(2**50, dtype=torch.uint8, device=DEVICE)

    monkeypatch.setattr(runner, "_receive", too_much)
    with pytest.raises(MemoryExhausted):
        runner.launch(Batch(0, 0, [0], [0], [1], [1], [0], [(0, 0, [0])], []))
    monkeypatch.setattr(runner, "_receive", receive)
    assert generate(runner, PROMPTS, SAMPLING) == expected
