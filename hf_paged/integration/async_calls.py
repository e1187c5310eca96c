"""Awaited calls of a `PagedGenerator`: their requests are made in a thread and run by an `EngineThread`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hf_paged.engine.driver import EngineThread, OutputSink
from hf_paged.engine.engine import Engine
from hf_paged.errors import EngineClosedError
from hf_paged.integration import paths
from hf_paged.integration.caches import autocast_of_thread
from hf_paged.integration.requests import Call, CallReader, best_outputs, numbered, runnable
from hf_paged.options.arguments import base_seed
from hf_paged.options.request_spec import RequestSpec
from hf_paged.outputs import Completion, StepOutput

CLOSED = "the generator was closed, or its model disabled, while this call ran: make another PagedGenerator"


class EventLoops:
    """Callbacks that an `EngineThread` hands over to event loops after each turn, all of a loop at once."""

    def __init__(self) -> None:
        self._news: dict[asyncio.AbstractEventLoop, list[tuple[AsyncSink, Callable[[], None]]]] = {}

    def tell(self, call: AsyncSink, receive: Callable[[], None]) -> None:
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


class AsyncSink(OutputSink):
    """The requests of one awaited call, with their outputs on the event loop that runs when the object is made.

    Only that loop's thread may use `begin`, `outputs` and `close`.
    """

    def __init__(self, thread: EngineThread, loops: EventLoops, *, stream: bool) -> None:
        super().__init__(stream=stream)
        self.thread, self.loop = thread, asyncio.get_running_loop()
        self._loops = loops
        self._added: asyncio.Future[list[str | ValueError]] = self.loop.create_future()
        self._outputs: list[StepOutput] = []
        self._error: BaseException | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    async def begin(self, requests: list[RequestSpec]) -> list[str | ValueError]:
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

    def _add(self, requests: list[RequestSpec]) -> None:
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
    """The awaited calls of one generator, on any event loops."""

    def __init__(self, engine: Engine, reader: CallReader) -> None:
        self._engine, self._reader = engine, reader
        self._loops = EventLoops()
        self.thread = EngineThread(lambda: engine, lingers=True, after_turn=self._loops.deliver)

    async def outputs(self, call: Call) -> AsyncIterator[tuple[int, StepOutput]]:
        """Yield the items of `PagedGenerator.stream`."""
        self._check(call)
        call.check_for_stream()
        planned = await self._planned(call)
        with paths.counting(self._engine) as counted:
            async with aclosing(self._run(call, planned, stream=True)) as outputs:
                async for number, output in outputs:
                    counted.num_tokens += len(output.new_token_ids)
                    yield number, output

    async def _planned(self, call: Call) -> list[RequestSpec | Completion]:
        """Read a call in a thread, under the autocast of this one."""
        seed = call.seed
        if not isinstance(seed, (list, tuple)):  # drawn here, so that seeds follow the order of calls, not of threads
            seed = base_seed(seed, self._engine.config.seed)
        call = replace(call, seed=seed)
        if call.structured is not None:  # compiled before: slow forms would block all threads of the executor
            begun: Future[list[Future[Any]]] = Future()
            try:
                await asyncio.to_thread(lambda: begun.set_result(self._reader.begin_forms(call.structured)))
            except asyncio.CancelledError:  # the thread may still start compilations, which are cancelled then
                begun.add_done_callback(lambda done: [one.cancel() for one in done.result()])
                raise
            await asyncio.gather(*map(asyncio.wrap_future, begun.result()), return_exceptions=True)
        autocast = autocast_of_thread(self._engine.model.device)

        def read() -> list[RequestSpec | Completion]:
            # Leaving autocast clears its cache, which is every thread's.
            with torch.autocast(**autocast) if autocast["enabled"] else nullcontext():
                return self._reader.read(call)

        return await asyncio.to_thread(read)

    async def _run(self, call: Call, planned: list[RequestSpec | Completion], *,
                   stream: bool) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """Yield the outputs of requests with the indexes of their completions; without ``stream`` only last outputs."""
        running = AsyncSink(self.thread, self._loops, stream=stream)
        try:
            requests = runnable(planned)
            index, refused = numbered(call, planned, await running.begin(requests) if requests else [])
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
        planned = await self._planned(call)
        with paths.counting(self._engine) as counted:
            ended = {number: output async for number, output in self._run(call, planned, stream=False)}
            return counted.completions(best_outputs(planned, [ended[number] for number in range(len(planned))]))

    def _check(self, call: Call) -> None:
        self._engine.check_outside_update()
        if "input_ids" in call.keywords or isinstance(call.prompts, torch.Tensor):
            raise TypeError("input_ids: expected token ids as lists, or other prompts, where the call is awaited; for "
                            "tensors await asyncio.to_thread(generator.generate, ...)")
        if self._engine.group.is_parallel and not self._engine.group.driven:
            raise TypeError("astream, agenerate: expected a generator that starts its ranks itself; where every rank "
                            "runs the script, all have to make the same calls in one order, as with `generate`")
