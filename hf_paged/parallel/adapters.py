"""LoRA adapters of PEFT on a model of which each rank holds a part.

PEFT's layers are not changed. If a layer is cut by rows, B is cut by the same rows; if it is cut by columns, A is cut
by them, and A's product is summed over the ranks before B reads it, so that all rounding but that sum's is stock's.
Updates of experts' weights (`target_parameters`) are cut likewise, and need no sum: a rank's part of a weight plus that
of its update is the part of their sum. The matrices are layers of `parallel.layers`, which know their part of the whole
matrix.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_paged.guards.replaced_forwards import called_name
from hf_paged.optional import require
from hf_paged.parallel.checkpoint import check_place, naming_broken_files
from hf_paged.parallel.group import SINGLE
from hf_paged.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    Shard,
    Sharded,
    UpdateMatrix,
    is_sharded,
    shard_of,
)

_MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_[AB])\.(?:(.+)\.)?(weight|bias)")
_KIND, _EXPERTS = "peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.ParamWrapper"
# Fields of a LoraConfig that need more than two matrices beside a layer.
_BEYOND = ("modules_to_save", "trainable_token_indices", "layer_replication", "use_dora")
_BESIDE = ("gaussian", "orthogonal", "eva")  # ways to make first matrices that leave the weights below unchanged
_REMEDY = ("expected a LoraConfig over linear layers of the decoder, or weights of its experts; merge the adapter into "
           "the checkpoint otherwise")


def read_adapter(name: Any, adapter: Any, config: Any) -> tuple[Any, list[tuple[str, torch.Tensor]]]:
    """Read an adapter: its LoraConfig, and its tensors with the names that they will have in the model.

    Args:
        name: name of the adapter.
        adapter: a directory or hub id of an adapter that PEFT saved, or its state dict, by PEFT's names.
        config: a LoraConfig, or its dict; None: the config beside the weights.

    Raises:
        ImportError: PEFT is not installed.
        OSError: there is no such folder, or no adapter in it.
        ValueError, TypeError: a name, config, tensor or file is not supported; the message names it.
    """
    require("peft", "load_adapter")
    import peft

    if not isinstance(name, str):
        raise TypeError(f"name={name!r:.200}: expected a str")
    if not name or "." in name or name == "__base__":
        raise ValueError(f"name={name!r:.200}: expected a name without dots, and another than '__base__'")
    if isinstance(adapter, (str, os.PathLike)):
        path = str(adapter)
        check_place("adapter", path, () if config is not None else ("adapter_config.json",))
        with naming_broken_files(lambda: [os.path.join(path, "adapter_model.safetensors")]):
            config = peft.PeftConfig.from_pretrained(path) if config is None else config
            adapter = peft.load_peft_weights(path, device="cpu")
    if not isinstance(adapter, Mapping):
        raise TypeError(f"adapter: expected a directory or a dict of tensors, got {type(adapter).__name__}")
    config = peft.LoraConfig(**config) if isinstance(config, Mapping) else config
    if type(config) is not peft.LoraConfig:
        raise TypeError(f"config: expected a LoraConfig of the adapter, got {type(config).__name__}")
    if asked := [field for field in _BEYOND if getattr(config, field, None)]:
        raise ValueError(f"config.{asked[0]}={getattr(config, asked[0])!r:.200}: {_REMEDY}")
    init = config.init_lora_weights
    if isinstance(init, str) and init not in _BESIDE:
        raise ValueError(f"config.init_lora_weights={init!r:.200}: expected an adapter of unchanged weights; save it "
                         "by PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)")
    tensors = []
    for key, tensor in adapter.items():
        match = _MATRIX.fullmatch(str(key))
        if match is None or match[3] not in (None, name):
            raise ValueError(f"{key!r} of the adapter is neither lora_A nor lora_B of a layer: {_REMEDY}")
        tensors.append((f"{match[1]}.{match[2]}.{name}.{match[4]}", tensor))
    return config, tensors


def add_adapter(model: Any, name: str, config: Any) -> list[str]:
    """Put the matrices of a new adapter, without values, beside the layers that its config names; it is not active.

    Returns:
        The names of its tensors.

    Raises:
        ValueError: the name is taken, or the config needs more than matrices beside linear layers of the decoder and
            weights of experts. The model is unchanged.
    """
    require("peft", "an adapter")
    import peft

    before = {id(layer): layer.active_adapters for _, layer in _lora_layers(model)}
    if name in _names_of(model) or name in getattr(model, "peft_config", {}):
        raise ValueError(f"name={name!r}: the model has an adapter of this name: expected another, or delete_adapter")
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    config = copy.deepcopy(config)
    config.inference_mode = True
    names = []
    try:
        peft.inject_adapter_in_model(config, model, name, low_cpu_mem_usage=True)
        for path, layer in _lora_layers(model):
            if name in _held(layer):
                _cut(path, layer, name)
                names += [f"{path}.{key}.{name}.{kind}" for key in ("lora_A", "lora_B")
                          for kind, _ in getattr(layer, key)[name].named_parameters()]
    except BaseException:
        remove_adapter(model, name)
        raise
    finally:
        for _, layer in _lora_layers(model):  # PEFT has activated the new one
            layer._active_adapter = before.get(id(layer), [])
        for parameter, gradient in gradients:
            parameter.requires_grad_(gradient)
    return names


def remove_adapter(model: Any, name: str) -> None:
    """Remove an adapter from every layer; a layer without adapters is replaced by its base layer."""
    for path, layer in reversed(list(_lora_layers(model))):  # a layer inside another one first
        layer._active_adapter = [one for one in layer.active_adapters if one != name]  # else PEFT activates another
        if name in _held(layer):
            layer.delete_adapter(name)
            if not _held(layer):
                owner, _, key = path.rpartition(".")
                setattr(model.get_submodule(owner), key, layer.base_layer)
    configs = getattr(model, "peft_config", {})
    configs.pop(name, None)
    if not configs and "peft_config" in vars(model):
        del model.peft_config


def _names_of(model: Any) -> set[str]:
    return set[str]().union(*(_held(layer) for _, layer in _lora_layers(model)))


def active_names(model: Any, names: Any) -> tuple[str, ...]:
    """Return the names that `activate` takes.

    Raises:
        TypeError: ``names`` is neither a str, nor a sequence of them, nor None.
        ValueError: the model lacks one of these adapters, or its adapters are more than LoRA, or merged.
    """
    listed = [names] if isinstance(names, str) else [] if names is None else names
    if not isinstance(listed, Sequence) or not all(isinstance(name, str) for name in listed):
        raise TypeError(f"names={names!r:.200}: expected the name of an adapter, a list of names, or None")
    known = _names_of(model)
    if unknown := [name for name in listed if name not in known]:
        found = ", ".join(sorted(known)) or "it has none"
        raise ValueError(f"names={names!r:.200}: expected adapters of the model ({found}), got {unknown[0]!r:.200}")
    _check_lora_alone(model, f"names={names!r:.200}", "set_adapter")
    return tuple(dict.fromkeys(listed))


def removable_name(model: Any, name: Any) -> str:
    """Return the name of an adapter that `remove_adapter` removes whole; raises ValueError for any other."""
    known = _names_of(model)
    if name not in known:
        raise ValueError(f"name={name!r:.200}: expected one of "
                         f"{', '.join(map(repr, sorted(known))) or 'none, since the model has no adapter'}")
    _check_lora_alone(model, f"name={name!r:.200}", "delete_adapter", {name})
    return name


def _check_lora_alone(model: Any, given: str, method: str, merged: Collection[str] | None = None) -> None:
    """Raise ValueError if adapters have more than matrices that can be left out. ``merged``: those that must not be
    merged; None: all."""
    if any("_active_adapter" in vars(module) and "lora_A" not in module._modules for module in model.modules()):
        raise ValueError(f"{given}: adapters of the model are more than LoRA beside layers (modules_to_save, for "
                         f"instance): expected `{method}` of the PeftModel")
    found = {name for _, layer in _lora_layers(model) for name in layer.merged_adapters}
    if found := found if merged is None else found & {*merged}:
        raise ValueError(f"{given}: adapters are merged into weights ({', '.join(sorted(found))}): expected "
                         "`unmerge_adapter()` of the PeftModel, or `unmerge()` of the layers, first")


def activate(model: Any, names: Sequence[str]) -> None:
    """Make these adapters, and no others, the active ones of every LoRA layer; nothing begins to train."""
    for _, layer in _lora_layers(model):
        layer._active_adapter = list(names)


def follow_layers(tuners: list[Any], model: Any) -> None:
    """Let PeftModels and tuners around a model name the active adapters of its layers.

    A PeftModel names one, also where none is active: its forward reads that one's config.
    """
    active = next((list(layer.active_adapters) for _, layer in _lora_layers(model)), [])
    for tuner in tuners:
        if hasattr(tuner, "get_base_model"):
            known = [*active, tuner.active_adapter, *tuner.peft_config]
            tuner.active_adapter = next((name for name in known if name in (*tuner.peft_config,)), [])
        else:
            tuner.active_adapter = active


def layer_inside(module: nn.Module) -> Any:
    """Return the layer that layers of tuners, one around the other, wrap; None for a module that wraps none."""
    inner = getattr(module, "base_layer", None)
    while (further := getattr(inner, "base_layer", None)) is not None:
        inner = further
    return inner


def needs_cut(module: nn.Module) -> bool:
    """Return whether a module of a tuner is right only if its matrices are cut like the layer that it wraps."""
    inner = layer_inside(module)
    return inner is not None and (is_sharded(inner) or called_name(module) == _EXPERTS)


def is_cut_like_its_layer(layer: Any) -> bool:
    """Return whether the matrices of all adapters of a LoRA layer are cut by `add_adapter` as its base layer is cut."""
    if called_name(layer) == _EXPERTS:
        return layer.num_experts > 1 and all(
            [_shard_of_matrix(matrix) for matrix in (layer.lora_A[name], layer.lora_B[name])]
            == [*_shards_of_update(layer, len(layer.lora_A[name].weight))] for name in layer.lora_A)
    kinds = {ColumnParallelLinear: (nn.Linear, ColumnParallelLinear), RowParallelLinear: (RowParallelLinear, nn.Linear)}
    expected = kinds.get(type(layer.base_layer))
    if expected is None or called_name(layer) != _KIND or layer.merged_adapters or getattr(layer, "lora_variant", {}):
        return False
    return all((type(layer.lora_A[name]), type(layer.lora_B[name])) == expected for name in layer.lora_A)


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, module) for path, module in model.named_modules() if "lora_A" in module._modules)


def _held(layer: Any) -> set[str]:
    return {*layer.lora_A, *layer.lora_embedding_A}


def _cut(path: str, layer: Any, name: str) -> None:
    """Replace the matrices of a new adapter, on the meta device, by ones with memory for this rank's part."""
    if called_name(layer) == _EXPERTS and layer.num_experts > 1:
        _cut_update(layer, name)
        return
    base = layer.base_layer
    known = type(base) in (nn.Linear, ColumnParallelLinear, RowParallelLinear)
    if called_name(layer) != _KIND or not known or name in getattr(layer, "lora_variant", {}):
        what = f"{path}, a {called_name(layer)} over a {type(base).__name__},"
        raise ValueError(f"{what} cannot have an adapter of this kind here: {_REMEDY}")
    down, up = layer.lora_A[name], layer.lora_B[name]
    kind = {"device": "meta", "dtype": torch.float32}  # as PEFT keeps adapters, whatever they were saved in
    rank, has_bias = down.out_features, up.bias is not None
    down, up = nn.Linear(base.in_features, rank, False, **kind), nn.Linear(rank, base.out_features, has_bias, **kind)
    if isinstance(base, Sharded):
        shard = base.shards["weight"]
        [part] = shard.ranges
        if isinstance(base, ColumnParallelLinear):
            up = ColumnParallelLinear(nn.Linear(rank, shard.shape[0], has_bias, **kind), base.group, part)
        else:
            down = RowParallelLinear(nn.Linear(shard.shape[1], rank, False, **kind), base.group, part)
    _put(layer, name, down, up, base.weight.device)


def _cut_update(wrapper: Any, name: str) -> None:
    """Do the same to the matrices of an update of experts' weights."""
    experts, kind = layer_inside(wrapper), {"device": "meta", "dtype": torch.float32}
    group = experts.group if isinstance(experts, Sharded) else SINGLE
    down, up = (UpdateMatrix(group, shard, **kind) if shard != Shard.whole(shard.shape)
                else nn.Linear(shard.shape[1], shard.shape[0], bias=False, **kind)
                for shard in _shards_of_update(wrapper, wrapper.lora_A[name].out_features))
    _put(wrapper, name, down, up, wrapper.get_param().device)


def _shards_of_update(wrapper: Any, columns: int) -> tuple[Shard, Shard]:
    """Return this rank's parts of A [columns, k] and B [n, columns] of an update of the weights of experts.

    Each expert's weight is n x k, or, where PEFT finds it transposed, k x n.
    """
    whole = shard_of(layer_inside(wrapper), wrapper.parameter_name)
    n, k = (1, 2) if wrapper._did_swap_in_out_features else (2, 1)
    a, b = (columns, whole.shape[k]), (whole.shape[n], columns)
    return (Shard(a, 1, whole.ranges) if whole.dim == k else Shard.whole(a),
            Shard(b, 0, whole.ranges) if whole.dim == n else Shard.whole(b))


def _shard_of_matrix(matrix: Any) -> Shard | None:
    """Return the part that a matrix of an update is; None for a layer that `_cut_update` does not make."""
    return shard_of(matrix, "weight") if type(matrix) in (nn.Linear, UpdateMatrix) else None


def _put(layer: Any, name: str, down: nn.Module, up: nn.Module, device: torch.device) -> None:
    for key, matrix in (("lora_A", down), ("lora_B", up)):
        getattr(layer, key)[name] = matrix.to_empty(device=device).requires_grad_(False).eval()
