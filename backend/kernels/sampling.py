"""These kernels sample tokens from logits on the device: no sort of the vocabulary, no answer that the host waits for.

The order and the meaning of each filter, and the draw, are those of `backend.worker.sampler`, whose tokens these are:
cut-offs on a row's own logits, equal logits kept or cut together, and the inversion of the cumulative distribution at a
number hashed from (seed, position).

One kernel reads the logits once, in tiles over the whole device: it applies penalties, and leaves each tile's largest
logit and mass. Where rows have filters, `sampling_search` finds their cut-offs and weighs the tiles again within them,
in six more reads at most, of those tiles alone in which a cut-off can lie. The last kernel, a program a row, needs no
more than the tiles' masses and one tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.ops import RowPenalties, RowSampling
from backend.kernels.sampling_search import (
    ALL,
    CUT,
    MAX_VOCAB,
    STATE,
    UNFILTERED,
    begin,
    below,
    distances,
    is_last,
    mass_within,
    search,
)

TILE = 1024
SEARCHED = 4  # tiles that one program of a search takes


@triton.jit
def _penalised(presence, frequency, repetition, row):
    """Return the row's penalties, and True if it has any."""
    absent = tl.load(presence + row)
    often = tl.load(frequency + row)
    repeated = tl.load(repetition + row)
    return absent, often, repeated, (absent != 0) | (often != 0) | (repeated != 1)


@triton.jit
def _survey(
    logits,  # [rows, vocab] fp32, penalised in place
    tile_largest,  # [rows, tiles] fp32
    tile_argmax,  # [rows, tiles] int32
    tile_mass,  # [rows, tiles] fp64, of exp((logit - the tile's largest) / temperature)
    states,  # [rows, STATE] int64, 0
    temperature,
    min_p,
    top_k,
    top_p,
    slots,
    presence,
    frequency,
    repetition,
    in_prompt,
    output_counts,
    vocab,
    PENALISES: tl.constexpr,
    FILTERS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # a power of two >= the number of tiles
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    tokens = tile * TILE + tl.arange(0, TILE)
    real = tokens < vocab
    places = logits + row * vocab + tokens
    x = tl.load(places, mask=real, other=-float("inf"))
    x = tl.where(x == x, x, -float("inf"))  # noqa: PLR0124, not a number: not drawn
    if PENALISES:
        absent, often, repeated, penalised = _penalised(presence, frequency, repetition, row)
        if penalised:
            slot = tl.load(slots + row) * vocab
            counts = tl.load(output_counts + slot + tokens, mask=real, other=0)
            held = (counts > 0) | (tl.load(in_prompt + slot + tokens, mask=real, other=0) != 0)
            x = tl.where(held, tl.where(x > 0, x / repeated, x * repeated), x)
            x = x - often * counts.to(tl.float32) - absent * (counts > 0).to(tl.float32)
            tl.store(places, x, mask=real)
    heat = tl.load(temperature + row)
    divisor = tl.where(heat > 0, heat, 1.0)
    largest = tl.max(x, 0)
    anchor = tl.where(largest > -float("inf"), largest, 0.0)
    weights = tl.exp(-distances(x, anchor, divisor))
    summary = row * num_tiles + tile
    tl.store(tile_largest + summary, largest)
    tl.store(tile_argmax + summary, tile * TILE + tl.argmax(x, 0))
    tl.store(tile_mass + summary, tl.sum(weights.to(tl.float64), 0))
    if FILTERS:
        state = states + row * STATE
        if is_last(state, num_tiles):
            tiles = tl.arange(0, TILES)
            present = tiles < num_tiles
            summaries = row * num_tiles + tiles
            peaks = tl.load(tile_largest + summaries, mask=present, other=-float("inf"), volatile=True)
            mass = tl.load(tile_mass + summaries, mask=present, other=0.0, volatile=True)
            least, number, share = tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row)
            begin(state, peaks, mass, heat, least, number, share, vocab)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """Return a number in [0, 1) of 53 random bits (SplitMix64; Steele et al., 2014)."""
    state = _mix(seed.to(tl.uint64)) + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    return (_mix(state) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _place(source, count, cut, target, largest, heat, TILE: tl.constexpr):
    """Return the first of `count` logits at which the mass of those within `cut` exceeds `target`, or the last."""
    indices = tl.arange(0, TILE)
    distance = below(source, indices, indices < count, largest, heat)
    kept = distance.to(tl.int32, bitcast=True) <= cut
    ends = tl.cumsum(tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64), 0)
    first = tl.min(tl.where(kept & (ends > target), indices, TILE), 0)
    return tl.where(first < TILE, first, tl.max(tl.where(kept, indices, 0), 0))


