"""Adapters loaded into a model by PEFT's own functions, whatever version of PEFT transformers' methods ask for."""

from __future__ import annotations

import warnings
from typing import Any

from hf_paged.optional import require


def load_adapter(model: Any, name: str, path: str) -> None:
    """Give a model an adapter that PEFT saved, which is not active; those that are active stay so.

    As in a `PeftModel`, weights in half precision become float32.

    Args:
        model: of transformers, in no `PeftModel`.
        name: the adapter's.
        path: a directory or hub id.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: the name is taken, or holds a dot; the saved adapter does not fit the model.
        OSError: there is no adapter at this path.
    """
    require("peft", "loading an adapter")
    import peft
    from peft.tuners.tuners_utils import cast_adapter_dtype

    if not name or "." in name or name == "__base__" or name in getattr(model, "peft_config", {}):
        raise ValueError(f"adapter {name!r:.200}: expected a name without dots that no adapter of the model has, and "
                         "another than '__base__'")
    config, weights = _saved(peft, name, path)
    active = {id(layer): list(layer.active_adapters) for layer in _tuned(model)}
    config.inference_mode = True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")  # of the adapters before this one
        peft.inject_adapter_in_model(config, model, name)
    model._hf_peft_config_loaded = True  # which transformers' own methods of adapters look at
    found: Any = peft.set_peft_model_state_dict(model, weights, adapter_name=name)
    if unknown := list(found.unexpected_keys):
        raise ValueError(f"adapter {name!r} of {path!r}: its tensor {unknown[0]!r} has no place in this "
                         f"{type(model).__name__}; expected an adapter of this model")
    cast_adapter_dtype(model, name)
    for layer in _tuned(model):
        layer._active_adapter = active.get(id(layer), [])


def _saved(peft: Any, name: str, path: str) -> tuple[Any, dict[str, Any]]:
    """The config and the tensors of a saved adapter, by their names in a model that no `PeftModel` wraps."""
    try:
        config = peft.PeftConfig.from_pretrained(path)
    except ValueError as error:  # PEFT asks the hub for a directory that is missing, or has no adapter
        raise OSError(f"adapter {name!r}: there is no adapter at {path!r} ({error})") from error
    weights = peft.load_peft_weights(path, device="cpu")
    return config, {key.removeprefix("base_model.model."): tensor for key, tensor in weights.items()}


def _tuned(model: Any) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
