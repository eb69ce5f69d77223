import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from backend.errors import ConfigError
from backend.kernels import cpu, reference
from backend.kernels.cpu import CpuOps, select_ops
from backend.kernels.ops import Ops, RotaryHeads, StepInputs
from backend.kernels.reference import ReferenceOps
from backend.kernels.torch_ops import TorchOps
from tests.backend.kernels.closeness import (
    ROWWISE,
    assert_within,
    check_bitmask,
    check_extremes,
    check_residual,
    rowwise_results,
)
from tests.backend.kernels.ragged import Heads, Ragged, ragged

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
EPS = 1e-5
DECODES = ((1, 1), (1, 16), (1, 65), (1, 130))
PREFILLS = ((1, 1), (17, 17), (64, 64), (130, 131))
HEADS = (Heads(6, 3, 32), Heads(6, 2, 64), Heads(8, 1, 64), Heads(4, 4, 128), Heads(9, 3, 80))
CHUNKS = (1, 2, 3, 5, 16, 33, 96)
MIXED = ((1, 77), (3, 3), (1, 1), (40, 133), (1, 300), (2, 64), (65, 200))
Spans = tuple[tuple[int, int], ...]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert_within(TOLERANCE, found, expected)


def attended(ops: Ops, spans: Spans, window: int | None, dtype: torch.dtype) -> Tensor:
    case = ragged(spans, Heads(6, 2, 64), 16, dtype)
    q = case.normal(case.step.positions.numel(), 6, 64)
    return ops.paged_attention(q, case.k_cache, case.v_cache, case.step, 0.125, window)


@cache
def attended_by_the_reference(spans: Spans, window: int | None, dtype: torch.dtype) -> Tensor:
    return attended(ReferenceOps(), spans, window, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7, 64, 100])
@pytest.mark.parametrize("spans", [DECODES, PREFILLS, MIXED])
@pytest.mark.usefixtures("_threads")
def test_attention_is_the_references(ops: Ops, spans: Spans, window: int | None, dtype: torch.dtype) -> None:
    assert_close(attended(ops, spans, window, dtype), attended_by_the_reference(spans, window, dtype))


@pytest.mark.parametrize(
    "heads", [Heads(1, 1, 32), Heads(9, 3, 80), Heads(5, 5, 96), Heads(7, 1, 128), Heads(8, 2, 24)]
)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 100])
def test_attention_takes_any_heads_and_block_size(ops: Ops, heads: Heads, block_size: int) -> None:
    case = ragged(MIXED, heads, block_size)
    q = case.normal(case.step.positions.numel(), heads.queries, heads.dim)
    arguments = (q, case.k_cache, case.v_cache, case.step, heads.dim**-0.5, None)
    assert_close(ops.paged_attention(*arguments), reference.paged_attention(*arguments))


def test_attention_with_one_overwhelming_key_returns_its_value(ops: Ops) -> None:
    case = ragged([(1, 200), (9, 150)], Heads(4, 2, 64), 16)
    target = case.step.block_tables[:, 1].long()
    case.k_cache[target, :, 0] = 100.0
    q = torch.full((10, 4, 64), 50.0)
    found = ops.paged_attention(q, case.k_cache, case.v_cache, case.step, 1.0, None)
    torch.testing.assert_close(found[0], case.v_cache[target[0], :, 0].repeat_interleave(2, 0))


@pytest.mark.parametrize("rows", [1, 5, 9])
def test_a_sequence_attends_alike_alone_and_among_others(native: CpuOps, rows: int) -> None:
    case = ragged([(rows, 140), (1, 33), (64, 70)], Heads(4, 2, 64), 16)
    q = case.normal(case.step.positions.numel(), 4, 64)
    together = native.paged_attention(q, case.k_cache, case.v_cache, case.step, 0.125, None)
    alone = ragged([(rows, 140)], Heads(4, 2, 64), 16)
    step = alone.step
    step.block_tables[0, :9] = case.step.block_tables[0, :9]
    found = native.paged_attention(q[:rows].clone(), case.k_cache, case.v_cache, step, 0.125, None)
    assert torch.equal(found, together[:rows])


