"""Adapters (LoRA and the like): which a forward would apply now, which rows can name, and LoRA row by row.

Duck-typed on PEFT's layers and with PEFT's arithmetic, so that PEFT need not be installed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.guards.hints import UNDO_PATCH
from hf_paged.guards.hooks import RowHook, has_only_names
from hf_paged.guards.original_classes import patched_class
from hf_paged.guards.replaced_forwards import called_name
from hf_paged.kernels.lora.lora_order import RowOrder, order_rows

BASE = "__base__"  # PEFT's name for rows that no adapter is applied to
SAVED = "peft.utils.other.ModulesToSaveWrapper"
WRAPPER = "peft.tuners.lora.layer.ParamWrapper"
# Classes of PEFT that apply an adapter row by row, with the arithmetic of `apply_layer`.
_ROW_BY_ROW = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding",
               "peft.tuners.lora.torchao.TorchaoLoraLinear", SAVED)
ONE_AT_A_TIME = ("Give all rows of a call one adapter with `set_adapter`, or call `generate(adapter_names=...)` of "
                  "the PeftModel, which runs in stock what PEFT can do.")


def adapter_state(model: nn.Module) -> list[tuple]:
    """Return every tuner layer's state besides parameters: active, disabled and merged adapters, scaling."""
    return [
        (name, tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters),
         sorted(_scaling(layer).items()))
        for name, layer in model.named_modules()
        if _has(layer, "active_adapters") and _has(layer, "merged_adapters")
    ]


def is_lora(layer: nn.Module) -> bool:
    """Return whether a layer is one of PEFT's LoRA layers."""
    return "lora_A" in layer._modules and _has(layer, "active_adapters")


def is_saved(layer: nn.Module) -> bool:
    """Return whether a layer holds copies of another one, one for each adapter, that train whole (`modules_to_save`).
    """
    return "modules_to_save" in layer._modules and called_name(layer) == SAVED


def wraps_experts(layer: Any) -> bool:
    """Return whether a layer wraps experts and has LoRA matrices of one of their weights (`target_parameters`)."""
    return type(layer).__name__ == "ParamWrapper" and called_name(layer) == WRAPPER and layer.num_experts > 1


def inside_wrappers(layer: Any) -> Any:
    """Return the experts that such layers, one around the other, wrap; any other layer itself."""
    while wraps_experts(layer):
        layer = layer.base_layer
    return layer


def is_adapted(layer: nn.Module) -> bool:
    """Return whether a layer's result depends on the adapter of a row."""
    return is_lora(layer) or is_saved(layer)


def layers_within(layer: Any) -> list[nn.Module]:
    """Return the layers that a layer of PEFT stands for: the one that it wraps, and copies of it; else the layer."""
    if is_saved(layer):
        return [layer.original_module, *layer.modules_to_save.values()]
    return [getattr(layer, "base_layer", layer)]


def adapters_of(layer: Any) -> set[str]:
    """Return the names of the adapters that a layer has weights of."""
    names = layer.modules_to_save.keys() if is_saved(layer) else [*layer.lora_A.keys(), *layer.lora_embedding_A.keys()]
    return {*names} - {BASE}


