"""Whatever raises in one request's own part of a step ends that request, and no other notices."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import time
import typing
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from types import FunctionType

import pytest
from family_models import family_model
from support import assert_idle, byte_tokenizer, random_prompts, tiny_model
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

import hf_paged
from hf_paged.engine import (
    engine_state,
    features,
    lockstep,
    loop,
    observer,
    prepared_model,
    session,
)
from hf_paged.engine.features import StepFeature
from hf_paged.engine.features.drafts import Speculation
from hf_paged.engine.features.routed_experts import RoutedExperts
from hf_paged.engine.features.stop_rules import StopRule, TextStopRule
from hf_paged.engine.session import Request, Session
from hf_paged.engine.structured.matchers import Grammar, Matcher
from hf_paged.engine.text import StopPolicy
from hf_paged.integration.continuous_batching.requests import BatchedRequest
from hf_paged.options.request_spec import RequestSpec
from hf_paged.outputs import VersionRun
from hf_paged.scheduler import Sequence

PROMPTS = random_prompts([20, 33, 9], seed=4)
VICTIM = 1
STOP = "\x00never\x00"
# The functions that keep one request's exceptions from the others; a step calls what belongs to a request through them.
GUARDS = {"add", "end", "_last_output", "refuse", "attempt", "_fail", "_start_again", "_resumed_end", "admit",
          "start_over", "started"}


class Broken(Exception):
    """What a tokenizer or a criterion might raise."""


class AnyGrammar:
    """A grammar of all outputs."""

    def matcher(self, eos):
        return AnyMatcher()


class AnyMatcher:
    @property
    def is_over(self):
        return False

    def accept(self, token):
        return True

    def fill(self, words):
        words.fill_(-1)


def own_classes() -> set[type]:
    """What a request holds for itself: the classes of its fields, but for those of the engine's own books."""
    hints = typing.get_type_hints(Request, vars(session))
    found = {Request, StopRule, TextStopRule}  # the rules are in its specification
    for field in dataclasses.fields(Request):
        for kind in (hints[field.name], *typing.get_args(hints[field.name])):
            if inspect.isclass(kind) and kind.__module__.startswith("hf_paged."):
                found |= {kind, *kind.__subclasses__()}
    found = found - {Grammar, Matcher} | {AnyGrammar, AnyMatcher}
    found -= {StepFeature, *StepFeature.__subclasses__()}  # of the whole engine: see `HOOKS`
    return found - {Sequence, Session, VersionRun}  # the last is a pair of numbers


def functions_of(kind: type) -> list[str]:
    kinds = (FunctionType, property, cached_property)
    made = ("_asdict", "_replace") if issubclass(kind, tuple) else ()  # by NamedTuple
    return [name for name, value in vars(kind).items()
            if isinstance(value, kinds) and not name.startswith("__") and name not in made]


# What runs before a request is queued, in its caller's own thread: there it raises.
AT_ADD = {(StopPolicy, "stream"),
          *((RequestSpec, name) for name in ("but", "with_options", "scoring_only"))}
# What a sharded model asks before a request is queued.
OF_RANKS = {(StopRule, "without_deadline"), (TextStopRule, "without_deadline")}
# The engine finds a request by these, which read fields only.
NAMES = {(Request, "request_id"), (Request, "is_open")}
CASES = sorted(((kind, name) for kind in own_classes() for name in functions_of(kind)), key=str)
CASES = [case for case in CASES if case not in AT_ADD | OF_RANKS | NAMES]


def takes_a_request(function: object) -> bool:
    return isinstance(function, FunctionType) and list(inspect.signature(function).parameters)[1:2] == ["request"]


PARTS = [importlib.import_module(f"{features.__name__}.{one.name}") for one in pkgutil.iter_modules(features.__path__)]
HOOKS = [(kind, name) for kind in StepFeature.__subclasses__() for name, function in vars(kind).items()
         if takes_a_request(function) and name not in ("uses", "admit")]  # which run in the caller's thread


@contextmanager
def breaking(monkeypatch, kind, name, is_victims):
    """The function raises when it is called for the victim; yields a list that grows with each such call."""
    value, calls = vars(kind)[name], []
    function = value.fget if isinstance(value, property) else value

    def broken(self, *args, **kwargs):
        if is_victims(args[0] if issubclass(kind, StepFeature) else self):
            calls.append(name)
            raise Broken(name)
        return function(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, property(broken) if isinstance(value, property) else broken)
        yield calls


