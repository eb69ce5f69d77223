"""A GPU's memory behind the weights, divided by a measurement of a step's use."""

from dataclasses import dataclass

import torch

from backend.errors import ConfigError
from backend.kernels.ops import StepInputs
from backend.model.decoder import Decoder
from backend.model.model_config import ModelConfig
from backend.paged_kv.kv_cache import KVCache
from backend.roofline import RUNTIME_BYTES, Footprint, recorded_bytes, show_bytes, window_table_bytes
from backend.sizing import ModelDemand
from backend.worker import graph_shapes
from backend.worker.logprobs import COPIES_PER_SLICE, SLICE_BYTES

PENALTY_BYTES_PER_TOKEN = 5  # for each slot and token of the vocabulary (`penalties`)
BYTES_PER_LOGIT = 4


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device and its parts, in bytes."""

    device: str
    total: int
    free: int  # with the weights in place
    weights: int
    activations: int  # the peak of a step's temporary tensors
    graphs: int  # the largest graph's permanent tensors, as much as a step of its size, and all graphs' nodes
    slots: int  # the engine's state of all slots
    reserve: int = RUNTIME_BYTES  # fragments, and later allocations of libraries

    @property
    def kv_bytes(self) -> int:
        """The bytes left for keys and values."""
        return self.free - self.activations - self.graphs - self.slots - self.reserve

    def __str__(self) -> str:
        elsewhere = self.total - self.free - self.weights
        parts = {
            "weights": self.weights,
            "in use otherwise": elsewhere,
            "activations": self.activations,
            "graphs": self.graphs,
            "logits, log probabilities and penalties": self.slots,
            "reserve": self.reserve,
        }
        taken = " - ".join(f"{name} {show_bytes(count)}" for name, count in parts.items())
        return f"{self.device} has {show_bytes(self.total)} - {taken} = {show_bytes(self.kv_bytes)} for KV"


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Return the free bytes and all bytes of a CUDA device. Memory that torch has cached, for instance of a discarded
    model, is free.
    """
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def expected_memory(device: str, free: int, total: int, demand: ModelDemand, tokens: int) -> DeviceMemory:
    """Estimate the memory before anything is loaded, from the config, for steps of `tokens`."""
    options, part = demand.options, demand.part
    dtype, seqs = str(demand.dtype).removeprefix("torch."), options.max_num_seqs
    footprint = Footprint(part, dtype, quantization=options.quantization)
    weights = footprint.weight_bytes
    activations, graphs = footprint.working_bytes(tokens, 0), footprint.graph_bytes(tokens, seqs)
    longest = options.max_model_len or part.max_position
    slots = slot_bytes(part, seqs) + window_table_bytes(demand.groups, seqs, longest, options.block_size)
    return DeviceMemory(device, total, free - weights, weights, activations, graphs, slots)


def measured_memory(
    decoder: Decoder,
    device: torch.device,
    weights: int,
    tokens: int,
    seqs: int,
    block_size: int,
    kv_dtype: torch.dtype | None = None,  # the decoder's, unless another is named
) -> DeviceMemory:
    """Measure the memory with `weights` bytes in place, by a step of `tokens` and by the largest step of a graph."""
    dtype, layers = kv_dtype or decoder.embedding.dtype, decoder.groups.size
    kv = KVCache(decoder.config, 1, block_size, dtype, device, num_layers=layers)
    activations = graphs = _step_bytes(decoder, device, tokens, seqs, block_size, kv)
    if (most := graph_shapes.largest(tokens)) < tokens:
        graphs = _step_bytes(decoder, device, most, seqs, block_size, kv)
    del kv
    graphs += recorded_bytes(decoder.config, tokens, seqs)
    free, total = free_and_total(device)
    tables = window_table_bytes(decoder.groups, seqs, len(decoder.cos_sin), block_size)
    slots = slot_bytes(decoder.config, seqs) + tables
    return DeviceMemory(str(device), total, free, weights, activations, graphs, slots)


def check_fits(memory: DeviceMemory) -> None:
    """Raise `ConfigError`, with the arithmetic, when nothing is left for keys and values."""
    if memory.kv_bytes <= 0:
        raise ConfigError(
            f"the model does not fit: {memory}; lower max_num_batched_tokens or max_num_seqs, choose a 16-bit dtype "
            f"or a smaller model, or free the device"
        )


def slot_bytes(model: ModelConfig, seqs: int) -> int:
    """Return the bytes for `seqs` slots: logits, their log probabilities, the counts of penalties, the masks of rules
    and of grammars; and for one slice of a prompt's logits.
    """
    above = 1  # for each log probability, a flag that it is above the token's own
    by_token = 2 * BYTES_PER_LOGIT + above + PENALTY_BYTES_PER_TOKEN
    return seqs * (model.vocab_size * by_token + model.vocab_size // 4) + COPIES_PER_SLICE * SLICE_BYTES


def rehearsal(tokens: int, block_size: int, max_position: int, device: torch.device) -> StepInputs:
    """Return a prompt of `tokens`, all of whose context lies in block 0 and which stores nothing."""
    return StepInputs(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=torch.arange(tokens, device=device) % max_position,
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        query_start=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
        block_tables=torch.zeros((1, -(-tokens // block_size)), dtype=torch.int32, device=device),
        num_seqs=1,
        max_query_len=tokens,
        max_context_len=tokens,
    )


def _step_bytes(decoder: Decoder, device: torch.device, tokens: int, seqs: int, block_size: int, kv: KVCache) -> int:
    """Return the bytes that torch takes from the device for a step's tensors, apart from weights, keys and values.

    They exceed the tensors' own bytes, because a piece cut for one size does not always serve another.
    """
    step = rehearsal(tokens, block_size, len(decoder.cos_sin), device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # or the step would reuse the cached memory of another
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    hidden = decoder.forward(step, kv)
    decoder.logits(hidden[:seqs])
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before
