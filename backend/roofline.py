"""A model's GPU memory, and the least time of its steps, computed from config.json alone, without torch.

A step reads every weight but the embedding's, of which it looks up rows, and the keys and values that its sequences
attend to; meanwhile it multiplies. Its floor is the roofline of Williams et al. (2009),

    max(weight bytes / bandwidth, 2 * weights of a token * tokens / rate) + KV bytes / bandwidth

because products overlap reading with arithmetic, while attention to a long context mostly reads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from backend.config import WINDOW_ALIGNMENT_TOKENS, EngineOptions, WindowNeed, window_need
from backend.errors import ConfigError
from backend.model.model_config import ModelConfig
from backend.paged_kv.layer_groups import LayerGroups, groups_of
from backend.worker import graph_shapes

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
PACKED_BITS = {"int4": 5.0, "int8": 8.5, "fp8": 8.0}  # of a weight that a GPU keeps packed, its scale included
GIB = 2**30
BLOCK_SIZE = 16  # tokens, the default of engines
BYTES_PER_TABLE_ENTRY = 4
_UNITS = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}
RUNTIME_BYTES = GIB  # CUDA's context, libraries and compiled kernels
KERNELS_PER_LAYER = 11  # kernels of a layer in a step, at most
KERNELS_OF_EXPERTS = 4  # more, where a layer has experts
GRAPH_BYTES_PER_KERNEL = (
    16 * 1024
)  # that CUDA keeps for a kernel in a graph; whole models were seen to take 10 to 25 KiB


@dataclass(frozen=True, slots=True)
class Peaks:
    """The rates that a device sustains."""

    bandwidth: float  # bytes/s
    flops: float  # FLOP/s of 16-bit products
    flops_fp32: float  # of 32-bit ones
    link: float = 0.0  # bytes/s to the other ranks of a model, in one direction

    def rate(self, dtype: str) -> float:
        return self.flops_fp32 if dtype == "float32" else self.flops


def sustained(bandwidth: float, flops: float, flops_fp32: float, link: float) -> Peaks:
    """Return 0.9 of a data sheet's bandwidth and 0.8 of its dense products, which large ones reach on an H200; and 0.8
    of NVLink, which large sums over ranks reach.
    """
    return Peaks(0.9 * bandwidth, 0.8 * flops, 0.8 * flops_fp32, 0.8 * link)


GPUS = {
    "h200": Peaks(4.3e12, 790e12, 53e12, 0.8 * 450e9),
    "h100": sustained(3.35e12, 989e12, 67e12, 450e9),
    "a100": sustained(2.039e12, 312e12, 19.5e12, 300e9),
}
"""These are SXM boards, the A100 with 80 GB."""
MEMORY_BYTES = {"h200": 139 * GIB, "h100": 79 * GIB, "a100": 79 * GIB}  # that their driver leaves


@dataclass(frozen=True)  # without slots: derived numbers are kept, which metrics ask for at each step
class Footprint:
    """The memory that one model takes in one precision."""

    model: ModelConfig
    dtype: str
    kv_item_bytes: int | None = None  # of a cached number; None: as the weights'
    longest: int | None = None  # tokens of a text, which decides on the blocks of windows; None: the model's positions
    quantization: str = "none"  # of the layers' products on a GPU; of `PACKED_BITS`, or all weights are of `dtype`

    @property
    def num_weights(self) -> int:
        """The count of the weights' numbers, a tied matrix counted once."""
        embedding = 0 if self.model.tie_word_embeddings else self.model.vocab_size * self.model.hidden_size
        return self.num_read + embedding

    @cached_property
    def num_read(self) -> int:
        """The count of numbers that a step of many tokens reads: all but the embedding's, unless it is tied to the
        head.
        """
        return self._num_of_layers(1.0) + self.model.hidden_size * self.model.vocab_size

    @cached_property
    def expert_reads(self) -> tuple[float, float]:
        """The share of the weights that lie in experts, and the chance that a token leaves one of them unused: steps of
        `n` tokens, if each draws its experts at random, read `1 - share * chance**n` of the weights.
        """
        model = self.model
        if model.experts is None:
            return 0.0, 0.0
        in_experts = model.num_layers * _expert_weights(model) / self.num_read
        return in_experts, 1 - model.experts.per_token / model.experts.count

    def bytes_read(self, tokens: int) -> float:
        """Return the bytes of weights that a step reads, of experts the share that its tokens use, drawn at random."""
        in_experts, unused = self.expert_reads
        return self.num_read * (1 - in_experts * unused**tokens) * self.item_bytes - self.packed_away

    @cached_property
    def num_multiplied(self) -> int:
        """The count of numbers that a token is multiplied with, its logits' among them."""
        return self.num_multiplied_by_token + self.model.hidden_size * self.model.vocab_size

    @cached_property
    def num_multiplied_by_token(self) -> int:
        """The count of numbers that every token is multiplied with: the head makes logits of sampled rows alone."""
        experts = self.model.experts
        return self._num_of_layers(1.0 if experts is None else experts.per_token / experts.count)

    def _num_of_layers(self, share: float) -> int:
        """Return the count of the layers' numbers, with this share of their experts."""
        model = self.model
        return model.num_layers * (_dense_weights(model) + round(share * _expert_weights(model))) + model.hidden_size

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * self.item_bytes - self.packed_away

    @cached_property
    def packed_away(self) -> int:
        """The bytes that quantization saves: of all layers' products, and not of embedding and head."""
        if self.quantization not in PACKED_BITS or self.model.experts is not None:
            return 0
        numbers = self.model.num_layers * _product_weights(self.model)
        return numbers * self.item_bytes - int(numbers * PACKED_BITS[self.quantization] / 8)

    @cached_property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @cached_property
    def kv_bytes_per_token(self) -> int:
        model = self.model
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * (self.kv_item_bytes or self.item_bytes)

    @cached_property
    def windowed_share(self) -> float:
        """The share of layers that see a window alone."""
        model = self.model
        return sum(model.window(layer) is not None for layer in range(model.num_layers)) / model.num_layers

    def kv_bytes(self, tokens: int, in_flight: int = 0) -> int:
        """Return the bytes of keys and values of one text, in whole blocks, while steps in flight have at most as many
        tokens of it; 0: it decodes. Behind a window none are kept.
        """
        return self._need(in_flight).blocks(-(-tokens // BLOCK_SIZE)) * self.block_bytes

    def tokens_in(self, kv_bytes: int, in_flight: int = 0) -> int:
        """Return the tokens of one text whose keys and values take `kv_bytes`."""
        return self._need(in_flight).places(kv_bytes // self.block_bytes) * BLOCK_SIZE

    def _need(self, in_flight: int) -> WindowNeed:
        seen = (self.model.sliding_window or 0) + WINDOW_ALIGNMENT_TOKENS
        need = window_need(self._groups.num_windows, BLOCK_SIZE, seen, in_flight)
        return need if in_flight else replace(need, most=need.decoding)

    @cached_property
    def block_bytes(self) -> int:
        """The bytes of a block: of all layers, or of a group of them."""
        return BLOCK_SIZE * self._groups.size * (self.kv_bytes_per_token // self.model.num_layers)

    @cached_property
    def _groups(self) -> LayerGroups:
        return groups_of(self.model, self.longest or self.model.max_position)

    def kv_bytes_read(self, context: int) -> int:
        """Return the bytes of keys and values that one token reads of `context` tokens, or of its layers' windows."""
        model = self.model
        seen = sum(min(context, model.window(layer) or context) for layer in range(model.num_layers))
        return self.kv_bytes_per_token // model.num_layers * seen

    def working_bytes(self, tokens: int, rows: int) -> int:
        """Estimate the bytes of a step's activations and of the logits of its `rows`; a running engine measures it."""
        model = self.model
        qkv = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        inner = model.intermediate_size * (1 if model.experts is None else model.experts.per_token)
        per_token = 3 * model.hidden_size + qkv + 3 * inner
        return tokens * per_token * self.item_bytes + rows * model.vocab_size * (self.item_bytes + 2 * 4)

    def graph_bytes(self, tokens: int, seqs: int) -> int:
        """Estimate the bytes of graphs of steps of up to `tokens` and `seqs` sequences: activations of the largest,
        which the others share, and the graphs' own nodes.
        """
        return self.working_bytes(graph_shapes.largest(tokens), 0) + recorded_bytes(self.model, tokens, seqs)

    def table_bytes(self, seqs: int) -> int:
        return window_table_bytes(self._groups, seqs, self.longest or self.model.max_position, BLOCK_SIZE)


def recorded_bytes(model: ModelConfig, tokens: int, seqs: int) -> int:
    """Estimate the bytes of the nodes of graphs of steps of up to `tokens` and `seqs` sequences."""
    kernels = model.num_layers * (KERNELS_PER_LAYER + (KERNELS_OF_EXPERTS if model.experts else 0))
    return graph_shapes.num_shapes(tokens, seqs) * kernels * GRAPH_BYTES_PER_KERNEL


def window_table_bytes(groups: LayerGroups, seqs: int, longest: int, block_size: int) -> int:
    """Return the bytes of the block tables of layers with a window on a device, for texts of up to `longest` tokens: of
    all slots and of a step's rows. The other layers' lie within the reserve.
    """
    tables, places = seqs + (seqs + graph_shapes.MAX_PROMPTS), -(-longest // block_size)
    return groups.num_windows * tables * places * BYTES_PER_TABLE_ENTRY


def _product_weights(model: ModelConfig) -> int:
    """Return the count of the numbers of one layer's products, of a router and not of experts."""
    query, qkv = model.num_heads * model.head_dim, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    feed_forward = 3 * model.intermediate_size if model.experts is None else model.experts.count
    return model.hidden_size * (query + qkv + feed_forward)


def _dense_weights(model: ModelConfig) -> int:
    """Return the count of one layer's numbers without its experts, its biases and norms included."""
    hidden, intermediate = model.hidden_size, model.intermediate_size
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    products = _product_weights(model)
    biases = model.attention_bias * qkv + model.output_bias * hidden
    biases += model.mlp_bias * (2 * intermediate + hidden) + model.sinks * model.num_heads
    if model.experts is not None and model.experts.clamp is not None:
        biases += model.experts.count  # the router's
    return products + biases + (4 if model.branch_norms else 2) * hidden + model.qk_norm * 2 * model.head_dim


def _expert_weights(model: ModelConfig) -> int:
    """Return the count of numbers of all experts of a layer."""
    experts, hidden, inner = model.experts, model.hidden_size, model.intermediate_size
    if experts is None:
        return 0
    return experts.count * (3 * hidden * inner + (0 if experts.clamp is None else 2 * inner + hidden))


@dataclass(frozen=True)  # without slots: derived numbers are kept, which metrics ask for at each step
class Roofline:
    """The least time that a model's steps take on a device."""

    footprint: Footprint
    peaks: Peaks
    num_ranks: int = 1  # that divide the model, of which `footprint` is one's part

    @cached_property
    def rate(self) -> float:
        return self.peaks.rate(self.footprint.dtype)

    @property
    def ridge(self) -> float:
        """The tokens in a step from which products take longer than reading the weights, of experts all."""
        read = self.footprint.num_read * self.footprint.item_bytes - self.footprint.packed_away
        return read / self.footprint.num_multiplied / 2 * self.rate / self.peaks.bandwidth

    def decode(self, batch: int, context: int) -> float:
        """Return the seconds of a step of `batch` decodes that each attend to `context` tokens."""
        reading = batch * self.footprint.kv_bytes_read(context) / self.peaks.bandwidth
        return self._products(batch, batch) + reading + self.exchange(batch)

    def prefill(self, tokens: int) -> float:
        """Return the seconds of the products over `tokens` of a prompt, each with its logits; attention within it is
        not counted.

        An engine that makes logits of the last token alone may be faster.
        """
        return self._products(tokens, tokens) + self.exchange(tokens)

    def step(self, tokens: int, sampled: int, context: int, pairs: int, beyond: tuple[int, int] = (0, 0)) -> float:
        """Return the least seconds of a step of `tokens` with the logits of `sampled` rows, whose sequences have
        `context` tokens before it and whose prefills see `pairs` of tokens, of which as many as `beyond` tells lie
        `beyond_window`. The exchange of ranks is not counted.
        """
        windowed = self.footprint.windowed_share
        reading = (context - windowed * beyond[0]) * self.footprint.kv_bytes_per_token / self.peaks.bandwidth
        return self._products(tokens, sampled, pairs - windowed * beyond[1]) + reading

    def beyond_window(self, decodes: Iterable[int], prefills: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Return the tokens of the context, and the pairs of prefills, that layers with a window do not see, in time
        proportional to the rows. `decodes`: the tokens before each; `prefills`: those before each, and its own.
        """
        if (window := self.footprint.model.sliding_window) is None:
            return 0, 0
        context = sum([start + 1 - window for start in decodes if start >= window])
        pairs = 0
        for start, length in prefills:
            before, after = max(0, start - window), max(0, start + length - window)
            context += before
            pairs += (after * (after + 1) - before * (before + 1)) // 2
        return context, pairs

    def exchange(self, tokens: int) -> float:
        """Return the seconds in which ranks exchange the sums of a step of `tokens`, two a layer and one for the
        embedding: of each sum a ring sends 2 (N - 1) / N to the next rank (Patarasuk and Yuan, 2009).
        """
        if self.num_ranks == 1:
            return 0.0
        model = self.footprint.model
        num_bytes = (2 * model.num_layers + 1) * tokens * model.hidden_size * self.footprint.item_bytes
        return 2 * (self.num_ranks - 1) / self.num_ranks * num_bytes / self.peaks.link

    def _products(self, tokens: int, sampled: int, pairs: float = 0.0) -> float:
        """Return the seconds of the products over `tokens`, of the head's over `sampled` of them, and of the attention
        of `pairs` of tokens.
        """
        footprint, model = self.footprint, self.footprint.model
        head = footprint.num_multiplied - footprint.num_multiplied_by_token
        multiplied = footprint.num_multiplied_by_token * tokens + head * sampled
        attended = 2 * model.num_layers * model.num_heads * model.head_dim * pairs
        return max(footprint.bytes_read(tokens) / self.peaks.bandwidth, 2 * (multiplied + attended) / self.rate)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A division of a device's memory. Raises `ConfigError`, with the arithmetic, when one sequence does not fit."""

    footprint: Footprint
    memory: int  # bytes
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def make(cls, footprint: Footprint, memory: int, max_model_len: int | None, max_num_seqs: int, budget: int) -> Self:
        """Plan the memory of a device. `max_model_len` None: the model's positions, or the tokens that fit KV
        memory.
        """
        footprint = replace(footprint, longest=max_model_len)
        least = cls(footprint, memory, max_model_len or BLOCK_SIZE, max_num_seqs, budget)
        return replace(least, max_model_len=max_model_len or min(footprint.model.max_position, least.longest))

    def __post_init__(self) -> None:
        if self.kv_bytes < self.bytes_per_sequence:
            raise ConfigError(f"{self._arithmetic()}: {self._remedy()}")

    @property
    def working_bytes(self) -> int:
        """The bytes of activations and logits, and of block tables of layers with a window."""
        tables = self.footprint.table_bytes(self.max_num_seqs)
        return self.footprint.working_bytes(self.max_num_batched_tokens, self.max_num_seqs) + tables

    @property
    def graph_bytes(self) -> int:
        return self.footprint.graph_bytes(self.max_num_batched_tokens, self.max_num_seqs)

    @property
    def kv_bytes(self) -> int:
        """The bytes left for keys and values; below 0 when the weights alone are too large."""
        return self.memory - self.footprint.weight_bytes - self.working_bytes - self.graph_bytes - RUNTIME_BYTES

    @property
    def kv_tokens(self) -> int:
        """The tokens of texts no longer than a window."""
        return self.kv_bytes // self.footprint.kv_bytes(BLOCK_SIZE) * BLOCK_SIZE

    @property
    def longest(self) -> int:
        """The tokens of one text that fill the KV memory."""
        return self.footprint.tokens_in(self.kv_bytes, self._in_flight)

    @property
    def bytes_per_sequence(self) -> int:
        """The most that one text takes: a prompt beside its window."""
        return self.footprint.kv_bytes(self.max_model_len, self._in_flight)

    @property
    def _in_flight(self) -> int:
        return EngineOptions().steps_in_flight * self.max_num_batched_tokens

    def sequences_of(self, tokens: int) -> int:
        """Return the number of decodes of `tokens` tokens that fit at once."""
        return self.kv_bytes // self.footprint.kv_bytes(tokens)

    @property
    def warnings(self) -> list[str]:
        fit = self.sequences_of(self.max_model_len)
        if fit >= self.max_num_seqs:
            return []
        each = self.footprint.tokens_in(self.kv_bytes // self.max_num_seqs)
        holds = f"KV memory holds {fit:,} sequences of {self.max_model_len:,} tokens"
        if each == 0:
            return [f"{holds}, and max_num_seqs {self.max_num_seqs:,} is never reached: lower it"]
        reached = f"that many fit up to {each:,} tokens each, beyond which some are preempted"
        return [f"{holds}, not max_num_seqs {self.max_num_seqs:,}: {reached}; lower max_num_seqs or max_model_len"]

    def _arithmetic(self) -> str:
        parts = {
            "weights": self.footprint.weight_bytes,
            "activations": self.working_bytes,
            "graphs": self.graph_bytes,
            "runtime": RUNTIME_BYTES,
        }
        taken = " - ".join(f"{name} {show_bytes(count)}" for name, count in parts.items())
        needed = f"one sequence of {self.max_model_len:,} tokens needs {show_bytes(self.bytes_per_sequence)}"
        return f"{show_bytes(self.memory)} of memory - {taken} leave {show_bytes(self.kv_bytes)} for KV, and {needed}"

    def _remedy(self) -> str:
        fitting = max(0, self.longest)
        if fitting >= BLOCK_SIZE:
            return f"lower max_model_len to {fitting:,}, or give more memory"
        narrower = " or a 16-bit dtype" if self.footprint.dtype == "float32" else ""
        spare = self.memory - self.footprint.weight_bytes - RUNTIME_BYTES
        smaller = "smaller max_num_seqs or max_num_batched_tokens, " if spare >= self.footprint.kv_bytes(1) else ""
        return f"{smaller}a smaller model{narrower}, or more memory"


def show_bytes(count: int) -> str:
    """Return a size in the largest binary unit of which there is at least one: 14.96 GiB, 128.00 MiB, 18.00 KiB."""
    unit = next((unit for unit, factor in _UNITS.items() if abs(count) >= factor), "B")
    return f"{count / _UNITS[unit]:,.2f} {unit}" if unit != "B" else f"{count} B"
