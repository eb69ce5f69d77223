"""Rotary position embedding (Su et al., 2021): the table of cosines and sines, with the scalings in use.

Formulas and their order of operations are those of transformers, so that tables agree to the last bit.
"""

import math

import torch
from torch import Tensor

from backend.model_config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, max_position: int) -> Tensor:
    """Cosines, then sines, of each position below `max_position`: [max_position, head_dim] fp32."""
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequencies(config))
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each rotated pair: [head_dim / 2] fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling)
    assert scaling.kind == "yarn", scaling.kind
    return _yarn(config.rope_theta**exponents, scaling, config)


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: divide low frequencies by `factor`, keep high ones, interpolate between."""
    original, low, high = scaling.original_max_position, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / scaling.factor, inverse)
    is_between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(is_between, between, scaled)


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """YaRN, NTK-by-parts (Peng et al., 2023): interpolate slow pairs, keep fast ones, blend linearly between."""

    def pair_turning(rotations: float) -> float:
        """The index of the pair that turns `rotations` times over the original context."""
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
