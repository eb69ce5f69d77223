"""The experts of a layer as products one by one: each expert's weights are multiplied with the rows that chose it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from backend.kernels.ops import ExpertWeights, Linear

_NO_GATE = -1e4  # its sigmoid is 0 in every type, and its product with a slope is finite


def route(logits: Tensor, per_token: int, normalises: bool) -> tuple[Tensor, Tensor]:
    """Return the weights [T, per_token] of each token's experts, and the experts, for router logits [T, experts]."""
    weights, chosen = logits.float().softmax(-1).topk(per_token)
    if normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), chosen


def clamped_mul(gate_up: Tensor, clamp: tuple[float, float], silu_mul: Linear) -> Tensor:
    """Return gpt-oss' gated activation of `gate_up` [T, 2 * intermediate], gates and what they multiply in turns.

    `gate * sigmoid(slope * gate)` is `silu(slope * gate) / slope`: torch's sigmoid differs in bits by a number's place.
    """
    slope, limit = clamp
    gate, up = gate_up[:, ::2].clamp(_NO_GATE, limit), gate_up[:, 1::2].clamp(-limit, limit)
    return silu_mul(torch.cat((gate * slope, up + 1), 1)) / slope


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """The result of `Ops.experts`, by the operations' own products; results are added in fp32, first expert first."""

    router: Linear
    products: list[tuple[Linear, Linear]]  # gate_up and down of each expert
    gated: Linear
    per_token: int
    normalises: bool

    @classmethod
    def of(
        cls,
        weights: ExpertWeights,
        router: Linear,
        linear: Callable[[Tensor, Tensor | None], Linear],
        silu_mul: Linear,
    ) -> "ExpertProducts":
        """`linear` takes over each of the experts' weights."""
        none = [None] * len(weights.router)
        up_biases, down_biases = (none if one is None else one for one in (weights.gate_up_bias, weights.down_bias))
        each = zip(weights.gate_up, up_biases, weights.down, down_biases, strict=True)
        products = [(linear(gate_up, up_bias), linear(down, bias)) for gate_up, up_bias, down, bias in each]
        gated = silu_mul if weights.clamp is None else partial(clamped_mul, clamp=weights.clamp, silu_mul=silu_mul)
        return cls(router, products, gated, weights.per_token, weights.normalises)

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = route(self.router(x), self.per_token, self.normalises)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.products)).tolist()
        wide, out = weights.flatten().float(), torch.zeros_like(x, dtype=torch.float32)
        for (gate_up, down), places in zip(self.products, order.split(counts), strict=True):
            if len(places):
                tokens = places // self.per_token
                result = down(self.gated(gate_up(x[tokens])))
                out.index_add_(0, tokens, result.float() * wide[places].unsqueeze(1))
        return out.to(x.dtype)
