"""The engine of one model: it takes requests, drives the scheduler and the runner, and returns tokens."""

from __future__ import annotations

import copy
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from typing_extensions import Unpack

from hf_paged.attention.registry import check_backend
from hf_paged.config import PagedConfig
from hf_paged.engine import engine_registry, interrupts
from hf_paged.engine.call_counts import CallCounts
from hf_paged.engine.commands import (
    BeginWeightUpdate,
    Build,
    Command,
    CommandQueue,
    End,
    GatherWeights,
    Release,
    ResetCache,
    UseVocabulary,
)
from hf_paged.engine.fair_lock import FairLock
from hf_paged.engine.grammars import NO_TOKENIZER
from hf_paged.engine.lockstep import LockstepBatch
from hf_paged.engine.loop import EngineCore
from hf_paged.engine.matchers import XGrammar
from hf_paged.engine.observer import Observer
from hf_paged.engine.session import NewRequest, Session, is_copy
from hf_paged.engine.stop_rules import CachedStopStrings, StopRule, deadline_after
from hf_paged.engine.weight_transfer import NewAdapter, NoAdapter, WeightLoader, buckets
from hf_paged.errors import (
    EngineClosedError,
    PartlyLoadedError,
    PrecisionBusyError,
    Reason,
    UnsupportedModelError,
)
from hf_paged.kernels.weights_checksum import warm_up
from hf_paged.models import KVSpec, ModelExecutor, find_executor
from hf_paged.models.eligibility import reason_under, subclass_reason, unsupported_reason
from hf_paged.models.replica import Replica
from hf_paged.options.arguments import base_seed, salt_digest, token_id_lists, token_ids
from hf_paged.options.continued import PreviousOutput, split_output
from hf_paged.options.keywords import EngineKeywords, check_keywords, with_keywords
from hf_paged.options.prompts import prompt_ids
from hf_paged.options.read import MergeCache, call_key
from hf_paged.options.request_options import (
    RequestOptions,
    RequestSettings,
    check_priority,
    scoring_only,
    settings_with,
)
from hf_paged.options.settings import settings_from_config
from hf_paged.options.structured import Structured, read_structured
from hf_paged.outputs import EngineStats, StepOutput
from hf_paged.parallel.adapters import add_adapter, has_adapter, read_adapter, remove_adapter
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.peers import connect
from hf_paged.pictures.cache import CacheView, draw
from hf_paged.runner.device import DevicePool
from hf_paged.runner.kv_reads import KVReads
from hf_paged.runner.weights import ModelMark
from hf_paged.sampling.sampler import derive_seed
from hf_paged.scheduler import Scheduler
from hf_paged.scheduler.block_use import block_columns
from hf_paged.scheduler.lockstep_rows import blocks_together

# Seconds that a thread sleeps between two checks while its requests wait for a step of another thread.
_NAP = 0.5e-3
FROM_INSIDE = ("A streamer, processor or criterion called `generate` of its own model. That inner call runs in stock; "
               "call it after the outer one.")
IN_UPDATE = ("Steps wait for the end of the update, so that this call runs in stock, over weights that may be half "
             "written. Leave the `with` block first.")
DISABLED = "Disable a model after its calls are done."
BUSY_PRECISION = ("One engine computes in one precision at a time. Make calls under autocast and calls without it one "
                  "after the other, or all under the same.")
# The updates (`Engine._update`) that the current context is inside of. A copied context (of a task, for instance) keeps
# the updates of its origin, so that `check_outside_update` can refuse an await that would deadlock.
_updates: ContextVar[tuple[object, ...]] = ContextVar("hf_paged_updates", default=())
_CANNOT_RUN = "the model cannot run on the paged engine as it is now: "
_IN_UPDATE = "inside a weight_update() of the same engine, which holds steps off: leave the `with` block first"
_CLOSED = "this engine is closed: its model was disabled"
_FORKED = "this process is a fork of one whose model is sharded over several ranks: expected that process"


def rehearse(model: PreTrainedModel, config: PagedConfig) -> None:
    """Compile the kernels that an engine with ``owns_device`` runs first; frees what it allocates.

    Raises:
        UnsupportedModelError: the model's class is not supported.
        ValueError: a field of the config that does not suit the model, as from `Engine`.
    """
    core = EngineCore(_executor_of(model, config), config, None, owns_device=True)
    with core.changing():
        core.pool.rehearse()


def _executor_of(model: PreTrainedModel, config: PagedConfig) -> ModelExecutor:
    """Return the model's executor after checking that the config suits the model."""
    executor_class = find_executor(model)
    if executor_class is None:
        raise UnsupportedModelError(f"model={type(model).__name__}: expected a class that hf_paged supports")
    warm_up(model.device)
    executor = executor_class(model, merge_weights=config.merge_weights, fused_kernels=config.fused_kernels,
                              one_launch=config.one_launch)
    if not executor.group.is_parallel:  # calls probably run under the autocast of this thread: no change of it later
        executor.autocast = executor.autocast_of_call()
    check_backend(config.attention_backend, executor.kv_spec().attention(config.block_size))
    return executor


def _under(autocast: torch.dtype | None) -> str:
    return "without autocast" if autocast is None else f"under autocast to {autocast}"


def _is_zero(max_new_tokens: Any) -> bool:
    """Return whether no token is to be generated. False, which equals 0, is not a number of tokens."""
    return type(max_new_tokens) is int and max_new_tokens == 0


class _Call:
    """A marker referenced by the frame of `Engine.lockstep` alone: it dies with the call, also after an interrupt."""


