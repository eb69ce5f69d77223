"""What the GPU check judges by, without a GPU: rates, floors, near ties and draws at a boundary."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from backend.kernels.ops import RowPenalties, RowSampling
from backend.llm import OfflineEngine
from backend.model.known_shapes import LLAMA_3_8B
from backend.paged_kv.block_names import BlockNames
from backend.roofline import Footprint, Peaks, Roofline
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.worker.sampler import SamplingBatch, sample, uniforms
from tests.backend.runners import CONFIG, make_runner

pytest.importorskip("triton")

from labs.benchmarks import kernels_gpu
from labs.benchmarks.gpu_check import agreement, correctness, models
from labs.benchmarks.gpu_check.agreement import Answer
from labs.benchmarks.gpu_check.floors import step_floor

CPU = torch.device("cpu")
H100 = Roofline(Footprint(LLAMA_3_8B, "bfloat16"), Peaks(3.0e12, 790e12, 53e12))


def decodes(count: int, context: int) -> Batch:
    every = list(range(count))
    return Batch(0, count, every, [context - 1] * count, [1] * count, [], every)


def prompt(start: int, length: int) -> Batch:
    return Batch(0, 0, [0], [start], [length], [1] * length, [0])


@pytest.mark.parametrize(("count", "milliseconds"), [(1, 5.05), (64, 7.9), (256, 16.5)])
def test_the_floor_of_decodes_is_what_they_read(count: int, milliseconds: float) -> None:
    assert step_floor(H100, decodes(count, 1024)) * 1e3 == pytest.approx(milliseconds, rel=0.02)
    assert step_floor(H100, decodes(count, 1024)) == pytest.approx(H100.decode(count, 1024), rel=0.01)


def test_the_floor_of_a_prompt_is_what_it_multiplies_and_a_chunk_has_its_context_too() -> None:
    assert step_floor(H100, prompt(0, 2048)) * 1e3 == pytest.approx(37, rel=0.05)
    assert step_floor(H100, prompt(0, 8192)) * 1e3 == pytest.approx(145 + 22 + 0.4, rel=0.05)
    late, early = step_floor(H100, prompt(30_720, 2048)), step_floor(H100, prompt(0, 2048))
    assert (late - early) * 1e3 == pytest.approx(4 * 32 * 4096 * 2048 * 30_720 / 790e9 + 1.34, rel=0.05)


def test_rates_are_measured_over_numbers_drawn_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of zeros runs 13 % faster than one of random numbers, and unwritten memory is often 0."""
    measured: list[torch.Tensor] = []

    def seconds(body: Callable[[], torch.Tensor], device: torch.device) -> float:
        measured.append(body())
        return 1.0

    monkeypatch.setattr(kernels_gpu, "best_seconds", seconds)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    kernels_gpu.peaks_of(CPU, torch.float32)
    assert all(len(result.unique()) > 200 for result in measured)
    assert len(measured) == 3  # two copies and a product


def test_answers_that_part_are_judged_where_they_first_do() -> None:
    expected = Answer([5, 6, 7, 8], [1.0, 1e-5, 1.0, 1e-5])
    assert agreement._parted(expected, [5, 6, 7, 8]) is None
    assert agreement._parted(expected, [5, 9, 1, 1]) == 1e-5
    assert agreement._parted(expected, [5, 6, 1, 8]) == 1.0


@pytest.mark.parametrize(("nudge", "wrong"), [(0.0, False), (4e-6, False), (-4e-6, False), (3e-3, True), (-3e-3, True)])
def test_a_draw_may_fall_on_either_side_of_a_boundary_and_no_further(
    nudge: float, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nudged:
        """A GPU that draws with other numbers than it should."""

        def sample(self, logits: torch.Tensor, rows: RowSampling, penalties: RowPenalties) -> torch.Tensor:
            numbers = torch.from_numpy(uniforms(rows.seeds.numpy(), rows.positions.numpy())) + nudge
            batch = SamplingBatch(rows.temperature, numbers.clamp(0, 1 - 2**-53), rows.min_p, rows.top_k.long())
            batch = replace(batch, top_p=rows.top_p.double(), penalties=correctness._penalties(len(rows.seeds), 1000))
            return sample(logits, batch)

    monkeypatch.setattr(correctness, "TritonOps", Nudged)
    assert bool(correctness._sampling(CPU, 1000)) is wrong


def test_blocks_that_were_given_up_are_read_by_nobody() -> None:
    config = replace(CONFIG, num_blocks=24, max_num_seqs=3, num_host_blocks=60)
    random = Random(0)
    prompts = [[random.randrange(97) for _ in range(20 + n)] for n in range(8)]

    def answers(poisons: bool) -> tuple[list[list[int]], int]:
        runner = make_runner(config=config)
        if poisons:
            models.poison_given_up(runner)
        scheduler, names = Scheduler(config, FirstComeFirstServed()), BlockNames(b"given up", 4)
        scheduler.name_blocks_by(names)
        engine, found = OfflineEngine(scheduler, runner), list[list[int]]()
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        for _ in range(2):
            sequences = [
                Sequence(PromptRequest(str(n), "", prompt, greedy, 8, n, frozenset()), float(n))
                for n, prompt in enumerate(prompts)
            ]
            for sequence in sequences:
                sequence.cache_root = names.root()
                names.name(sequence, sequence.num_prompt_tokens // 4)
                scheduler.add(sequence)
            while scheduler.has_work:
                engine.step()
            found += [sequence.output for sequence in sequences]
        return found, scheduler.counters.swapped_in

    plain, poisoned = answers(poisons=False), answers(poisons=True)
    assert poisoned == plain
    assert plain[1] > 0


@pytest.mark.nightly
def test_the_reference_parts_from_transformers_nowhere(tmp_path: Path) -> None:
    """What stands in for it where it is not installed."""
    pytest.importorskip("transformers")
    agreement.write_checkpoint(agreement.TINY, tmp_path, CPU)
    pairs = zip(
        agreement._by_transformers(tmp_path), agreement._answers(agreement._reference_runner(tmp_path)), strict=True
    )
    gaps = [(expected.gaps, agreement._parted(expected, found.tokens)) for expected, found in pairs]
    assert all(gap is None or gap < agreement.NEAR_TIE_LOGITS for _, gap in gaps)
    assert all(gap >= 0 for of_answer, _ in gaps for gap in of_answer)
