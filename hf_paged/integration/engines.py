"""The engines of enabled models.

The engine is no attribute of the model, so that its state_dict, pickles, copies and `vars(model)` stay stock's.
"""

from __future__ import annotations

import weakref
from typing import Any

from transformers import PreTrainedModel

from hf_paged.config import PagedConfig
from hf_paged.engine.engine import Engine
from hf_paged.integration.paths import asked

ENGINES: weakref.WeakKeyDictionary[PreTrainedModel, Engine] = weakref.WeakKeyDictionary()


def engine_of(model: Any) -> Engine | None:
    """Return the engine of a causal LM; None if it is not enabled and `hf_paged.explain` is not examining it."""
    engine = asked()
    return engine if engine is not None and engine.model is model else ENGINES.get(model)


def renew_engine(model: PreTrainedModel, config: PagedConfig) -> None:
    """Replace the engine of an enabled model by one with another config; unfinished requests end."""
    old = ENGINES[model]
    engine = Engine(model, config, tokenizer=old.tokenizer)
    old.shutdown()
    if ENGINES.get(model) is old:  # else another thread has disabled the model, which must stay so
        ENGINES[model] = engine
