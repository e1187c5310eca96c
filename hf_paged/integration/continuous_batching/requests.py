"""Requests of continuous batching, whose settings are read as transformers' own continuous batching reads them.

Only the call's `GenerationConfig` (else `model.generation_config`) counts. A field that is None is off, and does not
take the default of the model or of generate: `do_sample=True` alone samples from the whole distribution.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_paged.config import PagedConfig
from hf_paged.engine.engine import Engine
from hf_paged.engine.stop_rules import StopRule, TextStopRule, deadline_after
from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.integration.fallback import value_reason
from hf_paged.integration.structured_calls import NO_FORM, Form
from hf_paged.options.arguments import check_is_config, described
from hf_paged.options.request_options import PLAIN, RequestOptions, settings_with
from hf_paged.options.settings import (
    RequestSettings,
    settings_from_config,
    token_id_tuple,
    unsupported_option,
)
from hf_paged.options.table import option_of

# Options of the cache, whose values are ignored: continuous batching has a cache of its own.
CACHE_OPTIONS = ("use_cache", "cache_implementation")
_OPTIONS = frozenset(vars(GenerationConfig()))
_SIZES = frozenset(field.name for field in dataclasses.fields(ContinuousBatchingConfig)) - _OPTIONS


class Refused(str):
    """The error of a request that the engine refused: no step ran it, and stock may run it."""


class NoRoom(str):
    """The error of a request that was cut: its tokens are right, but the model or the KV pool has no room for more."""


@dataclasses.dataclass
class ServedOutput(GenerationOutput):
    """An output of a request with a tokenizer of its own. ``finish_reason``: "eos", "stop", "length", or None if the
    request has not ended or the reason is unknown. ``top_logprobs``: as in a `Completion`; empty without the option."""

    finish_reason: str | None = None
    top_logprobs: list[dict[int, float] | None] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class BatchedRequest:
    """One request of a manager, with its output so far."""

    request_id: str
    prompt: list[int]
    max_new_tokens: int | None = None
    eos_token_id: Any = None
    streaming: bool = False
    record_timestamps: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # other fields of a GenerationConfig
    config: GenerationConfig | None = None  # the base, whose fields those above replace
    seed: int = 0
    asked: RequestOptions = PLAIN  # options besides the config
    cache_salt: bytes = b""  # as in `RequestSettings`
    adapter_name: str | None = None
    least_room: int = 0  # with room for fewer new tokens than this, a request that needs more is refused, and not cut
    tokenizer: Any = None  # decodes the text in which stop strings are searched; None for the engine's tokenizer
    form: Form = NO_FORM  # of the output, in texts of this tokenizer
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)  # of `tokens`; empty without the option
    top_logprobs: list[dict[int, float] | None] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    created: float = dataclasses.field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    is_cut: bool = False  # the request's limit of new tokens was lowered, since there is no room for more
    is_cancelled: bool = False
    is_failed: bool = False  # the failed output was handed over, and later outputs of the engine are dropped

    @property
    def needs_tokens(self) -> bool:
        """Whether each token is needed at its step."""
        return self.streaming or self.record_timestamps

    def copies(self, count: int) -> list[BatchedRequest]:
        """Return the request behind its ``count - 1`` children, each with the id that transformers gives it."""
        children = [
            dataclasses.replace(self, request_id=f"{self.request_id}__child#{i}", tokens=[], logprobs=[], times=[],
                                top_logprobs=[])
            for i in range(count - 1)
        ]
        return [*children, self]

    def start(self) -> None:
        self.status, self.lifespan = RequestStatus.PREFILLING, (time.perf_counter(), -1)

    def extend(self, tokens: list[int], logprobs: list[float | None] | None,
               tops: list[dict[int, float] | None] | None = None) -> None:
        self.status = RequestStatus.DECODING
        self.tokens += tokens
        self.logprobs += logprobs or []  # type: ignore[arg-type]  # None for output of before, which none here has
        self.top_logprobs += tops or []
        if self.record_timestamps:
            self.times += [time.perf_counter()] * len(tokens)

    def finish(self, error: str | None = None, reason: str | None = None) -> GenerationOutput:
        now = time.perf_counter()
        started = now if self.status is RequestStatus.PENDING else self.lifespan[0]
        self.lifespan = (started, now)
        self.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        return self.output(error, reason)

    def output(self, error: str | None = None, reason: str | None = None) -> GenerationOutput:
        served = functools.partial(ServedOutput, finish_reason=reason, top_logprobs=self.top_logprobs[:])
        kind = GenerationOutput if self.tokenizer is None else served
        return kind(
            request_id=self.request_id, prompt_ids=self.prompt, generated_tokens=self.tokens[:],
            logprobs=self.logprobs[:], error=error, status=self.status, created_time=self.created,
            lifespan=self.lifespan,
            timestamps=self.times[:] if self.record_timestamps else None,
        )


def failed_output(request: BatchedRequest, error: str) -> GenerationOutput:
    """Return the last output of a failed request, without its tokens if even these raise."""
    try:
        return request.finish(error)
    except Exception:
        return GenerationOutput(request_id=request.request_id, prompt_ids=request.prompt, error=error,
                                status=RequestStatus.FAILED)


def batching_config(model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]) -> GenerationConfig:
    """Return a copy of `config`, or of `model.generation_config`, with `kwargs` over it and the model's EOS ids.

    Raises:
        TypeError: `config` is no GenerationConfig.
        ValueError: a keyword that is no field of one, or a value that its validation refuses.
    """
    check_is_config(config)
    merged = copy.copy(model.generation_config if config is None else config)
    for name in CACHE_OPTIONS:
        setattr(merged, name, None)
    for name in _SIZES.intersection(vars(merged)):  # lighteval sets some of its fields there
        delattr(merged, name)
    merged = with_options(merged, kwargs)
    for source in (model.generation_config, model.config):
        if merged.eos_token_id is None:
            merged.eos_token_id = getattr(source, "eos_token_id", None)
    return merged


def with_options(config: GenerationConfig, options: dict[str, Any]) -> GenerationConfig:
    """Return a copy of `config` with `options` over it; raises ValueError for unknown or invalid options."""
    if not options:
        return config
    config = copy.copy(config)
    if unknown := sorted(set(options) - _OPTIONS):
        raise ValueError(f"{unknown}: expected fields of a GenerationConfig")
    try:
        config.update(**options)
    except TypeError as error:  # transformers compares before it checks types
        raise ValueError(f"generation settings {options!r:.200}: {error}") from error
    return config


def request_settings(engine: Engine, request: BatchedRequest) -> RequestSettings:
    """Return the engine's settings of `request`, and set its `is_cut` if there is no room for all its new tokens.

    Raises:
        UnsupportedOptionError, ValueError, TypeError: as `settings_from_config`.
    """
    assert request.config is not None
    config = copy.copy(with_options(request.config, request.options))
    if request.eos_token_id is not None:
        config.eos_token_id = request.eos_token_id
    if request.max_new_tokens is not None:
        config.max_new_tokens = request.max_new_tokens
    room = engine.room(len(request.prompt))
    wanted = config.max_new_tokens
    if wanted is None and config.max_length is not None:
        wanted = config.max_length - len(request.prompt)
    if wanted is None or (isinstance(wanted, int) and wanted > room):
        if room < request.least_room:
            raise ValueError(f"max_new_tokens={wanted!r} after a prompt of {len(request.prompt)} tokens: the model or "
                             f"the KV pool has room for {max(room, 0)}")
        config.max_new_tokens, request.is_cut = room, True
    settings = settings_from_config(config, len(request.prompt), engine.num_logits)
    adapter = None if request.adapter_name is None else engine.check_adapter(request.adapter_name)
    settings = settings_with(settings, request.asked, engine.num_logits)
    return dataclasses.replace(settings, cache_salt=request.cache_salt, adapter_name=adapter,
                               structured=request.form.structured)


def stop_rule(engine: Engine, settings: RequestSettings, request: BatchedRequest) -> StopRule | None:
    """Return the rule for a request's stop strings and time limit, or None; raises as `Engine.stop_rule`."""
    if request.tokenizer is None or not settings.stop_strings:
        return engine.stop_rule(settings, request.prompt)
    return TextStopRule(settings.stop_strings, request.tokenizer, deadline_after(settings.max_time))


