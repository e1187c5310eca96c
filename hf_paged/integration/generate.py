"""`model.generate` of an enabled model: stock generate prepares the call, the engine runs the decoding loop.

`sample_method` replaces `GenerationMixin._sample`. It inspects the arguments that stock prepared and runs the call if
the engine does exactly what stock would; other calls go to `stock_loop`, and from there possibly to stock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, RepetitionPenaltyLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_paged.engine.engine import DISABLED, Engine
from hf_paged.engine.features.stop_rules import StopRule
from hf_paged.errors import EngineClosedError, PrecisionBusyError, Reason
from hf_paged.guards.origin import is_method_of_mixin
from hf_paged.integration import paths, ranks
from hf_paged.integration.caches import CACHE_NAME, LateCache, PagedCache
from hf_paged.integration.enabled import engine_of, model_of
from hf_paged.integration.fallback import fall_back, in_fallback, quiet_fallbacks, unreadable, value_reason
from hf_paged.integration.paths import CALL_SALT, CALL_SEED
from hf_paged.integration.recognise.criteria import EndOfCall, stops_of
from hf_paged.integration.recognise.images import fed_prompts
from hf_paged.integration.recognise.inputs import DecodingInputs, check_token_ids, has_images, paged_rows
from hf_paged.integration.recognise.processors import settled_config
from hf_paged.integration.recognise.structured import split_forms, tell_eos
from hf_paged.integration.stock_loop import SET_PAD, beyond_sampling, run_or_fall_back
from hf_paged.options.arguments import base_seed
from hf_paged.options.request_spec import RequestSpec
from hf_paged.options.settings import options_beyond_tokens, request_spec, token_id_tuple
from hf_paged.sampling.edit_reference import Edits
from hf_paged.sampling.sampler import derive_seed


def sample_method(stock: Any) -> Callable:
    """Return `_sample` for views of `stock` models: on the engine, or stock's if the engine cannot run the call."""

    @functools.wraps(stock._sample)  # generate reads the signature
    def _sample(self: Any, input_ids: torch.LongTensor, logits_processor: Any, stopping_criteria: Any,
                generation_config: GenerationConfig, synced_gpus: bool = False, streamer: Any = None,
                **model_kwargs: Any) -> Any:
        model = model_of(self)
        engine = engine_of(model)
        tell_eos(logits_processor, stopping_criteria, draws=True)
        inputs = DecodingInputs(input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus,
                                model_kwargs)
        loop = inputs.loop(stock._sample, streamer=streamer)
        if engine is None or in_fallback(engine):
            with quiet_fallbacks(engine):
                return loop(model, **model_kwargs)
        specs = _recognised(engine, model, inputs)
        if isinstance(specs, Reason):
            return run_or_fall_back(engine, model, loop, specs, inputs)
        return _carry_out(engine, model, specs, loop, inputs, streamer)

    return _sample


_OF_ASSISTANTS = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")


def assisted_method(stock: Any) -> Callable:
    """Return `_assisted_decoding` for views of `stock` models: prompt lookup runs on the engine, with its own drafts,
    or over paged forwards; a draft model runs in stock."""

    @functools.wraps(stock._assisted_decoding)  # generate reads the signature
    def _assisted_decoding(self: Any, input_ids: torch.LongTensor, logits_processor: Any, stopping_criteria: Any,
                           generation_config: GenerationConfig, synced_gpus: bool = False, streamer: Any = None,
                           **model_kwargs: Any) -> Any:
        model, config = model_of(self), generation_config
        engine = engine_of(model)
        tell_eos(logits_processor, stopping_criteria)
        assistants = {name: model_kwargs.pop(name, None) for name in _OF_ASSISTANTS}
        inputs = DecodingInputs(input_ids, logits_processor, stopping_criteria, config, synced_gpus, model_kwargs)
        loop = inputs.loop(stock._assisted_decoding, streamer=streamer, **assistants)

        def over_pages(receiver: Any, **kwargs: Any) -> Any:
            if len(input_ids) > 1 and isinstance(kwargs.get(CACHE_NAME), PagedCache):  # stock drafts for one row only
                return inputs.loop(GenerationMixin._sample, streamer=streamer)(receiver, **kwargs)
            return loop(receiver, **kwargs)

        if engine is None or in_fallback(engine):
            with quiet_fallbacks(engine):
                return loop(model, **model_kwargs)
        drafted_by_a_model = assistants["assistant_model"] is not None or config.assistant_early_exit is not None
        own = is_method_of_mixin("_assisted_decoding", stock._assisted_decoding)
        if drafted_by_a_model or not config.prompt_lookup_num_tokens or not own:
            reason = Reason("assisted decoding is not carried out by the paged engine",
                            remedy="Drafts of another model run in stock. Leave `assistant_model` away.")
            return fall_back(engine, reason, lambda: loop(model, **model_kwargs), inputs.num_new)
        why: Reason | None = None
        sizes = config.prompt_lookup_num_tokens, config.max_matching_ngram_size or 2
        if config.use_cache is not False and all(type(size) is int and size > 0 for size in sizes):
            specs = _recognised(engine, model, inputs)
            if isinstance(specs, Reason):
                why = specs
            elif (why := _meets_drafts(specs) if len(input_ids) == 1 else None) is None:
                return _carry_out(engine, model, specs, loop, inputs, streamer)
        return run_or_fall_back(engine, model, over_pages, why or beyond_sampling(config, "prompt lookup"), inputs)

    return _assisted_decoding


