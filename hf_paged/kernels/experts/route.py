# mypy: disallow-untyped-defs=False
"""The experts of each row, their scores, and the order in which the products of experts take the rows: one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.kernels._checks import Expected, check_tensors, checked
from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    prefetch_options,
    prefetch_rows,
    require_triton,
    tl,
    triton,
)

MAX_ROWS = 256
MAX_EXPERTS = 512
_FEW_ROWS = 64  # up to which a program chooses experts for 16 rows, beyond for 32
_MOST_CHOICES = 8192  # of rows and experts that a program holds

# By name of a router: (how experts are scored, whether the best are taken of the scores or of the logits).
SOFTMAX, TOPK_SOFTMAX, SIGMOID = "softmax", "topk_softmax", "sigmoid"


class RouterRule(NamedTuple):
    """Numbers of a router. ``kind`` says how logits become scores:

    * "softmax": of all logits in float32, then the `top_k` largest; ``norm`` divides them by their sum.
    * "topk_softmax": of the `top_k` largest logits alone, in the logits' dtype.
    * "sigmoid": in float32, of logits in float32. The `top_k` largest are taken of scores plus a correction for each
      expert, within the `topk_group` of `num_groups` groups whose two largest have the largest sums; ``norm`` divides
      the scores by their sum plus 1e-20, and ``scaling`` multiplies them.

    ``keeps_float32``: scores stay float32; else they are rounded to the dtype of the hidden states.
    """

    kind: str
    top_k: int
    norm: bool = False
    keeps_float32: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    topk_group: int = 1


class Routes(NamedTuple):
    """The experts of T rows, k each.

    Attributes:
        scores: [T, k], float32 or the hidden states' dtype, the largest first.
        experts: [T, k] int32; -1 for padding rows, which have none.
        order: [T * k] int32, pairs (row * k + place of the expert) by expert, and by row within one.
        groups: [G, 3] int32 for each expert that has rows: its number, its first index in `order`, and how many rows
            it has. G is the most that there can be; -1: no expert.
    """

    scores: torch.Tensor
    experts: torch.Tensor
    order: torch.Tensor
    groups: torch.Tensor


class RouterWeights(NamedTuple):
    """Weights of a router: ``weight`` [E, H], ``bias`` [E] of logits or None, ``correction`` [E] float32 or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None


def _check(x: torch.Tensor, router: RouterWeights, rule: RouterRule, arrivals: torch.Tensor,
           lengths: torch.Tensor | None = None) -> None:
    (num_rows, _), experts = x.shape, len(router.weight)
    if rule.kind not in (SOFTMAX, TOPK_SOFTMAX, SIGMOID):
        raise ValueError(f"kind={rule.kind!r}: expected 'softmax', 'topk_softmax' or 'sigmoid'")
    if num_rows > MAX_ROWS or experts > MAX_EXPERTS or not 0 < rule.top_k <= experts:
        raise ValueError(f"{num_rows} rows, {experts} experts, the best {rule.top_k}: expected at most {MAX_ROWS} rows "
                         f"and {MAX_EXPERTS} experts")
    if experts % rule.num_groups or not 0 < rule.topk_group <= rule.num_groups:
        raise ValueError(f"{experts} experts in {rule.num_groups} groups, of which {rule.topk_group} are taken")
    check_tensors(
        Expected("x", x, (None, None), None), Expected("weight", router.weight, (None, x.shape[1]), x.dtype),
        Expected("arrivals", arrivals, (None,), torch.int32, contiguous=True),
        *(Expected("bias", one, (experts,), x.dtype) for one in (router.bias,) if one is not None),
        *(Expected("correction", one, (experts,), torch.float32) for one in (router.correction,) if one is not None),
        *(Expected("lengths", one, (num_rows,), torch.int32) for one in (lengths,) if one is not None),
    )


