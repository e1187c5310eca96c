"""The bar of `PagedGenerator.generate`: there before the work begins, by tokens, and with totals in its end."""

from __future__ import annotations

import io
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Interrupt, byte_tokenizer, interrupted, random_prompts, tiny_model
from transformers import GenerationConfig

from hf_paged import PagedGenerator
from hf_paged.engine.engine import Engine
from hf_paged.engine.loop import EngineCore
from hf_paged.integration.requests import CallReader
from hf_paged.observe import progress
from hf_paged.observe.progress import TokenCount, _State
from hf_paged.options.read import SpecReader
from hf_paged.outputs import Completion, StepOutput

PROMPTS = random_prompts([20, 5, 33, 16])


class Screen(io.StringIO):
    """Where bars are drawn; `is_shown`: something of a bar was written to it."""

    def __init__(self):
        super().__init__()
        self.is_shown = threading.Event()

    def write(self, text):
        if "hf_paged" in text:
            self.is_shown.set()
        return super().write(text)

    @property
    def last(self):
        return self.getvalue().rstrip("\n").rpartition("\r")[2].rstrip()


@pytest.fixture
def screen(monkeypatch):
    screen = Screen()

    class Bar(progress.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, ascii=True, **kwargs)

    monkeypatch.setattr(progress, "tqdm", Bar)
    monkeypatch.setattr(progress, "_Screen", lambda: screen)
    return screen


@pytest.fixture
def generator():
    with PagedGenerator(tiny_model(), byte_tokenizer()) as generator:
        yield generator
    assert not _drawing()


def _drawing():
    """Threads that draw; one that has nothing more to do ends within moments."""
    deadline = time.monotonic() + 10
    while found := [thread for thread in threading.enumerate() if thread.name == "hf_paged-progress"]:
        if time.monotonic() > deadline:
            return found
        time.sleep(0.01)
    return []


# -- the first sign ------------------------------------------

WORK = {
    "making requests": (CallReader, "read"), "reading prompts": (CallReader, "_checked"),
    "reading settings": (SpecReader, "spec"), "adding": (Engine, "add_all"), "stepping": (EngineCore, "step"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("show", [True, None])
@pytest.mark.parametrize("work", WORK)
def test_the_bar_is_there_while_the_call_is_busy(generator, screen, monkeypatch, work, show):
    """Each piece of work, a compiler's included, may take minutes; here it lasts until the bar is there."""
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.05)
    owner, name = WORK[work]
    own, waited = getattr(owner, name), []

    def busy(*args, **kwargs):
        if not waited:
            waited.append(screen.is_shown.is_set() if show else screen.is_shown.wait(20))
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, busy)
    assert [len(one.token_ids) for one in generator.generate(PROMPTS, max_new_tokens=3, use_tqdm=show)] == [3] * 4
    assert waited == [True]
    assert progress.SHOWN_AFTER_S + progress._INTERVAL_S < 2


def test_the_bar_says_what_it_waits_for_and_its_clock_goes_on(generator, screen, monkeypatch):
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.01)
    own = CallReader.read

    def slowly(self, call):
        deadline = time.monotonic() + 20
        while screen.getvalue().count("preparing requests [00:0") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        return own(self, call)

    monkeypatch.setattr(CallReader, "read", slowly)
    generator.generate(PROMPTS, max_new_tokens=3, use_tqdm=True)
    assert screen.getvalue().count("preparing requests [00:0") >= 3


def test_a_short_call_shows_nothing_unless_asked(generator, screen, monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 100.0)
    generator.generate(PROMPTS, max_new_tokens=2)
    generator.generate(PROMPTS, max_new_tokens=2, use_tqdm=False)
    assert not screen.getvalue()


def test_without_a_bar_there_is_no_thread_and_nothing_is_counted(generator, screen, monkeypatch):
    for name in ("tqdm", "TokenCount"):
        monkeypatch.setattr(progress, name, None)
    monkeypatch.setattr(progress.threading, "Thread", None)
    assert len(generator.generate(PROMPTS, max_new_tokens=2, use_tqdm=False)) == 4


# -- totals ------------------------------------------

