"""A small copy of a model on the CPU, in float64, with random weights that hide nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.models.proof.interface import configs_of
from hf_paged.models.proof.verdict import Refused

MOST_PARAMETERS = 30_000_000


class Double(TorchFunctionMode):
    """Computes in float64 where code of this thread says float32: no rounding hides a small term."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return func(*args, **{name: torch.float64 if value is torch.float32 else value
                              for name, value in (kwargs or {}).items()})


class OwnRandomness(TorchDispatchMode):
    """Draws random numbers from a generator of its own: the process's generator, which others use, stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            func = self._with_generator(func)
            kwargs["generator"] = self._generator
        return func(*args, **kwargs)

    def _with_generator(self, func: Any) -> Any:
        packet = func.overloadpacket
        names = (func._overloadname, "generator", f"{func._overloadname}_generator")
        found: Iterator[Any] = (getattr(packet, name) for name in names if name in packet.overloads())
        for one in found:
            if any(argument.name == "generator" for argument in one._schema.arguments):
                return one
        raise Refused(f"a constructor draws random numbers by {func}, which takes no generator")


class NoRandomness(TorchDispatchMode):
    """Raises `Refused` at an operation that draws random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            raise Refused(f"a forward in eval mode draws random numbers ({func})")
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Return whether a call draws random numbers: attention does so for a dropout above 0 alone."""
    for place, argument in enumerate(func._schema.arguments):
        if "dropout" in argument.name:
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return given != 0
    return True


def on_meta(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model without weights, of a copy of a config."""
    with torch.device("meta"):
        return cls(copy.deepcopy(config)).eval()


def clone_of(cls: type[PreTrainedModel], small: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Return a model of a reduced config, with random weights, that attends by stock's implementation `attention`."""
    if (size := sum(weight.numel() for weight in on_meta(cls, small).parameters())) > MOST_PARAMETERS:
        raise Refused(f"a clone with small sizes has {size / 1e6:.0f}M parameters: the config has sizes under names "
                      "that are not known")
    with OwnRandomness():
        model = cls(copy.deepcopy(small))
    _fill(model)
    model.double().eval()
    for config in configs_of(model):
        config._attn_implementation_internal = attention
        config._experts_implementation_internal = "eager"  # grouped products take no float64
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.eos_token_id = generation.forced_eos_token_id = None
        generation.pad_token_id = 0
    return model


def _fill(model: PreTrainedModel) -> None:
    """Fill weights so that each one shows: no zero bias, no norm's weight of one, activations of order one."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in _weights(model):
            leaf = name.rsplit(".", 1)[-1]
            normal = torch.randn(weight.shape, generator=generator)
            if (weight.dim() >= 2 and "embed" in name.lower()) or name.endswith(("wte.weight", "wpe.weight")):
                weight.copy_(normal)
            elif weight.dim() >= 2:
                weight.copy_(normal * 1.2 / math.sqrt(weight.shape[-1]))
            elif leaf == "weight" or "scale" in leaf or "norm" in leaf:
                weight.copy_(0.6 + 0.8 * torch.rand(weight.shape, generator=generator))
            else:
                weight.copy_(0.3 * normal)


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        path, _, leaf = name.rpartition(".")
        if buffer.is_floating_point() and leaf not in model.get_submodule(path)._non_persistent_buffers_set:
            yield name, buffer
