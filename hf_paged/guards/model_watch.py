"""Watch over a model: the one place where a model is compared with what it was.

`ModelWatch` gives a number each for what a model is made of, where its tensors lie, and what these hold. What was
derived from a model is kept with the number that it was derived for, and derived again if the number differs.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count, repeat
from typing import NamedTuple

import torch
from torch import nn

from hf_paged.guards.quantized import as_dicts, beside_bytes, watched
from hf_paged.guards.snapshot import ModelSnapshot, plain_tensors, tensors_inside

_STORAGE, _NBYTES = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes
_SHAPE, _DTYPE = map(operator.attrgetter, ("shape", "dtype"))
_PARAMETERS = operator.itemgetter("_parameters")


class ModelTensors(NamedTuple):
    """Tensors that a model computes with, in a fixed order; of quantized weights the tensors inside.

    ``weights`` are parameters and tensors in plain attributes. ``buffers`` may name one tensor twice: modules of RoPE
    make one buffer an alias of another without changing what they compute.
    """

    weights: list[torch.Tensor]
    buffers: list[torch.Tensor]


def place_columns(tensors: Sequence[torch.Tensor]) -> list[list]:
    """Return addresses, strides, shapes, dtypes and storage sizes as columns, which is faster than a row per tensor."""
    return [
        list(map(torch.Tensor.data_ptr, tensors)), list(map(torch.Tensor.stride, tensors)),
        list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors)), list(map(_NBYTES, map(_STORAGE, tensors))),
    ]


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the version counters of tensors; inference tensors have none."""
    without = list(map(torch.Tensor.is_inference, tensors))
    return [0 if none else t._version for t, none in zip(tensors, without, strict=True)]


