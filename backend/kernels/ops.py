"""The operations of a decoder, which each device implements; `reference` is the oracle for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from backend.kernels.integers import Weight


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step's tokens. Their vectors lie in KV memory: a row of A, and a column of B, for each rank.

    A row of `vectors` has for each layer and each of its products, in the order of `DecoderLayer.linears`, the places
    of the vectors of A of all parts of the product, then those of B; `rank` places for each part, as many as an adapter
    may have. Any of a part's places may be -1, which is no vector, in A and B alike.
    """

    rows: Tensor  # [T] int32, the row of `vectors` of each token's adapter; -1: none
    vectors: Tensor  # [adapters, layers, places] int64, where each begins in `memory`, a multiple of 16 numbers
    memory: Tensor  # all blocks of KV memory as numbers of the model's type, flat
    rank: int
    parts: tuple[tuple[int, ...], ...]  # of each product, the outputs of its parts

    def first(self, product: int) -> int:
        """Return the first place of a product in a layer."""
        return 2 * self.rank * sum(map(len, self.parts[:product]))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step's ragged batch: T tokens of S sequences, each sequence's tokens contiguous and in order.

    A row of `block_tables` is valid for the blocks that `context_lens` needs; the rest is padding (0). A sequence
    without tokens or context is padding, and so are tokens behind the last sequence's: their results affect no other
    row, and a negative slot stores nothing.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, each token's index in its own sequence
    slot_mapping: Tensor  # [T] int64, block * block_size + offset of the token's key and value; -1: nowhere
    query_start: Tensor  # [S + 1] int32, first row of each sequence
    context_lens: Tensor  # [S] int32, tokens in the cache once this step's own are stored
    block_tables: Tensor  # [S, width] int32
    num_seqs: int
    max_query_len: int
    max_context_len: int
    num_decodes: int = 0  # leading sequences of one token each, at row s for sequence s, or of none
    adapters: StepAdapters | None = None  # None: no token has one
    windows: tuple["StepInputs", ...] = ()  # as layers see it whose groups have blocks of their own; none: as all do

    def of_group(self, group: int) -> "StepInputs":
        """Return the step as the layers of a group see it (`backend.paged_kv.layer_groups`)."""
        return self.windows[group - 1] if group and self.windows else self


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling parameters of each row, as tensors on the device."""

    temperature: Tensor  # [rows] fp32, 0: greedy
    min_p: Tensor  # [rows] fp32, 0: off
    top_k: Tensor  # [rows] int32, 0: off
    top_p: Tensor  # [rows] fp32, 1: off
    seeds: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, of the sampled tokens in their sequences
    some_min_p: bool = True  # False if the host knows that no row has it, which saves time
    some_top_k: bool = True
    some_top_p: bool = True


@dataclass(frozen=True, slots=True)
class RowPenalties:
    """The penalties of each row (0, 0, 1: none), and the tokens of its slot's sequence; see
    `backend.worker.penalties`.
    """

    slots: Tensor  # [rows] int64, no two equal
    presence: Tensor  # [rows] fp32
    frequency: Tensor  # [rows] fp32
    repetition: Tensor  # [rows] fp32
    in_prompt: Tensor  # [slots, vocab] bool
    output_counts: Tensor  # [slots, vocab] int32, to which the sampled token of a penalised row is added


@dataclass(frozen=True, slots=True)
class RotaryHeads:
    """How the heads of a layer's queries and keys are normed, if they are, and rotated."""

    num_heads: int
    num_kv_heads: int
    cos_sin: Tensor  # [max_position, D] fp32, cos in the first half
    q_norm: Tensor | None  # [D], RMS norm of each query head before rotation (Qwen3)
    k_norm: Tensor | None
    eps: float


SampleRows = Callable[[Tensor, RowSampling, RowPenalties | None], Tensor]
"""Returns token ids [rows] int64 for logits [rows, vocab] fp32, which it may overwrite; the host waits for nothing."""


