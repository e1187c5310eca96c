"""Serving-engine speed for the Hugging Face model you already hold.

    import hf_paged
    hf_paged.enable(model)
    model.generate(**inputs, max_new_tokens=256)
"""

from hf_paged.config import PagedConfig
from hf_paged.engine import Engine
from hf_paged.errors import (
    FallbackError,
    FallbackWarning,
    UnsupportedModelError,
    UnsupportedOptionError,
    WorkerDiedError,
)
from hf_paged.generator import PagedGenerator
from hf_paged.integration.install import install, is_installed, uninstall
from hf_paged.integration.patching import disable, enable, get_engine, is_enabled
from hf_paged.outputs import Completion, EngineStats, StepOutput

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "FallbackError",
    "FallbackWarning",
    "PagedConfig",
    "PagedGenerator",
    "StepOutput",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "WorkerDiedError",
    "disable",
    "enable",
    "get_engine",
    "install",
    "is_enabled",
    "is_installed",
    "uninstall",
]
