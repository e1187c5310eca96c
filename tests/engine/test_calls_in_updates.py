"""Calls inside of `weight_update`, in its own thread or task: each says what is wrong, or runs in stock and says so."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest
import torch
from support import assert_idle, is_idle, stock_generate, tiny_model, wait_until

import hf_paged
from hf_paged import PagedGenerator

IDS = torch.tensor([[5, 6, 7]])
OPTIONS = {"max_new_tokens": 3, "do_sample": False}
INSIDE = r"inside a weight_update\(\) of the same engine, which holds steps off: leave the `with` block first"


@pytest.fixture(scope="module")
def generator():
    with PagedGenerator(tiny_model(), num_blocks=40) as generator:
        yield generator


@pytest.fixture(autouse=True)
def _runs_afterwards(generator):
    yield
    wait_until(lambda: is_idle(generator))  # a stream that is left ends before the next step
    assert_idle(generator.model)
    [made] = generator.generate(IDS.tolist(), **OPTIONS)
    assert made.token_ids == stock_generate(generator.model, input_ids=IDS, **OPTIONS)[0, 3:].tolist()


REFUSED = {
    "generate": lambda generator: generator.generate(IDS.tolist(), **OPTIONS),
    "stream": lambda generator: list(generator.stream(IDS.tolist(), **OPTIONS)),
    "add_request": lambda generator: generator.engine.add_request([5, 6]),
    "step": lambda generator: generator.engine.step(),
    "weight_update": lambda generator: generator.engine.weight_update().__enter__(),
    "named_weights": lambda generator: next(generator.named_weights()),
    "release_memory": lambda generator: generator.engine.release_memory(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_needs_steps_says_what_is_wrong(generator, name):
    with generator.engine.weight_update(), pytest.raises(RuntimeError, match=INSIDE):
        REFUSED[name](generator)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"guidance_scale": 1.5}])
def test_generate_of_the_model_runs_in_stock_and_says_why(options):
    model = hf_paged.enable(tiny_model())
    expected = stock_generate(model, input_ids=IDS, **OPTIONS, **options)
    with hf_paged.weight_update(model), pytest.warns(hf_paged.FallbackWarning, match=r"inside a weight_update\(\)"):
        made = model.generate(IDS, **OPTIONS, **options)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("call", ["agenerate", "astream"])
def test_a_call_that_is_awaited_says_what_is_wrong_in_place_of_waiting_for_ever(generator, call):
    async def run():
        with generator.engine.weight_update():
            if call == "agenerate":
                await asyncio.wait_for(generator.agenerate(IDS.tolist(), **OPTIONS), 20)
            else:
                async with aclosing(generator.astream(IDS.tolist(), **OPTIONS)) as outputs:
                    await asyncio.wait_for(anext(outputs), 20)

    with pytest.raises(RuntimeError, match=INSIDE):
        asyncio.run(run())


def test_a_stream_that_was_begun_before_is_not_awaited_inside(generator):
    async def run():
        async with aclosing(generator.astream(IDS.tolist(), max_new_tokens=200, do_sample=False)) as outputs:
            await anext(outputs)
            with generator.engine.weight_update():
                while True:
                    await asyncio.wait_for(anext(outputs), 20)

    with pytest.raises(RuntimeError, match=INSIDE):
        asyncio.run(run())


def test_a_task_that_was_made_before_waits_for_the_end_of_the_update(generator):
    async def run():
        begin, made = asyncio.Event(), []

        async def other():
            await begin.wait()
            made.extend(await generator.agenerate(IDS.tolist(), **OPTIONS))

        task = asyncio.create_task(other())
        await asyncio.sleep(0)
        with generator.engine.weight_update():
            begin.set()
            await asyncio.sleep(0.2)
            assert not made
        await asyncio.wait_for(task, 20)
        return made

    assert len(asyncio.run(run())) == 1


def test_other_threads_wait_for_the_end_of_the_update(generator):
    made = []
    thread = threading.Thread(target=lambda: made.extend(generator.generate(IDS.tolist(), **OPTIONS)))
    with generator.engine.weight_update():
        thread.start()
        thread.join(0.2)
        assert not made
    thread.join(20)
    assert len(made) == 1


def test_a_task_that_began_in_an_update_of_before_waits_for_a_later_one(generator):
    """Its context is a copy of that update's."""
    async def worker(go):
        await go.wait()
        return await generator.agenerate(IDS.tolist(), **OPTIONS)

    async def main():
        go, started, end = asyncio.Event(), threading.Event(), threading.Event()
        with generator.engine.weight_update():
            task = asyncio.create_task(worker(go))
            await asyncio.sleep(0)

        def update():
            with generator.engine.weight_update():
                started.set()
                end.wait(10)

        thread = threading.Thread(target=update)
        thread.start()
        assert started.wait(10)
        go.set()
        await asyncio.sleep(0.05)
        end.set()
        made = await task
        thread.join()
        return made

    assert len(asyncio.run(main())[0].token_ids) == 3


def test_an_update_of_another_engine_is_none_of_this_one(generator):
    async def main():
        with other.weight_update():
            return await generator.agenerate(IDS.tolist(), **OPTIONS)

    other = hf_paged.get_engine(other_model := hf_paged.enable(tiny_model(1)))
    assert len(asyncio.run(main())[0].token_ids) == 3 and hf_paged.is_enabled(other_model)
