import pytest
import torch

from backend.errors import ConfigError
from backend.sizing import EngineOptions, size_engine
from benchmarks.model_shapes import LLAMA_3_8B


def test_a_size_below_one_block_is_answered_with_what_would_do() -> None:
    said = r"less than one block of 16 tokens \(2\.00 MiB\): 1\.00 GiB hold one sequence of 8,192 tokens.*such as 2GiB"
    with pytest.raises(ConfigError, match=said):
        size_engine(EngineOptions(kv_memory_bytes=2), LLAMA_3_8B, torch.bfloat16, 2**40)
