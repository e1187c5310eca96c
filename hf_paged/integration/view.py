"""Views of models: objects with a model's own state and some methods of hf_paged before the methods of its class.

Stock `generate` looks its decoding methods up on `type(self)`, and stock's loop calls `self`. Both get a view as
`self`, so that the model's class and methods stay stock's. A view exists for one call.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

from hf_paged.integration.ranks import forward_of

_MODEL = "_hf_paged_model"  # a slot, not an attribute: view and model share their attribute dictionary


def view_of(model: Any, methods: Callable[[Any], dict[str, Callable]]) -> Any:
    """Return a view of a model. Setting an attribute of the view sets it on the model.

    Args:
        model: A module.
        methods: Returns the view's methods by name for the model's class, on which stock's methods are looked up;
            called once per class.
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
