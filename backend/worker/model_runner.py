"""The model runner takes a batch to tensors, through the decoder and the sampler, and back to tokens."""

from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from backend.calibration_steps import CalibrationStep, calibration_series
from backend.config import EngineConfig
from backend.errors import DeviceError, MemoryExhausted
from backend.kernels.ops import StepInputs
from backend.model.decoder import Decoder
from backend.paged_kv.kv_cache import KVCache
from backend.scheduler.batch import NO_TOKEN, Batch, NewSequence, StepOutput
from backend.worker import calibration, warm_up
from backend.worker.cuda_graphs import StepGraphs
from backend.worker.device_errors import explained, is_device_error, is_out_of_memory
from backend.worker.device_sampler import DeviceSampler
from backend.worker.device_stream import DeviceStream, Running, make_device_stream
from backend.worker.graph_shapes import GraphShapes, StepShape
from backend.worker.sampler import Choose, SlotSampler
from backend.worker.staging import Layout, Staged, Stager
from backend.worker.swapper import Swapper


class StepSampler(Protocol):
    """A sampler knows how the sequence of each slot is sampled."""

    def admit(self, admitted: NewSequence) -> None: ...

    def stage(self, staged: Staged) -> Choose: ...


@dataclass(slots=True)
class LaunchedStep:
    """A step that was launched, to be waited for."""

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
    """An `Executor` over one decoder, the same for every device: what differs is the stream that the work runs in.

    `launch` stages a batch on the host and queues its work; what the device remembers of each slot between steps (its
    block table, its last token) is read and written by that work alone, in the order of the launches.

    A step for which there is no memory has written nothing that it would not write again, up to its last tokens, which
    take none. It may be launched once more under its number, or another in its place. A number that is not above those
    before begins anew: nobody waits for what is in flight.
    """

    def __init__(
        self, decoder: Decoder, kv: KVCache, config: EngineConfig, device_stream: DeviceStream | None = None
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.config = config
        self.device = kv.blocks.device
        self.graphs: StepGraphs | None = None
        self._device_stream = device_stream or make_device_stream(self.device, decoder.ops.captures)
        self.runs_ahead = self._device_stream.runs_ahead
        layout = Layout.of(config)
        self.stager = Stager(config, layout, self._device_stream.staging)
        self._memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self.device)
        self._received = layout.views(self._memory)
        self._num_head_bytes = layout.num_head_bytes
        seqs, width = config.max_num_seqs, config.blocks_for(config.max_model_len)
        self._tables = torch.zeros((seqs, width), dtype=torch.int32, device=self.device)
        self._row_tables = torch.zeros(layout.num_places * width, dtype=torch.int32, device=self.device)
        self._last_tokens = torch.zeros(seqs, dtype=torch.int64, device=self.device)
        self._logits: Tensor | None = None  # [seqs, vocab] fp32, where graphs and all other steps then write theirs
        if self._device_stream.captures:
            self._logits = torch.zeros((seqs, decoder.config.vocab_size), dtype=torch.float32, device=self.device)
        self._sampler = self._make_sampler()
        self._swapper = Swapper(kv, config.num_host_blocks) if config.num_host_blocks else None
        self._staged: deque[Staged] = deque()  # steps launched and not completed
        self._newest = -1  # step

    def launch(self, batch: Batch) -> LaunchedStep:
        try:
            if batch.step <= self._newest:
                self._forget_unfinished()
            self._newest = batch.step
            return self._launch_step(batch)
        except Exception as error:
            if not is_device_error(error):
                raise
            raise self.failure(batch.step, error) from error

    def completed(self) -> None:
        """Free what the oldest step was staged in: it has completed, and its tokens are read."""
        self.stager.release(self._staged.popleft())

    def failure(self, step: int, error: Exception) -> DeviceError:
        """Return what a failure means: torch reports whatever CUDA does, after most of which nothing can be trusted."""
        if not is_out_of_memory(error):
            return DeviceError(explained(f"step {step} failed on {self.device}", error))
        self._device_stream.recover()
        return MemoryExhausted(f"no memory on {self.device} for step {step}: {error}")

    def _forget_unfinished(self) -> None:
        """Forget whatever was staged: it is lost, or belongs to a generation that was interrupted at any point."""
        if self.stager.in_use:
            self._device_stream.recover()  # the device may be reading it
            self.stager.release_all()
        self._staged.clear()

    def measure_copies(self) -> None:
        """Measure what copying a block to the host takes, before anything runs: the planner decides by it."""
        if self._swapper is not None:
            seconds = self._swapper.measure()
            self.config = replace(self.config, block_copy_seconds=seconds, copies_run_ahead=self.runs_ahead)

    def warm_up(self) -> None:
        """Run every kind of step over block 0 and record the graphs, so that no request pays for what happens once.

        Torch keeps a handle of a GPU's libraries for each thread, and gives that of a thread which has ended to the
        next that asks: so warming up has a thread of its own, and the one that launches steps takes its handle over.
        """
        if not self._device_stream.captures:
            self._rehearse(warm_up.sampling(self.config))
            return
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._warm_device).result()

    def calibrate(self, seconds: float) -> calibration.Measured:
        """Run steps of many shapes for about so many seconds, before anything else runs; returns what each took."""
        if self._device_stream.captures:
            with ThreadPoolExecutor(1) as thread:  # as in `warm_up`
                return thread.submit(self._calibrate, seconds).result()
        return self._calibrate(seconds)

    def calibration_batch(self, step: CalibrationStep) -> Batch:
        """Return the batch of a step that is run while no sequence has a slot."""
        return calibration.batch_of(step, self.config, self._num_calibration_blocks)

    @property
    def _num_calibration_blocks(self) -> int:
        """The blocks that calibration steps read: of a pool in the host's memory, as few as do not fit its caches."""
        if self.device.type != "cpu":
            return self.config.num_blocks
        return min(self.config.num_blocks, max(1, calibration.READ_BYTES // self.kv.blocks[0].nbytes))

    def _calibrate(self, seconds: float) -> calibration.Measured:
        if self.device.type == "cpu":
            self.kv.blocks[: self._num_calibration_blocks].zero_()  # else all pages were one that was never written

        def run(step: CalibrationStep) -> float:
            return self.launch(self.calibration_batch(step)).wait().elapsed

        return calibration.measure(calibration_series(self.config), run, seconds)

    def _make_sampler(self) -> StepSampler:
        model, seqs = self.decoder.config, self.config.max_num_seqs
        sample = self.decoder.ops.sample
        if sample is None:
            return SlotSampler(seqs, model.vocab_size, model.eos_token_ids, self.device)
        return DeviceSampler(sample, self._received, seqs, model.vocab_size, model.eos_token_ids)

    def _warm_device(self) -> None:
        """Record graphs, then run steps without one: recording gives back the memory that those then keep."""
        graphs = self.graphs or self._make_graphs()
        self.graphs = None
        self._rehearse(warm_up.prompts(self.config))
        self.graphs = graphs
        self._rehearse(warm_up.sampling(self.config))
        self._rehearse([warm_up.decodes(self.config)])

    def _rehearse(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self.launch(batch).wait()

    def _make_graphs(self) -> StepGraphs:
        assert self._logits is not None
        self._memory.zero_()  # places of no tokens, whatever was staged before
        try:
            return StepGraphs(GraphShapes(self.config), self._device_stream, self._compute_padded, self._logits)
        except Exception as error:
            if not is_device_error(error):
                raise
            raise DeviceError(explained(f"{self.device} failed", error)) from error

    def _launch_step(self, batch: Batch) -> LaunchedStep:
        for admitted in batch.admitted:
            self._sampler.admit(admitted)
        shape = None if self.graphs is None else self.graphs.shape_for(batch)
        staged = self.stager.stage(batch, shape or StepShape.of(batch))
        self._staged.append(staged)
        choose = self._sampler.stage(staged) if staged.num_sampled else None
        work = partial(self._run, staged, choose, None if shape is None else self.graphs, batch.block_copies)
        copies = partial(self._swapper.copy, batch) if self._swapper is not None and batch.num_copies else None
        return LaunchedStep(self, batch.step, staged, self._device_stream.launch(work, copies))

    @torch.inference_mode()
    def _run(
        self,
        staged: Staged,
        choose: Choose | None,
        graphs: StepGraphs | None,
        block_copies: Collection[tuple[int, int]],
    ) -> None:
        self._receive(staged)
        logits = self._compute(staged.shape, staged.num_sampled) if graphs is None else graphs.replay(staged.shape)
        if block_copies:
            self.kv.copy(block_copies)
        if choose is None:
            return
        logits = logits[: staged.num_sampled]
        is_drawn = logits[:, 0].isfinite()  # one NaN or infinity in a row's state makes all of its logits so
        tokens = choose(logits)
        self._last_tokens.index_copy_(0, self._received.sampled_slots[: staged.num_sampled], tokens)
        staged.piece.tokens[: staged.num_sampled].copy_(tokens.where(is_drawn, NO_TOKEN), non_blocking=True)

    def _receive(self, staged: Staged) -> None:
        """Copy the staged numbers to the device, and change its block tables."""
        head, count = slice(self._num_head_bytes), staged.num_changes
        self._memory[head].copy_(staged.piece.memory[head], non_blocking=True)
        if count:
            places, blocks = self._received.table_places[:count], self._received.table_blocks[:count]
            places.copy_(staged.piece.tensors.table_places[:count], non_blocking=True)
            blocks.copy_(staged.piece.tensors.table_blocks[:count], non_blocking=True)
            self._tables.view(-1).index_copy_(0, places, blocks)

    @torch.inference_mode()
    def _compute(self, shape: StepShape, num_sampled: int) -> Tensor:
        """Compute the logits [num_sampled, vocab] of the rows that sample, from staged numbers."""
        hidden = self.decoder.forward(self._inputs(shape), self.kv)
        out = None if self._logits is None else self._logits[:num_sampled]
        return self.decoder.logits(hidden[self._received.last_rows[:num_sampled]], out)

    def _compute_padded(self, shape: StepShape) -> None:
        """Compute the step of a graph: what it reads and writes stays where it is, and depends on the shape alone."""
        self._compute(shape, min(shape.num_seqs, self.config.max_num_seqs))

    def _inputs(self, shape: StepShape) -> StepInputs:
        rows, num_seqs, num_tokens = self._received, shape.num_seqs, shape.num_tokens
        width = self.config.blocks_for(shape.max_context_len)
        tables = self._row_tables[: num_seqs * width].view(num_seqs, width)
        torch.index_select(self._tables[:, :width], 0, rows.slots[:num_seqs], out=tables)
        self._feed(shape.num_decodes)
        return StepInputs(
            token_ids=rows.token_ids[:num_tokens],
            positions=rows.positions[:num_tokens],
            slot_mapping=rows.slot_mapping[:num_tokens],
            query_start=rows.query_start[: num_seqs + 1],
            context_lens=rows.context_lens[:num_seqs],
            block_tables=tables,
            num_seqs=num_seqs,
            max_query_len=shape.max_query_len,
            max_context_len=shape.max_context_len,
            num_decodes=shape.num_decodes,
        )

    def _feed(self, num_decodes: int) -> None:
        """Feed decodes what their slots sampled last. Of that many rows, some may be prompts' or padding."""
        if num_decodes:
            token_ids = self._received.token_ids[:num_decodes]
            last = self._last_tokens.index_select(0, self._received.slots[:num_decodes])
            torch.where(token_ids < 0, last, token_ids, out=token_ids)
