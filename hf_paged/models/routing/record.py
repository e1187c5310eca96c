"""Routes: the experts that routers choose for each token, recorded in steps and forced in later forwards.

A router is known by its class's name, an integer `top_k` and a matrix of weights, one row an expert. Of its forward
only the choice is seen, or replaced: the last `topk` over all experts. What is computed of the chosen experts stays the
module's own, so a forced choice has scores, and gradients, of the present logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_paged.models.base import RoutesShape, StepContext

_TOPK = (torch.topk, torch.Tensor.topk)
_OF_BYTES = 256  # experts whose numbers fit into a byte
UNKNOWN = -1  # in place of an expert's number: of a token whose route was not recorded


class Choice(TorchFunctionMode):
    """Mode around a router's forward that sees which experts it chooses, or chooses ``forced`` ones.

    Args:
        router: the router.
        forced: [T, k] experts of each row; the row's own where the first is `UNKNOWN`. None: all rows' own.

    Attributes:
        chosen: [T, k] int64; None until the router has chosen.
    """

    def __init__(self, router: Any, forced: torch.Tensor | None = None) -> None:
        super().__init__()
        self._num_experts, self._top_k, self._forced = len(router.weight), router.top_k, forced
        self.chosen: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or result[1].dim() != 2:
            return result
        values = args[0] if args else kwargs["input"]
        if values.shape[-1] != self._num_experts or result[1].shape[-1] != self._top_k:
            return result
        self.chosen = result[1]
        if self._forced is None:
            return result
        if len(self._forced) != len(values):
            raise RuntimeError(f"replay_routes: a router got {len(values)} tokens, and its decoder {len(self._forced)}")
        self.chosen = torch.where(self._forced[:, :1] == UNKNOWN, result[1], self._forced.long())
        return torch.return_types.topk((values.gather(-1, self.chosen), self.chosen))


def routers_of(module: nn.Module) -> dict[str, Any]:
    """Return the routers inside of a module by path, in the module's order."""
    return {path: inner for path, inner in module.named_modules() if _is_router(inner)}


def names_routers(module: nn.Module) -> bool:
    """Return whether a class inside of a module is called a router, known or not."""
    return any(map(_is_named, module.modules()))


def _is_router(module: Any) -> bool:
    weight = module._parameters.get("weight")
    return _is_named(module) and type(getattr(module, "top_k", None)) is int and (
        weight is not None and weight.dim() == 2)


def _is_named(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router")


def shape_of(routers: Mapping[str, Any]) -> RoutesShape | None:
    """Return the shape of a token's routes; None if routers choose unlike numbers of experts, or if there are none."""
    if len({router.top_k for router in routers.values()}) != 1:
        return None
    top_k = next(iter(routers.values())).top_k
    is_small = all(len(router.weight) <= _OF_BYTES for router in routers.values())
    return RoutesShape(len(routers), top_k, torch.uint8 if is_small else torch.int16)


class RouteRecorder:
    """Writes the routes of a step's tokens to the slots of their keys and values.

    ``plane``: `KVCache.routes`. Tokens whose keys and values are not stored write into the null block, which no request
    reads.
    """

    def __init__(self, step: StepContext) -> None:
        self._plane = step.cache.routes.flatten(0, 1)
        self._slots = step.slot_mapping.clamp(min=0)

    def of_layer(self, layer: int) -> Callable[[torch.Tensor], None]:
        """Return the function that takes the experts [T, k] of the n-th layer with a router."""
        return partial(self._record, layer)

    def _record(self, layer: int, experts: torch.Tensor) -> None:
        self._plane.select(1, layer).index_put_((self._slots,), experts.to(self._plane.dtype))

    def forwards(self, routers: Mapping[str, Any], others: Mapping[str, Callable[..., Any]]) -> dict[
            str, Callable[..., Any]]:
        """Return forwards that run in place of those of modules, by path: ``others``, and routers that record.

        A forward among ``others`` of a router returns experts as its third result.
        """
        found = dict(others)
        for layer, (path, router) in enumerate(routers.items()):
            found[path] = recording(router, self.of_layer(layer), others.get(path))
        return found


def recording(router: Any, record: Callable[[torch.Tensor], None],
              other: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a forward of a router, its own or an ``other``, that hands the chosen experts to ``record``."""
    def forward(*args: Any, **kwargs: Any) -> Any:
        if other is not None:
            result = other(*args, **kwargs)
            record(result[2])
            return result
        with Choice(router) as choice:
            result = router.forward(*args, **kwargs)
        if choice.chosen is None:
            raise no_choice("routed_experts", router)
        record(choice.chosen)
        return result

    return forward


def no_choice(option: str, router: Any) -> RuntimeError:
    """Return the error of an option for a router in whose forward no choice of experts was seen."""
    return RuntimeError(f"{option}: a {type(router).__name__} chooses experts by other means than topk over all of "
                        "them. Leave the option out")