def stored(ops: Ops, heads: Heads, block_size: int, normed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rotated queries, and the pool with the keys and values."""
    case = ragged(MIXED, heads, block_size, dtype, stored=False)
    qkv = case.normal(case.step.positions.numel(), (heads.queries + 2 * heads.keys) * heads.dim)
    norms = (case.normal(heads.dim), case.normal(heads.dim).square()) if normed else (None, None)
    rotation = RotaryHeads(heads.queries, heads.keys, case.normal(300, heads.dim).float(), *norms, EPS)
    return ops.rope_and_store(qkv, rotation, case.k_cache, case.v_cache, case.step), case.pool


@cache
def stored_by_the_reference(heads: Heads, block_size: int, normed: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return stored(ReferenceOps(), heads, block_size, normed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "block_size"), [(Heads(6, 2, 64), 16), (Heads(3, 3, 80), 1), (Heads(9, 3, 18), 8)])
@pytest.mark.usefixtures("_threads")
def test_rope_and_store_rotates_and_writes_its_slots_only(
    ops: Ops, heads: Heads, block_size: int, normed: bool, dtype: torch.dtype
) -> None:
    expected = stored_by_the_reference(heads, block_size, normed, dtype)
    for found, right in zip(stored(ops, heads, block_size, normed, dtype), expected, strict=True):
        assert_close(found, right)


def test_a_negative_slot_stores_nothing(ops: Ops) -> None:
    case = ragged([(3, 7)], Heads(4, 2, 16), 4, stored=False)
    before = case.pool.clone()
    case.step.slot_mapping[[0, 2]] = -1
    qkv = case.normal(3, 128)
    ops.rope_and_store(
        qkv, RotaryHeads(4, 2, torch.randn(8, 16), None, None, EPS), case.k_cache, case.v_cache, case.step
    )
    block, offset = divmod(int(case.step.slot_mapping[1]), 4)
    assert torch.equal(case.v_cache[block, :, offset], qkv[1].view(8, 16)[6:])
    case.pool[block, 1, :, :, offset] = before[block, 1, :, :, offset]
    torch.testing.assert_close(case.pool, before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 30, 64, 514])
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.usefixtures("_threads")
def test_rowwise_operations_are_the_references(ops: Ops, name: str, rows: int, size: int, dtype: torch.dtype) -> None:
    assert_close(*rowwise_results(name, ops, rows, size, dtype))


def test_add_rms_norm_leaves_the_sum_in_the_residual(ops: Ops) -> None:
    check_residual(ops)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_pass_through_the_activation_as_in_the_reference(ops: Ops, dtype: torch.dtype) -> None:
    check_extremes(ops, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_half_number_survives_the_kernels_storage_types(native: CpuOps, dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).short().view(torch.float16).float()
    x = numbers[numbers.isfinite()].to(dtype)
    zero = torch.zeros_like(x)
    residual = x.clone()
    native.add_rms_norm(zero, residual, torch.ones_like(x), EPS)
    assert torch.equal(residual, x)


# a row has the same bits in every batch, for every cut of a prompt, and by any number of threads


def bits(x: Tensor) -> Tensor:
    """Tells 0 from -0, as comparing numbers does not."""
    return x.view(torch.uint8)


def attend(ops: CpuOps, case: Ragged, q: Tensor, first: int, stop: int, window: int | None) -> Tensor:
    """Rows [first, stop) of the only sequence of `case`, as one step computes them."""
    step = StepInputs(
        token_ids=torch.zeros(stop - first, dtype=torch.int64),
        positions=case.step.positions[first:stop].clone(),
        slot_mapping=case.step.slot_mapping[first:stop].clone(),
        query_start=torch.tensor([0, stop - first], dtype=torch.int32),
        context_lens=torch.tensor([stop], dtype=torch.int32),
        block_tables=case.step.block_tables,
        num_seqs=1,
        max_query_len=stop - first,
        max_context_len=stop,
    )
    return ops.paged_attention(q[first:stop].clone(), case.k_cache, case.v_cache, step, q.shape[2] ** -0.5, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.usefixtures("one_thread")
def test_attention_of_a_token_is_the_same_in_a_prompt_a_chunk_and_a_decode(
    native: CpuOps, heads: Heads, dtype: torch.dtype
) -> None:
    generator = random.Random(heads.dim)
    for window in (None, 1, 50, 100):
        tokens = generator.randint(97, 300)
        case = ragged([(tokens, tokens)], heads, generator.choice((1, 4, 16, 32)), dtype)
        q = case.normal(tokens, heads.queries, heads.dim)
        whole = attend(native, case, q, 0, tokens, window)
        for size in (*CHUNKS, generator.randint(1, tokens)):
            chunks = [attend(native, case, q, n, min(n + size, tokens), window) for n in range(0, tokens, size)]
            assert torch.equal(bits(torch.cat(chunks)), bits(whole)), (window, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("one_thread")
def test_a_row_is_the_same_in_every_batch(native: CpuOps, dtype: torch.dtype) -> None:
    generator = random.Random(3)
    for inputs, outputs in ((96, 48), (70, 131), (512, 16), (1, 1), (333, 100)):
        weight, norm = torch.randn(outputs, inputs).to(dtype), torch.randn(inputs).to(dtype)
        rowwise: list[Callable[[Tensor], Tensor]] = [
            native.linear(weight, torch.randn(outputs).to(dtype)),
            native.linear(weight, None),
            lambda x, norm=norm: native.rms_norm(x, norm, EPS),
            lambda x, norm=norm: native.add_rms_norm(x, x.clone(), norm, EPS),
            lambda x: native.silu_mul(torch.cat((x, x), 1)),
        ]
        x = torch.randn(260, inputs).to(dtype)
        for body in rowwise:
            whole = bits(body(x))
            for size in (*CHUNKS, generator.randint(4, 260)):
                assert torch.equal(bits(torch.cat([body(part.clone()) for part in x.split(size)])), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("one_thread")
def test_threads_change_no_bit(native: CpuOps, dtype: torch.dtype) -> None:
    product, x = native.linear(torch.randn(600, 300).to(dtype), None), torch.randn(64, 300).to(dtype)
    case = ragged([(120, 200)], Heads(6, 2, 64), 16, dtype)
    q = case.normal(120, 6, 64)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        attended = native.paged_attention(q, case.k_cache, case.v_cache, case.step, 0.125, None)
        found.append((bits(product(x)), bits(native.silu_mul(product(x))), bits(attended)))
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (15, 7), (16, 64), (33, 200), (130, 96)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_a_product_is_exact_for_every_shape_of_its_panels_and_tiles(
    native: CpuOps, outputs: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight, x = (torch.randint(-3, 4, (n, inputs), generator=generator).to(dtype) for n in (outputs, 30))
    offset = torch.randint(-3, 4, (outputs,), generator=generator).to(dtype) if bias else None
    product = native.linear(weight, offset)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    for rows in range(31):
        found = product(x[:rows])
        assert found.dtype == dtype
        assert torch.equal(found, expected[:rows].to(dtype)), "small integers are exact"


def test_torchs_kernels_promise_nothing() -> None:
    assert not TorchOps().batch_invariant


# which kernels are chosen


@pytest.mark.parametrize(("kind", "expected"), [("torch", TorchOps), ("reference", ReferenceOps), ("native", CpuOps)])
def test_the_implementation_can_be_chosen(kind: str, expected: type, native: CpuOps) -> None:
    assert type(select_ops(CPU, torch.float32, kind)) is expected


def test_only_the_caller_chooses(monkeypatch: pytest.MonkeyPatch, native: CpuOps) -> None:
    """The gateway has read its environment: what a flag says has won over that."""
    monkeypatch.setenv("SLUICE_KERNELS", "reference")
    assert type(select_ops(CPU, torch.float32, "auto")) is CpuOps


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fast'"):
        select_ops(CPU, torch.float32, "fast")


@pytest.mark.parametrize(
    ("dtype", "kind", "kv_dtype"),
    [(torch.float64, "auto", None), (torch.float32, "torch", None), (torch.float32, "auto", torch.float8_e4m3fn)],
)
def test_rounded_weights_are_refused_where_no_compiled_kernels_multiply_them(
    dtype: torch.dtype, kind: str, kv_dtype: torch.dtype | None
) -> None:
    with pytest.raises(ConfigError, match="quantization int4 on a CPU is of compiled kernels"):
        select_ops(CPU, dtype, kind, kv_dtype, "int4")


@pytest.mark.parametrize("quantization", ["fp8", "stored"])
def test_what_only_a_gpu_packs_is_refused_on_a_cpu(quantization: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization {quantization} is of a GPU, and the device is cpu"):
        select_ops(CPU, torch.float32, "auto", None, quantization)


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8", "stored"])
@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "auto"), (torch.bfloat16, "torch")])
def test_a_gpu_packs_weights_of_products_in_16_bits_alone(dtype: torch.dtype, kind: str, quantization: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization {quantization} on a GPU is of Triton's kernels in 16 bits"):
        select_ops(torch.device("cuda"), dtype, kind, None, quantization)


def test_a_type_without_kernels_is_served_by_torch_and_refused_when_native_is_demanded() -> None:
    assert isinstance(select_ops(CPU, torch.float64), TorchOps)
    with pytest.raises(ConfigError, match="float64"):
        select_ops(CPU, torch.float64, "native")


def test_without_a_library_torch_serves_and_native_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.build, "load_library", lambda wait: None)
    assert isinstance(select_ops(CPU, torch.float32), TorchOps)
    with pytest.raises(ConfigError, match="no compiled kernels"):
        select_ops(CPU, torch.float32, "native")


@pytest.mark.parametrize(("vocab", "words"), [(1, 1), (32, 1), (75, 3), (1000, 30), (64, 5), (70_001, 2188)])
@pytest.mark.usefixtures("_threads")
def test_masks_of_tokens_are_the_references(ops: Ops, vocab: int, words: int) -> None:
    check_bitmask(ops, vocab, words)


def test_a_mask_allows_the_tokens_whose_bits_are_set(ops: Ops) -> None:
    logits, words = torch.zeros(1, 40), torch.zeros(1, 2, dtype=torch.int32)
    words[0, 0], words[0, 1] = -(2**31) | 5, 1 << 7
    ops.apply_token_bitmask(logits, words, torch.zeros(1, dtype=torch.int32))
    assert logits[0].isfinite().nonzero().flatten().tolist() == [0, 2, 31, 39]
