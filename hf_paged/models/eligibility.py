"""Eligibility of a model: whether a packed step computes what the model's own forward would, and if not, why not.

Checked at every call, since hooks, wrappers, patches, adapters and dtypes come and go while a model is enabled.
"""

from __future__ import annotations

from itertools import takewhile
from types import FunctionType
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import nn

from hf_paged.errors import Reason
from hf_paged.guards import hints
from hf_paged.guards.hooks import (
    ReplayHook,
    RowHook,
    has_only_names,
    only_captures,
    only_replays,
    why_not_global_state,
)
from hf_paged.guards.original_classes import DECIDING_METHODS, patched_class
from hf_paged.guards.quantized import PLAIN, inner_tensors, is_known_forward, is_quantized_forward, why_not_offloaded
from hf_paged.guards.replaced_forwards import autocast_of_call, why_not_replaced, why_not_wrapped_forward
from hf_paged.guards.snapshot import plain_tensors, why_not_watched
from hf_paged.guards.tokenwise import (
    SHARDED_MODULE,
    row_mixing_of_layer,
    row_mixing_of_scheme,
    row_mixing_of_weight,
)
from hf_paged.models.executor import KNOWN_LAYERS, ModelExecutor, float_weights
from hf_paged.models.expert_lora.folding import why_not_wrapped
from hf_paged.models.paged_calls import implementation_of, why_not_attention
from hf_paged.models.tuners import is_adapted, layers_within
from hf_paged.parallel.fsdp import plain_class
from hf_paged.parallel.plan import broken_part

_OWN_LAYERS = ("torch.", SHARDED_MODULE[:-1])  # modules of known layers, which may not be patched
COMPUTE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOWER_DTYPES = (torch.float16, torch.bfloat16)

# Since 5.24 stock's layers checkpoint only where gradients are recorded, which `generate` turns off.
_CHECKPOINTS_GRADIENTS_ALONE = Version(transformers.__version__) >= Version("5.24")


class ModelWalk(NamedTuple):
    """One walk over a model, for all checks of a call: its modules, parameters, replaced modules and called modules."""

    executor: ModelExecutor
    autocast: torch.dtype | None  # of the call
    modules: list[tuple[str, nn.Module]]
    parameters: list[tuple[str, nn.Parameter]]
    own: list[tuple[str, nn.Module, type]]
    called: list[tuple[str, nn.Module]]


def why_not_native(executor: ModelExecutor) -> Reason | None:
    """Return why the model in `executor` cannot natively run a call that this thread makes now, or None if it can.

    For an unchanged model this costs a comparison of what the checks read (see `ModelWatch`).
    """
    return why_not_under(executor, autocast_of_call(executor.source))


def why_not_under(executor: ModelExecutor, autocast: torch.dtype | None) -> Reason | None:
    """Return `why_not_native` of a call that casts to `autocast` (None: no cast), not to this thread's."""
    if executor.replica is not None and (reason := executor.replica.refresh()) is not None:
        return reason
    if (reason := why_not_global_state() or _why_not_class(executor) or why_not_attention(
            implementation_of(executor.config)) or executor.why_not_routes()) is not None:
        return reason
    structure = executor.watch.structure(executor.model)  # first: changes made during the checks are noticed later
    look = executor.last_look(structure)
    if look is not None and look.passed is not None:
        kinds, cast = look.passed
        if cast == autocast and patched_class(kinds) is None and executor.why_not_registry() is None:
            return None
    if executor.finds_shards():
        return why_not_under(executor, autocast)
    seen = ModelWalk(executor, autocast, list(executor.model.named_modules()), list(executor.model.named_parameters()),
                list(executor.own_modules()), list(executor.called_modules()))
    checks = (_why_not_sharding, _why_not_module, _why_not_experts, _why_not_device, _why_not_hook, _why_not_dtype,
              _why_not_train_mode)
    reason = next((reason for check in checks if (reason := check(seen)) is not None), None)
    reason = executor.why_not_constants() if reason is None else reason  # constants are read off modules that passed
    if reason is None and not executor.group.is_parallel:  # for ranks of a sharded model shapes are checked again
        executor.look(structure).passed = _watched_kinds(seen), autocast
    return reason


def _watched_kinds(seen: ModelWalk) -> tuple[type, ...]:
    """Return the classes whose code every look compares: of known layers, torch's and sharded modules."""
    found = {type(module): None for _, module in seen.modules}
    return tuple(kind for kind in found if kind in KNOWN_LAYERS or kind.__module__.startswith(_OWN_LAYERS)
                 or kind.__name__ == "ParamWrapper")


