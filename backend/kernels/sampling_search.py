"""This search finds the cut-offs of rows with filters in a bounded number of reads of their logits by the whole device.

A logit is told by its distance: how far it lies, divided by the temperature (`heat`), below the row's largest.
Distances are fp32 numbers >= 0, whose bits order as they do: a cut-off is such bits, exact to the last one. Logits are
divided before they are subtracted, as `backend.worker.sampler` does, and everywhere alike: when the temperature is low
the quotients are large, and what they are rounded by is no longer small beside a distance.

The bits of a cut-off are searched for as three digits (a radix select; Alabi et al., 2012). For each, the programs of a
row add its logits to a histogram by that digit, in numbers and in mass, and the last of them to finish reads from it
which digit the cut-off has. Top-p, which is of the mass that top-k leaves, begins from the first digit's histogram
again: two searches take five reads, one takes three, for any k, p and logits. Masses are counted in whole
units, so that the order in which programs add them changes nothing.
"""

import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.ops import RowSampling

FAR = tl.constexpr(87.0)  # beyond it a weight, exp(-distance), is no normal fp32 number: none is drawn from there
ALL = tl.constexpr(0x42AE0000)  # the cut-off that keeps all others

FIRST, SECOND, THIRD = (20, 11), (9, 11), (0, 9)  # each digit's lowest bit, and how many it has
BINS = tl.constexpr(1 << 11)
CHUNK = tl.constexpr(512)  # bins that are read at a time
COARSE, BY_NUMBER, BY_MASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
DONE = tl.constexpr(0)
UNITS = tl.constexpr(2.0**44)  # of mass that the largest logit has
MAX_VOCAB = 1 << 19  # whose masses 63 bits hold

# What is known of a row's search, int64: the cut-off as far as it is known, what is being searched for (DONE, BY_NUMBER
# or BY_MASS), its digits so far, the number and the mass below these, the mass wanted, the row's largest logit, and how
# many programs have finished. Then the histograms of the first digit and of the present one, numbers before masses.
CUT, PHASE, PREFIX, NUMBER, MASS, WANTED, LARGEST, FINISHED = (tl.constexpr(place) for place in range(8))
HISTOGRAMS = tl.constexpr(8)
STATE = tl.constexpr(8 + 4 * BINS.value)
UNFILTERED = tl.constexpr(-1)  # the cut of a row of which every logit is kept


@triton.jit
def distances(x, largest, heat):
    """Return how far below `largest` the logits `x` lie; infinitely far for those that cannot be drawn."""
    return tl.maximum(tl.where(x > -float("inf"), largest / heat - x / heat, float("inf")), 0.0)


@triton.jit
def below(source, indices, real, largest, heat):
    """Return the distances of the logits at `indices`."""
    return distances(tl.load(source + indices, mask=real, other=-float("inf")), largest, heat)


@triton.jit
def is_last(state, programs):
    """Return True in the last of a row's `programs` to come here: then it can read what the others wrote."""
    tl.debug_barrier()
    last = tl.atomic_add(state + FINISHED, 1) == programs - 1
    if last:
        tl.store(state + FINISHED, 0)
    return last


@triton.jit
def _kth_largest(values, k):
    """Return a number that at least k of `values` (a tile of fp32) reach, by bisection; -inf if k is too large."""
    low, high = -float("inf"), tl.max(values, 0)
    floor = tl.min(tl.where(values > -float("inf"), values, high), 0)
    if tl.sum((values >= floor).to(tl.int32), 0) >= k:
        low = floor
        for _ in range(24):
            middle = low + (high - low) / 2
            enough = tl.sum((values >= middle).to(tl.int32), 0) >= k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    return low


@triton.jit
def _bound(peaks, total, least, number, share, largest, heat, vocab):
    """Return a distance that no filter's cut-off exceeds, from the tiles' largest logits `peaks` and the row's mass.

    Min-p is its own bound. The k-th largest of the peaks is reached by k logits at least. Without the two, the last
    logit that top-p keeps weighs more than an equal share of what is cut.
    """
    bound = tl.where(least > 0, -tl.log(tl.maximum(least, 1e-37)), FAR)
    if number > 0:
        kth = _kth_largest(peaks, number)
        bound = tl.minimum(bound, distances(kth, largest, heat) + 1e-3)
    elif least <= 0:
        rest = ((1 - share) * total / vocab).to(tl.float32)
        bound = tl.where(share < 1, 1e-3 - tl.log(tl.maximum(rest, 1e-37)), FAR)
    return tl.minimum(tl.where(bound > 0, bound, 0.0), FAR)  # and not -0.0, whose bits are negative


@triton.jit
def begin(state, peaks, tile_mass, heat, least, number, share, vocab):
    """Store what the search of a row begins with; `tile_mass` is relative to each tile's own largest logit."""
    largest = tl.max(peaks, 0)
    cut = tl.full([], UNFILTERED, tl.int64)
    searched = (number > 0) | (share < 1)
    if (heat > 0) & (largest > -float("inf")) & (largest < float("inf")) & (searched | (least > 0)):
        total = tl.sum(tile_mass * tl.exp(-distances(peaks, largest, heat)).to(tl.float64), 0)
        bound = _bound(peaks, total, least, number, share, largest, heat, vocab)
        cut = bound.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(state + PHASE, tl.where(searched, tl.where(number > 0, BY_NUMBER, BY_MASS), DONE))
        tl.store(state + WANTED, (share * total * UNITS).to(tl.int64))
        tl.store(state + LARGEST, largest.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(state + CUT, cut)


@triton.jit
def _find(histogram, number, mass, wanted, SEARCH: tl.constexpr):
    """Return the first bin at whose end the number or mass, with what is given, is the wanted one; BINS if none is.

    Then number and mass before that bin, and the mass of all.
    """
    digit = tl.full([], BINS, tl.int32)
    ended = mass
    for base in range(0, BINS, CHUNK):
        bins = base + tl.arange(0, CHUNK)
        numbers = tl.load(histogram + bins, volatile=True)  # other programs' additions, past this one's cache
        masses = tl.load(histogram + BINS + bins, volatile=True)
        if SEARCH == BY_NUMBER:
            reached = number + tl.cumsum(numbers, 0) >= wanted
        else:
            reached = mass + tl.cumsum(masses, 0) >= wanted
        first = tl.min(tl.where(reached, bins, BINS), 0)
        before = (bins < first) & (digit == BINS)
        ended += tl.sum(masses, 0)
        number += tl.sum(tl.where(before, numbers, 0), 0)
        mass += tl.sum(tl.where(before, masses, 0), 0)
        digit = tl.minimum(digit, first)
    return digit, number, mass, ended


@triton.jit
def _share_of(mass, share):
    """Return the least mass that top-p keeps of `mass`: the largest logit's at least."""
    return tl.maximum((share * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _begin_mass(state, wanted, share):
    """Search for top-p, whose first digit is read from the first digit's histogram; less than is wanted stays uncut."""
    phase = tl.full([], DONE, tl.int64)
    if share < 1:
        zero = tl.zeros([], tl.int64)
        digit, _, before, _ = _find(state + HISTOGRAMS, zero, zero, wanted, BY_MASS)
        tl.store(state + PREFIX, digit)
        tl.store(state + MASS, before)
        tl.store(state + WANTED, wanted)
        phase = tl.where(digit < BINS, BY_MASS, phase)
    tl.store(state + PHASE, phase)


@triton.jit
def _settle_first(state, least, number, share):
    """Read the first digit of what is searched for."""
    zero = tl.zeros([], tl.int64)
    digit, before, lighter, counted = _find(state + HISTOGRAMS, zero, zero, number, BY_NUMBER)
    if (number > 0) & (digit < BINS):
        tl.store(state + PREFIX, digit)
        tl.store(state + NUMBER, before)
        tl.store(state + MASS, lighter)
    else:
        wanted = _share_of(counted, share)
        if (number <= 0) & (least <= 0):
            wanted = tl.maximum(tl.load(state + WANTED), 1)  # of all logits, some of which were not worth counting
        _begin_mass(state, wanted, share)


@triton.jit
def _settle(state, prefix, number, share, SEARCH: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """Read the next digit from its histogram, which is left empty; after the last one the cut-off is known."""
    histogram = state + HISTOGRAMS + 2 * BINS
    wanted = tl.load(state + WANTED)
    if SEARCH == BY_NUMBER:
        wanted = tl.cast(number, tl.int64)
    digit, before, lighter, _ = _find(histogram, tl.load(state + NUMBER), tl.load(state + MASS), wanted, SEARCH)
    prefix = (prefix << WIDTH) | digit
    kept = lighter + tl.load(histogram + BINS + digit, volatile=True)
    tl.debug_barrier()  # all of it is read
    tl.store(histogram + tl.arange(0, 2 * BINS), tl.zeros([2 * BINS], tl.int64))
    if SHIFT > 0:
        tl.store(state + PREFIX, prefix)
        tl.store(state + NUMBER, before)
        tl.store(state + MASS, lighter)
    else:
        tl.store(state + CUT, prefix)
        if SEARCH == BY_NUMBER:
            _begin_mass(state, _share_of(kept, share), share)
        else:
            tl.store(state + PHASE, DONE)


@triton.jit
def _add(histogram, digits, masses, held):
    """Count the held logits of a tile. Those of one digit add up here: one address takes one addition at a time."""
    first = tl.min(tl.where(held, digits, BINS), 0)
    last = tl.max(tl.where(held, digits, -1), 0)
    if first == last:
        tl.atomic_add(histogram + first, tl.sum(held.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(histogram + BINS + first, tl.sum(masses, 0), sem="relaxed")
    else:
        tl.atomic_add(histogram + digits, held.to(tl.int64), mask=held, sem="relaxed")
        tl.atomic_add(histogram + BINS + digits, masses, mask=held, sem="relaxed")


@triton.jit
def _count(
    logits,  # [rows, vocab] fp32
    tile_largest,  # [rows, tiles] fp32
    states,  # [rows, STATE] int64
    temperature,
    min_p,
    top_k,
    top_p,
    num_tiles,
    vocab,
    SEARCH: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # that a program takes
):
    """Add some of a row's tiles to the histogram of the digit at `SHIFT`; the row's last program reads it."""
    row = tl.program_id(0).to(tl.int64)
    state = states + row * STATE
    cut, phase, prefix = tl.load(state + CUT), tl.load(state + PHASE), tl.load(state + PREFIX)
    if SEARCH == COARSE:
        if phase == DONE:
            return
    elif phase != SEARCH:
        return
    highest, histogram = cut, state + HISTOGRAMS
    if SEARCH != COARSE:
        highest = tl.minimum(cut, ((prefix + 1) << (SHIFT + WIDTH)) - 1)
        histogram += 2 * BINS
    largest = tl.load(state + LARGEST).to(tl.int32).to(tl.float32, bitcast=True)
    heat = tl.load(temperature + row)
    part = tl.program_id(1)
    for tile in range(part * TILES, tl.minimum((part + 1) * TILES, num_tiles)):
        nearest = distances(tl.load(tile_largest + row * num_tiles + tile), largest, heat)
        if nearest.to(tl.int32, bitcast=True) <= highest:
            tokens = tile * TILE + tl.arange(0, TILE)
            distance = below(logits + row * vocab, tokens, tokens < vocab, largest, heat)
            bits = distance.to(tl.int32, bitcast=True)
            held = bits <= highest
            if SEARCH != COARSE:
                held = held & ((bits >> (SHIFT + WIDTH)) == prefix)
            digits = (bits >> SHIFT) & ((1 << WIDTH) - 1)
            masses = (tl.where(held, tl.exp(-distance), 0.0) * UNITS).to(tl.int64)
            _add(histogram, digits, masses, held)
    if is_last(state, tl.num_programs(1)):
        number, share = tl.load(top_k + row), tl.load(top_p + row)
        if SEARCH == COARSE:
            _settle_first(state, tl.load(min_p + row), number, share)
        else:
            _settle(state, prefix, number, share, SEARCH, SHIFT, WIDTH)


@triton.jit
def _weigh(
    logits, tile_largest, tile_mass, states, temperature, num_tiles, vocab, TILE: tl.constexpr, TILES: tl.constexpr
):
    """Store what each tile of a filtered row weighs within the cut, relative to the row's largest logit."""
    row = tl.program_id(0).to(tl.int64)
    state = states + row * STATE
    cut = tl.load(state + CUT)
    if cut == UNFILTERED:
        return
    largest = tl.load(state + LARGEST).to(tl.int32).to(tl.float32, bitcast=True)
    heat = tl.load(temperature + row)
    part = tl.program_id(1)
    for tile in range(part * TILES, tl.minimum((part + 1) * TILES, num_tiles)):
        mass = tl.zeros([], tl.float64)
        nearest = distances(tl.load(tile_largest + row * num_tiles + tile), largest, heat)
        if nearest.to(tl.int32, bitcast=True) <= cut:
            mass = mass_within(logits + row * vocab + tile * TILE, vocab - tile * TILE, cut, largest, heat, TILE)
        tl.store(tile_mass + row * num_tiles + tile, mass)


@triton.jit
def mass_within(source, count, cut, largest, heat, TILE: tl.constexpr):
    """Return the mass of those of the first `count` logits of `source`, TILE at most, that are within `cut` (bits)."""
    indices = tl.arange(0, TILE)
    distance = below(source, indices, indices < count, largest, heat)
    kept = distance.to(tl.int32, bitcast=True) <= cut
    return tl.sum(tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64), 0)


def search(
    logits: Tensor,
    tile_largest: Tensor,
    tile_mass: Tensor,
    states: Tensor,
    rows: RowSampling,
    tile: int,
    tiles_of_program: int,
) -> None:
    """Leave every filtered row's cut in `states`, and the mass within it of each of its tiles in `tile_mass`."""
    (num_rows, vocab), num_tiles = logits.shape, tile_largest.shape[1]
    grid = (num_rows, triton.cdiv(num_tiles, tiles_of_program))
    digits = [(COARSE, FIRST)] if rows.some_top_k or rows.some_top_p else []
    digits += [(BY_NUMBER, SECOND), (BY_NUMBER, THIRD)] if rows.some_top_k else []
    digits += [(BY_MASS, SECOND), (BY_MASS, THIRD)] if rows.some_top_p else []
    for kind, (shift, width) in digits:
        _count[grid](
            logits,
            tile_largest,
            states,
            rows.temperature,
            rows.min_p,
            rows.top_k,
            rows.top_p,
            num_tiles,
            vocab,
            SEARCH=kind.value,
            SHIFT=shift,
            WIDTH=width,
            TILE=tile,
            TILES=tiles_of_program,
            num_warps=4,
        )
    _weigh[grid](
        logits,
        tile_largest,
        tile_mass,
        states,
        rows.temperature,
        num_tiles,
        vocab,
        TILE=tile,
        TILES=tiles_of_program,
        num_warps=4,
    )
