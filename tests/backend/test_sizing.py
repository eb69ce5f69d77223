from pathlib import Path

import pytest
import torch

from backend import sizing
from backend.config import EngineOptions
from backend.errors import ConfigError
from backend.model.known_shapes import LLAMA_3_8B
from backend.sizing import size_engine


def test_a_size_below_one_block_is_answered_with_what_would_do() -> None:
    said = r"less than one block of 16 tokens \(2\.00 MiB\): 1\.00 GiB hold one sequence of 8,192 tokens.*such as 2GiB"
    with pytest.raises(ConfigError, match=said):
        size_engine(EngineOptions(kv_memory_bytes=2), LLAMA_3_8B, torch.bfloat16, 2**40)


def test_pages_of_files_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "anon 1\ninactive_file 300000\nactive_file 50000\n"
    for name, text in {"max": "1000000", "current": "900000", "stat": stat}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(sizing, "CONTROL_GROUP", tmp_path)
    assert sizing.free_memory() == 450_000
    (tmp_path / "memory.max").write_text("max")
    assert sizing.free_memory() > 450_000