Linear = Callable[[Tensor], Tensor]
"""Returns `x @ weight.T + bias` [rows, out_features] in x's dtype, for x [rows, in_features]."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer, and the router whose logits choose `per_token` of them for each token."""

    router: Tensor  # [experts, hidden]
    gate_up: Tensor  # [experts, 2 * intermediate, hidden], rows of gate, then up; with `clamp` in turns
    down: Tensor  # [experts, hidden, intermediate]
    per_token: int
    normalises: bool  # True if the weights of a token's experts add up to 1
    clamp: tuple[float, float] | None = None  # the slope and limit of gates as in `experts.clamped_mul`; None: SiLU
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None  # [experts, 2 * intermediate]
    down_bias: Tensor | None = None  # [experts, hidden]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's norms, and its products as the ops prepared them."""

    input_norm: Tensor  # [hidden]
    qkv: Linear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: Linear
    attended_norm: Tensor | None  # [hidden], of what attention returns
    post_attention_norm: Tensor  # [hidden]
    feed_forward: tuple[Linear, Linear] | Linear  # the products gate_up and down, or all that experts do
    fed_norm: Tensor | None  # [hidden], of what the feed-forward network returns
    window: int | None
    cos_sin: Tensor  # [max_position, head_dim] fp32
    sinks: Tensor | None = None  # [Hq] fp32
    place: tuple[int, int] = (0, 0)  # of its keys and values: the group of layers, and the index in a block of that

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The products in the order in which they are computed, experts' left out."""
        of_all = self.feed_forward if isinstance(self.feed_forward, tuple) else ()
        return self.qkv, self.output, *of_all


@dataclass(frozen=True, slots=True)
class DecoderStack:
    """The layers between a decoder's embedding and its logits."""

    layers: list[DecoderLayer]
    final_norm: Tensor  # [hidden]
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of scores
    gelu: bool  # gates are GELU, not SiLU


RunLayers = Callable[[Tensor, StepInputs, Tensor], Tensor]
"""Returns the normed hidden states [T, hidden] for embedded tokens of that shape, which it may overwrite, the step and
the blocks of the KV cache.
"""


class Ops(Protocol):
    """The operations that `model.Decoder` calls, with the shapes and guarantees of the functions of the same name in
    `reference`.

    Residual and normalisation tensors are contiguous; `gate_up` and `qkv` come straight out of a `Linear`. An
    implementation may return memory that its next call reuses only if it says so; none does today.
    """

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """Take over `weight` [out_features, in_features] and return its product.

        The implementation may repack the weight: the caller drops its own reference, so that one copy remains.
        """
        ...

    def experts(self, weights: ExpertWeights) -> Linear:
        """Take over a layer's experts; returns a function of x [rows, hidden] of the sum of each row's experts' results
        by their weights, `down @ silu_mul(gate_up @ x)`, with biases where there are.
        """
        ...

    def fuse(self, stack: DecoderStack) -> RunLayers | None:
        """Return a function that runs all layers at once, to the same bits as the operations one by one if they are
        `batch_invariant`. None: the implementation has no function for these layers.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rope_and_store(
        self, qkv: Tensor, rotation: RotaryHeads, k_cache: Tensor, v_cache: Tensor, step: StepInputs
    ) -> Tensor: ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepInputs,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...

    def adapt(self, out: Tensor, x: Tensor, step: StepInputs, layer: int, product: int) -> None: ...

    def apply_token_bitmask(self, logits: Tensor, bitmasks: Tensor, indices: Tensor) -> None: ...

    @property
    def batch_invariant(self) -> bool:
        """True if a row's results are the same to the last bit in every batch, for every cut of a sequence into steps
        and any number of threads. Covers only the linears made so far.
        """
        ...

    @property
    def captures(self) -> bool:
        """True if a CUDA graph can hold the operations, none of which then waits for the host."""
        ...

    @property
    def sample(self) -> SampleRows | None:
        """Samples tokens on the device, by the rules of `backend.worker.sampler`; None leaves it to that module."""
        ...
