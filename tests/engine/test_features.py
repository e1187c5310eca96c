"""Features: a request meets those that it uses, at the points of a step that they ask for, and no others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support import byte_tokenizer, random_prompts, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged.engine import features, loop
from hf_paged.engine.features import StepFeature
from hf_paged.engine.features.adapters import Adapters
from hf_paged.engine.features.deadlines import Deadlines
from hf_paged.engine.features.drafts import Speculation
from hf_paged.engine.features.feature_set import FeatureSet
from hf_paged.engine.features.grammars import StructuredOutput
from hf_paged.engine.features.kernel_waits import KernelWaits
from hf_paged.engine.features.log_probs import LogProbs
from hf_paged.engine.features.routed_experts import RoutedExperts
from hf_paged.engine.features.stop_rules import StopRules
from hf_paged.engine.features.streaming import Streaming
from hf_paged.engine.features.text import Text
from hf_paged.engine.features.versions import Versions
from hf_paged.options.request_spec import RequestSpec

OF_A_STEP = {"ends", "take", "committed", "before", "drafts", "samples_late", "masks", "due", "model_may_differ"}


@pytest.fixture
def engine():
    model = tiny_model()
    hf_paged.enable(model)
    yield hf_paged.get_engine(model)
    hf_paged.disable(model)


def used(engine, session, **settings):
    """The features that a request with these settings uses."""
    key = engine.add(session, RequestSpec(random_prompts([9])[0], 4, **settings, seed=0))
    return {type(feature) for feature in engine._core.requests[key].features}


@pytest.mark.parametrize(("settings", "feature"), [
    ({"timeout": 100.0}, Deadlines), ({"logprobs": "raw"}, LogProbs), ({"prompt_logprobs": True}, LogProbs),
    ({"stop_token_ids": (5,)}, Text), ({"include_stop_str_in_output": False}, Text),
    ({"skip_special_tokens": False}, Text), ({"draft_tokens": 3}, Speculation),
    ({"max_time": 100.0}, StopRules), ({}, None),
])
def test_a_request_meets_the_features_that_its_settings_ask_for(engine, settings, feature):
    with engine.session(text=False) as session:
        assert used(engine, session, **settings) == {Versions} | ({feature} if feature else set())


def test_what_is_streamed_or_is_text_is_the_sessions(engine):
    with engine.session(stream=True, text=True) as session:
        assert used(engine, session) == {Versions, Streaming, Text}


def test_a_request_that_uses_a_feature_brings_its_hooks_and_takes_them_along(engine):
    core = engine._core
    with engine.session(text=False) as session:
        used(engine, session)
        assert not any(core.features.having[hook] for hook in (*OF_A_STEP, "tokens"))
        used(engine, session, logprobs="raw")
        assert core.features.having["tokens"] == (core.features[LogProbs],)
        while session.unfinished():
            engine.advance([session])
    assert core.features.active == () and not any(core.features.having.values())


def test_a_plain_step_calls_no_hook(engine, monkeypatch):
    """Nor any function of a feature, but where the request comes and goes."""
    called = []
    for kind in StepFeature.__subclasses__():
        for name in kind.hooks & OF_A_STEP:
            monkeypatch.setattr(kind, name, lambda *_, name=name: called.append(name))
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    engine.model.generate(**byte_tokenizer()("abc", return_tensors="pt"), generation_config=config)
    assert not called


def test_hooks_are_what_the_class_defines():
    class Silent(StepFeature):
        def uses(self, request):
            return True

    class Late(Silent):
        def due(self):
            return ()

    assert Silent.hooks == {"uses"} and Late.hooks == {"uses", "due"}


def test_after_an_interrupt_the_set_holds_the_requests_of_the_table(engine):
    """Also where it came between the table and the set."""
    core = engine._core
    with engine.session(text=False) as session:
        used(engine, session, logprobs="raw")
        kept, lost = [*core.requests.values()], core.make_request(
            RequestSpec([1, 2], 4, timeout=9.0, seed=0, request_id="lost"), session)
        core.features.add(lost)
        core.features[LogProbs].requests.clear()
        core.features.keep(kept)
        assert core.features.active == (core.features[Versions], core.features[LogProbs])
        assert list(core.features[LogProbs].requests.values()) == kept and not core.features[Deadlines].requests


def test_the_loop_names_no_feature_and_stays_short():
    source = Path(loop.__file__).read_text()
    assert len(source.splitlines()) <= 450
    code = ast.unparse(ast.parse(source)).lower()
    code = code[code.index("class enginecore"):]
    names = {kind.__name__.lower() for kind in StepFeature.__subclasses__()} - {"text"}
    words = ("logprob", "grammar", "matcher", "stop_string", "deadline", "adapter", "speculat", "stream.")
    assert not [word for word in (*names, *words) if word in code.replace("follow_stream", "")]


def test_all_features_of_the_folder_are_in_the_set(engine):
    """One that is not there would never be met."""
    assert {type(engine._core.features[kind]) for kind in StepFeature.__subclasses__()
            if kind.__module__.startswith(features.__name__)} == {
        Adapters, Deadlines, KernelWaits, LogProbs, RoutedExperts, Speculation, StopRules, Streaming, StructuredOutput,
        Text, Versions}
    assert isinstance(engine._core.features, FeatureSet)
