"""Calls in lockstep: stock's own decoding loop, unchanged, over the engine's forwards.

Logits processors, stopping criteria, scores, streamers and beams thus behave as in stock: all rows take steps
together, finished rows get padding, scores are fp32, and torch samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.utils import ModelOutput

from hf_paged.engine.engine import Engine
from hf_paged.engine.lockstep import LockstepBatch
from hf_paged.errors import Reason
from hf_paged.guards.origin import is_method_of_mixin
from hf_paged.integration import paths, ranks
from hf_paged.integration.caches import CACHE_NAME, LateCache, PagedCache
from hf_paged.integration.enabled import engine_of, forward_of, model_of, view_of
from hf_paged.integration.fallback import fall_back, in_fallback, quiet_fallbacks, unreadable
from hf_paged.integration.paths import CALL_SALT, CALL_SEED
from hf_paged.integration.recognise.criteria import NO_LENGTH
from hf_paged.integration.recognise.images import fed_prompts
from hf_paged.integration.recognise.inputs import DecodingInputs, check_token_ids, input_reasons, paged_rows
from hf_paged.integration.recognise.structured import tell_eos
from hf_paged.options.request_spec import RequestSpec
from hf_paged.options.settings import LEAVE_OUT, options_beyond_tokens, stock_only_options

SET_PAD = "Set `pad_token_id` to a token of the model."


def run_or_fall_back(engine: Engine, model: Any, method: Callable, why: Reason, inputs: DecodingInputs) -> Any:
    """Run `method(model, **model_kwargs)`, a decoding loop of stock, over paged forwards, or in stock with a warning.

    `why`: the reason why the engine does not pick the tokens itself.
    """
    config = inputs.generation_config

    def in_stock(reason: Reason) -> Any:
        return fall_back(engine, reason, lambda: method(model, **inputs.model_kwargs), inputs.num_new)

    try:
        specs = recognise(engine, inputs)
    except Exception as error:  # stock may accept the argument, or raises its own error
        specs = unreadable(engine, error)
    if paths.asked() is engine:
        refusal = specs if isinstance(specs, Reason) else engine.lockstep_reason(specs)
        if refusal is None:
            paths.answer(engine, "lockstep", why, *options_beyond_tokens(config))
        else:
            paths.answer(engine, "stock", refusal, *stock_only_options(config),
                         *input_reasons(engine, inputs), why, *options_beyond_tokens(config))
    if isinstance(specs, Reason):
        return in_stock(specs)

    def over_pages() -> Any:
        with engine.lockstep(specs) as batch:
            if isinstance(batch, Reason):
                return batch
            run = partial(_run, engine, model, batch, method, inputs)
            return paths.counted(engine, "lockstep", why, run, inputs.num_new)

    if engine.replica is None:
        result = over_pages()
    elif (refusal := engine.lockstep_reason(specs)) is not None:
        return in_stock(refusal)
    else:
        result = ranks.run_natively(engine, over_pages)
    return in_stock(result) if isinstance(result, Reason) else result


def _run(engine: Engine, model: Any, batch: LockstepBatch, method: Callable, inputs: DecodingInputs) -> Any:
    """Run a lockstep call."""
    input_ids, model_kwargs = inputs.input_ids, inputs.model_kwargs
    check_token_ids(input_ids, engine.vocab_size)
    cache = PagedCache(batch, input_ids.shape[1], model.config.get_text_config(decoder=True).num_hidden_layers)
    with _seeded(engine, input_ids.device, model.device):
        result = method(view_of(model, paged_forwards),
                        **(model_kwargs | {CACHE_NAME: cache, "use_cache": True, "synced_gpus": False}))
    if isinstance(result, ModelOutput) and result.get(CACHE_NAME) is cache:
        if inputs.generation_config.use_cache is False:
            return type(result)(**{name: value for name, value in result.items() if value is not cache})
        if engine.has_stock_cache:
            result[CACHE_NAME] = cache.to_dynamic(model.config)
        else:
            width = input_ids.shape[1]
            result[CACHE_NAME] = LateCache(engine, model, result["sequences"], width, model_kwargs, batch.adapters)
    return result


def recognise(engine: Engine, inputs: DecodingInputs) -> list[RequestSpec] | Reason:
    """Return a request for each row, or the reason why the call needs stock's forwards."""
    config, width = inputs.generation_config, inputs.input_ids.shape[1]
    if (reason := next(stock_only_options(config), None)) is not None:
        return reason
    if config.prompt_lookup_num_tokens and config.use_cache is False:
        return Reason("use_cache=False, without which stock looks nothing up",
                      remedy="`prompt_lookup_num_tokens` needs a cache in stock. Leave one of them out.")
    rows = paged_rows(engine, inputs)
    if isinstance(rows, Reason):
        return rows
    prompts, adapters = rows
    # Not subclasses, which may never stop.
    bounds = [criterion.max_length for criterion in inputs.stopping_criteria
              if type(criterion) is MaxLengthCriteria]
    lengths = [length for length in bounds if isinstance(length, int)]
    if not lengths:
        return NO_LENGTH
    # Drafts may exceed the length before stock cuts them. With several rows stock makes no drafts.
    drafts = (config.prompt_lookup_num_tokens or 0) if len(prompts) == 1 else 0
    if not isinstance(drafts, int):
        return Reason("prompt_lookup_num_tokens={} is no integer", repr(drafts), remedy="Give a number of tokens.")
    if drafts and engine.has_states:
        return Reason("drafts by prompt_lookup_num_tokens={}, which nothing takes back out of recurrent states", drafts,
                      remedy="Leave the option out.")
    max_new_tokens = max(1, min(lengths) - width) + drafts
    if (reason := engine.too_long(max(map(len, prompts)), max_new_tokens)) is not None:
        return reason
    pad = config._pad_token_tensor
    feeds_padding = len(prompts) > 1 and any(hasattr(c, "eos_token_id") for c in inputs.stopping_criteria)
    if feeds_padding and pad is not None and not 0 <= int(pad) < engine.vocab_size:
        return Reason("pad_token_id={} is outside the vocabulary", int(pad), remedy=SET_PAD)
    fed = fed_prompts(engine, inputs, prompts, max_new_tokens)
    if isinstance(fed, Reason):
        return fed
    autocast = engine.autocast_of_call()
    returns_cache = config.return_dict_in_generate and config.use_cache is not False
    again = "beams" if (config.num_beams or 1) > 1 else "prompts with images" if any(fed) else None
    if not engine.has_stock_cache and returns_cache and again is not None:  # a `LateCache` computes ids alone
        return Reason("keys and values of {}, of which pages hold {}", again,
                      "something else than stock's cache" if autocast is None else f"copies in {autocast}",
                      remedy="`return_dict_in_generate` also returns a cache, which stock keeps in the dtype of the "
                             "weights and some models as latents. Leave the option out, or give `use_cache=False` "
                             "without images.")
    return [RequestSpec(prompt=prompt, max_new_tokens=max_new_tokens, cache_salt=CALL_SALT.get(), autocast=autocast,
                        adapter_name=adapter, fed=of_prompt)
            for prompt, adapter, of_prompt in zip(prompts, adapters, fed, strict=True)]


