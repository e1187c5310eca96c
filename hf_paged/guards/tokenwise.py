"""Tables of layers that compute each token alone, whatever else the batch holds: by class and quantization settings.

Classes are listed by name, so that no package is imported, also no package that is not installed. A layer that is in no
table may read other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hf_paged.guards.quantized import PLAIN, made_of

SHARDED_MODULE = "hf_paged.parallel.layers."
# Python modules, and classes, whose layers compute each token by itself, whatever else the batch holds.
TOKENWISE_MODULES = (
    "torch.nn.modules.linear.", "torch.nn.modules.sparse.", "transformers.pytorch_utils.", "transformers.integrations.",
    "peft.tuners.lora.", "peft.utils.other.ModulesToSaveWrapper.", "bitsandbytes.nn.", "optimum.quanto.nn.qlinear.",
    SHARDED_MODULE,
)
_LARGEST = "scales activations by the largest of all rows"
# Layers that read other rows, by the end of their class's full name or by their package.
BATCH_DEPENDENT = {
    ".Linear8bitLt": "finds outlier columns over all rows (LLM.int8)",
    ".NVFP4Linear": _LARGEST,
    "torch.ao.nn.quantized.dynamic.": _LARGEST,
    "torch.ao.nn.intrinsic.quantized.dynamic.": _LARGEST,
}
# Strategies of compressed-tensors that scale each row, or groups in a row, by itself; and strategies for fixed scales.
_OF_A_ROW, _FIXED = ("token", "group", "tensor_group"), ("tensor", "group", "tensor_group")
UNKNOWN = "may look at batch rows"


def row_mixing_of_class(kind: type[nn.Module]) -> str | None:
    """Return what a layer of this class does, or may do, with other rows; None if nothing."""
    name = f"{kind.__module__}.{kind.__name__}"
    for key, does in BATCH_DEPENDENT.items():
        if name.startswith(key) or name.endswith(key):
            return does
    return None if f"{name}.".startswith(TOKENWISE_MODULES) else UNKNOWN


def row_mixing_of_layer(layer: nn.Module) -> str | None:
    """Return the same as `row_mixing_of_class`, for one layer."""
    if (does := row_mixing_of_class(type(layer))) is not None:
        return does
    return "hands on rounded activations" if vars(layer).get("activation_qtype") is not None else None


def stores_float8(layer: nn.Module, weight: torch.Tensor) -> bool:
    """Return whether float8 is only the dtype that the weight is stored in, not the one that the layer computes in."""
    return type(layer).__name__ == "CompressedTensorsFP8Linear" and weight.dtype.itemsize == 1


def row_mixing_of_weight(weight: torch.Tensor) -> str | None:
    """Return what a layer with a weight of this class does with other rows; None if nothing."""
    kind = type(weight)
    if kind in PLAIN or kind.__module__.startswith("bitsandbytes."):
        return None
    for package, name, reason_of in _WEIGHTS:
        if kind.__module__.startswith(package) and kind.__name__ == name:
            return reason_of(weight)
    return UNKNOWN


def row_mixing_of_scheme(module: nn.Module) -> str | None:
    """Return the same as `row_mixing_of_class`, for a module with compressed-tensors' forward, by its scheme."""
    scheme = vars(module).get("quantization_scheme")
    for args in (getattr(scheme, "input_activations", None), getattr(scheme, "output_activations", None)):
        if args is None or args.strategy in (_OF_A_ROW if args.dynamic else _FIXED):
            continue
        strategy = getattr(args.strategy, "value", args.strategy)
        does = _LARGEST if args.dynamic and strategy == "tensor" else UNKNOWN
        return f"{does} (compressed-tensors, strategy {strategy!r}, dynamic={args.dynamic})"
    return None


def quantization_state(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple]:
    """Return the settings of the quantized layers among these modules, on which a forward depends besides tensors."""
    found: list[tuple] = []
    for name, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and (of := made_of(parameter)) is not None:
                found.append((name, key, of))
        held = vars(module)
        found += [(name, key, held[key]) for key in _SETTINGS if key in held]
    return found


# Attributes that compressed-tensors and optimum-quanto set on a module and read in its forward.
_SETTINGS = ("quantization_scheme", "quantization_status", "quantization_enabled", "weight_qtype", "weight_group_size")


def _of_torchao(weight: Any) -> str | None:
    """Check Int8Tensor and Float8Tensor: `act_quant_kwargs` sets how activations are rounded; None: not at all."""
    kwargs = weight.act_quant_kwargs
    if kwargs is None:
        return None
    granularity, scale = kwargs.granularity, getattr(weight, "act_quant_scale", None)
    kind = type(granularity).__name__
    if kind == "PerTensor":
        return None if scale is not None and scale.numel() == 1 else f"{_LARGEST} (torchao, PerTensor)"
    if scale is None and (kind == "PerToken" or (kind == "PerRow" and granularity.dim == -1)):
        return None
    return f"{UNKNOWN} (torchao, {granularity})"


def _of_torchaos_integers(weight: Any) -> str | None:
    """Check IntxUnpackedToInt8Tensor: `activation_quantization` is None or a method's name."""
    way = getattr(weight.activation_quantization, "value", weight.activation_quantization)
    return None if way in (None, "int8_asym_per_token") else f"{UNKNOWN} (torchao, {way})"


# Quantized weights that a linear layer or an embedding may have: package, class, and the function that checks them.
_WEIGHTS: tuple[tuple[str, str, Callable[[Any], str | None]], ...] = (
    ("torchao.", "Int8Tensor", _of_torchao),
    ("torchao.", "Float8Tensor", _of_torchao),
    ("torchao.", "IntxUnpackedToInt8Tensor", _of_torchaos_integers),
    # A weight of quanto is only multiplied with; if activations are rounded, hooks of the module do it.
    ("optimum.quanto.", "WeightQBytesTensor", lambda weight: None),
    ("optimum.quanto.", "WeightQBitsTensor", lambda weight: None),
)
