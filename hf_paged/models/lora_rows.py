"""LoRA layers on packed tokens, each token with an adapter of its own, with PEFT's arithmetic."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.guards.adapter_hooks import RowHook, has_only_names
from hf_paged.kernels.lora.lora_order import RowOrder, order_rows
from hf_paged.models.tuners import BASE, is_lora


class AdapterRows(NamedTuple):
    """Adapters of T tokens.

    ``entries`` [T] int32: 0 the model's active adapters, -1 none, i > 0 ``names[i - 1]`` alone. ``order``: the same in
    the form that kernels read, or None.
    """

    entries: torch.Tensor
    names: tuple[str, ...]
    order: RowOrder | None = None

    def ordered(self) -> AdapterRows:
        """Return the rows with `order`, which all layers of a step use."""
        return self._replace(order=order_rows(self.entries, 1 + len(self.names)))


def apply_layer(layer: nn.Module, tokens: torch.Tensor, rows: AdapterRows | None = None) -> torch.Tensor:
    """Compute [T, k] (of an embedding: ids [T]) -> [T, n] by a layer as it stands; LoRA by `rows`, if given."""
    if rows is not None and is_lora(layer):
        base_layer: Any = layer.base_layer
        return _by_row(layer, tokens, rows, base_layer(tokens[None])[0])
    # PEFT's hooks belong to another call, whose adapters must not apply.
    run: Any = layer.forward if layer._forward_pre_hooks and is_lora(layer) and has_only_names(layer) else layer
    result: torch.Tensor = run(tokens[None])[0]
    return result


@contextmanager
def by_row(layers: list[weakref.ref], rows: AdapterRows | None) -> Iterator[None]:
    """Apply adapters by `rows` in this thread's calls of these LoRA layers, on packed tokens [1, T], in a ``with``.

    Hooks do it, since stock's modules call the layers. No hook is set if `rows` is None and no layer has PEFT's hooks.
    """
    found: list[Any] = [layer for reference in layers if (layer := reference()) is not None]
    if rows is None and not any(layer._forward_pre_hooks for layer in found):
        yield
        return
    thread = threading.get_ident()

    def before(layer: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        kwargs.pop("adapter_names", None)  # of another call
        return args, kwargs if rows is None else kwargs | {"adapter_names": [BASE]}  # for a batch of one row

    def after(layer: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() != thread or rows is None:
            return output
        return _by_row(layer, args[0][0], rows, output[0])[None]

    with ExitStack() as stack:
        for layer in found:
            stack.callback(layer.register_forward_pre_hook(RowHook(before), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(RowHook(after)).remove)
        yield


def _by_row(layer: Any, tokens: torch.Tensor, rows: AdapterRows, base: torch.Tensor) -> torch.Tensor:
    """Compute `LoraLayer._mixed_batch_forward` from the base layer's result; active adapters as in the layer's forward.

    All adapters are applied to all tokens, so that the host need not wait for the content of `rows`.
    """
    index = rows.entries[:, None]
    result = torch.where(index == 0, layer.forward(tokens[None])[0], base)
    for entry, name in enumerate(rows.names, 1):
        if (delta := _delta(layer, name, tokens)) is not None:
            result = torch.where(index == entry, base + delta.to(base.dtype), result)
    return result


def _delta(layer: Any, name: str, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return what an adapter adds to the layer's result; None if it adds nothing."""
    if name in layer.lora_A:
        down, up = layer.lora_A[name], layer.lora_B[name]
        product: torch.Tensor = up(down(tokens.to(down.weight.dtype))) * layer.scaling[name]
        return product
    if name not in layer.lora_embedding_A:
        return None
    embedded = layer._embed(tokens, layer.lora_embedding_A[name].T) @ layer.lora_embedding_B[name].T
    embedded = embedded * layer.scaling[name]
    scale = layer._get_embed_scale()
    return embedded if scale is None else embedded * scale.to(embedded.dtype)
