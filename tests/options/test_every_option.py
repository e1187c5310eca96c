"""Each option of `table.OPTIONS` at each entry: stock's tokens, or an error that names the option."""

from __future__ import annotations

import asyncio
import copy
import functools
import warnings

import pytest
import torch
from option_cases import CASES, FIELDS, FREE, QUIET, VALUES, inputs_of, options_of
from support import (
    assert_idle,
    assert_same_tensor,
    batch,
    byte_generator,
    eos_ids,
    num_calls,
    outcome,
    tiny_model,
)
from transformers import GenerationConfig

import hf_paged
from hf_paged.options import table

OF_REQUESTS = (table.NATIVE, table.INERT)
SAMPLING = ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")  # their effect shows against plain sampling
stock_model = functools.cache(tiny_model)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_every_option_has_a_value():
    """A row that comes new to the table, or a field of a newer transformers, needs a value in option_cases.py."""
    arguments = table.names(table.ARGUMENT)  # tests/engine/test_request_options.py
    assert sorted([*VALUES, *QUIET]) == sorted(set(table.OPTIONS) - set(arguments))
    assert set(FIELDS) <= set(table.OPTIONS)
    assert set(CASES) == set(table.names(table.NATIVE))


@functools.cache
def of_stock(name):
    """What stock makes of the batch with this option."""
    return outcome(lambda: stock_model().generate(**inputs_of(name), **options_of(name)))


@functools.cache
def rows_of_stock(name):
    """What stock makes of each prompt alone, as requests end: up to the EOS."""
    options, model, rows = options_of(name), stock_model(), []
    for prompt in prompts_of(name):
        made = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
        for row in made[:, len(prompt) :].tolist():
            ends = [index + 1 for index, token in enumerate(row) if token in eos_ids(options, model)]
            rows.append(row[: ends[0]] if ends else row)
    return rows


def prompts_of(name):
    inputs = inputs_of(name)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    return [ids[seen.bool()].tolist() for ids, seen in zip(inputs["input_ids"], mask, strict=True)]


@pytest.fixture(scope="module")
def shared():
    return tiny_model()


@pytest.fixture
def model(shared):
    """Enabled, with a generation config of the test's own."""
    before, shared.generation_config = shared.generation_config, copy.deepcopy(shared.generation_config)
    yield hf_paged.enable(shared)
    hf_paged.disable(shared)
    shared.generation_config = before


def assert_stocks(model, name, call):
    """Stock's tokens or stock's exception; a fallback warns once, and only then the engine makes no token."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind, actual = outcome(call)
    expected_kind, expected = of_stock(name)
    assert kind == expected_kind, (actual, expected)
    if kind == "raised":
        assert actual is expected
        return
    assert_same_tensor(actual, expected)
    fell_back = sum(issubclass(warning.category, hf_paged.FallbackWarning) for warning in caught)
    assert (fell_back, hf_paged.get_engine(model).stats().num_generated_tokens > 0) in ((0, True), (1, False))
    assert_idle(model)


@pytest.mark.parametrize("name", FIELDS)
def test_generate(model, name):
    """Natively, in lockstep or in stock after a warning, as `explain` says."""
    assert_stocks(model, name, lambda: model.generate(**inputs_of(name), **options_of(name)))
    kind, expected = of_stock(name)
    if kind == "raised":
        return
    foreseen = hf_paged.explain(model, **inputs_of(name), **options_of(name)).path
    assert num_calls(model) == {foreseen: 1}
    # Stock counts the n-grams of padding, which requests do not have.
    assert foreseen == "native" or refused(name) or name == "no_repeat_ngram_size"
    if name in VALUES:
        kwargs = {"max_new_tokens": 10, "do_sample": name in SAMPLING}
        _, plain = outcome(lambda: stock_model().generate(**inputs_of(name), **kwargs))
        assert expected.shape != plain.shape or not torch.equal(expected, plain), "the value has no effect"


@pytest.mark.parametrize("name", [name for name in FIELDS if name in VALUES])
def test_the_models_generation_config(model, name):
    """As fine-tuned checkpoints carry options."""
    options = options_of(name)
    kwargs = {key: options.pop(key) for key in ("tokenizer",) if key in options}
    for key, value in options.items():
        setattr(model.generation_config, key, value)
    assert_stocks(model, name, lambda: model.generate(**inputs_of(name), **kwargs))


@pytest.mark.parametrize("name", [name for name in FIELDS if table.OPTIONS[name].path != table.STOCK])
def test_lockstep(model, lockstep_only, name):
    """Stock's loop applies the option, over the engine's forwards."""
    assert_stocks(model, name, lambda: model.generate(**inputs_of(name), **options_of(name)))
    assert "native" not in num_calls(model)


def refused(name):
    """Options that a request cannot have."""
    return [key for key, value in options_of(name).items() if key in table.OPTIONS
            and table.OPTIONS[key].path not in OF_REQUESTS and value not in table.OPTIONS[key].neutral]

generator = pytest.fixture(byte_generator, scope="module", name="generator")


@pytest.mark.parametrize("name", FIELDS)
def test_requests_of_a_generator(generator, name):
    """`generate`, and of native options `agenerate` and `stream`."""
    prompts, options = prompts_of(name), options_of(name)
    config = GenerationConfig()
    for key in options.keys() - {"tokenizer"}:
        setattr(config, key, options[key])

    def streamed():
        made = {}
        for index, output in generator.stream(prompts, config):
            made.setdefault(index, []).extend(output.new_token_ids)
        return [made[index] for index in sorted(made)]

    calls = [lambda: [made.token_ids for made in generator.generate(prompts, config)]]
    if table.OPTIONS[name].path == table.NATIVE:
        calls += [lambda: [made.token_ids for made in asyncio.run(generator.agenerate(prompts, config))], streamed]
    for call in calls:
        if named := refused(name):
            with pytest.raises(ValueError, match="|".join(named)):
                call()
        else:
            assert call() == rows_of_stock(name)


@pytest.fixture(scope="module")
def manager():
    model = hf_paged.enable(tiny_model())
    with model.continuous_batching_context_manager(GenerationConfig(do_sample=False)) as manager:
        yield manager
    hf_paged.disable(model)


@pytest.mark.parametrize("name", FIELDS)
def test_continuous_batching(manager, name):
    """A request with an option that it cannot have fails alone, and says why."""
    options = options_of(name)
    options.pop("tokenizer", None)
    ids = [manager.add_request(prompt, **options) for prompt in prompts_of(name)]
    outputs = []
    for request_id in ids:
        children = [f"{request_id}__child#{child}" for child in range(options.get("num_return_sequences", 1) - 1)]
        outputs += [list(manager.request_id_iter(one))[-1] for one in (*children, request_id)]
    if name == "stop_strings":  # transformers hands a manager no tokenizer
        assert all("stop_strings" in output.error for output in outputs)
    elif named := refused(name):
        assert all(any(key in output.error for key in named) for output in outputs)
    else:
        assert [output.generated_tokens for output in outputs] == rows_of_stock(name)


def test_the_tokens_that_values_name_are_stocks():
    assert stock_model().generate(**batch([20, 13, 5]), max_new_tokens=4)[:, 20:].tolist() == FREE