def states_by_adapter(layers: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return, for each adapter that rows can name (sorted) and `BASE`, what its result depends on besides tensors.

    Args:
        layers: the model's layers with adapters, with their paths.
    """
    layers = list(layers)
    held = [(path, layer, adapters_of(layer)) for path, layer in layers]
    names = sorted(set().union(*(own for _, _, own in held)))
    around = [(path, bool(layer.disable_adapters), tuple(layer.merged_adapters)) for path, layer in layers]
    return {
        name: repr((around, [(path, _scaling(layer).get(name)) for path, layer, own in held if name in own]))
        for name in (*names, BASE)
    }


def why_not_row(layers: Iterable[tuple[str, Any]], name: str) -> Reason | None:
    """Return why rows that name this adapter (of the model, or `BASE`) cannot run beside other rows, or None."""
    layers = list(layers)
    if (place := patched_class(tuple({type(layer): None for _, layer in layers}))) is not None:
        return Reason("{} is patched", place, remedy=UNDO_PATCH)
    for path, layer in layers:
        if layer.disable_adapters:
            return Reason("the adapters of {} are switched off", path, remedy="Switch them on again, or name none.")
        if layer.merged_adapters:
            return Reason("{} is merged into {}", ", ".join(layer.merged_adapters), path,
                          remedy="Call `unmerge_adapter()`: what is merged is part of every row.")
        if is_saved(layer) and not {name, *layer.active_adapters} <= {BASE, *adapters_of(layer)}:
            return Reason("{} has no copy of an adapter that is named or active", path, remedy=ONE_AT_A_TIME)
        kind = called_name(layer)
        if name not in adapters_of(layer) and kind != WRAPPER:  # which runs for all rows of a step, or for none
            continue
        if kind not in _ROW_BY_ROW:
            return Reason("{} is a {}, which is not run for single rows", path, kind, remedy=ONE_AT_A_TIME)
        if name in vars(layer).get("lora_variant", ()):
            return Reason("adapter {} is a {} in {}", repr(name), type(layer.lora_variant[name]).__name__, path,
                          remedy=ONE_AT_A_TIME)
    return None


def _scaling(layer: nn.Module) -> dict[str, float]:
    return vars(layer).get("scaling", {})


def _has(layer: nn.Module, name: str) -> bool:
    """Return `hasattr` without a module's search among parameters and submodules, which is slow if it finds nothing."""
    return hasattr(type(layer), name) or name in layer.__dict__


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
    """Compute [T, k] (of an embedding: ids [T]) -> [T, n] by a layer as it stands; adapters by `rows`, if given."""
    if rows is not None and is_adapted(layer):
        return _by_row(layer, tokens, rows, layers_within(layer)[0](tokens[None])[0])
    # PEFT's hooks belong to another call, whose adapters must not apply.
    run: Any = layer.forward if layer._forward_pre_hooks and is_adapted(layer) and has_only_names(layer) else layer
    result: torch.Tensor = run(tokens[None])[0]
    return result


@contextmanager
def by_row(layers: list[weakref.ref], rows: AdapterRows | None) -> Iterator[None]:
    """Apply adapters by `rows` in this thread's calls of these layers, on the T tokens of a step, in a ``with``.

    The tokens are packed, or one of each row: [1, T], [T, 1] or [T].

    Hooks do it, since stock's modules call the layers. No hook is set if `rows` is None and no layer has PEFT's hooks.
    """
    found: list[Any] = [layer for reference in layers if (layer := reference()) is not None]
    if rows is None and not any(layer._forward_pre_hooks for layer in found):
        yield
        return
    thread, shapes = threading.get_ident(), dict[Any, torch.Size]()

    def before(layer: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        kwargs.pop("adapter_names", None)  # of another call
        if rows is None:
            return args, kwargs
        tokens, *others = args
        shape = shapes[layer] = tokens.shape[: min(2, tokens.dim() - tokens.is_floating_point())]
        if shape.numel() != len(rows.entries) or max(shape) < shape.numel():
            raise UnsupportedModelError(f"{type(layer).__name__} gets {list(tokens.shape)}, and adapters by row need "
                                        f"the {len(rows.entries)} tokens of the step. Report the model's class.")
        tokens = tokens.reshape(1, -1, *tokens.shape[len(shape) :])
        return (tokens, *others), kwargs | {"adapter_names": [BASE]}  # for a batch of one row

    def after(layer: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() != thread or rows is None:
            return output
        return _by_row(layer, args[0][0], rows, output[0]).unflatten(0, shapes.pop(layer))

    with ExitStack() as stack:
        for layer in found:
            stack.callback(layer.register_forward_pre_hook(RowHook(before), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(RowHook(after)).remove)
        yield


def _by_row(layer: Any, tokens: torch.Tensor, rows: AdapterRows, base: torch.Tensor) -> torch.Tensor:
    """Compute PEFT's `_mixed_batch_forward` from the base layer's result; active adapters as in the layer's forward.

    All adapters are applied to all tokens, so that the host need not wait for the content of `rows`.
    """
    index = rows.entries[:, None]
    result = torch.where(index == 0, layer.forward(tokens[None])[0], base)
    for entry, name in enumerate(rows.names, 1):
        if is_saved(layer):
            if name in layer.modules_to_save:
                result = torch.where(index == entry, layer.modules_to_save[name](tokens[None])[0], result)
        elif (delta := _delta(layer, name, tokens)) is not None:
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
