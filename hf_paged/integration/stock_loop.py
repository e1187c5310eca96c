"""Calls in lockstep: stock's own decoding loop, unchanged, over the engine's forwards.

Logits processors, stopping criteria, scores, streamers and beams thus behave as in stock: all rows take steps
together, finished rows get padding, scores are fp32, and torch samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.utils import ModelOutput

from hf_paged.engine.engine import Engine
from hf_paged.engine.lockstep import LockstepBatch
from hf_paged.errors import Reason
from hf_paged.guards.origin import is_method_of_mixin
from hf_paged.integration import paths, ranks
from hf_paged.integration.cache_name import CACHE_NAME
from hf_paged.integration.call_context import salt_of_call, seed_of_call
from hf_paged.integration.engines import engine_of
from hf_paged.integration.fallback import fall_back, in_fallback, quiet_fallbacks, unreadable
from hf_paged.integration.inputs import check_token_ids, input_reasons, paged_prompts
from hf_paged.integration.late_cache import LateCache
from hf_paged.integration.paged_cache import PagedCache
from hf_paged.integration.stock_pieces import NO_LENGTH
from hf_paged.integration.structured_calls import tell_eos
from hf_paged.integration.view import model_of, view_of
from hf_paged.options.settings import LEAVE_OUT, options_beyond_tokens, stock_only_options

SET_PAD = "Set `pad_token_id` to a token of the model."


class LockstepCall(NamedTuple):
    """A lockstep call: prompts, maximum of new tokens, dtype of autocast or None, adapters by row."""

    prompts: list[list[int]]
    max_new_tokens: int
    autocast: torch.dtype | None
    adapters: list[str | None]


def run_or_fall_back(engine: Engine, model: Any, method: Callable, why: Reason, input_ids: torch.Tensor,
                     stopping_criteria: Any, config: GenerationConfig, synced_gpus: bool,
                     model_kwargs: dict[str, Any]) -> Any:
    """Run `method(model, **model_kwargs)`, a decoding loop of stock, over paged forwards, or in stock with a warning.

    `why`: the reason why the engine does not pick the tokens itself.
    """

    def num_tokens(result: Any) -> int:
        return paths.new_tokens(result, input_ids.shape[1], stopping_criteria, config)

    def in_stock(reason: Reason) -> Any:
        return fall_back(engine, reason, lambda: method(model, **model_kwargs), num_tokens)

    try:
        call = recognise(engine, input_ids, stopping_criteria, config, synced_gpus, model_kwargs)
    except Exception as error:  # stock may accept the argument, or raises its own error
        call = unreadable(error)
    if paths.asked() is engine:
        refusal = call if isinstance(call, Reason) else engine.lockstep_reason(call.prompts, call.max_new_tokens,
                                                                               call.adapters)
        if refusal is None:
            paths.answer(engine, "lockstep", why, *options_beyond_tokens(config))
        else:
            paths.answer(engine, "stock", refusal, *stock_only_options(config),
                         *input_reasons(engine, input_ids, synced_gpus, model_kwargs), why,
                         *options_beyond_tokens(config))
    if isinstance(call, Reason):
        return in_stock(call)

    def over_pages() -> Any:
        with engine.lockstep(call.prompts, call.max_new_tokens, salt_of_call(), call.autocast, call.adapters) as batch:
            if isinstance(batch, Reason):
                return batch
            run = partial(_run, engine, model, batch, method, input_ids, config, model_kwargs,
                          call.autocast is not None)
            return paths.counted(engine, "lockstep", why, run, num_tokens)

    if engine.replica is None:
        result = over_pages()
    elif (refusal := engine.lockstep_reason(call.prompts, call.max_new_tokens, call.adapters)) is not None:
        return in_stock(refusal)
    else:
        result = ranks.run_natively(engine, over_pages)
    return in_stock(result) if isinstance(result, Reason) else result


def _run(engine: Engine, model: Any, batch: LockstepBatch, method: Callable, input_ids: torch.Tensor,
         config: GenerationConfig, model_kwargs: dict[str, Any], rounds_cache: bool) -> Any:
    """Run a lockstep call. `rounds_cache`: under autocast pages hold rounded KV, so stock's cache is recomputed."""
    check_token_ids(input_ids, engine.vocab_size)
    cache = PagedCache(batch, input_ids.shape[1], model.config.get_text_config(decoder=True).num_hidden_layers)
    with _seeded(engine, input_ids.device, model.device):
        result = method(view_of(model, paged_forwards),
                        **(model_kwargs | {CACHE_NAME: cache, "use_cache": True, "synced_gpus": False}))
    if isinstance(result, ModelOutput) and result.get(CACHE_NAME) is cache:
        if config.use_cache is False:
            return type(result)(**{name: value for name, value in result.items() if value is not cache})
        if rounds_cache:
            width = input_ids.shape[1]
            result[CACHE_NAME] = LateCache(engine, model, result["sequences"], width, model_kwargs, batch.adapters)
        else:
            result[CACHE_NAME] = cache.to_dynamic(model.config)
    return result


