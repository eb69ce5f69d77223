"""The decoder of all families: one forward pass, driven by ModelConfig."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from backend.kernels.layers import run_layers
from backend.kernels.ops import DecoderLayer, DecoderStack, ExpertWeights, Linear, Ops, RunLayers, StepInputs
from backend.model.model_config import ExpertsConfig, ModelConfig, RopeScaling
from backend.model.weights import LayerWeights, Weights
from backend.paged_kv.kv_cache import KVCache
from backend.paged_kv.layer_groups import LayerGroups, one_group
from backend.parallel.rank_group import Parallel


def rope_table(config: ModelConfig, max_position: int) -> Tensor:
    """Return cosines, then sines, of each position below `max_position`: [max_position, head_dim] fp32."""
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(config))
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return the radians per position of each rotated pair: [head_dim / 2] fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling)
    if scaling.kind == "divided":
        return inverse / torch.tensor(scaling.divisors)
    assert scaling.kind == "yarn", scaling.kind
    return _yarn(config.rope_theta**exponents, scaling, config)


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale frequencies as Llama 3.1 does: divide low ones by `factor`, keep high ones, interpolate between."""
    original, low, high = scaling.original_max_position, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / scaling.factor, inverse)
    is_between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(is_between, between, scaled)


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Scale frequencies by YaRN, NTK-by-parts (Peng et al., 2023): interpolate slow pairs, keep fast ones."""

    def pair_turning(rotations: float) -> float:
        """Return the index of the pair that turns `rotations` times over the original context."""
        turns = scaling.original_max_position / (rotations * 2 * math.pi)
        return config.head_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (scaling.factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep


class Decoder:
    """A decoder-only transformer over a paged KV cache. Between steps it holds no state but its weights.

    It takes `weights` over and empties it layer by layer, so that ops which repack never hold the model twice.
    `max_position` bounds the positions that a step may name.

    With `parallel` it is one rank's part, whose weights are its shard's, and all ranks run each step together. `config`
    is then the whole model's, and `self.config` has the heads of this rank. `groups`: the layers that share blocks of
    the KV cache; None: all.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        max_position: int,
        parallel: Parallel | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        self.groups = groups or one_group(config.num_layers)
        self.config = config = config if parallel is None else parallel.shard.part_of(config)
        self.ops = ops
        self.parallel = parallel
        self.embedding = weights.embedding  # [vocab, hidden], or the rows of this rank
        self.cos_sin = rope_table(config, max_position).to(weights.embedding.device)  # [max_position, head_dim]
        local = self.cos_sin
        if config.local_rope_theta is not None:
            unscaled = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
            local = rope_table(unscaled, max_position).to(self.cos_sin.device)
        windows = [config.window(index) for index in range(config.num_layers)]
        self.layers = [
            prepare_layer(
                weights.layers.pop(0), ops, config, window, self.cos_sin if window is None else local, parallel, place
            )
            for window, place in zip(windows, self.groups.places, strict=True)
        ]
        self.final_norm = weights.final_norm
        stack = DecoderStack(
            self.layers,
            self.final_norm,
            config.rms_norm_eps,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            config.gelu,
        )
        # rounded as transformers rounds it
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.embedding.dtype).item()
        fused = ops.fuse(stack) if parallel is None else None  # ranks exchange sums within a layer
        self._run_layers: RunLayers = fused or partial(run_layers, ops, stack)
        head = weights.lm_head
        widens = parallel is None and weights.embedding.device.type != "cpu" and head.dtype != torch.float32
        self._wide_head = head.t() if isinstance(head, Tensor) and widens else None  # [hidden, vocab], to fp32
        self._lm_head = ops.linear(head, None) if self._wide_head is None else None

    @torch.inference_mode()
    def forward(self, step: StepInputs, kv: KVCache) -> Tensor:
        """Run the step's tokens, storing their keys and values in `kv`; returns the final hidden states [T, hidden]."""
        return self._run_layers(self._embed(step.token_ids), step, kv.blocks)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return unnormalised log-probabilities [rows, vocab] in fp32 for chosen rows [rows, hidden] of `forward`'s
        result, written to `out` if it is given.
        """
        if self._wide_head is not None:
            return torch.mm(hidden, self._wide_head, out_dtype=torch.float32, out=out)
        assert self._lm_head is not None
        logits = self._lm_head(hidden)
        if self.parallel is not None:
            logits = self.parallel.group.gather(logits)[:, : self.config.vocab_size]
        return logits.float() if out is None else out.copy_(logits)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [tokens, hidden]."""
        if self.parallel is not None:
            embedded = self.parallel.embed(token_ids, self.embedding)
        else:
            embedded = torch.nn.functional.embedding(token_ids, self.embedding)
        return embedded if self._embedding_scale == 1 else embedded.mul_(self._embedding_scale)


def prepare_layer(
    weights: LayerWeights,
    ops: Ops,
    config: ModelConfig,
    window: int | None,
    cos_sin: Tensor,
    parallel: Parallel | None = None,
    place: tuple[int, int] = (0, 0),
) -> DecoderLayer:
    output, down, sinks = weights.output_bias, weights.down_bias, weights.sinks
    if parallel is not None and parallel.shard.rank:
        output = down = None  # counted once in the sum over the ranks

    def summed(product: Linear) -> Linear:
        return product if parallel is None else parallel.summed(product)

    return DecoderLayer(
        input_norm=weights.input_norm,
        qkv=ops.linear(weights.qkv, weights.qkv_bias),
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        output=summed(ops.linear(weights.output, output)),
        attended_norm=weights.attended_norm,
        post_attention_norm=weights.post_attention_norm,
        feed_forward=(
            (ops.linear(weights.gate_up, weights.gate_up_bias), summed(ops.linear(weights.down, down)))
            if config.experts is None
            else summed(ops.experts(_experts(weights, config.experts, down)))
        ),
        fed_norm=weights.fed_norm,
        window=window,
        cos_sin=cos_sin,
        sinks=None if sinks is None else sinks.float(),
        place=place,
    )


def _experts(weights: LayerWeights, config: ExpertsConfig, down_bias: Tensor | None) -> ExpertWeights:
    router, gate_up, down = weights.router, weights.gate_up, weights.down
    assert router is not None and isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    return ExpertWeights(
        router,
        gate_up,
        down,
        config.per_token,
        config.normalises,
        config.clamp,
        weights.router_bias,
        weights.gate_up_bias,
        down_bias,
    )
