"""Stand-ins of bitsandbytes' 4-bit layers and of PEFT's LoRA over them, where bitsandbytes is not installed."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from support import tiny_model
from torch import nn

BLOCK, NESTED_BLOCK = 32, 256
CODE = torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
                     0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0])


class QuantState:
    """Settings and scales of a weight, or of the scales of a weight (`state2`)."""

    def __init__(self, absmax: torch.Tensor, code: torch.Tensor, blocksize: int, **settings: Any) -> None:
        self.absmax, self.code, self.blocksize = absmax, code, blocksize
        self.shape = self.dtype = self.quant_type = self.offset = self.state2 = None
        self.__dict__.update(settings)
        self.nested = self.state2 is not None

    def scales(self) -> torch.Tensor:
        if self.state2 is None:
            return self.absmax
        nested = self.state2
        which = torch.arange(len(self.absmax)) // nested.blocksize
        return nested.code[self.absmax.long()] * nested.absmax[which] + self.offset


class Params4bit(nn.Parameter):
    """Bytes, with a `quant_state` beside them."""

    def __deepcopy__(self, memo: dict) -> Params4bit:
        copied = Params4bit(self.data.clone(), requires_grad=False)
        copied.quant_state = copy.deepcopy(self.quant_state)
        return copied


class Linear4bit(nn.Linear):
    """A linear layer of 16 levels a block; multiplies in the compute dtype, and hands on its input's dtype."""

    def __init__(self, linear: nn.Linear, nested: bool = False, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.bias = linear.bias
        self.compute_dtype, self.compute_type_is_set, self.quant_state = compute_dtype, True, None
        self.quantize(linear.weight.detach(), nested)

    def quantize(self, weight: torch.Tensor, nested: bool = False) -> None:
        blocks = weight.float().reshape(-1, BLOCK)
        scales = blocks.abs().amax(1)
        numbers = ((blocks / scales[:, None])[..., None] - CODE).abs().argmin(-1).flatten().to(torch.uint8)
        state = QuantState(scales, CODE.clone(), BLOCK)
        if nested:
            offset, code = scales.mean(), torch.linspace(-1, 1, 256)
            rest = (scales - offset).split(NESTED_BLOCK)
            largest = torch.stack([part.abs().max() for part in rest])
            absmax = torch.cat([((part / most)[:, None] - code).abs().argmin(-1)
                                for part, most in zip(rest, largest, strict=True)]).to(torch.uint8)
            state = QuantState(absmax, CODE.clone(), BLOCK, offset=offset,
                               state2=QuantState(largest, code, NESTED_BLOCK))
        state.shape, state.dtype, state.quant_type = weight.shape, weight.dtype, "nf4"
        self.weight = Params4bit((numbers[::2] << 4 | numbers[1::2])[:, None], requires_grad=False)
        self.weight.quant_state = state

    def dequantized(self) -> torch.Tensor:
        state, data = self.weight.quant_state, self.weight.data.flatten().as_subclass(torch.Tensor)
        values = state.code[torch.stack([data >> 4, data & 15], 1).flatten().long()].view(-1, BLOCK)
        return (values * state.scales()[:, None]).view(state.shape).to(self.compute_dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return nn.functional.linear(hidden.to(self.compute_dtype), self.dequantized(), bias).to(hidden.dtype)


QuantState.__module__ = "bitsandbytes.functional"
Params4bit.__module__ = Linear4bit.__module__ = Linear4bit.forward.__module__ = "bitsandbytes.nn.modules"


def install(monkeypatch: Any) -> None:
    """Let the stand-in be the class that bitsandbytes would bring."""
    _install(monkeypatch, Linear4bit)


def _install(monkeypatch: Any, kind: type) -> None:
    home = ModuleType(kind.__module__)
    home.__file__, home.Linear4bit = __file__, kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)


def install_lora(monkeypatch: Any) -> type:
    """Let a stand-in be PEFT's LoRA layer over `Linear4bit`; returns its class."""
    from peft.tuners.lora.layer import Linear

    class LoraLinear4bit(Linear):
        """With the forward of `peft.tuners.lora.bnb.Linear4bit`, as of PEFT 0.21."""

        def forward(self, x: torch.Tensor, *args: Any, adapter_names: Any = None, **kwargs: Any) -> torch.Tensor:
            if adapter_names is not None:
                return self._mixed_batch_forward(x, *args, adapter_names=adapter_names, **kwargs)
            result = self.base_layer(x, *args, **kwargs)
            if self.disable_adapters or self.merged:
                return result
            for name in self.active_adapters:
                if name not in self.lora_A:
                    continue
                converts, dtype = not torch.is_autocast_enabled(), result.dtype
                if converts:
                    x = self._cast_input_dtype(x, self.lora_A[name].weight.dtype)
                output = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
                result = result + (output.to(dtype) if converts else output)
            return result

    LoraLinear4bit.__module__ = LoraLinear4bit.forward.__module__ = "peft.tuners.lora.bnb"
    LoraLinear4bit.__name__ = LoraLinear4bit.__qualname__ = "Linear4bit"
    LoraLinear4bit.forward.__qualname__ = "Linear4bit.forward"
    _install(monkeypatch, LoraLinear4bit)
    return LoraLinear4bit


def quantize(model: Any, nested: bool = False, compute_dtype: torch.dtype = torch.float32) -> Any:
    """Quantize the linear layers of the decoder layers, those inside of LoRA layers too, which change their class."""
    for layer in model.get_base_model().model.layers if hasattr(model, "get_base_model") else model.model.layers:
        for name, linear in list(layer.named_modules()):
            if type(linear) is nn.Linear and "lora_" not in name:
                layer.set_submodule(name, Linear4bit(linear, nested, compute_dtype))
    return model


def qlora(monkeypatch: Any, compute_dtype: torch.dtype = torch.float32, **shape: int) -> Any:
    """Return a model of 4-bit layers with two adapters; in `compute_dtype` but for the adapters."""
    pytest.importorskip("peft")
    from lora_models import with_adapter

    kind = install_lora(monkeypatch)
    model = with_adapter(tiny_model(hidden_size=64, intermediate_size=128, **shape).to(compute_dtype))
    model = with_adapter(model, "second", 6, r=9)
    for module in model.modules():
        if type(module).__name__ == "Linear" and hasattr(module, "lora_A"):
            module.__class__ = kind
    return quantize(model, compute_dtype=compute_dtype)