def paged_forwards(stock: Any) -> dict[str, Callable]:
    """Return the `__call__` of a view, by which stock's loops compute."""

    @wraps(stock.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a paged forward if the cache is a `PagedCache`, else the model's own."""
        cache = kwargs.get(CACHE_NAME)
        if isinstance(cache, PagedCache):
            return cache.forward(kwargs["input_ids"], kwargs.get("logits_to_keep", 0))
        return forward_of(model_of(self))(*args, **kwargs)

    if not is_method_of_mixin("_optimize_model_for_decode", getattr(stock, "_optimize_model_for_decode", None)):
        return {"__call__": __call__}
    # Stock's own sets another implementation of experts in the model's config, which steps of other calls would run.
    return {"__call__": __call__, "_optimize_model_for_decode": lambda self: nullcontext()}


def beam_search_method(stock: Any) -> Callable:
    """Return `_beam_search` for views of `stock` models: stock's loop over paged forwards."""

    @wraps(stock._beam_search)  # generate reads the signature
    def _beam_search(self: Any, input_ids: torch.LongTensor, logits_processor: Any, stopping_criteria: Any,
                     generation_config: GenerationConfig, synced_gpus: bool = False, **model_kwargs: Any) -> Any:
        model = model_of(self)
        engine = engine_of(model)
        tell_eos(logits_processor, stopping_criteria)
        inputs = DecodingInputs(input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus,
                                model_kwargs)
        loop = inputs.loop(stock._beam_search)
        if engine is None or in_fallback(engine):
            with quiet_fallbacks(engine):
                return loop(model, **model_kwargs)
        if not is_method_of_mixin("_beam_search", stock._beam_search) or hasattr(model, "_reorder_cache"):
            reason = Reason("{} has a beam search of its own", type(model).__name__,
                            remedy="The model's class replaces stock's beam search, so it runs as it is.")
            return fall_back(engine, reason, lambda: loop(model, **model_kwargs), inputs.num_new)
        return run_or_fall_back(engine, model, loop, beyond_sampling(generation_config, "beam search"), inputs)

    return _beam_search


def beyond_sampling(config: GenerationConfig, method: str) -> Reason:
    """Return why the engine does not pick the tokens of a call to one of stock's other decoding methods."""
    found = next(options_beyond_tokens(config), None)
    return found or Reason(f"{method} is not carried out by the paged engine", remedy=LEAVE_OUT)


@contextmanager
def _seeded(engine: Engine, *devices: torch.device) -> Iterator[None]:
    """Seed torch's generators if the call or the config has a seed, and restore their states afterwards."""
    seed = CALL_SEED.get()
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
