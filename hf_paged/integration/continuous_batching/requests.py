"""Requests of continuous batching, whose settings are read as transformers' own continuous batching reads them.

Only the call's `GenerationConfig` (else `model.generation_config`) counts. A field that is None is off, and does not
take the default of the model or of generate: `do_sample=True` alone samples from the whole distribution.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_paged.config import PagedConfig
from hf_paged.engine.engine import Engine
from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.integration.fallback import value_reason
from hf_paged.options.arguments import check_is_config, described, level_of_caller
from hf_paged.options.request_spec import RequestSpec
from hf_paged.options.settings import request_spec, token_id_tuple, unsupported_option
from hf_paged.options.table import option_of

# Options of the cache, whose values are ignored: continuous batching has a cache of its own.
CACHE_OPTIONS = ("use_cache", "cache_implementation")
_OPTIONS = frozenset(vars(GenerationConfig()))
_SIZES = frozenset(field.name for field in dataclasses.fields(ContinuousBatchingConfig)) - _OPTIONS


@dataclasses.dataclass
class BatchedRequest:
    """One request of a manager, with its output so far. Its settings are read when the thread takes it."""

    request_id: str
    prompt: list[int]
    max_new_tokens: int | None = None
    eos_token_id: Any = None
    streaming: bool = False
    record_timestamps: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # other fields of a GenerationConfig
    config: GenerationConfig | None = None  # the base, whose fields those above replace
    seed: int | None = None  # None has the manager draw one
    own_options: dict[str, Any] = dataclasses.field(default_factory=dict)  # those of `PLAIN` that are given
    cache_salt: bytes = b""  # as in `RequestSpec`
    adapter_name: str | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)  # of `tokens`; empty without the option
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
            dataclasses.replace(self, request_id=f"{self.request_id}__child#{i}", tokens=[], logprobs=[], times=[])
            for i in range(count - 1)
        ]
        return [*children, self]

    def start(self) -> None:
        self.status, self.lifespan = RequestStatus.PREFILLING, (time.perf_counter(), -1)

    def extend(self, tokens: list[int], logprobs: list[float | None] | None) -> None:
        self.status = RequestStatus.DECODING
        self.tokens += tokens
        self.logprobs += logprobs or []  # type: ignore[arg-type]  # None for output of before, which none here has
        if self.record_timestamps:
            self.times += [time.perf_counter()] * len(tokens)

    def finish(self, error: str | None = None) -> GenerationOutput:
        now = time.perf_counter()
        started = now if self.status is RequestStatus.PENDING else self.lifespan[0]
        self.lifespan = (started, now)
        self.status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        return self.output(error)

    def output(self, error: str | None = None) -> GenerationOutput:
        return GenerationOutput(
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


def spec_of(engine: Engine, request: BatchedRequest, autocast: torch.dtype | None) -> RequestSpec:
    """Return a request in the engine's terms, and set its `is_cut` if there is no room for all its new tokens.

    Raises what `Engine.check_prompt`, `spec_in_room` and `Engine.stop_rule` raise.
    """
    assert request.config is not None and request.seed is not None
    prompt = engine.check_prompt(request.prompt)
    config = copy.copy(with_options(request.config, request.options))
    if request.eos_token_id is not None:
        config.eos_token_id = request.eos_token_id
    if request.max_new_tokens is not None:
        config.max_new_tokens = request.max_new_tokens
    adapter = None if request.adapter_name is None else engine.check_adapter(request.adapter_name)
    spec, request.is_cut = spec_in_room(engine, config, prompt, request.own_options, cache_salt=request.cache_salt,
                                        adapter_name=adapter, seed=request.seed, autocast=autocast)
    return spec.but(stop=engine.stop_rule(spec, spec.prompt))


def spec_in_room(engine: Engine, config: GenerationConfig, prompt: list[int], options: Mapping[str, Any],
                 least_room: int = 0, **fields: Any) -> tuple[RequestSpec, bool]:
    """Return the specification of a request, and whether its limit of new tokens was lowered to the room for them.

    Args:
        config: a result of `batching_config`; its ``max_new_tokens`` may be lowered.
        prompt: checked token ids.
        options: those of `PLAIN` that are given.
        least_room: with room for fewer new tokens than this, a request that needs more raises a ValueError.
        **fields: further fields of the `RequestSpec`.

    Raises:
        UnsupportedOptionError, ValueError, TypeError: as `request_spec`.
    """
    room = engine.room(len(prompt))
    wanted, is_cut = config.max_new_tokens, False
    if wanted is None and config.max_length is not None:
        wanted = config.max_length - len(prompt)
    if wanted is None or (isinstance(wanted, int) and wanted > room):
        if room < least_room:
            raise ValueError(f"max_new_tokens={wanted!r} after a prompt of {len(prompt)} tokens: the model or the KV "
                             f"pool has room for {max(room, 0)}")
        config.max_new_tokens, is_cut = room, True
    return request_spec(config, len(prompt), engine.num_logits, options, prompt=prompt, **fields), is_cut


def stock_reason(engine: Engine, config: GenerationConfig) -> Reason | None:
    """Return the reason why transformers' own continuous batching has to serve requests of `config`, or None.

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
        engine.stop_rule(request_spec(sized, 1, engine.num_logits), [])
        token_id_tuple(config.eos_token_id)
    except (ValueError, TypeError) as error:
        return value_reason(error)
    return None


