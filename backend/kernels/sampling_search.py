"""The search of one row of logits, by the program that owns the row: bounds, cut-offs by bisection, and the draw.

A logit is told by its distance: how far it lies, divided by the temperature (`heat`), below the row's largest.
Distances are fp32 numbers >= 0, whose bits order as they do: a cut-off is such bits, exact to the last one. Logits are
divided before they are subtracted, as `backend.sampler` does, and everywhere alike: when the temperature is low the
quotients are large, and what they are rounded by is no longer small beside a distance.
"""

import triton
import triton.language as tl

FAR = tl.constexpr(87.0)  # beyond it a weight, exp(-distance), is no normal fp32 number: none is drawn from there
ALL = tl.constexpr(0x42AE0000)  # the cut-off that keeps all others


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position):
    """A number in [0, 1) of 53 random bits (SplitMix64; Steele et al., 2014)."""
    state = _mix(seed.to(tl.uint64)) + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    return (_mix(state) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def distances(x, largest, heat):
    """How far below `largest` the logits `x` lie; infinitely for those that cannot be drawn."""
    return tl.maximum(tl.where(x > -float("inf"), largest / heat - x / heat, float("inf")), 0.0)


@triton.jit
def _below(source, indices, real, largest, heat):
    """Distances of the logits at `indices`."""
    return distances(tl.load(source + indices, mask=real, other=-float("inf")), largest, heat)


@triton.jit
def _measure(source, count, cut, largest, heat, TILE: tl.constexpr):
    """How many of the first `count` logits of `source` are at most `cut` (bits) below the largest, and their mass."""
    number = 0
    mass = tl.zeros([], tl.float64)
    for start in range(0, count, TILE):
        indices = start + tl.arange(0, TILE)
        distance = _below(source, indices, indices < count, largest, heat)
        kept = distance.to(tl.int32, bitcast=True) <= cut
        number += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64), 0)
    return number, mass


@triton.jit
def _bisect(source, count, cut, wanted_number, wanted_mass, largest, heat, TILE: tl.constexpr):
    """The smallest cut that keeps `wanted_number` logits and `wanted_mass`, or `cut` if that keeps fewer."""
    low, high = -1, cut
    while high - low > 1:
        middle = low + (high - low) // 2
        number, mass = _measure(source, count, middle, largest, heat, TILE)
        enough = (number >= wanted_number) & (mass >= wanted_mass)
        low = tl.where(enough, low, middle)
        high = tl.where(enough, middle, high)
    return high


@triton.jit
def draw(source, tokens, gathered, count, cut, target, largest, heat, TILE: tl.constexpr):
    """The token at which the mass of those within `cut`, in the order of the vocabulary, first exceeds `target`."""
    before = tl.zeros([], tl.float64)
    token = -1
    last = 0
    for start in range(0, count, TILE):
        indices = start + tl.arange(0, TILE)
        real = indices < count
        distance = _below(source, indices, real, largest, heat)
        kept = distance.to(tl.int32, bitcast=True) <= cut
        weights = tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64)
        ends = before + tl.cumsum(weights, 0)
        past = kept & (ends > target)
        chosen = tl.min(tl.where(past, indices, count), 0)
        token = tl.where((token < 0) & (chosen < count), chosen, token)
        last = tl.maximum(last, tl.max(tl.where(kept, indices, 0), 0))
        before += tl.sum(weights, 0)
    token = tl.where(token < 0, last, token)
    if gathered:
        token = tl.load(tokens + token)
    return token


@triton.jit
def gather(
    logits, candidates, tokens, tile_largest, num_tiles, vocab, bound, largest, heat, TILE: tl.constexpr, GATHERED
):
    """Copy the logits at most `bound` below the largest, and their tokens, in order; returns how many there are."""
    number = 0
    for tile in range(num_tiles):
        if distances(tl.load(tile_largest + tile), largest, heat) <= bound:
            indices = tile * TILE + tl.arange(0, TILE)
            distance = _below(logits, indices, indices < vocab, largest, heat)
            kept = distance <= bound
            places = number + tl.cumsum(kept.to(tl.int32), 0) - 1
            stored = kept & (places < GATHERED)
            tl.store(candidates + places, tl.load(logits + indices, mask=stored, other=0.0), mask=stored)
            tl.store(tokens + places, indices, mask=stored)
            number += tl.sum(kept.to(tl.int32), 0)
    return number


@triton.jit
def _kth_largest(values, k):
    """A number that at least k of `values` (a tile of fp32) reach, the largest by bisection; -inf if k is too large."""
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
def draw_from_tiles(logits, tokens, tile_mass, uniform, largest, heat, vocab, TILE: tl.constexpr, TILES: tl.constexpr):
    """The token of a row without filters: the tile in which the cumulative mass passes the draw, then the place there.

    `tile_mass` [TILES] fp64 is relative to the row's largest logit, 0 beyond the row's tiles. The tile's weights add up
    to what is rounded otherwise: the draw takes as large a share of the one as of the other.
    """
    tiles = tl.arange(0, TILES)
    target = uniform * tl.sum(tile_mass, 0)
    ends = tl.cumsum(tile_mass, 0)
    last = tl.max(tl.where(tile_mass > 0, tiles, 0), 0)
    tile = tl.min(tl.where((ends > target) & (tile_mass > 0), tiles, last), 0)
    target -= tl.sum(tl.where(tiles < tile, tile_mass, 0.0), 0)
    surveyed = tl.sum(tl.where(tiles == tile, tile_mass, 0.0), 0)
    start = tile * TILE
    length = tl.minimum(TILE, vocab - start)
    _, mass = _measure(logits + start, length, ALL, largest, heat, TILE)
    target += target * ((mass - surveyed).to(tl.float32) / surveyed.to(tl.float32)).to(tl.float64)
    return start + draw(logits + start, tokens, False, length, ALL, target, largest, heat, TILE)


@triton.jit
def lower_bound(peaks, total, least, number, share, largest, heat, vocab):
    """A distance that no cut-off of the filters exceeds, from the tiles' largest logits `peaks` and the row's mass.

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
    return tl.where(bound > 0, bound, 0.0)  # and not -0.0, whose bits are negative


@triton.jit
def draw_filtered(
    source, count, gathered, tokens, bound, total, uniform, least, number, share, largest, heat, TILE: tl.constexpr
):
    """The token of a row with filters, all of whose possible cut-offs are in the first `count` logits of `source`."""
    cut = bound.to(tl.int32, bitcast=True)
    if number > 0:
        cut = _bisect(source, count, cut, number, 0.0, largest, heat, TILE)
    _, mass = _measure(source, count, cut, largest, heat, TILE)
    if share < 1:
        mass = tl.where((number <= 0) & (least <= 0), total, mass)
        cut = _bisect(source, count, cut, 1, share * mass, largest, heat, TILE)
        _, mass = _measure(source, count, cut, largest, heat, TILE)
    return draw(source, tokens, gathered, count, cut, uniform * mass, largest, heat, TILE)
