"""The model runner turns a batch into tensors, through the decoder and the sampler, and back into tokens."""

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
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
from backend.structured_output.masks import TokenMasks
from backend.worker import calibration, warm_up
from backend.worker.adapter_tables import AdapterTables
from backend.worker.adapter_times import measure_adapters
from backend.worker.constrained_step import ConstrainedStep, MaskBuffers
from backend.worker.cuda_graphs import StepGraphs
from backend.worker.device_errors import explained, is_device_error, is_out_of_memory
from backend.worker.device_sampler import DeviceSampler
from backend.worker.device_stream import DeviceStream, LaunchedWork, Work, make_device_stream
from backend.worker.graph_shapes import GraphShapes, StepShape
from backend.worker.logits_processors import where_allowed
from backend.worker.logprobs import AskedLogprobs, StepLogprobs
from backend.worker.sampler import SlotSampler, TokenChoice
from backend.worker.sleeping import SleepingWeights
from backend.worker.staging import Layout, StagedStep, Stager
from backend.worker.swapper import Swapper

# the most that a step's output waits for the masks of the step behind it, as a share of the step
MASK_WAIT_SHARE_OF_STEP = 0.25


class StepSampler(Protocol):
    """A sampler knows how the sequence of each slot is sampled."""

    def admit(self, admitted: NewSequence) -> None: ...

    def stage(self, staged: StagedStep) -> TokenChoice: ...


@dataclass(slots=True)
class StepAhead:
    """The facts about a launched step that the next step needs, without a reference to the runner, which keeps it."""

    staged: StagedStep
    running: LaunchedWork
    masks: TokenMasks | None  # to be told its tokens; None: they know, or there are none
    behind: ConstrainedStep | None = None  # the step launched behind it, if that may tell which tokens are forced

    def synchronize(self) -> float:
        """Wait for the step, and make its tokens known to the steps behind it that may need them: once, because at a
        second call its staging piece may be another step's.
        """
        elapsed = self.running.synchronize()
        if (masks := self.masks) is not None:
            piece, count = self.staged.piece, self.staged.num_rows
            masks.sampled(piece.numbers.sampled_slots[:count], piece.tokens[:count].numpy())
            self.masks = None
        return elapsed


@dataclass(slots=True)
class LaunchedStep:
    """A launched step, to be waited for."""

    runner: "ModelRunner"
    number: int
    work: StepAhead
    drafts: list[tuple[int, list[int]]]
    logprobs: StepLogprobs | None
    constrained: ConstrainedStep | None

    def wait(self) -> StepOutput:
        try:
            elapsed = self.work.synchronize()
        except (RuntimeError, MemoryError) as error:
            raise self.runner.failure(self.number, error) from error
        staged = self.work.staged
        piece, count = staged.piece, staged.num_rows
        token_ids, slots = piece.tokens[: staged.num_sampled].tolist(), piece.numbers.sampled_slots[:count].tolist()
        self.runner.completed()
        output = StepOutput(self.number, token_ids[:count], elapsed)
        if self.logprobs is not None:
            output.logprobs, output.prompt_logprobs = self.logprobs.read()
        if self.constrained is not None:
            self.constrained.complete(output)
        if self.drafts:
            verify(self.drafts, token_ids[count:], output)
        if (behind := self.work.behind) is not None:
            behind.foretell(output, slots, MASK_WAIT_SHARE_OF_STEP * elapsed)
        return output


def verify(drafts: list[tuple[int, list[int]]], drawn: list[int], output: StepOutput) -> None:
    """Write into a step's output the tokens `drawn` behind drafted ones, draft after draft, as far as those were
    accepted: up to the first that is not the token drawn in its place.
    """
    tokens, forced, first = output.token_ids, output.forced or {}, len(output.token_ids)
    scores, output.logprobs = output.logprobs, None
    if scores is not None:
        output.logprobs = {index: one for index, one in scores.items() if index < len(tokens)} or None
        output.forced_logprobs = {}
    for index, draft in drafts:
        behind, token, count = drawn[first - len(tokens) :], tokens[index], 0
        while count < len(draft) and token == draft[count] and behind[count] >= 0:
            token = behind[count]
            count += 1
        if count:
            forced[index] = behind[:count]
        if count and scores is not None and index in scores and output.forced_logprobs is not None:
            output.forced_logprobs[index] = [scores[first + each] for each in range(count)]
        first += len(draft)
    output.forced = forced or None


