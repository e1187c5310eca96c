"""Awaited calls of a `PagedGenerator`: equal to plain ones, in common steps, and each with an end of its own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import pickle
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import assert_idle, byte_tokenizer, is_idle, random_prompts, tiny_model, wait_until
from threads import run_threads

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.engine import driver as driver_module
from hf_paged.integration.async_calls import AsyncSink
from hf_paged.runner.model_runner import ModelRunner

shared_model = functools.cache(tiny_model)
PROMPTS = random_prompts([30, 17, 25, 9, 31, 3, 12, 40])
NEW = 24


@pytest.fixture
def generator():
    with PagedGenerator(shared_model(), byte_tokenizer(), num_blocks=64) as made:
        yield made


@pytest.fixture(scope="module")
def expected():
    """Greedy tokens after each prompt, from a generator of another model object."""
    with PagedGenerator(tiny_model(), num_blocks=64) as made:
        return [one.token_ids for one in made.generate(PROMPTS, max_new_tokens=300)]


def uncached(completions):
    """Without what differs as cached prefixes are found, and the times."""
    return [replace(one, num_cached_tokens=0, timings=None) for one in completions]


async def tokens_of(stream):
    """Per completion the tokens that were streamed, once its last output agreed with them."""
    tokens = {}
    async for index, output in stream:
        tokens.setdefault(index, []).extend(output.new_token_ids)
        if output.completion is not None:
            assert output.completion.token_ids == tokens[index]
    return [tokens[index] for index in sorted(tokens)]


# -- the same as plain calls ------------------------------------------------------------------------------------------


def test_awaited_calls_give_what_plain_ones_give(generator, expected):
    plain = uncached(generator.generate(PROMPTS, max_new_tokens=NEW, seed=0))
    assert [one.token_ids for one in plain] == [tokens[:NEW] for tokens in expected]

    async def main():
        assert uncached(await generator.agenerate(PROMPTS, max_new_tokens=NEW, seed=0)) == plain
        assert uncached(await generator.agenerate(PROMPTS[0], max_new_tokens=NEW, seed=0)) == plain[:1]
        assert await tokens_of(generator.astream(PROMPTS, max_new_tokens=NEW)) == [one.token_ids for one in plain]

    asyncio.run(main())
    assert_idle(shared_model())


def test_every_argument_reaches_the_requests(generator):
    options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 6, "num_return_sequences": 2, "logprobs": True,
               "on_error": "complete"}
    prompts = [PROMPTS[0], [], "text", {"prompt_token_ids": PROMPTS[1]}]
    plain = uncached(generator.generate(prompts, seed=5, **options))
    assert [one.finish_reason for one in plain] == ["length"] * 2 + ["error"] * 2 + ["length"] * 4
    generator.engine.reset_prefix_cache()
    assert uncached(asyncio.run(generator.agenerate(prompts, seed=5, **options))) == plain
    generator.engine.reset_prefix_cache()
    torch.manual_seed(3)
    unseeded = uncached(generator.generate(prompts, **options))
    generator.engine.reset_prefix_cache()
    torch.manual_seed(3)
    assert uncached(asyncio.run(generator.agenerate(prompts, **options))) == unseeded != plain


def test_a_call_computes_under_the_autocast_of_its_task():
    with PagedGenerator(tiny_model(), num_blocks=64, enable_prefix_caching=False) as generator:
        options = {"max_new_tokens": NEW, "logprobs": "raw", "seed": 0}
        exact = generator.generate(PROMPTS[0], **options)
        with torch.autocast("cpu", torch.bfloat16):
            plain = uncached(generator.generate(PROMPTS[0], **options))
            awaited = uncached(asyncio.run(generator.agenerate(PROMPTS[0], **options)))
        assert awaited == plain
        assert plain[0].logprobs != exact[0].logprobs


def test_tasks_share_steps(generator, expected):
    async def main():
        before = generator.engine.stats().num_steps
        calls = [generator.agenerate(prompt, max_new_tokens=100) for prompt in PROMPTS]
        made = await asyncio.gather(*calls)
        assert [one.token_ids for [one] in made] == [tokens[:100] for tokens in expected]
        assert generator.engine.stats().num_steps - before < 200  # 800 one after the other

    asyncio.run(main())


def test_other_tasks_run_while_one_waits(generator, monkeypatch):
    launch = ModelRunner.launch

    def slow(*args, **kwargs):
        time.sleep(0.02)
        return launch(*args, **kwargs)

    monkeypatch.setattr(ModelRunner, "launch", slow)
    longest = 0.0

    async def ticks(done):
        nonlocal longest
        while not done.is_set():
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - start)

    async def main():
        done = asyncio.Event()
        ticking = asyncio.create_task(ticks(done))
        await generator.agenerate(PROMPTS, max_new_tokens=30)
        done.set()
        await ticking

    asyncio.run(main())
    assert longest < 0.3  # the call takes at least 0.6 s


def test_awaited_plain_and_served_calls_run_beside_each_other(generator, expected):
    found = []
    thread = threading.Thread(target=lambda: found.extend(generator.generate(PROMPTS[:2], max_new_tokens=200)))

    async def main():
        thread.start()
        return await generator.agenerate(PROMPTS[2:4], max_new_tokens=100)

    awaited = asyncio.run(main())
    thread.join()
    assert [one.token_ids for one in awaited] == [tokens[:100] for tokens in expected[2:4]]
    assert [one.token_ids for one in found] == [tokens[:200] for tokens in expected[:2]]


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["agenerate", "astream"])
def test_cancelling_a_task_ends_its_requests_within_a_step_and_no_others(generator, expected, kind, monkeypatch):
    async def stream():
        return await tokens_of(generator.astream(PROMPTS[:3], max_new_tokens=300))

    async def main():
        waiting = generator.agenerate(PROMPTS[:3], max_new_tokens=300) if kind == "agenerate" else stream()
        doomed = asyncio.create_task(waiting)
        other = asyncio.create_task(generator.agenerate(PROMPTS[3], max_new_tokens=300))
        while generator.engine.stats().num_running < 4:
            await asyncio.sleep(0.001)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        [made] = await other
        assert made.token_ids == expected[3]

    core, asked = generator.engine._core, []
    close = AsyncSink.close
    monkeypatch.setattr(AsyncSink, "close", lambda call: asked.append(core.totals["steps"]) or close(call))
    aborted = []

    class Watching:
        queued = launched = committed = started_over = lambda self, event: None

        def finished(self, request, output):
            if output.finish_reason == "abort":
                aborted.append(core.totals["steps"])

    generator.engine.watch(Watching())
    asyncio.run(main())
    assert len(aborted) == 3 and max(aborted) - asked[0] <= 1
    assert_idle(shared_model())


def test_an_iterator_that_is_closed_or_left_ends_its_requests(generator):
    async def main():
        async with contextlib.aclosing(generator.astream(PROMPTS[0], max_new_tokens=300)) as outputs:
            async for _ in outputs:
                break
        async for _ in generator.astream(PROMPTS[1], max_new_tokens=300):
            break
        while not is_idle(generator):
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert generator.engine.stats().num_generated_tokens < 300
    assert_idle(shared_model())


def test_errors_are_raised_in_the_task_whose_call_is_wrong(generator, expected):
    async def main():
        calls = [generator.agenerate(PROMPTS[0], max_new_tokens=NEW), generator.agenerate([999], max_new_tokens=NEW),
                 generator.agenerate(PROMPTS[1], max_new_tokens=NEW, num_beams=2),
                 generator.agenerate(PROMPTS[1], max_new_tokens=NEW, seed=-1),
                 generator.agenerate(PROMPTS[1], max_new_tokens=NEW)]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, unknown, beams, seed, last = asyncio.run(main())
    assert first[0].token_ids == expected[0][:NEW] and last[0].token_ids == expected[1][:NEW]
    assert isinstance(unknown, ValueError) and "prompts[0]" in str(unknown)
    assert isinstance(beams, hf_paged.UnsupportedOptionError) and "num_beams" in str(beams)
    assert isinstance(seed, ValueError) and "seed=-1" in str(seed)


def test_tensors_are_refused_with_what_to_do_instead(generator):
    for call in ({"prompts": torch.tensor([[1, 2]])}, {"prompts": None, "input_ids": torch.tensor([[1, 2]])}):
        with pytest.raises(TypeError, match=r"asyncio\.to_thread"):
            asyncio.run(generator.agenerate(**call))


def test_a_step_that_raises_ends_all_that_wait_and_the_next_call_is_right(generator, expected, monkeypatch):
    launch = ModelRunner.launch

    def broken(self, plan, *args, **kwargs):
        if plan.start.max() > 60:
            raise torch.OutOfMemoryError("no memory")
        return launch(self, plan, *args, **kwargs)

    async def main():
        with monkeypatch.context() as patched:
            patched.setattr(ModelRunner, "launch", broken)
            calls = [generator.agenerate(prompt, max_new_tokens=300) for prompt in PROMPTS[:3]]
            return await asyncio.gather(*calls, return_exceptions=True)

    assert [type(error) for error in asyncio.run(main())] == [torch.OutOfMemoryError] * 3
    assert_idle(shared_model())
    assert asyncio.run(generator.agenerate(PROMPTS[0], max_new_tokens=NEW))[0].token_ids == expected[0][:NEW]


@pytest.mark.parametrize("end", ["close", "disable"])
def test_closing_ends_waiting_tasks_with_an_error(end):
    generator = PagedGenerator(shared_model(), num_blocks=64)

    async def main():
        tasks = [asyncio.create_task(generator.agenerate(prompt, max_new_tokens=300)) for prompt in PROMPTS[:3]]
        while generator.engine.stats().num_running < 3:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(generator.close if end == "close" else lambda: hf_paged.disable(shared_model()))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, hf_paged.EngineClosedError) for one in results), results
        assert "closed" in str(results[0])
        with pytest.raises(hf_paged.EngineClosedError):
            await generator.agenerate(PROMPTS[0])

    asyncio.run(main())
    generator.close()


# -- several loops ----------------------------------------------------------------------------------------------------


def test_several_event_loops_in_several_threads(generator, expected):
    found = {}

    def run(number):
        async def main():
            return await asyncio.gather(*[generator.agenerate(PROMPTS[i], max_new_tokens=60)
                                          for i in range(number, len(PROMPTS), 3)])

        found[number] = asyncio.run(main())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    run_threads(threads)
    for number, made in found.items():
        assert [one.token_ids for [one] in made] == [tokens[:60] for tokens in expected[number::3]]


def test_a_loop_that_is_closed_under_its_calls_takes_them_with_it(generator, expected):
    loop = asyncio.new_event_loop()
    abandoned = [loop.create_task(generator.agenerate(PROMPTS[0], max_new_tokens=300)),
                 loop.create_task(tokens_of(generator.astream(PROMPTS[1], max_new_tokens=300)))]
    while generator.engine.stats().num_running < 2:
        loop.run_until_complete(asyncio.sleep(0.005))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    made = asyncio.run(generator.agenerate(PROMPTS[2], max_new_tokens=60))
    assert made[0].token_ids == expected[2][:60]
    wait_until(lambda: is_idle(generator))
    assert generator.engine.stats().num_generated_tokens < 500
    for task in abandoned:
        task._log_destroy_pending = False


def test_the_thread_ends_when_nothing_is_left_to_do(generator, monkeypatch):
    monkeypatch.setattr(driver_module, "LINGER_S", 0.05)
    driver = generator._async_calls.thread
    assert driver._thread is None  # none before the first call
    asyncio.run(generator.agenerate(PROMPTS[0], max_new_tokens=2))
    thread = driver._thread
    wait_until(lambda: driver._thread is None)
    thread.join(5)
    assert len(asyncio.run(generator.agenerate(PROMPTS[0], max_new_tokens=2))) == 1
    assert driver._thread is not thread
    generator.close()
    wait_until(lambda: driver._thread is None)


# -- one prompt of a call ---------------------------------------------------------------------------------------------


def test_cancel_ends_one_prompt_of_a_running_call(generator, expected):
    found = []
    call = threading.Thread(target=lambda: found.extend(
        generator.generate(PROMPTS[:3], max_new_tokens=300, request_ids=["a", "b", None])))
    assert not generator.cancel("b")
    call.start()
    wait_until(lambda: generator.engine.stats().num_generated_tokens > 30)
    assert generator.cancel("b")
    assert not generator.cancel("b")
    call.join()
    assert [one.finish_reason for one in found] == ["length", "abort", "length"]
    assert found[0].token_ids == expected[0] and found[2].token_ids == expected[2]
    count = len(found[1].token_ids)
    assert 0 < count < 300 and found[1].token_ids == expected[1][:count]
    assert not generator.cancel("a")
    assert_idle(shared_model())


def test_cancel_reaches_streamed_prompts_by_their_outputs_and_all_copies_by_their_prompt(generator):
    ends = {}
    options = {"max_new_tokens": 60, "do_sample": True, "num_return_sequences": 2, "seed": 1}
    for index, output in generator.stream(PROMPTS[:2], request_ids=["x", "y"], **options):
        if output.completion is not None:
            ends[index] = output.completion.finish_reason, len(output.completion.token_ids)
        elif index == 0 and len(ends) == 0:
            assert output.request_id == "x#0"
            assert generator.cancel("x#0")
            assert not generator.cancel("x#0")
        elif index == 2 and len(ends) == 1:
            assert generator.cancel("y")
    assert ends[0][0] == "abort" and ends[1] == ("length", 60)
    assert [ends[index][0] for index in (2, 3)] == ["abort", "abort"] and ends[2][1] < 60


def test_request_ids_are_checked_before_anything_runs(generator):
    for ids, error in ((["a", "a"], ValueError), (["a"], ValueError), ([1, "b"], TypeError), (["", "b"], TypeError)):
        with pytest.raises(error, match="request_ids"):
            generator.generate(PROMPTS[:2], max_new_tokens=2, request_ids=ids)
    with pytest.raises(ValueError, match="request_ids"):
        generator.generate(input_ids=torch.tensor([[1, 2]]), request_ids=["a"])
    stream = generator.stream(PROMPTS[0], max_new_tokens=30, request_ids="a")
    next(stream)
    with pytest.raises(ValueError, match="'a' is in use"):
        generator.generate(PROMPTS[0], request_ids="a")
    stream.close()
    assert len(generator.generate(PROMPTS[0], max_new_tokens=2, request_ids="a")) == 1


def test_a_generator_cannot_be_pickled_or_copied_and_says_what_to_do(generator):
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"from_pretrained.*ray_data"):
            attempt(generator)


# -- anything at any time ---------------------------------------------------------------------------------------------


async def _scenario(generator, expected, seed, num_tasks):
    """Tasks of one loop that begin, stream, wait and are cancelled at random; checks those that are not."""
    rng = random.Random(seed)

    async def one():
        prompt, new = rng.randrange(len(PROMPTS)), rng.randrange(1, 40)
        await asyncio.sleep(rng.random() * 0.05)
        kind = rng.choice(["agenerate", "astream", "left"])
        if kind == "agenerate":
            assert (await generator.agenerate(PROMPTS[prompt], max_new_tokens=new))[0].token_ids == (
                expected[prompt][:new])
            return
        tokens = []
        async with contextlib.aclosing(generator.astream(PROMPTS[prompt], max_new_tokens=new)) as outputs:
            async for _, output in outputs:
                tokens += output.new_token_ids
                if kind == "left" and len(tokens) > new // 2:
                    break
        assert tokens == expected[prompt][: len(tokens)] and (kind == "left" or len(tokens) == new)

    tasks = [asyncio.create_task(one()) for _ in range(num_tasks)]
    for task in tasks:
        if rng.random() < 0.4:
            asyncio.get_running_loop().call_later(rng.random() * 0.1, task.cancel)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [one for one in results if one is not None and not isinstance(one, asyncio.CancelledError)]
    assert not failed, failed


@pytest.mark.slow
@settings(max_examples=8)
@example(seed=0, loops=3, num_blocks=10, overlap=True)
@given(seed=st.integers(0, 2**16), loops=st.integers(1, 3), num_blocks=st.sampled_from([10, 64]), overlap=st.booleans())
def test_tasks_that_come_and_go_leave_nothing_behind(expected, seed, loops, num_blocks, overlap):
    """With 10 blocks most requests wait, and rows are preempted."""
    with PagedGenerator(shared_model(), num_blocks=num_blocks, overlap=overlap, max_num_seqs=6) as generator:
        errors = []

        def run(number):
            try:
                asyncio.run(_scenario(generator, expected, seed + number, 10))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(loops)]
        run_threads(threads)
        assert not errors, errors
        wait_until(lambda: is_idle(generator))
        assert_idle(shared_model())
        core = generator.engine._core
        assert not core.requests and core.scheduler.num_free_slots == 6


AT_EXIT = """
import asyncio, sys, threading
sys.path.insert(0, "tests")
from support import random_prompts, tiny_model
from hf_paged import PagedGenerator
generator = PagedGenerator(tiny_model(max_position_embeddings=20000), num_blocks=2000)
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
running = asyncio.run_coroutine_threadsafe(generator.agenerate(random_prompts([4]), max_new_tokens=15000), loop)
while not generator.engine.stats().num_running: pass
print("leaving")
"""


@pytest.mark.slow
def test_a_process_ends_while_a_call_runs():
    made = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0 and made.stdout == "leaving\n", made
    assert "Traceback" not in made.stderr and "terminate" not in made.stderr


AT_FORK = """
import asyncio, os, sys
sys.path.insert(0, "tests")
from support import random_prompts, tiny_model
from hf_paged import PagedGenerator
generator = PagedGenerator(tiny_model(), num_blocks=64)
prompts = random_prompts([4, 9])
def made(): return [one.token_ids for one in asyncio.run(generator.agenerate(prompts, max_new_tokens=8))]
expected = made()
assert generator._async_calls.thread._thread is not None  # it lingers, and the child has none
child = os.fork()
if not child:
    os._exit(0 if made() == expected else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and made() == expected
print("both")
"""


def test_a_call_without_autocast_leaves_the_autocast_cache_of_other_threads_alone(monkeypatch):
    """A thread that trains beside it would cast its weights again."""
    cleared, clear = [], torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: (cleared.append(1), clear()))
    with PagedGenerator(tiny_model(), num_blocks=40) as generator:
        made = asyncio.run(generator.agenerate([[1, 2, 3]], max_new_tokens=2))
    assert len(made[0].token_ids) == 2 and not cleared


@pytest.mark.slow
def test_a_forked_child_makes_calls_of_its_own():
    made = subprocess.run([sys.executable, "-c", AT_FORK], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0 and made.stdout == "both\n", made
