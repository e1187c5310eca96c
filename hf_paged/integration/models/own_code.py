"""Was this function written by transformers, torch or us for them, or has somebody patched it?"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_paged.integration.parallel import layers

_OWN = (*(f"{Path(str(package.__file__)).parent}{os.sep}" for package in (torch, transformers)), contextlib.__file__,
        str(layers.__file__))  # fmt: skip


def is_own_code(function: Any) -> bool:
    """True if a function and all that it wraps were written in transformers, in torch or for our sharded layers."""
    while True:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_OWN):
            return False
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