class ModuleSnapshot:
    """Record of the modules in a root, which it keeps alive; it is compared in every eager step, so it is quick."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._root = root._modules  # the dict does not keep the root alive
        self._spaces = list(map(vars, modules))
        self._children = [module._modules for module in modules if module._modules]
        self._inside = list(chain.from_iterable(map(dict.values, self._children)))
        # PEFT's hooks on a LoRA layer come and go; the layer is called as it stands.
        before = [module._forward_pre_hooks for module in modules if "lora_A" not in module._modules]
        self._hooks = [*(module._forward_hooks for module in modules), *before]
        self._known = self._now()

    def holds(self, root: nn.Module) -> bool:
        """Return whether this is the root, and no module, forward of an instance or number of hooks changed."""
        if root._modules is not self._root:
            return False
        inside = list(chain.from_iterable(map(dict.values, self._children)))  # compared by identity, as modules are
        return inside == self._inside and self._now() == self._known

    def parameters(self) -> list[torch.Tensor]:
        held = filter(None, as_dicts(map(_PARAMETERS, self._spaces)))
        return [tensor for tensor in chain.from_iterable(map(dict.values, held)) if tensor is not None]

    def _now(self) -> tuple[list[int], list[bool]]:
        """Return the numbers of hooks, and which instances have a forward of their own."""
        return list(map(len, self._hooks)), list(map(operator.contains, self._spaces, repeat("forward")))


class ModelWatch:
    """Record of a model, compared on demand, with three numbers. Equal numbers mean that nothing of the kind changed
    between them; a number never comes again, even if the model is again what it was.

    * `structure`: modules, hooks, attributes, configs, and the kinds, dtypes, devices and shapes of tensors.
    * `places`: which parameters there are, and the memory of all tensors.
    * `contents`: values of weights, as far as version counters and places tell. Fused optimizers and writes through
      `.data` change neither, so only a checksum is proof (`WeightsGuard`).

    Threads may compare at the same time. Nothing of the model is kept alive but by `watch_modules`.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        # Each with its number, in one tuple: another thread may read between two assignments.
        self._snapshot: tuple[ModelSnapshot | None, int] = None, 0
        self._plain: tuple[list[weakref.ref], int] = [], 0  # plain tensors, with the number of the structure
        self._own: tuple[list[list], int] = [], 0  # places of weights
        self._all: tuple[list[list], int] = [], 0  # of buffers as well
        self._versions: tuple[list[list], int] = [], 0
        self._modules: tuple[ModuleSnapshot, int] | None = None
        self._of_step: tuple[list[list], int] = [], 0
        self._compares_once: int | None = None  # the thread inside of `compared_once`
        self._compared: set[str] = set()  # what that thread compared
        self._tensors: ModelTensors | None = None  # what it found

    @contextmanager
    def compared_once(self) -> Iterator[None]:
        """Let this thread compare the model only once in a block that runs no code of the user."""
        self.compare_again()
        self._compares_once = threading.get_ident()
        try:
            yield
        finally:
            self._compares_once = self._tensors = None

    def compare_again(self) -> None:
        """Compare again inside of `compared_once`, after code of the user ran, or tensors were moved."""
        self._compared, self._tensors = set(), None

    def _is_known(self, what: str) -> bool:
        """Return whether this thread is inside of `compared_once` and compared ``what`` there; the write of another
        thread might undo `compare_again`."""
        return self._compares_once == threading.get_ident() and what in self._compared

    def _remember(self, what: str) -> None:
        if self._compares_once == threading.get_ident():
            self._compared |= {what}

    def structure(self, model: nn.Module) -> int:
        snapshot, number = self._snapshot
        if not self._is_known("structure"):
            if snapshot is None or not snapshot.hold(model):
                number = self._take(model)
            self._remember("structure")
        return number

    def _take(self, model: nn.Module) -> int:
        number = next(self._numbers)
        self._snapshot = ModelSnapshot(model), number
        return number

    def holds_but_for_tensors(self, model: nn.Module, structure: int) -> bool:
        """Return whether `structure` is the last one, and nothing changed but hooks, and tensors within their classes.
        """
        snapshot, number = self._snapshot
        return number == structure and snapshot is not None and snapshot.hold(model, with_tensors=False)

    def watch_modules(self, model: nn.Module) -> int:
        """Let `step_structure` compare with the modules as they are now; returns the number of the last `structure`."""
        self._modules = ModuleSnapshot(model), self._snapshot[1]
        return self._modules[1]

    def step_structure(self, model: nn.Module) -> int:
        """Return the number of the structure as far as modules, numbers of hooks and replaced forwards tell.

        That is the number at `watch_modules`, or a new one if a module changed since.
        """
        known = self._modules
        if known is None or not known[0].holds(model):
            modules = ModuleSnapshot(model)  # first, so that later changes are noticed
            known = modules, self.structure(model) if known is None else self._take(model)
            self._modules = known
        return known[1]

    def step_contents(self, model: nn.Module) -> int:
        """Return a number of the values of all parameters, as far as `step_structure`, places and versions tell."""
        structure = self.step_structure(model)
        assert self._modules is not None
        own = self._modules[0].parameters()
        scales = beside_bytes(own)
        self._of_step = self._numbered(self._of_step, [[structure], list(map(id, own)), *place_columns(own),
                                                       versions(own), list(map(id, scales)), versions(scales)])
        return self._of_step[1]

    def release_modules(self) -> None:
        """Keep no module alive any more, until `watch_modules`."""
        self._modules = None

    def plain_tensors(self, model: nn.Module) -> list[torch.Tensor]:
        """Return tensors of the modules that are neither parameters nor buffers, in a fixed order."""
        structure = self.structure(model)
        if self._plain[1] != structure:
            self._plain = [weakref.ref(t) for _, t in plain_tensors(list(model.named_modules()))], structure
        return [tensor for reference in self._plain[0] if (tensor := reference()) is not None]

    def tensors(self, model: nn.Module) -> ModelTensors:
        if self._tensors is not None and self._compares_once == threading.get_ident():
            return self._tensors
        parameters, buffers = tensors_inside(model)
        found = ModelTensors(watched([*parameters, *self.plain_tensors(model)]), watched(buffers))
        if self._compares_once == threading.get_ident():
            self._tensors = found
        return found

    def places(self, model: nn.Module) -> int:
        if not self._is_known("places"):
            weights, buffers = self.tensors(model)
            with torch._C.DisableTorchFunctionSubclass():
                # A parameter may be another one over the same memory.
                self._own = self._numbered(self._own, [list(map(id, weights)), *place_columns(weights)])
                self._all = self._numbered(self._all, [[self._own[1]], *place_columns(buffers)])
            self._remember("places")
        return self._all[1]

    def contents(self, model: nn.Module) -> int:
        """Return the number of the values of all weights. Buffers count for nothing, since modules of RoPE write theirs
        in every forward."""
        self.places(model)
        if not self._is_known("contents"):
            self._versions = self._numbered(self._versions, [[self._own[1]], versions(self.tensors(model).weights)])
            self._remember("contents")
        return self._versions[1]

    def _numbered(self, known: tuple[list[list], int], now: list[list]) -> tuple[list[list], int]:
        return known if known[0] == now else (now, next(self._numbers))
