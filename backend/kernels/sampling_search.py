"""Finds the cut-offs of a row with filters, and the token drawn within them, among a few of its logits.

A logit is represented by its distance: its difference from the row's largest, divided by the temperature (`heat`).
Distances are fp32 numbers >= 0, whose bits order as they do: a cut-off is the bits of a distance, exact to the last
one. Logits are divided before they are subtracted, as in `backend.worker.sampler`, and everywhere alike: at a low
temperature the quotients are large, and their rounding is no longer small beside a distance.

No filter's cut-off lies beyond a bound that follows from the tiles' largest logits and masses. Programs over the whole
device gather the candidates within it, in no order. Then one program a row narrows down three answers in turn: the bits
within which `top_k` candidates lie, the bits within which these have a share `top_p` of the mass, and the token up to
which these have the mass drawn. A round sums up to `WAYS` ends at once. Masses are counted in whole units, so that the
order of additions changes nothing. A row with more candidates than there is room for is read whole: as a rule three
times and once more for either cut-off, until the unsettled candidates have room, and little more than once for the
token.
"""

import triton
import triton.language as tl

from backend.kernels.triton_lang import await_inputs

FAR = tl.constexpr(87.0)  # beyond it a weight, exp(-distance), is no normal fp32 number, and its token is never drawn
UNFILTERED = tl.constexpr(-1)  # the cut-off of a row of which every logit is kept
UNITS = tl.constexpr(2.0**44)  # the mass of the largest logit
MAX_VOCAB = 1 << 19  # the most tokens whose masses 63 bits hold
WAYS = tl.constexpr(8)
WIDE = tl.constexpr(4)  # logits of a whole row that are summed up at a time, as a multiple of gathered ones
NARROW = tl.constexpr(3)  # rounds after each of which settled candidates are left out
BY_NUMBER, BY_MASS, DRAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def distances(x, largest, heat):
    """Return the distances of the logits `x` below `largest`; infinity for tokens that cannot be drawn."""
    return tl.maximum(tl.where(x > -float("inf"), largest / heat - x / heat, float("inf")), 0.0)


@triton.jit
def below(source, indices, real, largest, heat):
    """Return the distances of the logits at `indices`."""
    return distances(tl.load(source + indices, mask=real, other=-float("inf")), largest, heat)


@triton.jit
def _distance_of_number(nearest, mass, number, bound, slack, TILE: tl.constexpr):
    """Return a distance within which `number` logits lie, `bound` at most, by bisection.

    A tile's largest logit is within its distance `nearest`. Within a distance lie at least as many of the tile's logits
    as its mass exceeds the most that the others can have: none weighs more than the largest, of which `mass` counts 1.
    """
    near, far = tl.zeros([], tl.float32), bound
    sure = (mass * (1 - slack)).to(tl.float32)
    for _ in range(16):
        middle = near + (far - near) / 2
        beyond = TILE * tl.exp(tl.minimum(nearest - middle, 40.0))
        within = tl.maximum(sure - beyond, (nearest <= middle).to(tl.float32))
        enough = tl.sum(within, 0) >= number + 1  # one more, for the rounding of sums
        far = tl.where(enough, middle, far)
        near = tl.where(enough, near, middle)
    return far


