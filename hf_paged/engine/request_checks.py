"""Checks of requests before they are added to an engine, and the reasons for which a call cannot run on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, StopStringCriteria

from hf_paged.config import PagedConfig
from hf_paged.engine.features.stop_rules import StopRule, deadline_after
from hf_paged.engine.locked_core import LockedCore
from hf_paged.engine.structured.grammars import NO_TOKENIZER
from hf_paged.engine.structured.matchers import XGrammar
from hf_paged.engine.text import tokenizer_traits
from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.guards.replaced_forwards import autocast_of_call
from hf_paged.models.eligibility import why_not_native, why_not_subclass
from hf_paged.models.executor import view_of
from hf_paged.models.images import known_images
from hf_paged.models.images.fed_contents import MOST_BYTES, FedContents
from hf_paged.models.images.fed_prompt import FedPrompt
from hf_paged.models.images.known_images import KnownImages
from hf_paged.models.images.recording import STAYS_IN_STOCK, record
from hf_paged.models.tuners import adapters_of
from hf_paged.options.arguments import token_id_lists, token_ids
from hf_paged.options.prompts import check_output
from hf_paged.options.request_spec import RequestSpec
from hf_paged.options.structured import Structured, read_structured
from hf_paged.outputs import Completion
from hf_paged.runner.memory import DevicePool

BUSY_PRECISION = ("One engine computes in one precision at a time. Make calls under autocast and calls without it one "
                  "after the other, or all under the same.")
CANNOT_RUN = "the model cannot run on the paged engine as it is now: "


class RequestChecks(LockedCore):
    """The checks of one engine's requests. Arguments as for `Engine`."""

    def __init__(self, model: PreTrainedModel, config: PagedConfig, tokenizer: Any, *, owns_device: bool) -> None:
        super().__init__(model, config, tokenizer, owns_device=owns_device)
        self._fed_contents = FedContents(MOST_BYTES if config.enable_prefix_caching else 0)
        self.images = KnownImages(self._executor, known_images.MOST_BYTES if config.enable_prefix_caching else 0)
        # Of the last request, since most calls repeat the same strings: what the criterion was made from; references,
        # so that its ids stay those of these objects; and the criterion, which takes long to make.
        self._stop_strings: tuple[tuple, tuple, StopStringCriteria] | None = None

    def class_reason(self) -> Reason | None:
        """Return the reason why code of the model's own class makes stock run every call, or None."""
        return why_not_subclass(self._executor)

    def unsupported_reason(self) -> Reason | None:
        """Return the reason why a call of this thread cannot run natively with the model as it is now, or None."""
        return why_not_native(self._executor)

    def precision_reason(self) -> Reason | None:
        """Return the reason why this thread's call cannot run beside requests of another precision, or None."""
        if not self._core.is_in_use or (autocast := self.autocast_of_call()) == self._executor.autocast:
            return None
        return self._busy_reason(autocast)

    def _busy_reason(self, autocast: torch.dtype | None) -> Reason:
        """Return the reason why a call under this autocast cannot run beside the running ones."""
        return Reason("other calls run {} at the same time, and this one {}", _under(self._executor.autocast),
                      _under(autocast), remedy=BUSY_PRECISION)

    def autocast_of_call(self) -> torch.dtype | None:
        """Return the dtype to which autocast of this thread casts weights; None without autocast."""
        return self._executor.autocast_of_call()

    @property
    def has_states(self) -> bool:
        """Whether the model keeps a recurrent state of each sequence, from which no token is taken back."""
        return self._executor.has_states

    @property
    def has_stock_cache(self) -> bool:
        """Whether pages hold what stock's cache does, in this thread's autocast."""
        return self._executor.has_stock_cache and self.autocast_of_call() is None

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model's embedding takes."""
        return self._executor.vocab_size

    @property
    def num_logits(self) -> int:
        """The number of logits of a token; ids in generation options must lie below this number."""
        return self._executor.num_logits

    @property
    def max_model_len(self) -> int:
        """The most tokens that a sequence may have, prompt and output."""
        return self._core.pool.max_model_len

    def check_runnable(self) -> None:
        """Raise UnsupportedModelError for `unsupported_reason`, EngineClosedError if closed, or as `check_gathered`."""
        self._check_open()
        if (reason := self.unsupported_reason()) is not None:
            raise UnsupportedModelError(CANNOT_RUN + reason.with_remedy)
        self.check_gathered()

    def check_gathered(self) -> None:
        """Raise RuntimeError inside of `hf_paged.gathered` if this rank's weights changed since they were gathered."""
        replica = self.replica
        if replica is not None and replica.is_readable and replica.is_pinned and replica.is_stale():
            raise RuntimeError("the weights of the sharded model changed inside of hf_paged.gathered(model), or their "
                               "memory was released: leave the block before training, and enter it again")

    def check_prompt(self, prompt_token_ids: Any) -> list[int]:
        """Return the prompt as a list of ints, or raise a ValueError or TypeError that says why it cannot run."""
        prompt = token_ids(prompt_token_ids, self._executor.vocab_size)
        if (reason := self.too_long(len(prompt), 1)) is not None:
            limit = self.room(0) - 1
            raise ValueError(f"prompt_token_ids of {len(prompt)} tokens: expected at most {limit} ({reason})")
        return prompt

    def check_prompts(self, prompts: list[Any]) -> list[list[int]]:
        """Return the result of `check_prompt` for each prompt."""
        checked = token_id_lists(prompts, self._executor.vocab_size)
        if checked and self.too_long(max(map(len, checked)), 1) is None:
            return checked
        return [self.check_prompt(prompt) for prompt in prompts]

    def check_made(self, prompt: list[int], made: Completion, spec: RequestSpec) -> Completion:
        """Return an earlier output that a checked prompt can continue, or raise a ValueError or TypeError."""
        made = check_output(made, self._executor.vocab_size, spec.max_new_tokens, spec.logprobs)
        count = len(made.token_ids)
        if count and (reason := self.too_long(len(prompt) + count - 1, 1)) is not None:
            raise ValueError(f"output_token_ids of {count} tokens after a prompt of {len(prompt)}: expected fewer "
                             f"({reason})")
        if spec.structured is not None:
            ends = (*spec.eos_token_ids, *spec.stop_token_ids)
            matcher = self.grammar_of(spec.structured).matcher(ends)
            at = next((i for i, token in enumerate(made.token_ids) if not matcher.accept(token)), None)
            if at is not None:
                raise ValueError(f"output_token_ids: token {made.token_ids[at]} at place {at} is not what structured "
                                 "allows there; expected output of the same form")
        return made

    def check_structured(self, structured: Any) -> Structured | None:
        """Return a form of outputs that compiles to a grammar, or raise the error of `add_request`."""
        read = read_structured(structured)
        if read is not None:
            self.grammar_of(read)
        return read

    def grammar_of(self, structured: Structured, tokenizer: Any = None) -> XGrammar:
        """Return the grammar of a form for a tokenizer, by default the engine's; raises as `Grammars.compile`."""
        return self._core.grammars.compile(structured, self._tokenizer_of_grammars(tokenizer))

    def begin_grammar(self, structured: Structured, tokenizer: Any = None) -> Future[XGrammar]:
        """Start to compile `grammar_of`, and return its future; see `Grammars.begin`."""
        tokenizer = self._tokenizer_of_grammars(tokenizer)
        if tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        return self._core.grammars.begin(structured, tokenizer)

    def _tokenizer_of_grammars(self, given: Any) -> Any:
        own = self.tokenizer
        if given is not None and own is not given and self.group.is_parallel:
            raise ValueError("tokenizer: expected the engine's (PagedGenerator.tokenizer), whose vocabulary all ranks "
                             "of the model have")
        return own if given is None else given

    def check_adapter(self, adapter_name: Any) -> str:
        """Return the name of an adapter that requests can use, or raise a ValueError or TypeError with the cause."""
        if not isinstance(adapter_name, str):
            raise TypeError(f"adapter_name={adapter_name!r:.200}: expected None or a str")
        name = str.__str__(adapter_name)
        if (reason := self._executor.why_not_adapter(name)) is not None:
            raise ValueError(f"adapter_name={name!r:.200}: {reason.with_remedy}")
        return name

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that the model has now, sorted."""
        return self._executor.adapter_names

    def adapters_of_rows(self, num_rows: int) -> list[str | None] | Reason:
        """Return the adapter or None of each row under PEFT's `adapter_names`, or the reason why rows cannot run so."""
        names = self._executor.adapters_in_force()
        if names is None:
            return [None] * num_rows
        if isinstance(names, Reason):
            return names
        if len(names) != num_rows:
            return Reason("{} adapter_names for {} rows", len(names), num_rows,
                          remedy="Give a name for each row: with num_return_sequences=n, n times that of each prompt.")
        reasons = (self._executor.why_not_adapter(name) for name in dict.fromkeys(names))
        return next(filter(None, reasons), None) or list(names)

    def images_reason(self, adapter: str | None = None) -> Reason | None:
        """Return the reason why the engine runs no images of this model, or of rows that name this adapter, or None."""
        executor = self._executor
        if executor.inner_decoder is None:
            return Reason("images of a {}, which hands its decoder ids", type(executor.source).__name__,
                          remedy=STAYS_IN_STOCK)
        if self.replica is not None:
            return Reason("images of a model that its trainer shards", remedy=STAYS_IN_STOCK)
        for path, layer in () if adapter is None else executor.look().adapted_layers():
            is_before = path.startswith(f"{executor.body}.") and not path.startswith(f"{executor.inner_decoder}.")
            if is_before and {adapter} & (known := adapters_of(layer)) != {*layer.active_adapters} & known:
                return Reason("images under the adapter {}, which is not the active one of {}", repr(adapter), path,
                              remedy="Activate it (`set_adapter`).")
        return None

    def recorded_images(self, input_ids: torch.Tensor, lengths: list[int], model_kwargs: Mapping[str, Any],
                        max_new_tokens: int, *, once: bool = True) -> list[FedPrompt | None] | Reason:
        """Return what the model's own code makes of the images of a call, for each row (see `record`), or the reason
        why stock has to run it; ``once``: encoders run once over equal images."""
        executor = self._executor
        if (reason := self.images_reason()) is not None:
            return reason
        assert executor.inner_decoder is not None
        through = self.images.through if once and executor.adapters_in_force() is None else lambda body: None
        # Views run without the wrappers of the model's forward.
        model, cast = executor.source, autocast_of_call(executor.source)
        with torch.autocast(model.device.type, cast, enabled=cast is not None, cache_enabled=False):
            found = record(model, executor.inner_decoder, executor.body, executor.masks(), input_ids, lengths,
                           model_kwargs, self._fed_contents, through)
        if isinstance(found, Reason):
            return found
        # Positions of a video may be farther apart than its tokens, and a proof ends at a position.
        longest = max_new_tokens + max((prompt.num_positions for prompt in found if prompt is not None), default=0)
        if executor.max_length(longest) < longest:
            return executor.why_limited(longest, max_new_tokens)
        at_once = max((prompt.longest_chunk for prompt in found if prompt is not None), default=1)
        if at_once > (most := max(1, self.config.max_num_batched_tokens - self.config.max_num_seqs)):
            return Reason("images of a model of which {} tokens see each other, and a step has room for {}", at_once,
                          most,
                          remedy="Calls with text alone run natively. Raise `PagedConfig.max_num_batched_tokens`.")
        if self.group.is_parallel:  # other ranks get rank 0's vectors, and have other devices
            on_host = {prompt: prompt.on_host() for prompt in found if prompt is not None}  # equal rows have one
            return [prompt and on_host[prompt] for prompt in found]
        return found

    def encoding_view(self) -> nn.Module | None:
        """Return a view of the model whose encoders of images run once over equal ones; None where they have to run as
        in stock."""
        executor = self._executor
        model, body = executor.source, executor.source.base_model_prefix
        if self.images_reason() is not None or body not in model._modules:
            return None
        if self.unsupported_reason() is not None or executor.adapters_in_force() is not None:
            return None
        if self.replica is not None:  # which the last check may have made: ranks wait for each other in each forward
            return None
        return self.images.view(model, body)

    def view_for_images(self) -> Any:
        """Return `encoding_view`, or a view with a body of its own: what stock's `generate` sets is not set on the
        model."""
        model, body = self._executor.source, self._executor.body
        return self.encoding_view() or view_of(model, {body: model.get_submodule(body).forward})

    def forget_images(self) -> None:
        """Free what is kept of images, and of what prompts were fed of them."""
        self.images.clear()
        self._fed_contents.clear()

    def stop_rule(self, spec: RequestSpec, prompt: list[int]) -> StopRule | None:
        """Return the rule for the stop strings and the time limit of a request; None if it has neither.

        Raises:
            ValueError: stop strings without a tokenizer, or stop strings that its vocabulary cannot produce.
        """
        if not spec.stop_strings and spec.max_time is None:
            return None
        strings = None
        if spec.stop_strings:
            tokenizer, cached = self.tokenizer, self._stop_strings
            if tokenizer is None:
                raise ValueError(f"stop_strings={spec.stop_strings!r}: expected an engine with a tokenizer")
            made_from = tokenizer_traits(tokenizer), spec.stop_strings
            if cached is None or cached[0] != made_from:
                with torch.device("cpu"):  # its tensors would be made on the caller's default device
                    strings = StopStringCriteria(tokenizer, list(spec.stop_strings))
                held = tokenizer, getattr(tokenizer, "backend_tokenizer", None)
                cached = self._stop_strings = made_from, held, strings
            strings = cached[2]
        return StopRule(strings, deadline_after(spec.max_time), prompt)

    def too_long(self, prompt_length: int, max_new_tokens: int) -> Reason | None:
        """Return the reason why a sequence of this length can never run on this engine, or None.

        A pool whose size a warm-up pass or the other ranks decide (`owns_device`, several ranks) is built for the
        answer; any other pool need not exist.
        """
        if self.owns_device and self._core.scheduler is not None:  # the size is fixed: do not wait for a step's lock
            return self._too_long_in(self._core.pool, prompt_length, max_new_tokens)
        with self._lock.turn(), self._lock.rlock:
            pool = self._pool() if self.owns_device or self.group.is_parallel else self._core.pool
            return self._too_long_in(pool, prompt_length, max_new_tokens)

    def _too_long_in(self, pool: DevicePool, prompt_length: int, max_new_tokens: int) -> Reason | None:
        length = prompt_length + max_new_tokens
        if length > pool.max_model_len:
            if self._executor.max_length(length) < length:
                return self._executor.why_limited(length, max_new_tokens)
            return Reason("{} tokens with {} new ones, and max_model_len is {}", length, max_new_tokens,
                          pool.max_model_len,
                          remedy="Raise `PagedConfig.max_model_len`, or ask for fewer tokens.")
        # One token less, whose keys and values no step reads: a pool that just fits must not be refused.
        blocks = -(-(length - 1) // self.config.block_size)
        if blocks > (most := pool.most_blocks - 1):
            return Reason("{} blocks are needed, and the KV pool holds {}", blocks, most,
                          remedy="Raise `num_blocks` or `gpu_memory_utilization`, or ask for fewer tokens.")
        return None

    def longest(self, length: int) -> float:
        """Return the most tokens of a sequence; infinite if RoPE changes at this length, since stock goes beyond it."""
        changes = self._executor.max_length(length + 1) <= length
        return math.inf if changes else self._core.pool.max_model_len

    def room(self, prompt_length: int) -> int:
        """Return the most new tokens that `too_long` allows after a prompt of this length; below 1 if none fits."""
        with self._lock.turn(), self._lock.rlock:
            pool = self._pool()
            return min(pool.max_model_len, (pool.max_blocks - 1) * self.config.block_size + 1) - prompt_length


def _under(autocast: torch.dtype | None) -> str:
    return "without autocast" if autocast is None else f"under autocast to {autocast}"
