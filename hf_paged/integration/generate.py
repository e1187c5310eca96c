"""`model.generate` of an enabled model: stock generate has prepared everything; the decoding loop is ours.

`sample` stands in for `GenerationMixin._sample`. It recognises, from the finished pieces that stock hands over, what
the engine carries out exactly as stock would; the rest goes on to stock with one warning that names the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from hf_paged.engine import Engine
from hf_paged.errors import EngineClosedError, FallbackError, FallbackWarning
from hf_paged.runner.sampler import derive_seed
from hf_paged.settings import RequestSettings, settings_from_config, token_id_tuple, unsupported_option

# Built-in processors whose effect the settings carry, in stock's order: the attribute that holds the option of that
# name, and whether stock adds one for the option's value.
NATIVE_PROCESSORS: tuple[tuple[type, str, Callable[[Any], bool]], ...] = (
    (processors.MinLengthLogitsProcessor, "min_length", lambda value: bool(value)),
    (processors.MinNewTokensLengthLogitsProcessor, "min_new_tokens", lambda value: bool(value)),
    (processors.TemperatureLogitsWarper, "temperature", lambda value: value is not None and value != 1.0),
    (processors.TopKLogitsWarper, "top_k", lambda value: value is not None and value != 0),
    (processors.TopPLogitsWarper, "top_p", lambda value: value is not None and value < 1.0),
    (processors.MinPLogitsWarper, "min_p", lambda value: value is not None),
)
LENGTH_PROCESSORS = NATIVE_PROCESSORS[:2]  # only with an EOS; the others only when sampling


_CALL_SEED: ContextVar[int | None] = ContextVar("hf_paged_call_seed", default=None)
_IN_FALLBACK: ContextVar[tuple] = ContextVar("hf_paged_in_fallback", default=())  # engines whose call runs in stock


class NativeCall(NamedTuple):
    """A call as the engine runs it: one prompt per row, the same settings for all."""

    prompts: list[list[int]]
    settings: RequestSettings
    pad_token_id: int


def sample(engine: Engine | None, stock_sample: Callable, model: Any, input_ids: torch.LongTensor,
           logits_processor: Any, stopping_criteria: Any, generation_config: GenerationConfig,
           synced_gpus: bool = False, streamer: Any = None, **model_kwargs: Any) -> Any:  # fmt: skip
    """`GenerationMixin._sample` on the engine; `stock_sample` where the engine does not do what was asked for."""

    def stock(streamer: Any) -> Any:
        with quiet_fallbacks(engine):
            return stock_sample(input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                                generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer,
                                **model_kwargs)  # fmt: skip

    if engine is None or engine in _IN_FALLBACK.get():
        return stock(streamer)
    call = _recognise(engine, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus,
                      model_kwargs)  # fmt: skip
    if isinstance(call, str):
        announce_fallback(engine, call)
        return stock(streamer)
    _check_token_ids(input_ids, engine.vocab_size)
    columns = _Columns(len(call.prompts), call, streamer)
    if (error := _run(engine, call, columns)) is not None:
        announce_fallback(engine, error)
        return stock(_SkippingStreamer(streamer, columns.num_put) if streamer is not None else None)
    if streamer is not None:
        streamer.end()
    new_tokens = columns.tensor().to(input_ids.device)
    return torch.cat([input_ids, new_tokens], dim=-1)


def announce_fallback(engine: Engine, reason: str) -> None:
    """Warn that a call goes to stock generate, or raise where the config says ``strict``."""
    if engine in _IN_FALLBACK.get():
        return
    if engine.config.strict:
        raise FallbackError(f"strict=True, and this call would go to stock generate: {reason}")
    warnings.warn(f"hf_paged: this call goes to stock generate: {reason}", FallbackWarning, stacklevel=2)


@contextmanager
def call_seed(seed: int) -> Iterator[None]:
    """Calls in here take `seed` in place of the config's or of one drawn from torch's generator."""
    token = _CALL_SEED.set(seed)
    try:
        yield
    finally:
        _CALL_SEED.reset(token)


@contextmanager
def quiet_fallbacks(engine: Engine | None) -> Iterator[None]:
    """Calls that stock makes in here (assisted decoding calls generate for every draft) go to stock without a word."""
    token = _IN_FALLBACK.set((*_IN_FALLBACK.get(), engine))
    try:
        yield
    finally:
        _IN_FALLBACK.reset(token)


def fallback_engines() -> tuple:
    """Engines whose calls run in stock right now, in this context (see `quiet_fallbacks`)."""
    return _IN_FALLBACK.get()


def _run(engine: Engine, call: NativeCall, columns: _Columns) -> str | None:
    """Drive the engine until every row of the call is done; returns why it cannot be done natively, if so."""
    seed = engine.base_seed(_CALL_SEED.get()) if call.settings.do_sample else 0
    with engine.session(stream=columns.streamer is not None, text=False) as session:
        try:
            rows = {
                session.add(prompt, call.settings, seed=derive_seed(seed, row)): row
                for row, prompt in enumerate(call.prompts)
            }
        except EngineClosedError as error:
            return str(error)
        while session.unfinished():
            for output in session.advance():
                if output.finish_reason == "error":
                    assert output.completion is not None
                    return f"row {rows[output.request_id]} failed: {output.completion.error}"
                columns.extend(rows[output.request_id], output.new_token_ids, done=output.completion is not None)
            columns.put_ready()
    if columns.open:
        return "the model was disabled by another thread during the call"
    return None


class _Columns:
    """Rows of new tokens as they come, and stock's view of them: columns in lockstep, finished rows padded."""

    def __init__(self, num_rows: int, call: NativeCall, streamer: Any) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.open = set(range(num_rows))
        self.streamer = streamer
        self.num_put = 0
        self._pad = call.pad_token_id

    def extend(self, row: int, tokens: list[int], done: bool) -> None:
        self.rows[row] += tokens
        if done:
            self.open.discard(row)

    def put_ready(self) -> None:
        """Hand the streamer every column that no open row still owes a token to."""
        if self.streamer is None:
            return
        ready = min((len(self.rows[r]) for r in self.open), default=max(map(len, self.rows)))
        while self.num_put < ready:
            column = [row[self.num_put] if self.num_put < len(row) else self._pad for row in self.rows]
            self.num_put += 1
            self.streamer.put(torch.tensor(column, device="cpu"))

    def tensor(self) -> torch.Tensor:
        """int64 [rows, longest], padded on the right."""
        new = np.full((len(self.rows), max(map(len, self.rows))), self._pad, dtype=np.int64)
        for line, row in zip(new, self.rows, strict=True):
            line[: len(row)] = row
        return torch.from_numpy(new)


