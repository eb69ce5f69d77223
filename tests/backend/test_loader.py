"""Loading a model by its name: what is refused, and what the engine is told."""

from pathlib import Path

import pytest
import torch

from backend import loader
from backend.config import EngineOptions
from backend.errors import ConfigError
from backend.loader import load_model
from backend.model.hub import resolve_model


def test_no_memory_for_weights_ends_a_load_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loader, "load_weights", full)
    with pytest.raises(ConfigError, match="lower kv_memory_bytes"):
        load_model("embedded", EngineOptions(), device="cpu", kernels="torch")


def test_a_cpu_keeps_keys_and_values_in_8_bits_where_it_is_told_to() -> None:
    wide, narrow = (EngineOptions(kv_cache_dtype=kind, kv_memory_bytes=2**24) for kind in ("auto", "fp8"))
    model = load_model("embedded", narrow, device="cpu")
    same = load_model("embedded", wide, device="cpu", kernels="torch")
    assert model.runner.kv.dtype == torch.float8_e4m3fn
    assert model.engine_config.num_blocks >= 4 * same.engine_config.num_blocks
    assert model.kv_bytes <= 2**24
    with pytest.raises(ConfigError, match="kv_cache_dtype auto"):
        load_model("embedded", narrow, device="cpu", kernels="native")


def test_integers_can_stay_as_they_are_stored_in_a_file_that_has_some_alone() -> None:
    with pytest.raises(ConfigError, match="quantization stored is of GGUF files, and embedded is none"):
        load_model("embedded", EngineOptions(quantization="stored"), device="cpu")


def test_grammar_processes_find_the_tokenizer_though_the_program_has_gone_to_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to(resolve_model("embedded"))
    monkeypatch.chdir(tmp_path)
    masks = load_model("model", EngineOptions(max_num_seqs=1), device="cpu", kernels="torch").runner.masks
    monkeypatch.chdir("/")
    assert masks is not None
    assert Path(masks.processes.setup.tokenizer_path).is_file()
