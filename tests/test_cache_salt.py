"""Requests of equal cache salts share cached prefixes; others never do, whichever way they come."""

from __future__ import annotations

import pytest
import torch
from support import run_out, tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_paged
from hf_paged.integration.paths import CALL_SALT, within
from hf_paged.options.arguments import salt_digest

PROMPT = list(range(3, 3 + 5 * 16 + 4))
FULL = 5 * 16  # tokens of the prompt that lie in full blocks
SALTS = (None, "one", "other", "\ud800")
GREEDY = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def generator():
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=128) as generator:
        yield generator


def by_engine(generator, salt):
    engine = generator.engine
    engine.add_request(PROMPT, GenerationConfig(**GREEDY), cache_salt=salt)
    while engine.has_unfinished():
        outputs = engine.step()
    return outputs[-1].completion.token_ids


def by_generate(generator, salt):
    return generator.generate(PROMPT, cache_salt=salt, **GREEDY)[0].token_ids


def by_stream(generator, salt):
    return [token for _, output in generator.stream(PROMPT, cache_salt=salt, **GREEDY)
            for token in output.new_token_ids]


def by_tensors(generator, salt, **kwargs):
    made = generator.generate(input_ids=torch.tensor([PROMPT]), cache_salt=salt, **(GREEDY | kwargs))
    return made[0, len(PROMPT) :].tolist()


def by_lockstep(generator, salt):
    def as_it_is(ids, scores):
        return scores

    return by_tensors(generator, salt, logits_processor=[as_it_is])


def by_manager(generator, salt):
    manager = generator.model.init_continuous_batching(GenerationConfig(**GREEDY), ContinuousBatchingConfig())
    with manager_runs(manager):
        request_id = manager.add_request(PROMPT, cache_salt=salt)
        return manager.get_result(request_id, timeout=60).generated_tokens


class manager_runs:
    def __init__(self, manager):
        self.manager = manager

    def __enter__(self):
        self.manager.start()

    def __exit__(self, *exc_info):
        self.manager.stop(block=True)


WAYS = [by_engine, by_generate, by_stream, by_tensors, by_lockstep, by_manager]


@pytest.mark.parametrize("way", WAYS)
def test_only_equal_salts_share(generator, way):
    """The first of every salt computes its whole prompt, the second only what lies behind the last full block; the
    tokens are the same. A salt of another way of calling is the same salt."""
    engine = generator.engine

    def computed(way, salt):
        before = engine.stats().num_prefill_tokens
        assert way(generator, salt) == expected
        return engine.stats().num_prefill_tokens - before

    expected = by_generate(generator, "for the tokens")
    firsts = [computed(way, salt) for salt in SALTS]
    seconds = [computed(way, salt) for salt in SALTS]
    assert set(firsts) == {len(PROMPT)}
    assert set(seconds) == {len(PROMPT) - FULL}
    assert computed(by_generate, "one") == computed(by_engine, None) == len(PROMPT) - FULL


def test_a_completion_shows_nothing_of_anothers_prompt(generator):
    def cached(**kwargs):
        return [c.num_cached_tokens for c in generator.generate([PROMPT, PROMPT, PROMPT], **GREEDY, **kwargs)]

    assert cached(cache_salt=["one", "other", None]) == [0, 0, 0]  # in one step, too
    assert cached(cache_salt=["third", "third", "one"]) == [0, FULL, FULL]
    assert cached() == [FULL, FULL, FULL]
    assert cached(cache_salt="fourth") == [0, FULL, FULL]


@pytest.mark.parametrize("change", ["interrupt", "constant"])
def test_salts_outlast_a_restart(generator, change):
    """After an interrupt, or a change of the model, running requests start over under their own salts."""
    engine = generator.engine
    for salt in ("one", "other"):
        engine.add_request(PROMPT, GenerationConfig(**GREEDY | {"max_new_tokens": 40}), cache_salt=salt)
    for _ in range(3):
        engine.step()
    if change == "interrupt":
        engine._core.dirty = True
    else:
        generator.model.model.norm.variance_epsilon *= 2
    run_out(engine)
    cached = [c.num_cached_tokens for c in
              generator.generate([PROMPT] * 3, cache_salt=["one", "other", "third"], **GREEDY)]
    assert cached == [FULL, FULL, 0]


@pytest.mark.parametrize(("salt", "error"), [("", ValueError), (b"one", TypeError), (1, TypeError), (True, TypeError)])
def test_what_is_no_salt_is_refused(generator, salt, error):
    """Before anything runs, by an error that names the argument."""
    for way in (by_engine, by_generate, by_stream, by_tensors):
        with pytest.raises(error, match="cache_salt"):
            way(generator, salt)
    manager = generator.model.init_continuous_batching(GenerationConfig(**GREEDY))
    with pytest.raises(error, match="cache_salt"):
        manager.add_request(PROMPT, cache_salt=salt)
    with pytest.raises(ValueError, match="cache_salt: a list of 2 for 1 prompts"):
        generator.generate(PROMPT, cache_salt=["one", "other"], **GREEDY)
    assert engine_is_idle(generator.engine)


def engine_is_idle(engine):
    stats = engine.stats()
    return stats.num_running == stats.num_waiting == 0


def test_generate_of_an_enabled_model_has_the_salt_of_its_context():
    """What the server uses for requests that run by `model.generate`."""
    model = hf_paged.enable(tiny_model(), num_blocks=128)
    ids = torch.tensor([PROMPT])

    def computed(salt):
        before = hf_paged.get_engine(model).stats().num_prefill_tokens
        with within(CALL_SALT, salt_digest(salt)):
            model.generate(ids, **GREEDY)
        return hf_paged.get_engine(model).stats().num_prefill_tokens - before

    assert [computed(salt) for salt in ("one", "other", "one", None)] == [
        len(PROMPT), len(PROMPT), len(PROMPT) - FULL, len(PROMPT)
    ]
