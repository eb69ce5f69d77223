"""The inputs of one pass, packed without padding; attention runs over all inputs of one length."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

import torch
from torch import Tensor
from torch.nn import functional


class PackedInputs:
    """The inputs of a pass as one row of T tokens. They are given by length, shortest first.

    An input's results depend on its own tokens alone: products are row by row, and attention sees inputs of one length
    as a batch, each of which torch computes by itself.
    """

    def __init__(self, inputs: Sequence[Sequence[int]], device: torch.device) -> None:
        self.groups = [(len(list(group)), length) for length, group in groupby(map(len, inputs))]  # (inputs, length)
        self.token_ids = torch.tensor(list(chain.from_iterable(inputs)), dtype=torch.int64).to(device)  # [T]

    def by_length(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield views [inputs, length, ...] of rows [T, ...], group by group."""
        start = 0
        for count, length in self.groups:
            yield rows[start : start + count * length].unflatten(0, (count, length))
            start += count * length

    def positions(self) -> Tensor:
        """Return each token's index in its own input: [T] int64."""
        device = self.token_ids.device
        return torch.cat([torch.arange(length, device=device).repeat(count) for count, length in self.groups])

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, biases: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Compute attention within each input: [T, Hq, D] for queries of that shape, keys and values [T, Hk, D].

        `biases` [Hq, length, length] are added to each group's weights.
        """
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        parts = zip(*map(self.by_length, (query, key, value, out)), strict=True)
        for index, (q, k, v, attended) in enumerate(parts):
            bias = None if biases is None else biases[index].expand(len(q), -1, -1, -1)
            keys, values = _by_head(k, q.shape[2]), _by_head(v, q.shape[2])
            result = functional.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=bias, is_causal=causal
            )
            attended.copy_(result.transpose(1, 2))
        return out


def _by_head(rows: Tensor, num_heads: int) -> Tensor:
    """Return [inputs, num_heads, length, D] of keys or values [inputs, length, Hk, D], which groups of heads share."""
    repeats = num_heads // rows.shape[2]
    return (rows if repeats == 1 else rows.repeat_interleave(repeats, dim=2)).transpose(1, 2)
