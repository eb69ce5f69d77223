"""A model that comes as a GGUF file writes what transformers writes with the same numbers."""

import os
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from backend import LLM, SamplingParams
from backend.errors import ConfigError, ModelLoadError
from backend.kernels import build
from backend.kernels.integers import StoredWeight, multiplied_out
from backend.model.hub import resolve_model
from backend.model.model_config import read_model_config
from backend.model.weights import checkpoint_names, load_weights
from backend.parallel.shard import Shard
from backend.sizing import EngineOptions
from tests.backend.families import likeliest, random_model
from tests.backend.gguf.files import (
    gguf,
    gguf_name,
    metadata_of,
    permuted,
    random_blocks,
    save,
    tensors_of,
    words,
)
from tests.backend.gguf.reference import KINDS, numbers

OPTIONS = EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=128, kv_memory_bytes=2**24)
PROMPTS = [[5, 17, 99, 4], [70, 71, 72, 73, 74, 75, 76, 77, 78], [120]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
READ = ["llama2", "llama-gqa-tied", "llama-one-kv-head-wide", "llama-biases", "llama3-scaling", "linear-scaling"]
READ += ["yarn-scaling", "mistral-no-window", "qwen2", "qwen3", "qwen3-biases-tied", "gemma3"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def library() -> CDLL | None:
    """The compiled kernels, from the cache that tests share."""
    return build.load_library(wait=True)


def save_model(path: Path, model: PreTrainedModel, **keys: Any) -> Path:
    return save(path, gguf(metadata_of(model) | words(model.config.vocab_size) | keys, tensors_of(model)))


def check_served(path: Path, model: PreTrainedModel, kernels: str = "torch") -> None:
    """The file's greedy answers are those of the model."""
    llm = LLM(str(path), OPTIONS, dtype="float32", kernels=kernels)
    found = [one.token_ids for one in llm.generate(PROMPTS, GREEDY, progress=False)]
    assert {len(one) for one in found} == {GREEDY.max_tokens}
    assert found == [likeliest(model, *each) for each in zip(PROMPTS, found, strict=True)]


@pytest.mark.parametrize("family", READ)
def test_greedy_texts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    check_served(save_model(tmp_path / "a.gguf", model), model)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_greedy_texts_of_quantised_weights_are_those_of_transformers(
    library: CDLL | None, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "native" and library is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(build, "load_library", lambda wait: library)
    shape: dict[str, Any] = dict(vocab_size=131, hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config).eval()
    tensors = tensors_of(model)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.dim() == 2:
                kind = KINDS[index % len(KINDS)]
                blocks = random_blocks(kind, tuple(parameter.shape), index)
                tensors[gguf_name(name)] = (tuple(parameter.shape), kind, blocks)
                multiplied = torch.from_numpy(numbers(kind, blocks)).view(parameter.shape)
                parameter.copy_(unpermuted(name, multiplied, model))
    assert {kind for _, kind, _ in tensors.values()} == {"F32", *KINDS}
    path = save(tmp_path / "a.gguf", gguf(metadata_of(model) | words(131), tensors))
    check_served(path, model, kernels)


def test_stored_weights_are_those_that_are_multiplied_out(tmp_path: Path) -> None:
    """Of a fused product all parts must be quantised; each keeps its rows' order, and takes the file's memory."""
    kinds = {"self_attn.q_proj": "Q4_K", "self_attn.k_proj": "Q4_K", "self_attn.v_proj": "Q6_K"}
    kinds |= {"mlp.gate_proj": "Q8_0", "mlp.down_proj": "Q4_0", "model.embed_tokens": "Q4_1"}
    directory = resolve_model(str(save(tmp_path / "a.gguf", mixed_file(kinds))))
    config = read_model_config(directory)
    plain = load_weights(directory, config, torch.bfloat16)
    kept = load_weights(directory, config, torch.bfloat16, keeps_integers=True)
    assert kept.num_parameters == plain.num_parameters and torch.equal(kept.embedding, plain.embedding)
    pairs = [(kept.lm_head, plain.lm_head)]
    for one, other in zip(kept.layers, plain.layers, strict=True):
        assert isinstance(one.gate_up, torch.Tensor) and isinstance(one.output, torch.Tensor)
        pairs += [(one.qkv, other.qkv), (one.down, other.down)]
    for stored, expected in pairs:
        assert isinstance(stored, StoredWeight) and stored.shape == tuple(expected.shape)
        assert torch.equal(multiplied_out(stored), multiplied_out(expected))


def test_stored_weights_that_are_damaged_are_refused_by_file_and_name(tmp_path: Path) -> None:
    scale = np.array([np.nan], np.float16).tobytes()
    path = save(tmp_path / "a.gguf", mixed_file({"mlp.down_proj": "Q4_0"}, damage=lambda data: scale + data[2:]))
    with pytest.raises(
        ModelLoadError, match=r"a\.gguf: model\.layers\.0\.mlp\.down_proj\.weight holds numbers from nan"
    ):
        LLM(str(path), OPTIONS, dtype="float32", kernels="torch")


def mixed_file(kinds: dict[str, str], damage: Callable[[bytes], bytes] = lambda data: data) -> bytes:
    """A tied Llama whose matrices are in blocks of these kinds, the rest in F32."""
    shape: dict[str, Any] = dict(vocab_size=131, hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    tensors = tensors_of(model)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        kind = next((kinds[part] for part in kinds if part in name), None)
        if kind is not None:
            blocks = random_blocks(kind, tuple(parameter.shape), index)
            tensors[gguf_name(name)] = (tuple(parameter.shape), kind, damage(blocks))
    return gguf(metadata_of(model) | words(131), tensors)


def unpermuted(name: str, tensor: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """The rows that `permuted` brings into this order."""
    order = permuted(name, torch.arange(len(tensor)).view(-1, 1), model).ravel()
    return tensor[torch.argsort(order)]


def test_a_rank_reads_its_part(tmp_path: Path) -> None:
    directory = resolve_model(str(save_model(tmp_path / "a.gguf", random_model("llama-biases"))))
    config = read_model_config(directory)
    whole = dict(checkpoint_names(config, load_weights(directory, config, torch.float32)))
    shard = Shard.of(config, 1, 2)
    part = load_weights(directory, config, torch.float32, shard=shard)
    for name, tensor in checkpoint_names(config, part, shard):
        slices = shard.slices(name, config)
        assert torch.equal(tensor, whole[name][slices] if slices else whole[name]), name


def test_the_folder_is_made_once_and_follows_the_file(tmp_path: Path, cache: Path) -> None:
    path = save_model(tmp_path / "tiny model.gguf", random_model("qwen2"))
    folder = resolve_model(str(path))
    assert folder.name == "tiny model" and folder.is_relative_to(cache)
    before = (folder / "config.json").stat()
    assert resolve_model(str(path)) == folder and (folder / "config.json").stat() == before
    save_model(path, random_model("qwen3"))
    os.utime(path, ns=(0, 0))
    other = resolve_model(str(path))
    assert other != folder and read_model_config(other).architecture == "Qwen3ForCausalLM"
    assert {one.name for one in cache.glob("gguf/*")} == {folder.parent.name, other.parent.name}, "no drafts are left"


def test_weights_are_read_through_a_link_that_is_called_otherwise(tmp_path: Path) -> None:
    model = random_model("qwen2")
    save_model(tmp_path / "sha256-5e1f", model)
    (tmp_path / "a.gguf").symlink_to("sha256-5e1f")
    check_served(tmp_path / "a.gguf", model)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"general.architecture": "gemma2"}, r"general\.architecture is 'gemma2'; one of llama"),
    "experts": ({"llama.expert_count": 8}, r"llama\.expert_count is 8; 0 is read"),
    "an unknown key": ({"llama.attention.sliding_window": 8}, r"llama\.attention\.sliding_window is 8; a key"),
    "partial rotation": ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8; the 16 numbers"),
    "no heads": ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count is 0; an integer of at least 1"),
    "heads of each layer": ({"llama.attention.head_count_kv": [2, 2, 2]}, r"head_count_kv is \[2, 2, 2\]; an integer"),
    "heads that do not divide": (
        {"llama.attention.head_count_kv": 4},
        r"a\.gguf, as config\.json: num_key_value_heads",
    ),
    "an odd scaling": ({"llama.rope.scaling.type": "longrope"}, r"scaling\.type is 'longrope'; none, linear or yarn"),
    "no epsilon": (
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        r"layer_norm_rms_epsilon is nan; a finite",
    ),
    "a part of a file": ({"split.count": 3}, r"split\.count: it is 3; merge the parts first"),
    "no template": ({"tokenizer.chat_template": 7}, r"tokenizer\.chat_template: a text is expected"),
    "layers without end": ({"llama.block_count": 2**31 - 1}, r"llama\.block_count is 2147483647; there are 29 tensors"),
    "fewer layers": ({"llama.block_count": 2}, r"a\.gguf holds model\.layers\.2\.input_layernorm\.weight, "),
    "more layers": ({"llama.block_count": 4}, r"a\.gguf lacks model\.layers\.3\.input_layernorm\.weight"),
}


def load(path: Path) -> None:
    directory = resolve_model(str(path))
    load_weights(directory, read_model_config(directory), torch.float32)


@pytest.mark.parametrize("change", CHANGES)
def test_a_gguf_model_that_would_compute_wrongly_is_refused(change: str, tmp_path: Path, cache: Path) -> None:
    keys, message = CHANGES[change]
    path = save_model(tmp_path / "a.gguf", random_model("llama-gqa-tied"), **keys)
    with pytest.raises(ModelLoadError, match=message) as refused:
        load(path)
    assert str(path) in str(refused.value)


def test_a_cache_without_a_home_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_CACHE_DIR", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 3)  # a user that the machine does not know
    path = save_model(tmp_path / "a.gguf", random_model("qwen2"))
    with pytest.raises(ConfigError, match="set SLUICE_CACHE_DIR"):
        resolve_model(str(path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, cache: Path) -> None:
    cache.touch()
    path = save_model(tmp_path / "a.gguf", random_model("qwen2"))
    with pytest.raises(ModelLoadError, match=r"a\.gguf: .*cannot be written .*SLUICE_CACHE_DIR"):
        resolve_model(str(path))
