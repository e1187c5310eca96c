"""Does a packed step through an executor compute what this model's own forward would? If not: why not.

Looked up at every call, since hooks, wrappers, patches, adapters and dtypes come and go while a model is enabled.
"""

from __future__ import annotations

from itertools import takewhile
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.hub_kernels import is_kernel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.models.base import ModelExecutor
from hf_paged.models.guards.at_home import CALL_CHAIN
from hf_paged.models.guards.capturing import only_captures
from hf_paged.models.guards.compressed import is_known_forward, is_quantized_forward, offload_reason
from hf_paged.models.guards.facts import Facts
from hf_paged.models.guards.inner_tensors import PLAIN, inner_tensors
from hf_paged.models.guards.originals import DECIDING_METHODS, patched_class, patched_entry
from hf_paged.models.guards.plain_tensors import plain_tensors, unwatchable
from hf_paged.models.guards.surroundings import autocast_state, surroundings_reason
from hf_paged.models.guards.wrapped_forward import wrapped_forward_reason
from hf_paged.models.paged_calls import implementation_of
from hf_paged.models.tokenwise import (
    SHARDED_MODULE,
    layer_reason,
    scheme_reason,
    stores_float8,
    weight_reason,
)
from hf_paged.parallel.intact import broken_part

_OWN_LAYERS = ("torch.", SHARDED_MODULE[:-1])  # that are known, so that nobody may patch them
_CALL_CHAIN = frozenset(CALL_CHAIN)
SUPPORTED_ROUTE = "expected PagedGenerator.from_pretrained(..., tensor_parallel_size=N)"
COMPUTE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Seen(NamedTuple):
    """A model's modules, walked once for all checks of a call: every one, those replaced, those called; parameters."""

    executor: ModelExecutor
    modules: list[tuple[str, nn.Module]]
    parameters: list[tuple[str, nn.Parameter]]
    own: list[tuple[str, nn.Module, type]]
    called: list[tuple[str, nn.Module]]


class Passed(NamedTuple):
    """What a look at which nothing spoke against the model depended on besides the modules."""

    kinds: tuple[type, ...]  # classes whose code is looked up anew at every look
    autocast: tuple

    def holds(self, executor: ModelExecutor) -> bool:
        """Is all of that as it was?"""
        return (
            self.autocast == autocast_state(executor.model)
            and patched_class(self.kinds) is None
            and executor.registry_reason() is None
        )


def unsupported_reason(executor: ModelExecutor) -> str | None:
    """Why the model in `executor` cannot run natively right now, or None if it can.

    Looked at again, a model that did not change costs a comparison of what the checks read (see `Facts`).
    """
    if (reason := surroundings_reason() or _class_reason(executor) or _attention_reason(executor)) is not None:
        return reason
    look = executor.last_look()
    if look is not None and look.found is not None and look.found.holds(executor):
        return None
    # First, so that what changes during the checks is seen at the next look.
    facts, autocast = Facts(executor.model), autocast_state(executor.model)
    seen = Seen(executor, list(executor.model.named_modules()), list(executor.model.named_parameters()),
                list(executor.own_modules()), list(executor.called_modules()))
    checks = (_sharding_reason, _module_reason, _device_reason, _hook_reason, _dtype_reason, _train_mode_reason)
    reason = next((reason for check in checks if (reason := check(seen)) is not None), None)
    reason = executor.constants_reason() if reason is None else reason  # constants are read off modules that passed
    if reason is None and not executor.group.is_parallel:  # a rank of a sharded model also compares shapes
        passed = Passed(_watched_kinds(seen), autocast)
        executor.look(facts).found = passed
    return reason


def _watched_kinds(seen: Seen) -> tuple[type, ...]:
    """Classes whose code is looked up at every look: those of torch's modules, and of activations."""
    kinds = {type(module): None for _, module in seen.modules if type(module).__module__.startswith(_OWN_LAYERS)}
    return (*kinds, *seen.executor.activations())


def _class_reason(executor: ModelExecutor) -> str | None:
    model = executor.model
    cls = type(model).__dict__.get("_hf_paged_stock_class", type(model))
    for name in DECIDING_METHODS:
        method = getattr(cls, name, None)
        if method is not getattr(executor.model_class, name, None):
            return f"{cls.__name__}.{name} is not transformers' own"
        replaced = model.__dict__.get(name) if name != "forward" else None
        # PEFT's prompt learning leaves the model's own method behind on the instance.
        if replaced is not None and (method is None or replaced != method.__get__(model)):
            return f"{name} is replaced on the instance (prompt learning?)"
    for kind in takewhile(lambda kind: kind is not executor.model_class, cls.__mro__):
        if own := executor.asked_of_model().intersection(vars(kind)):
            return f"{kind.__name__}.{min(own)} is not transformers' own"
    if (place := executor.patched()) is not None:
        return f"{place} is patched"
    if "forward" in model.__dict__:
        return wrapped_forward_reason(model)
    return None


def _attention_reason(executor: ModelExecutor) -> str | None:
    """All of transformers' own implementations compute plain softmax attention; one that a user registered may not."""
    name = implementation_of(executor.config)
    function, mask = ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if name is None:
        return "attention implementation None, for which stock makes no causal mask"
    if function is None and name != "eager":
        return f"attention implementation {name!r} is not one of transformers' own"
    if is_kernel(name) and function is not flash_attention_forward:
        return f"attention implementation {name!r} is a Hub kernel that transformers does not call as FlashAttention"
    for entry in (function, mask):
        if entry is not None and (place := patched_entry(entry)) is not None:
            return f"attention implementation {name!r} is not one of transformers' own: {place} is patched"
    return None


def _module_reason(seen: Seen) -> str | None:
    for name, module, expected in seen.own:
        if type(module) is not expected:
            return f"{name} is a {_full_name(module)}, not transformers' own {expected.__name__}"
        for key, parameter in module._parameters.items():
            if parameter is not None and type(parameter) not in PLAIN:
                return f"{name}.{key} is a {_full_name(parameter)}: expected a plain tensor in {expected.__name__}"
    for name, module in seen.called:
        for layer in (module, getattr(module, "base_layer", None)):  # a tuner's own, and what it wraps
            if layer is None:
                continue
            if (does := layer_reason(layer)) is not None:
                return f"{name} is a {_full_name(layer)}, which {does}"
            if vars(layer).get("max_norm") is not None:
                return f"{name} has max_norm, with which a look-up changes the weights"
    if (place := patched_class(_watched_kinds(seen))) is not None:
        return f"{place} is patched"
    for name, module in seen.modules:
        if name and "forward" in module.__dict__:
            if not is_known_forward(module):
                if (reason := seen.executor.replacement_reason(name, module)) is not None:
                    return reason
            elif is_quantized_forward(module) and (does := scheme_reason(module)) is not None:
                return f"{name} is a quantized {type(module).__name__}, which {does}"
        if not _CALL_CHAIN.isdisjoint(module.__dict__):
            return f"{min(_CALL_CHAIN.intersection(module.__dict__))} of {name or 'the model'} is replaced"
    return None


def _full_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"


def _sharding_reason(seen: Seen) -> str | None:
    """Parameters of which somebody else keeps a part on each rank, or parts of ours that do not fit together."""
    for name, parameter in seen.parameters:
        kinds = type(parameter).__name__, type(parameter.data).__name__
        if hasattr(parameter, "ds_id"):
            return f"the parameters are partitioned by DeepSpeed: {SUPPORTED_ROUTE}"
        if "DTensor" in kinds:
            return f"parameter {name} is a DTensor (FSDP2 or a device mesh): {SUPPORTED_ROUTE}"
        if "FlatParameter" in kinds or hasattr(parameter, "_fsdp_flattened"):
            return f"parameter {name} belongs to FSDP: {SUPPORTED_ROUTE}"
    return broken_part(seen.executor.model)


