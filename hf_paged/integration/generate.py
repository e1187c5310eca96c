"""`model.generate` of an enabled model: stock generate prepares the call, the engine runs the decoding loop.

`sample_method` replaces `GenerationMixin._sample`. It inspects the arguments that stock prepared and runs the call if
the engine does exactly what stock would; other calls go to `stock_loop`, and from there possibly to stock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, RepetitionPenaltyLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_paged.engine.engine import DISABLED, Engine
from hf_paged.engine.session import NewRequest
from hf_paged.engine.stop_rules import StopRule
from hf_paged.errors import EngineClosedError, PrecisionBusyError, Reason
from hf_paged.integration import paths, ranks
from hf_paged.integration.cache_name import CACHE_NAME
from hf_paged.integration.call_context import salt_of_call, seed_of_call
from hf_paged.integration.engines import engine_of
from hf_paged.integration.fallback import fall_back, in_fallback, quiet_fallbacks, unreadable, value_reason
from hf_paged.integration.given_options import min_new_tokens
from hf_paged.integration.inputs import check_token_ids, paged_prompts
from hf_paged.integration.late_cache import LateCache
from hf_paged.integration.stock_loop import SET_PAD, assisted_decoding, is_lookup, run_or_fall_back
from hf_paged.integration.stock_pieces import EndOfCall, settled_config, stops_of
from hf_paged.integration.structured_calls import Form, split_forms, tell_eos
from hf_paged.integration.view import model_of
from hf_paged.options.arguments import base_seed
from hf_paged.options.settings import RequestSettings, options_beyond_tokens, settings_from_config, token_id_tuple
from hf_paged.sampling.edit_reference import Edits
from hf_paged.sampling.sampler import derive_seed


class NativeCall(NamedTuple):
    """A call for the engine: one request per row, whose seed is drawn when it runs."""

    requests: list[NewRequest]
    pad_token_id: int
    ends: list[EndOfCall]


def sample_method(stock: Any) -> Callable:
    """Return `_sample` for views of `stock` models: on the engine, or stock's if the engine cannot run the call."""

    @functools.wraps(stock._sample)  # generate reads the signature
    def _sample(self: Any, input_ids: torch.LongTensor, logits_processor: Any, stopping_criteria: Any,
                generation_config: GenerationConfig, synced_gpus: bool = False, streamer: Any = None,
                **model_kwargs: Any) -> Any:
        model = model_of(self)
        engine = engine_of(model)
        tell_eos(logits_processor, stopping_criteria, draws=True)

        def loop(receiver: Any, *, synced_gpus: bool = synced_gpus, **kwargs: Any) -> Any:
            return stock._sample(receiver, input_ids, logits_processor=logits_processor,
                                 stopping_criteria=stopping_criteria, generation_config=generation_config,
                                 synced_gpus=synced_gpus, **kwargs)

        if engine is None or in_fallback(engine):
            with quiet_fallbacks(engine):
                return loop(model, streamer=streamer, **model_kwargs)
        call = _recognised(engine, model, input_ids, logits_processor, stopping_criteria, generation_config,
                           synced_gpus, model_kwargs)
        if isinstance(call, Reason):
            return run_or_fall_back(engine, model, functools.partial(loop, streamer=streamer), call, input_ids,
                                    stopping_criteria, generation_config, synced_gpus, model_kwargs)
        return _carry_out(engine, model, call, functools.partial(loop, model, **model_kwargs), input_ids,
                          stopping_criteria, generation_config, streamer, model_kwargs)

    return _sample


def assisted_method(stock: Any) -> Callable:
    """Return `_assisted_decoding` for views of `stock` models: prompt lookup runs on the engine, with its own
    drafts."""

    @functools.wraps(stock._assisted_decoding)  # generate reads the signature
    def _assisted_decoding(self: Any, input_ids: torch.LongTensor, logits_processor: Any, stopping_criteria: Any,
                           generation_config: GenerationConfig, synced_gpus: bool = False, streamer: Any = None,
                           **kwargs: Any) -> Any:
        model, call, why = model_of(self), None, None
        engine = engine_of(model)
        in_stock = functools.partial(
            stock._assisted_decoding, model, input_ids, logits_processor=logits_processor,
            stopping_criteria=stopping_criteria, generation_config=generation_config, synced_gpus=synced_gpus, **kwargs,
        )
        model_kwargs = {name: value for name, value in kwargs.items() if name not in _OF_ASSISTANTS}
        if engine is not None and not in_fallback(engine) and is_lookup(stock, generation_config, kwargs):
            call = _recognised(engine, model, input_ids, logits_processor, stopping_criteria, generation_config,
                               synced_gpus, model_kwargs)
            why = call if isinstance(call, Reason) else _meets_drafts(call) if len(input_ids) == 1 else None
        if engine is None or call is None or isinstance(call, Reason) or why is not None:
            return assisted_decoding(engine, stock._assisted_decoding, model, input_ids, logits_processor,
                                     stopping_criteria, generation_config, synced_gpus, streamer, why=why, **kwargs)
        return _carry_out(engine, model, call, in_stock, input_ids, stopping_criteria, generation_config, streamer,
                          model_kwargs)

    return _assisted_decoding


_OF_ASSISTANTS = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")


def _meets_drafts(call: NativeCall) -> Reason | None:
    """Return why drafts would change the call: stock checks some options once per draft, the engine once per token."""
    for request in call.requests:
        if request.stop is not None or request.grammar is not None or request.settings.structured is not None:
            return Reason("prompt_lookup_num_tokens with stop_strings, max_time or a form of the output, which stock "
                          "looks at once for all tokens of a draft",
                          remedy="Leave `prompt_lookup_num_tokens` out: without drafts, each token is looked at.")
    return None


def _carry_out(engine: Engine, model: Any, call: NativeCall, in_stock: Callable, input_ids: torch.Tensor,
               stopping_criteria: Any, config: GenerationConfig, streamer: Any, model_kwargs: dict[str, Any]) -> Any:
    """Run the call and return its result; calls `in_stock(streamer=...)` if the engine cannot finish it."""
    paths.answer(engine, "native")
    columns = _Columns(call, streamer)
    if engine.replica is None:
        reason = _run_counted(engine, call, columns, input_ids)
    else:
        reason = ranks.run_natively(engine, functools.partial(_run_counted, engine, call, columns, input_ids))
    if reason is not None:
        return fall_back(
            engine, reason, lambda: in_stock(streamer=columns.rest_of_streamer()),
            lambda result: paths.new_tokens(result, input_ids.shape[1], stopping_criteria, config),
        )
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([input_ids, columns.tensor().to(input_ids.device)], dim=-1)
    if not config.return_dict_in_generate:
        return sequences
    cache = None
    if isinstance(model_kwargs.get(CACHE_NAME), DynamicCache):
        cache = LateCache(engine, model, sequences, input_ids.shape[1], model_kwargs, [])
    return GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE_NAME: cache})  # type: ignore[arg-type]


def _run_counted(engine: Engine, call: NativeCall, columns: _Columns, input_ids: torch.Tensor) -> Reason | None:
    """Call `_run` and count the call as native, unless it ends with a reason for stock."""
    try:
        check_token_ids(input_ids, engine.vocab_size)
        reason = _run(engine, call, columns)
    except BaseException:
        engine.calls.add("native", None, 0)
        raise
    if reason is None:
        engine.calls.add("native", None, sum(map(len, columns.rows)))
    return reason


def _run(engine: Engine, call: NativeCall, columns: _Columns) -> Reason | None:
    """Run the engine until all rows of the call are done; returns a reason if the call cannot run natively."""
    is_sampled = call.requests[0].settings.do_sample
    seed = base_seed(seed_of_call(), engine.config.seed) if is_sampled else 0
    with engine.session(stream=columns.streamer is not None, text=False) as session:
        try:
            rows = {
                engine.add(session, replace(request, seed=derive_seed(seed, row))): row
                for row, request in enumerate(call.requests)
            }
        except EngineClosedError:
            return _DISABLED
        except PrecisionBusyError as error:
            return error.reason
        except ValueError as error:  # settings that the device's tables cannot hold
            return value_reason(error)
        while session.unfinished():
            for end in call.ends:
                end.check()
            for output in engine.advance([session])[0]:
                if output.finish_reason == "error":
                    assert output.completion is not None
                    return Reason("row {} failed: {}", rows[output.request_id], output.completion.error,
                                  remedy="The row's error is in the text. If stock runs the same call, please report "
                                         "it.")
                columns.extend(rows[output.request_id], output.new_token_ids, done=output.completion is not None)
            columns.put_ready()
    if columns.open:
        return _DISABLED
    return None


