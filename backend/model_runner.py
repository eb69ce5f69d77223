"""From a batch's lists to tensors, through the decoder and the sampler, and back to tokens."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from backend.batch import Admitted, Batch, StepOutput
from backend.config import EngineConfig
from backend.decode_graphs import DecodeGraphs
from backend.device_sampler import DeviceSampler
from backend.errors import DeviceError, MemoryExhausted
from backend.kernels.step import StepInputs
from backend.lane import Graph, Lane, Running, Work, make_lane
from backend.model import Decoder
from backend.paged_kv.kv_cache import KVCache
from backend.sampler import Choose, SlotSampler
from backend.sampling import SamplingParams
from backend.staging import Staged, Stager
from backend.step_fields import Layout


class Sampler(Protocol):
    """Knows how the sequence of each slot is sampled."""

    def admit(self, admitted: Admitted) -> None: ...

    def stage(self, staged: Staged) -> Choose: ...


@dataclass(slots=True)
class _Step:
    """A launched batch."""

    runner: "ModelRunner"
    number: int
    staged: Staged
    running: Running

    def wait(self) -> StepOutput:
        try:
            elapsed = self.running.wait()
        except (RuntimeError, MemoryError) as error:
            raise self.runner.failure(self.number, error) from error
        token_ids = self.staged.piece.tokens[: self.staged.num_sampled].tolist()
        self.runner.completed()
        return StepOutput(self.number, token_ids, elapsed)


class ModelRunner:
    """An `Executor` over one decoder, the same for every device: what differs is the lane that the work runs in.

    `launch` stages a batch on the host and queues its work; what the device remembers of each slot between steps (its
    block table, its last token) is read and written by that work alone, in the order of the launches.

    A step for which there is no memory has written nothing that it would not write again, up to its last tokens, which
    take none. It may be launched once more under its number, or another in its place.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, config: EngineConfig, lane: Lane | None = None) -> None:
        self.decoder = decoder
        self.kv = kv
        self.config = config
        self.device = kv.blocks.device
        self._lane = lane or make_lane(self.device)
        self._graphs: DecodeGraphs | None = None
        layout = Layout.of(config)
        self.stager = Stager(config, layout, self._lane.staging)
        self._memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self.device)
        self._received = layout.views(self._memory)
        self._num_head_bytes = layout.num_head_bytes
        seqs, width = config.max_num_seqs, config.blocks_for(config.max_model_len)
        self._tables = torch.zeros((seqs, width), dtype=torch.int32, device=self.device)
        self._row_tables = torch.zeros(seqs * width, dtype=torch.int32, device=self.device)
        self._last_tokens = torch.zeros(seqs, dtype=torch.int64, device=self.device)
        self._logits: Tensor | None = None  # [seqs, vocab] fp32, where graphs and all other steps then write theirs
        if self._lane.captures:
            self._logits = torch.zeros((seqs, decoder.config.vocab_size), dtype=torch.float32, device=self.device)
        self._sampler = self._make_sampler()
        self._staged: deque[tuple[int, Staged]] = deque()  # by step: those launched and not completed
        self._newest = -1  # step

    def launch(self, batch: Batch) -> _Step:
        if batch.step <= self._newest:
            self._give_back(batch.step)
        self._newest = batch.step
        try:
            return self._launch_step(batch)
        except (RuntimeError, MemoryError) as error:
            raise self.failure(batch.step, error) from error

    def completed(self) -> None:
        """The oldest step was, and its tokens are read."""
        self.stager.release(self._staged.popleft()[1])

    def failure(self, step: int, error: RuntimeError | MemoryError) -> DeviceError:
        """What a step's failure means: torch reports whatever CUDA does, after most of which nothing can be trusted."""
        if not _is_out_of_memory(error):
            return DeviceError(f"step {step} failed on {self.device}: {error}")
        self._lane.recover()
        return MemoryExhausted(f"no memory on {self.device} for step {step}: {error}")

    def _give_back(self, step: int) -> None:
        """What was staged for this step and those behind it, which are lost. All before it are completed."""
        while self._staged and self._staged[-1][0] >= step:
            self.stager.release(self._staged.pop()[1])

    def warm_up(self) -> None:
        """Run every kind of step over block 0 and record the graphs, so that no request pays for what happens once.

        Torch keeps a handle of a GPU's libraries for each thread, and gives that of a thread which has ended to the
        next that asks: so warming up has a thread of its own, and the one that launches steps takes its handle over.
        """
        if not self._lane.captures:
            self._rehearse_sampling()
            return
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._warm_device).result()

    def _make_sampler(self) -> Sampler:
        model, seqs = self.decoder.config, self.config.max_num_seqs
        sample = self.decoder.ops.sample
        if sample is None:
            return SlotSampler(seqs, model.vocab_size, model.eos_token_ids, self.device)
        return DeviceSampler(sample, self._received, seqs, model.vocab_size, model.eos_token_ids)

    def _warm_device(self) -> None:
        self._rehearse_prompts()
        self._rehearse_sampling()
        if self._logits is not None and self._graphs is None:
            self._graphs = DecodeGraphs(self._record, self._decode, self._logits)
            self._rehearse_sampling()
        self._rehearse_decodes()

    def _rehearse_decodes(self) -> None:
        """As many as there are slots, for which sampling takes the most memory."""
        every = list(range(self.config.max_num_seqs))
        nothing, one = [0] * len(every), [1] * len(every)
        self.launch(Batch(1, len(every), every, nothing, one, [], every)).wait()

    def _rehearse_prompts(self) -> None:
        """The longest prompt of one step, half of it and so on: products are loaded by their sizes.

        The longest comes first, so that the others fit the memory that it takes.
        """
        length = min(self.config.max_num_batched_tokens, self.config.max_model_len - 1)
        while length > 0:
            self._rehearse_prompt(length, SamplingParams(temperature=0))
            length //= 2

    def _rehearse_sampling(self) -> None:
        """Steps of every kind of sampling."""
        length = min(self.config.block_size, self.config.max_model_len - 1)
        kinds = (
            SamplingParams(temperature=1, top_p=0.9),
            SamplingParams(temperature=0, presence_penalty=1, min_tokens=2, stop_token_ids=(0,)),
            SamplingParams(temperature=0),
        )
        for sampling in kinds:
            self._rehearse_prompt(length, sampling)
            self.launch(Batch(1, 1, [0], [length - 1], [1], [], [0])).wait()

    def _rehearse_prompt(self, length: int, sampling: SamplingParams) -> None:
        """One whole prompt in slot 0, all of whose context lies in block 0."""
        blocks, admitted = [0] * self.config.blocks_for(length), Admitted(0, sampling, 0, [0] * length, length)
        self.launch(Batch(0, 0, [0], [0], [length], [0] * length, [0], [(0, 0, blocks)], [admitted])).wait()

    def _record(self, work: Work) -> Graph:
        """Run it first: what libraries load and reserve at a size's first use is not for a graph to hold."""
        try:
            self._lane.launch(work).wait()
            return self._lane.capture(work)
        except RuntimeError as error:
            raise DeviceError(f"{self.device} failed: {error}") from error

    def _launch_step(self, batch: Batch) -> _Step:
        for admitted in batch.admitted:
            self._sampler.admit(admitted)
        num_seqs = len(batch.slots)
        graphs = self._graphs if batch.num_decodes == num_seqs else None
        staged = self.stager.stage(batch, num_seqs if graphs is None else graphs.size_for(num_seqs))
        self._staged.append((batch.step, staged))
        choose = self._sampler.stage(staged) if staged.num_sampled else None
        return _Step(self, batch.step, staged, self._lane.launch(partial(self._run, staged, choose, graphs)))

    @torch.inference_mode()
    def _run(self, staged: Staged, choose: Choose | None, graphs: DecodeGraphs | None) -> None:
        self._receive(staged)
        if graphs is not None:
            logits = graphs.replay(staged.num_rows)[: staged.num_seqs]
        else:
            hidden = self.decoder.forward(self._inputs(staged), self.kv)
            if choose is None:
                return
            logits = self._logits_of(hidden[self._received.last_rows[: staged.num_sampled]])
        assert choose is not None, "every decode samples"
        tokens = choose(logits)
        self._last_tokens.index_copy_(0, self._received.sampled_slots[: staged.num_sampled], tokens)
        staged.piece.tokens[: staged.num_sampled].copy_(tokens, non_blocking=True)

    def _receive(self, staged: Staged) -> None:
        """Copy the staged numbers to the device, and change its block tables."""
        head, count = slice(self._num_head_bytes), staged.num_changes
        self._memory[head].copy_(staged.piece.memory[head], non_blocking=True)
        if count:
            places, blocks = self._received.table_places[:count], self._received.table_blocks[:count]
            places.copy_(staged.piece.tensors.table_places[:count], non_blocking=True)
            blocks.copy_(staged.piece.tensors.table_blocks[:count], non_blocking=True)
            self._tables.view(-1).index_copy_(0, places, blocks)

    def _inputs(self, staged: Staged) -> StepInputs:
        return self._make_inputs(
            staged.num_tokens, staged.num_rows, staged.num_decodes, staged.max_query_len, staged.max_context_len
        )

    @torch.inference_mode()
    def _decode(self, num_rows: int) -> None:
        """The step of a graph: everything in it stays where it is, and depends on no number but `num_rows`."""
        step = self._make_inputs(num_rows, num_rows, num_rows, 1, self.config.max_model_len)
        self._logits_of(self.decoder.forward(step, self.kv))

    def _make_inputs(
        self, num_tokens: int, num_seqs: int, num_decodes: int, max_query_len: int, max_context_len: int
    ) -> StepInputs:
        """The step's inputs on the device: decodes are fed what their slots sampled last."""
        rows, width = self._received, self.config.blocks_for(max_context_len)
        slots = rows.slots[:num_seqs]
        tables = self._row_tables[: num_seqs * width].view(num_seqs, width)
        torch.index_select(self._tables[:, :width], 0, slots, out=tables)
        if num_decodes:
            torch.index_select(self._last_tokens, 0, slots[:num_decodes], out=rows.token_ids[:num_decodes])
        return StepInputs(
            token_ids=rows.token_ids[:num_tokens],
            positions=rows.positions[:num_tokens],
            slot_mapping=rows.slot_mapping[:num_tokens],
            query_start=rows.query_start[: num_seqs + 1],
            context_lens=rows.context_lens[:num_seqs],
            block_tables=tables,
            num_seqs=num_seqs,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            num_decodes=num_decodes,
        )

    def _logits_of(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden, None if self._logits is None else self._logits[: len(hidden)])


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """On a CPU torch says so in words alone."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
