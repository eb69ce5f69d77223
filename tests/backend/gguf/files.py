"""GGUF files, written by the tests themselves after ggml's description of the format."""

import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from backend.gguf.reader import FORMATS

TYPES = {stored.name: number for number, stored in FORMATS.items()}
Stored = tuple[tuple[int, ...], str, bytes]  # the shape as torch has it, the type, the blocks
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _typed(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _text(value)
        case [*items]:
            kind = 8 if not items else 5 if isinstance(items[0], int) else _typed(items[0])[0]
            parts = [struct.pack("<i", one) if kind == 5 else _typed(one)[1] for one in items]
            return 9, struct.pack("<IQ", kind, len(items)) + b"".join(parts)
    raise TypeError(value)


def entry(key: str, value: Any) -> bytes:
    kind, data = _typed(value)
    return _text(key) + struct.pack("<I", kind) + data


def gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], alignment: int = 32) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(entry(key, value) for key, value in metadata.items())
    data = b""
    for name, (shape, kind, blocks) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += _text(name) + dims + struct.pack("<IQ", TYPES[kind], len(data))
        data += blocks + bytes(-len(blocks) % alignment)
    return head + bytes(-len(head) % alignment) + data


def byte_letters() -> list[str]:
    """GPT-2's letter of each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def byte_level(merges: list[str], size: int = 0, /, **keys: Any) -> dict[str, Any]:
    """The metadata of a vocabulary of marks, bytes and merges, filled up to `size` with tokens that are not used."""
    tokens = MARKS + byte_letters() + [merge.replace(" ", "") for merge in merges]
    kinds = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    unused = [f"[PAD{index}]" for index in range(len(tokens), size)]
    said = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens + unused,
        "token_type": kinds + [5] * len(unused),
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (said | keys).items() if value is not None}


def words(size: int) -> dict[str, Any]:
    """The metadata of a vocabulary of `size` tokens that mean nothing."""
    tokens = [chr(0x4E00 + index) for index in range(size - 1)] + ["一一"]
    said = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * size, "merges": ["一 一"]}
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}


def stored(tensor: torch.Tensor) -> Stored:
    return tuple(tensor.shape), "F32", tensor.float().numpy().tobytes()


_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


_OF_GEMMA = _OF_LAYER | {
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, of_layer: Mapping[str, str] = _OF_LAYER) -> str:
    """The name that llama.cpp's converter gives to a tensor of a checkpoint."""
    name, _, kind = name.rpartition(".")
    if name in _WHOLE:
        return f"{_WHOLE[name]}.{kind}"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{of_layer[part]}.{kind}"


def permuted(name: str, tensor: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """The rows of queries and keys as ggml's rotation of neighbours has them, in files of `llama`."""
    config = model.config
    if architecture(model) != "llama" or not name.endswith(
        ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
    ):
        return tensor
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def architecture(model: PreTrainedModel) -> str:
    kind: str = model.config.model_type
    return {"mistral": "llama", "gemma3_text": "gemma3"}.get(kind, kind)


def tensors_of(model: PreTrainedModel) -> dict[str, Stored]:
    is_gemma, tensors = architecture(model) == "gemma3", model.state_dict()
    if is_gemma:  # whose norms are stored with the 1 that is added
        tensors = {name: one + 1 if name.endswith("norm.weight") else one for name, one in tensors.items()}
    of_layer = _OF_GEMMA if is_gemma else _OF_LAYER
    found = {gguf_name(name, of_layer): stored(permuted(name, one, model)) for name, one in tensors.items()}
    if model.config.tie_word_embeddings:
        del found["output.weight"]
    rope = rope_of(model)
    if rope["rope_type"] == "llama3":
        half = torch.arange(0, head_dim(model), 2, dtype=torch.float32) / head_dim(model)
        found["rope_freqs.weight"] = stored(1 / rope["rope_theta"] ** half / model.model.rotary_emb.inv_freq)
    return found


def head_dim(model: PreTrainedModel) -> int:
    return int(getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads)


def rope_of(model: PreTrainedModel) -> dict[str, Any]:
    rope: dict[str, Any] = model.config.rope_parameters
    return dict(rope.get("full_attention", rope))


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    config, kind, rope = model.config, architecture(model), rope_of(model)
    said: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim(model),
        "attention.value_length": head_dim(model),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": head_dim(model),
        "vocab_size": config.vocab_size,
    }
    if kind == "gemma3":
        said["attention.sliding_window"] = config.sliding_window
    if rope["rope_type"] in ("linear", "yarn"):
        said |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        said["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {"general.architecture": kind} | {f"{kind}.{key}": value for key, value in said.items()}


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


_HALF = {"Q4_0": [0.02], "Q4_1": [0.02, -0.15], "Q5_0": [0.01], "Q5_1": [0.01, -0.15], "Q8_0": [0.0012]}
_HALF |= {"Q4_K": [0.0006, 0.0045], "Q5_K": [0.0003, 0.0045], "Q6_K": [6.6e-5]}


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> bytes:
    """Blocks of any bits, but for the float16 numbers by which they are multiplied."""
    form, generator = FORMATS[TYPES[kind]], np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (prod(shape) // form.size, form.num_bytes), dtype=np.uint8)
    halves = np.array(_HALF[kind], np.float32) * generator.uniform(0.5, 1.5, (len(blocks), len(_HALF[kind])))
    data = halves.astype(np.float16).view(np.uint8)
    where = slice(-2, None) if kind == "Q6_K" else slice(0, data.shape[1])
    blocks[:, where] = data
    return blocks.tobytes()
