"""Which enabled model has which engine.

The engine is not kept on the model: state_dict, pickles, copies and `vars(model)` stay stock's.
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
    """The engine of a causal LM, or None where it is not enabled and nobody asks what it would do."""
    engine = asked()
    return engine if engine is not None and engine.model is model else ENGINES.get(model)


def renew_engine(model: PreTrainedModel, config: PagedConfig) -> None:
    """Give an enabled model an engine of another config; its requests end."""
    old = ENGINES[model]
    engine = Engine(model, config, tokenizer=old.tokenizer)
    old.shutdown()
    if ENGINES.get(model) is old:  # not disabled by another thread in the meantime
        ENGINES[model] = engine
