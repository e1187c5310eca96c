"""Comparison of a model's modules and hooks with earlier ones; it runs in every eager step, so it is quick."""

from __future__ import annotations

import operator
from itertools import chain, repeat

from torch import nn


class ModuleSnapshot:
    """Record of the modules in a root: while it `holds`, earlier look-ups in them are valid, but for parameters."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._root = root._modules  # the dict does not keep the root alive
        self._spaces = list(map(vars, modules))
        self._children = [module._modules for module in modules if module._modules]
        self._inside = list(chain.from_iterable(map(dict.values, self._children)))
        # PEFT's hooks on a LoRA layer come and go; the layer is called as it stands.
        before = [module._forward_pre_hooks for module in modules if "lora_A" not in module._modules]
        self._hooks = [*(module._forward_hooks for module in modules), *before]
        self._counts, self._replaced = self._count_hooks(), self._replaced_forwards()

    def holds(self, root: nn.Module) -> bool:
        """Return whether this is the root, and no module, forward of an instance or number of hooks changed."""
        if root._modules is not self._root:
            return False
        inside = list(chain.from_iterable(map(dict.values, self._children)))
        return (
            len(inside) == len(self._inside) and all(map(operator.is_, inside, self._inside))
            and self._count_hooks() == self._counts and self._replaced_forwards() == self._replaced
        )

    def _count_hooks(self) -> list[int]:
        return list(map(len, self._hooks))

    def _replaced_forwards(self) -> list[bool]:
        return list(map(operator.contains, self._spaces, repeat("forward")))
