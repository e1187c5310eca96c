"""Linear layers of a dense decoder, grouped by input: looked up once, and read at the speed of C."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from hf_paged.models.plain_linear import is_plain_linear

_HOOKS, _PRE_HOOKS = map(operator.itemgetter, ("_forward_hooks", "_forward_pre_hooks"))


class LinearGroups:
    """Linear layers by name, as they were found in some modules; valid while `hold` returns True.

    Looking up a few hundred layers by their attributes takes longer than enqueueing the work on them. The layers and
    what they hold stay alive as long as this object does.

    Args:
        by_name: layers, grouped by input.
        through: the modules in whose children the layers were found.
        others: further objects that the search depended on, compared by identity.
    """

    def __init__(self, by_name: Mapping[str, tuple[Any, ...]], through: Iterable[nn.Module] = (),
                 others: Iterable[object] = ()) -> None:
        self.by_name = by_name
        self._children: list[dict] = [module._modules for module in through]
        self._names, self._inside = self._found()
        self._others = list(others)
        self._layers = list(chain.from_iterable(by_name.values()))
        self._spaces = list(map(vars, self._layers))
        # For each group its weights, then its biases.
        self._places = [(vars(layer), kind) for layers in by_name.values() for kind in ("weight", "bias")
                        for layer in layers]
        self.sizes = [(name, 2 * len(layers)) for name, layers in by_name.items()]  # of the groups in `tensors`
        self._asked: tuple | None = None
        self._can_be_copied = False

    def hold(self, others: Iterable[object] = ()) -> bool:
        """Return whether the same layers would be found now; parameters, hooks and classes are read anew anyway."""
        if not all(map(operator.is_, self._others, others)):
            return False
        names, inside = self._found()
        return names == self._names and all(map(operator.is_, inside, self._inside))

    def _found(self) -> tuple[list[str], list[Any]]:
        return list(chain.from_iterable(self._children)), list(chain.from_iterable(map(dict.values, self._children)))

    def tensors(self) -> list[torch.Tensor | None]:
        """Return for each group all weights, then all biases, as they are now; None for a layer without."""
        return [space["_parameters"].get(kind) for space, kind in self._places]

    def can_be_copied(self) -> bool:
        """Return whether all are plain layers of an unsharded model, with biases in all or in none of each group."""
        spaces, tensors = self._spaces, self.tensors()
        asked = (  # all that the result depends on
            list(map(type, self._layers)), list(map(len, spaces)),
            list(map(operator.contains, spaces, repeat("forward"))),
            list(map(len, map(_HOOKS, spaces))), list(map(len, map(_PRE_HOOKS, spaces))),
            list(map(type, tensors)), [None if t is None else t.dtype for t in tensors],
        )
        if asked != self._asked:
            self._can_be_copied = all(map(_can_be_copied, self.by_name.values()))
            self._asked = asked
        return self._can_be_copied


def _can_be_copied(linears: tuple[nn.Module, ...]) -> bool:
    plain = all(type(linear) is nn.Linear and is_plain_linear(linear) for linear in linears)
    return plain and len({linear.bias is None for linear in linears}) == 1
