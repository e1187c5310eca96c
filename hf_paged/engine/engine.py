"""The engine of one model: it takes requests, drives the scheduler and the runner, and returns tokens."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel
from typing_extensions import Unpack

from hf_paged.config import PagedConfig
from hf_paged.engine import engine_registry
from hf_paged.engine.call_counts import CallCounts
from hf_paged.engine.features.routed_experts import RoutedExperts
from hf_paged.engine.locked_core import CLOSED
from hf_paged.engine.lockstep import LockstepBatch, arrivals_of
from hf_paged.engine.observer import Observer
from hf_paged.engine.ranks import interrupts
from hf_paged.engine.ranks.commands import End, Release, ResetCache, UseVocabulary
from hf_paged.engine.request_checks import CANNOT_RUN, RequestChecks
from hf_paged.engine.session import Session, is_copy
from hf_paged.engine.weight_access import WeightAccess
from hf_paged.errors import EngineClosedError, PrecisionBusyError, Reason, UnsupportedModelError
from hf_paged.kernels.build import kernel_log
from hf_paged.models import KVSpec
from hf_paged.models.eligibility import why_not_under
from hf_paged.models.routing.replay import Replay, ReplayCounts
from hf_paged.options.arguments import base_seed, salt_digest
from hf_paged.options.keywords import EngineKeywords, check_keywords, with_keywords
from hf_paged.options.prompts import prompt_ids, prompt_list, split_output
from hf_paged.options.read import MergeCache, call_key
from hf_paged.options.request_spec import RequestSpec, check_priority, take_options
from hf_paged.options.settings import request_spec
from hf_paged.outputs import EngineStats, StepOutput, WarmUpReport
from hf_paged.pictures import CacheView, draw
from hf_paged.runner.kv_cache import KVReads
from hf_paged.runner.memory import most_rows
from hf_paged.runner.weights import ModelMark
from hf_paged.sampling.sampler import derive_seed
from hf_paged.scheduler import Scheduler
from hf_paged.scheduler.block_pool import block_columns
from hf_paged.scheduler.lockstep_rows import blocks_together

# Seconds that a thread sleeps between two checks while its requests wait for a step of another thread.
_NAP = 0.5e-3
FROM_INSIDE = ("A streamer, processor or criterion called `generate` of its own model. That inner call runs in stock; "
               "call it after the outer one.")
IN_UPDATE = ("Steps wait for the end of the update, so that this call runs in stock, over weights that may be half "
             "written. Leave the `with` block first.")
DISABLED = "Disable a model after its calls are done."


class Engine(RequestChecks, WeightAccess):
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
        super().__init__(model, config, tokenizer, owns_device=owns_device)
        self.calls = CallCounts()
        self._public = Session(stream=True)
        self._ids = itertools.count()
        self._at_end_of_batches: list[Callable[[], None]] = []  # actions that must wait until all lockstep calls end
        self._merges = MergeCache()
        self._replay: Replay | None = None
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
        self._check_open()
        # Under autocast the model is checked for each request: an earlier check may have been made without autocast.
        autocast = self.autocast_of_call()
        if not self._has_looked or self.group.is_parallel or autocast is not None:
            self.check_runnable()
        spec = self._spec_of(prompt_token_ids, generation_config, keywords, autocast)
        with self._lock.turn(), self._lock.rlock:
            made = self.add(self._public, spec)
            self._arrived.append(made)
            self._has_looked = True
        return made

    def replay_routes(self) -> None:
        """Let later forwards of the model by a trainer's code take the experts that completions took (see
        docs/reinforcement_learning.md), as `hf_paged.install(replay_routes=True)` does.

        Raises:
            ValueError: the engine's config does not have ``routed_experts=True``.
        """
        if self._executor.routes is None:
            raise ValueError("replay_routes: expected an engine with routed_experts=True")
        if self._replay is None:
            self._replay = Replay(self._executor.source.get_submodule(self._executor.body), owner=self)
            self._core.features[RoutedExperts].keep = self._replay.keep

    def _spec_of(self, prompt_token_ids: Any, generation_config: GenerationConfig | None, keywords: EngineKeywords,
                 autocast: torch.dtype | None) -> RequestSpec:
        """Return a checked request of the arguments of `add_request`."""
        max_new_tokens, request_id = keywords.get("max_new_tokens"), keywords.get("request_id")
        only_scores = type(max_new_tokens) is int and max_new_tokens == 0  # False, which equals 0, is no number
        given, before = split_output(prompt_token_ids)
        prompt = self.check_prompt(prompt_ids(given, self.tokenizer, {}) if isinstance(given, dict) else given)
        model = self._executor.source
        merged = self._merges(model, generation_config, {}, call_key(model, {})).config
        if max_new_tokens is not None:
            merged = copy.copy(merged)  # `_merges` returns the same config to later requests
            merged.max_new_tokens = 1 if only_scores else max_new_tokens
        if merged.num_return_sequences not in (None, 1):
            raise ValueError(f"num_return_sequences={merged.num_return_sequences!r}: expected 1; add the request again")
        spec = request_spec(merged, len(prompt), self.num_logits, take_options({**keywords}), prompt=prompt,
                            autocast=autocast)
        if only_scores:
            spec = spec.scoring_only()
        cache_salt = salt_digest(keywords.get("cache_salt"))
        if (adapter_name := keywords.get("adapter_name")) is not None:
            adapter_name = self.check_adapter(adapter_name)
        structured = self.check_structured(keywords.get("structured"))
        priority = check_priority(keywords.get("priority", 0))
        if not isinstance(request_id, (str, type(None))):
            raise TypeError(f"request_id={request_id!r}: expected None or a str")
        # A plain str: other ranks cannot unpickle a subclass (an enumeration) of the user's script.
        request_id = None if request_id is None else str.__str__(request_id)
        spec = spec.but(cache_salt=cache_salt, adapter_name=adapter_name, structured=structured, priority=priority,
                        request_id=request_id)
        before = None if before is None else self.check_made(prompt, before, spec)
        given_seed: Any = keywords.get("seed")
        seed = derive_seed(base_seed(given_seed, self.config.seed), 0)
        if before is not None and before.seed is not None:
            seed = before.seed
        return spec.but(seed=seed, previous=before)

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

    def add(self, session: Session, spec: RequestSpec) -> str:
        """Queue a request for a session, and return its id. The prompt must have been checked.

        Raises:
            ValueError: an id in use, settings that cannot be encoded, or stop strings as for `stop_rule`.
            EngineClosedError: the engine is closed.
            UnsupportedModelError: the sharded model changed on rank 0, or its weights are not gathered.
            PrecisionBusyError: requests of another precision run.
        """
        stop = self.stop_rule(spec, spec.prompt) if spec.stop is None else spec.stop
        grammar = spec.grammar
        if spec.structured is not None and grammar is None:  # compiled here: no step waits for it
            grammar = self.grammar_of(spec.structured)
        with self._lock.turn(), self._lock.rlock:
            self._refuse_inside("a request was added")
            self._core.recover_if_dirty()
            if not self._core.compute_under(spec.autocast):
                raise PrecisionBusyError(self._busy_reason(spec.autocast))
            if not self._core.requests and self._core.pool.moved():
                if self.group.driven:
                    raise UnsupportedModelError("the model's dtype, device, shape or longest length changed on rank 0, "
                                                "and the other ranks' did not: expected a new PagedGenerator")
                self._core.drop_pool()
            if self._is_shut_down:
                raise EngineClosedError(CLOSED)
            if self.replica is not None and self.replica.is_readable and not self.replica.is_pinned:
                raise UnsupportedModelError("the model is sharded over ranks, which have not gathered its weights: "
                                            "expected a call inside of hf_paged.gathered(model), or model.generate")
            spec = spec.but(request_id=self._unused_id(spec.request_id), stop=stop, grammar=grammar)
            request = self._core.make_request(spec, session)
            if self.group.is_parallel:
                if grammar is not None and self.tokenizer is not None:
                    vocabulary = self._core.grammars.vocabulary(self.tokenizer)
                    if not self._core.grammars.has_shared(vocabulary):
                        self._commands.enqueue(UseVocabulary(vocabulary))
                with interrupts.held_back():
                    session.open[request.request_id] = self._commands.expected[request.request_id] = request
                    self._commands.enqueue(spec.but(grammar=None))  # each rank compiles its own
            else:
                self._core.add(request)
            return request.request_id

    def add_all(self, session: Session, specs: list[RequestSpec]) -> list[str | ValueError]:
        """Call `add` for each specification, and return its id or its ValueError; raises other exceptions."""
        added: list[str | ValueError] = []
        for spec in specs:
            try:
                added.append(self.add(session, spec))
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
    def lockstep(self, specs: list[RequestSpec]) -> Iterator[LockstepBatch | Reason]:
        """Open a batch of rows that step together while the caller picks their tokens, or yield why they cannot.

        Requests of other callers run at the same time. The engine's lock is held only while logits are computed.

        Args:
            specs: prompt and adapter of each row; the most tokens, the salt and autocast are the same for all rows.
        """
        batch: LockstepBatch | None = None
        autocast = specs[0].autocast
        call = {object()}  # referenced by this frame alone: it dies with the call, also after an interrupt
        try:
            with self._held():
                refusal = self._refusal()
                if refusal is None and not self._core.compute_under(autocast):
                    refusal = self._busy_reason(autocast)
                if refusal is None:
                    if self._core.pool.moved():
                        self._core.restart_over_a_new_pool()
                    self._pool()
                    refusal = self._too_many(specs)
                if refusal is None:
                    batch = LockstepBatch(self._core, self._held, self._drive, weakref.ref(call), specs)
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

    def lockstep_reason(self, specs: list[RequestSpec]) -> Reason | None:
        """Return the reason why `lockstep` would refuse these rows now, or None; changes nothing."""
        return self._refusal() or self._too_many(specs)

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

    def _too_many(self, specs: list[RequestSpec]) -> Reason | None:
        """Return the reason why these rows do not fit into the KV pool even if it is empty, or None."""
        wanted = blocks_together(arrivals_of(specs), specs[0].max_new_tokens, self.config.block_size)
        most = self._core.pool.most_blocks - 1
        if (states := most_rows(self._executor, self.config)) is not None and len(specs) > states:
            return Reason("{} rows that step together, and recurrent states of {} have room", len(specs), states,
                          remedy="Give fewer rows a call.")
        if wanted <= most:
            return None
        return Reason("rows that step together may need {} blocks, and the KV pool holds {}", wanted, most,
                      remedy="A lockstep call needs room for all its rows at once. Give fewer rows a call, or raise "
                             "`num_blocks` or `gpu_memory_utilization`.")

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

    def warm_up(self, requests: Any = None, generation_config: GenerationConfig | None = None,
                **keywords: Unpack[EngineKeywords]) -> WarmUpReport:
        """Make the engine ready on a GPU, as ``warmup="full"`` does, and run examples of coming requests. A kernel that
        a later request misses is warned of.

        Args:
            requests: prompts, as for `PagedGenerator.generate`.
            generation_config, **keywords: as for `add_request`; without a config 16 new tokens.
        """
        check_keywords(EngineKeywords, {**keywords}, "Engine.warm_up")
        if generation_config is None:
            keywords = {"max_new_tokens": 16, **keywords}
        template = {"add_generation_prompt": True}
        given = [] if requests is None else prompt_list(requests)
        prompts = [prompt_ids(one, self.tokenizer, template) for one in given]
        return self.warm_up_by(lambda: self._run_examples(prompts, generation_config, keywords))

    def warm_up_by(self, run: Callable[[], object]) -> WarmUpReport:
        """Make the engine ready, with the calls that ``run`` makes as examples; see `warm_up`."""
        self._check_open()
        began, before = time.monotonic(), self.stats()
        with self._lock.turn(), self._lock.rlock:
            self._refuse_inside("warm_up() was called")
            self._pool()
            self._core.warm_up()
            self._core.delays.is_ready = False  # examples are not warned of
        try:
            run()
        finally:
            self._core.delays.is_ready = True
        after = self.stats()
        return WarmUpReport(after.num_kernels_compiled - before.num_kernels_compiled,
                            after.num_kernels_loaded - before.num_kernels_loaded,
                            after.num_graphs_captured - before.num_graphs_captured, time.monotonic() - began)

    @property
    def needs_warm_up(self) -> bool:
        """Whether the config wants a full warm-up, and the device has any use for one."""
        return self.config.warmup == "full" and self.cache_spec.device.type == "cuda"

    def _run_examples(self, prompts: list[Any], generation_config: GenerationConfig | None,
                      keywords: EngineKeywords) -> None:
        self.check_runnable()
        autocast = self.autocast_of_call()
        specs = [self._spec_of(prompt, generation_config, keywords, autocast) for prompt in prompts]
        with self.session() as session:
            for spec in specs:
                self.add(session, spec)
            while session.unfinished():
                self.advance([session])

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
            captured, dropped_by = pool.graph_counts
            kernels, delays = kernel_log.counts(), self._core.delays
            replayed = ReplayCounts(0, 0) if self._replay is None else self._replay.counts
            return EngineStats(
                num_running=s.num_running if s else 0, num_waiting=s.num_waiting if s else 0,
                num_blocks=s.num_blocks if s else 0, num_free_blocks=s.num_free_blocks if s else 0,
                num_preemptions=p["preemptions"] + (s.num_preemptions if s else 0),
                num_generated_tokens=p["generated"],
                num_prefill_tokens=p["prefill"],
                num_steps=p["steps"],
                prefix_cache_queries=p["queries"] + (s.kv_cache_manager.prefix_cache_queries if s else 0),
                prefix_cache_hits=p["hits"] + (s.kv_cache_manager.prefix_cache_hits if s else 0),
                kv_cache_bytes=pool.nbytes,
                num_pool_growths=pool.num_growths,
                num_graphs_captured=captured,
                num_graphs_dropped=sum(dropped_by.values()),
                graphs_dropped_by=dropped_by,
                weights_version=self._core.weights_version,
                calls=self.calls.stats(),
                kv_bytes_read=pool.reads.num_bytes, kv_bytes_saved=pool.reads.num_saved_bytes,
                shadow_bytes=self._executor.copied_bytes + (self.replica.nbytes if self.replica is not None else 0),
                num_draft_tokens=p["drafts"], num_accepted_draft_tokens=p["accepted drafts"],
                num_kernels_compiled=kernels.compiled, num_kernels_loaded=kernels.loaded,
                compile_wait_seconds=delays.compile_seconds, capture_seconds=delays.capture_seconds,
                num_steps_delayed=delays.num_delayed, longest_delay_seconds=delays.longest,
                num_rows_replayed=replayed.num_replayed, num_rows_not_replayed=replayed.num_free,
                num_images_encoded=self.images.num_encoded, num_images_reused=self.images.num_reused,
                image_bytes=self.images.num_bytes + self._fed_contents.num_bytes,
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
            self.forget_images()
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
            self._core.pool.warm_up.saver.close()
            if self._replay is not None:
                self._replay.remove()
            if self.group.is_parallel:
                self._commands.shut_down(self._carry_out, CLOSED)
                return
            for request in list(self._core.requests.values()):
                self.close_session(request.session)
            self.release_memory(graphs=True)

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
    def kv_reads(self) -> KVReads:
        """The bytes of keys and values that attention read so far."""
        return self._core.pool.reads

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the present pool, or None; for code that holds the engine's lock, as observers do."""
        return self._core.scheduler

    def finds_shards(self) -> bool:
        """Return whether the model is sharded by FSDP2, also if it was sharded since the last check."""
        return self.replica is not None or self._executor.finds_shards()

    def model_mark(self) -> ModelMark:
        """Return a fingerprint of what the model computed when prompts were last received."""
        with self._lock.turn(), self._lock.rlock:
            return self._core.model_mark()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _unused_id(self, request_id: str | None) -> str:
        """Return ``request_id``, or a new id for None; raises ValueError if the id is in use."""
        unused = request_id
        while unused is None or unused in self._core.requests or unused in self._commands.expected:
            if request_id is not None:
                raise ValueError(f"request_id={request_id!r}: expected an id that is not in use")
            unused = f"request-{next(self._ids)}"
        return unused

    def _look_for_arrivals(self) -> None:
        """End new requests of `add_request` that a model changed since then cannot run natively."""
        arrived, self._arrived, self._has_looked = self._arrived, [], False
        if not arrived or self.group.is_parallel:
            return
        reason = why_not_under(self._executor, self._executor.autocast)
        if reason is not None:
            for request in [self._core.requests[i] for i in arrived if i in self._core.requests]:
                self._core.refuse(request, CANNOT_RUN + reason.with_remedy)

    def close_session(self, session: Session) -> None:
        """End the unfinished requests of a session."""
        with self._uninterrupted(), self._lock.turn(), self._lock.rlock:
            # An interrupt in `add` may have left a request half in the scheduler and no session: see `dirty`, too.
            is_over = not session.open and (self.group.is_parallel or not self._core.dirty)
            if self.is_reentrant():  # garbage collection closes an abandoned stream in the middle of a step
                if not is_over:
                    self._deferred.append(lambda: self.close_session(session))
                return
            try:
                if is_over:
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
            finally:
                self._run_deferred()
