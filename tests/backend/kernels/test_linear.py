import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend.kernels import linear as linears
from backend.kernels import reference
from backend.kernels.linear import HEIGHTS, TiledLinear, best_linear, packs, tiles
from tests.backend.families import save_checkpoint

ROOT = Path(__file__).parents[3]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("one_thread")

SERVE = """
import random
import sys

from backend import LLM, SamplingParams
from backend.config import EngineOptions

llm = LLM(sys.argv[1], EngineOptions(max_num_seqs=8, max_num_batched_tokens=128), dtype="float32", kernels="torch")
print("loaded", flush=True)
rng = random.Random(0)
prompts = [[rng.randrange(131) for _ in range(rng.randint(1, 90))] for _ in range(40)]
sampling = [SamplingParams(temperature=0, max_tokens=rng.randint(1, 20), ignore_eos=True) for _ in prompts]
llm.generate(prompts, sampling, progress=False)
print("served", flush=True)
"""

needs_onednn = pytest.mark.skipif(not packs(torch.float32), reason="oneDNN's packed products are not there")


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
def test_tiles_of_onednn_compute_what_one_product_does(bias: bool) -> None:
    weight, x = torch.randn(50, 40), torch.randn(1300, 40)
    product = TiledLinear(weight, torch.randn(50) if bias else None)
    whole = product(x)
    assert product.batch_invariant
    for rows in (0, 1, 7, 17, 19, 64, 65, 95, 97, 511, 513, 1300):
        assert torch.equal(product(x[:rows]), whole[:rows])


@needs_onednn
def test_no_call_asks_onednn_for_rows_that_it_has_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_agreeing", {})
    made = linears.packed_linear
    asked: list[int] = []

    def counted(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        product = made(weight, bias)
        return lambda x: (asked.append(x.shape[0]), product(x))[1]

    monkeypatch.setattr(linears, "packed_linear", counted)
    product = TiledLinear(torch.randn(20, 10), None)
    compiled = set(asked)
    for rows in range(1, 700):
        product(torch.randn(rows, 10))
    assert compiled == set(asked) == set(HEIGHTS)


@needs_onednn
def test_an_engine_compiles_no_product_once_it_is_loaded(tmp_path: Path) -> None:
    checkpoint = save_checkpoint("llama2", tmp_path)
    environ = os.environ | {"ONEDNN_VERBOSE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SERVE, str(checkpoint)]
    said = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loading, _, serving = said.partition("loaded\n")
    assert serving.endswith("served\n")
    assert "create:cache_miss" in loading
    assert "create:cache_hit" in serving
    assert "create:cache_miss" not in serving


@needs_onednn
@pytest.mark.parametrize(("varying", "kept"), [({1, 2, 40}, True), (set(HEIGHTS[:-1]), False)])
def test_heights_that_add_in_another_order_are_not_used_if_that_leaves_low_ones(
    monkeypatch: pytest.MonkeyPatch, varying: set[int], kept: bool
) -> None:
    monkeypatch.setattr(linears, "_agreeing", {})
    monkeypatch.setattr(linears, "packed_linear", lambda weight, bias: lambda x: x @ weight.T + (len(x) in varying))
    product = TiledLinear(torch.ones(3, 1), None)
    assert product.batch_invariant is kept
    assert (not varying & set(product.heights)) is kept


@needs_onednn
def test_a_row_by_itself_that_seldom_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "_agreeing", {})
    monkeypatch.setattr(linears, "packed_linear", lambda weight, bias: lambda x: x + (len(x) == 1) * (x > 4))
    product = TiledLinear(torch.eye(3, dtype=torch.bfloat16), None)
    assert product.batch_invariant
    assert product.heights == HEIGHTS[1:]


@needs_onednn
def test_a_large_vocabulary_has_low_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "TILE_BYTES", 16 * 63 * 4)
    weight, x = torch.randn(63, 2), torch.randn(100, 2)
    product = TiledLinear(weight, None)
    assert product.heights[-1] == 16
    torch.testing.assert_close(product(x), x @ weight.T)


def test_tiles_hold_all_rows_with_little_padding() -> None:
    for rows in range(1, 2000):
        found = tiles(rows, HEIGHTS)
        assert 0 <= sum(found) - rows <= 3
        assert len(found) <= 6 + rows // 512


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_linear_is_the_product_by_every_implementation(dtype: torch.dtype, bias: bool, rows: int) -> None:
    weight = torch.randn(48, 96).to(dtype)
    offset = torch.randn(48).to(dtype) if bias else None
    x = torch.randn(rows, 96).to(dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    for linear in (best_linear(weight, offset), reference.linear(weight, offset)):
        found = linear(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=0.2, rtol=2e-2)


def test_linear_falls_back_when_the_private_operators_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    packs.cache_clear()
    try:
        weight, x = torch.randn(8, 16), torch.randn(3, 16)
        torch.testing.assert_close(best_linear(weight, None)(x), x @ weight.T)
        assert not packs(torch.float32)
    finally:
        packs.cache_clear()
