"""The sampler draws tokens from logits, one row a sequence, in the order of vLLM's v1 sampler:

    log probabilities of the logits as they are -> masks of grammars and of allowed tokens -> bad words
    -> end tokens forbidden before `min_tokens` -> logit bias -> repetition, frequency and presence penalties
    -> greedy rows: argmax; other rows: temperature -> min-p -> top-k -> top-p -> draw

Bans and biases commute: no finite bias brings a banned token back. In a row without allowed tokens one whose logit is
-inf is drawn.

Every filter is a cut-off on a row's own logits, and equal logits are kept or cut together, so that neither the order
of a sort nor the neighbours of a row can change what it draws. The draw inverts the cumulative distribution at a number
hashed from (seed, position): a request draws the same tokens in every batch, as far as its logits are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.kernels.ops import Ops
from backend.kernels.torch_ops import TorchOps
from backend.scheduler.batch import NewSequence
from backend.worker.logits_processors import LogitsProcessors, ProcessedRows
from backend.worker.penalties import Penalties, PenaltyState
from backend.worker.slot_sampling import SlotSampling
from backend.worker.staging import StagedStep

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """The choice of the tokens of one step's rows: `choose` draws them."""

    choose: Callable[[Tensor], Tensor]  # returns ids [rows] int64 for logits [rows, vocab] fp32, which it may overwrite
    restricts: bool  # True if it forbids tokens, and so may leave a row none: its choice then has a logit of -inf


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling of each row of one step's logits. None in a field: no row asks for it."""

    temperature: Tensor | None = None  # [rows] fp32, 0 for a greedy row; None: all are greedy
    uniforms: Tensor | None = None  # [rows] fp64 in [0, 1), needed when any row is drawn
    min_p: Tensor | None = None  # [rows] fp32, 0: off
    top_k: Tensor | None = None  # [rows] int64, 0: off
    top_p: Tensor | None = None  # [rows] fp64, 1: off
    forbidden: tuple[Tensor, Tensor] | None = None  # rows and tokens, int64, in pairs
    penalties: Penalties | None = None
    processed: ProcessedRows | None = None

    @property
    def restricts(self) -> bool:
        """True if any row has forbidden tokens."""
        return self.processed is not None or self.forbidden is not None


@torch.inference_mode()
def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample token ids [rows] int64 from `logits` [rows, vocab] fp32, which may be overwritten."""
    if batch.processed is not None:
        batch.processed.apply(logits)
    if batch.forbidden is not None:
        logits[batch.forbidden] = -torch.inf
    if batch.penalties is not None:
        batch.penalties.apply(logits)
    tokens = _choose(logits, batch)
    if batch.penalties is not None:
        batch.penalties.count(tokens)
    if batch.processed is not None:
        batch.processed.count(tokens)
    return tokens


def _choose(logits: Tensor, batch: SamplingBatch) -> Tensor:
    if batch.temperature is None:
        return logits.argmax(-1)
    drawn = batch.temperature > 0
    if bool(drawn.all()):
        return _draw_rows(logits, batch, slice(None))
    tokens = logits.argmax(-1)
    rows = drawn.nonzero().squeeze(1)
    tokens[rows] = _draw_rows(logits[rows], batch, rows)
    return tokens


def _draw_rows(logits: Tensor, batch: SamplingBatch, rows: Tensor | slice) -> Tensor:
    """Draw a token for each of the batch's `rows` from its `logits`."""
    assert batch.temperature is not None
    assert batch.uniforms is not None
    min_p, top_k, top_p = (None if x is None else x[rows] for x in (batch.min_p, batch.top_k, batch.top_p))
    scaled = logits / batch.temperature[rows].unsqueeze(1)
    scaled -= scaled.amax(-1, keepdim=True)  # the largest is 0, so that its power neither overflows nor vanishes
    cutoff = cutoffs(scaled, min_p, top_k, top_p)
    weights = powers(scaled) if cutoff is None else powers(scaled).mul_(scaled >= cutoff.unsqueeze(1))
    return draw(weights, batch.uniforms[rows])


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the index in each row of `weights` [rows, n] where its cumulative sum first exceeds the share `uniform` of
    its total.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


def cutoffs(logits: Tensor, min_p: Tensor | None, top_k: Tensor | None, top_p: Tensor | None) -> Tensor | None:
    """Return the smallest logit that each row may draw, [rows], for `logits` [rows, vocab], the largest 0.

    Only rows that ask for top k or top p are sorted.
    """
    if top_k is None and top_p is None:
        return None if min_p is None else min_p.log()
    off = torch.zeros(logits.shape[0], device=logits.device)
    floor = (off if min_p is None else min_p).log()  # [rows]
    top_k = off.long() if top_k is None else top_k.clamp(max=logits.shape[1])
    top_p = off + 1 if top_p is None else top_p
    asking = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(1)
    ordered = descending(logits if asking.numel() == logits.shape[0] else logits[asking])
    return floor.index_copy(0, asking, _raised(floor[asking], ordered, top_k[asking], top_p[asking]))


