"""View of a model: an object with the model's own state and some methods of ours in front of those of its class.

Stock `generate` looks its decoding methods up at `type(self)`, and stock's loop calls `self`. Both are handed a view as
`self`, so that the model's class, and every method of it, stay stock's. A view lives as long as the call that it was
made for.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

from hf_paged.integration.ranks import forward_of

_MODEL = "_hf_paged_model"  # a slot, not an attribute: views and models share the dictionary of attributes


def view_of(model: Any, methods: Callable[[Any], dict[str, Callable]]) -> Any:
    """A view of a model. Attributes that are set on the view are set on the model.

    Args:
        model: a module.
        methods: of a class (the model's, on which stock's methods are looked up), methods of the view by name. It is
            called once a class.
    """
    stock: Any = type(model)
    view: Any = object.__new__(_view_class(stock, methods))
    object.__setattr__(view, _MODEL, model)
    object.__setattr__(view, "__dict__", vars(model))
    return view


def model_of(view: Any) -> Any:
    """The model of a view; anything else as it is."""
    return getattr(view, _MODEL) if _MODEL in vars(type(view)) else view


class _Base:
    """What classes of views derive from while they are made: the user's class and metaclass do not hear of them."""


@functools.cache
def _view_class(stock: Any, methods: Callable[[Any], dict[str, Callable]]) -> type:
    """Class of the views of models of the class `stock`, with its name, which error messages contain."""
    namespace: dict[str, Any] = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__slots__": (_MODEL,),
        # What stock hands on (a processor that holds the model, say) calls, copies and pickles the model.
        "__call__": lambda self, *args, **kwargs: forward_of(model_of(self))(*args, **kwargs),
        "__reduce_ex__": lambda self, protocol: (operator.getitem, ([model_of(self)], 0)),
        "__copy__": lambda self: copy.copy(model_of(self)),
        "__deepcopy__": lambda self, memo: copy.deepcopy(model_of(self), memo),
        "__del__": lambda self: None,  # that of the model's class closes what the model still uses
    }
    view_class: Any = type(stock.__name__, (_Base,), namespace | methods(stock))
    view_class.__bases__ = (stock,)
    return view_class