@triton.jit
def _distance_of_share(relative, total, share, bound, slack, TILE: tl.constexpr):
    """Return a distance within which a `share` of the mass lies, `bound` at most, by bisection.

    A tile's mass beyond a distance is at most `TILE` times the weight of a logit there.
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
def _bound(nearest, mass, least, number, share, quotient, vocab, TILE: tl.constexpr):
    """Return a distance that no filter's cut-off exceeds, from the tiles' masses and their largest logits' distances.

    Min-p is its own bound. Without it and top-k, the last logit that top-p keeps weighs more than an equal share of the
    mass that is cut. `quotient` is the row's largest.
    """
    bound = tl.where(least > 0, -tl.log(tl.maximum(least, 1e-37)), FAR)
    slack = 1e-5 + 1e-6 * tl.abs(quotient)  # of weights, by the rounding of large quotients
    if number > 0:
        bound = _distance_of_number(nearest, mass, number, bound, slack, TILE)
    elif least <= 0:
        relative = mass * tl.exp(-nearest).to(tl.float64)
        total = tl.sum(relative, 0)
        rest = ((1 - share) * total / vocab).to(tl.float32)
        bound = tl.minimum(1e-3 - tl.log(tl.maximum(rest, 1e-37)), FAR)
        bound = _distance_of_share(relative, total, share, bound, slack, TILE)
    return tl.minimum(tl.where(bound > 0, bound, 0.0), FAR)  # and not -0.0, whose bits are negative


@triton.jit(do_not_specialize=["tiles_each"])
def gather(
    near,  # [rows, CAPACITY] fp32, the distances of candidates
    tokens,  # [rows, CAPACITY] int32
    counts,  # [rows] int32, of candidates, room or not; 0 before
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
    tiles_each,  # tiles of one program
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    await_inputs(PDL)
    heat, least = tl.load(temperature + row), tl.load(min_p + row)
    number, share = tl.load(top_k + row), tl.load(top_p + row)
    tiles = tl.arange(0, TILES)
    present = tiles < num_tiles
    peaks = tl.load(tile_largest + row * num_tiles + tiles, mask=present, other=-float("inf"))
    largest = tl.max(peaks, 0)
    drawn = (heat > 0) & (largest > -float("inf")) & (largest < float("inf"))
    cut = tl.full([], UNFILTERED, tl.int32)
    if drawn & ((number > 0) | (share < 1) | (least > 0)):
        mass = tl.load(tile_mass + row * num_tiles + tiles, mask=present, other=0.0)
        nearest = distances(peaks, largest, heat)
        cut = _bound(nearest, mass, least, number, share, largest / heat, vocab, TILE).to(tl.int32, bitcast=True)
        for tile in range(part * tiles_each, tl.minimum((part + 1) * tiles_each, num_tiles)):
            peak = tl.load(tile_largest + row * num_tiles + tile)
            if distances(peak, largest, heat).to(tl.int32, bitcast=True) <= cut:
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
def _candidates(near, tokens, logits, indices, end, largest, heat, GATHERED: tl.constexpr):
    """Return the distances and tokens of candidates before `end`: of the gathered ones, or of the row's logits."""
    if GATHERED:
        distance = tl.load(near + indices, mask=indices < end, other=float("inf"))
        token = tl.load(tokens + indices, mask=indices < end, other=0)
    else:
        distance = below(logits, indices, indices < end, largest, heat)
        token = indices
    return distance, token


