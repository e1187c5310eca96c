"""What transformers calls a cache, among the arguments of `generate` and `forward` and in what they return."""

from __future__ import annotations

import dataclasses

from transformers.generation.utils import GenerateDecoderOnlyOutput

# 5.24 took the shorter name; it still takes the longer one from callers, with a warning.
_fields = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
CACHE_NAME = "cache" if "cache" in _fields else "past_key_values"
