"""A row has the same bits whatever is computed beside it, however a prompt is cut, and by any number of threads."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backend.kernels.cpu import CpuOps
from backend.kernels.ops import StepInputs
from backend.kernels.torch_ops import TorchOps
from tests.backend.kernels.ragged import Heads, Ragged, ragged

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = (Heads(6, 3, 32), Heads(6, 2, 64), Heads(8, 1, 64), Heads(4, 4, 128), Heads(9, 3, 80))
CHUNKS = (1, 2, 3, 5, 16, 33, 96)
EPS = 1e-6


pytestmark = pytest.mark.usefixtures("one_thread")


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
