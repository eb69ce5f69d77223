"""Blocks are multiplied out to the bit as ggml's description says."""

from pathlib import Path

import numpy as np
import pytest
import torch

from backend.gguf import quants
from backend.gguf.quants import dequantised
from backend.gguf.reader import GgufFile
from tests.backend.gguf.files import gguf, random_blocks, save
from tests.backend.gguf.reference import KINDS, numbers


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_multiplied_out(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quants, "NUMBERS_AT_ONCE", 768)  # several parts, the last one shorter
    blocks = random_blocks(kind, (7, 512), seed=len(kind))
    with GgufFile(save(tmp_path / "one.gguf", gguf({}, {"a": ((7, 512), kind, blocks)}))) as file:
        found = dequantised(file, file.tensors["a"])
    assert found.dtype == torch.float32 and found.shape == (7, 512)
    np.testing.assert_array_equal(found.numpy().ravel().view(np.uint32), numbers(kind, blocks).view(np.uint32))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_numbers_are_taken_as_they_are(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    data = tensor.view(torch.uint8).numpy().tobytes()
    with GgufFile(save(tmp_path / "one.gguf", gguf({}, {"a": ((3, 5), kind, data)}))) as file:
        found = dequantised(file, file.tensors["a"])
    assert found.dtype == dtype and torch.equal(found, tensor)
