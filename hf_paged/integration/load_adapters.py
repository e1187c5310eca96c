"""Loading of adapters by PEFT's own functions, independent of the PEFT version that transformers requires."""

from __future__ import annotations

import warnings
from typing import Any

from hf_paged.optional import require


def load_adapter(model: Any, name: str, path: str) -> None:
    """Add an adapter saved by PEFT to a model, without activating it; active adapters stay active.

    As in a `PeftModel`, weights in half precision become float32.

    Args:
        model: A transformers model, not in a `PeftModel`.
        name: Name of the adapter.
        path: A directory or hub id.

    Raises:
        ImportError: If PEFT is not installed.
        ValueError: If the name is taken or has a dot, or if the saved adapter does not fit the model.
        OSError: If there is no adapter at this path.
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
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")  # caused by earlier adapters
        peft.inject_adapter_in_model(config, model, name)
    model._hf_peft_config_loaded = True  # read by transformers' own adapter methods
    found: Any = peft.set_peft_model_state_dict(model, weights, adapter_name=name)
    if unknown := list(found.unexpected_keys):
        raise ValueError(f"adapter {name!r} of {path!r}: its tensor {unknown[0]!r} has no place in this "
                         f"{type(model).__name__}; expected an adapter of this model")
    cast_adapter_dtype(model, name)
    for layer in _tuned(model):
        layer._active_adapter = active.get(id(layer), [])


def _saved(peft: Any, name: str, path: str) -> tuple[Any, dict[str, Any]]:
    """Return config and tensors of a saved adapter, with names for a model outside a `PeftModel`."""
    try:
        config = peft.PeftConfig.from_pretrained(path)
    except ValueError as error:  # PEFT looks on the hub if the directory is missing or has no adapter
        raise OSError(f"adapter {name!r}: there is no adapter at {path!r} ({error})") from error
    weights = peft.load_peft_weights(path, device="cpu")
    return config, {key.removeprefix("base_model.model."): tensor for key, tensor in weights.items()}


def _tuned(model: Any) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
