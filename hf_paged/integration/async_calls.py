"""Calls of a `PagedGenerator` that are awaited: made in a thread, run by the engine's driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import torch

from hf_paged.engine.driver import Driver
from hf_paged.engine.engine import Engine
from hf_paged.integration import paths
from hf_paged.integration.best_of import best_outputs
from hf_paged.integration.requests import Asked, Call, RequestMaker, numbered, wanted
from hf_paged.options.arguments import base_seed
from hf_paged.outputs import Completion, StepOutput

T = TypeVar("T")


class AsyncCalls:
    """Those of one generator, of whatever event loops.

    Args:
        engine: runs them.
        maker: makes their requests.
    """

    def __init__(self, engine: Engine, maker: RequestMaker) -> None:
        self._engine, self._maker = engine, maker
        self.driver = Driver(engine)

    async def outputs(self, call: Call) -> AsyncIterator[tuple[int, StepOutput]]:
        """As `PagedGenerator.stream`."""
        self._check(call)
        call.check_for_stream()
        asked = await self._asked(call)
        with paths.counting(self._engine) as counted:
            async with aclosing(self._run(call, asked, stream=True)) as outputs:
                async for number, output in outputs:
                    counted.num_tokens += len(output.new_token_ids)
                    yield number, output

    async def _asked(self, call: Call) -> list[Asked]:
        """The requests of a call, made in a thread."""
        seed = call.seed
        if not isinstance(seed, (list, tuple)):  # drawn here: in the order in which calls are made
            seed = base_seed(seed, self._engine.config.seed)
        call = replace(call, seed=seed)
        if call.structured is not None:  # else as many threads as there are wait for slow ones
            await self._compiled(call.structured)
        return await asyncio.to_thread(_under_this_autocast(self._engine), lambda: self._maker.make(call))

    async def _compiled(self, structured: Any) -> None:
        """Wait until the forms of a call are compiled, or refused; where the call is cancelled, they are as well."""
        begun: Future[list[Future[Any]]] = Future()
        try:
            await asyncio.to_thread(lambda: begun.set_result(self._maker.begin_forms(structured)))
        except asyncio.CancelledError:  # while the thread may be about to begin them
            begun.add_done_callback(lambda done: [one.cancel() for one in done.result()])
            raise
        await asyncio.gather(*map(asyncio.wrap_future, begun.result()), return_exceptions=True)

    async def _run(self, call: Call, asked: list[Asked], *,
                   stream: bool) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """The outputs of requests as they come; without ``stream`` only the last one of each."""
        running = self.driver.call(stream=stream)
        try:
            requests = wanted(asked)
            index, refused = numbered(call, asked, await running.add(requests) if requests else [])
            for item in refused:
                yield item
            while index and (outputs := await running.outputs()):
                for output in outputs:
                    yield index[output.request_id], output
                self._engine.check_outside_update()
        finally:
            running.close()

    async def completions(self, call: Call) -> list[Completion]:
        """As `PagedGenerator.generate` returns them."""
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
    """Calls a function, in another thread, under the autocast of this one."""
    device = engine.model.device.type
    is_on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def call(function: Callable[[], T]) -> T:
        if not is_on:
            return function()
        with torch.autocast(device, dtype):
            return function()

    return call
