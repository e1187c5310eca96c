"""Shards of a model that FSDP2 or DeepSpeed spread over ranks: this rank's part of each parameter, and its dtype.

For torch's `fully_shard` (2.11 to 2.14) they are read off the state that torch keeps beside the modules: after a
forward the modules themselves have whole parameters for a while. DeepSpeed's ZeRO-3 gathers parameters itself, inside
of `deepspeed.zero.GatheredParameters`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hf_paged.errors import Reason
from hf_paged.guards.hints import GATHER, ONE_DEVICE, SHARD

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_COUNTING_HOOKS = {
    ("deepspeed.runtime.zero.parameter_offload", "_start_of_forward_hook"),
    ("deepspeed.runtime.engine", "_module_forward_pre_hook"),
    ("deepspeed.runtime.engine", "_module_forward_post_hook"),
}
ONE_MESH = "Give `fully_shard` the same mesh for all modules, or DeepSpeed one process group."
_MARK = "_is_fsdp_managed_module"


class Shard(NamedTuple):
    """Parameter that trainer and optimizer have, and the dtype that a forward reads it in."""

    parameter: Any
    dtype: torch.dtype

    def local(self) -> torch.Tensor:
        """Return this rank's part."""
        tensor: torch.Tensor = getattr(self.parameter, "_local_tensor", self.parameter.data)
        return tensor

    def cut(self) -> tuple[int, Any]:
        """Return the dimension and process group of the cut; the group is None if each rank has the whole parameter."""
        for axis, placement in enumerate(getattr(self.parameter, "placements", ())):
            if placement.is_shard():
                return placement.dim, self.parameter.device_mesh.get_group(axis)
        return 0, None