def why_not_subclass(executor: ModelExecutor) -> Reason | None:
    """Return which class derived from transformers' own redefines a method that stock's code looks up, or None."""
    kinds = plain_class(type(executor.source)).__mro__
    derived = list(takewhile(lambda kind: kind is not executor.model_class, kinds))
    names = {*executor.original_code().names(executor.model_class), *DECIDING_METHODS} if derived else ()
    for kind in derived:
        if own := vars(kind).keys() & names:
            return Reason("{}.{} is not transformers' own", kind.__name__, min(own), remedy=hints.UNDO_PATCH)
    return None


def _why_not_class(executor: ModelExecutor) -> Reason | None:
    if (reason := why_not_subclass(executor)) is not None:
        return reason
    if (place := executor.original_code().patched()) is not None:
        return Reason("{} is patched", place, remedy=hints.UNDO_PATCH)
    model = executor.source
    for name, replaced in vars(model).items():
        # PEFT's prompt learning leaves the model's own method behind on the instance.
        if name in DECIDING_METHODS and name != "forward" and replaced != getattr(type(model), name).__get__(model):
            return Reason("{} is replaced on the instance (prompt learning?)", name,
                          remedy="PEFT's prompt, prefix and p-tuning change what the model is given. Call the bare "
                                 "model, or merge.")
    return why_not_wrapped_forward(model) if "forward" in vars(model) else None


def _why_not_module(seen: ModelWalk) -> Reason | None:
    for name, module, expected in seen.own:
        if type(module) is not expected:
            return Reason("{} is a {}, not transformers' own {}", name, _full_name(module), expected.__name__,
                          remedy=hints.PUT_BACK)
        for key, parameter in module._parameters.items():
            if parameter is not None and type(parameter) not in PLAIN:
                return Reason("{}.{} is a {}: expected a plain tensor in {}", name, key, _full_name(parameter),
                              expected.__name__, remedy=hints.QUANTIZE_LINEAR)
    for name, module in seen.called:
        for layer in (module, *layers_within(module)):
            if (does := row_mixing_of_layer(layer)) is not None:
                return Reason("{} is a {}, which {}", name, _full_name(layer), does, remedy=hints.EACH_ROW_ALONE)
    if (place := patched_class(_watched_kinds(seen))) is not None:
        return Reason("{} is patched", place, remedy=hints.UNDO_PATCH)
    for name, module in seen.modules:
        if name and "forward" in module.__dict__:
            if not is_known_forward(module):
                calls_modules = seen.executor.calls_modules
                if (reason := why_not_replaced(name, module, calls_modules=calls_modules)) is not None:
                    return reason
            elif is_quantized_forward(module) and (does := row_mixing_of_scheme(module)) is not None:
                return Reason("{} is a quantized {}, which {}", name, type(module).__name__, does,
                              remedy=hints.EACH_ROW_ALONE)
    return None


def _why_not_experts(seen: ModelWalk) -> Reason | None:
    return why_not_wrapped(seen.modules)


def _full_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"


def _why_not_sharding(seen: ModelWalk) -> Reason | None:
    """Return which parameter another library sharded, or which of hf_paged's shards do not fit together, or None."""
    for name, parameter in seen.parameters:
        kinds = type(parameter).__name__, type(parameter.data).__name__
        if "DTensor" in kinds:
            return Reason("parameter {} is a DTensor of a device mesh", name, remedy=hints.SHARD)
        if "FlatParameter" in kinds or hasattr(parameter, "_fsdp_flattened"):
            return Reason("parameter {} belongs to FSDP", name, remedy=hints.SHARD)
    return broken_part(seen.executor.model)


def _why_not_device(seen: ModelWalk) -> Reason | None:
    devices = getattr(seen.executor.model, "hf_device_map", None)
    if devices and len(set(map(str, devices.values()))) > 1:
        return Reason("hf_device_map spreads the model over {} devices", len(set(map(str, devices.values()))),
                      remedy=hints.ONE_DEVICE)
    if (reason := next(filter(None, (why_not_offloaded(*named) for named in seen.modules)), None)) is not None:
        return reason
    found = set()
    for name, parameter in seen.parameters:
        if (does := row_mixing_of_weight(parameter)) is not None:
            return Reason("parameter {} is a {}: a layer that multiplies with it {}", name, _full_name(parameter), does,
                          remedy=hints.EACH_ROW_ALONE)
        inner = inner_tensors(parameter)
        if inner is None:
            return Reason("parameter {} is a {}, whose bytes cannot be watched for changes", name,
                          _full_name(parameter), remedy=hints.DEQUANTIZE)
        for tensor in inner:
            if (reason := _why_not_memory(f"parameter {name}", tensor)) is not None:
                return reason
            if tensor.device.type == "meta":
                return Reason("parameter {} is on the meta device (offloaded?)", name, remedy=hints.ONE_DEVICE)
            found.add(tensor.device)
    for name, buffer in seen.executor.model.named_buffers():
        if (reason := _why_not_memory(f"buffer {name}", buffer)) is not None:
            return reason
        found.add(buffer.device)
    if len(found) > 1:
        return Reason("parameters and buffers are on several devices: {}", sorted(map(str, found)),
                      remedy=hints.ONE_DEVICE)
    return why_not_watched(plain_tensors(seen.modules), next(iter(found), torch.device("cpu")))


