"""Sampling by a device's kernel: it draws the same tokens as `sampler`, and the host waits for no answer."""

from functools import partial

import torch
from torch import Tensor

from backend.kernels.ops import Ops, RowPenalties, RowSampling, SampleRows
from backend.kernels.torch_ops import TorchOps
from backend.scheduler.batch import NewSequence
from backend.worker.device_stream import on_device
from backend.worker.logits_processors import LogitsProcessors, ProcessedRows
from backend.worker.penalties import PenaltyState
from backend.worker.sampler import TokenChoice
from backend.worker.slot_sampling import SlotSampling
from backend.worker.staging import StagedStep, StepFields


class DeviceSampler:
    """Stages how rows are sampled beside where their tokens go, and has `sample` draw from there.

    `received` are the step's numbers on the device, valid once the step's copy is done.
    """

    def __init__(
        self,
        sample: SampleRows,
        received: StepFields[Tensor],
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        ops: Ops | None = None,
    ) -> None:
        self._sample = sample
        self._received = received
        self._slots = SlotSampling(max_num_seqs, vocab_size, eos_token_ids)
        self._device = received.slots.device
        self._penalties = PenaltyState(max_num_seqs, vocab_size, self._device)
        self._counted = self._penalties.occurrences  # allocated now, so that no request fails for want of memory
        self._processors = LogitsProcessors(max_num_seqs, vocab_size, self._device, ops or TorchOps())
        self._impossible = torch.tensor(-torch.inf, device=self._device)

    def admit(self, admitted: NewSequence) -> None:
        """Record that a sequence takes the slot; the state of its former sequence is forgotten."""
        self._slots.fill_slot(admitted)
        self._processors.fill_slot(admitted)
        if admitted.sampling.penalised:
            self._penalties.fill_slot(admitted)

    def stage(self, staged: StagedStep) -> TokenChoice:
        """Write how this step's rows are sampled; their tokens are drawn on the device."""
        numbers, count, known = staged.piece.numbers, staged.num_sampled, self._slots
        slots = numbers.sampled_slots[:count]
        numbers.seeds[:count] = known.seed[slots]
        numbers.temperature[:count] = known.temperature[slots]
        numbers.min_p[:count] = known.min_p[slots]
        numbers.top_k[:count] = known.top_k[slots]
        numbers.top_p[:count] = known.top_p[slots]
        numbers.presence[:count] = known.presence[slots]
        numbers.frequency[:count] = known.frequency[slots]
        numbers.repetition[:count] = known.repetition[slots]
        forbidden = known.forbidden(slots, numbers.sampled_positions[:count])
        arrived = self._penalties.take_arrived() if known.penalised[slots].any() else None
        drawn = slots[known.temperature[slots] > 0]
        filters = {
            "some_min_p": bool((known.min_p[drawn] > 0).any()),
            "some_top_k": bool((known.top_k[drawn] > 0).any()),
            "some_top_p": bool((known.top_p[drawn] < 1).any()),
        }
        processed = self._processors.of(slots)
        choose = partial(self._choose, forbidden=forbidden, arrived=arrived, filters=filters, processed=processed)
        return TokenChoice(choose, restricts=processed is not None or bool(forbidden))

    def _choose(
        self,
        logits: Tensor,
        forbidden: list[tuple[int, int]],
        arrived: list[NewSequence] | None,
        filters: dict[str, bool],
        processed: ProcessedRows | None,
    ) -> Tensor:
        """Sample the step's rows. `arrived` is None when no row is penalised."""
        if processed is not None:
            processed.apply(logits)
        if forbidden:
            pairs = on_device(forbidden, torch.int64, self._device)
            logits.index_put_((pairs[:, 0], pairs[:, 1]), self._impossible)
        penalties = None
        if arrived is not None:
            self._penalties.load(arrived)
            penalties = self._row_penalties(len(logits))
        tokens = self._sample(logits, self._row_sampling(len(logits), filters), penalties)
        if processed is not None:
            processed.count(tokens)
        return tokens

    def _row_sampling(self, count: int, filters: dict[str, bool]) -> RowSampling:
        rows = self._received
        return RowSampling(
            temperature=rows.temperature[:count],
            min_p=rows.min_p[:count],
            top_k=rows.top_k[:count],
            top_p=rows.top_p[:count],
            seeds=rows.seeds[:count],
            positions=rows.sampled_positions[:count],
            **filters,
        )

    def _row_penalties(self, count: int) -> RowPenalties:
        rows = self._received
        return RowPenalties(
            slots=rows.sampled_slots[:count],
            presence=rows.presence[:count],
            frequency=rows.frequency[:count],
            repetition=rows.repetition[:count],
            in_prompt=self._counted.in_prompt,
            output_counts=self._counted.output_counts,
        )
