"""Serving-engine speed for the Hugging Face model you already hold.

    import hf_paged
    hf_paged.enable(model)
    model.generate(**inputs, max_new_tokens=256)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_paged.process_lock import ProcessLock

if TYPE_CHECKING:  # `as`: a type checker takes the names for public ones
    from hf_paged.config import PagedConfig as PagedConfig
    from hf_paged.engine import Engine as Engine
    from hf_paged.errors import EngineClosedError as EngineClosedError
    from hf_paged.errors import FallbackError as FallbackError
    from hf_paged.errors import FallbackWarning as FallbackWarning
    from hf_paged.errors import PartlyLoadedError as PartlyLoadedError
    from hf_paged.errors import RankAloneError as RankAloneError
    from hf_paged.errors import UnsupportedModelError as UnsupportedModelError
    from hf_paged.errors import UnsupportedOptionError as UnsupportedOptionError
    from hf_paged.errors import WorkerDiedError as WorkerDiedError
    from hf_paged.generator import PagedGenerator as PagedGenerator
    from hf_paged.integration.enable import disable as disable
    from hf_paged.integration.enable import enable as enable
    from hf_paged.integration.enable import gathered as gathered
    from hf_paged.integration.enable import get_engine as get_engine
    from hf_paged.integration.enable import install as install
    from hf_paged.integration.enable import is_enabled as is_enabled
    from hf_paged.integration.enable import is_installed as is_installed
    from hf_paged.integration.enable import uninstall as uninstall
    from hf_paged.integration.enable import weight_update as weight_update
    from hf_paged.integration.explain import explain as explain
    from hf_paged.observe.registry import metrics as metrics
    from hf_paged.observe.trace import trace as trace
    from hf_paged.observe.trainer_callback import PagedStatsCallback as PagedStatsCallback
    from hf_paged.outputs import CallStats as CallStats
    from hf_paged.outputs import Completion as Completion
    from hf_paged.outputs import EngineStats as EngineStats
    from hf_paged.outputs import Explanation as Explanation
    from hf_paged.outputs import StepOutput as StepOutput
    from hf_paged.outputs import Timings as Timings
    from hf_paged.outputs import WarmUpReport as WarmUpReport

__version__ = "0.1.0"

# Imported at first use: a worker has to watch its parent before the seconds that torch and transformers take.
_MODULES = {
    "hf_paged.config": ("PagedConfig",),
    "hf_paged.engine": ("Engine",),
    "hf_paged.errors": (
        "EngineClosedError", "FallbackError", "FallbackWarning", "PartlyLoadedError", "RankAloneError",
        "UnsupportedModelError", "UnsupportedOptionError", "WorkerDiedError",
    ),
    "hf_paged.generator": ("PagedGenerator",),
    "hf_paged.integration.enable": (
        "disable", "enable", "gathered", "get_engine", "install", "is_enabled", "is_installed", "uninstall",
        "weight_update",
    ),
    "hf_paged.integration.explain": ("explain",),
    "hf_paged.observe.registry": ("metrics",),
    "hf_paged.observe.trainer_callback": ("PagedStatsCallback",),
    "hf_paged.outputs": ("CallStats", "Completion", "EngineStats", "Explanation", "StepOutput", "Timings",
                         "WarmUpReport"),
    "hf_paged.observe.trace": ("trace",),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)

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