class _SkippingStreamer:
    """Passes on what stock streams, but for the first columns, which were streamed before the call went to stock."""

    def __init__(self, streamer: Any, skip: int) -> None:
        self._streamer, self._skip = streamer, skip

    def put(self, value: Any) -> None:
        if self._skip:
            self._skip -= 1
        else:
            self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()


def _recognise(engine: Engine, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any,
               config: GenerationConfig, synced_gpus: bool,
               model_kwargs: dict[str, Any]) -> NativeCall | str:  # fmt: skip
    """The call as the engine would run it, or the reason why stock has to."""
    if engine.is_reentrant():
        return "generate was called from inside a step of the same engine"
    if synced_gpus:
        return "synced_gpus=True"
    if input_ids.dtype not in (torch.int32, torch.int64):
        return f"input_ids of dtype {input_ids.dtype}"
    if (option := unsupported_option(config)) is not None:
        return f"{option} is not carried out by the paged engine"
    try:
        token_id_tuple(config.eos_token_id)
    except TypeError as error:
        return str(error)
    if (reason := _processor_reason(config, logits_processor, input_ids.shape[1])) is not None:
        return reason
    if (reason := _criteria_reason(config, stopping_criteria)) is not None:
        return reason
    if (reason := _model_kwargs_reason(model_kwargs)) is not None:
        return reason
    if input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        return f"input_ids of shape {tuple(input_ids.shape)}"
    if (reason := engine.unsupported_reason()) is not None:
        return reason
    prompts = _prompts(input_ids, model_kwargs)
    if isinstance(prompts, str):
        return prompts
    max_length = stopping_criteria.max_length
    try:
        settings = settings_from_config(config, input_ids.shape[1])
    except (ValueError, TypeError) as error:
        return str(error)
    if settings.max_new_tokens != max_length - input_ids.shape[1]:
        return f"a MaxLengthCriteria of {max_length} that is not the config's"
    if (reason := engine.too_long(max(map(len, prompts)), settings.max_new_tokens)) is not None:
        return reason
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    if settings.eos_token_ids and len(prompts) > 1 and not 0 <= pad < engine.vocab_size:
        return f"pad_token_id={pad} is outside the vocabulary"
    return NativeCall(prompts, settings, pad)


