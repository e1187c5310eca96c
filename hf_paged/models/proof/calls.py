"""Attention calls of a forward: their modules, shapes, masks and options, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged.models.paged_calls import IGNORED
from hf_paged.models.proof.interface import Masks
from hf_paged.models.proof.mask_kinds import FULL, MaskKind, mask_kind
from hf_paged.models.proof.verdict import Refused


@dataclass(frozen=True)
class AttentionRecord:
    """One attention call: heads and their sizes, and what the attention has to do."""

    module: str  # its path in the model
    mask: MaskKind
    query_heads: int
    key_heads: int
    key_size: int  # of a head, in queries as well
    value_size: int
    scaling: float | None  # None: one over the root of `key_size`
    softcap: float | None
    sinks: bool
    window: int | None = None  # that the module hands down


class Recorder:
    """Attention engine that notes each call and lets `answer` compute it; raises `Refused` for what pages lack."""

    def __init__(self, model: PreTrainedModel, farthest: int, answer: Callable[..., torch.Tensor]) -> None:
        self.calls: list[AttentionRecord] = []
        self.masks: Masks | None = None  # of the forward
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._farthest, self._answer = farthest, answer
        self._kinds: dict[int, MaskKind] = {}  # by id of a mask function

    def __call__(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
                 softcap: float | None = None, s_aux: torch.Tensor | None = None, **others: Any) -> torch.Tensor:
        path = self._paths.get(id(module), type(module).__name__)
        if unknown := sorted(name for name, given in others.items() if given is not None and name not in IGNORED):
            raise Refused(f"{path} asks of its attention what pages do not have: {', '.join(unknown)}")
        if dropout:
            raise Refused(f"{path} drops attention weights in eval mode")
        _check_shapes(path, query, key, value)
        kind = self._kind(path, module, mask, query.shape[1], others.get("is_causal"))
        self.calls.append(AttentionRecord(path, kind, query.shape[1], key.shape[1], key.shape[3], value.shape[3],
                                          None if scaling is None else float(scaling), softcap, s_aux is not None,
                                          others.get("sliding_window")))
        return self._answer(query, key, value, kind, scaling, softcap, s_aux)

    def _kind(self, path: str, module: nn.Module, mask: torch.Tensor | None, heads: int,
              is_causal: bool | None) -> MaskKind:
        if mask is None:
            if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
                raise Refused(f"{path} attends without a mask and is not causal")
            return FULL
        assert self.masks is not None
        function = self.masks.function_of(mask)
        if function is None:
            raise Refused(f"{path} gets a mask that the model changed on its way (a bias, ALiBi, a mask of its own)")
        if id(function) not in self._kinds:
            self._kinds[id(function)] = mask_kind(function, heads, self._farthest)
        return self._kinds[id(function)]


def _check_shapes(path: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    fits = (query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0]
            and query.shape[2] == key.shape[2] == value.shape[2] and key.shape[1] == value.shape[1]
            and query.shape[1] % key.shape[1] == 0 and query.shape[3] == key.shape[3])
    if not fits:
        raise Refused(f"{path} attends, in a forward without a cache, with shapes {[*query.shape]} of queries, "
                      f"{[*key.shape]} of keys and {[*value.shape]} of values")