def recognise(engine: Engine, input_ids: torch.Tensor, stopping_criteria: Any, config: GenerationConfig,
              synced_gpus: bool, model_kwargs: dict[str, Any]) -> LockstepCall | Reason:
    """Return the call in the engine's terms, or the reason why it needs stock's forwards."""
    if (reason := next(stock_only_options(config), None)) is not None:
        return reason
    if config.prompt_lookup_num_tokens and config.use_cache is False:
        return Reason("use_cache=False, without which stock looks nothing up",
                      remedy="`prompt_lookup_num_tokens` needs a cache in stock. Leave one of them out.")
    prompts = paged_prompts(engine, input_ids, synced_gpus, model_kwargs)
    if isinstance(prompts, Reason):
        return prompts
    adapters = engine.adapters_of_rows(len(prompts))
    if isinstance(adapters, Reason):
        return adapters
    # Not subclasses, which may never stop.
    bounds = [criterion.max_length for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria]
    lengths = [length for length in bounds if isinstance(length, int)]
    if not lengths:
        return NO_LENGTH
    # Drafts may exceed the length before stock cuts them. With several rows stock makes no drafts.
    drafts = (config.prompt_lookup_num_tokens or 0) if len(input_ids) == 1 else 0
    if not isinstance(drafts, int):
        return Reason("prompt_lookup_num_tokens={} is no integer", repr(drafts), remedy="Give a number of tokens.")
    max_new_tokens = max(1, min(lengths) - input_ids.shape[1]) + drafts
    if (reason := engine.too_long(max(map(len, prompts)), max_new_tokens)) is not None:
        return reason
    pad = config._pad_token_tensor
    feeds_padding = len(prompts) > 1 and any(hasattr(c, "eos_token_id") for c in stopping_criteria)
    if feeds_padding and pad is not None and not 0 <= int(pad) < engine.vocab_size:
        return Reason("pad_token_id={} is outside the vocabulary", int(pad), remedy=SET_PAD)
    autocast = engine.autocast_of_call()
    returns_cache = config.return_dict_in_generate and config.use_cache is not False
    if autocast is not None and returns_cache and (config.num_beams or 1) > 1:
        return Reason("keys and values of beams under autocast, which pages hold in {}", autocast,
                      remedy="`return_dict_in_generate` also returns a cache, which stock keeps in the dtype of the "
                             "weights. Leave the option out, or give `use_cache=False`.")
    return LockstepCall(prompts, max_new_tokens, autocast, adapters)


