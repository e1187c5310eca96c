# mypy: disallow-untyped-defs=False
"""Device code of `sample_tokens`: samples one row under top-k, top-p and min-p and finds the thresholds without a sort.

1. `least_score` derives a lower bound of the threshold from the maximum and mass of each group of tokens.
2. `gather_candidates` copies the tokens at or above the bound, usually few, in the order of their ids, from the pieces
   of the row (some 32 tokens) whose maximum reaches the bound.
3. `filtered_token` finds the thresholds by bisection over the order-preserving integers of the logits' format, counting
   and weighing candidates, and samples by Gumbel-max. With too many candidates it works on the row itself.

Masses are relative to the row's best token. Scores are logits, not yet divided by the temperature.
"""

from __future__ import annotations

from hf_paged.kernels._triton import jit, tl
from hf_paged.sampling.gumbel import gumbel_noise
from hf_paged.sampling.table import MIN_P, ONE_MINUS_TOP_P, TOP_K, float_setting, int_setting


@jit()
def load_scores(row, token, inside, eos, num_eos, eos_barred):
    """Load logits of a row as float32, with -inf outside and at end-of-sequence ids if ``eos_barred``."""
    score = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
    if eos_barred:
        for i in range(num_eos):
            score = tl.where(token == tl.load(eos + i).to(tl.int32), float("-inf"), score)
    return score


@jit()
def weight_of(score, top, scale):
    return tl.exp2((score - top) * scale)


@jit()
def _key_of(value, SHIFT: tl.constexpr):
    """Return an int64 with the order of the float32 ``value``; SHIFT drops bits that the logits' format lacks."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@jit()
def _value_of(key, SHIFT: tl.constexpr):
    """Return a float32 not above any logit with this key, and above every logit with a smaller key."""
    bits = (key << SHIFT).to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(value != value, float("-inf"), value)  # the lowest key is the key of -inf


@jit()
def filters_of(floats, ints, slot):
    """A slot's top-k, 1 - top-p and min-p; 0 where a filter is off."""
    one_minus_top_p = float_setting(floats, slot, ONE_MINUS_TOP_P)
    return int_setting(ints, slot, TOP_K), one_minus_top_p, float_setting(floats, slot, MIN_P)


@jit()
def is_filtered(temperature, floats, ints, slot):
    """Whether a slot's tokens are drawn with a filter."""
    k, one_minus_top_p, min_p = filters_of(floats, ints, slot)
    return (temperature != 0.0) & ((k > 0) | (one_minus_top_p > 0.0) | (min_p > 0.0))


@jit()
def least_score(
    piece_top, num_pieces, tops, masses, live, top, total, temperature, scale, floats, ints, slot,
    GROUP: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr,
):
    """Return a score below which no token survives, from each group's maximum ``tops`` and mass ``masses``.

    At least k tokens reach the k-th largest maximum of all groups (or pieces). Without top-k, tokens below x weigh at
    most sum(min(mass of the group, GROUP * weight of x)): top-p drops them if that is at most 1 - top_p.
    """
    k, one_minus_top_p, min_p = filters_of(floats, ints, slot)
    least = tl.full((), float("-inf"), tl.float32)
    low, high = _key_of(least, SHIFT), _key_of(top, SHIFT) + 1
    if k > 0:
        if k <= tl.sum(live.to(tl.int32), 0):
            low = _key_of(tl.min(tl.where(live, tops, top), 0), SHIFT)
            while high - low > 1:
                middle = (low + high) >> 1
                if tl.sum((live & (tops >= _value_of(middle, SHIFT))).to(tl.int32), 0) >= k:
                    low = middle
                else:
                    high = middle
            least = _value_of(low, SHIFT)
        elif k <= num_pieces:
            while high - low > 1:
                middle = (low + high) >> 1
                if _count_from(piece_top, num_pieces, _value_of(middle, SHIFT), TILE) >= k:
                    low = middle
                else:
                    high = middle
            least = _value_of(low, SHIFT)
    elif one_minus_top_p > 0.0:
        limit = tl.minimum(one_minus_top_p, 1.0) * total * 0.9999  # so that rounding cannot drop a survivor
        while high - low > 1:
            middle = (low + high) >> 1
            most = GROUP * weight_of(_value_of(middle, SHIFT), top, scale)
            if tl.sum(tl.minimum(masses, most), 0) <= limit:
                low = middle
            else:
                high = middle
        least = _value_of(low, SHIFT)
    else:
        least = top + (tl.log(min_p) * 1.0001 - 0.001) * temperature
    return least


