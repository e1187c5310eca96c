"""Check on a clone in the dtypes of calls: a row's logits do not depend on the rows beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.models.proof.checks.rows import check_other_rows
from hf_paged.models.proof.clone import clone_of
from hf_paged.models.proof.interface import embeddings_of
from hf_paged.models.proof.outline import farthest
from hf_paged.models.proof.reduced import reduced
from hf_paged.models.proof.subject import TOLERANCE, subject_of
from hf_paged.models.proof.verdict import Refused

# Of the logits' standard deviation. Products of the same shapes round alike. Products of experts, whose shapes follow
# the number of their tokens, do not in float32, which is left to the proof in float64.
_TOLERANCES = {torch.float32: 1e-4}


class Precision(NamedTuple):
    """Dtypes in which a model computes.

    ``weights``: the dtype of each floating-point weight by its name, with N for numbers of layers, in order; one entry
    with the name "" where all have the same. ``autocast``: the dtype that calls cast to; None: they do not cast.
    """

    weights: tuple[tuple[str, torch.dtype], ...]
    autocast: torch.dtype | None = None

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.Tensor]], autocast: torch.dtype | None = None) -> Precision:
        """Return the precision of a model with these named weights."""
        found = {(_without_numbers(name), weight.dtype) for name, weight in weights}
        if len({dtype for _, dtype in found}) == 1:
            found = {("", dtype) for _, dtype in found}
        return cls(tuple(sorted(found, key=str)), autocast)


class RowsIn(NamedTuple):
    """What a clone showed of rows in a precision.

    ``why_mixed``: why they depend on others, or None. ``states``: the dtype in which stock keeps each recurrent state,
    by its `StateKey` without the layer.
    """

    why_mixed: str | None
    states: Mapping[tuple[str, int], torch.dtype] = MappingProxyType({})


def check_rows_in(precision: Precision, cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> RowsIn:
    """Raise `Refused` if other rows of a step change a row's logits; on the CPU, for conditions on the dtype."""
    small = reduced(config)
    model: Any = clone_of(cls, small, attention)
    _cast(model, precision)
    tolerance = max(_TOLERANCES.get(dtype, TOLERANCE) for _, dtype in precision.weights)
    with torch.autocast("cpu", precision.autocast, enabled=precision.autocast is not None, cache_enabled=False):
        subject = subject_of(model, attention, farthest(small))
        check_other_rows(subject, tolerance)
    found = {(key[1:], state.dtype) for key, state in subject.states.items()}
    if len(dtypes := dict(found)) < len(found):
        raise Refused("its layers keep states of one kind in several dtypes")
    return RowsIn(None, dtypes)


def _cast(model: PreTrainedModel, precision: Precision) -> None:
    """Give a clone's weights their dtypes; those without a dtype of their own (experts, buffers) the embedding's."""
    dtypes = dict(precision.weights)
    if len(dtypes) < len(precision.weights):
        raise Refused("layers of one kind have weights of several dtypes")
    names = {id(weight): _without_numbers(name) for name, weight in model.named_parameters()}
    nn.Module.to(model, dtypes.get("", dtypes.get(names[id(embeddings_of(model))], torch.float32)))
    for name, weight in model.named_parameters():
        if (dtype := dtypes.get(_without_numbers(name))) is not None:
            weight.data = weight.data.to(dtype)


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", name)
