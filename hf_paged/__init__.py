"""Serving-engine speed for the Hugging Face model you already hold.

    import hf_paged
    hf_paged.enable(model)
    model.generate(**inputs, max_new_tokens=256)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_paged.process_lock import ProcessLock

if TYPE_CHECKING:
    from hf_paged.config import PagedConfig
    from hf_paged.engine import Engine
    from hf_paged.errors import (
        EngineClosedError,
        FallbackError,
        FallbackWarning,
        PartlyLoadedError,
        RankAloneError,
        UnsupportedModelError,
        UnsupportedOptionError,
        WorkerDiedError,
    )
    from hf_paged.generator import PagedGenerator
    from hf_paged.integration.enable import disable, enable, get_engine, is_enabled, weight_update
    from hf_paged.integration.explain import explain
    from hf_paged.integration.gathered import gathered
    from hf_paged.integration.install import install, is_installed, uninstall
    from hf_paged.integration.metrics import metrics
    from hf_paged.integration.trainer_callback import PagedStatsCallback
    from hf_paged.observe.trace import trace
    from hf_paged.outputs import CallStats, Completion, EngineStats, Explanation, StepOutput, Timings

__version__ = "0.1.0"

__all__ = [
    "CallStats",
    "Completion",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "Explanation",
    "FallbackError",
    "FallbackWarning",
    "PagedConfig",
    "PagedGenerator",
    "PagedStatsCallback",
    "PartlyLoadedError",
    "RankAloneError",
    "StepOutput",
    "Timings",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "WorkerDiedError",
    "disable",
    "enable",
    "explain",
    "gathered",
    "get_engine",
    "install",
    "is_enabled",
    "is_installed",
    "metrics",
    "trace",
    "uninstall",
    "weight_update",
]

# Imported at first use: a worker has to watch its parent before the seconds that torch and transformers take.
_MODULES = {
    "hf_paged.config": ("PagedConfig",),
    "hf_paged.engine": ("Engine",),
    "hf_paged.errors": (
        "EngineClosedError", "FallbackError", "FallbackWarning", "PartlyLoadedError", "RankAloneError",
        "UnsupportedModelError", "UnsupportedOptionError", "WorkerDiedError",
    ),
    "hf_paged.generator": ("PagedGenerator",),
    "hf_paged.integration.install": ("install", "is_installed", "uninstall"),
    "hf_paged.integration.enable": ("disable", "enable", "get_engine", "is_enabled", "weight_update"),
    "hf_paged.integration.explain": ("explain",),
    "hf_paged.integration.gathered": ("gathered",),
    "hf_paged.integration.metrics": ("metrics",),
    "hf_paged.integration.trainer_callback": ("PagedStatsCallback",),
    "hf_paged.outputs": ("CallStats", "Completion", "EngineStats", "Explanation", "StepOutput", "Timings"),
    "hf_paged.observe.trace": ("trace",),
}


# transformers' own lazy imports fail where two threads begin them at once.
_importing = ProcessLock()


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _MODULES.items() if name in names), None)
    if home is not None:
        with _importing.rlock:
            globals()[name] = getattr(import_module(home), name)
        return globals()[name]
    # As if they had been imported here: hf_paged.engine.engine.Engine.
    if any(module.split(".")[1] == name for module in _MODULES):
        with _importing.rlock:
            return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
