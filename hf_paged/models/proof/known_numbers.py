"""Numbers of small tensors on the meta device that follow from the positions: conditions may depend on them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_MOST_ELEMENTS = 64


class KnownNumbers(TorchDispatchMode):
    """Computes small tensors on the meta device a second time on the CPU, where all that they are made of is known."""

    def __init__(self, known: torch.Tensor, numbers: torch.Tensor) -> None:
        """Know the numbers of one tensor on the meta device."""
        super().__init__()
        self._known = {id(known): (known, numbers)}  # by id of a tensor, which is kept alive

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        is_known = bool(given) and all(id(one) in self._known for one in given)
        if func is torch.ops.aten._local_scalar_dense.default and is_known:
            return self._numbers(args[0]).item()
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._known.pop(id(given[0]) if given else 0, None)
        elif is_known and isinstance(result, torch.Tensor) and result.numel() <= _MOST_ELEMENTS:
            known_args, known_kwargs = tree_map(self._numbers, (args, kwargs))
            with suppress(IndexError, RuntimeError):  # numbers that the meta device does not look at
                self._known[id(result)] = result, func(*known_args, **known_kwargs)
        return result

    def _numbers(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._known[id(value)][1]
        return "cpu" if isinstance(value, torch.device) else value
