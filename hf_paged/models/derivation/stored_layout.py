"""Layouts in the folder of stored verdicts, as JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from functools import reduce
from typing import Any

import torch

from hf_paged.models.base import AttentionMask, StateShape
from hf_paged.models.derivation.executor import AttentionLayout
from hf_paged.models.derivation.layout import Layout
from hf_paged.models.derivation.rows_in_dtype import RowsIn
from hf_paged.models.proof.store import read_values, write_values
from hf_paged.models.proof.verdict import Verdict
from hf_paged.parallel.layers import sharded_class, stock_class

_PARTS = "parts of "  # in front of a class of experts that `sharded_class` derives from


def read(key: str) -> tuple[Verdict, Layout | None] | None:
    """Return the verdict stored for a key, with a layout if it is "proved"; None if there is none, or a damaged one."""
    values = read_values(key)
    try:
        verdict = Verdict.from_json(values["verdict"])
        return None if verdict is None else (verdict, _layout(values["layout"]))
    except (TypeError, ValueError, AttributeError, LookupError):
        return None


def write(key: str, verdict: Verdict, layout: Layout | None) -> None:
    write_values(key, {"verdict": verdict.to_json(), "layout": None if layout is None else _values(layout)})


def read_rows(key: str) -> RowsIn | None:
    """Return what is stored of rows in a precision, or None."""
    values = read_values(key)
    try:
        states = {(kind, index): getattr(torch, dtype) for kind, index, dtype in values["states"]}
        return RowsIn(values["why_mixed"], states)
    except (TypeError, ValueError, AttributeError, LookupError):
        return None


def write_rows(key: str, rows: RowsIn) -> None:
    states = [(*kind, str(dtype).removeprefix("torch.")) for kind, dtype in rows.states.items()]
    write_values(key, {"why_mixed": rows.why_mixed, "states": states})


def _values(layout: Layout) -> dict[str, Any]:
    names = {path: _name(kind) for path, kind in layout.classes.items()}
    kinds = sorted(set(names.values()))
    numbers = {path: kinds.index(name) for path, name in names.items()}
    states = [(*state.key, state.shape, str(state.dtype)) for state in layout.states]
    return asdict(replace(layout, classes={}, states=())) | {"classes": numbers, "kinds": kinds, "states": states}


def _layout(values: dict[str, Any] | None) -> Layout | None:
    if values is None:
        return None
    kinds = [_class(name) for name in values["kinds"]]
    classes = {path: kinds[number] for path, number in values["classes"].items()}
    calls = tuple(AttentionLayout(*call)._replace(mask=AttentionMask(*call[-1])) for call in values["calls"])
    states = tuple(StateShape((layer, kind, index), tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
                   for layer, kind, index, shape, dtype in values["states"])
    return Layout(values["body"], calls, classes, values["contents"], values["num_logits"], values["positions"],
                  values["longest"], values["has_stock_cache"], values["ignores_train_mode"], states)


def _name(kind: type) -> str:
    stock = stock_class(kind)
    return f"{_PARTS * (stock is not kind)}{stock.__module__}:{stock.__qualname__}"


def _class(name: str) -> type:
    """Return a class of a file that is imported already, as those of a model at hand are."""
    if name.startswith(_PARTS):
        return sharded_class(_class(name.removeprefix(_PARTS)))
    module, qualname = name.split(":")
    found: Any = reduce(getattr, qualname.split("."), sys.modules[module])
    if not isinstance(found, type):
        raise LookupError(name)
    return found
