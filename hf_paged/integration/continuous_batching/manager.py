"""The manager of transformers' continuous batching, with the same interface, over the paged engine."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.engine.driver import EngineThread
from hf_paged.engine.engine import Engine
from hf_paged.integration.continuous_batching.board import BoardSinks, RequestBoard
from hf_paged.integration.continuous_batching.requests import BatchedRequest
from hf_paged.integration.enabled import engine_of
from hf_paged.options.arguments import base_seed, num_copies, salt_digest
from hf_paged.sampling.sampler import derive_seed

logger = logging.getLogger(__name__)

# Managers kept for the next call on their model (`keep_for_next_session`), to which they hold no strong reference.
KEPT: weakref.WeakKeyDictionary[Any, PagedBatchingManager] = weakref.WeakKeyDictionary()


class PagedBatchingManager:
    """A manager that takes requests from any thread, runs them in one daemon thread, and keeps outputs until fetched.

    Made by `init_continuous_batching` of an enabled model. Its methods are those of transformers'
    `ContinuousBatchingManager`, with these differences: a request has settings of its own (`add_request` takes any
    field of a `GenerationConfig`); outputs that came before `register_result_handler` reach the handler; waiting calls
    return when the thread ends; a request for which the model or the KV pool has no room is cut, and fails there.
    """

    batch_processor = None  # `transformers serve` reads this attribute

    def __init__(self, model: Any, generation_config: GenerationConfig,
                 batching_config: ContinuousBatchingConfig) -> None:
        self._model: Any = model
        self._model_ref = weakref.ref(model)
        self.generation_config = generation_config
        self.continuous_batching_config = batching_config
        self.warmed_up = False
        self.thread = EngineThread(lambda: self.engine, on_end=self._end)
        self.board = RequestBoard(lambda: self.thread.changed)
        self._calls = BoardSinks(self.thread, self.board)
        self._was_started = False  # and not joined since
        self._num_requests = 0  # counts ids made
        self._num_seeds = 0

    @property
    def background_thread_status(self) -> EngineThread:
        """The thread, whose ``fatal_error`` is the error that ended it, or None."""
        return self.thread

    @property
    def model(self) -> Any:
        return self._model_ref() if self._model is None else self._model

    @property
    def engine(self) -> Engine:
        """The present engine of the model.

        Raises:
            RuntimeError: the model is not enabled any more.
        """
        engine = None if self.model is None else engine_of(self.model)
        if engine is None:
            raise RuntimeError("this manager's model was disabled; call hf_paged.enable(model) first")
        return engine

    # -- the thread ---------------------------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Build the KV pool. CUDA graphs are captured later, when a step first needs their size."""
        self.engine.room(0)
        self.warmed_up = True

    def is_running(self) -> bool:
        return self.thread.is_running()

    def start(self) -> None:
        """Start the thread, or log a warning if it runs; raises RuntimeError if the model is no longer enabled."""
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
        """Finish all requests and end the thread; no later call gets this manager. Safe to call twice."""
        if self.is_running():
            self.stop(block=True)
        model = self.model
        if model is not None and KEPT.get(model) is self:
            del KEPT[model]

    def pause(self) -> AbstractContextManager[None]:
        """Run no step inside the block, so that the model may be changed; requests continue after the block.

        Raises:
            RuntimeError: the thread does not run, or ended before it could pause.
        """
        return self.thread.pause()

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, input_ids: Any, request_id: str | None = None, max_new_tokens: int | None = None,
                    streaming: bool = False, record_timestamps: bool = False,
                    eos_token_id: int | list[int] | None = None, cache_salt: str | None = None,
                    adapter_name: str | None = None, **options: Any) -> str | None:
        """Queue a request, also before `start`. A request that cannot run gets a FAILED output with its error.

        Args:
            input_ids: token ids, at least one; a list or a 1-D tensor.
            request_id: the request's id; None has the manager make one.
            max_new_tokens, eos_token_id: None means the manager's. A negative EOS id means none.
            streaming: make an output for each step with new tokens, besides the last output.
            record_timestamps: note the time of each token (`time.perf_counter`).
            cache_salt: the request shares cached prefixes only with requests of the same salt (or, for None, of none).
            adapter_name: the LoRA adapter of the request, or "__base__" for none; None means the adapters that are
                active in the model. The output is FAILED if the model does not have the adapter.
            **options: further fields of a `GenerationConfig`, for this request alone.

        Returns:
            The id; None, with a warning, if the thread is stopping or dead (as in transformers).

        Raises:
            ValueError: an unfinished request has the id; `num_return_sequences` below 1; an empty salt.
            TypeError: a salt that is no str.
            queue.Full: `max_queue_size` requests waited for ten seconds.
        """
        config = self.generation_config
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
            own = {"logprobs": True} if self.continuous_batching_config.return_logprobs else {}
            request = BatchedRequest(request_id, prompt, max_new_tokens, eos_token_id, streaming, record_timestamps,
                                     options, config, own_options=own, cache_salt=salt, adapter_name=adapter_name)
            requests = request.copies(copies)
            self.board.check_ids(requests)
            seed, own_seed = self.continuous_batching_config.seed, self.engine.config.seed
            seed = own_seed if seed is None else seed
            for one in requests:
                if seed is not None:
                    one.seed = derive_seed(base_seed(seed, None), self._num_seeds)
                    self._num_seeds += 1
                else:
                    one.seed = base_seed(None, None) if options.get("do_sample", config.do_sample) else 0
            self.board.add(requests, self.continuous_batching_config.max_queue_size)
            self.thread.submit(self._calls.take_changes)
        return request_id

    def add_requests(self, inputs: list[Any], max_new_tokens: int | None = None, streaming: bool = False,
                     record_timestamps: bool = False, **options: Any) -> list[str]:
        """Call `add_request` for each of `inputs`; returns the ids in order, also of requests that were dropped."""
        with self.thread.changed:
            first = self._num_requests
            self._num_requests += len(inputs)
        ids = [f"req_{first + i}" for i in range(len(inputs))]
        for request_id, input_ids in zip(ids, inputs, strict=True):
            self.add_request(input_ids, request_id, max_new_tokens, streaming, record_timestamps, **options)
        return ids

    def cancel_request(self, request_id: str) -> None:
        """End a request and its children without an output; does nothing for an id that is not open."""
        self.board.cancel(request_id)
        self.thread.submit(self._calls.take_changes)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Return the oldest output that was not fetched (of `request_id`). Returns None after `timeout` seconds, if the
        thread does not run, if the request is cancelled or, without a timeout, if no such request is open."""
        self.thread.check_process()
        may_wait_for_it = timeout is not None and request_id not in self.board.open

        def may_come() -> bool:
            known = request_id is None or may_wait_for_it or request_id in self.board.open
            return self.is_running() and not self.thread.is_over and known

        return self.board.take(request_id, timeout, may_come)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield outputs as long as the thread runs, and then the remaining ones."""
        while True:
            running = self.is_running()
            if (output := self.get_result(timeout=0.1)) is not None:
                yield output
            elif not running:
                return

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield the outputs of one request until it is finished or cancelled, or the thread has ended."""
        while True:
            running = self.is_running() and request_id in self.board.open
            output = self.get_result(request_id, timeout=0.1)
            if output is not None:
                yield output
            if (output is None and not running) or (output is not None and output.is_finished()):
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Call `callback` on the running event loop with each output of the request, until it is finished."""
        self.board.register(request_id, callback)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _end(self, error: BaseException | None) -> None:
        """Fail all open requests after the end of the thread."""
        if not self.thread.is_running():  # in the child of a fork, which lacks the event loops of the handlers, too
            self.board.forget_handlers()
        self.board.fail_all(f"generation stopped before this request was done{f': {error!r}' if error else ''}")
        self._let_model_go()

    def _let_model_go(self) -> None:
        """Drop the model of a kept manager whose thread has ended, so that the manager does not keep it alive."""
        if self.thread.is_over and self._model is not None and KEPT.get(self._model) is self:
            self._model = None