def stock_reason(engine: Engine, config: GenerationConfig, batching: ContinuousBatchingConfig,
                 tokenizer: Any = None) -> Reason | None:
    """Return the reason why transformers' own continuous batching has to serve requests of `config`, or None.

    Args:
        tokenizer: as in `BatchedRequest`.

    Raises:
        UnsupportedModelError: every rank of a sharded model runs the script, so that their threads would diverge.
    """
    if engine.group.is_parallel and not engine.group.driven:
        raise UnsupportedModelError("continuous batching of a model that is sharded over the ranks of this script: "
                                    "expected model.generate or PagedGenerator on every rank")
    if (reason := engine.unsupported_reason()) is not None:
        return reason
    if (option := unsupported_option(config)) is not None:
        name = option.partition("=")[0]
        if option_of(name).made is not None:  # transformers' continuous batching makes the processor
            return option
        return Reason(f"{name}={{}} is not carried out by the paged engine, and transformers' own continuous batching "
                      "ignores it", described(getattr(config, name)), remedy="Use `model.generate` for this option.")
    try:
        sized = copy.copy(config)
        sized.max_new_tokens = config.max_new_tokens or 1  # lengths are each request's own
        asked = settings_from_config(sized, 1, engine.num_logits)
        stop_rule(engine, asked, BatchedRequest("", [], tokenizer=tokenizer))
        token_id_tuple(config.eos_token_id)
    except (ValueError, TypeError) as error:
        return value_reason(error)
    return None


def paged_config(batching: ContinuousBatchingConfig, current: PagedConfig) -> PagedConfig:
    """`current` with the sizes that `batching` asks for; fields left at their defaults ask for nothing."""
    plain = ContinuousBatchingConfig()
    name = "page_size" if hasattr(batching, "page_size") else "block_size"
    page_size = getattr(batching, name)
    changes: dict[str, Any] = {}
    if page_size != getattr(plain, name):
        changes["block_size"] = max(16, 1 << (page_size - 1).bit_length())
    if batching.num_blocks is not None:
        block_size = changes.get("block_size", current.block_size)
        changes["num_blocks"] = -(-batching.num_blocks * page_size // block_size) + 1  # ours counts the null block
    if batching.max_requests_per_batch is not None:
        changes["max_num_seqs"] = batching.max_requests_per_batch
    if batching.max_batch_tokens is not None:
        changes["max_num_batched_tokens"] = batching.max_batch_tokens
        sequences = changes.get("max_num_seqs", current.max_num_seqs)
        changes["max_num_seqs"] = min(sequences, batching.max_batch_tokens)
    if not batching.allow_block_sharing:
        changes["enable_prefix_caching"] = False
    return dataclasses.replace(current, **changes)
