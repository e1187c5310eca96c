"""LoRA adapters of a served model: loaded with it, listed as models, and selected by a body's `model` field."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from huggingface_hub.errors import CacheNotFound

from hf_paged.integration.adapter_rows import adapter_names
from hf_paged.integration.load_adapters import load_adapter
from hf_paged.server.calls import RefusedRequestError, ServedCall

OPTION = "--adapter"


def split_adapters(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the adapters of a command line by name, and the remaining arguments for transformers."""
    parser = argparse.ArgumentParser("python -m hf_paged.serve", add_help=False, allow_abbrev=False)
    parser.add_argument(OPTION, action="append", default=[], metavar="NAME=PATH")
    given, others = parser.parse_known_args(arguments)
    adapters: dict[str, str] = {}
    for text in given.adapter:
        name, _, path = text.partition("=")
        if not name or not path:
            parser.error(f"{OPTION} {text!r}: expected NAME=PATH")
        if name in adapters:
            parser.error(f"{OPTION} {text!r}: expected a name that is given once")
        adapters[name] = path
    return adapters, others


def checking_pin(adapters: dict[str, str], stock: Callable) -> Callable:
    """Wrap `ModelManager._validate_args`: adapters require a model on the command line."""

    def _validate_args(self: Any) -> None:
        if adapters and self.force_model is None:
            raise ValueError(f"{OPTION}: expected a model on the command line that the adapters belong to")
        stock(self)

    return _validate_args


def loading(adapters: dict[str, str], stock: Callable) -> Callable:
    """Wrap `ModelManager._load_model`: load the adapters with the model, none of them active."""

    def _load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = stock(self, *args, **kwargs)
        for name, path in adapters.items():
            load_adapter(model, name, path)
        return model

    return _load_model


def listing(stock: Callable | staticmethod) -> Callable:
    """Wrap the method that lists `ModelManager`'s models: append the adapters of loaded models.

    transformers 5.23 has a static method there, which does not get the manager.
    """

    def list_models(self: Any = None, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        found = [] if self is None else [
            {"id": name, "object": "model", "created": 0, "owned_by": "", "parent": model_id}
            for model_id, model in _loaded(self) for name in adapter_names(model)
        ]
        models: list[dict[str, Any]] = []
        with suppress(CacheNotFound):  # raised by 5.23 without a Hub cache; a served model may be in another folder
            models += stock(*args, **kwargs) if isinstance(stock, staticmethod) else stock(self, *args, **kwargs)
        return models + found

    return list_models


def resolving(stock: Callable) -> Callable:
    """Wrap the handlers' `_resolve_model`: an adapter's name resolves to its model and is stored in the request."""

    def _resolve_model(self: Any, body: dict[str, Any]) -> Any:
        from fastapi import HTTPException

        name, manager = body.get("model"), self.model_manager
        base = manager.force_model or next((i for i, model in _loaded(manager) if name in adapter_names(model)), None)
        if not isinstance(name, str) or base is None or name == base:
            return stock(self, body)
        found = stock(self, body | {"model": base})
        names = adapter_names(found[1])
        if not names:
            return stock(self, body)
        if name not in names:
            raise HTTPException(400, f"Server is pinned to '{base}'; requested '{name}'. Expected it, or one of its "
                                     f"adapters: {', '.join(names)}")
        ServedCall.current().adapter_name = name
        return found

    return _resolve_model


def refuse_adapter() -> None:
    """Raise if the request names an adapter that transformers' own continuous batching cannot select per row.

    Raises:
        RefusedRequestError: If the request names an adapter.
    """
    if (name := ServedCall.current().adapter_name) is not None:
        raise RefusedRequestError(f"model={name!r}: expected the model that the adapter belongs to: transformers' own "
                                  "continuous batching runs it, with the same adapters for all requests")


def _loaded(manager: Any) -> list[tuple[str, Any]]:
    """Return (id, model) of every model that the server has in memory."""
    return [(key, timed.model) for key, timed in list(manager.loaded_models.items()) if timed.model is not None]