CALLS = {
    "plain": (PROMPTS, {"max_new_tokens": 7}, 28),
    "early ends": (PROMPTS, {"max_new_tokens": 30, "eos_token_id": list(range(0, 256, 3))}, 120),
    "copies": (PROMPTS[:2], {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, "seed": 1}, 36),
    "best of": (PROMPTS[:2], {"max_new_tokens": 6, "do_sample": True, "best_of": 3, "seed": 1}, 36),
    "one cannot run": ([*PROMPTS[:2], [5] * 600, []], {"max_new_tokens": 6, "on_error": "complete"}, 12),
    "what max_model_len leaves": ([PROMPTS[0], [9] * 500], {"max_new_tokens": 40}, 40 + 12),
    "scores alone": (PROMPTS, {"max_new_tokens": 0, "prompt_logprobs": True}, 0),
    "going on": ([{"prompt_token_ids": PROMPTS[0], "output_token_ids": [5, 6, 7, 8]}], {"max_new_tokens": 10}, 6),
    "limits of their own": (PROMPTS, {"generation_config": [GenerationConfig(max_new_tokens=n) for n in (1, 5, 9, 2)]},
                            17),
    "no prompts": ([], {"max_new_tokens": 5}, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_totals_of_a_call(generator, screen, monkeypatch, name):
    prompts, options, most = CALLS[name]
    counts = []

    class Watched(TokenCount):
        def __init__(self, requests):
            super().__init__(requests)
            counts.append((self, self.most))

    monkeypatch.setattr(progress, "TokenCount", Watched)
    completions = generator.generate(prompts, use_tqdm=True, **options)
    [(count, first_most)] = counts
    given = 4 if name == "going on" else 0
    made = sum(len(one.token_ids) - given for one in completions) if name != "best of" else 36
    requests = 6 if name == "best of" else len(completions)
    assert first_most == most and (count.made, count.most, count.num_ended) == (made, made, requests)
    totals = f"| {requests} request{'s' * (requests != 1)}, {made} tokens in "
    assert totals in screen.last and "running" not in screen.last
    assert "100%" in screen.last and screen.last.endswith("tok/s")
    assert screen.getvalue().endswith("\n")


def _request(limit, given):
    return SimpleNamespace(
        row=SimpleNamespace(max_length=11 + given + limit), spec=SimpleNamespace(prompt=[0] * 11), num_emitted=given,
        sequence=SimpleNamespace(num_output_tokens=given))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=6),
       st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.booleans()), max_size=20))
def test_unfinished_requests_count_with_their_limits_and_finished_ones_with_what_they_made(limits, events):
    """Events: a request makes tokens, as far as its limit lets it, and may end with them."""
    unfinished = {str(i): _request(*one) for i, one in enumerate(limits)}  # as of the session
    count = TokenCount(unfinished)
    assert (count.made, count.most) == (0, sum(limit for limit, _ in limits))
    made, ended = [0] * len(limits), set()
    for number, more, ends in [*events, *((i, 0, True) for i in range(len(limits)))]:
        number %= len(limits)
        (limit, given), name = limits[number], str(number)
        if number in ended:
            continue
        made[number] = min(made[number] + more, limit)
        # The object may be another one than at first: a sharded model's requests are made again when ranks take them.
        unfinished[name] = _request(limit, given)
        unfinished[name].sequence.num_output_tokens = given + made[number]
        if ends:
            ended.add(number)
            del unfinished[name]
            completion = Completion([1] * (given + made[number]), None, "eos", [1] * 11)
            count.end(StepOutput(name, [1] * made[number], None, "eos", completion))
        count.look(unfinished)
        assert count.made == sum(made)
        assert count.most == sum(made[i] if i in ended else limit for i, (limit, _) in enumerate(limits))
        assert count.num_ended == len(ended)
    count.end(StepOutput("", [], None, "error", Completion([], None, "error", [])))  # could not run
    assert count.made == count.most == sum(made) and count.num_ended == len(limits) + 1


IDLE = {"num_running": 3, "kv_used": 0.25, "hit_rate": 0.5}


@settings(max_examples=60, deadline=None)
@given(preparing=st.floats(0, 5000), first=st.integers(1, 300), speed=st.integers(1, 5000), ticks=st.integers(1, 50),
       left=st.integers(0, 10**6))
def test_the_time_that_is_left_is_by_the_speed_of_tokens_alone(preparing, first, speed, ticks, left):
    """However long it took to come to the first token."""
    count = TokenCount({})
    assert count.rate(0.0) is None and count.rate(preparing / 2) is None
    count.made = first
    assert count.rate(preparing) is None
    for tick in range(1, ticks + 1):
        count.made = made = first + tick * speed
        known = count.rate(preparing + tick)
    assert known == pytest.approx(speed, rel=1e-6)
    now = preparing + ticks
    state = _State(now, made, made + left, 1, known, IDLE)
    shown = state.text(2, 0.0, now).partition("<")[2].partition(",")[0]
    clock = [int(part) for part in shown.split(":")]
    seconds = sum(part * 60**i for i, part in enumerate(reversed(clock)))
    assert seconds == pytest.approx(left / speed, rel=1e-6, abs=1.001)


def test_before_there_is_a_speed_no_time_is_guessed():
    text = _State(50.0, 0, 512_000, 0, None, IDLE).text(2000, 0.0, 52.7)
    assert text == "0/512,000 tok [00:52<?, 0/2,000 done, 3 running, KV 25%, hits 50%]"