def _device_reason(seen: Seen) -> str | None:
    devices = getattr(seen.executor.model, "hf_device_map", None)
    if devices and len(set(map(str, devices.values()))) > 1:
        return f"hf_device_map spreads the model over {len(set(map(str, devices.values())))} devices"
    if (reason := next(filter(None, (offload_reason(*named) for named in seen.modules)), None)) is not None:
        return reason
    found = set()
    for name, parameter in seen.parameters:
        if (does := weight_reason(parameter)) is not None:
            return f"parameter {name} is a {_full_name(parameter)}: a layer that multiplies with it {does}"
        inner = inner_tensors(parameter)
        if inner is None:
            return f"parameter {name} is a {_full_name(parameter)}, whose bytes cannot be watched for changes"
        for tensor in inner:
            if (reason := _memory_reason(tensor)) is not None:
                return f"parameter {name} {reason}"
            if tensor.device.type == "meta":
                return f"parameter {name} is on the meta device (offloaded?)"
            found.add(tensor.device)
    for name, buffer in seen.executor.model.named_buffers():
        if (reason := _memory_reason(buffer)) is not None:
            return f"buffer {name} {reason}"
        found.add(buffer.device)
    if len(found) > 1:
        return f"parameters and buffers are on several devices: {sorted(map(str, found))}"
    return unwatchable(plain_tensors(seen.modules), next(iter(found), torch.device("cpu")))


def _memory_reason(tensor: torch.Tensor) -> str | None:
    """Why the tensor cannot be read where it lies, or None."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided or not tensor.numel():
        return None
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed, has = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if has >= needed:
        return None
    return f"has {f'{has} of {needed} bytes' if has else 'no'} memory: its storage was resized"


def _require_grad(module: Any, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def _only_requires_grad(hook: Any) -> bool:
    """The hook of `enable_input_require_grads` and its twins in PEFT and TRL: without gradients it does nothing."""
    if not isinstance(hook, FunctionType):
        return False
    code, known = hook.__code__, _require_grad.__code__
    return all(getattr(code, part) == getattr(known, part) for part in ("co_code", "co_names", "co_consts"))


def _is_inert(hook: Any) -> bool:
    return _only_requires_grad(hook) or only_captures(hook)


def _hook_reason(seen: Seen) -> str | None:
    if "ct_decompress_hook" in vars(seen.executor.model):
        return "compressed-tensors decompresses the weights in the first forward, which stock has to run"
    for name, module in seen.modules:
        if module._forward_pre_hooks or not all(map(_is_inert, module._forward_hooks.values())):
            return f"{name or 'the model'} has a forward hook"
        if nn.utils.parametrize.is_parametrized(module):
            return f"{name} is parametrized"
    return None


def _dtype_reason(seen: Seen) -> str | None:
    spec = seen.executor.kv_spec()
    if spec.compute_dtype not in COMPUTE_DTYPES:
        return f"weights of dtype {spec.compute_dtype}"
    norms = [(name, m) for name, m, _ in seen.own if not seen.executor.may_have_float_weight(m)]
    for name, module in norms + seen.called:
        layer = getattr(module, "base_layer", module)
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, torch.Tensor) or stores_float8(layer, weight):
            continue
        if weight.is_floating_point() and weight.dtype != spec.compute_dtype:
            return f"mixed dtypes: {name} is {weight.dtype}, the embedding {spec.compute_dtype}"
    device = spec.device.type
    if torch.is_autocast_enabled(device):
        # Adapters too: autocast would round what an fp32 adapter on bf16 weights computes.
        dtypes = {p.dtype for _, p in seen.parameters if p.is_floating_point()}
        if dtypes != {torch.get_autocast_dtype(device)}:
            return f"autocast to {torch.get_autocast_dtype(device)} while the weights are {sorted(map(str, dtypes))}"
    return None


def _train_mode_reason(seen: Seen) -> str | None:
    for name, module in seen.modules:
        if not module.training:
            continue
        if getattr(module, "gradient_checkpointing", False):
            return f"{name} checkpoints activations in train mode, where stock's layers forget their KV cache"
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"{name} drops out in train mode"
        if getattr(module, "attention_dropout", 0.0):
            return f"{name} has attention dropout in train mode"
        if getattr(module, "jitter_noise", 0.0):
            return f"{name} has jitter noise in train mode"
    return None