def run(engine, before_steps=lambda ids: nullcontext(), interrupt_at=None, guesses=False):
    config = GenerationConfig(max_new_tokens=10, stop_strings=[STOP[0]], max_time=1e6)
    prompts = [{"prompt_token_ids": prompt, "output_token_ids": []} for prompt in PROMPTS]
    engine.grammar_of = lambda structured: AnyGrammar()
    asked = {"logprobs": 2, "prompt_logprobs": 2, "structured": {"regex": ".*"}}
    if guesses:  # which no request makes that follows a grammar
        del asked["structured"]
        config.prompt_lookup_num_tokens = 3
    ids = [engine.add_request(prompt, config, **asked, include_stop_str_in_output=False) for prompt in prompts]
    made, emitted, steps = {}, {i: [] for i in ids}, 0
    with before_steps(ids) as calls:
        while engine.has_unfinished():
            steps += 1
            if steps == interrupt_at:
                engine._core.dirty = True  # as an interrupt leaves it
            for output in engine.step():
                emitted[output.request_id] += output.new_token_ids
                if output.completion is not None:
                    made[output.request_id] = output.completion
                    if (output.completion.error or "").startswith("this request failed: "):  # in a step of its own
                        assert output.new_token_ids == []
    return [made[i] for i in ids], [emitted[i] for i in ids], calls


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_every_function_of_a_request_may_raise(monkeypatch, kind, name, overlap):
    """Enumerated from the classes that a request holds, and each is really called for the victim in this run."""
    model = tiny_model()
    engine = hf_paged.Engine(model, hf_paged.PagedConfig(overlap=overlap), byte_tokenizer())
    if kind is TextStopRule:  # the server's
        monkeypatch.setattr(engine, "stop_rule", lambda settings, _: TextStopRule(
            settings.stop_strings, engine.tokenizer, time.time() + 1e6))
    expected, _, _ = run(engine)

    def arm(ids):
        request = engine._core.requests[ids[VICTIM]]
        held = (request, request.text, request.text._stream, request.spec.stop, request.row,
                request.spec.previous, request.ending, request.top, request.prompt_top)
        mine = set(map(id, held))
        if kind is AnyGrammar:
            request.grammar = AnyGrammar()
        return breaking(monkeypatch, kind, name,
                        lambda owner: id(owner) in mine or owner is request.grammar or owner is request.matcher)

    made, emitted, calls = run(engine, arm, interrupt_at=4)
    assert calls, f"{kind.__name__}.{name} is not called in this test's steps"
    assert_only_the_victim_failed(made, emitted, expected)
    assert [c.token_ids for c in run(engine)[0]] == [c.token_ids for c in expected]
    assert_nothing_runs(engine)


def assert_only_the_victim_failed(made, emitted, expected):
    for number, completion in enumerate(made):
        if number == VICTIM:
            assert completion.finish_reason == "error"
            assert "Broken" in completion.error
            assert emitted[number] == completion.token_ids == expected[number].token_ids[: len(completion.token_ids)]
        else:
            before = expected[number]
            assert (completion.token_ids, completion.text) == (before.token_ids, before.text)
            assert (completion.finish_reason, completion.error) == (before.finish_reason, None)
            assert completion.logprobs == pytest.approx(before.logprobs, abs=1e-4)
            assert completion.prompt_logprobs[1:] == pytest.approx(before.prompt_logprobs[1:], abs=1e-4)
            assert emitted[number] == completion.token_ids


def assert_nothing_runs(engine):
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    assert engine.stats().num_free_blocks == engine.stats().num_blocks - 1
    assert not engine._core.features.active


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("kind", "name"), HOOKS, ids=lambda value: getattr(value, "__name__", value))
def test_every_hook_of_every_feature_may_raise(monkeypatch, kind, name, overlap):
    """Enumerated from the classes of features: a new one is in here with all that it does for one request."""
    routes = kind is RoutedExperts
    model = family_model("qwen3-moe") if routes else tiny_model()
    engine = hf_paged.Engine(model, hf_paged.PagedConfig(overlap=overlap, routed_experts=routes), byte_tokenizer())
    guesses = kind is Speculation
    expected, _, _ = run(engine, guesses=guesses)

    def arm(ids):
        request = engine._core.requests[ids[VICTIM]]
        return breaking(monkeypatch, kind, name, lambda owner: owner is request)

    made, emitted, calls = run(engine, arm, interrupt_at=4, guesses=guesses)
    assert calls, f"{kind.__name__}.{name} is not called in this test's steps"
    if name == "leave":  # the request has its completion by then
        assert [c.token_ids for c in made] == [c.token_ids for c in expected]
    else:
        assert_only_the_victim_failed(made, emitted, expected)
    assert_nothing_runs(engine)
    assert [c.token_ids for c in run(engine, guesses=guesses)[0]] == [c.token_ids for c in expected]


