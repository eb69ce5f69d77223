"""This search finds the cut-offs of a row with filters, and the token drawn within them, among a few of its logits.

A logit is told by its distance: how far it lies, divided by the temperature (`heat`), below the row's largest.
Distances are fp32 numbers >= 0, whose bits order as they do: a cut-off is such bits, exact to the last one. Logits are
divided before they are subtracted, as `backend.worker.sampler` does, and everywhere alike: when the temperature is low
the quotients are large, and what they are rounded by is no longer small beside a distance.

No filter's cut-off lies beyond a bound that follows from the tiles' largest logits and masses. Programs over the whole
device gather the candidates within it, in no order. Then one program a row narrows down three answers in turn: the bits
up to which `top_k` candidates lie, those up to which these have a share `top_p` of mass, and the token up to which these
have the mass drawn. Each round sums up to `WAYS` ends at once. Masses are counted in whole units, so that the order in
which they are added changes nothing. A row with more candidates than are gathered is read whole, every round.
"""

import triton
import triton.language as tl

from backend.kernels.triton_lang import await_inputs

FAR = tl.constexpr(87.0)  # beyond it a weight, exp(-distance), is no normal fp32 number: none is drawn from there
ALL = tl.constexpr(0x42AE0000)  # the cut-off that keeps all others
UNFILTERED = tl.constexpr(-1)  # the cut-off of a row of which every logit is kept
UNITS = tl.constexpr(2.0**44)  # of mass that the largest logit has
MAX_VOCAB = 1 << 19  # whose masses 63 bits hold
WAYS = tl.constexpr(8)
NARROW = tl.constexpr(3)  # rounds after which few candidates are left beyond what is kept
BY_NUMBER, BY_MASS, DRAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def distances(x, largest, heat):
    """Return how far below `largest` the logits `x` lie; infinitely far for those that cannot be drawn."""
    return tl.maximum(tl.where(x > -float("inf"), largest / heat - x / heat, float("inf")), 0.0)


@triton.jit
def below(source, indices, real, largest, heat):
    """Return the distances of the logits at `indices`."""
    return distances(tl.load(source + indices, mask=real, other=-float("inf")), largest, heat)


@triton.jit
def _kth_largest(values, k):
    """Return a number that at least k of `values` (a tile of fp32) reach, by bisection; -inf if k is too large."""
    low, high = -float("inf"), tl.max(values, 0)
    floor = tl.min(tl.where(values > -float("inf"), values, high), 0)
    if tl.sum((values >= floor).to(tl.int32), 0) >= k:
        low = floor
        for _ in range(16):
            middle = low + (high - low) / 2
            enough = tl.sum((values >= middle).to(tl.int32), 0) >= k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    return low


@triton.jit
def _nucleus(relative, total, share, bound, slack, TILE: tl.constexpr):
    """Return a distance within which a `share` of the mass lies, `bound` at most, by bisection.

    What a tile has beyond a distance is no more than `TILE` times what a logit there weighs.
    """
    near, far = tl.zeros([], tl.float32), bound
    wanted = share * total * (1 + slack)
    for _ in range(16):
        middle = near + (far - near) / 2
        within = tl.sum(tl.maximum(relative - (TILE * tl.exp(-middle)).to(tl.float64), 0.0), 0)
        far = tl.where(within >= wanted, middle, far)
        near = tl.where(within >= wanted, near, middle)
    return far


@triton.jit
def _bound(peaks, relative, least, number, share, largest, heat, vocab, TILE: tl.constexpr):
    """Return a distance that no filter's cut-off exceeds, from the tiles' largest logits and their masses.

    Min-p is its own bound. The k-th largest of the peaks is reached by k logits at least. Without the two, the last
    logit that top-p keeps weighs more than an equal share of what is cut.
    """
    bound = tl.where(least > 0, -tl.log(tl.maximum(least, 1e-37)), FAR)
    if number > 0:
        kth = _kth_largest(peaks, number)
        bound = tl.minimum(bound, distances(kth, largest, heat) + 1e-3)
    elif least <= 0:
        total = tl.sum(relative, 0)
        rest = ((1 - share) * total / vocab).to(tl.float32)
        bound = tl.minimum(1e-3 - tl.log(tl.maximum(rest, 1e-37)), FAR)
        rounding = 1e-5 + 1e-6 * tl.abs(largest / heat)  # of weights, by that of large quotients
        bound = _nucleus(relative, total, share, bound, rounding, TILE)
    return tl.minimum(tl.where(bound > 0, bound, 0.0), FAR)  # and not -0.0, whose bits are negative