def route_unchecked(x: torch.Tensor, router: RouterWeights, rule: RouterRule, arrivals: torch.Tensor,
                    lengths: torch.Tensor | None = None) -> Routes:
    """Choose experts for each row by a router.

    Among equal scores experts with lower numbers come first, as torch's `topk` on NVIDIA GPUs has it.

    Args:
        x: ``[T, H]``, T at most `MAX_ROWS`; rows may be strided.
        router: weights in x's dtype, but for the correction.
        rule: how the router chooses.
        arrivals: at least `num_arrivals` int32, all 0, and 0 again afterwards; launches that may overlap need others.
        lengths: ``[T]`` int32, 0 for padding rows, to which no expert is given; None: there are none.

    Raises:
        ValueError: from the checked op, for tensors or numbers that are not as above.
    """
    if x.is_cuda:
        return route_triton(x, router, rule, arrivals, lengths)
    return route_reference(x, router, rule, arrivals, lengths)


route = checked(_check, route_unchecked)


def num_arrivals() -> int:
    """Return how many counters a launch may need."""
    return 1 + MAX_ROWS // 16


def route_reference(x: torch.Tensor, router: RouterWeights, rule: RouterRule, arrivals: torch.Tensor | None = None,
                    lengths: torch.Tensor | None = None) -> Routes:
    """:func:`route` in plain torch."""
    scores, experts = _choose(x, router, rule)
    if lengths is not None:
        experts = experts.masked_fill((lengths == 0)[:, None], -1)
    return Routes(scores, experts.int(), *ordered(experts, len(router.weight)))


def _choose(x: torch.Tensor, router: RouterWeights, rule: RouterRule) -> tuple[torch.Tensor, torch.Tensor]:
    if rule.kind == SIGMOID:
        scores = F.linear(x.float(), router.weight.float()).sigmoid()
        choice = scores if router.correction is None else scores + router.correction
        if rule.num_groups > 1:
            groups = choice.unflatten(1, (rule.num_groups, -1))
            best = _top(groups.topk(2, dim=-1)[0].sum(-1), rule.topk_group)[1]
            taken = torch.zeros_like(groups[..., 0]).scatter_(1, best, 1).bool()
            choice = groups.masked_fill(~taken[..., None], float("-inf")).flatten(1)
        experts = _top(choice, rule.top_k)[1]
        top = scores.gather(1, experts)
        if rule.norm:
            top = top / (top.sum(-1, keepdim=True) + 1e-20)
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