def paged_config(batching: ContinuousBatchingConfig, current: PagedConfig) -> PagedConfig:
    """`current` with the sizes that `batching` asks for; fields left at their defaults ask for nothing."""
    plain = ContinuousBatchingConfig()
    name = "page_size" if hasattr(batching, "page_size") else "block_size"
    page_size = getattr(batching, name)
    block_size, num_blocks, sequences = current.block_size, current.num_blocks, current.max_num_seqs
    if page_size != getattr(plain, name):
        block_size = max(16, 1 << (page_size - 1).bit_length())
    if batching.num_blocks is not None:
        num_blocks = -(-batching.num_blocks * page_size // block_size) + 1  # ours counts the null block
    if batching.max_requests_per_batch is not None:
        sequences = batching.max_requests_per_batch
    tokens = current.max_num_batched_tokens
    if batching.max_batch_tokens is not None:
        tokens = batching.max_batch_tokens
        sequences = min(sequences, tokens)
    return dataclasses.replace(
        current, block_size=block_size, num_blocks=num_blocks, max_num_seqs=sequences, max_num_batched_tokens=tokens,
        enable_prefix_caching=current.enable_prefix_caching and batching.allow_block_sharing,
    )


# Fields of a ContinuousBatchingConfig that `paged_config` and the manager read.
_READ = frozenset(("page_size", "block_size", "num_blocks", "max_requests_per_batch", "max_batch_tokens",
                   "allow_block_sharing", "seed", "max_queue_size", "return_logprobs"))
_INSTEAD = {"max_memory_percent": "set PagedConfig(gpu_memory_utilization=...)",
            "use_cuda_graph": "set PagedConfig(enforce_eager=True) for steps without CUDA graphs",
            "use_async_batching": "set PagedConfig(overlap=...)"}
_warned_of: set[str] = set()


def warn_of_unread(batching: ContinuousBatchingConfig) -> None:
    """Warn of fields that were set and have no effect here, once a process for each."""
    plain = vars(ContinuousBatchingConfig())
    unread = [name for name, value in vars(batching).items()
              if name not in _READ and name not in _warned_of and value != plain.get(name)]
    _warned_of.update(unread)
    for name in unread:
        hint = f" ({_INSTEAD[name]})" if name in _INSTEAD else ""
        warnings.warn(f"hf_paged: ContinuousBatchingConfig.{name}={getattr(batching, name)!r:.80} has no effect on the "
                      f"paged engine{hint}", UserWarning, stacklevel=level_of_caller())
