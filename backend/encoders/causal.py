"""A decoder that embeds: the layers of `backend.model.decoder` over whole inputs, without a KV cache."""

import torch
from torch import Tensor

from backend.encoders.packed import PackedInputs
from backend.kernels.layers import feed_forward
from backend.kernels.ops import DecoderLayer, Ops
from backend.kernels.reference import rotary_embedding
from backend.model.decoder import prepare_layer, rope_table
from backend.model.model_config import ModelConfig
from backend.model.weights import Weights


class CausalEncoder:
    """A decoder's last hidden states. It takes `weights` over and empties them layer by layer."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_tokens: int) -> None:
        self.config = config
        self._ops = ops
        self._embedding, self._final_norm = weights.embedding, weights.final_norm
        self._cos_sin = rope_table(config, max_tokens).to(weights.embedding.device)
        self._layers = [
            prepare_layer(weights.layers.pop(0), ops, config, None, self._cos_sin) for _ in range(config.num_layers)
        ]

    def forward(self, packed: PackedInputs) -> Tensor:
        """Return the last hidden states [T, hidden], normed."""
        ops, eps = self._ops, self.config.rms_norm_eps
        residual = self._embedding[packed.token_ids]
        branch = torch.zeros_like(residual)
        cos, sin = self._cos_sin[packed.positions()].chunk(2, dim=-1)
        for layer in self._layers:
            x = ops.add_rms_norm(branch, residual, layer.input_norm, eps)
            x = ops.add_rms_norm(self._attention(layer, x, packed, cos, sin), residual, layer.post_attention_norm, eps)
            branch = feed_forward(ops.silu_mul, layer.feed_forward, x)
        return ops.add_rms_norm(branch, residual, self._final_norm, eps)

    def _attention(self, layer: DecoderLayer, x: Tensor, packed: PackedInputs, cos: Tensor, sin: Tensor) -> Tensor:
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        query, key, value = layer.qkv(x).unflatten(1, (-1, config.head_dim)).split(heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = self._ops.rms_norm(query.contiguous(), layer.q_norm, config.rms_norm_eps)
            key = self._ops.rms_norm(key.contiguous(), layer.k_norm, config.rms_norm_eps)
        query, key = rotary_embedding(query, cos, sin), rotary_embedding(key, cos, sin)
        return layer.output(packed.attend(query, key, value, causal=True).flatten(1))
