# mypy: disallow-untyped-defs=False
"""The experts of each row, their scores, and the order in which the products of experts take the rows: one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    prefetch_options,
    prefetch_rows,
    require_triton,
    tl,
    triton,
)

MAX_ROWS = 1 << 16
MAX_EXPERTS = 512
# Rows whose pairs are a group each, so that nothing is ordered. Of several rows some share an expert, whose weights
# would be read for each of them.
UNORDERED_ROWS = 1
# How the pairs of one chunk of rows are ordered: "chunks", as those of several, or "rows", where they are chosen.
ORDER_OF_FEW = "chunks"
_FEW_CHOICES = (1, 4)  # numbers of rows for which a kernel of their own chooses experts
_FEW_ROWS = 64  # up to which a program chooses experts for 16 rows, beyond for 32
_SPREAD_ROWS = 256  # beyond which the pairs are ordered by a launch of their own
_MOST_CHOICES = 8192  # of rows and experts that a program holds

SOFTMAX, TOPK_SOFTMAX, SIGMOID = "softmax", "topk_softmax", "sigmoid"


class RouterRule(NamedTuple):
    """Numbers of a router. ``kind`` says how logits become scores:

    * "softmax": of all logits in float32, then the `top_k` largest; ``norm`` divides them by their sum.
    * "topk_softmax": of the `top_k` largest logits alone, in the logits' dtype.
    * "sigmoid": in float32. The `top_k` largest are taken of scores plus a correction for each expert, within the
      `topk_group` of `num_groups` groups whose two largest have the largest sums; ``norm`` divides the scores by their
      sum plus ``epsilon``, and ``scaling`` multiplies them.

    ``keeps_float32``: scores stay float32, as those of "sigmoid" do; else they are rounded to the dtype of the hidden
    states. ``exact_logits``: logits are products of float32 copies; else they are rounded to the hidden states' dtype.
    """

    kind: str
    top_k: int
    norm: bool = False
    keeps_float32: bool = False
    exact_logits: bool = False
    epsilon: float = 0.0
    scaling: float = 1.0
    num_groups: int = 1
    topk_group: int = 1


class Routes(NamedTuple):
    """The experts of T rows, k each.

    Attributes:
        scores: [T, k], float32 or the hidden states' dtype, the largest first.
        experts: [T, k] int32; -1 for padding rows, which have none.
        order: [T * k] int32, pairs (row * k + place of the expert) by group, and by row within one.
        groups: [G, 3] int32 for each expert that has rows: its number, its first index in `order`, and how many rows
            it has. With up to `UNORDERED_ROWS` rows each pair is a group of its own. G is the most that there can be;
            -1: no expert.
    """

    scores: torch.Tensor
    experts: torch.Tensor
    order: torch.Tensor
    groups: torch.Tensor


class RouterWeights(NamedTuple):
    """Weights of a router: ``weight`` [E, H], ``bias`` [E] of logits or None, ``correction`` [E] of its own dtype or
    None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None


def route(x: torch.Tensor, router: RouterWeights, rule: RouterRule, arrivals: torch.Tensor,
          lengths: torch.Tensor | None = None) -> Routes:
    """Choose experts for each row by a router.

    Among equal scores experts with lower numbers come first, as torch's `topk` on NVIDIA GPUs has it.

    Args:
        x: ``[T, H]``, T at most `MAX_ROWS`; rows may be strided.
        router: weights in x's dtype, but for the correction.
        rule: how the router chooses.
        arrivals: of `new_arrivals`, all 0, and 0 again afterwards; launches that may overlap need others.
        lengths: ``[T]`` int32, 0 for padding rows, to which no expert is given; None: there are none.
    """
    if x.is_cuda:
        return route_triton(x, router, rule, arrivals, lengths)
    return route_reference(x, router, rule, arrivals, lengths)


