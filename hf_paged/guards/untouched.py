"""Is a model made of the same modules as before, with the same hooks? Asked in every eager step, so it is quick."""

from __future__ import annotations

import operator
from itertools import chain, repeat

from torch import nn


class Untouched:
    """What was looked up of the modules in a root when this was made is so while it `holds`; parameters aside."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._root = root._modules  # which does not keep it alive
        self._spaces = list(map(vars, modules))
        self._children = [module._modules for module in modules if module._modules]
        self._inside = list(chain.from_iterable(map(dict.values, self._children)))
        # A LoRA layer is called as it stands, whatever hooks PEFT has on it.
        before = [module._forward_pre_hooks for module in modules if "lora_A" not in module._modules]
        self._hooks = [*(module._forward_hooks for module in modules), *before]
        self._counts, self._replaced = self._count_hooks(), self._replaced_forwards()

    def holds(self, root: nn.Module) -> bool:
        """Is this the root, nothing was put in place of a module or of its forward, and no hook came or went?"""
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
