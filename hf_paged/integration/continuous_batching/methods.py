"""transformers' continuous batching methods of an enabled model: the same API and outputs over the paged engine.

A call that is not native goes to transformers' own implementation with a `FallbackWarning` (an error if the engine's
config has ``strict``).
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
from hf_paged.engine.driver import runs_on
from hf_paged.engine.engine import FROM_INSIDE, IN_UPDATE, Engine
from hf_paged.errors import Reason
from hf_paged.integration import fallback, paths, ranks
from hf_paged.integration.continuous_batching.board import BROKE
from hf_paged.integration.continuous_batching.manager import KEPT, PagedBatchingManager
from hf_paged.integration.continuous_batching.requests import (
    batching_config,
    paged_config,
    stock_reason,
    warn_of_unread,
)
from hf_paged.integration.enabled import ENGINES, engine_of
from hf_paged.options.arguments import level_of_caller, num_copies

logger = logging.getLogger(__name__)


def _init_continuous_batching(original: Callable, model: Any, engine: Engine,
                              generation_config: GenerationConfig | None = None,
                              continuous_batching_config: ContinuousBatchingConfig | None = None,
                              workload_hints: Any = None) -> Any:
    config = batching_config(model, generation_config, {})
    batching = _batching(generation_config or model.generation_config, continuous_batching_config)
    if (reason := _stock_reason(model, engine, config)) is not None:
        fallback.announce_fallback(engine, reason)
        with fallback.quiet_fallbacks(engine):
            return original(model, config, batching, workload_hints)
    warn_of_unread(batching)
    _resize(model, engine, batching)
    kept = KEPT.get(model)
    if kept is not None and not kept.is_running():
        kept.generation_config, kept.continuous_batching_config = config, batching
        return kept
    return PagedBatchingManager(model, config, batching)


def destroy_cached_manager(original: Callable, model: Any, engine: Engine) -> None:
    """End the manager that a model keeps between sessions."""
    if (kept := KEPT.pop(model, None)) is not None:
        kept.destroy()
    original(model)


@contextmanager
def _manager_context(original: Callable, model: Any, engine: Engine,
                     generation_config: GenerationConfig | None = None, block: bool = True,
                     timeout: float | None = None,
                     continuous_batching_config: ContinuousBatchingConfig | None = None,
                     persistent_manager: bool = False, warmup: bool = True,
                     workload_hints: Any = None) -> Iterator[Any]:
    manager = model.init_continuous_batching(generation_config=generation_config,
                                             continuous_batching_config=continuous_batching_config,
                                             workload_hints=workload_hints)
    if warmup and not manager.warmed_up:
        manager.warmup()
    manager.start()
    try:
        yield manager
    except BaseException:
        if isinstance(manager, PagedBatchingManager):  # no caller will fetch the outputs of unfinished requests
            manager.stop(block=block, timeout=timeout, hard_stop=True)
        raise
    finally:
        if manager.is_running():
            manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)
        if not persistent_manager:
            manager.destroy()


def _generate_batch(original: Callable, model: Any, engine: Engine, inputs: list[Any],
                    generation_config: GenerationConfig | None = None,
                    continuous_batching_config: ContinuousBatchingConfig | None = None,
                    record_timestamps: bool = False, progress_bar: bool = False, persistent_manager: bool = False,
                    warmup: bool = True, **kwargs: Any) -> dict[str, GenerationOutput]:
    if len(inputs) == 0:
        return {}
    with ranks.refusing(engine):
        config = batching_config(model, generation_config, kwargs)
        batching = _batching(generation_config or model.generation_config, continuous_batching_config)
        reason = _stock_reason(model, engine, config) or _too_long(engine, config, inputs)

    def natively() -> dict[str, GenerationOutput]:
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, timeout=5,
            persistent_manager=persistent_manager, warmup=warmup,
        ) as manager:
            return paths.counted(engine_of(model) or engine, "native", None,
                                 lambda: _run_batch(manager, inputs, record_timestamps, progress_bar), _num_tokens)

    if reason is None:
        found = natively() if engine.replica is None else ranks.run_natively(engine, natively, in_all_threads=True)
        if not isinstance(found, Reason):
            return found
        reason = found
    call = functools.partial(original, model, inputs, generation_config=config, continuous_batching_config=batching,
                             record_timestamps=record_timestamps, progress_bar=progress_bar,
                             persistent_manager=persistent_manager, warmup=warmup)
    return fallback.fall_back(engine, reason, call, _num_tokens)


def _num_tokens(outputs: dict[str, GenerationOutput]) -> int:
    return sum(len(output.generated_tokens) for output in outputs.values())


# Replacements of transformers' methods by name; each is called with transformers' own method, a model and its engine.
METHODS: dict[str, Callable] = {
    "init_continuous_batching": _init_continuous_batching,
    "continuous_batching_context_manager": _manager_context,
    "generate_batch": _generate_batch,
}


def _run_batch(manager: PagedBatchingManager, inputs: list[Any], record_timestamps: bool,
               progress_bar: bool) -> dict[str, GenerationOutput]:
    """Run all inputs, and return their outputs; children before their parent, as in transformers 5.23.

    Raises:
        RuntimeError: a step raised, or the thread died; all outputs are lost.
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


def _stock_reason(model: Any, engine: Engine, config: GenerationConfig) -> Reason | None:
    """Return `stock_reason` for the model in eval mode and without autocast, as transformers' own thread runs it."""
    if engine.is_updating():
        return Reason("continuous batching was started inside a weight_update() of the same engine", remedy=IN_UPDATE)
    if engine.is_reentrant():
        return Reason("continuous batching was started from inside a step of the same engine", remedy=FROM_INSIDE)
    model.eval()
    with torch.autocast(model.device.type, enabled=False):
        return stock_reason(engine, config)


def _too_long(engine: Engine, config: GenerationConfig, inputs: list[Any]) -> Reason | None:
    """Return why the engine has no room for the longest input; stock goes on past the model's positions instead."""
    longest = max(map(len, inputs))
    if isinstance(config.max_new_tokens, int):
        return engine.too_long(longest, config.max_new_tokens)
    return engine.too_long(config.max_length, 0) if isinstance(config.max_length, int) else None


def _resize(model: Any, engine: Engine, batching: ContinuousBatchingConfig) -> None:
    """Make a new engine if `batching` has other sizes than the present one and no request uses that."""
    wanted: PagedConfig = paged_config(batching, engine.config)
    if wanted == engine.config:
        return
    stats = engine.stats()
    holds_weights = engine.replica is not None  # weights gathered for this call, which another engine would lack
    if engine.owns_device or holds_weights or stats.num_running or stats.num_waiting or runs_on(engine):
        warnings.warn(f"hf_paged: the model's engine is in use and keeps its sizes; asked for: {wanted}", UserWarning,
                      stacklevel=level_of_caller())
        return
    renewed = Engine(model, wanted, tokenizer=engine.tokenizer)
    engine.shutdown()
    if ENGINES.get(model) is engine:  # else another thread has disabled the model, which must stay so
        ENGINES[model] = renewed