def new_arrivals(device: torch.device) -> torch.Tensor:
    """Return as many counters as a launch may need."""
    return torch.zeros(1 + MAX_ROWS // 16, dtype=torch.int32, device=device)


def route_reference(x: torch.Tensor, router: RouterWeights, rule: RouterRule, arrivals: torch.Tensor | None = None,
                    lengths: torch.Tensor | None = None) -> Routes:
    """:func:`route` in plain torch."""
    scores, experts = _choose(x, router, rule)
    if lengths is not None:
        experts = experts.masked_fill((lengths == 0)[:, None], -1)
    return Routes(scores, experts.int(), *grouped(experts, len(router.weight)))


def _choose(x: torch.Tensor, router: RouterWeights, rule: RouterRule) -> tuple[torch.Tensor, torch.Tensor]:
    if rule.kind == SIGMOID:
        exact = rule.exact_logits
        logits = F.linear(x.float(), router.weight.float()) if exact else F.linear(x, router.weight).float()
        scores = logits.sigmoid()
        choice = scores if router.correction is None else scores + router.correction
        if rule.num_groups > 1:
            groups = choice.unflatten(1, (rule.num_groups, -1))
            best = _top(groups.topk(2, dim=-1)[0].sum(-1), rule.topk_group)[1]
            taken = torch.zeros_like(groups[..., 0]).scatter_(1, best, 1).bool()
            choice = groups.masked_fill(~taken[..., None], float("-inf")).flatten(1)
        experts = _top(choice, rule.top_k)[1]
        top = scores.gather(1, experts)
        if rule.norm:
            top = top / (top.sum(-1, keepdim=True) + rule.epsilon)
        return top * rule.scaling, experts
    logits = F.linear(x, router.weight, router.bias)
    if rule.kind == TOPK_SOFTMAX:
        top, experts = _top(logits, rule.top_k)
        return F.softmax(top, dim=1, dtype=top.dtype), experts
    top, experts = _top(F.softmax(logits, dim=-1, dtype=torch.float32), rule.top_k)
    if rule.norm:
        top = top / top.sum(-1, keepdim=True)
    return top if rule.keeps_float32 else top.to(logits.dtype), experts


def _top(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values and their places, lower places first among equal values."""
    values, places = values.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], places[..., :count]


def grouped(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `Routes.order` and `Routes.groups` of experts [T, k]; entries of `order` without an expert are 0."""
    flat = experts.flatten().long()
    if len(experts) <= UNORDERED_ROWS:
        order = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
        return order, torch.stack([flat.int(), order, torch.ones_like(order)], 1)
    real = (flat >= 0).nonzero().view(-1)
    order = torch.zeros(len(flat), dtype=torch.int32, device=flat.device)
    order[: len(real)] = real[flat[real].sort(stable=True)[1]].int()
    counts = torch.bincount(flat[real], minlength=num_experts)
    hit = counts.nonzero().view(-1)
    groups = torch.full((min(num_experts, len(flat)), 3), -1, dtype=torch.int32, device=flat.device)
    groups[: len(hit)] = torch.stack([hit, (counts.cumsum(0) - counts)[hit], counts[hit]], 1).int()
    return order, groups


@jit()
def _exp(x, INTERPRETED: tl.constexpr):
    # libdevice's exp, as torch's softmax on CUDA; tl.exp is ex2.approx.
    return tl.exp(x) if INTERPRETED else tl.extra.cuda.libdevice.exp(x)


@jit()
def _softmax(x, INTERPRETED: tl.constexpr):
    """Softmax over the columns of x float32 [ROWS, N]; columns of -inf count for nothing."""
    power = _exp(x - tl.max(x, 1)[:, None], INTERPRETED)
    return tl.div_rn(power, tl.sum(power, 1)[:, None] + tl.zeros_like(power))


@jit()
def _first_of_largest(values, column, NONE: tl.constexpr):
    """Return the largest of each row of values [ROWS, N], and the first column that has it (NONE - 1 for NaN)."""
    largest = tl.max(values, 1)
    first = tl.min(tl.where(values == largest[:, None], column[None, :], NONE), 1)
    return largest, tl.minimum(first, NONE - 1)


@jit()
def _in_best_groups(choice, expert, E: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr):
    """Return choice [ROWS, E] with -inf for experts outside of the groups whose two largest have the largest sums."""
    group = expert // (E // GROUPS)
    sums = tl.full(choice.shape, float("-inf"), tl.float32)  # of an expert's group, in each of its columns
    for g in tl.static_range(GROUPS):
        of_group = tl.where((group == g)[None, :], choice, float("-inf"))
        largest, at = _first_of_largest(of_group, expert, E)
        second = tl.max(tl.where(expert[None, :] == at[:, None], float("-inf"), of_group), 1)
        sums = tl.where((group == g)[None, :], (largest + second)[:, None], sums)
    best = tl.zeros(choice.shape, tl.int1)
    for _ in tl.static_range(TOPK_GROUP):
        _, at = _first_of_largest(tl.where(best, float("-inf"), sums), expert, E)
        best = best | (group[None, :] == (at // (E // GROUPS))[:, None])
    return tl.where(best, choice, float("-inf"))


@jit()
def _choose_rows(
    partials, bias, correction, lengths, scores, experts, ranks, counts, order, groups, row, num_rows, num_groups,
    scaling, epsilon, dtype: tl.constexpr, KIND: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, EXACT_LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr, SPLITS: tl.constexpr,
    ORDER: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Write scores and experts of rows [ROWS], whose logits lie in parts [SPLITS, num_rows, E].

    Also `Routes.order` and `Routes.groups` if these rows are all: ORDER "pairs": each pair is a group; "rows": by
    expert. Else the rank of each pair among these rows' pairs with its expert, and how many of them each expert has.
    """
    expert = tl.arange(0, E_PAD)
    is_expert = (expert < E)[None, :]
    inside = (row < num_rows)[:, None] & is_expert
    at = row.to(tl.int64)[:, None] * E + expert[None, :]
    logits = tl.zeros(at.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        logits += tl.load(partials + split * num_rows.to(tl.int64) * E + at, mask=inside, other=0.0)
    if HAS_BIAS:
        logits += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)[None, :]
    if not EXACT_LOGITS:
        logits = logits.to(dtype).to(tl.float32)
    logits = tl.where(is_expert, logits, float("-inf"))
    values = logits
    if KIND == "softmax":
        values = _softmax(logits, INTERPRETED)
    if KIND == "sigmoid":
        values = tl.div_rn(tl.zeros_like(logits) + 1.0, 1.0 + _exp(-logits, INTERPRETED))
    choice = values
    if HAS_CORRECTION:
        choice += tl.load(correction + expert, mask=expert < E, other=0.0).to(tl.float32)[None, :]
    if GROUPS > 1:
        choice = _in_best_groups(tl.where(is_expert, choice, float("-inf")), expert, E, GROUPS, TOPK_GROUP)

    # Integers in the order of the numbers, and of equal ones the lower expert first: no two of a row are equal.
    bits = tl.where(choice == 0.0, 0.0, choice).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    lowest = tl.full(choice.shape, -(2**62), tl.int64)
    key = tl.where(is_expert, bits.to(tl.int64) * E_PAD + (E_PAD - 1 - expert)[None, :], lowest)
    place = tl.full(choice.shape, -1, tl.int32)  # of an expert among the chosen ones
    for j in tl.static_range(K):
        is_best = key == tl.max(key, 1)[:, None]
        place = tl.where(is_best, j, place)
        key = tl.where(is_best, lowest, key)
    is_chosen = place >= 0
    if KIND == "topk_softmax":
        values = _softmax(tl.where(is_chosen, values, float("-inf")), INTERPRETED)
    if NORM:
        total = tl.sum(tl.where(is_chosen, values, 0.0), 1) + epsilon
        values = tl.div_rn(values, total[:, None] + tl.zeros_like(values))
    if KIND == "sigmoid":
        values *= scaling
    is_real = row < num_rows
    if HAS_LENGTHS:
        is_real = tl.load(lengths + row, mask=row < num_rows, other=0) > 0
    pair = row[:, None] * K + place
    written = is_chosen & inside
    number = tl.where(is_real[:, None], expert[None, :], -1)
    tl.store(scores + pair, values.to(scores.dtype.element_ty), mask=written)
    tl.store(experts + pair, number, mask=written)
    if ORDER == "pairs":
        tl.store(order + pair, pair, mask=written)
        tl.store(groups + pair * 3, number, mask=written)
        tl.store(groups + pair * 3 + 1, pair, mask=written)
        tl.store(groups + pair * 3 + 2, 1, mask=written)
    else:
        counted = (is_chosen & is_real[:, None]).to(tl.int32)
        rank = tl.cumsum(counted, 0) - counted
        if ORDER == "rows":
            begin = _write_groups(groups, tl.sum(counted, 0), num_groups, E_PAD)
            tl.store(order + begin[None, :] + rank, pair, mask=counted > 0)
        else:
            tl.store(ranks + pair, rank, mask=written)
            tl.store(counts + expert, tl.sum(counted, 0))


@jit()
def _write_groups(groups, total, num_groups, E_PAD: tl.constexpr):
    """Write `Routes.groups` of the numbers of rows of each expert [E_PAD]; returns each expert's first index."""
    expert = tl.arange(0, E_PAD)
    begin = tl.cumsum(total, 0) - total
    is_hit = (total > 0).to(tl.int32)
    nth = tl.cumsum(is_hit, 0) - is_hit
    tl.store(groups + nth * 3, expert, mask=is_hit > 0)
    tl.store(groups + nth * 3 + 1, begin, mask=is_hit > 0)
    tl.store(groups + nth * 3 + 2, total, mask=is_hit > 0)
    num_hit = tl.sum(is_hit, 0)
    tl.store(groups + expert * 3, tl.full([E_PAD], -1, tl.int32), mask=(expert >= num_hit) & (expert < num_groups))
    return begin


@jit()
def _begin_groups(counts, groups, num_chunks, num_groups, E_PAD: tl.constexpr, CHUNKS: tl.constexpr):
    """Write `Routes.groups`, and in place of each count of a chunk the first index of the chunk's pairs with an expert.
    """
    expert, chunk = tl.arange(0, E_PAD), tl.arange(0, CHUNKS)
    total = tl.zeros([E_PAD], tl.int32)
    for first in range(0, num_chunks, CHUNKS):
        at = counts + (first + chunk)[:, None] * E_PAD + expert[None, :]
        total += tl.sum(tl.load(at, mask=(first + chunk < num_chunks)[:, None], other=0), 0)
    begin = _write_groups(groups, total, num_groups, E_PAD)
    for first in range(0, num_chunks, CHUNKS):
        at = counts + (first + chunk)[:, None] * E_PAD + expert[None, :]
        mask = (first + chunk < num_chunks)[:, None]
        of_chunk = tl.load(at, mask=mask, other=0)
        tl.debug_barrier()  # several threads may read what one of them writes below
        tl.store(at, begin[None, :] + tl.cumsum(of_chunk, 0) - of_chunk, mask=mask)
        begin += tl.sum(of_chunk, 0)


@jit()
def _place_pairs(experts, ranks, counts, order, first, num_pairs, E_PAD: tl.constexpr, PER_CHUNK: tl.constexpr,
                 TILE: tl.constexpr):
    """Write `Routes.order` for TILE pairs, from what `_begin_groups` left."""
    pair = first + tl.arange(0, TILE)
    expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
    rank = tl.load(ranks + pair, mask=pair < num_pairs, other=0)
    begin = tl.load(counts + pair // PER_CHUNK * E_PAD + expert, mask=expert >= 0, other=0)
    tl.store(order + begin + rank, pair, mask=expert >= 0)


@jit(varying_ints=("num_pairs",))
def _place_pairs_kernel(experts, ranks, counts, order, num_pairs, E_PAD: tl.constexpr, PER_CHUNK: tl.constexpr,
                        TILE: tl.constexpr, PDL: tl.constexpr):
    after_previous_kernel(PDL)
    _place_pairs(experts, ranks, counts, order, tl.program_id(0) * TILE, num_pairs, E_PAD, PER_CHUNK, TILE)


@jit(varying_ints=("num_rows", "num_groups"), varying_pointers=("lengths",))
def _route_kernel(
    x, weight, bias, correction, lengths, partials, ranks, counts, scores, experts, order, groups, arrivals, num_rows,
    num_groups, x_stride, weight_stride, scaling, epsilon, WIDTH: tl.constexpr, KIND: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, EXACT_LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, HAS_LENGTHS: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr,
    SPLITS: tl.constexpr, K_PER_SPLIT: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr, CHUNKS: tl.constexpr,
    ORDER: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """A program has the logits of BLOCK_E experts and ROWS rows over a part of the columns.

    The last to arrive of those that share rows, a chunk, chooses the experts of the first CHOICES of them. With ORDER
    "chunks" or "launches" the last of these orders the pairs of all, and with "launches" `_place_pairs_kernel` ends it.
    """
    first_expert, split, chunk = tl.program_id(0) * BLOCK_E, tl.program_id(1), tl.program_id(2)
    begin = split * K_PER_SPLIT
    first_row = weight + first_expert.to(tl.int64) * weight_stride
    if PREFETCH:
        size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        width = tl.minimum(WIDTH - begin, K_PER_SPLIT)
        prefetch_rows(first_row + begin, tl.minimum(E - first_expert, BLOCK_E), width * size, weight_stride * size)
    after_previous_kernel(PDL)
    n, k, row = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K), chunk * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros([BLOCK_E, ROWS], tl.float32)
    for start in range(begin, tl.minimum(begin + K_PER_SPLIT, WIDTH), BLOCK_K):
        inside = start + k < WIDTH
        w = tl.load(first_row + n[:, None] * weight_stride + (start + k)[None, :],
                    mask=(first_expert + n < E)[:, None] & inside[None, :], other=0.0)
        rows = tl.load(x + row.to(tl.int64)[None, :] * x_stride + (start + k)[:, None],
                       mask=(row < num_rows)[None, :] & inside[:, None], other=0.0)
        if EXACT_LOGITS:
            w, rows = w.to(tl.float32), rows.to(tl.float32)
        acc = tl.dot(w, rows, acc, input_precision="ieee")
    at = (split * num_rows.to(tl.int64) + row)[None, :] * E + (first_expert + n)[:, None]
    tl.store(partials + at, acc, mask=(row < num_rows)[None, :] & (first_expert + n < E)[:, None])
    # All threads' parts are written before the arrival is counted: the program that counts the last one sees them.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + 1 + chunk, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(arrivals + 1 + chunk, 0)
        _choose_rows(partials, bias, correction, lengths, scores, experts, ranks, counts + chunk * E_PAD, order, groups,
                     chunk * ROWS + tl.arange(0, CHOICES), num_rows, num_groups, scaling, epsilon, x.dtype.element_ty,
                     KIND, E, E_PAD, K, NORM, EXACT_LOGITS, HAS_BIAS, HAS_CORRECTION, HAS_LENGTHS, GROUPS, TOPK_GROUP,
                     SPLITS, ORDER, INTERPRETED)
        if ORDER == "chunks" or ORDER == "launches":
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
            if arrived == tl.num_programs(2) - 1:
                tl.store(arrivals, 0)
                _begin_groups(counts, groups, tl.num_programs(2), num_groups, E_PAD, CHUNKS)
                if ORDER == "chunks":
                    tl.debug_barrier()
                    for first in range(0, num_rows * K, TILE):
                        _place_pairs(experts, ranks, counts, order, first, num_rows * K, E_PAD, K * ROWS, TILE)


def route_triton(x: torch.Tensor, router: RouterWeights, rule: RouterRule, arrivals: torch.Tensor,
                 lengths: torch.Tensor | None = None) -> Routes:
    """:func:`route` as one Triton launch, or as two with more than `_SPREAD_ROWS` rows."""
    require_triton()
    (num_rows, width), num_experts, device = x.shape, len(router.weight), x.device
    pairs, padded = num_rows * rule.top_k, max(16, next_power_of_2(num_experts))
    rows = 16 if num_rows <= _FEW_ROWS else max(16, min(32, _MOST_CHOICES // padded))
    order = "pairs" if num_rows <= UNORDERED_ROWS else ORDER_OF_FEW if num_rows <= rows else "chunks"
    if num_rows > _SPREAD_ROWS:
        order = "launches"
    dtype = torch.float32 if rule.keeps_float32 or rule.kind == SIGMOID else x.dtype
    groups = pairs if order == "pairs" else min(num_experts, pairs)
    found = Routes(torch.empty(num_rows, rule.top_k, dtype=dtype, device=device),
                   torch.empty(num_rows, rule.top_k, dtype=torch.int32, device=device),
                   torch.empty(pairs, dtype=torch.int32, device=device),
                   torch.empty(groups, 3, dtype=torch.int32, device=device))
    if num_rows == 0:
        return found
    choices = next((few for few in _FEW_CHOICES if num_rows <= few), rows)
    chunks = cdiv(num_rows, rows)
    block_k = min(128, max(16, next_power_of_2(width)))
    # With few rows some 64 programs a chunk of rows, which read the weight together.
    block_e = min(64, padded) if order == "launches" else 16
    splits = 1 if order == "launches" else max(1, min(cdiv(width, block_k), 8 if rows == 16 else 4))
    per_split = cdiv(cdiv(width, splits), block_k) * block_k
    splits = cdiv(width, per_split)
    partials = torch.empty(splits, num_rows, num_experts, dtype=torch.float32, device=device)
    ranks, counts = (torch.empty(size, dtype=torch.int32, device=device) for size in (pairs, chunks * padded))
    # Sizes of tiles are those of many numbers of rows, each of which would be another kernel.
    most_chunks = 4 if num_rows <= _FEW_ROWS else 8 if order == "chunks" else 64
    tile = 512 if num_rows <= _FEW_ROWS else 1024
    with on_device_of(x):
        _route_kernel[(cdiv(num_experts, block_e), splits, chunks)](
            x, router.weight, router.bias, router.correction, lengths, partials, ranks, counts, *found, arrivals,
            num_rows, groups, x.stride(0), router.weight.stride(0), rule.scaling, rule.epsilon, WIDTH=width,
            KIND=rule.kind, E=num_experts, E_PAD=padded, K=rule.top_k, NORM=rule.norm, EXACT_LOGITS=rule.exact_logits,
            HAS_BIAS=router.bias is not None, HAS_CORRECTION=router.correction is not None,
            HAS_LENGTHS=lengths is not None, GROUPS=rule.num_groups, TOPK_GROUP=rule.topk_group, SPLITS=splits,
            K_PER_SPLIT=per_split, ROWS=rows, CHOICES=choices,
            CHUNKS=min(most_chunks, max(1, _MOST_CHOICES // padded)), ORDER=order, TILE=tile,
            BLOCK_E=block_e, BLOCK_K=block_k, INTERPRETED=triton.knobs.runtime.interpret,
            num_warps=4 if rows * padded <= 2048 else 8, num_stages=3, enable_fp_fusion=False,
            **prefetch_options(router.weight),
        )
        if order == "launches":
            _place_pairs_kernel[(cdiv(pairs, tile),)](
                found.experts, ranks, counts, found.order, pairs, E_PAD=padded, PER_CHUNK=rule.top_k * rows, TILE=tile,
                **pdl_options(x))
    return found
