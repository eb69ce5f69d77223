"""The experts of a layer as products one by one: each expert's weights are multiplied with the rows that chose it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backend.kernels.ops import ExpertWeights, Linear


def route(logits: Tensor, per_token: int, normalises: bool) -> tuple[Tensor, Tensor]:
    """Return the weights [T, per_token] of each token's experts, and the experts, for router logits [T, experts]."""
    weights, chosen = logits.float().softmax(-1).topk(per_token)
    if normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), chosen


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """What `Ops.experts` returns, by the operations' own products; results are added in fp32, first expert first."""

    router: Linear
    products: list[tuple[Linear, Linear]]  # gate_up and down of each expert
    silu_mul: Callable[[Tensor], Tensor]
    per_token: int
    normalises: bool

    @classmethod
    def of(
        cls,
        weights: ExpertWeights,
        router: Linear,
        linear: Callable[[Tensor, None], Linear],
        silu_mul: Callable[[Tensor], Tensor],
    ) -> "ExpertProducts":
        """`linear` takes over each of the experts' weights."""
        each = zip(weights.gate_up, weights.down, strict=True)
        products = [(linear(gate_up, None), linear(down, None)) for gate_up, down in each]
        return cls(router, products, silu_mul, weights.per_token, weights.normalises)

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = route(self.router(x), self.per_token, self.normalises)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.products)).tolist()
        wide, out = weights.flatten().float(), torch.zeros_like(x, dtype=torch.float32)
        for (gate_up, down), places in zip(self.products, order.split(counts), strict=True):
            if len(places):
                tokens = places // self.per_token
                result = down(self.silu_mul(gate_up(x[tokens])))
                out.index_add_(0, tokens, result.float() * wide[places].unsqueeze(1))
        return out.to(x.dtype)
