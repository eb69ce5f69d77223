from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from backend.kernels.cpu import CpuOps
from backend.kernels.linear import MIN_TILED_OUTPUTS
from backend.kernels.native import NativeLayers, PackedLinear
from backend.kernels.ops import DecoderLayer, DecoderStack
from backend.kernels.reference import one_by_one
from backend.model.decoder import Decoder
from backend.model.weights import random_weights
from tests.backend.paged_batch import PagedBatch
from tests.backend.runners import MODEL

SHAPE = replace(MODEL, head_dim=32, max_position=256)
PROMPTS = [[7, 9, 2, 30, 11, 8, 1, 4], [3], [5] * 40]
STEPS = ({0: 5, 2: 33}, {0: 3, 1: 1, 2: 7}, {0: 1, 1: 1}, {1: 1, 2: 1})

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def computed(native: CpuOps, dtype: torch.dtype) -> list[Tensor]:
    """The logits of some steps, then the whole KV pool, each as bits."""
    decoder = Decoder(SHAPE, random_weights(SHAPE, dtype, seed=3), native, SHAPE.max_position)
    batch = PagedBatch(decoder, PROMPTS)
    found = []
    for rows in STEPS:
        found.append(batch.step(rows))
        for s in rows:
            batch.tokens[s].append(6)
    return [x.contiguous().view(torch.uint8) for x in (*found, batch.kv.blocks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("_threads")
def test_all_layers_at_once_are_the_operations_one_by_one_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, native: CpuOps, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("backend.kernels.cpu.packs", lambda dtype: False)
    at_once = computed(native, dtype)
    monkeypatch.setattr(CpuOps, "fuse", lambda self, stack: one_by_one(stack))
    for fused, expected in zip(at_once, computed(native, dtype), strict=True):
        assert torch.equal(fused, expected)


def stack_of(native: CpuOps, dtype: torch.dtype, head_dim: int = 32) -> DecoderStack:
    def linear(outputs: int, inputs: int) -> object:
        return native.linear(torch.zeros(outputs, inputs, dtype=dtype), None)

    norm = torch.ones(64, dtype=dtype)
    products = (linear(4 * head_dim, 64), linear(64, 2 * head_dim), linear(96, 64), linear(64, 48))
    qkv, output, gate_up, down = products
    turns = torch.zeros(9, head_dim)
    layer = DecoderLayer(norm, qkv, None, None, output, None, norm, (gate_up, down), None, None, turns)  # type: ignore[arg-type]
    return DecoderStack([layer], norm, 1e-5, 2, 1, head_dim, head_dim**-0.5, gelu=False)


def test_layers_are_at_once_where_each_product_is_the_librarys(native: CpuOps) -> None:
    assert isinstance(native.fuse(stack_of(native, torch.float32)), NativeLayers)


def test_layers_are_one_by_one_where_a_product_or_attention_is_another(native: CpuOps) -> None:
    assert native.fuse(stack_of(native, torch.float16)) is None
    assert native.fuse(stack_of(native, torch.float32, head_dim=6)) is None


@pytest.mark.parametrize("multiplies", [True, False])
def test_products_in_bfloat16_are_the_librarys_unless_the_processor_multiplies_in_it(
    native: CpuOps, monkeypatch: pytest.MonkeyPatch, multiplies: bool
) -> None:
    """Without such instructions oneDNN takes two to five times as long, and adds in an order of the batch's."""
    monkeypatch.setattr("backend.kernels.build.multiplies_in_bfloat16", lambda: multiplies)
    monkeypatch.setattr("backend.kernels.cpu.packs", lambda dtype: True)
    monkeypatch.setattr("backend.kernels.cpu.TiledLinear", lambda weight, bias: SimpleNamespace(batch_invariant=True))
    product = native.linear(torch.zeros(MIN_TILED_OUTPUTS, 16, dtype=torch.bfloat16), None)
    assert isinstance(product, PackedLinear) is not multiplies
    assert isinstance(native.linear(torch.zeros(1, 16, dtype=torch.bfloat16), None), PackedLinear)


def test_a_product_refuses_what_it_would_misread(native: CpuOps) -> None:
    product = native.linear(torch.zeros(8, 16), None)
    assert isinstance(product, PackedLinear)
    with pytest.raises(AssertionError):
        product(torch.zeros(16, 2).T)
    with pytest.raises(AssertionError):
        product(torch.zeros(2, 16).bfloat16())
