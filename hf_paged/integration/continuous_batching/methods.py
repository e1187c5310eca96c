"""transformers' continuous batching methods of an enabled model: its API and outputs, our engine underneath.

What the engine does not carry out goes to transformers' own implementation with a `FallbackWarning` (an error where the
engine's config says ``strict``).
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.config import PagedConfig
from hf_paged.engine.engine import Engine
from hf_paged.integration import fallback
from hf_paged.integration.continuous_batching.manager import KEPT, PagedBatchingManager, runs_on
from hf_paged.integration.continuous_batching.requests import batching_config, paged_config, stock_reason
from hf_paged.integration.continuous_batching.worker import BROKE
from hf_paged.options.arguments import num_copies

logger = logging.getLogger(__name__)

EngineOf = Callable[[Any], Engine | None]
NewEngine = Callable[..., Engine]


def overrides(stock: Any, engine_of: EngineOf, new_engine: NewEngine) -> dict[str, Callable]:
    """The continuous batching methods for a subclass of `stock`, by name, with stock's signatures.

    Args:
        stock: the model's class.
        engine_of: a model's engine, or None where it is not enabled.
        new_engine: enables a model anew: (model, config, tokenizer=...).
    """

    def native_engine(model: Any) -> Engine | None:
        engine = engine_of(model)
        return None if engine in fallback.fallback_engines() else engine

    @functools.wraps(stock.init_continuous_batching)
    def init_continuous_batching(self: Any, generation_config: GenerationConfig | None = None,
                                 continuous_batching_config: ContinuousBatchingConfig | None = None,
                                 workload_hints: Any = None) -> Any:  # fmt: skip
        engine = native_engine(self)
        if engine is None:
            return stock.init_continuous_batching(self, generation_config, continuous_batching_config, workload_hints)
        config = batching_config(self, generation_config, {})
        batching = _batching(generation_config or self.generation_config, continuous_batching_config)
        if (reason := _stock_reason(self, engine, config, batching)) is not None:
            fallback.announce_fallback(engine, reason)
            with fallback.quiet_fallbacks(engine):
                return stock.init_continuous_batching(self, config, batching, workload_hints)
        _resize(self, engine, batching, new_engine)
        kept = KEPT.get(self)
        if kept is not None and not kept.is_running():
            kept.generation_config, kept.continuous_batching_config = config, batching
            return kept
        return PagedBatchingManager(self, engine_of, config, batching)

    @functools.wraps(stock.destroy_cached_continuous_batching_manager)
    def destroy_cached_continuous_batching_manager(self: Any) -> None:
        if (kept := KEPT.pop(self, None)) is not None:
            kept.destroy()
        stock.destroy_cached_continuous_batching_manager(self)

    @contextmanager
    def manager_context(self: Any, generation_config: GenerationConfig | None = None, block: bool = True,
                        timeout: float | None = None,
                        continuous_batching_config: ContinuousBatchingConfig | None = None,
                        persistent_manager: bool = False, warmup: bool = True,
                        workload_hints: Any = None) -> Iterator[Any]:  # fmt: skip
        manager = self.init_continuous_batching(generation_config=generation_config,
                                                continuous_batching_config=continuous_batching_config,
                                                workload_hints=workload_hints)  # fmt: skip
        if warmup and not manager.warmed_up:
            manager.warmup()
        manager.start()
        try:
            yield manager
        except BaseException:
            if isinstance(manager, PagedBatchingManager):  # nobody will fetch what still runs
                manager.stop(block=block, timeout=timeout, hard_stop=True)
            raise
        finally:
            if manager.is_running():
                manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)
            if not persistent_manager:
                manager.destroy()

    @functools.wraps(stock.continuous_batching_context_manager)
    def continuous_batching_context_manager(self: Any, *args: Any, **kwargs: Any) -> Any:
        return manager_context(self, *args, **kwargs)

    @functools.wraps(stock.generate_batch)
    def generate_batch(self: Any, inputs: list[Any], generation_config: GenerationConfig | None = None,
                       continuous_batching_config: ContinuousBatchingConfig | None = None,
                       record_timestamps: bool = False, progress_bar: bool = False, persistent_manager: bool = False,
                       warmup: bool = True, **kwargs: Any) -> dict[str, GenerationOutput]:  # fmt: skip
        engine = native_engine(self)
        stock_call = functools.partial(stock.generate_batch, self, inputs, record_timestamps=record_timestamps,
                                       progress_bar=progress_bar, persistent_manager=persistent_manager,
                                       warmup=warmup)  # fmt: skip
        if engine is None:
            return stock_call(generation_config=generation_config, **kwargs,
                              continuous_batching_config=continuous_batching_config)  # fmt: skip
        if len(inputs) == 0:
            return {}
        config = batching_config(self, generation_config, kwargs)
        batching = _batching(generation_config or self.generation_config, continuous_batching_config)
        reason = _stock_reason(self, engine, config, batching) or _too_long(engine, config, inputs)
        if reason is not None:
            fallback.announce_fallback(engine, reason)
            with fallback.quiet_fallbacks(engine):
                return stock_call(generation_config=config, continuous_batching_config=batching)
        with self.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, timeout=5,
            persistent_manager=persistent_manager, warmup=warmup,
        ) as manager:  # fmt: skip
            return _run_batch(manager, inputs, record_timestamps, progress_bar)

    return {
        "init_continuous_batching": init_continuous_batching,
        "destroy_cached_continuous_batching_manager": destroy_cached_continuous_batching_manager,
        "continuous_batching_context_manager": continuous_batching_context_manager,
        "generate_batch": generate_batch,
    }


def _run_batch(manager: PagedBatchingManager, inputs: list[Any], record_timestamps: bool,
               progress_bar: bool) -> dict[str, GenerationOutput]:  # fmt: skip
    """Every input's output; children before their parent, as in transformers 5.23.

    Raises:
        RuntimeError: the engine broke, or the thread died; what was finished is lost.
    """
    copies = num_copies(manager.generation_config.num_return_sequences)
    ids = manager.add_requests(inputs, record_timestamps=record_timestamps)
    order = [key for i in ids for key in (*(f"{i}__child#{c}" for c in range(copies - 1)), i)]
    results: dict[str, GenerationOutput] = {}
    wanted = set(order)
    with tqdm(total=len(order), disable=not progress_bar, desc=f"Solving {len(order)} requests", unit="request") as bar:
        while wanted:
            output = manager.get_result(timeout=1)
            if output is not None and output.request_id in wanted and output.is_finished():
                wanted.discard(output.request_id)
                results[output.request_id] = output
                bar.update(1)
            error = manager.background_thread_status.fatal_error
            if error is not None or (output is None and not manager.is_running()):
                raise RuntimeError(f"generate_batch: the generation thread died: {error!r}") from error
    if failed := [key for key in order if results[key].error is not None]:
        if broken := next((text for key in failed if (text := str(results[key].error)).startswith(BROKE)), None):
            raise RuntimeError(f"generate_batch: {broken}")
        logger.error("hf_paged: requests %s failed: %s", failed, results[failed[0]].error)
    return {key: results[key] for key in order}


def _batching(config: GenerationConfig, given: ContinuousBatchingConfig | None) -> ContinuousBatchingConfig:
    inner = getattr(config, "continuous_batching_config", None)
    return given or (inner if isinstance(inner, ContinuousBatchingConfig) else ContinuousBatchingConfig())


def _stock_reason(model: Any, engine: Engine, config: GenerationConfig,
                  batching: ContinuousBatchingConfig) -> str | None:  # fmt: skip
    """`stock_reason` of the model in eval mode and outside autocast, where transformers' thread runs it, too."""
    if engine.is_reentrant():
        return "continuous batching was started from inside a step of the same engine"
    model.eval()
    with torch.autocast(model.device.type, enabled=False):
        return stock_reason(engine, config, batching)


def _too_long(engine: Engine, config: GenerationConfig, inputs: list[Any]) -> str | None:
    """Known beforehand: transformers goes on past the positions that the model was made for, like stock generate."""
    longest = max(map(len, inputs))
    if isinstance(config.max_new_tokens, int):
        return engine.too_long(longest, config.max_new_tokens)
    return engine.too_long(config.max_length, 0) if isinstance(config.max_length, int) else None


def _resize(model: Any, engine: Engine, batching: ContinuousBatchingConfig, new_engine: NewEngine) -> None:
    """Enable the model anew where `batching` asks for other sizes than the engine has, and nobody uses it."""
    wanted: PagedConfig = paged_config(batching, engine.config)
    if wanted == engine.config:
        return
    stats = engine.stats()
    if engine.owns_device or stats.num_running or stats.num_waiting or runs_on(engine):
        warnings.warn(f"hf_paged: the model's engine is in use and keeps its sizes; asked for: {wanted}", UserWarning,
                      stacklevel=3)  # fmt: skip
        return
    new_engine(model, wanted, tokenizer=engine.tokenizer)