_DISABLED = Reason("the model was disabled by another thread during the call", remedy=DISABLED)


class _Columns:
    """Rows of new tokens, streamed in stock's form: column by column, finished rows padded."""

    def __init__(self, call: NativeCall, streamer: Any) -> None:
        self.rows: list[list[int]] = [[] for _ in call.requests]
        self.open = set(range(len(call.requests)))
        self.streamer = streamer
        self.num_put = 0
        self._pad = call.pad_token_id

    def extend(self, row: int, tokens: list[int], done: bool) -> None:
        self.rows[row] += tokens
        if done:
            self.open.discard(row)

    def put_ready(self) -> None:
        """Give the streamer every column for which all unfinished rows have a token."""
        if self.streamer is None:
            return
        ready = min((len(self.rows[r]) for r in self.open), default=max(map(len, self.rows)))
        while self.num_put < ready:
            column = [row[self.num_put] if self.num_put < len(row) else self._pad for row in self.rows]
            self.num_put += 1
            self.streamer.put(torch.tensor(column, dtype=torch.int64, device="cpu"))

    def rest_of_streamer(self) -> _SkippingStreamer | None:
        """Return a streamer for stock, which generates all columns again; None without a streamer."""
        return None if self.streamer is None else _SkippingStreamer(self.streamer, self.num_put)

    def tensor(self) -> torch.Tensor:
        """Return the tokens as int64 [rows, longest], padded on the right."""
        new = np.full((len(self.rows), max(map(len, self.rows))), self._pad, dtype=np.int64)
        for line, row in zip(new, self.rows, strict=True):
            line[: len(row)] = row
        return torch.from_numpy(new)


class _SkippingStreamer:
    """Streamer that drops the first columns, which were streamed before the call went to stock."""

    def __init__(self, streamer: Any, skip: int) -> None:
        self._streamer, self._skip = streamer, skip

    def put(self, value: Any) -> None:
        if self._skip:
            self._skip -= 1
        else:
            self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


def _recognised(*call: Any) -> NativeCall | Reason:
    """Call `_recognise`; an exception becomes a reason."""
    try:
        return _recognise(*call)
    except Exception as error:  # stock may accept the argument, or raises its own error
        return unreadable(error)


