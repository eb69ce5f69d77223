import mmap
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels import reference, store_kv
from backend.kernels.ops import RotaryHeads
from backend.kernels.triton_lang import FP8, from_cache, to_cache
from backend.kernels.triton_ops import TritonOps
from tests.backend.kernels.ragged import Heads, ragged
from tests.interpreted.closeness import DTYPES, assert_close

SPANS = [(1, 37), (3, 3), (1, 1), (4, 33)]
EPS = 1e-5


def angles(positions: int, head_dim: int) -> Tensor:
    """Cosines and sines as a decoder's table holds them."""
    angle = torch.outer(torch.arange(positions), 0.5 ** torch.arange(head_dim // 2))
    return torch.cat((angle.cos(), angle.sin()), dim=1)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "block_size"), [(Heads(6, 2, 64), 16), (Heads(3, 3, 80), 1), (Heads(9, 3, 18), 8)])
def test_rope_and_store_rotates_and_writes_its_slots_only(
    heads: Heads, block_size: int, normed: bool, dtype: torch.dtype
) -> None:
    case = ragged(SPANS, heads, block_size, dtype, stored=False)
    expected = ragged(SPANS, heads, block_size, dtype, stored=False)
    qkv = case.normal(9, (heads.queries + 2 * heads.keys) * heads.dim)
    norms = (case.normal(heads.dim), case.normal(heads.dim).square()) if normed else (None, None)
    common = (qkv, RotaryHeads(heads.queries, heads.keys, angles(40, heads.dim), *norms, EPS))
    q = TritonOps().rope_and_store(*common, case.k_cache, case.v_cache, case.step)
    assert_close(q, reference.rope_and_store(*common, expected.k_cache, expected.v_cache, case.step))
    assert_close(case.pool, expected.pool)


def test_programs_of_several_tokens_rotate_and_store_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_kv, "MOST_SINGLE_TOKENS", 0)
    for heads, dtype in ((Heads(6, 2, 64), torch.float16), (Heads(3, 3, 80), torch.bfloat16)):
        test_rope_and_store_rotates_and_writes_its_slots_only(heads, 16, True, dtype)


@pytest.mark.parametrize("most_single_tokens", [1, 2])
def test_a_negative_slot_stores_nothing(most_single_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_kv, "MOST_SINGLE_TOKENS", most_single_tokens)
    case = ragged([(1, 5), (1, 7)], Heads(2, 1, 16), 4, stored=False)
    before = case.pool.clone()
    step = replace(case.step, slot_mapping=torch.tensor([-1, -1]))
    rotation = RotaryHeads(2, 1, angles(8, 16), None, None, EPS)
    TritonOps().rope_and_store(torch.randn(2, 64), rotation, case.k_cache, case.v_cache, step)
    torch.testing.assert_close(case.pool, before, equal_nan=True, rtol=0, atol=0)


def test_a_slot_beyond_2_to_the_31_elements_is_written() -> None:
    case = ragged([(1, 5)], Heads(1, 1, 16), 4)
    stride = 2**30 + 64
    memory = mmap.mmap(-1, (2 * stride + 2**20) * 2)
    far = torch.frombuffer(memory, dtype=torch.float16).as_strided((3, 2, 1, 4, 16), (stride, 64, 64, 16, 1))
    step = replace(case.step, slot_mapping=torch.tensor([2 * 4 + 1]))
    qkv = torch.randn(1, 48).half()
    TritonOps().rope_and_store(qkv, RotaryHeads(1, 1, angles(8, 16), None, None, EPS), far[:, 0], far[:, 1], step)
    assert torch.equal(far[2, 1, 0, 1], qkv[0, 32:])


@triton.jit
def _through_cache(stored, loaded, x, scale, N: tl.constexpr):  # noqa: N803
    places = tl.arange(0, N)
    cached = to_cache(tl.load(x + places), scale, stored.dtype.element_ty)
    tl.store(stored + places, cached)
    tl.store(loaded + places, from_cache(cached, loaded.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_e4m3_number_is_read_from_its_bits(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(FP8).float()
    numbers = numbers[numbers.isfinite()].repeat(2)[:256]
    stored, loaded = torch.empty(256, dtype=torch.uint8), torch.empty(256, dtype=dtype)
    _through_cache[(1,)](stored, loaded, numbers, 1.0, N=256)
    assert torch.equal(loaded.float(), numbers)
    assert torch.equal(stored, numbers.to(FP8).view(torch.uint8))


def test_numbers_are_stored_in_8_bits_as_torch_rounds_them_and_saturate() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 4096)
    stored, loaded = torch.empty(4096, dtype=torch.uint8), torch.empty(4096, dtype=torch.float16)
    _through_cache[(1,)](stored, loaded, x, 0.5, N=4096)
    assert torch.equal(loaded.float(), (x / 2).clamp(-448, 448).to(FP8).float())


def test_the_step_is_stored_in_8_bits() -> None:
    case = ragged(SPANS, Heads(2, 1, 16), 4, torch.bfloat16)
    k, v = torch.zeros_like(case.k_cache, dtype=FP8), torch.zeros_like(case.v_cache, dtype=FP8)
    common = (case.normal(9, 64), RotaryHeads(2, 1, angles(40, 16), None, None, EPS))
    TritonOps((0.5, 4.0)).rope_and_store(*common, k, v, case.step)
    reference.rope_and_store(*common, case.k_cache, case.v_cache, case.step)
    block, offset = case.step.slot_mapping // 4, case.step.slot_mapping % 4
    for found, wide, scale, tolerance in ((k, case.k_cache, 0.5, 2**-3), (v, case.v_cache, 4.0, 0)):
        expected = (wide[block, :, offset].float() / scale).to(FP8).float()
        torch.testing.assert_close(found.float()[block, :, offset], expected, rtol=tolerance, atol=0)