@triton.jit
def _draw(logits, tile_mass, drawn, cut, largest, heat, vocab, TILE: tl.constexpr, TILES: tl.constexpr):
    """Draw the token of a row: first the tile in which the cumulative mass passes the draw, then the place there.

    `tile_mass` [TILES] fp64 is relative to the row's largest logit, 0 beyond the row's tiles. The tile's weights add up
    to what is rounded otherwise: the draw takes as large a share of the one as of the other.
    """
    tiles = tl.arange(0, TILES)
    target = drawn * tl.sum(tile_mass, 0)
    ends = tl.cumsum(tile_mass, 0)
    last = tl.max(tl.where(tile_mass > 0, tiles, 0), 0)
    tile = tl.min(tl.where((ends > target) & (tile_mass > 0), tiles, last), 0)
    target -= tl.sum(tl.where(tiles < tile, tile_mass, 0.0), 0)
    surveyed = tl.sum(tl.where(tiles == tile, tile_mass, 0.0), 0)
    start = tile * TILE
    mass = mass_within(logits + start, vocab - start, cut, largest, heat, TILE)
    target += target * ((mass - surveyed).to(tl.float32) / surveyed.to(tl.float32)).to(tl.float64)
    return start + _place(logits + start, vocab - start, cut, target, largest, heat, TILE)


@triton.jit
def _choose(
    chosen,  # [rows] int64
    logits,
    tile_largest,
    tile_argmax,
    tile_mass,
    states,
    temperature,
    seeds,
    positions,
    slots,
    presence,
    frequency,
    repetition,
    output_counts,
    num_tiles,
    vocab,
    PENALISES: tl.constexpr,
    FILTERS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    present = tiles < num_tiles
    peaks = tl.load(tile_largest + row * num_tiles + tiles, mask=present, other=-float("inf"))
    largest = tl.max(peaks, 0)
    heat = tl.load(temperature + row)
    token = tl.load(tile_argmax + row * num_tiles + tl.argmax(peaks, 0))
    if (heat > 0) & (largest > -float("inf")) & (largest < float("inf")):
        mass = tl.load(tile_mass + row * num_tiles + tiles, mask=present, other=0.0)
        relative = mass * tl.exp(-distances(peaks, largest, heat)).to(tl.float64)
        cut = tl.full([], ALL, tl.int64)
        if FILTERS:
            found = tl.load(states + row * STATE + CUT)
            relative = tl.where(found == UNFILTERED, relative, mass)
            cut = tl.where(found == UNFILTERED, cut, found)
        drawn = _uniform(tl.load(seeds + row), tl.load(positions + row))
        token = _draw(logits + row * vocab, relative, drawn, cut, largest, heat, vocab, TILE, TILES)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    tl.store(chosen + row, token.to(tl.int64))
    if PENALISES:
        _, _, _, penalised = _penalised(presence, frequency, repetition, row)
        if penalised:
            place = output_counts + tl.load(slots + row) * vocab + token
            tl.store(place, tl.load(place) + 1)


def sample_rows(logits: Tensor, rows: RowSampling, penalties: RowPenalties | None = None) -> Tensor:
    """Sample token ids [rows] int64 from `logits` [rows, vocab] fp32, contiguous, in which penalties are applied.

    Logits that are not numbers give a token of the vocabulary.
    """
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    num_rows, vocab = logits.shape
    assert vocab <= MAX_VOCAB
    num_tiles = triton.cdiv(vocab, TILE)
    tile_largest = logits.new_empty((num_rows, num_tiles))
    tile_argmax = logits.new_empty((num_rows, num_tiles), dtype=torch.int32)
    tile_mass = logits.new_empty((num_rows, num_tiles), dtype=torch.float64)
    chosen = logits.new_empty(num_rows, dtype=torch.int64)
    filtered = rows.some_min_p or rows.some_top_k or rows.some_top_p
    states = logits.new_zeros((num_rows, STATE.value), dtype=torch.int64) if filtered else rows.seeds
    if penalties is None:
        none = rows.temperature
        slots, presence, frequency, repetition, in_prompt, counts = rows.seeds, none, none, none, none, tile_argmax
    else:
        slots, presence, frequency, repetition = (
            penalties.slots,
            penalties.presence,
            penalties.frequency,
            penalties.repetition,
        )
        in_prompt, counts = penalties.in_prompt, penalties.output_counts
    constants = {
        "PENALISES": penalties is not None,
        "FILTERS": filtered,
        "TILE": TILE,
        "TILES": triton.next_power_of_2(num_tiles),
    }
    _survey[num_rows, num_tiles](
        logits,
        tile_largest,
        tile_argmax,
        tile_mass,
        states,
        rows.temperature,
        rows.min_p,
        rows.top_k,
        rows.top_p,
        slots,
        presence,
        frequency,
        repetition,
        in_prompt,
        counts,
        vocab,
        **constants,
        num_warps=4,
    )
    if filtered:
        search(logits, tile_largest, tile_mass, states, rows, TILE, SEARCHED)
    _choose[(num_rows,)](
        chosen,
        logits,
        tile_largest,
        tile_argmax,
        tile_mass,
        states,
        rows.temperature,
        rows.seeds,
        rows.positions,
        slots,
        presence,
        frequency,
        repetition,
        counts,
        num_tiles,
        vocab,
        **constants,
        num_warps=4,
    )
    return chosen
