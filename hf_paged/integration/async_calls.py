"""Awaited calls of a `PagedGenerator`: their requests are made in a thread and run by an `EngineThread`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import torch

from hf_paged.engine.driver import EngineThread
from hf_paged.engine.engine import Engine
from hf_paged.engine.engine_call import EngineCall
from hf_paged.engine.session import NewRequest
from hf_paged.errors import EngineClosedError
from hf_paged.integration import paths
from hf_paged.integration.best_of import best_outputs
from hf_paged.integration.requests import Call, PlannedCompletion, RequestMaker, numbered, wanted
from hf_paged.options.arguments import base_seed
from hf_paged.outputs import Completion, StepOutput

T = TypeVar("T")


CLOSED = "the generator was closed, or its model disabled, while this call ran: make another PagedGenerator"


class _Loops:
    """Callbacks that an `EngineThread` hands over to event loops after each turn, all of a loop at once."""

    def __init__(self) -> None:
        self._news: dict[asyncio.AbstractEventLoop, list[tuple[AsyncCall, Callable[[], None]]]] = {}

    def tell(self, call: AsyncCall, receive: Callable[[], None]) -> None:
        """Queue `receive`, to be called on the event loop of a call."""
        self._news.setdefault(call.loop, []).append((call, receive))

    def deliver(self) -> None:
        """Hand all callbacks over; if a loop is closed, the requests of its calls end."""
        news, self._news = self._news, {}
        for loop, receivers in news.items():
            try:
                loop.call_soon_threadsafe(_call_all, [receive for _, receive in receivers])
            except RuntimeError:
                for call, _ in receivers:
                    call.thread.drop(call)


class AsyncCall(EngineCall):
    """The requests of one awaited call, with their outputs on the event loop that runs when the object is made.

    Only that loop's thread may use `begin`, `outputs` and `close`.
    """

    def __init__(self, thread: EngineThread, loops: _Loops, *, stream: bool) -> None:
        super().__init__(stream=stream)
        self.thread, self.loop = thread, asyncio.get_running_loop()
        self._loops = loops
        self._added: asyncio.Future[list[str | ValueError]] = self.loop.create_future()
        self._outputs: list[StepOutput] = []
        self._error: BaseException | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    async def begin(self, requests: list[NewRequest]) -> list[str | ValueError]:
        """Queue the requests of the call; called once. Returns ids or errors, as `Engine.add_all`."""
        self.thread.submit(lambda: self._add(requests))
        return await self._added

    async def outputs(self) -> list[StepOutput]:
        """Wait for new outputs, and return them; returns an empty list after the last one.

        Raises:
            EngineClosedError: the engine was closed before the requests ended.
            Exception: an exception of a step, which ended the requests of every call of the thread.
        """
        while not self._outputs and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    def close(self) -> None:
        """End unfinished requests before the next step, without waiting."""
        if not self._is_over:
            self.thread.submit(lambda: self.thread.drop(self))

    # -- in the thread that steps the engine --------------------------------------------------------------------------

    def _add(self, requests: list[NewRequest]) -> None:
        try:
            added = self.thread.add(self, requests)
        except BaseException as error:  # raised to the caller by `begin`, and must not end the thread
            self._tell(error=error)
        else:
            self._tell(added=added)

    def take(self, outputs: list[StepOutput]) -> None:
        self._tell(outputs=outputs)

    def fail(self, error: BaseException | None) -> None:
        self._tell(error=error or EngineClosedError(CLOSED))

    def _tell(self, *, added: list[str | ValueError] | None = None, outputs: Sequence[StepOutput] = (),
              error: BaseException | None = None) -> None:
        is_over = not self.num_open

        def receive() -> None:
            self._outputs += outputs
            self._error, self._is_over = error or self._error, self._is_over or is_over
            if not self._added.done():
                if error is not None:
                    self._added.set_exception(error)
                elif added is not None:
                    self._added.set_result(added)
            self._changed.set()

        self._loops.tell(self, receive)


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


class AsyncCalls:
    """The awaited calls of one generator, on any event loops.

    Args:
        engine: the engine that runs the requests.
        maker: the maker of the requests.
    """

    def __init__(self, engine: Engine, maker: RequestMaker) -> None:
        self._engine, self._maker = engine, maker
        self._loops = _Loops()
        self.thread = EngineThread(lambda: engine, lingers=True, after_turn=self._loops.deliver)

    async def outputs(self, call: Call) -> AsyncIterator[tuple[int, StepOutput]]:
        """Yield the items of `PagedGenerator.stream`."""
        self._check(call)
        call.check_for_stream()
        asked = await self._asked(call)
        with paths.counting(self._engine) as counted:
            async with aclosing(self._run(call, asked, stream=True)) as outputs:
                async for number, output in outputs:
                    counted.num_tokens += len(output.new_token_ids)
                    yield number, output

    async def _asked(self, call: Call) -> list[PlannedCompletion]:
        """Make the requests of a call in a thread."""
        seed = call.seed
        if not isinstance(seed, (list, tuple)):  # drawn here, so that seeds follow the order of calls, not of threads
            seed = base_seed(seed, self._engine.config.seed)
        call = replace(call, seed=seed)
        if call.structured is not None:  # awaited here: slow forms would block all threads of the executor
            await self._compiled(call.structured)
        return await asyncio.to_thread(_under_this_autocast(self._engine), lambda: self._maker.make(call))

    async def _compiled(self, structured: Any) -> None:
        """Wait until the forms of a call are compiled or refused; cancelling the call cancels their compilation."""
        begun: Future[list[Future[Any]]] = Future()
        try:
            await asyncio.to_thread(lambda: begun.set_result(self._maker.begin_forms(structured)))
        except asyncio.CancelledError:  # the thread may still start compilations, which are cancelled then
            begun.add_done_callback(lambda done: [one.cancel() for one in done.result()])
            raise
        await asyncio.gather(*map(asyncio.wrap_future, begun.result()), return_exceptions=True)

    async def _run(self, call: Call, asked: list[PlannedCompletion], *,
                   stream: bool) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """Yield the outputs of requests with the indexes of their completions; without ``stream`` only last outputs."""
        running = AsyncCall(self.thread, self._loops, stream=stream)
        try:
            requests = wanted(asked)
            index, refused = numbered(call, asked, await running.begin(requests) if requests else [])
            for item in refused:
                yield item
            while index and (outputs := await running.outputs()):
                for output in outputs:
                    yield index[output.request_id], output
                self._engine.check_outside_update()
        finally:
            running.close()

    async def completions(self, call: Call) -> list[Completion]:
        """Return the completions of `PagedGenerator.generate`."""
        self._check(call)
        asked = await self._asked(call)
        with paths.counting(self._engine) as counted:
            ended = {number: output async for number, output in self._run(call, asked, stream=False)}
            return counted.completions(best_outputs(asked, [ended[number] for number in range(len(asked))]))

    def _check(self, call: Call) -> None:
        self._engine.check_outside_update()
        if "input_ids" in call.keywords or isinstance(call.prompts, torch.Tensor):
            raise TypeError("input_ids: expected token ids as lists, or other prompts, where the call is awaited; for "
                            "tensors await asyncio.to_thread(generator.generate, ...)")
        if self._engine.group.is_parallel and not self._engine.group.driven:
            raise TypeError("astream, agenerate: expected a generator that starts its ranks itself; where every rank "
                            "runs the script, all have to make the same calls in one order, as with `generate`")


def _under_this_autocast(engine: Engine) -> Callable[[Callable[[], T]], T]:
    """Return a function that calls its argument, in another thread, under this thread's autocast."""
    device = engine.model.device.type
    is_on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def call(function: Callable[[], T]) -> T:
        if not is_on:
            return function()
        with torch.autocast(device, dtype):
            return function()

    return call
