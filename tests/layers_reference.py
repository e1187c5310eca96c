"""What the launch of all layers computes of one row, in plain torch over the pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_paged.kernels.hopper.decoder_layers_support import Decoder


class Made(NamedTuple):
    """Normed hidden state [H], and each layer's new key and value [Hkv, D]."""

    hidden: torch.Tensor
    new: list[tuple[torch.Tensor, torch.Tensor]]


def row_of_layers(decoder: Decoder, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, line: torch.Tensor,
                  length: int, dtype: torch.dtype, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Made:
    """Of the token `hidden` [H] behind `length` others, whose blocks `line` has; computed in `dtype`.

    ``rounded`` is applied where transformers hands a tensor on.
    """
    def norm(t, weight):
        return rounded(weight.to(dtype) * rounded(t * torch.rsqrt((t * t).mean(-1, keepdim=True) + decoder.eps)))

    def turned(t):
        half = t.shape[1] // 2
        other = torch.cat([-t[:, half:], t[:, :half]], 1)
        return rounded(rounded(t * cos.to(dtype)) + rounded(other * sin.to(dtype)))

    x, new = hidden.to(dtype), []
    _, block_size, kv_heads, size = decoder.layers[0][4].shape
    at = torch.arange(length, device=hidden.device)
    places = line[at // block_size].long() * block_size + at % block_size
    for qkv, o, gate_up, down, keys, values, input_norm, post_norm, q_norm, k_norm in decoder.layers:
        made = rounded(qkv.to(dtype) @ norm(x, input_norm)).view(-1, size)
        query, key, value = made.split((o.shape[1] // size, kv_heads, kv_heads))
        if q_norm is not None:
            query, key = norm(query, q_norm), norm(key, k_norm)
        query, key = turned(query), turned(key)
        new.append((key, value))
        seen = [torch.cat([pool.reshape(-1, kv_heads, size)[places].to(dtype), own[None]])
                for pool, own in ((keys, key), (values, value))]
        scores = torch.einsum("kgd,pkd->kgp", query.view(kv_heads, -1, size), seen[0]) * decoder.scale
        mixed = rounded(torch.einsum("kgp,pkd->kgd", scores.softmax(-1), seen[1]).reshape(-1))
        x = rounded(x + rounded(o.to(dtype) @ mixed))
        gate, up = rounded(gate_up.to(dtype) @ norm(x, post_norm)).chunk(2)
        inner = rounded(rounded(gate / (1 + torch.exp(-gate))) * up)
        x = rounded(x + rounded(down.to(dtype) @ inner))
    return Made(norm(x, decoder.final_norm), new)
