"""Adapters in calls of transformers' methods: loading, and adapters by row (`adapter_names` of PEFT's `generate`).

Adapters are loaded by PEFT's own functions, independent of the PEFT version that transformers requires.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import GenerationConfig

from hf_paged.guards.hooks import naming
from hf_paged.models.tuners import adapters_of, is_adapted
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
    try:
        config = peft.PeftConfig.from_pretrained(path)
    except ValueError as error:  # PEFT looks on the hub if the directory is missing or has no adapter
        raise OSError(f"adapter {name!r}: there is no adapter at {path!r} ({error})") from error
    saved = peft.load_peft_weights(path, device="cpu")
    weights = {key.removeprefix("base_model.model."): tensor for key, tensor in saved.items()}
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


def _tuned(model: Any) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def adapter_names(model: Any) -> list[str]:
    """Return the names of a model's adapters, sorted."""
    return sorted(set().union(*(adapters_of(layer) for layer in _layers(model))))


def each_under(model: Any, names: list[str], config: GenerationConfig) -> AbstractContextManager[None]:
    """Use for each prompt of a `model.generate` call in this context the adapter at its index in `names`.

    Args:
        config: The call's merged config: stock makes a row per beam or returned sequence of a prompt.
    """
    copies = [n for n in (config.num_beams, config.num_return_sequences, 1) if isinstance(n, int)]
    return naming(_layers(model), [name for name in names for _ in range(max(copies))])


def rows_under(model: Any, adapters: list[str | None]) -> AbstractContextManager[None]:
    """Use these adapters by row for forwards of the model in this thread, within the context; without names, the active
    adapters."""
    names = [name for name in adapters if name is not None]
    return naming(_layers(model), names) if names else nullcontext()


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if is_adapted(module)]
