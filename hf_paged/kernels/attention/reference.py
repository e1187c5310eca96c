"""Paged attention in torch: the reference that the kernels are compared with, and what a CPU runs."""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.kernels.attention.metadata import AttentionOptions, PagedMetadata

# Rows are gathered in groups whose padded K stays inside the CPU's cache; one gather of all rows measured 2.8x slower.
_GROUP_ELEMENTS = 1 << 20
# Whatever somebody puts in its place in torch.nn.functional.
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
    """Paged attention in torch: visible positions are gathered, then ``scaled_dot_product_attention``.

    Rows with one new token go together in groups of similar length, longer ones row by row. Reads the metadata on the
    host, so on CUDA it waits for the device.
    """
    out = q.new_zeros(q.shape) if out is None else out.zero_()
    starts = meta.query_start.cpu().numpy()
    lengths = meta.seq_lens.cpu().numpy().astype(np.int64)
    counts = np.diff(starts)
    longest = int(lengths.max(initial=0))
    if longest == 0:
        return out
    rows = _Rows(k_cache, v_cache, meta, longest)
    window = longest if options.window is None else options.window

    single = np.flatnonzero((counts == 1) & (lengths > 0))
    spans = np.minimum(lengths[single], window)
    order = np.argsort(spans, kind="stable")
    for group in _groups(spans[order], k_cache.shape[2] * k_cache.shape[3]):
        chosen = order[group]
        r, span = single[chosen], spans[chosen]
        k, v = rows.gather(r, lengths[r] - span, span)
        visible = np.arange(span[-1]) < span[:, None] if span[0] != span[-1] else None
        mask = None if visible is None else torch.from_numpy(visible).to(q.device)[:, None, None]
        at = torch.from_numpy(starts[r].astype(np.int64)).to(q.device)
        # The query heads of one KV head become its query positions: no copy of K and V per head, larger products.
        grouped = q.index_select(0, at).reshape(len(r), k.shape[1], -1, q.shape[2])
        sinks = None if options.sinks is None else options.sinks.view(k.shape[1], -1, 1)
        attended = _attend(grouped, k, v, mask, False, options.scale, options.softcap, sinks)
        out.index_copy_(0, at, attended.reshape(len(r), *q.shape[1:]))

    for row in np.flatnonzero((counts > 1) & (lengths > 0)).tolist():
        n, length = int(counts[row]), int(lengths[row])
        begin = max(0, length - n - window + 1)
        k, v = rows.gather(np.array([row]), np.array([begin]), np.array([length - begin]))
        causal = length == n and window >= n
        mask = None if causal else _causal_mask(n, length, begin, window, q.device)
        new = slice(int(starts[row]), int(starts[row + 1]))
        sinks = None if options.sinks is None else options.sinks.view(-1, 1, 1)
        attended = _attend(q[new].transpose(0, 1)[None], k, v, mask, causal, options.scale, options.softcap, sinks)
        out[new] = attended[0].transpose(0, 1)
    return out


class _Rows:
    """The caches seen row by row: which slot holds a row's position, read once per call."""

    def __init__(self, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata, longest: int) -> None:
        self.block_size = k_cache.shape[1]
        self.flat = [cache.view(-1, cache.shape[2] * cache.shape[3]) for cache in (k_cache, v_cache)]
        self.heads = k_cache.shape[2:]
        used = -(-longest // self.block_size)
        self.tables = meta.block_table[:, :used].index_select(0, meta.slots).cpu().numpy()

    def gather(self, rows: np.ndarray, begin: np.ndarray, span: np.ndarray) -> list[torch.Tensor]:
        """K and V at positions ``begin .. begin + span - 1`` of each row, ``[n, Hkv, max(span), D]``.

        Padding repeats a row's last position: finite where the row is, so that a weight of zero really adds nothing.
        """
        position = begin[:, None] + np.minimum(np.arange(span.max()), span[:, None] - 1)
        block = self.tables[rows[:, None], position // self.block_size].astype(np.int64)
        slot = torch.from_numpy((block * self.block_size + position % self.block_size).reshape(-1))
        slot = slot.to(self.flat[0].device)
        shape = (*position.shape, *self.heads)
        return [cache.index_select(0, slot).view(shape).transpose(1, 2) for cache in self.flat]


def _groups(spans: np.ndarray, width: int) -> list[slice]:
    """Cut rows sorted by span into runs whose padded size stays under the limit (a longer row is a run alone)."""
    cuts, begin = [], 0
    for i, span in enumerate(spans.tolist()):
        if i > begin and (i + 1 - begin) * span * width > _GROUP_ELEMENTS:
            cuts.append(slice(begin, i))
            begin = i
    return [*cuts, slice(begin, len(spans))] if len(spans) else []


def _causal_mask(n: int, length: int, begin: int, window: int, device: torch.device) -> torch.Tensor:
    """``[n, length - begin]`` bool: the last n of ``length`` positions against positions from ``begin`` on."""
    query = torch.arange(length - n, length, device=device)[:, None]
    seen = torch.arange(begin, length, device=device)
    return (seen <= query) & (seen > query - window)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``[n, H, M, D]`` queries over ``[n, Hkv, L, D]`` keys and values; H is a multiple of Hkv, sinks fit [H, M, 1]."""
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