def ordered(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `Routes.order` and `Routes.groups` of experts [T, k]; entries of `order` without an expert are 0."""
    flat = experts.flatten().long()
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
    partials, bias, correction, lengths, scores, experts, ranks, counts, row, num_rows, scaling, dtype: tl.constexpr,
    KIND: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, HAS_LENGTHS: tl.constexpr, GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr, SPLITS: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Write scores and experts of rows [ROWS], whose logits lie in parts [SPLITS, num_rows, E].

    Also the rank of each pair among these rows' pairs with its expert, and how many of them each expert has.
    """
    expert, place = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    inside = (row < num_rows)[:, None] & (expert < E)[None, :]
    at = row.to(tl.int64)[:, None] * E + expert[None, :]
    logits = tl.zeros(at.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        logits += tl.load(partials + split * num_rows.to(tl.int64) * E + at, mask=inside, other=0.0)
    if HAS_BIAS:
        logits += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)[None, :]
    if KIND != "sigmoid":
        logits = logits.to(dtype).to(tl.float32)
    logits = tl.where((expert < E)[None, :], logits, float("-inf"))
    values = logits
    if KIND == "softmax":
        values = tl.where((expert < E)[None, :], _softmax(logits, INTERPRETED), -1.0)
    if KIND == "sigmoid":
        values = tl.div_rn(tl.zeros_like(logits) + 1.0, 1.0 + _exp(-logits, INTERPRETED))
    choice = values
    if HAS_CORRECTION:
        choice += tl.load(correction + expert, mask=expert < E, other=0.0)[None, :]
    if KIND == "sigmoid":
        choice = tl.where((expert < E)[None, :], choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_best_groups(choice, expert, E, GROUPS, TOPK_GROUP)

    top = tl.zeros([row.shape[0], K_PAD], tl.float32)
    chosen = tl.zeros([row.shape[0], K_PAD], tl.int32)
    is_chosen = tl.zeros(choice.shape, tl.int32)
    for j in tl.static_range(K):
        _, first = _first_of_largest(choice, expert, E)
        is_first = expert[None, :] == first[:, None]
        value = tl.sum(tl.where(is_first, values, 0.0), 1)
        top = tl.where((place == j)[None, :], value[:, None], top)
        chosen = tl.where((place == j)[None, :], first[:, None], chosen)
        choice = tl.where(is_first, float("-inf"), choice)
        is_chosen = tl.where(is_first, 1, is_chosen)
    if KIND == "topk_softmax":
        top = _softmax(tl.where((place < K)[None, :], top, float("-inf")), INTERPRETED)
    if NORM:
        total = tl.sum(top, 1)
        if KIND == "sigmoid":
            total += 1e-20
        top = tl.div_rn(top, total[:, None] + tl.zeros_like(top))
    if KIND == "sigmoid":
        top *= scaling
    is_real = row < num_rows
    if HAS_LENGTHS:
        is_real = tl.load(lengths + row, mask=row < num_rows, other=0) > 0
        chosen = tl.where(is_real[:, None], chosen, -1)
    is_chosen = tl.where(is_real[:, None], is_chosen, 0)
    rank = tl.cumsum(is_chosen, 0) - is_chosen
    ranked = tl.zeros_like(chosen)
    for j in tl.static_range(K):
        of_place = tl.sum(tl.where((place == j)[None, :], chosen, 0), 1)
        of_pair = tl.sum(tl.where(expert[None, :] == of_place[:, None], rank, 0), 1)
        ranked = tl.where((place == j)[None, :], of_pair[:, None], ranked)
    to = row[:, None] * K + place[None, :]
    mask = (row < num_rows)[:, None] & (place < K)[None, :]
    tl.store(scores + to, top.to(scores.dtype.element_ty), mask=mask)
    tl.store(experts + to, chosen, mask=mask)
    tl.store(ranks + to, ranked, mask=mask)
    tl.store(counts + expert, tl.sum(is_chosen, 0))


@jit()
def _order_pairs(experts, ranks, counts, order, groups, num_rows, num_chunks, num_groups, E_PAD: tl.constexpr,
                 K: tl.constexpr, ROWS: tl.constexpr, CHUNKS_PAD: tl.constexpr, TILE: tl.constexpr):
    """Write `Routes.order` and `Routes.groups`, from what `_choose_rows` left of each chunk of rows."""
    expert, chunk = tl.arange(0, E_PAD), tl.arange(0, CHUNKS_PAD)
    at = counts + chunk[:, None] * E_PAD + expert[None, :]
    of_chunk = tl.load(at, mask=(chunk < num_chunks)[:, None], other=0)
    tl.debug_barrier()  # several threads may read what one of them writes below
    total = tl.sum(of_chunk, 0)
    begin = tl.cumsum(total, 0) - total
    # In place of its count: the first index of a chunk's pairs with an expert.
    tl.store(at, begin[None, :] + tl.cumsum(of_chunk, 0) - of_chunk, mask=(chunk < num_chunks)[:, None])
    is_hit = (total > 0).to(tl.int32)
    nth = tl.cumsum(is_hit, 0) - is_hit
    tl.store(groups + nth * 3, expert, mask=is_hit > 0)
    tl.store(groups + nth * 3 + 1, begin, mask=is_hit > 0)
    tl.store(groups + nth * 3 + 2, total, mask=is_hit > 0)
    num_hit = tl.sum(is_hit, 0)
    tl.store(groups + expert * 3, tl.full([E_PAD], -1, tl.int32), mask=(expert >= num_hit) & (expert < num_groups))
    tl.debug_barrier()
    for start in range(0, num_rows * K, TILE):
        pair = start + tl.arange(0, TILE)
        of_pair = tl.load(experts + pair, mask=pair < num_rows * K, other=-1)
        rank = tl.load(ranks + pair, mask=pair < num_rows * K, other=0)
        first = tl.load(counts + pair // (K * ROWS) * E_PAD + of_pair, mask=of_pair >= 0, other=0)
        tl.store(order + first + rank, pair, mask=of_pair >= 0)


@jit(varying_ints=("num_rows", "num_groups"), varying_pointers=("lengths",))
def _route_kernel(
    x, weight, bias, correction, lengths, partials, ranks, counts, scores, experts, order, groups, arrivals, num_rows,
    num_groups, x_stride, weight_stride, scaling, WIDTH: tl.constexpr, KIND: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, HAS_LENGTHS: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr,
    SPLITS: tl.constexpr, K_PER_SPLIT: tl.constexpr, ROWS: tl.constexpr, CHUNKS_PAD: tl.constexpr, TILE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """A program has the logits of BLOCK_E experts and ROWS rows over a part of the columns.

    The last to arrive of those that share rows chooses these rows' experts, and the last of these orders all pairs.
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
        if KIND == "sigmoid":
            w, rows = w.to(tl.float32), rows.to(tl.float32)
        acc = tl.dot(w, rows, acc, input_precision="ieee")
    at = (split * num_rows + row).to(tl.int64)[None, :] * E + (first_expert + n)[:, None]
    tl.store(partials + at, acc, mask=(row < num_rows)[None, :] & (first_expert + n < E)[:, None])
    # All threads' parts are written before the arrival is counted: the program that counts the last one sees them.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + 1 + chunk, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(arrivals + 1 + chunk, 0)
        _choose_rows(partials, bias, correction, lengths, scores, experts, ranks, counts + chunk * E_PAD, row, num_rows,
                     scaling, x.dtype.element_ty, KIND, E, E_PAD, K, K_PAD, NORM, HAS_BIAS, HAS_CORRECTION,
                     HAS_LENGTHS, GROUPS, TOPK_GROUP, SPLITS, INTERPRETED)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
        if arrived == tl.num_programs(2) - 1:
            tl.store(arrivals, 0)
            _order_pairs(experts, ranks, counts, order, groups, num_rows, tl.num_programs(2), num_groups, E_PAD, K,
                         ROWS, CHUNKS_PAD, TILE)


def route_triton(x: torch.Tensor, router: RouterWeights, rule: RouterRule, arrivals: torch.Tensor,
                 lengths: torch.Tensor | None = None) -> Routes:
    """:func:`route` as one Triton launch."""
    require_triton()
    (num_rows, width), num_experts, device = x.shape, len(router.weight), x.device
    pairs = num_rows * rule.top_k
    dtype = torch.float32 if rule.keeps_float32 or rule.kind == SIGMOID else x.dtype
    groups = min(num_experts, pairs)
    found = Routes(torch.empty(num_rows, rule.top_k, dtype=dtype, device=device),
                   torch.empty(num_rows, rule.top_k, dtype=torch.int32, device=device),
                   torch.empty(pairs, dtype=torch.int32, device=device),
                   torch.empty(groups, 3, dtype=torch.int32, device=device))
    if num_rows == 0:
        return found
    padded = max(16, next_power_of_2(num_experts))
    rows = 16 if num_rows <= _FEW_ROWS else max(16, min(32, _MOST_CHOICES // padded))
    chunks = cdiv(num_rows, rows)
    block_k = min(128, max(16, next_power_of_2(width)))
    # Some 64 programs a chunk of rows, which read the weight together.
    splits = max(1, min(cdiv(width, block_k), 8 if rows == 16 else 4))
    per_split = cdiv(cdiv(width, splits), block_k) * block_k
    splits = cdiv(width, per_split)
    partials = torch.empty(splits, num_rows, num_experts, dtype=torch.float32, device=device)
    ranks, counts = (torch.empty(size, dtype=torch.int32, device=device) for size in (pairs, chunks * padded))
    with on_device_of(x):
        _route_kernel[(cdiv(num_experts, 16), splits, chunks)](
            x, router.weight, router.bias, router.correction, lengths, partials, ranks, counts, *found, arrivals,
            num_rows, groups, x.stride(0), router.weight.stride(0), rule.scaling, WIDTH=width, KIND=rule.kind,
            E=num_experts, E_PAD=padded, K=rule.top_k, K_PAD=max(2, next_power_of_2(rule.top_k)), NORM=rule.norm,
            HAS_BIAS=router.bias is not None, HAS_CORRECTION=router.correction is not None,
            HAS_LENGTHS=lengths is not None, GROUPS=rule.num_groups, TOPK_GROUP=rule.topk_group, SPLITS=splits,
            K_PER_SPLIT=per_split, ROWS=rows, CHUNKS_PAD=next_power_of_2(chunks),
            TILE=min(1024, next_power_of_2(pairs)), BLOCK_E=16, BLOCK_K=block_k,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=4 if rows * padded <= 2048 else 8,
            num_stages=3, enable_fp_fusion=False, **prefetch_options(router.weight),
        )
    return found