class Engine:
    """The paged engine of one model (reached through `get_engine` or `PagedGenerator.engine`).

    Thread-safe: each engine has one lock, which is held for a step at a time. Callers in several threads share steps.

    Args:
        model: a causal LM that `hf_paged` supports.
        config: how to run.
        tokenizer: decodes `StepOutput.new_text` and `Completion.text`; with None both fields are None.
        owns_device: take the whole memory budget at once after a real warm-up pass (`PagedGenerator`); otherwise the
            pool starts small and grows on demand (an enabled model, which shares its GPU with the user's code).

    Raises:
        UnsupportedModelError: the model's class is not supported.
    """

    def __init__(self, model: PreTrainedModel, config: PagedConfig, tokenizer: Any = None, *,
                 owns_device: bool = False) -> None:
        self._executor = _executor_of(model, config)
        spec = self._executor.kv_spec()
        largest = config.max_num_batched_tokens * self._executor.config.hidden_size * spec.compute_dtype.itemsize
        connect(self._executor.group, spec.device, config.all_reduce, largest)
        self.config = config
        self.calls = CallCounts()
        self.owns_device = owns_device
        self._core = EngineCore(self._executor, config, tokenizer, owns_device=owns_device)
        self._commands = CommandQueue(self._executor.group, self._core)
        self._lock = FairLock()
        self._public = Session(stream=True)
        self._ids = itertools.count()
        self._is_shut_down = False
        self._updating_thread: int | None = None  # the thread that is inside of `weight_update`
        self._update: object | None = None  # identifies the update under way in `_updates`
        self._stop_strings: CachedStopStrings | None = None  # of the last request: most calls repeat the same strings
        self._deferred: list[Callable[[], None]] = []  # actions that must wait for the end of a step
        self._at_end_of_batches: list[Callable[[], None]] = []  # actions that must wait until all lockstep calls end
        self._merges = MergeCache()
        # `add_request` checks the model once between two steps; the next step checks it again for all new requests.
        self._has_looked = False
        self._arrived: list[str] = []
        engine_registry.register(self)

    # -- requests ---------------------------------------------------------------------------------------------------

    @with_keywords(EngineKeywords)
    def add_request(self, prompt_token_ids: Any, generation_config: GenerationConfig | None = None,
                    **keywords: Unpack[EngineKeywords]) -> str:
        """Queue a request; `step` returns its tokens.

        Args:
            prompt_token_ids: token ids, at least one, each in [0, vocab_size). Or, to continue a request that was
                ended half-way, its `Completion` or ``{"prompt_token_ids": ids, "output_token_ids": ids}``: the earlier
                output counts as generated, in every setting and in the new completion. A continued `Completion` keeps
                its own seed, and ``seed`` is ignored. An output that was complete ends at once.
            generation_config: the options of generation; None means `model.generation_config`. Unset fields take the
                model's and then stock's values.
            **keywords: the keywords of `EngineKeywords`.

        Returns:
            The request's id.

        Raises:
            ValueError, TypeError: an argument is invalid; the message names it, its value and what is accepted, and
                nothing is queued.
            ImportError: ``structured`` without xgrammar.
            UnsupportedOptionError: a generation option that is not native.
            UnsupportedModelError: the model cannot run natively as it is now (hooks, wrappers, dtypes). Where the model
                changes before the step that receives the request, the request ends with ``finish_reason="error"``.
        """
        check_keywords(EngineKeywords, {**keywords}, "Engine.add_request")
        max_new_tokens, request_id = keywords.get("max_new_tokens"), keywords.get("request_id")
        self._check_open()
        # Under autocast the model is checked for each request: an earlier check may have been made without autocast.
        autocast = self.autocast_of_call()
        if not self._has_looked or self.group.is_parallel or autocast is not None:
            self.check_runnable()
        given, before = split_output(prompt_token_ids)
        prompt = self.check_prompt(prompt_ids(given, self.tokenizer, {}) if isinstance(given, dict) else given)
        model = self._executor.source
        merged = self._merges(model, generation_config, {}, call_key(model, {})).config
        if max_new_tokens is not None:
            merged = copy.copy(merged)  # `_merges` returns the same config to later requests
            merged.max_new_tokens = 1 if _is_zero(max_new_tokens) else max_new_tokens
        if merged.num_return_sequences not in (None, 1):
            raise ValueError(f"num_return_sequences={merged.num_return_sequences!r}: expected 1; add the request again")
        options = RequestOptions.among({**keywords})
        settings = settings_with(settings_from_config(merged, len(prompt), self.num_logits), options, self.num_logits)
        if _is_zero(max_new_tokens):
            settings = scoring_only(settings)
        if (cache_salt := keywords.get("cache_salt")) is not None:
            settings = replace(settings, cache_salt=salt_digest(cache_salt))
        if (adapter_name := keywords.get("adapter_name")) is not None:
            settings = replace(settings, adapter_name=self.check_adapter(adapter_name))
        if (structured := keywords.get("structured")) is not None:
            settings = replace(settings, structured=self.check_structured(structured))
        priority = check_priority(keywords.get("priority", 0))
        if not isinstance(request_id, (str, type(None))):
            raise TypeError(f"request_id={request_id!r}: expected None or a str")
        # A plain str: other ranks cannot unpickle a subclass (an enumeration) of the user's script.
        request_id = None if request_id is None else str.__str__(request_id)
        before = None if before is None else self.check_made(prompt, before, settings)
        given_seed: Any = keywords.get("seed")
        seed = derive_seed(base_seed(given_seed, self.config.seed), 0)
        if before is not None and before.seed is not None:
            seed = before.seed
        new = NewRequest(prompt, settings, seed=seed, priority=priority, request_id=request_id, made=before,
                         autocast=autocast)
        with self._lock.turn(), self._lock.rlock:
            made = self.add(self._public, new)
            self._arrived.append(made)
            self._has_looked = True
        return made

    def step(self) -> list[StepOutput]:
        """Run one step; return its outputs, behind those that steps of other callers made for `add_request`."""
        return self.advance([self._public], always_step=True)[0]

    def abort(self, request_id: str) -> None:
        """End a request of `add_request`; the next `step` returns its completion with ``finish_reason="abort"``.

        Raises:
            KeyError: no unfinished request has this id.
        """
        with self._lock.turn(), self._lock.rlock:
            if request_id not in self._commands.expected:
                self._core.requests[request_id]  # KeyError
            self.after_step(lambda: self._carry_out(End((request_id,), "abort")))  # a tokenizer may abort inside a step

    def unfinished_copies(self, request_id: str) -> list[str]:
        """Return the ids of all callers' unfinished requests that are ``request_id`` or that `copy_ids` made of it."""
        with self._lock.turn(), self._lock.rlock:
            ids = [*self._commands.expected, *self._core.requests]
        return [one for one in ids if one == request_id or is_copy(one, request_id)]

    def has_unfinished(self) -> bool:
        """Return whether a request of `add_request` runs, or has outputs that `step` has not returned."""
        return self._public.unfinished()

    @contextmanager
    def session(self, *, stream: bool = False, text: bool = True) -> Iterator[Session]:
        """Open a session for the block; leaving the block, also by an exception, ends the session's requests.

        With a model sharded over ranks, Ctrl-C is raised only between two steps of a session that does not stream.
        """
        session = Session(stream=stream, text=text)
        with nullcontext() if stream else self._uninterrupted():
            try:
                yield session
            finally:
                self.close_session(session)

    def add(self, session: Session, new: NewRequest) -> str:
        """Queue a request for a session, and return its id. The prompt must have been checked.

        Raises:
            ValueError: an id in use, settings that cannot be encoded, or stop strings as for `stop_rule`.
            EngineClosedError: the engine is closed.
            UnsupportedModelError: the sharded model changed on rank 0, or its weights are not gathered.
            PrecisionBusyError: requests of another precision run.
        """
        stop = self.stop_rule(new.settings, new.prompt) if new.stop is None else new.stop
        if new.settings.structured is not None and new.grammar is None:  # compiled here: no step waits for it
            new = replace(new, grammar=self.grammar_of(new.settings.structured))
        with self._lock.turn(), self._lock.rlock:
            self._refuse_inside("a request was added")
            self._core.recover_if_dirty()
            if not self._core.compute_under(new.autocast):
                raise PrecisionBusyError(self._busy_reason(new.autocast))
            if not self._core.requests and self._core.pool.moved():
                if self.group.driven:
                    raise UnsupportedModelError("the model's dtype, device, shape or longest length changed on rank 0, "
                                                "and the other ranks' did not: expected a new PagedGenerator")
                self._core.drop_pool()
            if self._is_shut_down:
                raise EngineClosedError(_CLOSED)
            if self.replica is not None and self.replica.is_readable and not self.replica.is_pinned:
                raise UnsupportedModelError("the model is sharded over ranks, which have not gathered its weights: "
                                            "expected a call inside of hf_paged.gathered(model), or model.generate")
            new = replace(new, request_id=self._unused_id(new.request_id), stop=stop)
            request = self._core.make_request(new, session)
            if self.group.is_parallel:
                if new.grammar is not None and self.tokenizer is not None:
                    vocabulary = self._core.grammars.vocabulary(self.tokenizer)
                    if not self._core.grammars.has_shared(vocabulary):
                        self._commands.enqueue(UseVocabulary(vocabulary))
                with interrupts.held_back():
                    session.open[request.request_id] = self._commands.expected[request.request_id] = request
                    self._commands.enqueue(replace(new, grammar=None))  # each rank compiles its own
            else:
                self._core.add(request)
            return request.request_id

    def add_all(self, session: Session, requests: list[NewRequest]) -> list[str | ValueError]:
        """Call `add` for each request, and return its id or its ValueError; raises other exceptions."""
        added: list[str | ValueError] = []
        for new in requests:
            try:
                added.append(self.add(session, new))
            except ValueError as error:
                added.append(error)
        return added

    def advance(self, sessions: list[Session], *, always_step: bool = False) -> list[list[StepOutput]]:
        """Return each session's outputs; run a step before that if no session has any, or if ``always_step`` is set."""
        self._refuse_inside("step() was called")
        with self._lock.turn(after_others=True) as turn, self._lock.rlock:
            turn.leave()
            is_stuck = False  # the step had nothing to do, or has to wait for other threads
            if always_step or not any(session.outbox for session in sessions):
                try:
                    self._look_for_arrivals()
                    if self.group.is_parallel:
                        self._commands.step()
                        interrupts.check()
                    else:  # the code of a streaming caller ran since the last step, and may have changed the model
                        is_stuck = not self._core.step(look_at_model=any(session.stream for session in sessions))
                finally:
                    self._run_deferred()
            elif not self.group.is_parallel:
                self._core.recover_if_dirty()  # which reads the outboxes, and so comes before they are emptied
            outputs = [list(session.outbox) for session in sessions]
            for session in sessions:
                session.outbox.clear()
        if is_stuck and not any(outputs) and any(session.unfinished() for session in sessions):
            time.sleep(_NAP)
        return outputs

    @contextmanager
    def lockstep(self, prompts: list[list[int]], max_new_tokens: int, cache_salt: bytes = b"",
                 autocast: torch.dtype | None = None,
                 adapters: list[str | None] | None = None) -> Iterator[LockstepBatch | Reason]:
        """Open a batch of rows that step together while the caller picks their tokens, or yield why they cannot.

        Requests of other callers run at the same time. The engine's lock is held only while logits are computed.

        Args:
            prompts: checked token ids.
            max_new_tokens: the most tokens that each row may get.
            cache_salt: `RequestSettings.cache_salt` of all rows.
            autocast: `NewRequest.autocast` of all rows.
            adapters: `RequestSettings.adapter_name` of each row.
        """
        batch: LockstepBatch | None = None
        named: list[str | None] = [None] * len(prompts) if adapters is None else adapters
        call = _Call()
        try:
            with self._held():
                refusal = self._refusal()
                if refusal is None and not self._core.compute_under(autocast):
                    refusal = self._busy_reason(autocast)
                if refusal is None:
                    if self._core.pool.moved():
                        self._core.restart_over_a_new_pool()
                    self._pool()
                    refusal = self._too_many(prompts, max_new_tokens, named)
                if refusal is None:
                    batch = LockstepBatch(self._core, self._held, self._drive, weakref.ref(call), prompts,
                                          max_new_tokens, cache_salt, named)
                    self._core.batches.append(batch)
                    self._core.note_use()
            if batch is not None:
                yield batch
            elif refusal is not None:
                yield refusal
        finally:
            if batch is not None:
                with self._held():
                    try:
                        batch.close()
                    finally:
                        self._core.dirty |= batch.rows is not None  # an interrupt left `close` before it freed the rows
                        self._core.batches.remove(batch)
                        self._core.recover_if_dirty()
                        self._run_deferred()
                while self._at_end_of_batches and not self._core.batches:
                    self._at_end_of_batches.pop()()

    def lockstep_reason(self, prompts: list[list[int]], max_new_tokens: int,
                        adapters: list[str | None]) -> Reason | None:
        """Return the reason why `lockstep` would refuse these rows now, or None; changes nothing."""
        return self._refusal() or self._too_many(prompts, max_new_tokens, adapters)

    def _refusal(self) -> Reason | None:
        """Return the reason why this thread can open no lockstep batch now, or None."""
        if self.is_updating():
            return Reason("it was called inside a weight_update() of the same engine", remedy=IN_UPDATE)
        if self.is_reentrant():
            return Reason("it was called from inside a step of the same engine", remedy=FROM_INSIDE)
        if self._is_shut_down:
            return Reason("the model was disabled by another thread", remedy=DISABLED)
        if self.group.is_parallel:
            return Reason("the model is sharded over several ranks",
                          remedy="Lockstep needs the whole model on one GPU. Leave the option out.")
        return None

    def _too_many(self, prompts: list[list[int]], max_new_tokens: int, adapters: list[str | None]) -> Reason | None:
        """Return the reason why these rows do not fit into the KV pool even if it is empty, or None."""
        wanted = blocks_together(prompts, max_new_tokens, self.config.block_size, adapters)
        most = self._core.pool.most_blocks - 1
        if wanted <= most:
            return None
        return Reason("rows that step together may need {} blocks, and the KV pool holds {}", wanted, most,
                      remedy="A lockstep call needs room for all its rows at once. Give fewer rows a call, or raise "
                             "`num_blocks` or `gpu_memory_utilization`.")

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the engine's lock between two steps."""
        with self._lock.turn() as turn, self._lock.rlock:
            turn.leave()
            if not self.is_reentrant():
                self._core.settle()
                self._core.end_orphans()
            yield

    def _drive(self, batch: LockstepBatch) -> None:
        """Run steps until a batch has the logits that it waits for; steps of other threads compute them, too."""
        while batch.is_waiting:
            steps = self._core.totals["steps"]
            if self._core.owes_requests:  # the next step is for requests alone, and mostly their own caller runs it
                time.sleep(_NAP)
                if self._core.totals["steps"] != steps:
                    continue
            with self._lock.turn(after_others=True) as turn, self._lock.rlock:
                turn.leave()
                is_stuck = False
                if batch.is_waiting:
                    try:
                        self._look_for_arrivals()
                        is_stuck = not self._core.step()
                    finally:
                        self._run_deferred()
            if is_stuck:
                time.sleep(_NAP)

    # -- state ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return one line. It takes no lock, for debuggers: its figures may be of different moments."""
        if self._is_shut_down or not self._executor.has_source:
            return "Engine(closed)"
        model, scheduler = self._executor.source, self._core.scheduler
        first = next(model.parameters(), None)
        where = "" if first is None else f" in {str(first.dtype).removeprefix('torch.')} on {first.device}"
        state = "no KV pool yet"
        if scheduler is not None:
            usable = scheduler.num_blocks - 1
            state = (f"{scheduler.num_running:,} running, {scheduler.num_waiting:,} waiting, "
                     f"{usable - scheduler.num_free_blocks:,} of {usable:,} KV blocks in use")
        return f"Engine({type(model).__name__}{where}, {state})"

    def stats(self) -> EngineStats:
        """Return counters and the present state."""
        with self._lock.turn(), self._lock.rlock:
            s, p, pool = self._core.scheduler, self._core.totals, self._core.pool
            return EngineStats(
                num_running=s.num_running if s else 0,
                num_waiting=s.num_waiting if s else 0,
                num_blocks=s.num_blocks if s else 0,
                num_free_blocks=s.num_free_blocks if s else 0,
                num_preemptions=p["preemptions"] + (s.num_preemptions if s else 0),
                num_generated_tokens=p["generated"],
                num_prefill_tokens=p["prefill"],
                num_steps=p["steps"],
                prefix_cache_queries=p["queries"] + (s.kv_cache_manager.prefix_cache_queries if s else 0),
                prefix_cache_hits=p["hits"] + (s.kv_cache_manager.prefix_cache_hits if s else 0),
                kv_cache_bytes=pool.nbytes,
                num_pool_growths=pool.num_growths,
                num_graphs_captured=pool.graph_counts[0],
                num_graphs_dropped=pool.graph_counts[1],
                weights_version=self._core.weights_version,
                calls=self.calls.stats(),
                kv_bytes_read=pool.reads.num_bytes,
                kv_bytes_saved=pool.reads.num_saved_bytes,
                shadow_bytes=self._executor.copied_bytes + (self.replica.nbytes if self.replica is not None else 0),
                num_draft_tokens=p["drafts"], num_accepted_draft_tokens=p["accepted drafts"],
            )

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Hold the engine's lock, so that no thread runs a step in the block and no observer is called."""
        with self._lock.turn() as turn, self._lock.rlock:
            turn.leave()
            yield

    def waiting_by_reason(self) -> dict[str, int]:
        """Return the number of waiting requests by the reason why they wait; see `Scheduler.waiting_by_reason`."""
        with self._lock.turn(), self._lock.rlock:
            return self._core.scheduler.waiting_by_reason() if self._core.scheduler is not None else {}

    @property
    def cache_spec(self) -> KVSpec:
        """The shapes, dtypes and device of this rank's cache."""
        return self._executor.kv_spec()

    def cache_view(self) -> CacheView:
        """Return which request uses which block of the KV pool; the view is empty while there is no pool."""
        with self._lock.turn(), self._lock.rlock:
            owners = {name: list(request.sequence.block_table) for name, request in self._core.requests.items()}
            for i, batch in enumerate(self._core.batches):
                for row, sequence in enumerate(batch.rows.sequences if batch.rows is not None else ()):
                    owners[f"lockstep call {i}, row {row}"] = list(sequence.block_table)
            owners = {name: blocks for name, blocks in owners.items() if blocks}
            scheduler = self._core.scheduler
            if scheduler is None:
                return CacheView(np.empty(0, np.int32), np.empty(0, bool), {}, self.config.block_size)
            users, cached = block_columns(scheduler.kv_cache_manager.block_pool)
            return CacheView(users[1:], cached[1:], owners, self.config.block_size)

    def draw_cache(self, trace: str | os.PathLike | None = None) -> Any:
        """Draw the KV pool as it is now: a square for each block, in the color of the request that uses the block;
        shared, cached and free blocks have colors of their own.

        Args:
            trace: a file of `hf_paged.trace`; the use of the blocks over the time of the trace is drawn below, for
                each engine in the file.

        Returns:
            A `matplotlib.figure.Figure`, which a notebook shows; ``savefig`` writes it to a file.

        Raises:
            ImportError: matplotlib is not installed (``pip install 'hf-paged[plot]'``).
            OSError, ValueError: there is no trace in that file.
        """
        return draw(self.cache_view(), trace)

    def watch(self, observer: Observer) -> None:
        """Call an observer for each event from now on, events of the steps under way included."""
        with self._lock.turn(), self._lock.rlock:
            self._core.observers.add(observer)

    def unwatch(self, observer: Observer) -> None:
        """Stop calling an observer; does nothing if the observer does not watch this engine."""
        with self._lock.turn(), self._lock.rlock:
            self._core.observers.remove(observer)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, and does nothing, while a request is unfinished."""
        with self._lock.turn(), self._lock.rlock:
            return self._carry_out(ResetCache())

    def release_memory(self, graphs: bool = False) -> None:
        """Free the device memory of the KV pool and of copies of weights, and empty the prefix cache; the next request
        allocates the memory again.

        On a GPU where the pool lies in reserved addresses (see docs/design/memory.md), the addresses, the CUDA graphs
        and the tables that the graphs read stay, and nothing is captured anew. Elsewhere all are freed, as by `graphs`.

        Args:
            graphs: also free the captured CUDA graphs with their working memory, and all other device memory of the
                engine.

        Raises:
            RuntimeError: while requests are unfinished.
        """
        with self._lock.turn(), self._lock.rlock:
            if unfinished := len(self._core.requests) + len(self._commands.expected):
                raise RuntimeError(f"release_memory: {unfinished} requests are unfinished")
            self._refuse_inside("release_memory() was called")
            if self._core.batches:
                raise RuntimeError("release_memory: a generate call is under way")
            # Merged weights and graphs lie in the replica's memory.
            self._carry_out(Release(graphs or self.replica is not None))
            if self.replica is not None:
                self.replica.release()

    def shutdown(self) -> None:
        """End the requests of all callers, free all memory, and refuse new requests.

        Waits for lockstep calls of other threads, whose forwards need the model as it is. Inside of a lockstep call of
        this thread nothing is waited for, since another call may wait for this one: new requests are refused at once,
        and the rest is done when the last lockstep call ends.
        """
        self._is_shut_down = True
        # A thread that holds the lock (in garbage collection) does not wait: the other calls wait for the lock.
        waits, me = not self._lock.is_held_here(), threading.get_ident()
        while waits and self._core.batches and all(batch.thread != me for batch in self._core.batches):
            with self._held():
                pass  # `_held` ends lockstep calls that an interrupt left without `close`
            time.sleep(_NAP)
        with self._lock.turn(), self._lock.rlock:
            if self.is_reentrant():  # garbage collection in the middle of a step
                self._deferred.append(self.shutdown)
                return
            if self._core.batches:
                self._at_end_of_batches.append(self.shutdown)
                return
            if self.group.is_parallel:
                self._commands.shut_down(self._carry_out, _CLOSED)
                return
            for request in list(self._core.requests.values()):
                self.close_session(request.session)
            self.release_memory(graphs=True)

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Let this thread write the model's weights in the block while requests of any thread are unfinished.

            with engine.weight_update():
                optimizer.step()

        Waits for the end of the step under way; no further step runs before the end of the block. At the end the engine
        treats the weights as changed: `EngineStats.weights_version` goes up, the prefix cache is emptied, running
        requests start over or keep their keys and values (`PagedConfig.on_weight_change`), and merged weights, RoPE
        tables and CUDA graphs are checked before the next step. After an exception in the block the weights count as
        changed, too. On a GPU the block's work on the thread's current stream runs behind the last step, and the next
        step behind the block's work. Ranks that run one script must enter the block together.

        Raises:
            RuntimeError: inside of a step, or of another update, of this engine by the same thread; where the model
                is sharded by FSDP2, also inside of `hf_paged.gathered`, and while requests run.
            EngineClosedError: the model was disabled.
        """
        with self._uninterrupted(), self._lock.turn() as turn, self._lock.rlock:
            turn.leave()
            self._refuse_inside("weight_update() was entered")
            self._check_open()
            if self.replica is not None and self.replica.is_readable:
                if self.replica.is_pinned:
                    raise RuntimeError("weight_update() was entered inside of hf_paged.gathered(model), whose weights "
                                       "are gathered at its begin: leave the block first")
                if self._core.is_in_use:
                    raise RuntimeError("weight_update() of a sharded model was entered while requests run over "
                                       "gathered weights, which no update reaches: end them first")
            self._carry_out(BeginWeightUpdate())
            self._updating_thread = threading.get_ident()
            self._update = object()
            token = _updates.set((*_updates.get(), self._update))
            try:
                self._core.weights_in_doubt = not self.group.is_parallel
                self._core.follow_stream()
                with interrupts.let_through():
                    yield
            finally:
                try:
                    self._commands.tell(None)
                    self._core.follow_stream()
                    self._core.weights_written()
                finally:
                    self._updating_thread = self._update = None
                    with suppress(ValueError):  # the block was left in another context than it was entered in
                        _updates.reset(token)
                    self._run_deferred()

    def load_weights(self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], *,
                     partial: bool = False) -> None:
        """Write new values into the model's weights, in place, as one `weight_update`.

        Args:
            weights: whole tensors by their names in the unsharded model's `state_dict`, as a dict or as pairs; of any
                float dtype, on any device. An iterator is read one pair at a time, may be interrupted by Ctrl-C, and
                may not use the engine. Tied weights may have one name or both. Names of checkpoints that keep each
                expert's matrices apart, or leave out the causal LM's prefix, are accepted, too.
            partial: some of the model's tensors may be missing, and keep their values.

        Raises:
            ValueError, TypeError: a name, shape or dtype that is not the model's, a tensor that is missing, a layer
                that is quantized. Nothing was written: with a dict, list or tuple always; with an iterator if the error
                was found before the first tensor was written.
            PartlyLoadedError: any error after the first tensor was written, the iterator's own included; the error
                names the tensors that were written.
            RuntimeError: inside of a step of this engine; a model that its trainer shards.
        """
        self._check_holds_weights()
        sent = self.group.driven or not self.group.is_parallel  # else every rank is given the tensors
        loader = WeightLoader(self.model, self.group if sent else SINGLE, self._commands.together, partial=partial)
        pairs = loader.checked(weights) if sent else weights
        with nullcontext() if self.is_updating() else self.weight_update():
            if sent:
                loader(pairs)
            else:
                self._load_on_every_rank(loader, weights)

    def _load_on_every_rank(self, loader: WeightLoader, weights: Any) -> None:
        """Load weights on every rank: no rank writes before all ranks have checked, and an error is raised on all."""
        pairs = self._agreed(lambda: loader.checked(weights), loader)
        self._agreed(lambda: loader(pairs), loader)

    def _agreed(self, work: Callable[[], Any], loader: WeightLoader | None = None) -> Any:
        """Return what ``work`` returns on this rank, or raise on every rank if it raised on one."""
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        if self.group.any(error is not None) and error is None:
            what = "another rank could not load the weights that it was given"
            written = () if loader is None else loader.written
            error = PartlyLoadedError(what, written) if written else ValueError(what)
        if error is not None:
            raise error
        return result

    def load_adapter(self, name: str, adapter: Any, config: Any = None) -> None:
        """Add a LoRA adapter to the model, as one `weight_update`. Requests may name the adapter; it is not activated.

        Every rank of a sharded model gets its part of the adapter. PEFT has to be installed. The LoraConfig's targets
        must be linear layers of the decoder; embeddings, head, experts and variants (DoRA) are refused.

        Args:
            name: the adapter's name, for `adapter_names` and `adapter_name`.
            adapter: a directory or hub id of an adapter that PEFT saved, or its state dict by PEFT's names.
            config: a LoraConfig or its dict; needed with a state dict.

        Raises:
            ImportError: PEFT is not installed.
            OSError: there is no such folder, or no adapter in it.
            ValueError, TypeError: the name is taken, or the adapter does not fit the model; the model is unchanged.
            RuntimeError: as from `weight_update`; a model that its trainer shards.
        """
        self._check_holds_weights()
        with self.weight_update():
            if self.group.is_parallel and not self.group.driven:
                settings, tensors = self._agreed(lambda: read_adapter(name, adapter, config))
                names = self._agreed(lambda: add_adapter(self.model, name, settings))
                group = SINGLE
            else:
                settings, tensors = read_adapter(name, adapter, config)
                names, group = add_adapter(self.model, name, settings), self.group
            is_sent = False
            try:
                loader = WeightLoader(self.model, group, self._commands.together, only=frozenset(names))
                if self.group.is_parallel and not self.group.driven:
                    self._load_on_every_rank(loader, tensors)
                else:
                    pairs = loader.checked(tensors)
                    is_sent = True
                    self._commands.tell(NewAdapter(name, settings))
                    loader(pairs)
            except BaseException:
                remove_adapter(self.model, name)
                if is_sent:
                    self._commands.tell(NoAdapter(name))
                raise

    def delete_adapter(self, name: str) -> None:
        """Remove a LoRA adapter from the model, on all ranks, as one `weight_update`.

        Unfinished requests that name the adapter end with ``finish_reason="error"``.

        Raises:
            ValueError: the model has no adapter of this name.
            RuntimeError: as from `load_adapter`.
        """
        self._check_holds_weights()
        if not has_adapter(self.model, name):
            known = ", ".join(map(repr, self.adapter_names)) or "none, since the model has no adapter"
            raise ValueError(f"name={name!r:.200}: expected one of {known}")
        with self.weight_update():
            remove_adapter(self.model, name)
            self._commands.tell(NoAdapter(name))

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and whole tensors, on the host, of the unsharded model's `state_dict`.

        Each tensor has memory of its own. Tensors are gathered in buckets of at most 256 MiB, or of one tensor. Tied
        weights are yielded once, by their first name. Requests may run between two tensors, and weights may change: a
        tensor has the values of the moment at which its bucket was gathered. Where every rank runs the script, each
        rank has to exhaust the iterator, which is empty on ranks > 0.

        Raises:
            RuntimeError: inside of a step, or a `weight_update`, of this engine; a model that its trainer shards.
        """
        self._check_holds_weights()
        for names in buckets(self.model):
            with self._uninterrupted(), self._lock.turn(), self._lock.rlock:
                self._refuse_inside("named_weights() was used")
                self._check_open()
                tensors = self._carry_out(GatherWeights(names))
            for name, tensor in zip(names, tensors, strict=True):
                if tensor is not None:
                    yield name, tensor

    def _check_holds_weights(self) -> None:
        if self.replica is not None:
            raise RuntimeError("the model's weights are sharded by its trainer: expected them to be read and written "
                               "there")

    def after_step(self, action: Callable[[], None]) -> None:
        """Call ``action`` now or, in a thread that is inside a step of this engine, after that step."""
        if self.is_reentrant():
            self._deferred.append(action)
        else:
            action()

    def follow(self) -> None:
        """Carry out the commands of rank 0 until rank 0 shuts its engine down; for ranks that run no code of the user.

        Raises:
            EngineClosedError: an earlier step was interrupted.
        """
        with self._lock.turn() as turn, self._lock.rlock:
            turn.leave()
            while not self._commands.stopped:
                self._commands.follow()
                self._commands.followers.outbox.clear()

    def lead(self, waiting: Callable[[], AbstractContextManager], on_break: Callable[[], None]) -> None:
        """Set what rank 0 does around its communication with ranks that `follow`.

        Args:
            waiting: makes a context that is entered around all code that waits for the other ranks.
            on_break: called when this rank cannot go on with the other ranks (an interrupt, an error in a step).
        """
        self._commands.around, self._commands.on_break = waiting, on_break

    @property
    def group(self) -> ParallelGroup:
        """The ranks over which the model is sharded."""
        return self._executor.group

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that decodes tokens and matches stop strings; another one may be set between calls."""
        return self._core.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._core.tokenizer = tokenizer

    @property
    def model(self) -> PreTrainedModel:
        """The model that this engine runs."""
        return self._executor.source

    @property
    def kv_reads(self) -> KVReads:
        """The bytes of keys and values that attention read so far."""
        return self._core.pool.reads

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the present pool, or None; for code that holds the engine's lock, as observers do."""
        return self._core.scheduler

    @property
    def replica(self) -> Replica | None:
        """The gathered copy of a model sharded by FSDP2, which forwards run; None for other models."""
        return self._executor.replica

    def finds_shards(self) -> bool:
        """Return whether the model is sharded by FSDP2, also if it was sharded since the last check."""
        return self.replica is not None or self._executor.finds_shards()

    @contextmanager
    def writing_weights(self) -> Iterator[None]:
        """Hold the engine between two steps, for code that writes weights that steps read."""
        with self._held():
            self._core.drain()
            with self._core.changing():
                yield

    def is_reentrant(self) -> bool:
        """Return whether this thread is inside a step, a command or a `weight_update` of this engine."""
        busy = self._core.stepping_thread, self._commands.busy_thread, self._updating_thread
        return threading.get_ident() in busy

    def is_updating(self) -> bool:
        """Return whether this thread is inside a `weight_update` of this engine."""
        return self._updating_thread == threading.get_ident()

    def check_outside_update(self) -> None:
        """Raise RuntimeError in a task that is inside a `weight_update`: to await a step there would deadlock."""
        if self._update is not None and self._update in _updates.get():
            raise RuntimeError(f"agenerate or astream was awaited {_IN_UPDATE}")

    def _refuse_inside(self, what: str) -> None:
        """Raise RuntimeError in a thread that is inside a step or a `weight_update` of this engine."""
        if self.is_updating():
            raise RuntimeError(f"{what} {_IN_UPDATE}")
        if self.is_reentrant():
            raise RuntimeError(f"{what} inside a step of the same engine: a streamer, processor or criterion, and what "
                               "else a step calls, may do so only after the step")

    # -- checks -----------------------------------------------------------------------------------------------------

    def class_reason(self) -> Reason | None:
        """Return the reason why code of the model's own class makes stock run every call, or None."""
        return subclass_reason(self._executor)

    def unsupported_reason(self) -> Reason | None:
        """Return the reason why a call of this thread cannot run natively with the model as it is now, or None."""
        return unsupported_reason(self._executor)

    def precision_reason(self) -> Reason | None:
        """Return the reason why this thread's call cannot run beside requests of another precision, or None."""
        if not self._core.is_in_use or (autocast := self.autocast_of_call()) == self._executor.autocast:
            return None
        return self._busy_reason(autocast)

    def autocast_of_call(self) -> torch.dtype | None:
        """Return the dtype to which autocast of this thread casts weights; None without autocast."""
        return self._executor.autocast_of_call()

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

    def model_mark(self) -> ModelMark:
        """Return a fingerprint of what the model computed when prompts were last received."""
        with self._lock.turn(), self._lock.rlock:
            return self._core.model_mark()

    def check_runnable(self) -> None:
        """Raise UnsupportedModelError for `unsupported_reason`, EngineClosedError if closed, or as `check_gathered`."""
        self._check_open()
        if (reason := self.unsupported_reason()) is not None:
            raise UnsupportedModelError(_CANNOT_RUN + reason.with_remedy)
        self.check_gathered()

    def check_gathered(self) -> None:
        """Raise RuntimeError inside of `hf_paged.gathered` if this rank's weights changed since they were gathered."""
        replica = self.replica
        if replica is not None and replica.is_readable and replica.is_pinned and replica.is_stale():
            raise RuntimeError("the weights of the sharded model changed inside of hf_paged.gathered(model), or their "
                               "memory was released: leave the block before training, and enter it again")

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise EngineClosedError(_CLOSED)

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

    def check_made(self, prompt: list[int], made: PreviousOutput, settings: RequestSettings) -> PreviousOutput:
        """Return an earlier output that a checked prompt can continue, or raise a ValueError or TypeError."""
        made = made.checked(self._executor.vocab_size, settings.max_new_tokens, settings.logprobs)
        count = len(made.token_ids)
        if count and (reason := self.too_long(len(prompt) + count - 1, 1)) is not None:
            raise ValueError(f"output_token_ids of {count} tokens after a prompt of {len(prompt)}: expected fewer "
                             f"({reason})")
        if settings.structured is not None:
            ends = (*settings.eos_token_ids, *settings.stop_token_ids)
            matcher = self.grammar_of(settings.structured).matcher(ends)
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
        if (reason := self._executor.adapter_reason(name)) is not None:
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
        reasons = (self._executor.adapter_reason(name) for name in dict.fromkeys(names))
        return next(filter(None, reasons), None) or list(names)

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
            if (most := self._executor.max_length(length)) < length:
                return Reason("{} tokens with {} new ones, and beyond {} the model's frequencies depend on the longest "
                              "row of a batch", length, max_new_tokens, most,
                              remedy="Ask for fewer tokens, or configure a `rope_type` that is the same at all lengths "
                                     "(yarn, for instance).")
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

    # -- inside -----------------------------------------------------------------------------------------------------

    def start_over_in_child(self) -> None:
        """Start over in the child of a fork, with an empty cache and only the requests of the thread that forked.

        Inside of a step of this thread, the step is finished first.
        """
        if not self._executor.has_source:  # the model is gone, and no call can be made
            return
        self._core.grammars.forget_open()
        if self.group.is_parallel:
            self._commands.over = _FORKED  # the connections to the other ranks belong to the parent
        if self.is_reentrant():
            self._deferred.append(self._forget_other_threads)
        else:
            self._core.stepping_thread = self._commands.busy_thread = self._updating_thread = None
            self._forget_other_threads()

    def _forget_other_threads(self) -> None:
        """Drop the requests of threads that the fork did not copy, and recover from a step that one of them ran."""
        self._core.dirty = not self.group.is_parallel
        unfinished = [*self._core.requests.values(), *self._commands.expected.values()]
        for request in [request for request in unfinished if request.thread != threading.get_ident()]:
            self._core.drop(request)
            self._commands.expected.pop(request.request_id, None)
        for batch in [batch for batch in self._core.batches if batch.thread != threading.get_ident()]:
            self._core.batches.remove(batch)
        self._core.note_use()

    def stop_rule(self, settings: RequestSettings, prompt: list[int]) -> StopRule | None:
        """Return the rule for the stop strings and the time limit of a request; None if its settings have neither.

        Raises:
            ValueError: stop strings without a tokenizer, or stop strings that its vocabulary cannot produce.
        """
        if not settings.stop_strings and settings.max_time is None:
            return None
        strings = None
        if settings.stop_strings:
            if self.tokenizer is None:
                raise ValueError(f"stop_strings={settings.stop_strings!r}: expected an engine with a tokenizer")
            cached = self._stop_strings
            if cached is None or not cached.is_of(self.tokenizer, settings.stop_strings):
                cached = self._stop_strings = CachedStopStrings(self.tokenizer, settings.stop_strings)
            strings = cached.criterion
        return StopRule(strings, deadline_after(settings.max_time), prompt)

    def _unused_id(self, request_id: str | None) -> str:
        """Return ``request_id``, or a new id for None; raises ValueError if the id is in use."""
        if request_id is None:
            return next(made for i in self._ids if not self._is_in_use(made := f"request-{i}"))
        if self._is_in_use(request_id):
            raise ValueError(f"request_id={request_id!r}: expected an id that is not in use")
        return request_id

    def _is_in_use(self, request_id: str) -> bool:
        return request_id in self._core.requests or request_id in self._commands.expected

    def _pool(self) -> DevicePool:
        if self._core.scheduler is None:
            self._carry_out(Build())
        return self._core.pool

    def _busy_reason(self, autocast: torch.dtype | None) -> Reason:
        """Return the reason why a call under this autocast cannot run beside the running ones."""
        return Reason("other calls run {} at the same time, and this one {}", _under(self._executor.autocast),
                      _under(autocast), remedy=BUSY_PRECISION)

    def _look_for_arrivals(self) -> None:
        """End new requests of `add_request` that a model changed since then cannot run natively."""
        arrived, self._arrived, self._has_looked = self._arrived, [], False
        if not arrived or self.group.is_parallel:
            return
        reason = reason_under(self._executor, self._executor.autocast)
        if reason is not None:
            for request in [self._core.requests[i] for i in arrived if i in self._core.requests]:
                self._core.refuse(request, _CANNOT_RUN + reason.with_remedy)

    def _carry_out(self, command: Command) -> Any:
        if self.group.is_parallel and self._updating_thread is not None:
            raise RuntimeError("a call that all ranks carry out was made inside a weight_update() of the same engine")
        try:
            return self._commands.carry_out(command)
        finally:
            if not self.is_reentrant():
                self._run_deferred()

    def _run_deferred(self) -> None:
        """Run the actions that waited for the end of a step, and note whether the engine is still in use."""
        try:
            while self._deferred:
                self._deferred.pop()()
        finally:
            self._core.note_use()

    def _uninterrupted(self) -> AbstractContextManager[None]:
        """Return a context in which Ctrl-C is held back for a sharded model, so that no rank is left a step behind."""
        return interrupts.held_back() if self.group.is_parallel else nullcontext()

    def close_session(self, session: Session) -> None:
        """End the unfinished requests of a session."""
        with self._uninterrupted(), self._lock.turn(), self._lock.rlock:
            try:
                self._close_session(session)
            finally:
                if not self.is_reentrant():
                    self._run_deferred()

    def _close_session(self, session: Session) -> None:
        # An interrupt in `add` may have left a request half in the scheduler and no session: `dirty` is checked, too.
        if not session.open and (self.group.is_parallel or not self._core.dirty):
            return
        if self.is_reentrant():  # garbage collection closes an abandoned stream in the middle of a step
            self._deferred.append(lambda: self.close_session(session))
            return
        if self.group.is_parallel:
            self._commands.close(session, self._carry_out)
            return
        try:
            self._core.drain()
        except Exception:
            self._core.dirty = True
        if self._core.dirty:
            for request in list(session.open.values()):
                self._core.drop(request)
            self._core.recover_if_dirty()
            return
        for request in list(session.open.values()):
            self._core.end(request, "abort")
        session.outbox.clear()
