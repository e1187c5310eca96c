"""The manager of transformers' continuous batching, as its callers use it, over the paged engine."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.engine.driver import EngineThread
from hf_paged.engine.engine import Engine
from hf_paged.integration.call_context import within
from hf_paged.integration.continuous_batching.batched_calls import BatchedCalls
from hf_paged.integration.continuous_batching.board import RequestBoard
from hf_paged.integration.continuous_batching.requests import BatchedRequest
from hf_paged.integration.engines import engine_of
from hf_paged.integration.structured_calls import NO_FORM, Form
from hf_paged.options.arguments import base_seed, num_copies, salt_digest
from hf_paged.options.request_options import PLAIN, RequestOptions
from hf_paged.sampling.sampler import derive_seed

logger = logging.getLogger(__name__)

# Managers that wait for the next call on their model; they hold no strong reference to it.
KEPT: weakref.WeakKeyDictionary[Any, PagedBatchingManager] = weakref.WeakKeyDictionary()


class RequestOverrides(NamedTuple):
    """What requests that are added in a context (`requests_with`) have of their own.

    `config` is as `batching_config` makes it. A request that asks for more new tokens than there is room for is cut
    (`least_room` 0), or refused where there is room for fewer than this.
    """

    config: GenerationConfig | None = None  # in place of the manager's
    least_room: int = 0  # this and the tokenizer as in `BatchedRequest`
    tokenizer: Any = None
    seed: int | None = None  # None: as the manager draws them
    asked: RequestOptions = PLAIN  # besides what the manager was made for
    form: Form = NO_FORM  # of the output


_NOTHING_OWN = RequestOverrides()
_OWN: ContextVar[RequestOverrides] = ContextVar("hf_paged_request_config", default=_NOTHING_OWN)


class PagedBatchingManager:
    """Takes requests from any thread, runs them in one daemon thread, keeps their outputs until they are asked for.

    Made by `init_continuous_batching` of an enabled model; methods and their meaning are those of transformers'
    `ContinuousBatchingManager`. Differences: a request keeps settings of its own (`add_request` takes any field of a
    `GenerationConfig`); outputs that came before `register_result_handler` reach the handler; waiting calls return
    when the thread ends; a request that the model or the KV pool has no room for is cut and fails when it gets there.
    """

    batch_processor = None  # `transformers serve` asks for it

    def __init__(self, model: Any, generation_config: GenerationConfig,
                 batching_config: ContinuousBatchingConfig) -> None:
        self._model: Any = model
        self._model_ref = weakref.ref(model)
        self.generation_config = generation_config
        self.continuous_batching_config = batching_config
        self.warmed_up = False
        self.thread = EngineThread(lambda: self.engine, on_end=self._end)
        self.board = RequestBoard(lambda: self.thread.changed)
        self._calls = BatchedCalls(self.thread, self.board)
        self._was_started = False  # and not joined since
        self._num_requests = 0  # counts ids made
        self._num_seeds = 0

    @property
    def background_thread_status(self) -> EngineThread:
        """What has, as ``fatal_error``, what ended the thread before its time, or None."""
        return self.thread

    @property
    def model(self) -> Any:
        return self._model_ref() if self._model is None else self._model

    @property
    def engine(self) -> Engine:
        """The model's engine as it is now.

        Raises:
            RuntimeError: the model is not enabled any more.
        """
        engine = None if self.model is None else engine_of(self.model)
        if engine is None:
            raise RuntimeError("this manager's model was disabled; call hf_paged.enable(model) first")
        return engine

    # -- the thread ---------------------------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Make the KV pool; CUDA graphs are captured when a step first needs their sizes."""
        self.engine.room(0)
        self.warmed_up = True

    def is_running(self) -> bool:
        """Whether the thread was started and still runs."""
        return self.thread.is_running()

    def start(self) -> None:
        """Start the thread; a warning where it runs already. RuntimeError: the model is not enabled any more."""
        if self.is_running():
            logger.warning("hf_paged: the continuous batching manager is running already")
            return
        self._model = self.model
        self.thread.start()
        self._was_started = True

    def stop(self, block: bool = True, timeout: float | None = None, keep_for_next_session: bool = False,
             hard_stop: bool = False) -> None:
        """End the thread when all requests are done, or at once with `hard_stop`, which fails them.

        Args:
            block: wait for the thread, `timeout` seconds at most (None: as long as it takes).
            keep_for_next_session: leave a stopped manager to `init_continuous_batching`, which gives it out again.
        """
        if not self._was_started:
            logger.warning("hf_paged: the continuous batching manager was not started")
            return
        started = time.perf_counter()
        self.thread.stop(now=hard_stop)
        if block:
            self.join(started, timeout)
        if keep_for_next_session:
            with self.thread.changed:
                KEPT[self.model] = self
                self._let_model_go()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the thread to end, `timeout` seconds at most; a warning where it then still runs."""
        if not self._was_started:
            return
        if not self.thread.join(timeout):
            logger.warning("hf_paged: the generation thread still runs after %s s", timeout)
        else:
            logger.info("hf_paged: generation thread stopped after %.2f s", time.perf_counter() - stop_trigger_time)
            self._was_started = False

    def destroy(self) -> None:
        """Finish what runs and end the thread; no later call gets this manager. Safe to call twice."""
        if self.is_running():
            self.stop(block=True)
        model = self.model
        if model is not None and KEPT.get(model) is self:
            del KEPT[model]

    def pause(self) -> AbstractContextManager[None]:
        """No step runs inside this block, so that the model may be changed; requests in flight go on afterwards.

        Raises:
            RuntimeError: the thread does not run, or ended before it could pause.
        """
        return self.thread.pause()

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, input_ids: Any, request_id: str | None = None, max_new_tokens: int | None = None,
                    streaming: bool = False, record_timestamps: bool = False,
                    eos_token_id: int | list[int] | None = None, cache_salt: str | None = None,
                    adapter_name: str | None = None, **options: Any) -> str | None:
        """Queue a request, also before `start`. One that cannot run gets a FAILED output with its error.

        Args:
            input_ids: token ids, at least one; a list or a 1-D tensor.
            request_id: None: one is made.
            max_new_tokens, eos_token_id: None: the manager's. A negative EOS id means none.
            streaming: an output for every step that brings tokens, besides the last one.
            record_timestamps: note when each token came (`time.perf_counter`).
            cache_salt: cached prefixes are shared among requests of the same salt alone (None: those without one).
            adapter_name: of the LoRA adapter that it runs with, or "__base__" for none; None: those that are active in
                the model. With one that the model has not, its output is FAILED.
            **options: further fields of a `GenerationConfig`, for this request alone.

        Returns:
            The id; None where the thread is stopping or dead (as in transformers), with a warning.

        Raises:
            ValueError: the id belongs to a request that is not finished; `num_return_sequences` below 1; an empty salt.
            TypeError: a salt that is no str.
            queue.Full: `max_queue_size` requests waited for ten seconds.
        """
        own = _OWN.get()
        config = own.config or self.generation_config
        salt = salt_digest(cache_salt)
        copies = num_copies(options.pop("num_return_sequences", config.num_return_sequences))
        prompt = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
        self.thread.check_process()
        with self.thread.changed:
            if self.thread.was_stopped:
                logger.warning("hf_paged: the continuous batching manager is stopped; a request is dropped")
                return None
            if request_id is None:
                request_id = f"req_{self._num_requests}"
                self._num_requests += 1
            asked = own.asked
            if self.continuous_batching_config.return_logprobs and asked.logprobs is False:
                asked = asked._replace(logprobs=True)
            request = BatchedRequest(request_id, prompt, max_new_tokens, eos_token_id, streaming, record_timestamps,
                                     options, config, asked=asked, cache_salt=salt, adapter_name=adapter_name,
                                     least_room=own.least_room, tokenizer=own.tokenizer, form=own.form)
            requests = request.copies(copies)
            self.board.check_ids(requests)
            for one in requests:
                sampled = options.get("do_sample", config.do_sample)
                one.seed = self._next_seed(sampled) if own.seed is None else own.seed
            self.board.add(requests, self.continuous_batching_config.max_queue_size)
            self.thread.submit(self._calls.take_changes)
        return request_id

    def add_requests(self, inputs: list[Any], max_new_tokens: int | None = None, streaming: bool = False,
                     record_timestamps: bool = False, **options: Any) -> list[str]:
        """`add_request` for each of `inputs`; the ids in their order, also of requests that were dropped."""
        with self.thread.changed:
            first = self._num_requests
            self._num_requests += len(inputs)
        ids = [f"req_{first + i}" for i in range(len(inputs))]
        for request_id, input_ids in zip(ids, inputs, strict=True):
            self.add_request(input_ids, request_id, max_new_tokens, streaming, record_timestamps, **options)
        return ids

    def cancel_request(self, request_id: str) -> None:
        """End a request and its children without an output; an id that is not open is left alone."""
        self.board.cancel(request_id)
        self.thread.submit(self._calls.take_changes)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The oldest output that was not fetched (of `request_id`); None after `timeout` seconds, where the thread
        does not run, where the request gets cancelled, or, without a timeout, where no such request is open."""
        self.thread.check_process()
        may_wait_for_it = timeout is not None and request_id not in self.board.open

        def may_come() -> bool:
            known = request_id is None or may_wait_for_it or request_id in self.board.open
            return self.is_running() and not self.thread.is_over and known

        return self.board.outputs.take(request_id, timeout, may_come)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, as long as the thread runs; then those that are left."""
        while True:
            running = self.is_running()
            if (output := self.get_result(timeout=0.1)) is not None:
                yield output
            elif not running:
                return

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request until it is finished or cancelled, or the thread ended."""
        while True:
            running = self.is_running() and request_id in self.board.open
            output = self.get_result(request_id, timeout=0.1)
            if output is not None:
                yield output
            if (output is None and not running) or (output is not None and output.is_finished()):
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Call `callback` on the running event loop with each output of the request, until it is finished."""
        self.board.outputs.register(request_id, callback)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> None:
        """The thread is over: fail what is left."""
        if not self.thread.is_running():  # it is another process', as are the event loops of the handlers
            self.board.outputs.forget_handlers()
        self.board.fail_all(f"generation stopped before this request was done{f': {error!r}' if error else ''}")
        self._let_model_go()

    def _let_model_go(self) -> None:
        """A kept manager whose thread is over does not keep its model alive."""
        if self.thread.is_over and self._model is not None and KEPT.get(self._model) is self:
            self._model = None

    def _next_seed(self, is_sampled: Any) -> int:
        """Of a settled seed, by the request's number; else drawn from torch's generator, where it is needed."""
        seed = self.continuous_batching_config.seed
        engine_seed = self.engine.config.seed
        if seed is None and engine_seed is None:
            return base_seed(None, None) if is_sampled else 0
        self._num_seeds += 1
        return derive_seed(base_seed(seed, engine_seed), self._num_seeds - 1)


def requests_with(own: RequestOverrides) -> AbstractContextManager[None]:
    """Requests that are added in here have this of their own."""
    return within(_OWN, own)