class Sharding(NamedTuple):
    """Distribution of a model over ranks.

    Attributes:
        shards: by id of the module and name of the parameter there; a shared parameter is listed at each place.
        ranks: all ranks that keep parts, by their numbers in the default process group.
        device: device on which a forward computes.
    """

    shards: dict[tuple[int, str], Shard]
    ranks: tuple[int, ...]
    device: torch.device


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` shards a module inside `model`, or DeepSpeed a parameter."""
    modules = {id(module): module for module in model.modules()}
    if not any(_MARK in vars(module) for module in modules.values()):
        return _is_partitioned(model)
    # FSDP1 leaves the same mark.
    parameters = (parameter for state in _states() for parameter in _parameters(state))
    return any(place[0] in modules for parameter in parameters for place in _places(parameter))


def plain_class(kind: type) -> type:
    """Return the class that `kind` was before `fully_shard` derived other classes from it."""
    while len(kind.__bases__) == 2 and kind.__bases__[0].__module__.startswith("torch.distributed."):
        kind = kind.__bases__[1]
    return kind


def is_hook(hook: Any) -> bool:
    """Return whether `hook` gathers or frees parameters around a forward (FSDP2), or counts forwards (DeepSpeed).

    False for hooks of DeepSpeed that gather: with them each forward needs all ranks.
    """
    function = inspect.unwrap(hook)
    module = getattr(function, "__module__", None)
    if module == "deepspeed.utils.nvtx":  # a decorator that names ranges for a profiler
        function = inspect.getclosurevars(function).nonlocals.get("func")
        module = getattr(function, "__module__", None)
    if not isinstance(module, str):
        return False
    return module.startswith(_PACKAGE) or (module, getattr(function, "__name__", "")) in _COUNTING_HOOKS


def sharding_of(model: nn.Module) -> Sharding | Reason:
    """Return the sharding of a model for which `is_sharded` holds, or why it cannot be gathered from its parts."""
    return _partition_of(model) if _is_partitioned(model) else _fully_sharded(model)


def _is_partitioned(model: nn.Module) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _partition_of(model: nn.Module) -> Sharding | Reason:
    """Return the sharding by ZeRO-3. DeepSpeed frees gathered memory, so that no graph or merged weight may use it.

    In stock a forward needs all ranks even after gathering: a hook of DeepSpeed compares what the ranks do.
    """
    shards: dict[tuple[int, str], Shard] = {}
    ranks: set[tuple[int, ...]] = set()
    devices: set[torch.device] = set()
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if parameter is None or not hasattr(parameter, "ds_id"):
                continue
            if getattr(getattr(parameter, "ds_status", None), "name", None) != "AVAILABLE":
                return Reason("the parameters are partitioned by DeepSpeed", remedy=GATHER)
            shards[id(module), name] = Shard(parameter, parameter.dtype)
            devices.add(parameter.device)
            ranks.add(tuple(dist.get_process_group_ranks(parameter.ds_process_group)))
    if len(ranks) > 1:
        return Reason("the model is spread over {} groups of ranks", len(ranks), remedy=ONE_MESH)
    if len(devices) > 1:
        return Reason("parameters and buffers are on several devices: {}", sorted(map(str, devices)),
                      remedy=ONE_DEVICE)
    return Sharding(shards, ranks.pop(), devices.pop())


def _fully_sharded(model: nn.Module) -> Sharding | Reason:
    modules = {id(module): (name, module) for name, module in model.named_modules()}
    shards: dict[tuple[int, str], Shard] = {}
    ranks: set[tuple[int, ...]] = set()
    device: torch.device | None = None
    for state in _states():
        for parameter in _parameters(state):
            places = [place for place in _places(parameter) if place[0] in modules]
            if not places:
                continue
            name = ".".join(filter(None, (modules[places[0][0]][0], places[0][1])))
            if (reason := _parameter_reason(name, parameter)) is not None:
                return reason
            sharded = parameter.sharded_param
            wanted = parameter.mp_policy.param_dtype
            dtype = wanted if wanted is not None and sharded.dtype.is_floating_point else sharded.dtype
            shards.update(dict.fromkeys(places, Shard(sharded, dtype)))
            ranks.add(tuple(sorted(sharded.device_mesh.mesh.flatten().tolist())))
            device = parameter.device
    if len(ranks) != 1 or device is None:
        return Reason("the model is spread over {} groups of ranks", len(ranks), remedy=ONE_MESH)
    for name, module in modules.values():
        for key, whole in module._parameters.items():
            if whole is not None and "DTensor" in type(whole).__name__ and (id(module), key) not in shards:
                return Reason("parameter {} is a DTensor that is not fully_shard's", f"{name}.{key}", remedy=SHARD)
    dtypes = {shard.dtype for shard in shards.values() if shard.dtype.is_floating_point}
    for name, module in modules.values():
        if (reason := _policy_reason(name, module, model, dtypes)) is not None:
            return reason
    return Sharding(shards, ranks.pop(), device)


def _states() -> list[Any]:
    """Return the states of all modules in this process that `fully_shard` shards, also of modules around the model."""
    from torch.distributed._composable_state import _module_state_mapping

    found = {id(state): state for reference in list(_module_state_mapping.values())
             if (state := reference()) is not None and type(state).__module__.startswith("torch.distributed.")}
    return [state for state in found.values() if hasattr(state, "_mp_policy")]


def _parameters(state: Any) -> Iterator[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12; before, a state had one at most
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            yield from group.fsdp_params


def _places(parameter: Any) -> Iterator[tuple[int, str]]:
    info = parameter._module_info
    yield id(info.module), info.param_name
    yield from zip(map(id, info.shared_modules), info.shared_param_names, strict=True)


def _parameter_reason(name: str, parameter: Any) -> Reason | None:
    sharded = parameter.sharded_param
    cuts = [placement for placement in sharded.placements if not placement.is_replicate()]
    if len(cuts) > 1 or any(type(cut) is not dist.tensor.Shard for cut in cuts):
        return Reason("parameter {} is cut as {}: expected one dimension of the mesh", name,
                      str(tuple(sharded.placements)), remedy=SHARD)
    if hasattr(sharded._local_tensor, "fsdp_pre_all_gather"):
        return Reason("parameter {} is a {}, which is gathered in a format of its own", name,
                      type(sharded._local_tensor).__name__, remedy=SHARD)
    if sharded.device.type == "meta":
        return Reason("parameter {} is on the meta device (offloaded?)", name, remedy=ONE_DEVICE)
    return None


def _policy_reason(name: str, module: nn.Module, model: nn.Module, dtypes: set[torch.dtype]) -> Reason | None:
    """Return which module's casts of outputs change what one dtype throughout would compute, or None.

    A module's inputs come in the parameters' dtype, if they have only one; the model's logits may become float32.
    """
    if not hasattr(module, "_get_fsdp_state"):
        return None
    of_fsdp: Any = module
    policy = of_fsdp._get_fsdp_state()._mp_policy
    allowed = {None, torch.float32, *dtypes} if module is model else {None, *dtypes}
    if policy.output_dtype not in allowed or not {policy.param_dtype} <= {None, *dtypes}:
        return Reason("the mixed precision policy of {} computes in {} and hands on {}", name or "the model",
                      policy.param_dtype, policy.output_dtype,
                      remedy="Give `fully_shard` the same `MixedPrecisionPolicy` for all modules, with the dtype of "
                             "its parameters as that of its outputs.")
    return None
