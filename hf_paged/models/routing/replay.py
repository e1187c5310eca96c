"""A trainer's forwards with the routes of the sampler: a store of rollouts, and hooks on a decoder and its routers.

The decoder's hook looks each row's token ids up and sets the routes of the forward; the routers' hooks choose by them.
In a backward pass layers whose activations are computed again choose as in its forward: that of the decoder's result
which the pass began with, or the last one. Outside of both, and in steps of engines, routers choose freely.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hf_paged.errors import FallbackWarning
from hf_paged.guards.hooks import ReplayHook
from hf_paged.models.base import RoutesShape
from hf_paged.models.paged_calls import is_in_step
from hf_paged.models.routing.record import UNKNOWN, Choice, no_choice, routers_of, shape_of
from hf_paged.process_lock import ProcessLock

MOST_BYTES = 1 << 30  # of routes in a store: more than a million tokens of a model with 48 layers and 8 experts a token
_NO_PASS = -1  # number of no backward pass
_CACHES = ("past_key_values", "cache")
_FREE = ("hf_paged: a forward of the model got a row of which no completion has the routes, and which routes freely "
         "(later ones are counted without a warning: EngineStats.num_rows_not_replayed). Rows are found by their "
         "tokens: input_ids without padding, which begin as a prompt and its output did.")


class RouteStore:
    """Routes of the last completions by their token ids and the names of the adapters that were active.

    Args:
        most_bytes: the oldest are dropped if routes take more.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._routes: OrderedDict[tuple[tuple[str, ...], bytes], torch.Tensor] = OrderedDict()
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._lock = ProcessLock()  # completions come from an engine's thread

    def keep(self, tokens: list[int], routes: torch.Tensor, adapters: tuple[str, ...] = ()) -> None:
        """Add the routes [tokens, layers, k] of a prompt and its output; those of the same tokens are replaced."""
        key = adapters, np.asarray(tokens, np.int32).tobytes()
        with self._lock.rlock:
            if (old := self._routes.pop(key, None)) is not None:
                self._num_bytes -= old.nbytes
            self._routes[key] = routes.clone()  # a caller may write to the completion's
            self._num_bytes += routes.nbytes
            while self._num_bytes > self._most_bytes:
                self._num_bytes -= self._routes.popitem(last=False)[1].nbytes

    def find(self, tokens: np.ndarray, adapters: tuple[str, ...] = ()) -> torch.Tensor | None:
        """Return the routes of these tokens, or of the last completion that begins with them; None if there is none."""
        key = tokens.astype(np.int32).tobytes()
        with self._lock.rlock:
            if (exact := self._routes.get((adapters, key))) is not None:
                return exact
            return next((routes[: len(tokens)] for (active, known), routes in reversed(self._routes.items())
                         if active == adapters and known.startswith(key)), None)


class _Forward(threading.local):
    routes: torch.Tensor | None = None


class ReplayCounts(NamedTuple):
    """Rows of forwards that took recorded routes, and rows that routed freely since there were none of them."""

    num_replayed: int
    num_free: int


