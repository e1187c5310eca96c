"""Name of the cache among the arguments and results of transformers' `generate` and `forward`."""

from __future__ import annotations

import dataclasses

from transformers.generation.utils import GenerateDecoderOnlyOutput

# transformers 5.24 uses the shorter name; it accepts the longer one from callers, with a warning.
_fields = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
CACHE_NAME = "cache" if "cache" in _fields else "past_key_values"
