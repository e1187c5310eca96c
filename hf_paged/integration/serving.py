"""`transformers serve --continuous-batching` gives every request its own settings.

Its manager is made with the first request's settings, and later requests bring but a length and EOS ids. Here the
manager starts from the model's settings, each request brings what its body asked for, and one that the engine does not
carry out (`stop`) runs as the server runs it without continuous batching: by `model.generate`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_paged.integration import patching
from hf_paged.integration.batching_manager import PagedBatchingManager, request_config
from hf_paged.integration.batching_requests import batching_config, stock_reason
from hf_paged.integration.install import enable_once

_replaced: dict[str, Callable] = {}


def install_serving() -> None:
    """Replace three methods of transformers' `CBGenerateManager`; once is enough. Needs `transformers[serving]`."""
    if _replaced:
        return
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

    stock = {name: getattr(CBGenerateManager, name) for name in
             ("init_cb", "generate_streaming", "generate_non_streaming")}  # fmt: skip
    _replaced.update(stock)

    @functools.wraps(stock["init_cb"])
    def init_cb(self: Any, model: Any, gen_config: GenerationConfig) -> None:
        enable_once(model)
        base = copy.deepcopy(model.generation_config)
        batching = self._cb_config or ContinuousBatchingConfig()
        stock["init_cb"](self, model, base if _is_native(model, base, batching) else gen_config)

    @functools.wraps(stock["generate_streaming"])
    def generate_streaming(self: Any, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig,
                           *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        if not isinstance(self._cb, PagedBatchingManager):
            return stock["generate_streaming"](self, model, processor, inputs, gen_config, *args, **kwargs)
        if not _is_native(model, gen_config, self._cb.continuous_batching_config):
            whole, config = _alone(model, inputs, gen_config)
            return alone(self).generate_streaming(model, processor, whole, config, *args, **kwargs)
        with request_config(_one(model, gen_config)):
            return stock["generate_streaming"](self, model, processor, inputs, gen_config, *args, **kwargs)

    @functools.wraps(stock["generate_non_streaming"])
    async def generate_non_streaming(self: Any, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig,
                                     *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        if not isinstance(self._cb, PagedBatchingManager):
            return await stock["generate_non_streaming"](self, model, processor, inputs, gen_config, *args, **kwargs)
        if not _is_native(model, gen_config, self._cb.continuous_batching_config):
            whole, config = _alone(model, inputs, gen_config)
            return await alone(self).generate_non_streaming(model, processor, whole, config, *args, **kwargs)
        with request_config(_one(model, gen_config)):
            return await stock["generate_non_streaming"](self, model, processor, inputs, gen_config, *args, **kwargs)

    def alone(manager: Any) -> Any:
        """The server's manager of single `model.generate` calls, with a thread that is kept."""
        if not hasattr(manager, "_hf_paged_alone"):
            manager._hf_paged_alone = GenerateManager()
        return manager._hf_paged_alone

    for method in (init_cb, generate_streaming, generate_non_streaming):
        setattr(CBGenerateManager, method.__name__, method)


def uninstall_serving() -> None:
    """Put the three methods back. Nothing happens where they were not replaced."""
    if not _replaced:
        return
    from transformers.cli.serving.utils import CBGenerateManager

    for name, method in _replaced.items():
        setattr(CBGenerateManager, name, method)
    _replaced.clear()


def _is_native(model: Any, config: GenerationConfig, batching: ContinuousBatchingConfig) -> bool:
    if not patching.is_enabled(model):
        return False
    return stock_reason(patching.get_engine(model), batching_config(model, config, {}), batching) is None


def _one(model: Any, config: GenerationConfig) -> GenerationConfig:
    """The request's settings; the server returns one sequence, whatever they say."""
    return batching_config(model, config, {"num_return_sequences": None})


def _alone(model: Any, inputs: Any, config: GenerationConfig) -> tuple[dict[str, torch.Tensor], GenerationConfig]:
    """The arguments of a `model.generate` call for a request that was prepared for continuous batching."""
    ids = torch.tensor([inputs["input_ids"]], dtype=torch.int64, device=model.device)
    config = copy.deepcopy(config)
    config.use_cache = True  # the server turned it off, since continuous batching keeps a cache of its own
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, config