class Replay:
    """Hooks on a model's decoder and its routers, which take routes from a store. Does not keep the model alive.

    Forwards with a cache (generation) and forwards with all adapters disabled (a reference model's) route freely.
    Routes of other adapters than the active ones, and of routers that were exchanged since, count as unknown.

    Args:
        owner: whose end takes the hooks off.
    """

    def __init__(self, decoder: nn.Module, owner: object = None) -> None:
        routers = routers_of(decoder)
        shape = shape_of(routers)
        assert shape is not None
        self.store = RouteStore()
        self.counts = ReplayCounts(0, 0)
        self._shape: RoutesShape = shape
        self._decoder, self._routers = weakref.ref(decoder), tuple(map(weakref.ref, routers.values()))
        # Routes [rows * columns, layers, k]: of the forward that a thread runs, of the last one with gradients, and of
        # the forward whose backward pass began last, with the number of that pass.
        self._forward = _Forward()
        self._last: torch.Tensor | None = None
        self._backward: tuple[int, torch.Tensor | None] = _NO_PASS, None
        self._handles = [
            decoder.register_forward_pre_hook(ReplayHook(decoder, self._before), with_kwargs=True),
            decoder.register_forward_hook(ReplayHook(decoder, self._after), always_call=True)]
        self._handles += [router.register_forward_hook(ReplayHook(router, partial(self._choose, layer)),
                                                       with_kwargs=True)
                          for layer, router in enumerate(routers.values())]
        if owner is not None:
            weakref.finalize(owner, self.remove)

    def keep(self, tokens: list[int], routes: torch.Tensor, adapter: str | None) -> None:
        """Keep the routes of a completion; ``adapter``: the name that its request gave, None: the active ones ran."""
        decoder = self._decoder()
        assert decoder is not None, "an engine keeps its model"
        adapters = active_adapters(decoder) if adapter is None else (adapter,)
        if adapters is not None:
            self.store.keep(tokens, routes, adapters)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self.store, self._last, self._backward = RouteStore(), None, (_NO_PASS, None)

    def _before(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._forward.routes = None if is_in_step() else self._routes_for(decoder, args, kwargs)
        if torch.is_grad_enabled():
            self._last = self._forward.routes

    def _routes_for(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the routes of a forward with these arguments; None if it routes freely."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        adapters = active_adapters(decoder)
        if any(kwargs.get(name) is not None for name in _CACHES) or adapters is None:
            return None
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:  # embeddings
            self._count(0, 1)
            return None
        if not self._has_its_routers(decoder):
            self._count(0, len(ids))
            return None
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if mask is None:
            mask = torch.ones_like(ids)
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            return self._routes_of(ids, mask.bool(), adapters)
        self._count(0, len(ids))
        return None

    def _has_its_routers(self, decoder: nn.Module) -> bool:
        """Return whether the decoder's routers are those with hooks, and choose as many experts as then."""
        now = routers_of(decoder)
        return shape_of(now) == self._shape and all(
            router is ref() for router, ref in zip(now.values(), self._routers, strict=True))

    def _routes_of(self, ids: torch.Tensor, real: torch.Tensor, adapters: tuple[str, ...]) -> torch.Tensor | None:
        """Return the routes of a batch on its device; None if no row has any."""
        tokens, is_real = ids.cpu().numpy(), real.cpu().numpy()
        routes = torch.full((*ids.shape, *self._shape[:2]), UNKNOWN, dtype=torch.int16, device="cpu")
        found = 0
        for row in range(len(tokens)):
            if (known := self.store.find(tokens[row][is_real[row]], adapters)) is not None:
                routes[row, is_real[row]] = known
                found += 1
        self._count(found, len(tokens) - found)
        return routes.flatten(0, 1).to(ids.device) if found else None

    def _count(self, num_replayed: int, num_free: int) -> None:
        before = self.counts
        self.counts = ReplayCounts(before.num_replayed + num_replayed, before.num_free + num_free)
        if num_free and not before.num_free:
            warnings.warn(_FREE, FallbackWarning, stacklevel=2)

    def _after(self, decoder: nn.Module, args: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(partial(self._begin_backward, self._forward.routes))
        self._forward.routes = None

    def _begin_backward(self, routes: torch.Tensor | None, gradient: torch.Tensor) -> None:
        self._backward = _number_of_pass(), routes

    def _routes_now(self) -> torch.Tensor | None:
        """Return the routes of the forward or backward pass that this thread runs."""
        if (number := _number_of_pass()) == _NO_PASS:
            return self._forward.routes
        known, routes = self._backward
        return routes if known == number else self._last

    def _choose(self, layer: int, router: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        """Run the router's forward again, with the experts chosen; returns None if it routes freely."""
        routes = self._routes_now()
        if routes is None:
            return None
        with Choice(router, routes[:, layer]) as choice:
            chosen = router.forward(*args, **kwargs)
        if choice.chosen is None:
            raise no_choice("replay_routes", router)
        return chosen


def _number_of_pass() -> int:
    """Return the number of the backward pass that this thread works for."""
    return torch._C._current_graph_task_id()


def active_adapters(decoder: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the active adapters of LoRA, none without adapters; None if all of them are disabled."""
    adapted: list[Any] = [module for module in decoder.modules() if "lora_A" in module._modules]
    if adapted and all(module.disable_adapters for module in adapted):
        return None
    return tuple(dict.fromkeys(name for module in adapted for name in module.active_adapters))
