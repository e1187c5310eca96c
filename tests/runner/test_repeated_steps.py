"""A step comes to the same when it runs more than once: where kernels are missing, after an interrupt, after an update.

`compiled_together` begins a step, leaves it in the middle and repeats it; what an interrupt, a failed launch or new
weights cut off is computed again.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import random
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import get_args

import pytest
from planned_torch import PlannedTorch
from support import Interrupt, byte_tokenizer, interrupted, random_prompts, tiny_model
from threads import RowsElsewhere
from transformers import GenerationConfig

import hf_paged
from hf_paged.attention import plan_prompts
from hf_paged.attention.plan_prompts import RowPrograms
from hf_paged.attention.triton_backend import TritonBackend
from hf_paged.engine.engine import Engine
from hf_paged.engine.features.drafts import Speculation
from hf_paged.engine.features.lockstep import LockstepThrottle
from hf_paged.runner import model_runner
from hf_paged.runner.graphs import StepGraphs
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.padded_steps import PaddedSteps
from hf_paged.runner.step_shape import Kind, StepShape
from hf_paged.scheduler import Status

pytest.importorskip("peft")
from lora_models import with_adapter
from runner.test_graphs import EveryThird, uncaptured

PROMPTS = random_prompts([20, 100, 5, 70, 17], seed=4)
FORM = {"regex": ".*"}
# Every kind of row; some share a prefix, and a prompt of 70 tokens takes several steps.
REQUESTS = [
    (PROMPTS[1], 12, {}, {"seed": 1}),
    (PROMPTS[1] + PROMPTS[2], 9, {"do_sample": True, "top_k": 9}, {"seed": 2, "logprobs": 2}),
    (PROMPTS[1] + PROMPTS[0], 8, {"prompt_lookup_num_tokens": 5}, {}),
    (PROMPTS[1] + PROMPTS[4], 7, {}, {}),
    (PROMPTS[3], 5, {}, {"logprobs": "raw", "top_logprobs": 3, "prompt_logprobs": 2}),
    (PROMPTS[0], 8, {"do_sample": True, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
     {"seed": 3, "logprobs": 2, "presence_penalty": 0.7, "frequency_penalty": 0.3}),
    (PROMPTS[2], 7, {}, {"structured": FORM, "logprobs": "raw", "top_logprobs": 2}),
    (PROMPTS[0], 6, {"repetition_penalty": 1.3, "min_new_tokens": 3, "eos_token_id": 7}, {"structured": FORM}),
    (PROMPTS[4], 12, {"prompt_lookup_num_tokens": 5}, {"logprobs": True}),
    (PROMPTS[4], 6, {}, {"adapter_name": "one", "logprobs": 1}),
    (PROMPTS[2], 5, {"prompt_lookup_num_tokens": 5}, {"adapter_name": "__base__"}),
    (PROMPTS[0], 4, {}, {}),  # comes late, when no row waits for masks
    (PROMPTS[4], 3, {}, {}),  # a step later, beside that one
]
LATE = 18
ROWS = random_prompts([19, 40, 19], seed=8)
KNOWN: dict[tuple[int, ...], list[int]] = {}  # tokens by prompt, for guesses


class GroupedTorch(PlannedTorch):
    """Steps whose rows share prefixes are planned, and counted, as on a GPU."""

    choose_groups, prompt_kernel = TritonBackend.choose_groups, TritonBackend.prompt_kernel

    def __init__(self):
        self.num_grouped_prompts = 0

    def plan_prompts(self, *args):
        found = TritonBackend.plan_prompts(self, *args)
        self.num_grouped_prompts += found is not None
        return found


def kinds_of(module) -> set[str]:
    """What a module has run more than once: the methods of which it makes partials to be run."""
    calls = (node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call))
    run = (call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "partial")
    return {function.attr for function in run if isinstance(function, ast.Attribute)}


EAGER, CAPTURED = kinds_of(model_runner), {*get_args(Kind)}


def test_the_kinds_of_steps_are_found():
    assert {"_eagerly", "_hidden_states"} <= EAGER
    assert all(callable(getattr(PaddedSteps, kind)) for kind in CAPTURED)


@pytest.fixture
def model(monkeypatch):
    """Guesses are right and wrong, rows in lockstep always join, and what is shared is always worth a group."""
    monkeypatch.setattr("hf_paged.attention.choose_groups.MIN_SAVED", 0)
    monkeypatch.setattr("hf_paged.attention.plan_decode.MIN_SAVED_SHARE", 0.0)
    for name, value in (("PIECE_COST", 0.0), ("LAUNCH", 0.0), ("MOST", 9.0), ("MOST_ELSEWHERE", 9.0)):
        monkeypatch.setattr(plan_prompts, name, value)
    monkeypatch.setattr(plan_prompts, "RowPrograms", lambda tokens, slots, *_: RowPrograms(tokens, slots, 50.0, 1.0))
    monkeypatch.setattr("hf_paged.runner.padded_steps._MIXED_TOKENS", 1)
    backend = GroupedTorch()
    monkeypatch.setattr("hf_paged.runner.model_runner.resolve_backend", lambda *_: backend)
    monkeypatch.setattr(Engine, "grammar_of", lambda *_: EveryThird())
    monkeypatch.setattr(LockstepThrottle, "may_join", lambda self: True)

    def drafts(self, num_running, costs):
        running = [request.sequence for request in self._running.values()]
        return {sequence.slot: guesses(sequence) for sequence in running
                if sequence.status is Status.RUNNING and sequence.num_output_tokens}

    def guesses(sequence):
        rng, truth = random.Random(sequence.num_output_tokens), KNOWN.get(tuple(sequence.prompt_token_ids), [])
        ahead = truth[sequence.num_output_tokens :][: rng.randint(1, 5)]
        return [rng.randrange(256) if rng.random() < 0.3 else token for token in ahead] or [3]

    monkeypatch.setattr(Speculation, "drafts", drafts)
    model = with_adapter(tiny_model(), "one").get_base_model()
    if not KNOWN:
        KNOWN.update({tuple(REQUESTS[number][0]): made.token_ids for number, made in run(model)[0].items()})
        assert backend.num_grouped_prompts
    return model


def run(model, at_step=lambda engine, step: None, **config):
    """Completions by number of the request, what was streamed, the tokens of the rows, and what steps counted."""
    config = {"max_num_batched_tokens": 48, "num_blocks": 80, "max_num_seqs": 16} | config
    engine = Engine(model, hf_paged.PagedConfig(**config), byte_tokenizer())
    ids, made, streamed, rows = {}, {}, [[] for _ in REQUESTS], RowsElsewhere(engine, ROWS, 5)

    def add(number):
        prompt, count, given, asked = REQUESTS[number]
        config = GenerationConfig(max_new_tokens=count, **({"eos_token_id": None} | given))
        ids[engine.add_request(prompt, config, **asked)] = number

    for number in range(len(REQUESTS) - 2):
        add(number)
    for step in itertools.count(1):
        if LATE <= step <= LATE + 1:
            add(len(REQUESTS) - 2 + step - LATE)
        elif step > LATE and not engine.has_unfinished():
            break
        rows.take()
        at_step(engine, step)
        for output in engine.step():
            streamed[ids[output.request_id]] += output.new_token_ids
            if output.completion is not None:
                made[ids[output.request_id]] = output.completion
    tokens, stats = rows.finish(), engine.stats()
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert all(one.error is None and streamed[number] == one.token_ids for number, one in made.items())
    return made, tokens, stats


def assert_same(made, expected, *, counts: bool):
    for number, one in expected[0].items():
        same = made[0][number]
        assert same.token_ids == one.token_ids, REQUESTS[number]
        for field in ("logprobs", "prompt_logprobs"):
            values, wanted = getattr(same, field), getattr(one, field)
            assert (values is None) == (wanted is None)
            if wanted is not None:
                assert values[1:] == pytest.approx(wanted[1:], abs=1e-4)
        assert (same.top_logprobs is None) == (one.top_logprobs is None)
        for top, wanted in zip(same.top_logprobs or [], one.top_logprobs or [], strict=True):
            assert top == pytest.approx(wanted, abs=1e-4)
    assert made[1] == expected[1]
    if counts:
        assert made[2] == expected[2]


def repeat(monkeypatch, with_graphs):
    """Have every step left in the middle and run twice; returns how often each kind was."""
    seen, rng = Counter(), random.Random(0)

    def repeated(work):
        shape = next((given for given in work.args if isinstance(given, StepShape)), None)
        seen[work.func.__name__ if shape is None else shape.kind] += 1
        with interrupted(None) as calls:
            work()
        with suppress(Interrupt), interrupted(rng.randint(1, calls())):
            work()
        return work()

    if with_graphs:
        monkeypatch.setattr(StepGraphs, "_run_compiled", lambda self, work, *_: repeated(work))
    monkeypatch.setattr(ModelRunner, "_compiled", lambda self, work, plan: repeated(work))
    always = property(lambda self: True, lambda self, compiles: None)
    monkeypatch.setattr(ModelRunner, "_compiles", always, raising=False)
    return seen


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
def test_steps_of_every_kind_come_to_the_same_when_they_run_again(model, monkeypatch, with_graphs, overlap):
    if with_graphs:
        uncaptured(monkeypatch)
    expected = run(model, overlap=overlap)
    assert expected[2].num_draft_tokens > expected[2].num_accepted_draft_tokens > 0 < expected[2].kv_bytes_saved
    seen = repeat(monkeypatch, with_graphs)
    assert_same(run(model, overlap=overlap), expected, counts=True)
    assert set(seen) >= (CAPTURED if with_graphs else EAGER), seen


def fail_to_launch(engine, step):
    """The next launch raises when all of it is enqueued."""
    runner = engine._core.pool.runner

    def failing(own, *args):
        del runner.launch, runner.launch_unsampled
        own(*args)
        raise RuntimeError("here")

    if step % 3 == 0:
        for name in ("launch", "launch_unsampled"):
            setattr(runner, name, partial(failing, getattr(runner, name)))
        with suppress(RuntimeError):
            engine.step()
        vars(runner).pop("launch", None), vars(runner).pop("launch_unsampled", None)


def interrupt(engine, step):
    engine._core.dirty |= step % 4 == 0


def update(engine, step):
    if step % 3 == 0:
        with engine.weight_update():
            pass


DISTURBED = {"interrupt": (interrupt, {}), "launch": (fail_to_launch, {}), "update": (update, {}),
             "update, keep": (update, {"on_weight_change": "keep"}), "tiny pool": (interrupt, {"num_blocks": 30})}


@pytest.mark.slow
@pytest.mark.parametrize("what", DISTURBED)
def test_what_is_computed_again_comes_to_the_same(model, monkeypatch, what):
    uncaptured(monkeypatch)
    at_step, config = DISTURBED[what]
    expected = run(model, overlap=True)
    assert_same(run(model, at_step, overlap=True, **config), expected, counts=False)