def _meets_drafts(specs: list[RequestSpec]) -> Reason | None:
    """Return why drafts would change the call: stock checks some options once per draft, the engine once per token."""
    for spec in specs:
        if spec.stop is not None or spec.grammar is not None or spec.structured is not None:
            return Reason("prompt_lookup_num_tokens with stop_strings, max_time or a form of the output, which stock "
                          "looks at once for all tokens of a draft",
                          remedy="Leave `prompt_lookup_num_tokens` out: without drafts, each token is looked at.")
    return None


def _carry_out(engine: Engine, model: Any, specs: list[RequestSpec], loop: Callable, inputs: DecodingInputs,
               streamer: Any) -> Any:
    """Run the call and return its result; calls stock's `loop` if the engine cannot finish it."""
    paths.answer(engine, "native")
    input_ids, config, cache = inputs.input_ids, inputs.generation_config, None
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    columns = _Columns(len(specs), pad, streamer)
    run = functools.partial(_run, engine, specs, columns, inputs)
    reason = run() if engine.replica is None else ranks.run_natively(engine, run)
    if reason is not None:
        # Stock makes all columns again.
        rest = None if streamer is None else _SkippingStreamer(streamer, columns.num_put)
        in_stock = functools.partial(loop, model, **inputs.model_kwargs, streamer=rest)
        return fall_back(engine, reason, in_stock, inputs.num_new)
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([input_ids, columns.tensor().to(input_ids.device)], dim=-1)
    if not config.return_dict_in_generate:
        return sequences
    if isinstance(inputs.model_kwargs.get(CACHE_NAME), DynamicCache):
        cache = LateCache(engine, model, sequences, input_ids.shape[1], inputs.model_kwargs, [])
    return GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE_NAME: cache})  # type: ignore[arg-type]


def _run(engine: Engine, specs: list[RequestSpec], columns: _Columns, inputs: DecodingInputs) -> Reason | None:
    """Run the engine until all rows of the call are done, and count the call as native; returns a reason if the call
    cannot run natively."""
    ends = [criterion for criterion in inputs.stopping_criteria if type(criterion) is EndOfCall]
    try:
        check_token_ids(inputs.input_ids, engine.vocab_size)
        seed = base_seed(CALL_SEED.get(), engine.config.seed) if specs[0].do_sample else 0
        with engine.session(stream=columns.streamer is not None, text=False) as session:
            try:
                rows = {engine.add(session, spec.but(seed=derive_seed(seed, n))): n for n, spec in enumerate(specs)}
            except EngineClosedError:
                return _DISABLED
            except PrecisionBusyError as error:
                return error.reason
            except ValueError as error:  # settings that the device's tables cannot hold
                return value_reason(error)
            while session.unfinished():
                for end in ends:
                    end.check()
                for output in engine.advance([session])[0]:
                    if output.finish_reason == "error":
                        assert output.completion is not None
                        return Reason("row {} failed: {}", rows[output.request_id], output.completion.error,
                                      remedy="The row's error is in the text. If stock runs the same call, please "
                                             "report it.")
                    columns.extend(rows[output.request_id], output.new_token_ids, done=output.completion is not None)
                columns.put_ready()
    except BaseException:
        engine.calls.add("native", None, 0)
        raise
    if columns.open:
        return _DISABLED
    engine.calls.add("native", None, sum(map(len, columns.rows)))
    return None


_DISABLED = Reason("the model was disabled by another thread during the call", remedy=DISABLED)


class _Columns:
    """Rows of new tokens, streamed in stock's form: column by column, finished rows padded."""

    def __init__(self, num_rows: int, pad_token_id: int, streamer: Any) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.open = set(range(num_rows))
        self.streamer = streamer
        self.num_put = 0
        self._pad = pad_token_id

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


def _recognised(engine: Engine, model: Any, inputs: DecodingInputs) -> list[RequestSpec] | Reason:
    """Call `_recognise`; an exception becomes a reason."""
    try:
        return _recognise(engine, model, inputs)
    except Exception as error:  # stock may accept the argument, or raises its own error
        return unreadable(engine, error)


def _recognise(engine: Engine, model: Any, inputs: DecodingInputs) -> list[RequestSpec] | Reason:
    """Return a request for each row, whose seed is drawn when it runs, or the reason why the call has to run in stock.
    """
    input_ids, config = inputs.input_ids, inputs.generation_config
    if (reason := next(options_beyond_tokens(config), None)) is not None:
        return reason
    try:
        token_id_tuple(config.eos_token_id)
        stops = stops_of(inputs.stopping_criteria)
    except TypeError as error:
        return value_reason(error)
    if isinstance(stops, Reason):
        return stops
    found = paged_rows(engine, inputs)
    if isinstance(found, Reason):
        return found
    prompts, adapters = found
    returns_cache = config.return_dict_in_generate and config.use_cache is not False
    what = ("prompts with images" if has_images(inputs.model_kwargs) else
            "rows with adapters of their own" if any(adapters) else
            "a model that is sharded over several ranks" if engine.group.is_parallel or engine.replica is not None else
            None)
    if returns_cache and what is not None:  # a `LateCache` is made of ids alone, by the whole model
        return Reason("the keys and values of {}", what,
                      remedy="`return_dict_in_generate` also returns a cache, which only rows in lockstep keep. Leave "
                             "the option out, or give `use_cache=False` without images.")
    width = input_ids.shape[1]
    stops = stops._replace(max_length=max(stops.max_length, width + 1))  # stock checks lengths after the first token
    split = split_forms(engine, inputs.logits_processor, len(prompts), stops.eos)
    if isinstance(split, Reason):
        return split
    logits_processor, forms = split
    settled = settled_config(model, config, logits_processor, stops, input_ids, inputs.model_kwargs, engine.num_logits)
    if isinstance(settled, Reason):
        return settled
    try:
        spec = request_spec(settled, width, engine.num_logits, cache_salt=CALL_SALT.get(),
                            min_new_tokens=max(settled.min_new_tokens or 0, (settled.min_length or 0) - width, 0),
                            autocast=engine.autocast_of_call())
    except (ValueError, TypeError) as error:
        return value_reason(error)
    if (reason := engine.too_long(max(map(len, prompts)), spec.max_new_tokens)) is not None:
        return reason
    if (pad := config._pad_token_tensor) is None:
        if stops.eos:
            return Reason("an EOS without a pad_token_id", remedy=SET_PAD)
    elif spec.eos_token_ids and len(prompts) > 1 and not 0 <= int(pad) < engine.vocab_size:
        return Reason("pad_token_id={} is outside the vocabulary", int(pad), remedy=SET_PAD)
    are_watched = stops.strings is not None or stops.deadline is not None  # for what the scheduler does not check
    if are_watched and len(prompts) > 1 and not spec.eos_token_ids:
        return Reason("stop_strings or max_time without an EOS: rows that met theirs go on until all have",
                      remedy="Give an `eos_token_id`, or one prompt a call.")
    if spec.edits.repetition_penalty != 1.0 and int(input_ids.max()) >= engine.num_logits:
        return Reason("repetition_penalty with token ids that the head has no logits for",
                      remedy="The prompt holds tokens beyond the rows of `lm_head`. Resize the head with the "
                             "embedding.")
    paddings: list[list[int]] = [[]] * len(prompts)
    if min(map(len, prompts)) < width:
        paddings = [row[: width - len(prompt)] for row, prompt in zip(input_ids.tolist(), prompts, strict=True)]
    if any(paddings) and (reason := _padding_reason(spec.edits, paddings, min(map(len, prompts)))) is not None:
        return reason
    if width > 1 and spec.edits.forced_bos_token_id is not None:  # stock applies it to prompts of one token only
        spec = spec.but(edits=replace(spec.edits, forced_bos_token_id=None))
    fed = fed_prompts(engine, inputs, prompts, spec.max_new_tokens)
    if isinstance(fed, Reason):
        return fed
    # Stock's repetition penalty also penalises padding, unless it ignores the prompt.
    sees_padding = spec.edits.repetition_penalty != 1.0 and any(
        isinstance(p, RepetitionPenaltyLogitsProcessor) and p.prompt_ignore_length is None for p in logits_processor)
    return [
        spec.but(prompt=prompt, fed=of_prompt, adapter_name=adapter, structured=form.structured, grammar=form.grammar,
                 edits=replace(spec.edits, also_seen=tuple(sorted(set(padding)))) if padding and sees_padding
                 else spec.edits,
                 stop=StopRule(stops.strings, stops.deadline, padding + prompt) if are_watched else None)
        for padding, prompt, of_prompt, adapter, form in zip(paddings, prompts, fed, adapters, forms, strict=True)
    ]


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
