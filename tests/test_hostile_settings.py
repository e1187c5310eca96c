"""One caller's settings, however odd, end that caller's request at most: everybody else gets stock's tokens."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import Any

import pytest
import torch
from hostile_values import FIELDS, SAMPLING, values_of
from support import assert_idle, assert_same_tensor, batch, random_prompts, run_out, stock_generate, tiny_model
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

import hf_paged

DRAWN = (*SAMPLING, "do_sample")
PROMPTS = random_prompts([21, 9], seed=5)
INNOCENT = {"max_new_tokens": 12, "eos_token_id": None}


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    yield model
    hf_paged.disable(model)


@pytest.fixture(scope="module")
def stock():
    return tiny_model()


@pytest.fixture(scope="module")
def eos(model):
    """A token that greedy search comes to soon, so that no length makes a call endless."""
    return stock_generate(model, **batch([21], seed=5), max_new_tokens=6)[0, -1].item()


@pytest.fixture(scope="module")
def innocent(model):
    return stock_generate(model, **batch([9], seed=6), **INNOCENT)


@pytest.fixture(autouse=True)
def _quiet(model):
    hf_paged.enable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    assert_idle(model)


def hostile_config(field: str, value: Any, eos: int) -> GenerationConfig:
    """The field as it stands, behind the back of the config's own checks."""
    config = GenerationConfig(max_new_tokens=6, eos_token_id=eos, do_sample=field in SAMPLING)
    setattr(config, field, value)
    return config


def outcome(call: Any) -> tuple[str, Any]:
    torch.manual_seed(0)
    try:
        return "returned", call()
    except Exception as error:
        return "raised", type(error)


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
def test_generate_is_stocks_and_harms_nobody(model, stock, innocent, eos, field):
    """Stock's tokens or stock's exception; calls of another thread beside them never notice."""
    def call(model, value):
        kwargs = {"max_new_tokens": 6, "eos_token_id": eos, "do_sample": field in SAMPLING} | {field: value}
        return outcome(lambda: model.generate(**batch([21], seed=5), **kwargs))

    values, found = values_of(field), []
    thread = threading.Thread(target=lambda: found.extend(call(model, value) for value in values))
    thread.start()
    while thread.is_alive():
        assert_same_tensor(model.generate(**batch([9], seed=6), **INNOCENT), innocent)
    assert len(found) == len(values)
    for value, actual in zip(values, found, strict=True):
        expected = call(stock, value)
        assert actual[0] == expected[0], (field, value, actual, expected)
        if actual[0] == "raised":
            assert actual[1] is expected[1], (field, value)
        elif isinstance(actual[1], torch.Tensor) and field not in DRAWN:
            assert torch.equal(actual[1], expected[1]), (field, value)


@pytest.mark.parametrize("field", FIELDS)
def test_engine_names_what_it_refuses_and_harms_nobody(model, innocent, eos, field):
    """`add_request` raises a ValueError or TypeError before anything is queued, or the request ends by itself."""
    engine = hf_paged.get_engine(model)
    greedy = GenerationConfig(**INNOCENT)
    ids = [engine.add_request(batch([9], seed=6)["input_ids"][0], greedy)]
    for value in values_of(field):
        with contextlib.suppress(ValueError, TypeError):
            engine.add_request(PROMPTS[0], hostile_config(field, value, eos))
    made = {}
    made |= {o.request_id: o.completion for o in run_out(engine) if o.completion is not None}
    assert made[ids[0]].token_ids == innocent[0, 9:].tolist()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_manager_lives_on(model, innocent, eos, streaming):
    """Every field and value at once in one running manager, with innocent requests between them."""
    manager = model.init_continuous_batching(GenerationConfig(do_sample=False, **INNOCENT))
    manager.start()
    expected, prompt = innocent[0, 9:].tolist(), batch([9], seed=6)["input_ids"][0].tolist()
    innocents, hostile = [], []
    try:
        for field in FIELDS:
            innocents.append(manager.add_request(prompt, streaming=streaming))
            for value in values_of(field):
                options = {"max_new_tokens": 6, "eos_token_id": eos, "do_sample": field in SAMPLING} | {field: value}
                try:
                    hostile.append(manager.add_request(PROMPTS[0], streaming=streaming, **options))
                except (ValueError, TypeError):
                    continue  # before anything is queued
        for request_id in innocents:
            *_, output = manager.request_id_iter(request_id)
            assert output.generated_tokens == expected
        for request_id in hostile:
            *_, output = manager.request_id_iter(request_id)
            assert output.status in (RequestStatus.FINISHED, RequestStatus.FAILED)
        assert manager.is_running()
        assert manager.background_thread_status.fatal_error is None
    finally:
        manager.stop(hard_stop=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_generator_and_generate_batch_name_what_they_refuse(model, innocent, eos, part):
    """A call that is refused runs nothing; one that is not gives the innocent prompt its tokens."""
    prompts = [batch([9], seed=6)["input_ids"][0].tolist(), PROMPTS[0]]
    expected, plain = innocent[0, 9:].tolist(), GenerationConfig(do_sample=False, **INNOCENT)
    hf_paged.disable(model)
    # Strict: transformers' own continuous batching, which some would go to, takes what memory there is.
    with hf_paged.PagedGenerator(model, num_blocks=200, strict=True) as generator:
        for field in FIELDS[part::4]:
            for value in values_of(field)[part % 2 :: 2]:
                configs = [plain, hostile_config(field, value, eos)]
                try:
                    made = generator.generate(prompts, configs, use_tqdm=False)
                except (ValueError, TypeError):
                    continue
                assert made[0].token_ids == expected
        for field in FIELDS[part::4]:
            for value in values_of(field)[::6]:
                config = hostile_config(field, value, eos)
                outcome(lambda config=config: model.generate_batch(prompts, config))
        assert model.generate_batch(prompts, plain)["req_0"].generated_tokens == expected
    hf_paged.enable(model)
    assert_same_tensor(model.generate(**batch([9], seed=6), **INNOCENT), innocent)
