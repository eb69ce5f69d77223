"""Pooling turns the hidden states of an input into one vector, which the folder's dense layers and norm then change."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from backend.encoders.folder import DenseLayer
from backend.kernels.ops import Linear, Ops
from backend.model.weights import Checkpoint, check_tensors, copy_checked

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def pool(hidden: Tensor, modes: Sequence[str]) -> Tensor:
    """Return vectors [inputs, modes * size] of hidden states [inputs, length, size], in float32."""
    hidden = hidden.float()
    return torch.cat([_POOLINGS[mode](hidden) for mode in modes], dim=1)


def _weighted_mean(hidden: Tensor) -> Tensor:
    weights = torch.arange(1.0, hidden.shape[1] + 1, device=hidden.device)
    return (hidden * weights.unsqueeze(1)).sum(1) / weights.sum()


_POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda hidden: hidden[:, 0],
    "max": lambda hidden: hidden.amax(1),
    "mean": lambda hidden: hidden.mean(1),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(1) / hidden.shape[1] ** 0.5,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda hidden: hidden[:, -1],
}


def normalize(vectors: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return functional.normalize(vectors, dim=1)


class Dense:
    """A dense layer of sentence-transformers, in float32."""

    def __init__(self, layer: DenseLayer, ops: Ops, device: torch.device) -> None:
        targets = {"linear.weight": torch.empty(layer.out_features, layer.in_features, device=device)}
        if layer.bias:
            targets["linear.bias"] = torch.empty(layer.out_features, device=device)
        checkpoint = Checkpoint(layer.directory)
        infos = {info.stored_as: info for info in checkpoint.infos.values()}
        check_tensors(checkpoint.source, infos, targets, "a Dense module", {})
        for full_name, tensor in checkpoint.tensors():
            info = checkpoint.infos[full_name]
            copy_checked(info, info.stored_as, tensor, targets[info.stored_as])
        self._linear: Linear = ops.linear(targets["linear.weight"], targets.get("linear.bias"))
        self._activation = ACTIVATIONS[layer.activation]

    def __call__(self, vectors: Tensor) -> Tensor:
        return self._activation(self._linear(vectors))
