"""Enabled models: the engine of each, and views of them.

The engine is no attribute of the model, so that its state_dict, pickles, copies and `vars(model)` stay stock's.

A view is an object with a model's own state and some methods of hf_paged before the methods of its class. Stock
`generate` looks its decoding methods up on `type(self)`, and stock's loop calls `self`. Both get a view as `self`, so
that the model's class and methods stay stock's. A view exists for one call.
"""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from hf_paged.engine.engine import Engine
from hf_paged.integration.paths import asked

ENGINES: weakref.WeakKeyDictionary[PreTrainedModel, Engine] = weakref.WeakKeyDictionary()
_MODEL = "_hf_paged_model"  # a slot, not an attribute: view and model share their attribute dictionary


def engine_of(model: Any) -> Engine | None:
    """Return the engine of a causal LM; None if it is not enabled and `hf_paged.explain` is not examining it."""
    engine = asked()
    return engine if engine is not None and engine.model is model else ENGINES.get(model)


def view_of(model: Any, methods: Callable[[Any], dict[str, Callable]]) -> Any:
    """Return a view of a model. Setting an attribute of the view sets it on the model.

    `methods` is called once per class, on which stock's methods are looked up, and returns the view's methods by name.
    """
    stock: Any = type(model)
    view: Any = object.__new__(_view_class(stock, methods))
    object.__setattr__(view, _MODEL, model)
    object.__setattr__(view, "__dict__", vars(model))
    return view


def model_of(view: Any) -> Any:
    """Return the model of a view; any other object is returned unchanged."""
    return getattr(view, _MODEL) if _MODEL in vars(type(view)) else view


class _Base:
    """Base of a new view class, so that its creation calls neither metaclass nor `__init_subclass__` of the model."""


@functools.cache
def _view_class(stock: Any, methods: Callable[[Any], dict[str, Callable]]) -> type:
    """Make the class of views of models of the class `stock`, with the same name for error messages."""
    namespace: dict[str, Any] = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__slots__": (_MODEL,),
        # Objects of stock that keep `self` (such as a processor) thus call, copy and pickle the model.
        "__call__": lambda self, *args, **kwargs: forward_of(model_of(self))(*args, **kwargs),
        "__reduce_ex__": lambda self, protocol: (operator.getitem, ([model_of(self)], 0)),
        "__copy__": lambda self: copy.copy(model_of(self)),
        "__deepcopy__": lambda self, memo: copy.deepcopy(model_of(self), memo),
        "__del__": lambda self: None,  # the model class's method would close what the model still uses
    }
    view_class: Any = type(stock.__name__, (_Base,), namespace | methods(stock))
    view_class.__bases__ = (stock,)
    return view_class


def forward_of(model: Any) -> Callable[..., Any]:
    """Return the callable for a model's forward within `generate`: over gathered weights in a native call.

    Processors call the model, such as that of `guidance_scale`; the model's own forward would wait for the other ranks,
    each of which takes another number of steps.
    """
    engine = engine_of(model)
    replica = None if engine is None else engine.replica
    return model if replica is None or not replica.is_pinned_here else replica.forward
