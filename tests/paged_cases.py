"""Random paged-attention cases with poison wherever nobody may read, and dense attention in float64 to compare with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata
from hf_paged.scheduler.prefix_tree import PrefixGroups


class Case(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    meta: PagedMetadata
    options: AttentionOptions
    rows: list[tuple[int, int]]  # (new tokens, visible tokens) of each row


def make_case(
    rows: list[tuple[int, int]],
    *,
    seed: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    value_dim: int | None = None,
    block_size: int = 16,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    groups: PrefixGroups | None = None,
) -> Case:
    """Every slot is NaN except those some new token sees; block 0 and every undefined table entry's block are NaN.

    `groups`: rows that read the same blocks.
    """
    g = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for _, length in rows]
    max_blocks = max([*blocks, 1]) + 2
    num_blocks = sum(blocks) + 3
    poison = num_blocks - 1
    free = (torch.randperm(num_blocks - 2, generator=g) + 1).tolist()
    lines = torch.randperm(len(rows) + 3, generator=g)[: len(rows)]
    table = torch.full((len(rows) + 3, max_blocks), poison, dtype=torch.int32)
    k_cache = torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    v_cache = torch.full((*k_cache.shape[:3], value_dim or head_dim), float("nan"), dtype=dtype)
    shared = {} if groups is None else {
        (int(row), j): group
        for group, (start, count, begin, end) in enumerate(zip(*groups[1:], strict=True))
        for row in groups.members[start : start + count]
        for j in range(begin // block_size, end // block_size)
    }
    taken: dict[tuple[int, int, int], int] = {}
    first = [_first_seen(length - new, window, chunk) for new, length in rows]
    for row, (_, length) in enumerate(rows):
        for j in range(first[row] // block_size, -(-length // block_size)):
            key = (shared[row, j], -1, j) if (row, j) in shared else (-1, row, j)
            if key not in taken:
                taken[key] = free.pop()
            table[lines[row], j] = taken[key]
    for (row, j), group in shared.items():  # also where the row's own window has left it behind
        table[lines[row], j] = taken.get((group, -1, j), poison)
    for row, (_, length) in enumerate(rows):
        seen = torch.arange(first[row], length)
        slot = table[lines[row], seen // block_size].long() * block_size + seen % block_size
        for cache in (k_cache, v_cache):
            cache.flatten(0, 1)[slot] = torch.randn(len(seen), *cache.shape[2:], generator=g).to(dtype)
    total = sum(new for new, _ in rows)
    # A slice of a wider tensor, as q is after a merged qkv projection: strided in its first dim.
    wide = torch.randn(total, heads + 3, head_dim, generator=g).to(dtype)
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0).int()
    meta = PagedMetadata(
        query_start=starts.to(device),
        seq_lens=torch.tensor([length for _, length in rows], dtype=torch.int32, device=device),
        block_table=table.to(device),
        slots=lines.int().to(device),
        slot_mapping=torch.full((total,), -1, device=device),
        max_query_len=max(new for new, _ in rows),
        max_seq_len=max(length for _, length in rows) + 5,
    )
    options = AttentionOptions(head_dim**-0.5 * 1.7, window, softcap, chunk=chunk)
    if sinks:  # some far below every score, some far above
        options = replace(options, sinks=(torch.randn(heads, generator=g) * 4).to(device, dtype))
    return Case(wide.to(device)[:, :heads], k_cache.to(device), v_cache.to(device), meta, options, rows)


def _first_seen(position: int, window: int | None, chunk: int | None) -> int:
    """The first position that a token at `position` sees."""
    if chunk is not None:
        return max(0, position) // chunk * chunk
    return 0 if window is None else max(0, position - window + 1)


def dense_rows(case: Case, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per row: q ``[Hq, n, D]``, K and V ``[Hq, length, D]`` (0 where unseen) and the visibility ``[n, length]``."""
    block_size = case.k_cache.shape[1]
    group = case.q.shape[1] // case.k_cache.shape[2]
    table, lines = case.meta.block_table.tolist(), case.meta.slots.tolist()
    result, begin = [], 0
    for line, (new, length) in zip(lines, case.rows, strict=True):
        q = case.q[begin : begin + new].to(dtype).transpose(0, 1)
        begin += new
        where = [table[line][p // block_size] * block_size + p % block_size for p in range(length)]
        k, v = (
            cache.flatten(0, 1)[where].to(dtype).nan_to_num(0.0).repeat_interleave(group, 1).transpose(0, 1)
            for cache in (case.k_cache, case.v_cache)
        )
        seen = torch.zeros(new, length, dtype=torch.bool)
        for i in range(new):
            position = length - new + i
            seen[i, _first_seen(position, case.options.window, case.options.chunk) : max(0, position + 1)] = True
        result.append((q, k, v, seen.to(q.device)))
    return result


def expected(case: Case) -> torch.Tensor:
    """Attention in float64, row by row, ``[T, Hq, Dv]``; rows that see nothing are zero."""
    out = []
    softcap = case.options.softcap
    for q, k, v, seen in dense_rows(case, torch.float64):
        scores = q @ k.transpose(1, 2) * case.options.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if (sinks := case.options.sinks) is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(*scores.shape[:2], 1)], -1)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[1]]
        out.append((weights @ v).transpose(0, 1))
    return torch.cat(out)


def sdpa(case: Case) -> torch.Tensor:
    """torch's own attention in the case's dtype, row by row (no softcap, no empty rows)."""
    out = []
    for q, k, v, seen in dense_rows(case, case.q.dtype):
        row = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=case.options.scale)
        out.append(row[0].transpose(0, 1))
    return torch.cat(out)


def worst_error(actual: torch.Tensor, right: torch.Tensor) -> float:
    """Largest relative error in norm over tokens and heads; rows that must be zero count absolutely."""
    assert actual.shape == right.shape
    assert bool(torch.isfinite(actual).all()), "NaN or inf reached the output"
    norm = right.norm(dim=-1)
    error = (actual.double() - right).norm(dim=-1) / torch.where(norm == 0, torch.ones_like(norm), norm)
    return float(error.max())


def run_poisoned(kernel: Callable[..., torch.Tensor], case: Case, **extra: object) -> torch.Tensor:
    """Call a Triton entry point with a NaN-filled output, so that an element it skips shows."""
    shape = (*case.q.shape[:2], case.v_cache.shape[3])
    out = torch.full(shape, float("nan"), dtype=case.q.dtype, device=case.q.device)
    assert kernel(*case[:5], out=out, **extra) is out
    return out


def random_groups(r: random.Random, lengths: list[int], block_size: int) -> PrefixGroups | None:
    """A forest over some of the rows, with groups in groups; None if it has none."""
    members, groups = [], []

    def part(rows: list[int], begin: int) -> None:
        most = (min(lengths[row] for row in rows) - 1) // block_size * block_size
        if len(rows) < 2 or most <= begin or r.random() < 0.2:
            members.extend(rows if begin else [])
            return
        end = begin + block_size * r.randint(1, (most - begin) // block_size)
        groups.append((len(members), len(rows), begin, end))
        for some in chunks(rows):
            part(some, end)

    def chunks(rows: list[int]) -> list[list[int]]:
        cuts = sorted(r.sample(range(1, len(rows)), r.randint(0, len(rows) - 1)) if len(rows) > 1 else [])
        return [rows[a:b] for a, b in itertools.pairwise([0, *cuts, len(rows)])]

    rows = list(range(len(lengths)))
    r.shuffle(rows)
    for some in chunks(rows) if r.random() < 0.5 else [rows]:
        part(some, 0)
    if not groups:
        return None
    return PrefixGroups(np.array(members, np.int32), *np.array(groups, np.int32).T)


def random_rows(r: random.Random, count: int, longest: int, longest_new: int) -> list[tuple[int, int]]:
    """Rows without a prefix, with one, and of one new token, in random order."""
    rows = []
    for _ in range(count):
        new = r.choice([1, r.randint(1, longest_new)])
        rows.append((new, new + r.choice([0, r.randint(0, longest - new)])))
    return rows