@triton.jit
def _sums(
    near,
    tokens,
    logits,
    start,
    end,
    cut,
    ends,
    sought,
    largest,
    heat,
    GATHERED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the mass (if sought BY_NUMBER, the number) of candidates within `cut` up to each of `ends` [WAYS]."""
    sums = tl.zeros([WAYS, WIDTH], tl.int64)
    for base in range(start, end, WIDTH):
        indices = base + tl.arange(0, WIDTH)
        distance, token = _candidates(near, tokens, logits, indices, end, largest, heat, GATHERED)
        bits = distance.to(tl.int32, bitcast=True)
        held = bits <= cut
        mass = (tl.where(held, tl.exp(-distance), 0.0) * UNITS).to(tl.int64)
        weight = tl.where(sought == BY_NUMBER, held.to(tl.int64), mass)
        key = tl.where(sought == DRAW, token, bits)
        sums += tl.where(key[None, :] <= ends[:, None], weight[None, :], 0)
    return tl.sum(sums, 1)


@triton.jit
def _gather_between(
    near,
    tokens,
    logits,
    end,
    low,
    high,
    largest,
    heat,
    GATHERED: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gather candidates beyond `low` and up to `high` (bits), in place; returns their number, room or not."""
    kept = tl.zeros([], tl.int32)
    for base in range(0, end, WIDTH):
        indices = base + tl.arange(0, WIDTH)
        distance, token = _candidates(near, tokens, logits, indices, end, largest, heat, GATHERED)
        bits = distance.to(tl.int32, bitcast=True)
        held = (bits > low) & (bits <= high)
        ordinals = tl.cumsum(held.to(tl.int32), 0)
        places = kept + ordinals - 1
        kept += tl.max(ordinals, 0)
        tl.debug_barrier()  # overwritten entries have been read
        tl.store(near + places, distance, mask=held & (places < CAPACITY))
        tl.store(tokens + places, token, mask=held & (places < CAPACITY))
    tl.debug_barrier()
    return kept


@triton.jit
def _wanted(sought, kept, number, share, alone, total, drawn):
    """Return the sum that is sought, from the mass `kept` so far; if top-p is `alone`, from the `total` of all
    logits.
    """
    of_mass = tl.where(alone, total * UNITS, kept.to(tl.float64))
    wanted = tl.maximum((share * of_mass).to(tl.int64), 1)  # the largest logit is kept
    wanted = tl.where(sought == BY_NUMBER, number.to(tl.int64), wanted)
    of_draw = tl.minimum((drawn * kept.to(tl.float64)).to(tl.int64), kept - 1) + 1
    return tl.where(sought == DRAW, of_draw, wanted)


@triton.jit
def _search(
    near,
    tokens,
    count,
    logits,
    vocab,
    cut,
    sought,
    number,
    share,
    alone,
    total,
    drawn,
    largest,
    heat,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the first bits, or token, at which the sum is the wanted one, or the last; and the number of candidates
    that are left.
    """
    ways = tl.arange(0, WAYS) + 1
    high = tl.where(sought == DRAW, vocab - 1, cut).to(tl.int64)
    low = tl.full([], -1, tl.int64)  # up to `low` the wanted sum is not reached; up to `high` it is, if at all
    below_low, below_high = tl.zeros([], tl.int64), tl.full([], 1 << 62, tl.int64)  # the sums up to them
    wanted = tl.zeros([], tl.int64)
    listed, unlisted = count, tl.zeros([], tl.int64)  # candidates to sum up, and the sum of the ones before them
    rounds = 0
    while high - low > 1:
        ends = (low + (high - low) * ways // WAYS).to(tl.int32)
        if (rounds == 0) & (sought != DRAW):  # equal parts of the distance, not of its bits
            parts = (cut.to(tl.float32, bitcast=True) * (ways.to(tl.float32) / WAYS)).to(tl.int32, bitcast=True)
            ends = tl.where(ways < WAYS, parts, cut)
        gathered = listed <= CAPACITY
        if gathered:
            sums = _sums(near, tokens, logits, 0, listed, cut, ends, sought, largest, heat, True, WIDTH)
        else:
            start, end = 0, vocab
            if sought == DRAW:  # a token's place is known
                start, end, unlisted = (low + 1).to(tl.int32), (high + 1).to(tl.int32), below_low
            sums = _sums(near, tokens, logits, start, end, cut, ends, sought, largest, heat, False, WIDE * WIDTH)
        sums += unlisted
        if rounds == 0:
            wanted = _wanted(sought, tl.max(sums, 0), number, share, alone, total, drawn)
        reached = sums >= wanted
        low = tl.max(tl.where(reached, low, ends), 0)
        high = tl.min(tl.where(reached, ends, high), 0)
        below_low = tl.max(tl.where(reached, below_low, sums), 0)
        below_high = tl.min(tl.where(reached, sums, below_high), 0)
        rounds += 1
        if (rounds % NARROW == 0) & (sought != DRAW) & (listed > WIDTH):
            # Candidates beyond `high` are cut. The rest may exceed the room: then only candidates between `low` and
            # `high` are gathered, for this search alone.
            fits = (count <= CAPACITY) | ((sought == BY_NUMBER) & (below_high <= CAPACITY) & (listed > CAPACITY))
            lowest, highest = tl.where(fits, -1, low).to(tl.int32), high.to(tl.int32)
            if gathered:
                listed = _gather_between(
                    near, tokens, logits, listed, lowest, highest, largest, heat, True, CAPACITY, WIDTH
                )
            else:
                listed = _gather_between(
                    near, tokens, logits, vocab, lowest, highest, largest, heat, False, CAPACITY, WIDE * WIDTH
                )
            count = tl.where(fits, listed, count)
            unlisted = tl.where(fits | (listed > CAPACITY), unlisted, below_low)
    return high, count


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
    alone = (number <= 0) & (least <= 0)  # top-p then counts logits, too, that are no candidates
    for sought in range(3):
        if (sought == DRAW) | ((sought == BY_NUMBER) & (number > 0)) | ((sought == BY_MASS) & (share < 1)):
            found, count = _search(
                near,
                tokens,
                count,
                logits,
                vocab,
                cut,
                sought,
                number,
                share,
                alone,
                total,
                drawn,
                largest,
                heat,
                CAPACITY,
                WIDTH,
            )
            if sought == DRAW:
                token = found.to(tl.int32)
            else:
                cut = found.to(tl.int32)
    return token
