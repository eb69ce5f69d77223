"""From logits to tokens on the device: no sort of the vocabulary, no answer that the host waits for.

The order and the meaning of each filter, and the draw, are those of `backend.sampler`, whose tokens these are: cut-offs
on a row's own logits, equal logits kept or cut together, and the inversion of the cumulative distribution at a number
hashed from (seed, position).

One kernel reads the logits once, in tiles over the whole device: it applies penalties, and leaves each tile's largest
logit and mass. A second one, a program a row, needs no more than that and one tile for a row without filters. For
filters it gathers the few logits above a bound that the cut-off cannot be below, from the tiles that have any, and
bisects on their bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backend.kernels.row_sampling import RowPenalties, RowSampling
from backend.kernels.sampling_search import distances, draw_filtered, draw_from_tiles, gather, lower_bound, uniform

TILE = 1024
SEARCHED = 2048  # logits that a row's program takes at a time
GATHERED = 32768  # candidates kept apart for a row; a row that has more is searched where it is, many times slower


@triton.jit
def _penalised(presence, frequency, repetition, row):
    """The row's penalties, and whether it has any."""
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
    temperature,
    slots,
    presence,
    frequency,
    repetition,
    in_prompt,
    output_counts,
    vocab,
    PENALISES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
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
    heat = tl.where(heat > 0, heat, 1.0)
    largest = tl.max(x, 0)
    anchor = tl.where(largest > -float("inf"), largest, 0.0)
    weights = tl.exp(-distances(x, anchor, heat))
    summary = row * tl.num_programs(1) + tile
    tl.store(tile_largest + summary, largest)
    tl.store(tile_argmax + summary, tile * TILE + tl.argmax(x, 0))
    tl.store(tile_mass + summary, tl.sum(weights.to(tl.float64), 0))


@triton.jit
def _choose(
    chosen,  # [rows] int64
    logits,
    candidates,  # [rows, GATHERED] fp32
    candidate_tokens,  # [rows, GATHERED] int32
    tile_largest,
    tile_argmax,
    tile_mass,
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
    TILE: tl.constexpr,
    SEARCHED: tl.constexpr,
    TILES: tl.constexpr,  # a power of two >= num_tiles
    GATHERED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    candidates += row * GATHERED
    candidate_tokens += row * GATHERED
    tile_largest += row * num_tiles
    tiles = tl.arange(0, TILES)
    present = tiles < num_tiles
    peaks = tl.load(tile_largest + tiles, mask=present, other=-float("inf"))
    largest = tl.max(peaks, 0)
    heat = tl.load(temperature + row)
    token = tl.load(tile_argmax + row * num_tiles + tl.argmax(peaks, 0))
    if (heat > 0) & (largest > -float("inf")) & (largest < float("inf")):
        mass = tl.load(tile_mass + row * num_tiles + tiles, mask=present, other=0.0)
        mass *= tl.exp(-distances(peaks, largest, heat)).to(tl.float64)
        drawn = uniform(tl.load(seeds + row), tl.load(positions + row))
        least = tl.load(min_p + row)
        number = tl.load(top_k + row)
        share = tl.load(top_p + row)
        if (least <= 0) & (number <= 0) & (share >= 1):
            token = draw_from_tiles(logits, candidate_tokens, mass, drawn, largest, heat, vocab, TILE, TILES)
        else:
            total = tl.sum(mass, 0)
            bound = lower_bound(peaks, total, least, number, share, largest, heat, vocab)
            count = gather(
                logits, candidates, candidate_tokens, tile_largest, num_tiles, vocab, bound, largest, heat, TILE,
                GATHERED,
            )  # fmt: skip
            tl.debug_barrier()  # what other threads have gathered is read from here on
            gathered = count <= GATHERED
            source = logits
            if gathered:
                source = candidates
            else:
                count = vocab
            token = draw_filtered(
                source, count, gathered, candidate_tokens, bound, total, drawn, least, number, share, largest, heat,
                SEARCHED,
            )  # fmt: skip
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    tl.store(chosen + row, token.to(tl.int64))
    if PENALISES:
        _, _, _, penalised = _penalised(presence, frequency, repetition, row)
        if penalised:
            place = output_counts + tl.load(slots + row) * vocab + token
            tl.store(place, tl.load(place) + 1)


def sample(logits: Tensor, rows: RowSampling, penalties: RowPenalties | None = None) -> Tensor:
    """Token ids [rows] int64 for `logits` [rows, vocab] fp32, contiguous, in which penalties are applied.

    Logits that are not numbers give a token of the vocabulary.
    """
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    num_rows, vocab = logits.shape
    num_tiles = triton.cdiv(vocab, TILE)
    tile_largest = logits.new_empty((num_rows, num_tiles))
    tile_argmax = logits.new_empty((num_rows, num_tiles), dtype=torch.int32)
    tile_mass = logits.new_empty((num_rows, num_tiles), dtype=torch.float64)
    candidates = logits.new_empty((num_rows, GATHERED))
    candidate_tokens = logits.new_empty((num_rows, GATHERED), dtype=torch.int32)
    chosen = logits.new_empty(num_rows, dtype=torch.int64)
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
    _survey[num_rows, num_tiles](
        *(logits, tile_largest, tile_argmax, tile_mass, rows.temperature),
        *(slots, presence, frequency, repetition, in_prompt, counts, vocab),
        PENALISES=penalties is not None,
        TILE=TILE,
        num_warps=4,
    )
    _choose[(num_rows,)](
        *(chosen, logits, candidates, candidate_tokens, tile_largest, tile_argmax, tile_mass),
        *(rows.temperature, rows.min_p, rows.top_k, rows.top_p, rows.seeds, rows.positions),
        *(slots, presence, frequency, repetition, counts, num_tiles, vocab),
        PENALISES=penalties is not None,
        TILE=TILE,
        SEARCHED=SEARCHED,
        TILES=triton.next_power_of_2(num_tiles),
        GATHERED=GATHERED,
        num_warps=8,
    )
    return chosen
