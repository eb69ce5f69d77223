"""The operations a decoder is made of; each device implements them all. `reference` is the oracle for every one."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from backend.kernels.row_sampling import SampleRows
from backend.kernels.step import StepInputs

Linear = Callable[[Tensor], Tensor]
"""`x @ weight.T + bias` for x [rows, in_features], returning [rows, out_features] in x's dtype."""


class Ops(Protocol):
    """What `model.Decoder` calls. Shapes and promises are those of the functions of the same name in `reference`.

    Residual and normalisation tensors are contiguous; `gate_up` and `qkv` come straight out of a `Linear`.
    An implementation may return memory that its next call reuses only if it says so; none does today.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Take over `weight` [out_features, in_features] and return its product.

        The implementation may repack the weight: the caller drops its own reference, so that one copy remains.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rope_and_store(
        self,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepInputs,
    ) -> Tensor: ...

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, step: StepInputs, scale: float, window: int | None
    ) -> Tensor: ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's results, to the last bit, are its own: whatever rows stand beside it, however a sequence is
        cut into steps, and however many threads compute. Of linears it speaks for those made so far.
        """
        ...

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can hold them: on such a device none of them asks the host for anything."""
        ...

    @property
    def sample(self) -> SampleRows | None:
        """Draws tokens on the device, by the rules of `backend.sampler`; None leaves it to that module."""
        ...