def paged_forwards(stock: Any) -> dict[str, Callable]:
    """Return the `__call__` of a view, by which stock's loops compute."""

    @wraps(stock.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a paged forward if the cache is a `PagedCache`, else the model's own."""
        cache = kwargs.get(CACHE_NAME)
        if isinstance(cache, PagedCache):
            return cache.forward(kwargs["input_ids"], kwargs.get("logits_to_keep", 0))
        return ranks.forward_of(model_of(self))(*args, **kwargs)

    return {"__call__": __call__}


def beam_search_method(stock: Any) -> Callable:
    """Return `_beam_search` for views of `stock` models: stock's loop over paged forwards."""

    @wraps(stock._beam_search)  # generate reads the signature
    def _beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = model_of(self)
        return beam_search(engine_of(model), stock._beam_search, model, *args, **kwargs)

    return _beam_search


def beam_search(engine: Engine | None, stock: Callable, model: Any, input_ids: torch.Tensor, logits_processor: Any,
                stopping_criteria: Any, generation_config: GenerationConfig, synced_gpus: bool = False,
                **model_kwargs: Any) -> Any:
    """Run `GenerationMixin._beam_search` over paged forwards."""
    tell_eos(logits_processor, stopping_criteria)

    def method(receiver: Any, *, synced_gpus: bool = synced_gpus, **kwargs: Any) -> Any:
        return stock(receiver, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                     generation_config=generation_config, synced_gpus=synced_gpus, **kwargs)

    if engine is None or in_fallback(engine):
        with quiet_fallbacks(engine):
            return method(model, **model_kwargs)
    if not is_method_of_mixin("_beam_search", stock) or hasattr(model, "_reorder_cache"):
        reason = Reason("{} has a beam search of its own", type(model).__name__,
                        remedy="The model's class replaces stock's beam search, so it runs as it is.")
        return fall_back(
            engine, reason, lambda: method(model, **model_kwargs),
            lambda result: paths.new_tokens(result, input_ids.shape[1], stopping_criteria, generation_config),
        )
    return run_or_fall_back(engine, model, method, _beyond_sampling(generation_config, "beam search"), input_ids,
                            stopping_criteria, generation_config, synced_gpus, model_kwargs)


def assisted_decoding(engine: Engine | None, stock: Callable, model: Any, input_ids: torch.Tensor,
                      logits_processor: Any, stopping_criteria: Any, generation_config: GenerationConfig,
                      synced_gpus: bool = False, streamer: Any = None, inputs_tensor: Any = None,
                      assistant_model: Any = None, assistant_tokenizer: Any = None, tokenizer: Any = None,
                      why: Reason | None = None, **model_kwargs: Any) -> Any:
    """Run `GenerationMixin._assisted_decoding`: prompt lookup over paged forwards, a draft model in stock.

    `why`: the reason why the engine does not make the drafts, if known.
    """
    tell_eos(logits_processor, stopping_criteria)

    def method(receiver: Any, *, synced_gpus: bool = synced_gpus, **kwargs: Any) -> Any:
        if len(input_ids) > 1 and isinstance(kwargs.get(CACHE_NAME), PagedCache):  # stock drafts for a single row only
            ids: Any = input_ids
            return GenerationMixin._sample(
                receiver, ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer, **kwargs,
            )
        return stock(receiver, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                     generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer,
                     inputs_tensor=inputs_tensor, assistant_model=assistant_model,
                     assistant_tokenizer=assistant_tokenizer, tokenizer=tokenizer, **kwargs)

    if engine is None or in_fallback(engine):
        with quiet_fallbacks(engine):
            return method(model, **model_kwargs)
    drafted_by_a_model = assistant_model is not None or generation_config.assistant_early_exit is not None
    own = is_method_of_mixin("_assisted_decoding", stock)
    if drafted_by_a_model or not generation_config.prompt_lookup_num_tokens or not own:
        reason = Reason("assisted decoding is not carried out by the paged engine",
                        remedy="Drafts of another model run in stock. Leave `assistant_model` away.")
        return fall_back(
            engine, reason, lambda: method(model, **model_kwargs),
            lambda result: paths.new_tokens(result, input_ids.shape[1], stopping_criteria, generation_config),
        )
    why = why or _beyond_sampling(generation_config, "prompt lookup")
    return run_or_fall_back(engine, model, method, why, input_ids, stopping_criteria, generation_config, synced_gpus,
                            model_kwargs)


def is_lookup(stock: Any, config: GenerationConfig, kwargs: dict[str, Any]) -> bool:
    """Return whether a call of `_assisted_decoding` is prompt lookup with a cache and valid sizes."""
    sizes = config.prompt_lookup_num_tokens, config.max_matching_ngram_size or 2
    return (
        kwargs.get("assistant_model") is None and config.assistant_early_exit is None and config.use_cache is not False
        and all(type(size) is int and size > 0 for size in sizes)
        and is_method_of_mixin("_assisted_decoding", stock._assisted_decoding)
    )


def _beyond_sampling(config: GenerationConfig, method: str) -> Reason:
    """Return why the engine does not pick the tokens of a call to one of stock's other decoding methods."""
    found = next(options_beyond_tokens(config), None)
    return found or Reason(f"{method} is not carried out by the paged engine", remedy=LEAVE_OUT)


@contextmanager
def _seeded(engine: Engine, *devices: torch.device) -> Iterator[None]:
    """Seed torch's generators if the call or the config has a seed, and restore their states afterwards."""
    seed = seed_of_call()
    if seed is None:
        seed = engine.config.seed
    if seed is None:
        yield
        return
    gpus = list({device.index for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(gpus):
        # Not torch.manual_seed, which would reseed the generators of all GPUs.
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield
