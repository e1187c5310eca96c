"""Paged attention in torch: the reference that the kernels are compared with, and what a CPU runs."""

from __future__ import annotations

import torch

from hf_paged.kernels.attention.host_rows import GroupedRows, SingleRow
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata, positively_scaled

# From torch._C, so that a patched torch.nn.functional does not change the reference.
_ATTENTION = torch._C._nn.scaled_dot_product_attention


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    options: AttentionOptions,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Paged attention in torch: visible positions are read, then ``scaled_dot_product_attention``.

    Rows with one new token go together in groups of similar length, longer ones row by row. Reads the metadata on the
    host unless `HostRows` has, so on CUDA it waits for the device.
    """
    q, options = positively_scaled(q, options)
    rows = meta.host_rows
    if rows is None:
        rows = meta.read_on_host(k_cache.shape[1], k_cache.shape[2] * k_cache.shape[3])
    grouped, single = rows.reads(options.window)
    if out is None and len(single) == 1 and single[0].last - single[0].first == len(q):
        return _of_row(q, k_cache, v_cache, single[0], options)
    out = q.new_zeros(q.shape) if out is None else out.zero_()
    for group in grouped:
        out.index_copy_(0, group.tokens, _of_group(q, k_cache, v_cache, group, options))
    for row in single:
        out[row.first : row.last] = _of_row(q[row.first : row.last], k_cache, v_cache, row, options)
    return out


def _of_row(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, row: SingleRow,
            options: AttentionOptions) -> torch.Tensor:
    """q ``[n, Hq, D]`` of one row -> the same shape, contiguous."""
    k, v, sinks = row.pages.read(k_cache), row.pages.read(v_cache), options.sinks
    if len(q) == 1:
        # The query heads of one KV head become its query positions: no copy of K and V per head, larger products.
        grouped = q.reshape(len(k), 1, -1, q.shape[2])
        sinks = None if sinks is None else sinks.view(len(k), 1, -1, 1)
        return _attend(grouped, k, v, None, False, options, sinks).reshape(q.shape)
    sinks = None if sinks is None else sinks.view(-1, 1, 1)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    attended = _attend(q.transpose(0, 1)[None], k, v, row.mask, row.causal, options, sinks)
    return attended[0].transpose(0, 1).contiguous()


def _of_group(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, group: GroupedRows,
              options: AttentionOptions) -> torch.Tensor:
    """q ``[T, Hq, D]`` of the whole step -> ``[n, Hq, D]`` of the group's tokens."""
    k, v = group.read(k_cache), group.read(v_cache)
    grouped = q.index_select(0, group.tokens).reshape(len(k), k.shape[1], -1, q.shape[2])
    sinks = None if options.sinks is None else options.sinks.view(k.shape[1], -1, 1)
    return _attend(grouped, k, v, group.mask, False, options, sinks).reshape(-1, *q.shape[1:])


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``[n, H, M, D]`` queries over ``[n, Hkv, L, D]`` keys and values; H is a multiple of Hkv, sinks fit their scores
    but for the last dim, which is 1."""
    scale, softcap = options.scale, options.softcap
    if softcap is None and sinks is None:
        return _ATTENTION(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.matmul(weights[..., : k.shape[-2]].to(v.dtype), v)