@triton.jit(do_not_specialize=["tiles_each"])
def gather(
    near,  # [rows, CAPACITY] fp32, the distances of candidates
    tokens,  # [rows, CAPACITY] int32
    counts,  # [rows] int32, 0: of candidates, with those for which there is no room
    cuts,  # [rows] int32, the bits within which candidates lie
    logits,  # [rows, vocab] fp32
    tile_largest,  # [rows, tiles] fp32
    tile_mass,  # [rows, tiles] fp64, relative to each tile's own largest logit
    temperature,
    min_p,
    top_k,
    top_p,
    num_tiles,
    vocab,
    tiles_each,  # that a program takes
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heat, least = tl.load(temperature + row), tl.load(min_p + row)
    number, share = tl.load(top_k + row), tl.load(top_p + row)
    await_inputs(PDL)
    tiles = tl.arange(0, TILES)
    present = tiles < num_tiles
    peaks = tl.load(tile_largest + row * num_tiles + tiles, mask=present, other=-float("inf"))
    largest = tl.max(peaks, 0)
    drawn = (heat > 0) & (largest > -float("inf")) & (largest < float("inf"))
    cut = tl.full([], UNFILTERED, tl.int32)
    if drawn & ((number > 0) | (share < 1) | (least > 0)):
        mass = tl.load(tile_mass + row * num_tiles + tiles, mask=present, other=0.0)
        relative = mass * tl.exp(-distances(peaks, largest, heat)).to(tl.float64)
        cut = _bound(peaks, relative, least, number, share, largest, heat, vocab, TILE).to(tl.int32, bitcast=True)
        for tile in range(part * tiles_each, tl.minimum((part + 1) * tiles_each, num_tiles)):
            nearest = distances(tl.load(tile_largest + row * num_tiles + tile), largest, heat)
            if nearest.to(tl.int32, bitcast=True) <= cut:
                indices = tile * TILE + tl.arange(0, TILE)
                distance = below(logits + row * vocab, indices, indices < vocab, largest, heat)
                held = distance.to(tl.int32, bitcast=True) <= cut
                ordinals = tl.cumsum(held.to(tl.int32), 0)
                places = tl.atomic_add(counts + row, tl.max(ordinals, 0), sem="relaxed") + ordinals - 1
                held = held & (places < CAPACITY)
                tl.store(near + row * CAPACITY + places, distance, mask=held)
                tl.store(tokens + row * CAPACITY + places, indices, mask=held)
    if part == 0:
        tl.store(cuts + row, cut)


@triton.jit
def _candidates(near, tokens, count, logits, vocab, gathered, indices, largest, heat):
    """Return the distances and tokens of candidates: of those gathered, or of all logits."""
    if gathered:
        real = indices < count
        distance = tl.load(near + indices, mask=real, other=float("inf"))
        token = tl.load(tokens + indices, mask=real, other=0)
    else:
        distance = below(logits, indices, indices < vocab, largest, heat)
        token = indices
    return distance, token


@triton.jit
def _sums(near, tokens, count, logits, vocab, gathered, cut, ends, sought, largest, heat, WIDTH: tl.constexpr):
    """Return the mass (if sought BY_NUMBER, the number) of candidates within `cut` up to each of `ends` [WAYS]."""
    sums = tl.zeros([WAYS, WIDTH], tl.int64)
    for base in range(0, tl.where(gathered, count, vocab), WIDTH):
        indices = base + tl.arange(0, WIDTH)
        distance, token = _candidates(near, tokens, count, logits, vocab, gathered, indices, largest, heat)
        bits = distance.to(tl.int32, bitcast=True)
        held = bits <= cut
        mass = (tl.where(held, tl.exp(-distance), 0.0) * UNITS).to(tl.int64)
        weight = tl.where(sought == BY_NUMBER, held.to(tl.int64), mass)
        key = tl.where(sought == DRAW, token, bits)
        sums += tl.where(key[None, :] <= ends[:, None], weight[None, :], 0)
    return tl.sum(sums, 1)


@triton.jit
def _gather_within(
    near, tokens, count, logits, vocab, gathered, cut, largest, heat, CAPACITY: tl.constexpr, WIDTH: tl.constexpr
):
    """Gather candidates within `cut`, in place, as far as there is room; returns how many there are."""
    kept = tl.zeros([], tl.int32)
    for base in range(0, tl.where(gathered, count, vocab), WIDTH):
        indices = base + tl.arange(0, WIDTH)
        distance, token = _candidates(near, tokens, count, logits, vocab, gathered, indices, largest, heat)
        held = distance.to(tl.int32, bitcast=True) <= cut
        ordinals = tl.cumsum(held.to(tl.int32), 0)
        places = kept + ordinals - 1
        kept += tl.max(ordinals, 0)
        tl.debug_barrier()  # what is overwritten is read
        tl.store(near + places, distance, mask=held & (places < CAPACITY))
        tl.store(tokens + places, token, mask=held & (places < CAPACITY))
    tl.debug_barrier()
    return kept


@triton.jit
def draw_within(
    near,
    tokens,
    count,
    logits,
    vocab,
    cut,
    least,
    number,
    share,
    drawn,
    total,
    largest,
    heat,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the token of a row at which the mass of the logits that its filters keep exceeds the share `drawn`.

    `total` fp64 is the mass of all logits, relative to the largest.
    """
    token = tl.zeros([], tl.int32)
    ways = tl.arange(0, WAYS) + 1
    for sought in range(3):
        absent = ((sought == BY_NUMBER) & (number <= 0)) | ((sought == BY_MASS) & (share >= 1))
        high = tl.where(sought == DRAW, vocab - 1, cut).to(tl.int64)
        low = tl.where(absent, high, -1)  # up to it the wanted is not reached; up to `high` it is, if at all
        wanted = tl.zeros([], tl.int64)
        rounds = 0
        while high - low > 1:
            ends = (low + (high - low) * ways // WAYS).to(tl.int32)
            if (rounds == 0) & (sought != DRAW):  # equal parts of the distance, not of its bits
                farthest = cut.to(tl.float32, bitcast=True)
                parts = (farthest * (ways.to(tl.float32) / WAYS)).to(tl.int32, bitcast=True)
                ends = tl.where(ways < WAYS, parts, cut)
            gathered = count <= CAPACITY
            sums = _sums(near, tokens, count, logits, vocab, gathered, cut, ends, sought, largest, heat, WIDTH)
            if rounds == 0:
                kept = tl.max(sums, 0)  # by all that is within the cut-off so far
                if sought == BY_NUMBER:
                    wanted = number.to(tl.int64)
                elif sought == BY_MASS:
                    alone = (number <= 0) & (least <= 0)  # then top-p is of logits, too, that are no candidates
                    whole = tl.where(alone, total * UNITS, kept.to(tl.float64))
                    wanted = tl.maximum((share * whole).to(tl.int64), 1)  # the largest logit is kept
                else:
                    wanted = tl.minimum((drawn * kept.to(tl.float64)).to(tl.int64), kept - 1) + 1
            reached = sums >= wanted
            low = tl.max(tl.where(reached, low, ends), 0)
            high = tl.min(tl.where(reached, ends, high), 0)
            rounds += 1
            if (rounds == NARROW) & (sought != DRAW) & (count > WIDTH):
                count = _gather_within(
                    near,
                    tokens,
                    count,
                    logits,
                    vocab,
                    gathered,
                    high.to(tl.int32),
                    largest,
                    heat,
                    CAPACITY,
                    WIDTH,
                )
        if sought == DRAW:
            token = high.to(tl.int32)
        else:
            cut = high.to(tl.int32)
    return token