def test_what_a_step_does_for_one_request_is_a_hook_of_a_feature():
    """No other function of the step takes a request, so that the tests above see everything."""
    engine = loop, prepared_model, engine_state, session, lockstep, observer
    found = set()
    for module in (*engine, features, *PARTS):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                annotations = [argument.annotation for argument in arguments if argument.annotation]
                if any(isinstance(n, ast.Name) and n.id == "Request" for a in annotations for n in ast.walk(a)):
                    found.add(node.name)
    # What these do calls nothing that a request brought along.
    harmless = {"__init__", "has", "remove", "drop", "keep", "unfit", "_end_unfit", "uses", "_unguarded",
                "queued", "finished", "of", "_awaits_prompt", "_open_matcher"}
    of_hooks = {name for _, name in HOOKS} | {name for name in vars(StepFeature) if not name.startswith("_")}
    of_groups = {"_look", "started_over"}  # `_look` passes each request on through `attempt`
    assert found <= GUARDS | harmless | of_hooks | of_groups, found - GUARDS - harmless - of_hooks - of_groups


def test_a_tokenizer_that_fails_at_some_token_ends_the_request_that_made_it():
    tokenizer = byte_tokenizer()
    model = tiny_model()
    engine = hf_paged.Engine(model, hf_paged.PagedConfig(), tokenizer)
    with engine.session() as whole:
        ids = [engine.add(whole, RequestSpec(prompt, 8, seed=0)) for prompt in PROMPTS]
        made = {}
        while whole.unfinished():
            made |= {o.request_id: o.completion for o in engine.advance([whole])[0]}
        bad, own = made[ids[VICTIM]].token_ids, tokenizer.decode

        def decode(token_ids, **kwargs):
            if list(token_ids) == bad:
                raise Broken("this token")
            return own(token_ids, **kwargs)

        tokenizer.decode = decode
        again = [engine.add(whole, RequestSpec(prompt, 8, seed=0)) for prompt in PROMPTS]
        while whole.unfinished():
            made |= {o.request_id: o.completion for o in engine.advance([whole])[0]}
    for number, (before, after) in enumerate(zip(ids, again, strict=True)):
        assert made[after].token_ids == made[before].token_ids
        assert (made[after].finish_reason == "error") == (number == VICTIM)


@pytest.mark.parametrize("asks", [{}, {"logprobs": True, "prompt_logprobs": True}])
def test_a_step_that_ran_ahead_says_nothing_of_who_has_the_id_next(asks):
    """With overlap a finished request has a row in the step that is under way; its NaN and its scores are nobody's."""
    model = tiny_model()
    probe = hf_paged.Engine(model, hf_paged.PagedConfig())
    greedy = GenerationConfig(max_new_tokens=6)
    probe.add_request(PROMPTS[2], greedy, request_id="probe")
    while not (outputs := [o for o in probe.step() if o.completion is not None]):
        pass
    tokens = outputs[0].completion.token_ids
    eos = tokens[next(i for i in range(2, 6) if tokens[i] not in tokens[:i])]
    model.get_input_embeddings().weight.data[eos] = float("nan")  # what follows an EOS is never looked at
    engine = hf_paged.Engine(model, hf_paged.PagedConfig(overlap=True))
    beside = GenerationConfig(max_new_tokens=40, suppress_tokens=[eos])
    engine.add_request([token for token in PROMPTS[1] if token != eos], beside, request_id="background")
    ending, found = GenerationConfig(max_new_tokens=6, eos_token_id=eos), []
    engine.add_request(PROMPTS[2], ending, request_id="a", **asks)
    while engine.has_unfinished():
        for output in engine.step():
            if output.completion is not None and output.request_id == "a":
                found.append(output.completion)
                if len(found) < 3:
                    engine.add_request(PROMPTS[2], ending, request_id="a", **asks)
    assert [(c.finish_reason, c.token_ids) for c in found] == [("eos", tokens[: tokens.index(eos) + 1])] * 3
    assert all(c.logprobs is None or len(c.logprobs) == len(c.token_ids) for c in found)


MANAGED = [name for name in functions_of(BatchedRequest) if name != "copies"]  # made in the caller's thread


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", MANAGED)
def test_every_function_of_a_managers_request_may_raise(monkeypatch, name, streaming):
    """The manager's thread lives, the victim is told, the others get their tokens."""
    model = tiny_model()
    hf_paged.enable(model)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    expected = [out.generated_tokens for out in model.generate_batch(PROMPTS, config).values()]
    manager = model.init_continuous_batching(config)
    with breaking(monkeypatch, BatchedRequest, name, lambda request: request.request_id == "victim") as calls:
        ids = [manager.add_request(prompt, request_id="victim" if number == VICTIM else None, streaming=streaming)
               for number, prompt in enumerate(PROMPTS)]
        manager.start()
        for number, request_id in enumerate(ids):
            *_, output = manager.request_id_iter(request_id)
            if number == VICTIM and calls:
                assert output.status is RequestStatus.FAILED
                assert output.error
            else:
                assert output.generated_tokens == expected[number]
        assert calls or (name == "output" and not streaming)
        assert manager.is_running()
        assert manager.background_thread_status.fatal_error is None
    manager.stop()
    assert_idle(model)
