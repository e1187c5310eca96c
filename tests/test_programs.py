"""`assert_program` fails where a program's calls take another path, bring other results, or keep others waiting."""

from __future__ import annotations

import itertools

import pytest
from programs import assert_program, watched_calls
from support import batch, tiny_model
from transformers import LogitsProcessor, LogitsProcessorList

import hf_paged

INPUTS = batch([12, 7]) | {"max_new_tokens": 80}


class Own(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return -scores


@pytest.fixture
def model():
    model = tiny_model()
    yield model
    hf_paged.disable(model)


def native(model):
    return model.generate(**INPUTS).tolist()


def lockstep(model):
    return model.generate(**INPUTS, logits_processor=LogitsProcessorList([Own()])).tolist()


@pytest.mark.parametrize("program", [native, lockstep])
def test_programs_of_both_paths(program, model):
    assert_program(model, lambda: [program(model), program(model)], [program.__name__] * 2)


@pytest.mark.parametrize(("program", "path"), [(native, "lockstep"), (lockstep, "native")])
def test_another_path_is_noticed(program, path, model):
    with pytest.raises(AssertionError, match=program.__name__):
        assert_program(model, lambda: program(model), [path])


def test_another_result_is_noticed(model):
    runs = itertools.count()
    with pytest.raises(AssertionError):
        assert_program(model, lambda: [next(runs), native(model)], ["native"])


@pytest.mark.parametrize("program", [native, lockstep])
def test_calls_that_keep_others_waiting_are_noticed(program, model):
    def alone():
        if not hf_paged.is_enabled(model):
            return program(model)
        with hf_paged.get_engine(model)._held():
            return program(model)

    with pytest.raises(AssertionError, match="short"):
        assert_program(model, alone, [program.__name__])


def test_the_reason_for_stock_is_kept(model):
    hf_paged.enable(model)
    with watched_calls() as calls, pytest.warns(hf_paged.FallbackWarning):
        model.generate(**INPUTS, cache_implementation="static")
    [path] = calls.paths
    assert path.startswith("stock: ") and calls.under_way == []
