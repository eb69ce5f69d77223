"""Sampling kernels draw tokens from logits on the device, without a sort of the vocabulary or a wait of the host.

The order and the meaning of each filter, and the draw, are those of `backend.worker.sampler`, so that the tokens are
the same: cut-offs on a row's own logits, equal logits kept or cut together, and the inversion of the cumulative
distribution at a number hashed from (seed, position).

One kernel reads the logits once, in tiles over the whole device: it applies penalties, and stores each tile's largest
logit and mass. If rows have filters, a second kernel gathers the logits that may be within their cut-offs, from the
tiles that have any (`sampling_search`). The last kernel, a program a row, draws a filtered row's token from the
gathered logits; for another row it needs no more than the tiles' masses and one tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.ops import RowPenalties, RowSampling
from backend.kernels.sampling_search import FAR, MAX_VOCAB, UNFILTERED, below, distances, draw_within, gather
from backend.kernels.triton_lang import await_inputs, dependent_launch, multiprocessors

TILE = 1024
CAPACITY = 16384  # the most gathered candidates of a row
WIDTH = 256  # candidates that are summed up at a time, one a thread
GATHERING = 16  # programs on a multiprocessor


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
    counts,  # [rows] int32, of candidates, set to 0
    temperature,
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
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_tiles = tl.num_programs(1)
    await_inputs(PDL)
    tokens = tile * TILE + tl.arange(0, TILE)
    real = tokens < vocab
    places = logits + row * vocab + tokens
    x = tl.load(places, mask=real, other=-float("inf"))
    x = tl.where(x == x, x, -float("inf"))  # noqa: PLR0124, not a number: not drawn
    if PENALISES:
        absent, often, repeated, penalised = _penalised(presence, frequency, repetition, row)
        if penalised:
            slot = tl.load(slots + row) * vocab
            made = tl.load(output_counts + slot + tokens, mask=real, other=0)
            held = (made > 0) | (tl.load(in_prompt + slot + tokens, mask=real, other=0) != 0)
            x = tl.where(held, tl.where(x > 0, x / repeated, x * repeated), x)
            x = x - often * made.to(tl.float32) - absent * (made > 0).to(tl.float32)
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
    if FILTERS and tile == 0:
        tl.store(counts + row, 0)


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
def _draw(logits, tile_mass, drawn, largest, heat, vocab, TILE: tl.constexpr, TILES: tl.constexpr):
    """Draw the token of an unfiltered row: first the tile in which the cumulative mass passes the draw, then the place.

    `tile_mass` [TILES] fp64 is relative to the row's largest logit, 0 beyond the row's tiles. The tile's weights add up
    to a sum that is rounded otherwise: the draw takes the same share of both.
    """
    tiles = tl.arange(0, TILES)
    target = drawn * tl.sum(tile_mass, 0)
    ends = tl.cumsum(tile_mass, 0)
    last = tl.max(tl.where(tile_mass > 0, tiles, 0), 0)
    tile = tl.min(tl.where((ends > target) & (tile_mass > 0), tiles, last), 0)
    target -= tl.sum(tl.where(tiles < tile, tile_mass, 0.0), 0)
    surveyed = tl.sum(tl.where(tiles == tile, tile_mass, 0.0), 0)
    places = tl.arange(0, TILE)
    tokens = tile * TILE + places
    distance = below(logits, tokens, tokens < vocab, largest, heat)
    kept = distance <= FAR
    weights = tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64)
    mass = tl.sum(weights, 0)
    target += target * ((mass - surveyed).to(tl.float32) / surveyed.to(tl.float32)).to(tl.float64)
    first = tl.min(tl.where(kept & (tl.cumsum(weights, 0) > target), places, TILE), 0)
    return tile * TILE + tl.where(first < TILE, first, tl.max(tl.where(kept, places, 0), 0))


@triton.jit
def _choose(
    chosen,  # [rows] int64
    logits,
    tile_largest,
    tile_argmax,
    tile_mass,
    near,
    tokens,
    counts,
    cuts,
    temperature,
    min_p,
    top_k,
    top_p,
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
    TILES: tl.constexpr,  # a power of two >= the number of tiles
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    present = tiles < num_tiles
    await_inputs(PDL)
    heat = tl.load(temperature + row)
    drawn = _uniform(tl.load(seeds + row), tl.load(positions + row))
    peaks = tl.load(tile_largest + row * num_tiles + tiles, mask=present, other=-float("inf"))
    largest = tl.max(peaks, 0)
    token = tl.load(tile_argmax + row * num_tiles + tl.argmax(peaks, 0))
    if (heat > 0) & (largest > -float("inf")) & (largest < float("inf")):
        mass = tl.load(tile_mass + row * num_tiles + tiles, mask=present, other=0.0)
        relative = mass * tl.exp(-distances(peaks, largest, heat)).to(tl.float64)
        own, cut = logits + row * vocab, tl.full([], UNFILTERED, tl.int32)
        if FILTERS:
            cut = tl.load(cuts + row)
        if cut == UNFILTERED:
            token = _draw(own, relative, drawn, largest, heat, vocab, TILE, TILES)
        elif FILTERS:
            token = draw_within(
                near + row * CAPACITY,
                tokens + row * CAPACITY,
                tl.load(counts + row),
                own,
                vocab,
                cut,
                tl.load(min_p + row),
                tl.load(top_k + row),
                tl.load(top_p + row),
                drawn,
                tl.sum(relative, 0),
                largest,
                heat,
                CAPACITY,
                WIDTH,
            )
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
    near = logits.new_empty((num_rows if filtered else 0, CAPACITY))
    tokens = torch.empty_like(near, dtype=torch.int32)
    counts, cuts = logits.new_empty((2, num_rows), dtype=torch.int32)
    if penalties is None:
        none = rows.temperature
        slots, presence, frequency, repetition, in_prompt, made = rows.seeds, none, none, none, none, tile_argmax
    else:
        slots, presence, frequency, repetition = (
            penalties.slots,
            penalties.presence,
            penalties.frequency,
            penalties.repetition,
        )
        in_prompt, made = penalties.in_prompt, penalties.output_counts
    constants = {"TILE": TILE, "num_warps": 4, **dependent_launch(logits.device)}
    _survey[num_rows, num_tiles](
        logits,
        tile_largest,
        tile_argmax,
        tile_mass,
        counts,
        rows.temperature,
        slots,
        presence,
        frequency,
        repetition,
        in_prompt,
        made,
        vocab,
        PENALISES=penalties is not None,
        FILTERS=filtered,
        **constants,
    )
    constants |= {"TILES": triton.next_power_of_2(num_tiles), "CAPACITY": CAPACITY}
    if filtered:
        programs = GATHERING * multiprocessors(logits.device)
        tiles_each = triton.cdiv(num_rows * num_tiles, programs)
        gather[num_rows, triton.cdiv(num_tiles, tiles_each)](
            near,
            tokens,
            counts,
            cuts,
            logits,
            tile_largest,
            tile_mass,
            rows.temperature,
            rows.min_p,
            rows.top_k,
            rows.top_p,
            num_tiles,
            vocab,
            tiles_each,
            **constants,
        )
    _choose[(num_rows,)](
        chosen,
        logits,
        tile_largest,
        tile_argmax,
        tile_mass,
        near,
        tokens,
        counts,
        cuts,
        rows.temperature,
        rows.min_p,
        rows.top_k,
        rows.top_p,
        rows.seeds,
        rows.positions,
        slots,
        presence,
        frequency,
        repetition,
        made,
        num_tiles,
        vocab,
        PENALISES=penalties is not None,
        FILTERS=filtered,
        WIDTH=WIDTH,
        **{**constants, "num_warps": WIDTH // 32},
    )
    return chosen