def _why_not_memory(name: str, tensor: torch.Tensor) -> Reason | None:
    """Return why the tensor's memory cannot be read, or None."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided or not tensor.numel():
        return None
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed, has = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if has >= needed:
        return None
    return Reason("{} has {} memory: its storage was resized", name, f"{has} of {needed} bytes" if has else "no",
                  remedy="The parameter or buffer is offloaded. Bring it back before generating.")


def _require_grad(module: Any, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def _only_requires_grad(hook: Any) -> bool:
    """Return whether `hook` is `enable_input_require_grads`'s or its like in PEFT or TRL, inert without gradients."""
    if not isinstance(hook, FunctionType):
        return False
    code, known = hook.__code__, _require_grad.__code__
    return all(getattr(code, part) == getattr(known, part) for part in ("co_code", "co_names", "co_consts"))


def _is_inert(hook: Any) -> bool:
    return _only_requires_grad(hook) or only_captures(hook) or type(hook) in (RowHook, ReplayHook)


def _why_not_hook(seen: ModelWalk) -> Reason | None:
    if "ct_decompress_hook" in vars(seen.executor.model):
        return Reason("compressed-tensors decompresses the weights in the first forward, which stock has to run",
                      remedy="Nothing: later calls are native. `model(torch.tensor([[1]]))` decompresses at once.")
    for name, module in seen.modules:
        before = module._forward_pre_hooks
        known = only_replays(before) or (is_adapted(module) and has_only_names(module))
        if not known or not all(map(_is_inert, module._forward_hooks.values())):
            return Reason("{} has a forward hook", name or "the model", remedy=hints.REMOVE_HOOK)
        if nn.utils.parametrize.is_parametrized(module):
            return Reason("{} is parametrized", name,
                          remedy="`torch.nn.utils.parametrize.remove_parametrizations` ends it.")
    return None


def _why_not_dtype(seen: ModelWalk) -> Reason | None:
    spec = seen.executor.kv_spec()
    if spec.compute_dtype not in COMPUTE_DTYPES:
        return Reason("weights of dtype {}", spec.compute_dtype, remedy=hints.ONE_DTYPE)
    dtypes = {p.dtype for _, p in seen.parameters if p.is_floating_point()}
    autocast = None if dtypes == {seen.autocast} else seen.autocast
    if autocast is not None and (reason := _why_not_autocast(seen, autocast)) is not None:
        return reason
    return seen.executor.why_not_precision(autocast)


def _why_not_autocast(seen: ModelWalk, autocast: torch.dtype) -> Reason | None:
    """Return why autocast, which casts some of the weights, is left to stock, or None; dtypes may be mixed under it."""
    if autocast not in LOWER_DTYPES:
        return Reason("autocast to {}", autocast, remedy=hints.DTYPE_OF_AUTOCAST)
    if seen.executor.group.is_parallel:
        return Reason("autocast to {} while the weights, which are not all of it, are sharded over several ranks",
                      autocast, remedy=hints.DTYPE_OF_AUTOCAST)
    if implementation_of(seen.executor.config) == "flex_attention":
        return Reason("autocast to {}, which flex_attention does not know", autocast, remedy=hints.OWN_ATTENTION)
    for module in (*(module for _, module, _ in seen.own), *(module for _, module in seen.called)):
        for weight in float_weights(module):
            if weight.dtype not in COMPUTE_DTYPES:
                return Reason("weights of dtype {}", weight.dtype, remedy=hints.ONE_DTYPE)
    return None


def _why_not_train_mode(seen: ModelWalk) -> Reason | None:
    for name, module in seen.modules:
        if not module.training:
            continue
        if getattr(module, "gradient_checkpointing", False) and not _CHECKPOINTS_GRADIENTS_ALONE:
            return Reason("{} checkpoints activations in train mode, where stock's layers forget their KV cache", name,
                          remedy=hints.EVAL_MODE)
        if isinstance(module, nn.Dropout) and module.p > 0:
            return Reason("{} drops out in train mode", name, remedy=hints.EVAL_MODE)
        if getattr(module, "attention_dropout", 0.0):
            return Reason("{} has attention dropout in train mode", name, remedy=hints.EVAL_MODE)
        if getattr(module, "jitter_noise", 0.0):
            return Reason("{} has jitter noise in train mode", name, remedy=hints.EVAL_MODE)
    return None
