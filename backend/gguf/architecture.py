"""A GGUF file's metadata and tensors in the terms of a Hugging Face checkpoint: its config.json, its tensors' names.

Unknown keys of the file's own architecture may change the arithmetic: they are refused.
"""

import re
import struct
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from backend.gguf.reader import GgufFile, StoredTensor
from backend.json_file import JsonFile

_GEMMA = "gemma3"
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    _GEMMA: "Gemma3ForCausalLM",
}
# ggml pairs rows 0 and 1 of a head where the checkpoint pairs row 0 and the row at half of them
_ROTATES_NEIGHBOURS = {"llama"}
_EMBEDDING, _HEAD, _ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_NAMES = {_EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", _HEAD: "lm_head.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = _LAYER_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_KEYS = {"attention.sliding_window", "rope.freq_base_swa"}
_GEMMA_27B_LAYERS = 62  # whose scores have a scale of their own, as in llama.cpp
_OF_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
}
_NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.attn_factor": 1.0}


class Architecture:
    """The model that a file describes. Raises `ModelLoadError` naming the file and the field."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.general = JsonFile(file.path, file.metadata)
        self.name = self.general.get("general.architecture")
        if self.name not in _ARCHITECTURES:
            raise self.general.wrong("general.architecture", f"one of {', '.join(_ARCHITECTURES)} is read")
        prefix = f"{self.name}."
        own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        self.own = JsonFile(file.path, own, prefix)
        known = _KNOWN_KEYS | _NEUTRAL.keys() | (_GEMMA_KEYS if self.name == _GEMMA else set())
        for key, value in own.items():
            if key in _NEUTRAL and value != _NEUTRAL[key]:
                raise self.own.wrong(key, f"{_NEUTRAL[key]} is read")
            if key not in known:
                raise self.own.wrong(key, "a key that is not known may change what the model computes")

    def config(self) -> dict[str, Any]:
        """Return the config.json of the same model, without its tokens."""
        own, tensors = self.own, self._file.tensors
        heads, hidden = own.integer("attention.head_count"), own.integer("embedding_length")
        head_dim = own.integer("attention.key_length", default=max(1, hidden // heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if own.integer(key, default=head_dim) != head_dim:
                raise own.wrong(key, f"the {head_dim} numbers of a head are expected")
        layers = own.integer("block_count")
        if layers > len(tensors):
            raise own.wrong("block_count", f"there are {len(tensors)} tensors")
        if _EMBEDDING not in tensors:
            raise self.general.wrong(_EMBEDDING, "a tensor of this name is expected")
        return {
            "architectures": [_ARCHITECTURES[self.name]],
            "vocab_size": tensors[_EMBEDDING].shape[0],
            "hidden_size": hidden,
            "intermediate_size": own.integer("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": own.integer("attention.head_count_kv", default=heads),
            "head_dim": head_dim,
            "max_position_embeddings": own.integer("context_length"),
            "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": own.number("rope.freq_base", default=10_000.0),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "tie_word_embeddings": _HEAD not in tensors,
            "torch_dtype": self._dtype(),
            **(self._of_gemma(heads, hidden, head_dim) if self.name == _GEMMA else {}),
        }

    def _of_gemma(self, heads: int, hidden: int, head_dim: int) -> dict[str, Any]:
        own = self.own
        return {
            "sliding_window": own.integer("attention.sliding_window"),
            "query_pre_attn_scalar": hidden // heads if own.integer("block_count") == _GEMMA_27B_LAYERS else head_dim,
            "rope_theta": own.number("rope.freq_base", default=1_000_000.0),
            "rope_local_base_freq": own.number("rope.freq_base_swa", default=10_000.0),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.own.get("rope.scaling.type")
        if _ROPE_FACTORS in self._file.tensors:  # of Llama 3.1 and later, in place of their formula's numbers
            if kind not in (None, "none"):
                raise self.own.wrong("rope.scaling.type", f"none is read beside the tensor {_ROPE_FACTORS}")
            return {"rope_type": "divided", "divisors": self._rope_factors(self._file.tensors[_ROPE_FACTORS])}
        if kind in (None, "none"):
            return None
        if kind not in ("linear", "yarn"):
            raise self.own.wrong("rope.scaling.type", "none, linear or yarn is read")
        scaling = {"rope_type": kind, "factor": self.own.number("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self.own.integer("rope.scaling.original_context_length")
        return scaling

    def _rope_factors(self, tensor: StoredTensor) -> list[float]:
        if tensor.format.name != "F32" or len(tensor.shape) != 1:
            raise self.general.wrong(_ROPE_FACTORS, "a tensor of one dimension in F32 is expected")
        return [*struct.unpack(f"<{tensor.shape[0]}f", self._file.read(tensor.start, tensor.num_bytes))]

    def _dtype(self) -> str:
        """Return the type in which a GPU is to serve: the type of most numbers, bfloat16 for quantised ones."""
        counts: Counter[str] = Counter()
        for tensor in self._file.tensors.values():
            counts[tensor.format.name] += prod(tensor.shape)
        return {"F32": "float32", "F16": "float16"}.get(counts.most_common(1)[0][0], "bfloat16")

    def names(self) -> dict[str, StoredTensor]:
        """Return the tensors under their names in a checkpoint; a name without a counterpart is kept."""
        tensors = self._file.tensors
        of_layer = _GEMMA_NAMES if self.name == _GEMMA else _LAYER_NAMES
        return {_checkpoint_name(name, of_layer): one for name, one in tensors.items() if name != _ROPE_FACTORS}

    def heads_of(self, name: str) -> int | None:
        """Return the number of heads over which the rows of this tensor of the checkpoint are permuted; None if they
        are not permuted.
        """
        if self.name not in _ROTATES_NEIGHBOURS or not re.search(r"\.[qk]_proj\.", name):
            return None
        heads = self.own.integer("attention.head_count")
        return heads if ".q_proj." in name else self.own.integer("attention.head_count_kv", default=heads)


def _checkpoint_name(name: str, of_layer: Mapping[str, str]) -> str:
    found = _OF_LAYER.fullmatch(name)
    if found is None or found[2] not in of_layer:
        return _NAMES.get(name, name)
    return f"model.layers.{int(found[1])}.{of_layer[found[2]]}.{found[3]}"
