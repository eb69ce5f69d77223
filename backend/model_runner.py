"""From a batch's lists to tensors, through the decoder and the sampler, and back to tokens."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backend.batch import Admitted, Batch, StepOutput
from backend.config import EngineConfig
from backend.kernels.step import StepInputs
from backend.model import Decoder
from backend.paged_kv.kv_cache import KVCache
from backend.sampler import SlotSampler
from backend.sampling import SamplingParams


@dataclass(slots=True)
class _Step:
    """A launched batch. Nothing runs ahead on a CPU, so waiting for it is computing it."""

    runner: "ModelRunner"
    batch: Batch
    launched_at: float  # seconds of `time.perf_counter`

    def wait(self) -> StepOutput:
        token_ids = self.runner.execute(self.batch)
        return StepOutput(self.batch.step, token_ids, self.runner.measure(self.launched_at))


class ModelRunner:
    """An `Executor` over one decoder on a CPU.

    Owns what the device remembers of each slot between steps: its block table, its last token, its sampling. One thread
    calls it; batches refer to slots in the order they were planned.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, config: EngineConfig) -> None:
        self.decoder = decoder
        self.kv = kv
        self.config = config
        self.device = kv.blocks.device
        width = config.blocks_for(config.max_model_len)
        self._block_tables = np.zeros((config.max_num_seqs, width), np.int32)
        self._last_tokens = np.zeros(config.max_num_seqs, np.int64)
        self._sampler = SlotSampler(config.max_num_seqs, decoder.config.vocab_size, decoder.config.eos_token_ids)
        self._completed_at = 0.0

    def launch(self, batch: Batch) -> _Step:
        return _Step(self, batch, time.perf_counter())

    def execute(self, batch: Batch) -> list[int]:
        """Compute one step; returns the token sampled for each row of `batch.sampled`."""
        for admitted in batch.admitted:
            self._sampler.admit(admitted)
        for slot, index, blocks in batch.new_blocks:
            self._block_tables[slot, index : index + len(blocks)] = blocks
        slots = np.array(batch.slots)
        step = self._stage(batch, slots)
        hidden = self.decoder.forward(step, self.kv)
        if not batch.sampled:
            return []
        rows = np.array(batch.sampled)
        last_rows = step.query_start[torch.from_numpy(rows) + 1] - 1
        logits = self.decoder.logits(hidden[last_rows])  # [sampled, vocab]
        positions = np.array(batch.starts)[rows] + np.array(batch.lengths)[rows]  # of the tokens to be sampled
        tokens = self._sampler.sample(logits, slots[rows], positions)
        self._last_tokens[slots[rows]] = tokens.numpy()
        return tokens.tolist()

    def measure(self, launched_at: float) -> float:
        """Seconds from the last completion, or the launch if that was later, to now, which is this completion."""
        started, self._completed_at = max(self._completed_at, launched_at), time.perf_counter()
        return self._completed_at - started

    def warm_up(self) -> None:
        """Run a prefill and a decode over block 0, so that no request pays for what happens once."""
        length = min(self.config.block_size, self.config.max_model_len - 1)
        greedy = Admitted(0, SamplingParams(temperature=0), 0, [0] * length, length)
        drawn = Admitted(0, SamplingParams(temperature=1, top_p=0.9), 0, [0] * length, length)
        for admitted in (drawn, greedy):
            self.execute(Batch(0, 0, [0], [0], [length], [0] * length, [0], [(0, 0, [0])], [admitted]))
            self.execute(Batch(1, 1, [0], [length - 1], [1], [], [0]))

    def _stage(self, batch: Batch, slots: np.ndarray) -> StepInputs:
        starts, lengths = np.array(batch.starts), np.array(batch.lengths)
        query_start = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(lengths, out=query_start[1:])
        row_of = np.repeat(np.arange(len(slots)), lengths)  # [T]
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)
        context_lens = starts + lengths
        block_size = self.config.block_size
        tables = self._block_tables[slots, : self.config.blocks_for(int(context_lens.max()))]
        slot_mapping = tables[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
        fed = self._last_tokens[slots[: batch.num_decodes]]
        token_ids = np.concatenate((fed, np.array(batch.token_ids, np.int64)))
        return StepInputs(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slot_mapping),
            query_start=_int32(query_start),
            context_lens=_int32(context_lens),
            block_tables=torch.from_numpy(tables),
            num_seqs=len(slots),
            max_query_len=int(lengths.max()),
            max_context_len=int(context_lens.max()),
        )


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