def test_what_a_running_call_shows(generator, screen, monkeypatch):
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    generator.generate(PROMPTS, max_new_tokens=40, use_tqdm=True)
    assert "/160 tok [00:0" in screen.getvalue() and "/4 done, 4 running, KV " in screen.getvalue()


# -- ends of other kinds ------------------------------------------


def test_a_call_that_is_wrong_leaves_no_bar(generator, screen):
    with pytest.raises(ValueError, match="prompt"):
        generator.generate([[]], use_tqdm=True)
    assert not screen.last.strip() and not _drawing()


def test_a_step_that_raises_closes_the_bar_with_what_was_made(generator, screen, monkeypatch):
    own, steps = EngineCore.step, []

    def failing(self, **options):
        steps.append(1)
        if len(steps) == 5:
            raise RuntimeError("no memory")
        return own(self, **options)

    monkeypatch.setattr(EngineCore, "step", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        generator.generate(PROMPTS, max_new_tokens=40, use_tqdm=True)
    assert "| 0 of 4 requests, " in screen.last and screen.getvalue().endswith("\n") and not _drawing()
    monkeypatch.undo()
    assert len(generator.generate(PROMPTS, max_new_tokens=2)) == 4


def test_an_aborted_prompt_counts_with_what_it_made(generator, screen, monkeypatch):
    own = progress.Progress.step

    def cancelling(self, outputs):
        own(self, outputs)
        if generator.engine.stats().num_generated_tokens >= 8:
            generator.cancel("b")

    monkeypatch.setattr(progress.Progress, "step", cancelling)
    made = generator.generate(PROMPTS[:2], max_new_tokens=20, request_ids=["a", "b"], use_tqdm=True)
    assert made[1].finish_reason == "abort" and len(made[1].token_ids) < 20
    assert f"100%|##########| 2 requests, {20 + len(made[1].token_ids)} tokens in " in screen.last


def test_an_interrupt_anywhere_leaves_no_thread(generator, screen, monkeypatch):
    """Also one in the lines that start or end it."""
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.01)
    with interrupted(None) as count:
        generator.generate(PROMPTS[:1], max_new_tokens=1, use_tqdm=True)
    total = count()
    for at in [*range(1, 10), *range(10, total - 20, total // 8), *range(total - 20, total + 1)]:
        try:
            with interrupted(at):
                generator.generate(PROMPTS[:1], max_new_tokens=1, use_tqdm=True)
        except Interrupt:
            pass
        assert not _drawing(), at
    assert len(generator.generate(PROMPTS, max_new_tokens=2)) == 4


def test_a_terminal_that_is_gone_takes_no_call_with_it(generator, screen, monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.001)

    class Failing(progress.tqdm):
        def __init__(self, *args, **kwargs):
            screen.is_shown.set()
            raise BrokenPipeError

    monkeypatch.setattr(progress, "tqdm", Failing)
    own, waited = EngineCore.step, []

    def step(self, **options):
        waited or waited.append(screen.is_shown.wait(20))
        return own(self, **options)

    monkeypatch.setattr(EngineCore, "step", step)
    assert len(generator.generate(PROMPTS, max_new_tokens=2)) == 4 and waited == [True]


class BrokenScreen(io.StringIO):
    """A terminal that goes away after some writes."""

    def __init__(self, writes):
        super().__init__()
        self.left = writes

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError
        return len(text)


@pytest.mark.each_value
@pytest.mark.parametrize("show", [True, None])
@pytest.mark.parametrize("writes", [0, 1, 2, 3, 5])
def test_a_terminal_that_goes_away_at_any_time_takes_no_call_with_it(generator, monkeypatch, show, writes):
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.001)
    monkeypatch.setattr("sys.stderr", BrokenScreen(writes))
    assert len(generator.generate(PROMPTS, max_new_tokens=4, use_tqdm=show)) == 4
    with pytest.raises(ValueError, match="max_new_tokens"):
        generator.generate(PROMPTS, max_new_tokens=-1, use_tqdm=show)


@pytest.mark.parametrize("show", [True, None])
def test_a_process_without_another_thread_has_no_bar_and_goes_on(generator, monkeypatch, show):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert len(generator.generate(PROMPTS, max_new_tokens=2, use_tqdm=show)) == 4


def test_a_bar_that_the_environment_switches_off_shows_nothing(generator, screen, monkeypatch):
    """As TQDM_DISABLE=1 does."""
    class Disabled(progress.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, disable=True)

    monkeypatch.setattr(progress, "tqdm", Disabled)
    assert len(generator.generate(PROMPTS, max_new_tokens=2, use_tqdm=True)) == 4
    assert not screen.getvalue()


def test_a_call_inside_of_a_block_that_holds_the_engine_ends(generator, screen):
    with generator.engine.between_steps():
        generator.generate(PROMPTS, max_new_tokens=4, use_tqdm=True)
    assert "| 4 requests, 16 tokens" in screen.last