class ModelRunner:
    """An `Executor` over one decoder, the same for every device: only the device stream differs.

    `launch` stages a batch on the host and queues its work. The device's state of each slot between steps (its block
    table, its last token) is read and written by that work alone, in the order of the launches.

    A step that runs out of memory has written only what a repetition would write again. It may be launched once more
    under its number, or another in its place. A number that is not above the earlier ones begins anew, and abandons the
    steps in flight.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        config: EngineConfig,
        device_stream: DeviceStream | None = None,
        beside: "ModelRunner | None" = None,
    ) -> None:
        """`beside`: another model's runner, whose memory `kv` shares, and which works in the same stream."""
        self.decoder = decoder
        self.kv = kv
        self.config = config
        self.device = kv.blocks.device
        self.graphs: StepGraphs | None = None
        if beside is not None:
            device_stream = beside.device_stream
        self.device_stream: DeviceStream = device_stream or make_device_stream(self.device, decoder.ops.captures)
        self.runs_ahead = self.device_stream.runs_ahead
        layout = Layout.of(config)
        self.adapters: AdapterTables | None = None
        if config.max_adapter_rank:
            others = None if beside is None else beside.adapters
            self.adapters = AdapterTables(decoder.config, kv, config, decoder.embedding.dtype, others)
        rows = None if self.adapters is None else self.adapters.rows
        self.stager = Stager(config, layout, self.device_stream.staging, rows)
        self._memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self.device)
        self._received = layout.views(self._memory)
        self._num_head_bytes = layout.num_head_bytes
        seqs, width = config.max_num_seqs, config.blocks_for(config.max_model_len)
        sampled = config.max_sampled_tokens
        groups = 1 + config.window_groups  # of layers, each with tables of its own
        assert groups == 1 + decoder.groups.num_windows and kv.blocks.shape[1] == decoder.groups.size
        self._tables = torch.zeros((groups, seqs, width), dtype=torch.int32, device=self.device)
        entries = -(-layout.num_places * width // 4) * 4  # of a group, which begins at a multiple of 16 bytes
        self._row_tables = torch.zeros((groups, entries), dtype=torch.int32, device=self.device)
        self._last_tokens = torch.zeros(seqs, dtype=torch.int64, device=self.device)
        # [sampled, vocab] fp32, to which graphs and all other steps write; None without graphs
        self._logits: Tensor | None = None
        if self.device_stream.captures:
            self._logits = torch.zeros((sampled, decoder.config.vocab_size), dtype=torch.float32, device=self.device)
        self._sampler = self._make_sampler()
        self._asked_logprobs = AskedLogprobs(decoder.config.vocab_size, self.device)
        self.swapper: Swapper | None = None if beside is None else beside.swapper
        if beside is None and config.num_host_blocks:
            self.swapper = Swapper(kv, config.num_host_blocks)
        self.weights: SleepingWeights | None = None  # None: they are always in memory
        self.before: Callable[[Batch], object] | None = None  # the first part of each step's work
        self.masks: TokenMasks | None = None  # of sequences with a grammar; None: grammars are refused
        self._mask_buffers = MaskBuffers(config, decoder.config.vocab_size, self.device_stream)
        self._launched: StepAhead | None = None  # the last step, if steps run before they are waited for
        self._staged: deque[StagedStep] = deque()  # steps launched and not completed
        self._newest = -1  # step number

    def launch(self, batch: Batch) -> LaunchedStep:
        try:
            if batch.step <= self._newest:
                self.forget_unfinished()
            self._newest = batch.step if batch.stores else sys.maxsize  # none is in flight behind a calibration step
            return self._launch_step(batch)
        except Exception as error:
            if not is_device_error(error):
                raise
            raise self.failure(batch.step, error) from error

    def completed(self) -> None:
        """Free the staging memory of the oldest step: it has completed, and its tokens are read."""
        self.stager.release(self._staged.popleft())

    def failure(self, step: int, error: Exception) -> DeviceError:
        """Return the error for a failed step; after most of CUDA's errors the device cannot be trusted again."""
        if not is_out_of_memory(error):
            return DeviceError(explained(f"step {step} failed on {self.device}", error))
        self.device_stream.recover()
        return MemoryExhausted(f"no memory on {self.device} for step {step}: {error}")

    def forget_unfinished(self) -> None:
        """Forget all staged steps: they are lost, or belong to a generation that was interrupted."""
        if self.stager.in_use:
            self.device_stream.recover()  # the device may be reading it
            self.stager.release_all()
        self._staged.clear()
        self._launched = None

    def measure_copies(self) -> None:
        """Measure the time of a block's copy to the host, before any step: the planner decides by it."""
        if self.swapper is not None:
            seconds = self.swapper.measure()
            self.config = replace(self.config, block_copy_seconds=seconds, copies_run_ahead=self.runs_ahead)

    def measure_adapters(self) -> None:
        """Measure what adapters add to a step, before any step, unless there are to be none."""
        if self.adapters is None:
            return
        self._touch_blocks()

        def run(batch: Batch) -> float:
            return self.launch(batch).wait().elapsed

        seconds = measure_adapters(self.adapters, self.decoder.config, self.config, self._num_calibration_blocks, run)
        self.config = replace(self.config, adapter_block_seconds=seconds)

    def warm_up(self) -> None:
        """Run every kind of step over block 0 and record the graphs, so that no request pays for work that happens
        once.

        Torch keeps a handle of a GPU's libraries for each thread, and passes the handle of a thread that has ended to
        the next thread that asks. So warming up has a thread of its own, whose handle the launching thread takes over.
        """
        if not self.device_stream.captures:
            self._rehearse(warm_up.sampling(self.config))
            return
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._warm_device).result()

    def calibrate(self, seconds: float) -> calibration.Measured:
        """Run steps of many shapes for about `seconds`, before any other step; return the time of each."""
        if self.device_stream.captures:
            with ThreadPoolExecutor(1) as thread:  # as in `warm_up`
                return thread.submit(self._calibrate, seconds).result()
        return self._calibrate(seconds)

    def calibration_batch(self, step: CalibrationStep) -> Batch:
        """Return the batch of a step that is run while no sequence has a slot."""
        return calibration.batch_of(
            step, self.config, self._num_calibration_blocks, vocab_size=self.decoder.config.vocab_size
        )

    @property
    def _num_calibration_blocks(self) -> int:
        """The number of blocks that calibration steps read: of a pool in the host's memory, just more than its caches
        hold.
        """
        if self.device.type != "cpu":
            return self.config.num_blocks
        return min(self.config.num_blocks, max(1, calibration.CALIBRATION_READ_BYTES // self.kv.blocks[0].nbytes))

    def _calibrate(self, seconds: float) -> calibration.Measured:
        self._touch_blocks()

        def run(step: CalibrationStep) -> float:
            return self.launch(self.calibration_batch(step)).wait().elapsed

        return calibration.measure(calibration_series(self.config), run, seconds)

    def _touch_blocks(self) -> None:
        """Write the blocks that calibration reads: on a CPU all pages are the one page of unwritten memory before."""
        if self.device.type == "cpu":
            self.kv.blocks[: self._num_calibration_blocks].zero_()

    def _make_sampler(self) -> StepSampler:
        model, seqs = self.decoder.config, self.config.max_num_seqs
        ops = self.decoder.ops
        if ops.sample is None:
            return SlotSampler(seqs, model.vocab_size, model.eos_token_ids, self.device, ops)
        return DeviceSampler(ops.sample, self._received, seqs, model.vocab_size, model.eos_token_ids, ops)

    def _warm_device(self) -> None:
        """Record graphs, then run steps without a graph: recording frees the memory that those steps then keep."""
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
        self._memory.zero_()  # an empty batch, with nothing left of earlier staging
        try:
            return StepGraphs(GraphShapes(self.config), self.device_stream, self._compute_padded, self._logits)
        except Exception as error:
            if not is_device_error(error):
                raise
            raise DeviceError(explained(f"{self.device} failed", error)) from error

    def _launch_step(self, batch: Batch) -> LaunchedStep:
        for admitted in batch.admitted:
            self._sampler.admit(admitted)
            self._asked_logprobs.fill_slot(admitted)
            if self.masks is not None:
                self.masks.fill_slot(admitted)
            if self.adapters is not None:
                self.adapters.admit(admitted)
        logprobs, constrained = self._asked_logprobs.of(batch), self._constrain(batch)
        given, batch = batch, batch.padded()
        # a graph does not return the hidden states, and samples once a row
        hides = (logprobs is not None and logprobs.parts) or batch.drafts
        adapts = self.adapters is not None and self.adapters.has_some(batch)
        shape = None if self.graphs is None or hides else self.graphs.shape_for(batch, adapts)
        staged = self.stager.stage(batch, shape or StepShape.of(batch, adapts))
        self._staged.append(staged)
        choice = self._sampler.stage(staged) if staged.num_sampled else None
        graphs = None if shape is None else self.graphs
        bring = None if self.adapters is None else self.adapters.copies(batch)
        work = self._work(
            given, partial(self._run, staged, choice, graphs, batch.block_copies, logprobs, constrained, bring)
        )
        copies = partial(self.swapper.copy, batch) if self.swapper is not None and batch.num_copies else None
        try:
            running = self.device_stream.launch(work, copies)
        finally:
            if constrained is not None and self.runs_ahead:
                constrained.release_waiter()
        launched = StepAhead(staged, running, self.masks)
        self._launched = launched if self.runs_ahead else None
        return LaunchedStep(self, batch.step, launched, batch.drafts, logprobs, constrained)

    def _work(self, batch: Batch, run: Work) -> Work:
        """Return the work of the device's stream for a batch, `run` or more."""
        before = self.before
        return run if before is None else lambda: (before(batch), run())

    def _constrain(self, batch: Batch) -> ConstrainedStep | None:
        """Return the constrained rows of a batch; None if it has none."""
        if self.masks is None or (rows := self.masks.rows_of(batch)) is None:
            return None
        launched = self._launched
        before = launched.synchronize if launched is not None else lambda: None
        step = ConstrainedStep(rows, self.masks, self._mask_buffers, before)
        if launched is not None and step.may_jump:
            launched.behind = step
        return step

    @torch.inference_mode()
    def _run(
        self,
        staged: StagedStep,
        choice: TokenChoice | None,
        graphs: StepGraphs | None,
        block_copies: Collection[tuple[int, int]],
        logprobs: StepLogprobs | None,
        constrained: ConstrainedStep | None,
        bring: Callable[[], None] | None,
    ) -> None:
        self._receive(staged)
        if bring is not None:
            bring()
        if constrained is not None and not self.runs_ahead:
            constrained.ask()  # masks are filled while the step computes
        if graphs is None:
            hidden = self.decoder.forward(self._inputs(staged.shape), self.kv)
            if logprobs is not None:
                logprobs.score_prompts(hidden, self.decoder.logits)
            logits = self._logits_of(hidden, staged.num_sampled)
        else:
            logits = graphs.replay(staged.shape)
        if block_copies:
            self.kv.copy(block_copies)
        if constrained is not None and self.runs_ahead:
            constrained.ask()  # the device computes by now, and the step before it is waited for
        if choice is not None:
            self._sample(staged, logits[: staged.num_sampled], choice, logprobs, constrained)

    def _sample(
        self,
        staged: StagedStep,
        logits: Tensor,
        choice: TokenChoice,
        logprobs: StepLogprobs | None,
        constrained: ConstrainedStep | None,
    ) -> None:
        """Draw tokens from `logits` [rows, vocab], for the next steps on the device and on their way to the host."""
        is_drawn = logits[:, 0].abs() < torch.inf  # one NaN or infinity in a row's state spreads to all of its logits
        if logprobs is not None:
            logprobs.score(logits)
        if constrained is not None:
            constrained.constrain(logits, self.decoder.ops)
        tokens = choice.choose(logits)
        if logprobs is not None:
            logprobs.pick(tokens)
        rows = staged.num_rows  # behind a draft the host tells the newest token
        self._last_tokens.index_copy_(0, self._received.sampled_slots[:rows], tokens[:rows])
        if choice.restricts:
            tokens = where_allowed(logits, tokens)
        staged.piece.tokens[: staged.num_sampled].copy_(tokens.where(is_drawn, NO_TOKEN), non_blocking=True)

    def _receive(self, staged: StagedStep) -> None:
        """Copy the staged numbers to the device, and change its block tables."""
        head, count = slice(self._num_head_bytes), staged.num_changes
        self._memory[head].copy_(staged.piece.memory[head], non_blocking=True)
        if count:
            places, blocks = self._received.table_places[:count], self._received.table_blocks[:count]
            places.copy_(staged.piece.tensors.table_places[:count], non_blocking=True)
            blocks.copy_(staged.piece.tensors.table_blocks[:count], non_blocking=True)
            self._tables.view(-1).index_copy_(0, places, blocks)

    def _logits_of(self, hidden: Tensor, num_sampled: int) -> Tensor:
        """Compute the logits [num_sampled, vocab] of the rows that sample, from the step's hidden states."""
        out = None if self._logits is None else self._logits[:num_sampled]
        return self.decoder.logits(hidden[self._received.last_rows[:num_sampled]], out)

    @torch.inference_mode()
    def _compute_padded(self, shape: StepShape) -> None:
        """Compute the step of a graph: the memory that it uses stays in place, and depends on the shape alone."""
        hidden = self.decoder.forward(self._inputs(shape), self.kv)
        self._logits_of(hidden, min(shape.num_seqs, self.config.max_num_seqs))

    def _inputs(self, shape: StepShape) -> StepInputs:
        rows, num_seqs, num_tokens = self._received, shape.num_seqs, shape.num_tokens
        width = self.config.blocks_for(shape.max_context_len)
        tables = self._row_tables[:, : num_seqs * width].unflatten(1, (num_seqs, width))
        for all_rows, chosen in zip(self._tables, tables, strict=True):
            torch.index_select(all_rows[:, :width], 0, rows.slots[:num_seqs], out=chosen)
        self._feed(shape.num_decodes)
        step = StepInputs(
            token_ids=rows.token_ids[:num_tokens],
            positions=rows.positions[:num_tokens],
            slot_mapping=rows.slot_mapping[:num_tokens],
            query_start=rows.query_start[: num_seqs + 1],
            context_lens=rows.context_lens[:num_seqs],
            block_tables=tables[0],
            num_seqs=num_seqs,
            max_query_len=shape.max_query_len,
            max_context_len=shape.max_context_len,
            num_decodes=shape.num_decodes,
            adapters=self.adapters.of(rows.adapters[:num_tokens]) if self.adapters and shape.has_adapters else None,
        )
        if len(tables) == 1:
            return step
        slots = rows.window_slots.view(len(tables) - 1, -1)[:, :num_tokens]
        groups = [
            replace(step, slot_mapping=own, block_tables=table) for own, table in zip(slots, tables[1:], strict=True)
        ]
        return replace(step, windows=tuple(groups))

    def _feed(self, num_decodes: int) -> None:
        """Feed decodes the last sampled tokens of their slots. Of that many rows, some may be prompts' or padding."""
        if num_decodes:
            token_ids = self._received.token_ids[:num_decodes]
            last = self._last_tokens.index_select(0, self._received.slots[:num_decodes])
            torch.where(token_ids < 0, last, token_ids, out=token_ids)