def _recognise(engine: Engine, model: Any, input_ids: torch.Tensor, logits_processor: Any,
               stopping_criteria: Any, config: GenerationConfig, synced_gpus: bool,
               model_kwargs: dict[str, Any]) -> NativeCall | Reason:
    """Return the call in the engine's terms, or the reason why it has to run in stock."""
    if (reason := next(options_beyond_tokens(config), None)) is not None:
        return reason
    try:
        token_id_tuple(config.eos_token_id)
        stops = stops_of(stopping_criteria)
    except TypeError as error:
        return value_reason(error)
    if isinstance(stops, Reason):
        return stops
    prompts = paged_prompts(engine, input_ids, synced_gpus, model_kwargs)
    if isinstance(prompts, Reason):
        return prompts
    adapters = engine.adapters_of_rows(len(prompts))
    if isinstance(adapters, Reason):
        return adapters
    if config.return_dict_in_generate and config.use_cache is not False and any(adapters):
        return Reason("the keys and values of rows with adapters of their own",
                      remedy="`return_dict_in_generate` also returns a cache, which only rows in lockstep keep. Leave "
                             "the option out, or give `use_cache=False`.")
    spread = engine.group.is_parallel or engine.replica is not None
    if config.return_dict_in_generate and config.use_cache is not False and spread:
        return Reason("the keys and values of a model that is sharded over several ranks",
                      remedy="`return_dict_in_generate` also returns a cache, which no rank has alone. Leave the "
                             "option out, or give `use_cache=False`.")
    width = input_ids.shape[1]
    stops = stops._replace(max_length=max(stops.max_length, width + 1))  # stock checks lengths after the first token
    found = split_forms(engine, logits_processor, len(prompts), stops.eos)
    if isinstance(found, Reason):
        return found
    logits_processor, forms = found
    settled = settled_config(model, config, logits_processor, stops, input_ids, model_kwargs,
                             engine.num_logits)
    if isinstance(settled, Reason):
        return settled
    try:
        settings = settings_from_config(settled, width, engine.num_logits)
        settings = replace(settings, cache_salt=salt_of_call(), min_new_tokens=min_new_tokens(settled, width))
    except (ValueError, TypeError) as error:
        return value_reason(error)
    if (reason := engine.too_long(max(map(len, prompts)), settings.max_new_tokens)) is not None:
        return reason
    if stops.eos and config._pad_token_tensor is None:
        return Reason("an EOS without a pad_token_id", remedy=SET_PAD)
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    if settings.eos_token_ids and len(prompts) > 1 and not 0 <= pad < engine.vocab_size:
        return Reason("pad_token_id={} is outside the vocabulary", pad, remedy=SET_PAD)
    if stops.are_watched and len(prompts) > 1 and not settings.eos_token_ids:
        return Reason("stop_strings or max_time without an EOS: rows that met theirs go on until all have",
                      remedy="Give an `eos_token_id`, or one prompt a call.")
    if settings.edits.repetition_penalty != 1.0 and int(input_ids.max()) >= engine.num_logits:
        return Reason("repetition_penalty with token ids that the head has no logits for",
                      remedy="The prompt holds tokens beyond the rows of `lm_head`. Resize the head with the "
                             "embedding.")
    paddings = _paddings(input_ids, prompts)
    if any(paddings) and (reason := _padding_reason(settings.edits, paddings, min(map(len, prompts)))) is not None:
        return reason
    if width > 1 and settings.edits.forced_bos_token_id is not None:  # stock applies it to prompts of one token only
        settings = replace(settings, edits=replace(settings.edits, forced_bos_token_id=None))
    autocast = engine.autocast_of_call()
    requests = [
        NewRequest(prompt, _with_form(_with_adapter(_with_padding(settings, padding, logits_processor), adapter), form),
                   seed=0, autocast=autocast, grammar=form.grammar,
                   stop=StopRule(stops.strings, stops.deadline, padding + prompt) if stops.are_watched else None)
        for padding, prompt, adapter, form in zip(paddings, prompts, adapters, forms, strict=True)
    ]
    return NativeCall(requests, pad, [criterion for criterion in stopping_criteria if type(criterion) is EndOfCall])


def _paddings(input_ids: torch.Tensor, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens left of each prompt."""
    width = input_ids.shape[1]
    if all(len(prompt) == width for prompt in prompts):
        return [[] for _ in prompts]
    return [row[: width - len(prompt)] for row, prompt in zip(input_ids.tolist(), prompts, strict=True)]


def _padding_reason(edits: Edits, paddings: list[list[int]], shortest: int) -> Reason | None:
    """Return why edits that in stock treat the padding as tokens cannot run on unpadded rows, or None."""
    if edits.no_repeat_ngram_size:
        return Reason("no_repeat_ngram_size with left padding, whose n-grams count in stock", remedy=_NO_PADDING)
    seen = {token for padding in paddings for token in padding}
    sequences = [*edits.bad_words_ids, *(sequence for sequence, _ in edits.sequence_bias)]
    if any(seen.intersection(sequence[:-1]) or len(sequence) > max(1, shortest) for sequence in sequences):
        return Reason("a biased or banned sequence that holds the token of the left padding, or is longer than a "
                      "prompt", remedy=_NO_PADDING)
    return None


_NO_PADDING = ("Stock looks at padding here. Give prompts of one length, or a `PagedGenerator` a list of prompts.")


def _with_adapter(settings: RequestSettings, adapter: str | None) -> RequestSettings:
    return settings if adapter is None else replace(settings, adapter_name=adapter)


def _with_form(settings: RequestSettings, form: Form) -> RequestSettings:
    return settings if form.structured is None else replace(settings, structured=form.structured)


def _with_padding(settings: RequestSettings, padding: list[int], logits_processor: Any) -> RequestSettings:
    """Return a row's settings: stock's repetition penalty also penalises padding, unless it ignores the prompt."""
    if not padding or settings.edits.repetition_penalty == 1.0:
        return settings
    [penalty] = [p for p in logits_processor if isinstance(p, RepetitionPenaltyLogitsProcessor)]
    if penalty.prompt_ignore_length is not None:
        return settings
    return replace(settings, edits=replace(settings.edits, also_seen=tuple(sorted(set(padding)))))