def _processor_reason(config: GenerationConfig, logits_processor: Any, prompt_length: int) -> str | None:
    """The list must be exactly what stock makes of the config: nothing of the caller's own, nothing missing."""
    eos = set(token_id_tuple(config.eos_token_id))
    expected = [
        (kind, option)
        for kind, option, is_added in NATIVE_PROCESSORS
        if (eos if (kind, option, is_added) in LENGTH_PROCESSORS else config.do_sample)
        and is_added(getattr(config, option))
    ]
    for processor in logits_processor:
        if not any(type(processor) is kind for kind, _, _ in NATIVE_PROCESSORS):
            return f"logits processor {type(processor).__name__} is not carried out by the paged engine"
    if [type(processor) for processor in logits_processor] != [kind for kind, _ in expected]:
        found = ", ".join(type(processor).__name__ for processor in logits_processor) or "none"
        return f"the logits processors ({found}) are not those that stock makes of the generation config"
    for processor, (_, option) in zip(logits_processor, expected, strict=True):
        attributes = vars(processor)
        own = (
            attributes[option] != getattr(config, option)
            or attributes.get("filter_value", -torch.inf) != -torch.inf
            or attributes.get("min_tokens_to_keep", 1) != 1
            or attributes.get("prompt_length_to_skip", prompt_length) != prompt_length
            or set(token_id_tuple(attributes.get("eos_token_id", list(eos)))) != eos
        )
        if own:
            return f"a {type(processor).__name__} of the caller's own"
    return None


def _criteria_reason(config: GenerationConfig, stopping_criteria: Any) -> str | None:
    for criterion in stopping_criteria:
        if type(criterion) is criteria.EosTokenCriteria:
            if set(token_id_tuple(criterion.eos_token_id)) != set(token_id_tuple(config.eos_token_id)):
                return "an EosTokenCriteria of the caller's own"
        elif type(criterion) is not criteria.MaxLengthCriteria:
            return f"stopping criterion {type(criterion).__name__} is not carried out by the paged engine"
    kinds = [type(criterion) for criterion in stopping_criteria]
    if kinds.count(criteria.MaxLengthCriteria) != 1:
        return f"{kinds.count(criteria.MaxLengthCriteria)} MaxLengthCriteria"
    if (criteria.EosTokenCriteria in kinds) != bool(token_id_tuple(config.eos_token_id)):
        return "the EOS criterion is not the config's"
    return None


def _model_kwargs_reason(model_kwargs: dict[str, Any]) -> str | None:
    for name, value in model_kwargs.items():
        if value is None or name in ("attention_mask", "position_ids", "tokenizer", "assistant_tokenizer"):
            continue  # sampling looks at no tokenizer: stop strings and healing are settled before
        if name == "past_key_values":
            if getattr(value, "_is_user_defined", False):
                return "past_key_values given by the caller"
            if type(value) is not DynamicCache or value.get_seq_length():
                return f"a cache of type {type(value).__name__}"
        elif not (name == "use_cache" and value is True) and not (name == "logits_to_keep" and value == 1):
            return f"model argument {name}={value!r:.60}"
    return None


def _prompts(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[list[int]] | str:
    """The rows without their left padding; a reason where the mask or the positions are anything else."""
    ids = input_ids.cpu().numpy()
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is None:
        real = np.ones(ids.shape, dtype=np.int64)
    elif tuple(mask.shape) != ids.shape:
        return f"attention_mask of shape {tuple(mask.shape)} for input_ids of shape {ids.shape}"
    else:
        real = mask.to("cpu", torch.float64).numpy()
        if not np.isin(real, (0, 1)).all():
            return "attention_mask holds values other than 0 and 1"
        real = real.astype(np.int64)
    if not real[:, -1].all() or (np.diff(real, axis=1) < 0).any():
        return "attention_mask has holes, right padding or an empty row"
    if positions is not None:
        expected = np.where(real == 1, np.cumsum(real, axis=1) - 1, 0)
        given = positions.cpu().numpy()
        if given.shape not in (expected.shape, (1, expected.shape[1])) or not (given == expected).all():
            return "position_ids given by the caller"
    return [row[row_mask == 1].tolist() for row, row_mask in zip(ids, real, strict=True)]


def _check_token_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Stock's exception for an id outside the vocabulary; on CUDA its launch would end the process' context."""
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise IndexError(f"index out of range in self: input_ids holds {low if low < 0 else high}, "
                         f"and the vocabulary has {vocab_size} tokens")  # fmt: skip
