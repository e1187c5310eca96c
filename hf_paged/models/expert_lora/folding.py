"""Experts with PEFT's LoRA on their weights (`ParamWrapper`), run by their own forward on the sums.

PEFT parametrizes the weights for as long as its forward runs: that changes the module's class, and raises the version
counters of weights that did not change. Here a view of the module holds the sums, with PEFT's operations, and nothing
of the model is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_paged.errors import Reason
from hf_paged.guards.hints import UNDO_PATCH, UNDO_REPLACEMENT
from hf_paged.guards.original_classes import patched_class
from hf_paged.models.tuners import inside_wrappers, wraps_experts


def wrappers_of(experts: Any) -> Iterator[Any]:
    """Yield the wrappers around experts, each of which adapts one of their weights, from the outside."""
    while wraps_experts(experts):
        yield experts
        experts = experts.base_layer


def active_adapters(wrapper: Any) -> list[str]:
    """Return the adapters that a forward of the wrapper would add to its weight."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def merged_but_off(wrapper: Any) -> bool:
    """Return whether a forward of the wrapper would take its merged adapters out of the weight."""
    return bool(wrapper.disable_adapters and wrapper.merged)


def outermost_wrappers(modules: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return those modules, with their paths, that are the outermost wrapper around some experts."""
    found = [(path, module) for path, module in modules if wraps_experts(module)]
    inside = {id(module.base_layer) for _, module in found}
    return [(path, module) for path, module in found if id(module) not in inside]


def why_not_wrapped(modules: Iterable[tuple[str, Any]]) -> Reason | None:
    """Return why experts that are wrapped do not run natively, or None; ``modules``: of the model, with their paths."""
    for path, outermost in outermost_wrappers(modules):
        wrappers = list(wrappers_of(outermost))
        if (place := patched_class({type(wrapper) for wrapper in wrappers})) is not None:
            return Reason("{} is patched", place, remedy=UNDO_PATCH)
        if "forward" in vars(inside_wrappers(outermost)):  # a kernel's, which would read the weights without the sums
            return Reason("{} of {} is replaced", "the forward", path, remedy=UNDO_REPLACEMENT)
        for wrapper in wrappers:
            if merged_but_off(wrapper):
                return Reason("{} is merged into {}, whose adapters are switched off",
                              ", ".join(wrapper.merged_adapters), path,
                              remedy="Call `unmerge_adapter()`: what is merged is part of every row.")
    return None


def folded_bytes(decoder: nn.Module) -> int:
    """Return the bytes of the sums that one forward of experts holds at most."""
    found = (sum(inside_wrappers(outermost)._parameters[wrapper.parameter_name].nbytes
                 for wrapper in wrappers_of(outermost))
             for _, outermost in outermost_wrappers(decoder.named_modules()))
    return max(found, default=0)


def folded_layers(decoder: nn.Module) -> set[nn.Module]:
    """Return the matrices of LoRA on experts' weights, whose columns are those of all experts: no token has them."""
    wrappers = (wrapper for _, outermost in outermost_wrappers(decoder.named_modules())
                for wrapper in wrappers_of(outermost))
    return {matrix for wrapper in wrappers for matrix in (*wrapper.lora_A.values(), *wrapper.lora_B.values())}


def folded_weights(outermost: Any) -> dict[str, torch.Tensor]:
    """Return the weights with active adapters by name, each with its updates, rounded as in PEFT's forward."""
    experts = inside_wrappers(outermost)
    found = ((wrapper, active_adapters(wrapper)) for wrapper in wrappers_of(outermost))
    return {wrapper.parameter_name: _folded(wrapper, experts._parameters[wrapper.parameter_name], names)
            for wrapper, names in found if names}


def _folded(wrapper: Any, weight: Any, names: list[str]) -> torch.Tensor:
    if len(names) == 1 and hasattr(wrapper, "get_delta_factors"):  # from PEFT 0.21 on
        left, right, scale = wrapper.get_delta_factors(names[0])
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, left, right, alpha=scale)
    update = wrapper.get_delta_weight(names[0])
    for name in names[1:]:
        update = update + wrapper.get_delta_weight(name)
    result: torch.Tensor = weight + update
    return result


def folded_forward(experts: Any) -> Callable[..., Any]:
    """Return a forward that runs in place of experts' own: the same, where they are wrapped on the sums."""
    if not wraps_experts(experts):
        return experts.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        for wrapper in filter(merged_but_off, wrappers_of(experts)):  # since the call began
            wrapper.unmerge()
        inner = inside_wrappers(experts)
        view: Any = object.__new__(type(inner))
        view.__dict__.update(vars(inner))
        view.__dict__["_parameters"] = {**inner._parameters, **folded_weights(experts)}
        return view(*args, **kwargs)

    return forward