def _raised(floor: Tensor, ordered: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return `floor` [rows] or, if higher, the last logit of the top k and of the smallest set of mass top p in it."""
    weights = powers(ordered).mul_(ordered >= floor.unsqueeze(1))
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    last = torch.where(top_k > 0, top_k, ordered.shape[1]).unsqueeze(1) - 1
    tied = (ordered >= ordered.gather(1, last)).sum(1, keepdim=True) - 1  # logits equal to the k-th belong to the top k
    last = torch.maximum(last, tied)
    needed = top_p.unsqueeze(1) * cumulative.gather(1, last)
    reached = torch.minimum(torch.searchsorted(cumulative, needed), last)
    last = torch.where(top_p.unsqueeze(1) < 1, reached, last)
    return torch.maximum(floor, ordered.gather(1, last).squeeze(1))


def descending(x: Tensor) -> Tensor:
    """Return each row of x in falling order. On a CPU numpy's vectorised sort takes a thirtieth of torch's time."""
    if x.device.type != "cpu":
        return x.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort((-x).numpy(), axis=-1)).neg_()


def powers(x: Tensor) -> Tensor:
    """Return e to the power of each number of x. On a CPU torch takes three times as long; its powers of 2 do not, but
    the last numbers of a tensor, or of a thread's part of it, differ from the same numbers elsewhere.
    """
    return x.exp() if x.device.type != "cpu" else torch.from_numpy(np.exp(x.numpy()))


def uniforms(seeds: Integers, positions: Integers) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) of 53 random bits, by seed and position alone (SplitMix64; Steele et al., 2014)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * golden
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SlotSampler:
    """Samples a step's rows with torch, on devices without a sampling kernel. The device's thread owns it.

    Tokens are counted for the penalties from the sampled tensor itself, because the host may not know them yet.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        device: torch.device | None = None,
        ops: Ops | None = None,
    ) -> None:
        self._slots = SlotSampling(max_num_seqs, vocab_size, eos_token_ids)
        self._device = device or torch.device("cpu")
        self._penalties = PenaltyState(max_num_seqs, vocab_size, self._device)
        self._processors = LogitsProcessors(max_num_seqs, vocab_size, self._device, ops or TorchOps())

    def admit(self, admitted: NewSequence) -> None:
        """Record that a sequence takes the slot; the state of its former sequence is forgotten."""
        self._slots.fill_slot(admitted)
        self._processors.fill_slot(admitted)
        if admitted.sampling.penalised:
            self._penalties.fill_slot(admitted)

    def stage(self, staged: StagedStep) -> TokenChoice:
        """Return how this step's rows are sampled, as they are known now."""
        numbers, count = staged.piece.numbers, staged.num_sampled
        slots, positions = numbers.sampled_slots[:count], numbers.sampled_positions[:count]
        batch = self.batch(slots, positions, self._device)
        return TokenChoice(partial(sample, batch=batch), batch.restricts)

    def sample(self, logits: Tensor, slots: Integers, positions: Integers) -> Tensor:
        """Sample tokens [rows] from `logits` [rows, vocab] fp32, which may be overwritten.

        `positions` [rows] are the indices that the sampled tokens will have in their sequences.
        """
        return sample(logits, self.batch(slots, positions, logits.device))

    def batch(self, slots: Integers, positions: Integers, device: torch.device) -> SamplingBatch:
        """Return the sampling of this step's rows, staged on `device`."""
        known = self._slots
        forbidden = self._forbidden(slots, positions, device)
        penalties = self._penalties.select(slots, known, device)
        processed = self._processors.of(slots)
        temperature = known.temperature[slots]
        if not temperature.any():
            return SamplingBatch(forbidden=forbidden, penalties=penalties, processed=processed)
        return SamplingBatch(
            temperature=torch.from_numpy(temperature).to(device),
            uniforms=torch.from_numpy(uniforms(known.seed[slots], positions)).to(device),
            min_p=_unless_all(known.min_p[slots], 0, device),
            top_k=_unless_all(known.top_k[slots], 0, device),
            top_p=_unless_all(known.top_p[slots], 1, device),
            forbidden=forbidden,
            penalties=penalties,
            processed=processed,
        )

    def _forbidden(self, slots: Integers, positions: Integers, device: torch.device) -> tuple[Tensor, Tensor] | None:
        pairs = self._slots.forbidden(slots, positions)
        if not pairs:
            return None
        rows, tokens = torch.tensor(pairs, device=device).unbind(1)
        return rows, tokens


def _unless_all(values: npt.NDArray[np.generic], off: int, device: torch.device) -> Tensor | None:
    return None if bool((values == off).all()) else torch.from_numpy(values).to(device)
