import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.kernels import paged_decode, paged_prefill, reference, triton_lang
from backend.kernels.ops import StepInputs
from backend.kernels.triton_ops import TritonOps
from tests.backend.kernels.ragged import Heads, Ragged, ragged
from tests.interpreted.closeness import DTYPES, assert_close

DECODES = [(1, 1), (1, 16), (1, 65), (1, 150)]
PREFILLS = [(1, 1), (17, 17), (9, 70), (33, 34)]
MIXED = [(1, 77), (1, 3), (3, 3), (20, 53), (1, 40), (2, 64)]


def compared(
    case: Ragged, window: int | None = None, num_decodes: int = 0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the kernels and the reference make of random queries."""
    heads = case.heads
    q = case.normal(case.step.positions.numel(), heads.queries, heads.dim)
    step = replace(case.step, num_decodes=num_decodes)
    arguments = (q, case.k_cache, case.v_cache, step, heads.dim**-0.5, window, sinks)
    return TritonOps().paged_attention(*arguments), reference.paged_attention(*arguments)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("spans", [DECODES, PREFILLS])
def test_attention_is_the_references(spans: list[tuple[int, int]], window: int | None, dtype: torch.dtype) -> None:
    assert_close(*compared(ragged(spans, Heads(6, 2, 64), 16, dtype), window))


@pytest.mark.nightly
@pytest.mark.parametrize("heads", [Heads(3, 3, 80), Heads(7, 1, 96), Heads(2, 2, 24), Heads(5, 1, 256)])
@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_attention_takes_any_heads_and_block_size(heads: Heads, block_size: int) -> None:
    assert_close(*compared(ragged([(1, 40), (1, 90), (9, 33)], heads, block_size), num_decodes=2))


@pytest.mark.parametrize(
    "num_decodes", [pytest.param(0, marks=pytest.mark.nightly), pytest.param(1, marks=pytest.mark.nightly), 2]
)
def test_leading_decodes_and_the_sequences_after_them_share_a_step(num_decodes: int) -> None:
    assert_close(*compared(ragged(MIXED, Heads(4, 2, 64), 16), 30, num_decodes))


@pytest.mark.parametrize(("num_decodes", "window"), [(0, None), (2, 30)])
def test_padding_of_both_parts_changes_nothing(num_decodes: int, window: int | None) -> None:
    """Prompts' rows begin where the decodes' end, and most of them lie within the places that decodes might have."""
    spans = [*MIXED[:num_decodes], (3, 3), (20, 25), (7, 64)]
    case = ragged(spans, Heads(4, 2, 64), 16)
    q = case.normal(case.step.positions.numel() + 9, 4, 64)
    step = padded(case.step, num_decodes, places=12 if num_decodes else 0, prompts=3)
    arguments = (case.k_cache, case.v_cache), (64**-0.5, window)
    found = TritonOps().paged_attention(q, *arguments[0], step, *arguments[1])
    expected = reference.paged_attention(q, *arguments[0], case.step, *arguments[1])
    assert_close(found[: len(q) - 9], expected[: len(q) - 9])


def padded(step: StepInputs, num_decodes: int, places: int, prompts: int) -> StepInputs:
    """`step` with `places` for decodes, `prompts` for prompts, and tables of block 0 for the rest."""
    sequences = [*range(num_decodes), *range(places, places + step.num_seqs - num_decodes)]
    counts, contexts = torch.zeros(2, places + prompts, dtype=torch.int32)
    counts[sequences], contexts[sequences] = step.query_start.diff(), step.context_lens
    tables = torch.zeros((places + prompts, step.block_tables.shape[1]), dtype=torch.int32)
    tables[sequences] = step.block_tables
    return replace(
        step,
        query_start=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        context_lens=contexts,
        block_tables=tables,
        num_seqs=places + prompts,
        num_decodes=places,
    )


def test_the_launch_of_a_padded_step_depends_on_its_places_and_rows_alone(recorded: list[tuple[int, ...]]) -> None:
    for spans, num_decodes in (([(1, 1), (2, 2)], 1), ([(1, 40), (1, 30), (11, 50), (5, 5)], 2)):
        case = ragged(spans, Heads(2, 1, 16), 16)
        step = padded(case.step, num_decodes, places=4, prompts=5)
        q = case.normal(20, 2, 16)
        TritonOps().paged_attention(q, case.k_cache, case.v_cache, step, 0.25, None)
    assert recorded[:3] == recorded[3:]


def test_more_sequences_than_one_scan_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paged_decode, paged_prefill):
        monkeypatch.setattr(module, "SCAN", triton_lang.tl.constexpr(2))
    spans = [(1, 1 + 11 * s % 40) for s in range(5)]
    assert_close(*compared(ragged(spans, Heads(1, 1, 16), 8)))
    assert_close(*compared(ragged([*spans, (5, 6)], Heads(1, 1, 16), 8)))


@pytest.mark.nightly  # by day with a sink
def test_a_long_context_is_split_and_joined_again() -> None:
    found, expected = compared(ragged([(1, 2900), (1, 5)], Heads(2, 1, 16), 16))
    assert_close(found, expected)


@pytest.mark.parametrize("spans", [[(1, 2900), (1, 5)], [(1, 40), (9, 33)]])
def test_a_sink_is_one_more_score_of_a_head(spans: list[tuple[int, int]]) -> None:
    """Counted once, where a context is split as well."""
    sinks = torch.tensor([3.0, -2.0, 0.5, 1.0])
    found, expected = compared(ragged(spans, Heads(4, 2, 16), 16), window=2000, num_decodes=1, sinks=sinks)
    assert_close(found, expected)


def test_a_row_without_context_gives_zeros() -> None:
    case = ragged(DECODES[:3], Heads(4, 2, 64), 16)
    case.step.context_lens[1] = 0
    found, expected = compared(case)
    assert_close(found[2:], expected[2:])
    assert not found[1].any()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grids of attention, instead of its launches."""
    launches: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: launches.append(grid)

    for module, name in ((paged_decode, "_decode"), (paged_decode, "_join"), (paged_prefill, "_prefill")):
        monkeypatch.setattr(module, name, Recorder())
    return launches


def test_the_launch_of_a_decode_depends_on_the_number_of_sequences_alone(recorded: list[tuple[int, ...]]) -> None:
    for context in (1, 5000):
        case = ragged([(1, context), (1, 3)], Heads(2, 1, 16), 16)
        q = case.normal(2, 2, 16)
        TritonOps().paged_attention(q, case.k_cache, case.v_cache, case.step, 0.25, None)
    assert recorded[:2] == recorded[2:]


def test_one_overwhelming_key_gives_its_value() -> None:
    case = ragged([(1, 100), (9, 50)], Heads(4, 2, 64), 16)
    target = case.step.block_tables[:, 1].long()
    case.k_cache[target, :, 0] = 100.0
    q = torch.full((10, 4, 64), 50.0)
    found = TritonOps().paged_attention(q, case.k_cache, case.v_cache, replace(case.step, num_decodes=1), 1.0, None)
    torch.testing.assert_close(found[0], case.v_cache[target[0], :, 0].repeat_interleave(2, 0))


@pytest.mark.parametrize("rows", [1, 5])
def test_blocks_beyond_2_to_the_31_elements_are_reached(rows: int) -> None:
    case = ragged([(rows, 40)], Heads(2, 1, 16), 16, torch.float16)
    stride = 2**30 // 3 * 2 + 32
    memory = mmap.mmap(-1, (3 * stride + 2**20) * 2)  # pages are taken when first written
    shape = (4, 2, 1, 16, 16)
    far = torch.frombuffer(memory, dtype=torch.float16).as_strided(shape, (stride, 256, 256, 16, 1))
    assert far.stride(0) * 3 > 2**31
    tables = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    for near, block in zip(case.step.block_tables[0].tolist(), tables[0].tolist(), strict=False):
        far[block, 0] = case.k_cache[near]
        far[block, 1] = case.v_cache[near]
    q = case.normal(rows, 2, 16)
    found = TritonOps().paged_attention(q, far[:, 0], far[:, 1], replace(case.step, block_tables=tables), 0.25, None)
    expected = reference.paged_attention(q, case.k_cache, case.v_cache, case.step, 0.25, None)
    assert_close(found, expected)


@pytest.mark.parametrize(("dtype", "capability"), [(torch.float16, (8, 0)), (torch.bfloat16, (9, 0))])
def test_an_8_bit_cache_is_scaled_back(
    dtype: torch.dtype, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_lang, "capability", lambda device: capability)
    case = ragged([(1, 40), (1, 9), (3, 20)], Heads(4, 2, 64), 16, dtype)
    q = case.normal(5, 4, 64)
    k_scale, v_scale = 0.5, 2.0
    k, v = (case.k_cache.nan_to_num() / k_scale).to(triton_lang.FP8), case.v_cache.nan_to_num().to(triton_lang.FP8)
    step = replace(case.step, num_decodes=2)
    found = TritonOps((k_scale, v_scale)).paged_attention(q, k, v, step, 0.125, None)
    k, v = k.float() * k_scale, v.float() * v_scale
    expected = reference.paged_attention(q, k, v, step, 0.125, None)
    assert_close(found, expected)