@jit()
def _count_from(source, size, least, TILE: tl.constexpr):
    count = tl.zeros([TILE], tl.int32)
    for start in range(0, size, TILE):
        at = start + tl.arange(0, TILE)
        count += ((tl.load(source + at, mask=at < size, other=float("-inf")) >= least) & (at < size)).to(tl.int32)
    return tl.sum(count, 0)


@jit()
def gather_candidates(
    row, eos, num_eos, eos_barred, piece_top, num_pieces, least, listed, held_score, held_token, vocab_size,
    PIECE: tl.constexpr, HELD: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Copy scores and ids of a row's tokens at or above ``least``, in order, and return their number.

    At most HELD tokens are written; if the pieces to search exceed HELD, the result is their number and none is copied.
    """
    num_listed = 0
    for start in range(0, num_pieces, TILE):
        piece = start + tl.arange(0, TILE)
        top = tl.load(piece_top + piece, mask=piece < num_pieces, other=float("-inf")).to(tl.float32)
        wanted = (top >= least) & (top > float("-inf"))
        listed_at = num_listed + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(listed + listed_at, piece, mask=wanted & (listed_at < HELD))
        num_listed += tl.sum(wanted.to(tl.int32), 0)
    tl.debug_barrier()  # other threads of the program read `listed`
    found = 0
    if num_listed > HELD:
        found = num_listed  # every piece has at least one token
    else:
        for first in range(0, num_listed, AT_ONCE):
            which = first + tl.arange(0, AT_ONCE)
            chosen = tl.load(listed + which, mask=which < num_listed, other=num_pieces)
            token = chosen[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
            score = load_scores(row, token, token < vocab_size, eos, num_eos, eos_barred)
            taken = (score >= least) & (score > float("-inf"))
            counts = tl.sum(taken.to(tl.int32), 1)
            before = found + tl.cumsum(counts, 0) - counts
            place = before[:, None] + tl.cumsum(taken.to(tl.int32), 1) - 1
            taken &= place < HELD
            tl.store(held_score + place, score.to(held_score.dtype.element_ty), mask=taken)
            tl.store(held_token + place, token, mask=taken)
            found += tl.sum(counts, 0)
    tl.debug_barrier()
    return found


@jit()
def _scores_at(source, at, size, eos, num_eos, eos_barred, IS_ROW: tl.constexpr):
    if IS_ROW:
        score = load_scores(source, at, at < size, eos, num_eos, eos_barred)
    else:
        score = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
    return score


@jit()
def _between(
    source, size, eos, num_eos, eos_barred, least, below, top, scale, TILE: tl.constexpr, IS_ROW: tl.constexpr
):
    """Return how many tokens score in [least, below), and their mass."""
    # A row is long and these sums need few registers: wider tiles keep more loads in flight.
    WIDTH: tl.constexpr = 2 * TILE if IS_ROW else TILE
    count, mass = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.float32)
    for start in range(0, size, WIDTH):
        score = _scores_at(source, start + tl.arange(0, WIDTH), size, eos, num_eos, eos_barred, IS_ROW)
        counted = (score >= least) & (score < below) & (score > float("-inf"))
        count += counted.to(tl.int32)
        mass += tl.where(counted, weight_of(score, top, scale), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@jit()
def filtered_token(
    source, ids, size, eos, num_eos, eos_barred, least, top, total, temperature, scale, floats, ints, slot, key0, key1,
    TILE: tl.constexpr, IS_ROW: tl.constexpr, SHIFT: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Sample a token from the survivors; returns it, its score, and the survivors' mass.

    ``source`` has ``size`` scores: candidates with token ids ``ids``, or the row itself (IS_ROW). Of tokens tied at the
    threshold of top-p, as many stay as in stock, the last ones: a stable ascending sort drops the first.
    """
    k, one_minus_top_p, min_p = filters_of(floats, ints, slot)
    infinity = float("inf")
    if k > 0:
        low, high = _key_of(least, SHIFT), _key_of(top, SHIFT) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            count, _ = _between(
                source, size, eos, num_eos, eos_barred, _value_of(middle, SHIFT), infinity, top, scale, TILE, IS_ROW
            )
            if count >= k:
                low = middle
            else:
                high = middle
        least = _value_of(low, SHIFT)
    dropped = 0
    if one_minus_top_p > 0.0:
        _, mass = _between(source, size, eos, num_eos, eos_barred, least, infinity, top, scale, TILE, IS_ROW)
        rest = tl.maximum(total - mass, 0.0)  # mass below `least`
        if k > 0:
            rest, total = rest * 0.0, mass
        limit = one_minus_top_p * total
        # `high` becomes the first key with more mass than the limit up to it, `under` the mass below that key.
        low, high, under = _key_of(least, SHIFT) - 1, _key_of(top, SHIFT), rest
        while high - low > 1:
            middle = (low + high) >> 1
            _, mass = _between(
                source, size, eos, num_eos, eos_barred, least, _value_of(middle + 1, SHIFT), top, scale, TILE, IS_ROW
            )
            if rest + mass > limit:
                high = middle
            else:
                low, under = middle, rest + mass
        least = _value_of(high, SHIFT)
        count, mass = _between(
            source, size, eos, num_eos, eos_barred, least, _value_of(high + 1, SHIFT), top, scale, TILE, IS_ROW
        )
        each = tl.maximum(mass / tl.maximum(count, 1), 1e-37)
        dropped = tl.minimum(tl.maximum((limit - under) / each, 0.0), (count - 1).to(tl.float32)).to(tl.int32)
    above = _value_of(_key_of(least, SHIFT) + 1, SHIFT)
    best = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    score_there = tl.full([TILE], float("-inf"), tl.float32)
    kept_mass = tl.zeros([TILE], tl.float32)
    tied_before = 0
    for start in range(0, size, TILE):
        at = start + tl.arange(0, TILE)
        score = _scores_at(source, at, size, eos, num_eos, eos_barred, IS_ROW)
        kept = (score >= least) & (score > float("-inf"))
        if dropped > 0:
            tied = kept & (score < above)
            kept &= (score >= above) | (tied_before + tl.cumsum(tied.to(tl.int32), 0) > dropped)
            tied_before += tl.sum(tied.to(tl.int32), 0)
        weight = weight_of(score, top, scale)
        kept &= weight >= min_p
        if tl.max(kept.to(tl.int32), 0) > 0:
            if IS_ROW:
                token = at
            else:
                token = tl.load(ids + at, mask=at < size, other=0)
            kept_mass += tl.where(kept, weight, 0.0)
            noisy = tl.div_rn(score, temperature) + gumbel_noise(token, key0, key1, INTERPRETED)
            taken = kept & ((noisy > best) | (where == 0x7FFFFFFF))
            best = tl.where(taken, noisy, best)
            where = tl.where(taken, token, where)
            score_there = tl.where(taken, score, score_there)
    token = tl.min(tl.where(best == tl.max(best, 0), where, 0x7FFFFFFF), 0)
    score = tl.max(tl.where(where == token, score_there, float("-inf")), 0)
    return token, score, tl.sum(kept_mass, 0)
