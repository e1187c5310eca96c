"""Attention of one step's new tokens over the paged KV cache: backends by name, and the reference in torch."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from hf_paged.kernels.attention import flash_backend
from hf_paged.kernels.attention.decode import paged_attention_decode
from hf_paged.kernels.attention.metadata import PagedMetadata
from hf_paged.kernels.attention.prefill import paged_attention_prefill

# Rows are gathered in groups whose padded K stays inside the CPU's cache; one gather of all rows measured 2.8x slower.
_GROUP_ELEMENTS = 1 << 20
# Whatever somebody puts in its place in torch.nn.functional.
_ATTENTION = torch._C._nn.scaled_dot_product_attention


class AttentionBackend(Protocol):
    """What a backend is called with; arguments as in :func:`paged_attention`, already checked.

    A call with attention sinks also has ``sinks=``; a backend that has no such argument raises a TypeError there.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: PagedMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor: ...


_BACKENDS: dict[str, AttentionBackend] = {}


def register_backend(name: str, backend: AttentionBackend) -> None:
    """Make ``backend`` selectable as ``name``; a later registration under the same name replaces the earlier."""
    if name == "auto":
        raise ValueError("'auto' is not a backend: it picks one by device")
    _BACKENDS[name] = backend


def attention_backends() -> tuple[str, ...]:
    """Names accepted as ``backend`` besides ``"auto"``."""
    return tuple(sorted(_BACKENDS))


def resolve_backend(backend: str, device: torch.device) -> str:
    """The backend that ``backend`` stands for on ``device``.

    ``"auto"`` is torch off CUDA. On CUDA it is flash_attn where a FlashAttention package is installed that has been
    measured to be faster on such a GPU (`flash_backend.MEASURED_FASTER`), else triton.

    Raises:
        ValueError: an unknown name; the message lists the accepted ones.
    """
    if backend == "auto":
        if device.type != "cuda":
            return "torch"
        return "flash_attn" if flash_backend.is_preferred(device) else "triton"
    if backend not in _BACKENDS:
        accepted = ", ".join(("auto", *attention_backends()))
        raise ValueError(f"attention backend {backend!r} is unknown; accepted: {accepted}")
    return backend


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the packed new tokens over their rows' cached and new tokens (already stored in the cache).

    New token i of row r sits at position ``p = seq_lens[r] - n_r + i`` and sees positions ``0..p``, or with a sliding
    window ``max(0, p - sliding_window + 1)..p``, as in transformers. Positions that none of a row's tokens sees are
    never read, whatever they hold. A row with ``seq_lens[r] == 0`` (padding of a CUDA graph) gives zeros.

    Args:
        q: ``[T, Hq, D]``; query head h reads KV head ``h // (Hq // Hkv)``; the last dim is contiguous.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]``, contiguous, q's dtype.
        meta: the step's layout, on q's device.
        scale: factor of the scores before softcap and softmax.
        sliding_window: number of visible tokens, the token itself included; None: all.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: unchanged.
        sinks: ``[Hq]`` contiguous, floats: per query head one more score, neither scaled nor capped, that takes part in
            the softmax and has no value (gpt-oss); None: none.
        backend: ``"auto"`` or one of :func:`attention_backends`.
        out: ``[T, Hq, D]`` contiguous, q's dtype, to be filled and returned; None: a new tensor.

    Returns:
        ``[T, Hq, D]``, q's dtype, contiguous.

    Raises:
        ValueError: an unknown backend, or shapes, dtypes or numbers that are not as above.
    """
    name = resolve_backend(backend, q.device)
    run = _BACKENDS[name]
    if backend == "auto" and run is paged_attention_flash:
        run = partial(paged_attention_flash, measured_only=True)
    _check(q, k_cache, v_cache, sliding_window, softcap, sinks)
    options: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap, "out": out}
    result = run(q, k_cache, v_cache, meta, **(options if sinks is None else {**options, "sinks": sinks}))
    # A backend may not be able to write where it is told to.
    return result if out is None or result is out else out.copy_(result)


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sliding_window: int | None,
           softcap: float | None, sinks: torch.Tensor | None) -> None:  # fmt: skip
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            "q must be [T, Hq, D] and the caches [num_blocks, block_size, Hkv, D], got "
            f"{tuple(q.shape)}, {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        )
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k_cache.shape[2]} KV heads")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(f"q and caches must share a dtype, got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    if q.stride(2) != 1 or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the last dim of q, and k_cache and v_cache as a whole, must be contiguous")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 or None, got {sliding_window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    if sinks is not None and not (sinks.shape == q.shape[1:2] and sinks.is_floating_point() and sinks.is_contiguous()):
        found = f"{sinks.dtype} {tuple(sinks.shape)}"
        raise ValueError(f"sinks must be [{q.shape[1]}] contiguous floats or None, got {found}")


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`paged_attention` in torch: visible positions are gathered, then ``scaled_dot_product_attention``.

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
    window = longest if sliding_window is None else sliding_window

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
        per_head = None if sinks is None else sinks.view(k.shape[1], -1, 1)
        attended = _attend(grouped, k, v, mask, False, scale, softcap, per_head)
        out.index_copy_(0, at, attended.reshape(len(r), *q.shape[1:]))

    for row in np.flatnonzero((counts > 1) & (lengths > 0)).tolist():
        n, length = int(counts[row]), int(lengths[row])
        begin = max(0, length - n - window + 1)
        k, v = rows.gather(np.array([row]), np.array([begin]), np.array([length - begin]))
        causal = length == n and window >= n
        mask = None if causal else _causal_mask(n, length, begin, window, q.device)
        new = slice(int(starts[row]), int(starts[row + 1]))
        per_head = None if sinks is None else sinks.view(-1, 1, 1)
        attended = _attend(q[new].transpose(0, 1)[None], k, v, mask, causal, scale, softcap, per_head)
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


def paged_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`paged_attention` in Triton: the split-KV kernel where every row has one new token, else the tiled one.

    Raises:
        ValueError: a dtype other than fp16, bf16 and fp32, or a head_dim above 256.
        RuntimeError: triton is not installed.
    """
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or q.shape[2] > 256:
        raise ValueError(
            f"the triton backend takes fp16, bf16 or fp32 and head_dim up to 256, got {q.dtype} and {q.shape[2]}"
        )
    run = paged_attention_decode if meta.max_query_len == 1 else paged_attention_prefill
    return run(q, k_cache, v_cache, meta, scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks,
               out=out)  # fmt: skip


def paged_attention_flash(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    measured_only: bool = False,
) -> torch.Tensor:
    """:func:`paged_attention` by an installed FlashAttention package for steps with a row of several new tokens.

    Rows of one new token always take the Triton kernel, which reads faster than FlashAttention-3 (docs/performance.md)
    and needs no page table a row. What no installed package carries (fp32, sinks, a head size, a block size: see
    `flash_backend`) goes to Triton as well, call by call; with ``measured_only`` so does every package that was not
    measured to be faster.
    """
    options: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap}
    if meta.max_query_len > 1 and sinks is None:
        result = flash_backend.flash_prefill(q, k_cache, v_cache, meta, **options, measured_only=measured_only)
        if result is not None:
            return result
    return paged_attention_triton(q, k_cache, v_cache, meta, **options, sinks=sinks, out=out)


register_backend("torch", paged_attention_reference)
register_backend("triton", paged_attention_triton)
register_backend("flash_attn", paged_attention_flash)
