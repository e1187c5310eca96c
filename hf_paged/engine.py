"""Requests in, tokens out: the engine that drives scheduler and runner over one model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_paged.arguments import base_seed, merge_config, token_ids
from hf_paged.config import PagedConfig
from hf_paged.detokenizer import TextStream
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.models import find_adapter
from hf_paged.integration.models.recognise import unsupported_reason
from hf_paged.integration.models.tuners import adapter_key
from hf_paged.outputs import Completion, EngineStats, StepOutput
from hf_paged.runner.model_runner import StepHandle
from hf_paged.runner.pool import DevicePool
from hf_paged.runner.request_state import SlotParameters
from hf_paged.runner.sampler import derive_seed
from hf_paged.runner.weights import WeightsGuard
from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence, StepPlan
from hf_paged.session import Request, Session
from hf_paged.settings import RequestSettings, settings_from_config


class Engine:
    """The paged engine of one model (reached through `get_engine` or `PagedGenerator.engine`).

    Thread-safe: one lock per engine, held for a step at a time, so that callers in several threads share batches.

    Args:
        model: a causal LM that `hf_paged` supports.
        config: how to run.
        tokenizer: for `StepOutput.new_text` and `Completion.text`; None leaves them None.
        owns_device: take the whole memory budget at once after a real warm-up pass (`PagedGenerator`); otherwise the
            pool starts small and grows on demand (an enabled model, whose GPU is its user's too).

    Raises:
        UnsupportedModelError: the model's class is not supported.
    """

    def __init__(self, model: PreTrainedModel, config: PagedConfig, tokenizer: Any = None, *,
                 owns_device: bool = False) -> None:  # fmt: skip
        adapter_class = find_adapter(model)
        if adapter_class is None:
            raise UnsupportedModelError(f"model={type(model).__name__}: expected a class that hf_paged supports")
        self.config = config
        self.tokenizer = tokenizer
        self._adapter = adapter_class(model)
        self._pool = DevicePool(self._adapter, config, owns_device=owns_device)
        self._guard = WeightsGuard(self._adapter)
        self._lock = threading.RLock()
        self._stepping_thread: int | None = None
        self._public = Session(self, stream=True)
        self._requests: dict[str, Request] = {}
        self._ids = itertools.count()
        self._scheduler: Scheduler | None = None
        self._in_flight: tuple[StepPlan, StepHandle] | None = None
        # True while scheduler or runner may be half-way through a change: an interrupt leaves it set.
        self._dirty = False
        # Totals; those that a scheduler counts hold what schedulers that are gone had counted.
        self._totals = dict.fromkeys(("preemptions", "generated", "prefill", "steps", "queries", "hits"), 0)

    # -- requests ---------------------------------------------------------------------------------------------------

    def add_request(self, prompt_token_ids: Any, generation_config: GenerationConfig | None = None, *,
                    request_id: str | None = None, priority: int = 0, seed: int | None = None) -> str:  # fmt: skip
        """Queue a request; `step` returns its tokens.

        Args:
            prompt_token_ids: token ids, at least one, each in [0, vocab_size).
            generation_config: None: `model.generation_config`. Unset fields take the model's and then stock's values.
            request_id: None: one is made. Must not be in use.
            priority: lower runs earlier; equal ones in order of arrival.
            seed: of this request's random numbers, in [0, 2**63). None: the config's `seed`, else drawn from torch's
                default generator.

        Returns:
            The request's id.

        Raises:
            ValueError, TypeError: naming the argument, the value and what is accepted; nothing is queued then.
            UnsupportedOptionError: a generation option that is not native.
            UnsupportedModelError: the model cannot run natively as it is now (hooks, wrappers, dtypes).
        """
        self.check_runnable()
        prompt = self.check_prompt(prompt_token_ids)
        merged = self.merge_config(generation_config, {})
        if merged.num_return_sequences not in (None, 1):
            raise ValueError(f"num_return_sequences={merged.num_return_sequences!r}: expected 1; add the request again")
        settings = settings_from_config(merged, len(prompt))
        return self._public.add(prompt, settings, seed=derive_seed(self.base_seed(seed), 0), request_id=request_id,
                                priority=priority)  # fmt: skip

    def step(self) -> list[StepOutput]:
        """Run one step and return what it brought, together with what other callers' steps brought before."""
        return self._advance(self._public, always_step=True)

    def abort(self, request_id: str) -> None:
        """End a request of `add_request`; the next `step` returns its completion with ``finish_reason="abort"``.

        Raises:
            KeyError: no unfinished request has this id.
        """
        with self._lock:
            request = self._requests[request_id]
            self._drain()
            if request_id in self._requests:
                self._scheduler_or_build().abort(request_id)
                self._finish(request)

    def has_unfinished(self) -> bool:
        """True while a request of `add_request` runs or its outputs were not fetched by `step`."""
        return self._public.unfinished()

    @contextmanager
    def session(self, *, stream: bool = False) -> Iterator[Session]:
        """A session of one's own; leaving the block ends what is still running in it, whatever happened."""
        session = Session(self, stream=stream, cache_key=adapter_key(self._adapter.model))
        try:
            yield session
        finally:
            session.close()

    # -- state ------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and present state; see `EngineStats`."""
        with self._lock:
            s, p = self._scheduler, self._totals
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
                kv_cache_bytes=self._pool.nbytes,
                num_pool_growths=self._pool.num_growths,
            )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False (and nothing done) while a request is unfinished."""
        with self._lock:
            return self._scheduler.reset_prefix_cache() if self._scheduler else True

    def release_memory(self, graphs: bool = False) -> None:
        """Give the KV pool and the request state back to the device; the next request makes them anew.

        Args:
            graphs: also drop captured CUDA graphs. They point into the pool, so they go with it in any case.

        Raises:
            RuntimeError: while requests are unfinished.
        """
        with self._lock:
            if self._requests:
                raise RuntimeError(f"release_memory: {len(self._requests)} requests are unfinished")
            self._drop_pool()
            if self._adapter.kv_spec().device.type == "cuda":
                torch.cuda.empty_cache()

    def shutdown(self) -> None:
        """End every request, whoever asked for it, and give all memory back."""
        with self._lock:
            for request in list(self._requests.values()):
                self._close(request.session)
            self.release_memory()

    def is_reentrant(self) -> bool:
        """True in the thread that is inside a step of this engine right now."""
        return self._stepping_thread == threading.get_ident()

    # -- checks -----------------------------------------------------------------------------------------------------

    def unsupported_reason(self) -> str | None:
        """Why the model cannot run natively as it is now, or None."""
        return unsupported_reason(self._adapter)

    def check_runnable(self) -> None:
        """Raise UnsupportedModelError where `unsupported_reason` gives one."""
        if (reason := self.unsupported_reason()) is not None:
            raise UnsupportedModelError(f"the model cannot run on the paged engine as it is now: {reason}")

    def check_prompt(self, prompt_token_ids: Any) -> list[int]:
        """A prompt that can run, as a list of ints, or ValueError / TypeError naming what is wrong with it."""
        prompt = token_ids(prompt_token_ids, self._adapter.model.config.vocab_size)
        if (reason := self.too_long(len(prompt), 1)) is not None:
            raise ValueError(f"prompt_token_ids of {len(prompt)} tokens: {reason}")
        return prompt

    def too_long(self, prompt_length: int, max_new_tokens: int) -> str | None:
        """Why a sequence of this length can never run here, or None."""
        with self._lock:
            self._scheduler_or_build()
            length = prompt_length + max_new_tokens
            if length > self.max_model_len:
                return f"{length} tokens with {max_new_tokens} new ones, and max_model_len is {self.max_model_len}"
            # The last token's keys and values are never needed.
            blocks = -(-(length - 1) // self.config.block_size)
            if blocks > self._pool.max_blocks - 1:
                return f"{blocks} blocks are needed, and the KV pool holds {self._pool.max_blocks - 1}"
        return None

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and output."""
        return self._pool.max_model_len

    def base_seed(self, seed: int | None) -> int:
        """A checked seed: `seed` itself, else the config's, else one from torch's default generator."""
        return base_seed(seed, self.config.seed)

    def merge_config(self, config: GenerationConfig | None, kwargs: dict[str, Any]) -> GenerationConfig:
        """`kwargs` over `config` over `model.generation_config` over stock's defaults, as stock generate merges."""
        return merge_config(self._adapter.model, config, kwargs)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _add(self, session: Session, prompt: list[int], settings: RequestSettings, seed: int, request_id: str | None,
             priority: int) -> str:  # fmt: skip
        if not isinstance(priority, int):
            raise TypeError(f"priority={priority!r}: expected an integer")
        if not isinstance(request_id, (str, type(None))):
            raise TypeError(f"request_id={request_id!r}: expected None or a str")
        with self._lock:
            if self.is_reentrant():
                raise RuntimeError("a request cannot be added from inside a step of the same engine")
            self._recover_if_dirty()
            if not self._requests and self._pool.moved():
                self._drop_pool()
            if request_id is None:
                request_id = f"request-{next(self._ids)}"
            if request_id in self._requests:
                raise ValueError(f"request_id={request_id!r}: expected an id that is not in use")
            parameters = SlotParameters(
                settings.do_sample, settings.temperature, settings.top_k, settings.top_p, settings.min_p, seed,
                len(prompt) + settings.min_new_tokens, settings.eos_token_ids,
            )  # fmt: skip
            key = adapter_key(self._adapter.model) if session.cache_key is None else session.cache_key
            sequence = Sequence(request_id, prompt, max_new_tokens=settings.max_new_tokens,
                                eos_token_ids=settings.eos_token_ids, priority=priority, cache_key=key)  # fmt: skip
            request = Request(sequence, settings, parameters, session)
            if session.stream and self.tokenizer is not None:
                request.text = TextStream(self.tokenizer)
            self._dirty = True
            self._scheduler_or_build().add(request.sequence)
            self._requests[request_id] = session.open[request_id] = request
            self._dirty = False
            return request_id

    def _advance(self, session: Session, always_step: bool = False) -> list[StepOutput]:
        with self._lock:
            if self.is_reentrant():
                raise RuntimeError("step() was called from inside a step of the same engine")
            if always_step or not session.outbox:
                self._step()
            outputs = list(session.outbox)
            session.outbox.clear()
            return outputs

    def _close(self, session: Session) -> None:
        with self._lock:
            if not session.open:
                return
            try:
                self._drain()
            except Exception:
                self._dirty = True
            if self._dirty:
                for request_id in session.open:
                    self._requests.pop(request_id, None)
                session.open.clear()
                self._recover_if_dirty()
                return
            for request_id, request in list(session.open.items()):
                self._scheduler_or_build().abort(request_id)
                self._finish(request)
            session.outbox.clear()

    @torch.inference_mode(False)  # tensors made under inference mode could not be written outside it later
    @torch.no_grad()
    def _step(self) -> None:
        self._recover_if_dirty()
        if not self._requests and self._in_flight is None:
            return
        device = self._adapter.kv_spec().device
        self._dirty, self._stepping_thread = True, threading.get_ident()
        try:
            with _ambient(device):
                scheduler = self._scheduler_or_build()
                if scheduler.num_running == 0 and self._in_flight is None:
                    self._begin_busy()
                plan = scheduler.schedule()
                launched = self._launch(plan) if plan is not None else None
                if launched is None or not self._overlaps():
                    self._commit_in_flight()
                    self._in_flight = launched
                    self._commit_in_flight()
                else:
                    previous, self._in_flight = self._in_flight, launched
                    self._commit(previous)
                for sequence in scheduler.take_failed():
                    self._finish(self._requests[sequence.request_id])
                if not self._requests:
                    self._commit_in_flight()  # nobody will ask for the step that ran ahead: its blocks go back now
            self._dirty = False
        finally:
            self._stepping_thread = None

    def _launch(self, plan: StepPlan) -> tuple[StepPlan, StepHandle]:
        assert self._scheduler is not None and self._pool.runner is not None
        try:
            parameters = [self._requests[s.request_id].parameters for s in plan.admitted]
            handle = self._pool.runner.launch(plan, parameters)
        except Exception:
            # Everything is where it was before this step: nothing of it may stay published, and what ran runs anew.
            self._commit_in_flight()
            self._scheduler.rollback(plan)
            self._dirty = False
            raise
        self._totals["steps"] += 1
        self._totals["prefill"] += int(plan.num_new_tokens[plan.num_decode_rows :].sum())
        return plan, handle

    def _commit_in_flight(self) -> None:
        launched, self._in_flight = self._in_flight, None
        self._commit(launched)

    def _commit(self, launched: tuple[StepPlan, StepHandle] | None) -> None:
        if launched is None:
            return
        assert self._scheduler is not None
        plan, handle = launched
        tokens = handle.wait()
        if self._guard.pending:
            self._guard.verify(self._scheduler.kv_cache_manager.block_pool)
        for row in np.flatnonzero(plan.samples & (tokens < 0)):
            if (request := self._requests.get(plan.sequences[row].request_id)) is not None:
                request.error = "the model's logits hold NaN, or no finite value to sample from"
        result = self._scheduler.commit(plan, tokens)
        self._totals["generated"] += len(result.accepted)
        for row in result.accepted:
            request = self._requests.get(plan.sequences[row].request_id)
            if request is not None and request.session.stream:
                self._emit(request, int(tokens[row]))
        for sequence in result.finished:
            if sequence.request_id in self._requests:
                self._finish(self._requests[sequence.request_id])

    def _emit(self, request: Request, token: int) -> None:
        done = request.sequence.finish_reason is not None
        if request.sequence.num_output_tokens <= request.num_emitted or done:
            return  # made again after a recovery, or part of the completion's own output
        request.num_emitted += 1
        text = request.text.push([token]) if request.text else None
        request.session.outbox.append(StepOutput(request.request_id, [token], text))

    def _finish(self, request: Request) -> None:
        sequence, session = request.sequence, request.session
        token_ids = list(sequence.output_token_ids)
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True) if self.tokenizer is not None else None
        reason = sequence.finish_reason or "abort"
        error = request.error or f"{sequence.num_tokens + 1} tokens do not fit into the KV pool alone"
        completion = Completion(token_ids, text, reason, sequence.token_ids[: sequence.num_prompt_tokens], None,
                                sequence.num_cached_tokens, error if reason == "error" else None)  # fmt: skip
        fresh = token_ids[request.num_emitted :] if session.stream else token_ids
        piece = text
        if request.text is not None and text is not None:
            piece = request.text.push(fresh)
            piece += request.text.finish(text)
        session.outbox.append(StepOutput(request.request_id, fresh, piece, reason, completion))
        del self._requests[request.request_id]
        del session.open[request.request_id]

    def _begin_busy(self) -> None:
        """Between idle and busy: may what earlier calls cached still be used?"""
        assert self._scheduler is not None
        if not self.config.enable_prefix_caching:
            return
        manager = self._scheduler.kv_cache_manager
        self._guard.begin(manager.block_pool)
        sequences = [request.sequence for request in self._requests.values()]
        if any(manager.has_older_hit(s.token_ids, s.cache_key) for s in sequences):
            self._guard.verify(manager.block_pool)

    def _scheduler_or_build(self) -> Scheduler:
        if self._scheduler is None:
            device = self._adapter.kv_spec().device
            with torch.inference_mode(False), torch.no_grad(), _ambient(device):
                runner = self._pool.build()
            self._scheduler = self._new_scheduler(runner.cache.num_blocks)
        return self._scheduler

    def _new_scheduler(self, num_blocks: int) -> Scheduler:
        config = SchedulerConfig(
            block_size=self.config.block_size, num_blocks=num_blocks, max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens, max_model_len=self.max_model_len,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )  # fmt: skip
        return Scheduler(config, on_shortage=self._pool.grow)

    def _drop_pool(self) -> None:
        self._retire_scheduler()
        self._scheduler = None
        self._pool.drop()
        self._guard.forget()

    def _retire_scheduler(self) -> None:
        if self._scheduler is not None:
            self._totals["preemptions"] += self._scheduler.num_preemptions
            self._totals["queries"] += self._scheduler.kv_cache_manager.prefix_cache_queries
            self._totals["hits"] += self._scheduler.kv_cache_manager.prefix_cache_hits

    def _recover_if_dirty(self) -> None:
        """After an interrupt at an unknown point: a fresh scheduler over the same pool, unfinished requests anew.

        Requests of other callers start over; they make the same tokens again, of which only the new ones are emitted.
        """
        if not self._dirty:
            return
        self._in_flight = None
        self._guard.forget()
        self._retire_scheduler()
        self._scheduler = self._new_scheduler(self._pool.num_blocks) if self._pool.runner is not None else None
        for request in self._requests.values():
            request.restart()
            self._scheduler_or_build().add(request.sequence)
        self._dirty = False

    def _drain(self) -> None:
        """Commit what is in flight, so that blocks can be freed."""
        self._recover_if_dirty()
        if self._in_flight is not None:
            self._dirty = True
            self._commit_in_flight()
            self._dirty = False

    def _overlaps(self) -> bool:
        if self.config.overlap is None:
            return self._adapter.kv_spec().device.type == "cuda"
        return self.config.overlap


@contextmanager
def _ambient(device: torch.device) -> Iterator[None]:
    """The state the engine runs in, whatever its caller's: the model's GPU current, autocast off."""
    with torch.autocast(device.type, enabled=False):
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield
